//! Daemons that are exiting but still have I/O in flight, for example after SIGKILL.

use std::time::{Duration, Instant};
use std::{fs, io};

use super::StateDir;

/// How long an attach waits for a killed daemon to exit, which it does when its I/O in flight has completed,
/// and then for the image to become free.
pub const DYING_WAIT: Duration = Duration::from_secs(30);

/// How far a process is on its way to the exit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProcessState {
    Running,
    /// Stopped by a signal. A process that a debugger has stopped counts as running.
    Stopped,
    /// Its main thread is exiting, or has exited before the others, or SIGKILL is pending. The kernel may not have closed
    /// its files yet.
    Dying,
    /// There is no such process, or only a zombie without other threads: it has no open files, no matter how late its
    /// parent waits for it.
    Exited,
}

impl ProcessState {
    /// The state of the process `pid`, from its files in /proc: the lock of a name shows that it has an owner, but not
    /// whether the owner was killed or stopped. A process that this one is not permitted to inspect counts as running.
    pub fn of(pid: u32) -> ProcessState {
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}"));
        match read("status") {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => ProcessState::Running,
            status => ProcessState::parse(&status.unwrap_or_default(), &read("stat").unwrap_or_default()),
        }
    }

    /// `status` is the text of proc_pid_status(5), `stat` that of proc_pid_stat(5).
    fn parse(status: &str, stat: &str) -> ProcessState {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim();
        let is_killed = |signals| u64::from_str_radix(field(signals), 16).is_ok_and(|set| set >> 8 & 1 != 0);
        match field("State:").chars().next() {
            None => ProcessState::Exited,
            Some('Z' | 'X') if field("Threads:") == "1" => ProcessState::Exited,
            Some('Z' | 'X') => ProcessState::Dying,
            _ if is_killed("SigPnd:") || is_killed("ShdPnd:") || is_exiting(stat) => ProcessState::Dying,
            Some('T') => ProcessState::Stopped,
            _ => ProcessState::Running,
        }
    }
}

impl StateDir {
    /// The process that holds the name, as recorded in its lock file.
    pub fn holder(&self, name: &str) -> Option<u32> {
        fs::read_to_string(self.file(name, ".lock")).ok()?.trim().parse().ok()
    }

    /// Waits until the daemon of `name`, if it was killed, has exited; at most [`DYING_WAIT`].
    pub fn wait_for_dying(&self, name: &str) {
        let begin = Instant::now();
        let is_dying = || self.holder(name).is_some_and(|pid| ProcessState::of(pid) == ProcessState::Dying);
        while is_dying() && begin.elapsed() < DYING_WAIT {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Whether `stat` (proc_pid_stat(5)) shows that the main thread is exiting.
fn is_exiting(stat: &str) -> bool {
    // `PF_EXITING` of linux/sched.h.
    const EXITING: u32 = 4;
    // The name of the process is in parentheses and may contain anything. After its last parenthesis come the
    // state and five numbers, then the flags.
    let flags = stat.rsplit_once(") ").and_then(|(_, fields)| fields.split(' ').nth(6)?.parse::<u32>().ok());
    flags.is_some_and(|flags| flags & EXITING != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::scratch;
    use crate::state::{Fate, Found};
    use blkq::testing::wait_until;

    // Contract: detach
    #[test]
    fn a_killed_process_is_distinguished_from_a_live_one() {
        let status = |state, threads, own, shared| {
            format!("Name:\tblkq\nState:\t{state}\nThreads:\t{threads}\nSigPnd:\t{own}\nShdPnd:\t{shared}\n")
        };
        let none = "0000000000000000";
        use ProcessState::{Dying, Exited, Running, Stopped};
        for (state, threads, own, shared, expected) in [
            ("S (sleeping)", 4, none, none, Running),
            ("T (stopped)", 4, none, "0000000000004200", Stopped),
            ("T (stopped)", 4, none, none, Stopped),
            ("t (tracing stop)", 4, none, none, Running),
            ("Z (zombie)", 4, none, none, Dying),
            ("Z (zombie)", 1, none, "0000000000000100", Exited),
            ("D (disk sleep)", 4, "0000000000000100", none, Dying),
            ("D (disk sleep)", 1, none, "0000000000004100", Dying),
        ] {
            let status = status(state, threads, own, shared);
            assert_eq!(ProcessState::parse(&status, ""), expected, "{status}");
        }
        assert_eq!(ProcessState::parse("", ""), Exited);
        assert_eq!(ProcessState::of(std::process::id()), Running);
        let own = fs::read_to_string("/proc/self/stat").unwrap();
        assert!(!is_exiting(&own) && !is_exiting(""));
        assert!(is_exiting("7 (a) b) D 1 7 7 0 -1 4194308 60 0 0"));
        assert!(!is_exiting("7 (a) 4 4 4) S 1 7 7 0 -1 4194304 60 0 0"));
    }

    /// The parent of the zombie is this test, which waits for it only at the end.
    #[test]
    fn a_zombie_is_not_waited_for() {
        let dir = scratch("zombie");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        fs::write(dir.file("a", ".lock"), format!("{}\n", child.id())).unwrap();
        let status = format!("/proc/{}/status", child.id());
        wait_until("it is a zombie", || fs::read_to_string(&status).unwrap().contains("State:\tZ"));
        let begin = Instant::now();
        dir.wait_for_dying("a");
        assert!(begin.elapsed() < DYING_WAIT);
        let Ok(Found::Remains(remains)) = dir.inspect("a") else { panic!("the device still has an owner") };
        assert_eq!((remains.state, remains.pid), (Fate::Dead, Some(child.id())));
        child.wait().unwrap();
        fs::remove_dir_all(&dir.0).unwrap();
    }
}

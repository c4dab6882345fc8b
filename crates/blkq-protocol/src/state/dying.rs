//! Daemons that are exiting but still have I/O in flight, for example after SIGKILL.

use std::fs;
use std::time::{Duration, Instant};

use super::StateDir;

/// How long an attach waits for a killed daemon to exit, which it does when its I/O in flight has completed,
/// and then for the image to become free.
pub const DYING_WAIT: Duration = Duration::from_secs(30);

impl StateDir {
    /// The process that holds the name, as recorded in its lock file.
    pub fn holder(&self, name: &str) -> Option<u32> {
        fs::read_to_string(self.file(name, ".lock")).ok()?.trim().parse().ok()
    }

    /// Whether the daemon of `name` is dying ([`is_process_dying`]). It may have I/O in flight.
    pub(super) fn holder_is_dying(&self, name: &str) -> bool {
        let pid = fs::read_to_string(self.file(name, ".lock")).ok();
        pid.is_some_and(|pid| is_process_dying(&pid))
    }

    /// Waits until the daemon of `name`, if it was killed, has exited; at most [`DYING_WAIT`].
    pub fn wait_for_dying(&self, name: &str) {
        let begin = Instant::now();
        while self.holder_is_dying(name) && begin.elapsed() < DYING_WAIT {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Whether the whole process has exited and is a zombie only because its parent has not waited for it. The
/// kernel has closed all its files.
pub(super) fn has_exited(pid: u32) -> bool {
    is_exited(&fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default())
}

/// Whether a signal has stopped the process. A process that a debugger has stopped does not count.
pub fn is_process_stopped(pid: u32) -> bool {
    is_stopped(&fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default())
}

fn is_stopped(status: &str) -> bool {
    field(status, "State:").starts_with('T')
}

fn field<'a>(status: &'a str, name: &str) -> &'a str {
    status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim()
}

fn is_exited(status: &str) -> bool {
    field(status, "State:").starts_with(['Z', 'X']) && field(status, "Threads:") == "1"
}

/// Whether the process whose ID is the text of a lock or pid file is exiting or was killed, and has not
/// exited yet.
pub fn is_process_dying(pid: &str) -> bool {
    let Ok(pid) = pid.trim().parse::<u32>() else { return false };
    let of_process = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    is_dying(&of_process("status"), &of_process("stat"))
}

/// Whether `status` (proc_pid_status(5)) and `stat` (proc_pid_stat(5)) describe a process that is exiting:
/// one of its threads has exited, or SIGKILL is pending. A zombie without other threads does not count: it
/// has no open files, no matter how late its parent waits for it.
fn is_dying(status: &str, stat: &str) -> bool {
    let killed = |signals: &str| u64::from_str_radix(signals, 16).is_ok_and(|set| set >> 8 & 1 != 0);
    if field(status, "State:").starts_with(['Z', 'X']) {
        return !is_exited(status);
    }
    killed(field(status, "SigPnd:")) || killed(field(status, "ShdPnd:")) || is_exiting(stat)
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
        assert!(!is_dying(&status("S (sleeping)", 4, none, none), "") && !is_dying("", ""));
        assert!(!is_dying(&status("T (stopped)", 4, none, "0000000000004200"), ""));
        assert!(is_stopped(&status("T (stopped)", 4, none, none)));
        assert!(!is_stopped(&status("t (tracing stop)", 4, none, none)) && !is_stopped(""));
        assert!(is_dying(&status("Z (zombie)", 4, none, none), ""));
        assert!(!is_dying(&status("Z (zombie)", 1, none, "0000000000000100"), ""));
        assert!(is_dying(&status("D (disk sleep)", 4, "0000000000000100", none), ""));
        assert!(is_dying(&status("D (disk sleep)", 1, none, "0000000000004100"), ""));
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

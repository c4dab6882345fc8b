//! Child processes of the benchmark. None of them outlives this process.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

use crate::Result;
use crate::process::Usage;

/// How long a process may take to exit after SIGTERM, before it is killed.
const EXIT_WAIT: Duration = Duration::from_secs(5);
/// Interval of polls for the exit of a process.
pub const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// Interval of polls for the exit of a client that measures, which frequent polls would disturb.
const CLIENT_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The last line of standard error is searched in at most this number of bytes.
const ERRORS_BYTES_MAX: usize = 64 << 10;

/// A child process. Dropping it kills the process.
pub struct Child {
    pub process: std::process::Child,
    program: String,
    /// A memfd that receives the standard error of the process.
    errors: File,
    exited: Option<(ExitStatus, Usage)>,
}

impl Child {
    /// Fails with a [`std::io::Error`] if the command cannot be started.
    pub fn start(mut command: Command, stdout: Stdio) -> Result<Child> {
        let program = Path::new(command.get_program()).file_name().unwrap_or(OsStr::new("?"));
        let program = program.to_string_lossy().into_owned();
        let errors = File::from(memfd_create("errors", MemfdFlags::CLOEXEC)?);
        command.stdin(Stdio::null()).stdout(stdout).stderr(errors.try_clone()?);
        let die_with_parent =
            || set_parent_process_death_signal(Some(Signal::KILL)).map_err(std::io::Error::from);
        // SAFETY: between fork and exec, the closure makes one system call and allocates no memory.
        unsafe { command.pre_exec(die_with_parent) };
        Ok(Child { process: command.spawn()?, program, errors, exited: None })
    }

    pub fn pid(&self) -> i32 {
        self.process.id() as i32
    }

    /// A message with the last line of standard error.
    pub fn exit_message(&self) -> String {
        // Reads at an offset, because the process writes at the offset that the shared file description stores.
        let mut text = vec![0; ERRORS_BYTES_MAX];
        let from =
            self.errors.metadata().map_or(0, |file| file.len().saturating_sub(ERRORS_BYTES_MAX as u64));
        let length = self.errors.read_at(&mut text, from).unwrap_or_default();
        let text = String::from_utf8_lossy(&text[..length]);
        let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("(no message)");
        format!("{} exited: {}", self.program, last.trim())
    }

    /// The status and the total usage of the process if it has exited. No other thread waits for a child meanwhile.
    fn poll(&mut self) -> Option<(ExitStatus, Usage)> {
        if self.exited.is_none() {
            let before = Usage::of_children();
            let status = self.process.try_wait().ok().flatten();
            self.exited = status.map(|status| (status, Usage::of_children().since(before)));
        }
        self.exited
    }

    /// Fails with the last line of standard error if the process has exited.
    pub fn check(&mut self) -> Result {
        self.poll().map_or(Ok(()), |_| Err(self.exit_message().into()))
    }

    /// Waits up to `limit` until the process exits. Returns its status and its total usage.
    fn poll_until_exit(&mut self, limit: Duration, interval: Duration) -> Option<(ExitStatus, Usage)> {
        let until = Instant::now() + limit;
        loop {
            let exited = self.poll();
            if exited.is_some() || Instant::now() > until {
                return exited;
            }
            std::thread::sleep(interval);
        }
    }

    /// Waits up to `limit` until the process exits. Returns its total usage. Fails with the last line of
    /// standard error if the process fails.
    pub fn wait(mut self, limit: Duration) -> Result<Usage> {
        match self.poll_until_exit(limit, CLIENT_POLL_INTERVAL) {
            Some((status, usage)) if status.success() => Ok(usage),
            Some(_) => Err(self.exit_message().into()),
            None => Err(format!("{} has not exited within {limit:?}", self.program).into()),
        }
    }

    /// Sends SIGTERM, and SIGKILL after [`EXIT_WAIT`]. Returns the total usage, including threads that exited
    /// earlier.
    pub fn stop(mut self) -> Usage {
        // Fails only if the process has exited.
        let _ = kill_process(Pid::from_child(&self.process), Signal::TERM);
        loop {
            if let Some((_, usage)) = self.poll_until_exit(EXIT_WAIT, POLL_INTERVAL) {
                return usage;
            }
            let _ = self.process.kill();
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.exited.is_none() {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn the_error_of_a_failed_process_is_returned() {
        let child =
            Child::start(shell("echo first >&2; echo no such disk >&2; exit 3"), Stdio::null()).unwrap();
        let error = child.wait(Duration::from_secs(60)).unwrap_err().to_string();
        assert_eq!(error, "sh exited: no such disk");
        assert!(Child::start(Command::new("/no/such/program"), Stdio::null()).is_err());
    }

    #[test]
    fn a_process_that_is_dropped_or_stopped_has_exited() {
        let dropped = Child::start(shell("sleep 1000"), Stdio::null()).unwrap();
        let pid = dropped.pid();
        drop(dropped);
        assert!(Usage::of(pid).is_err());
        let mut child = Child::start(shell("exec sleep 1000"), Stdio::null()).unwrap();
        child.check().unwrap();
        let pid = child.pid();
        assert!(child.stop().cpu > Duration::ZERO);
        assert!(Usage::of(pid).is_err());
    }
}

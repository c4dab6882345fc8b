//! Processes that are started, watched and stopped: none of them outlives this one.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::Result;
use crate::process::Usage;

/// How long a process may take to exit when it is asked to.
const EXIT_WAIT: Duration = Duration::from_secs(5);
/// How often it is polled.
pub const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// So much of its standard error is searched for the last line.
const ERRORS_BYTES_MAX: usize = 64 << 10;

/// A process. Dropping it kills it.
pub struct Child {
    pid: i32,
    program: String,
    /// Its standard error, which is nobody else's.
    errors: File,
    /// Its standard output, if it was started with a pipe for it.
    pub stdout: Option<ChildStdout>,
    exited: Option<(i32, Usage)>,
}

impl Child {
    /// Starts `command`.
    ///
    /// # Errors
    /// If it cannot be started: the system's error, an [`std::io::Error`].
    pub fn start(mut command: Command, stdout: Stdio) -> Result<Child> {
        let program = Path::new(command.get_program()).file_name().unwrap_or(OsStr::new("?"));
        let program = program.to_string_lossy().into_owned();
        let errors = File::from(memfd_create("errors", MemfdFlags::CLOEXEC)?);
        command.stdin(Stdio::null()).stdout(stdout).stderr(errors.try_clone()?);
        let die_with_parent =
            || set_parent_process_death_signal(Some(Signal::KILL)).map_err(std::io::Error::from);
        // SAFETY: between fork and exec it makes one system call and touches no memory.
        unsafe { command.pre_exec(die_with_parent) };
        let mut child = command.spawn()?;
        Ok(Child { pid: child.id() as i32, program, errors, stdout: child.stdout.take(), exited: None })
    }

    /// Its number.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The last line of its standard error.
    pub fn complaint(&self) -> String {
        // Its own writes move the offset that this process shares.
        let mut text = vec![0; ERRORS_BYTES_MAX];
        let from =
            self.errors.metadata().map_or(0, |file| file.len().saturating_sub(ERRORS_BYTES_MAX as u64));
        let length = self.errors.read_at(&mut text, from).unwrap_or_default();
        let text = String::from_utf8_lossy(&text[..length]);
        let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("without a word");
        format!("{} exited: {}", self.program, last.trim())
    }

    /// Whether it has exited, and if so how.
    fn poll(&mut self, block: bool) -> Option<(i32, Usage)> {
        if self.exited.is_none() {
            let mut status = 0;
            // SAFETY: the kernel fills both in; the process is ours and nobody else waits for it.
            let (exited, usage) = unsafe {
                let mut usage: libc::rusage = std::mem::zeroed();
                let flags = if block { 0 } else { libc::WNOHANG };
                (libc::wait4(self.pid, &raw mut status, flags, &raw mut usage) == self.pid, usage)
            };
            self.exited = exited.then(|| (status, usage.into()));
        }
        self.exited
    }

    /// Whether it has exited.
    pub fn has_exited(&mut self) -> bool {
        self.poll(false).is_some()
    }

    /// Waits until it exits by itself, `limit` at most. Returns its total usage.
    ///
    /// # Errors
    /// The error that it printed, or that it took too long.
    pub fn wait(mut self, limit: Duration) -> Result<Usage> {
        let until = Instant::now() + limit;
        loop {
            match self.poll(false) {
                Some((0, usage)) => return Ok(usage),
                Some(_) => return Err(self.complaint().into()),
                None if Instant::now() > until => {
                    return Err(format!("{}: not done after {limit:?}", self.program).into());
                }
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    /// Asks it to exit, and kills it if it does not. Returns its total usage, with the
    /// threads that exited before.
    pub fn stop(mut self) -> Usage {
        self.signal(libc::SIGTERM);
        let until = Instant::now() + EXIT_WAIT;
        loop {
            match self.poll(false) {
                Some((_, usage)) => return usage,
                None if Instant::now() > until => self.signal(libc::SIGKILL),
                None => {}
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the process was not waited for, so that the number is still its own.
        unsafe { libc::kill(self.pid, signal) };
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.exited.is_none() {
            self.signal(libc::SIGKILL);
            self.poll(true);
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
        assert!(!child.has_exited());
        let pid = child.pid();
        assert!(child.stop().cpu > Duration::ZERO);
        assert!(Usage::of(pid).is_err());
    }
}

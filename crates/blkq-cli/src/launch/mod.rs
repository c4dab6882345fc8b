//! Starts a daemon: runs this program again, which sends its reply on standard output and continues in the
//! background.

pub mod parent;
pub mod session;
pub mod systemd;

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use blkq_export::retry::retry;
use blkq_protocol::control::{REPLY_BYTES_MAX, Reply};
use blkq_protocol::daemon::LaunchMessage;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::DeviceInfo;
use blkq_protocol::options::{AttachOptions, Record};

use crate::output::{print_line, warn};

/// How long to wait for the exit of a daemon that failed to start.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(1);

const SUBCOMMAND: &str = "daemon";

pub struct Launched {
    pub info: DeviceInfo,
    pub daemon: Child,
}

/// The program that runs as the daemon.
pub enum Program {
    This,
    /// The program of another process. Its file may have been replaced or removed since that process started.
    Running(File),
}

impl Program {
    /// Fails if this process may not inspect the process `pid`.
    pub fn of_process(pid: u32) -> io::Result<Program> {
        File::open(format!("/proc/{pid}/exe")).map(Program::Running)
    }

    /// Starts a daemon that attaches a device, and waits until the device is ready. With `exit_with_parent`,
    /// the device is detached when this process exits.
    pub fn launch_attach(&self, options: &AttachOptions, exit_with_parent: bool) -> Outcome<Launched> {
        let flags: &[_] = if exit_with_parent { &["--exit-with-parent"] } else { &[] };
        let name = options.name.clone().unwrap_or_else(|| options.default_name());
        let options = Record::new(options)?;
        self.launch(flags, &name, Some(LaunchMessage { options, settings: Vec::new(), succeeds: false }))
    }

    /// As [`Program::launch_attach`], for the device `name`, which its last daemon has handed over. `settings` are
    /// those that were changed while that daemon served the device.
    pub fn launch_successor(
        &self,
        name: &str,
        options: &AttachOptions,
        settings: Vec<(String, String)>,
    ) -> Outcome<Launched> {
        let options = Record::new(options)?;
        self.launch(&[], name, Some(LaunchMessage { options, settings, succeeds: true }))
    }

    /// As [`Program::launch_attach`], for the device `name`, which the new daemon recovers because the last
    /// one has exited. With `allow_replaced`, the daemon also serves files that replaced those of the device.
    pub fn launch_recover(&self, name: &str, allow_replaced: bool) -> Outcome<Launched> {
        let flags: &[_] = if allow_replaced { &["--recover", "--allow-replaced"] } else { &["--recover"] };
        self.launch(flags, name, None)
    }

    /// Runs the program as a daemon. Its arguments show in process lists, so they contain no options.
    fn launch(&self, flags: &[&str], name: &str, message: Option<LaunchMessage>) -> Outcome<Launched> {
        let input = message.map(|message| serde_json::to_vec(&message)).transpose();
        let input = input.map_err(|e| failure(e.into()))?.unwrap_or_default();
        let mut command = Command::new(match self {
            Program::This => "/proc/self/exe".to_owned(),
            Program::Running(file) => format!("/proc/self/fd/{}", file.as_raw_fd()),
        });
        command.arg0("blkq").arg(SUBCOMMAND).args(flags).arg("--").arg(name);
        // Any descriptor but standard input, output and error would keep a lock or a pipe of the caller open while the
        // daemon runs. SAFETY: between fork and exec, this makes one system call, which closes nothing before the exec,
        // and allocates nothing.
        unsafe { command.pre_exec(|| close_range(3, libc::CLOSE_RANGE_CLOEXEC)) };
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(failure)?;
        if let Some(mut stdin) = child.stdin.take() {
            // A daemon that does not read its input reports why.
            let _ = stdin.write_all(&input);
        }
        let mut line = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            stdout.take(REPLY_BYTES_MAX as u64).read_to_end(&mut line).map_err(failure)?;
        }
        let (printed, reply) = last_line(&line);
        let _ = io::stderr().write_all(printed);
        match serde_json::from_slice(reply) {
            Ok(Reply::Ok(info)) => Ok(Launched { info, daemon: child }),
            Ok(Reply::Error(message)) => {
                // Wait for the exit, so that nothing of the daemon is left when this command returns. The time is
                // limited, because a kernel bug could keep the process.
                let exited = || if matches!(child.try_wait(), Ok(None)) { Err(()) } else { Ok(()) };
                let _ = retry(Instant::now() + EXIT_TIMEOUT, EXIT_POLL_INTERVAL, exited, |()| true);
                Err(Failure::new(message))
            }
            Err(_) => {
                let status = child.wait().map_err(failure)?;
                Err(Failure::new(format!("the daemon exited before it was ready ({status})")))
            }
        }
    }
}

/// Splits the output into the reply, which is the last line, and the text before it: libraries may print to
/// standard output, too.
fn last_line(text: &[u8]) -> (&[u8], &[u8]) {
    let text = text.trim_ascii_end();
    text.split_at(text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1))
}

/// Prints the warnings about a new device, and its exports, one per line.
pub fn report(info: &DeviceInfo) -> Outcome {
    warn(&info.name, &info.warnings);
    info.exports.iter().try_for_each(|export| print_line(export))
}

/// Closes all descriptors from `first` on, or sets a flag of them (close_range(2)).
///
/// # Safety
/// Nothing in this process may own a descriptor that is closed.
pub unsafe fn close_range(first: u32, flags: u32) -> io::Result<()> {
    // SAFETY: the call accesses no memory; the callers are responsible for the descriptors.
    match unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn failure(error: io::Error) -> Failure {
    let has_proc = Path::new("/proc/self").exists();
    let hint = if has_proc { "" } else { "; mount a proc file system on /proc" };
    Failure::new(format!("cannot start the daemon: {error}{hint}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reply_is_found_after_the_output_of_libraries() {
        assert_eq!(last_line(b"{}\n"), (&b""[..], &b"{}"[..]));
        assert_eq!(last_line(b"no such host\n\n{}\n"), (&b"no such host\n\n"[..], &b"{}"[..]));
        assert_eq!(last_line(b""), (&b""[..], &b""[..]));
    }
}

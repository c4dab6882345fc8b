//! Starting a daemon: this program again, which reports on its standard output and stays.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use crate::control::{LINE_BYTES_MAX, Reply, reply_line};
use crate::daemon::{Daemon, Parent};
use crate::descriptors::inherit_standard_only;
use crate::failure::{EXIT_FAILED, Failure, Outcome};
use crate::info::DeviceInfo;
use crate::print;

/// How long a daemon that did not come up may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);
const END_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The hidden option that tells the daemon from the command that starts it.
const DAEMON_OPTION: &str = "--daemon";

/// A device, and the process that serves it.
pub struct Launched {
    /// The device.
    pub info: DeviceInfo,
    /// Its daemon, a child of this process.
    pub daemon: Child,
}

/// Runs this program as the daemon of `subcommand` and waits until it is ready.
///
/// # Errors
/// What it says, or that it said nothing.
pub fn launch(subcommand: &str, words: impl IntoIterator<Item = OsString>) -> Outcome<Launched> {
    let refuse = |e: std::io::Error| Failure::new(format!("cannot start the daemon: {e}"));
    let mut command = Command::new("/proc/self/exe");
    command.arg0("blkq").args([subcommand, DAEMON_OPTION]).args(words);
    let mut child = inherit_standard_only(&mut command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(refuse)?;
    let mut line = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(LINE_BYTES_MAX as u64).read_to_end(&mut line).map_err(refuse)?;
    }
    match serde_json::from_slice(&line) {
        Ok(Reply::Ok(info)) => Ok(Launched { info, daemon: child }),
        Ok(Reply::Error(message)) => {
            // It has said all; nothing of it may be left when this command returns, unless a
            // defect of the kernel keeps it, which nobody can do anything about.
            let until = Instant::now() + END_TIMEOUT;
            while child.try_wait().map_err(refuse)?.is_none() && Instant::now() < until {
                std::thread::sleep(END_POLL_INTERVAL);
            }
            Err(Failure::new(message))
        }
        Err(_) => {
            let status = child.wait().map_err(refuse)?;
            Err(Failure::new(format!("the daemon ended before it was ready ({status})")))
        }
    }
}

/// Serves as the daemon that `start` makes, and tells whoever started this process.
///
/// # Errors
/// If that one is gone.
pub fn be_daemon(start: impl FnOnce(&mut Parent) -> Outcome<Daemon>) -> Outcome<ExitCode> {
    let mut parent = Parent::new()?;
    match start(&mut parent) {
        Ok(daemon) => Ok(daemon.run()),
        Err(failure) => {
            // Whoever started this process tells the user.
            parent.tell(&reply_line::<()>(Err(failure)))?;
            Ok(ExitCode::from(EXIT_FAILED))
        }
    }
}

/// Prints what the user needs to know of a new device: warnings, and one line per export.
///
/// # Errors
/// If it cannot be printed.
pub fn report(info: &DeviceInfo) -> Outcome {
    warn(info);
    print(&info.exports.iter().map(|export| format!("{export}\n")).collect::<String>())
}

/// Puts the warnings on stderr.
pub fn warn(info: &DeviceInfo) {
    for warning in &info.warnings {
        crate::complain(&Failure::new(format!("{}: warning: {warning}", info.name)));
    }
}

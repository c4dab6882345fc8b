//! The daemon of a device, as the commands that start it see it: the message that they send to its process, the
//! process that waits for it, and [`Serve`], by which a process becomes a daemon.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use rustix::process::setsid;
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Outcome};
use crate::info::{BlockDevice, DeviceInfo, ordered};
use crate::options::{AttachOptions, Record};
use crate::state::{Orphan, StateDir};

/// The message that a daemon reads from its standard input. An older program that does not know `settings` can read it as
/// a [`Record`].
#[derive(Serialize, Deserialize)]
pub struct LaunchMessage {
    #[serde(flatten)]
    pub options: Record,
    /// The settings that were changed while the last daemon served the device, in order.
    #[serde(default, with = "ordered", skip_serializing_if = "Vec::is_empty")]
    pub settings: Vec<(String, String)>,
    /// Whether a previous daemon has handed the device to this one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub succeeds: bool,
}

/// The process that started this daemon and reads its message from the daemon's standard output.
#[derive(Debug)]
pub struct Parent {
    /// `/dev/null`, which replaces standard input and output after the notification. `None` if no process
    /// waits.
    null: Option<std::fs::File>,
}

impl Parent {
    /// For a daemon in the foreground, which the user started directly.
    pub fn none() -> Parent {
        Parent { null: None }
    }

    /// For a daemon in the background. Starts a session, so that signals of the terminal do not reach it.
    pub fn new() -> Outcome<Parent> {
        setsid().map_err(|e| Failure::new(format!("cannot start a new session: {e}")))?;
        let null = std::fs::File::options().write(true).open("/dev/null");
        Ok(Parent { null: Some(null.map_err(|e| Failure::new(format!("cannot open /dev/null: {e}")))?) })
    }

    pub fn waits(&self) -> bool {
        self.null.is_some()
    }

    /// Redirects standard input and output to `/dev/null` afterwards. Fails if the parent has exited.
    pub fn notify(&mut self, reply: &[u8]) -> Outcome {
        let Some(null) = self.null.take() else { return Ok(()) };
        let mut stdout = std::io::stdout().lock();
        let written = stdout.write_all(reply).and_then(|()| stdout.flush());
        // Even if the parent has exited: a daemon that takes over a device serves it without its parent, too.
        let released = rustix::stdio::dup2_stdin(&null).and_then(|()| rustix::stdio::dup2_stdout(null));
        written
            .and_then(|()| Ok(released?))
            .map_err(|e| Failure::new(format!("the command that started the daemon has exited: {e}")))
    }
}

/// A reason for which `attach` would refuse the options.
pub struct Obstacle {
    /// The option that causes the refusal, without dashes, or `image`.
    pub option: &'static str,
    pub failure: Failure,
}

/// An io_uring operation: name, number and purpose.
pub type Operation = (&'static str, u8, &'static str);

/// The device that a daemon begins to serve.
pub enum Start<'a> {
    /// A new device. If the start fails, nothing is left of it.
    New(&'a AttachOptions),
    /// The device `name`, which is not a block device and whose previous daemon has exited. `settings` are those of the
    /// previous daemon. If the start fails, the state file stays, so that recovery can be tried again.
    Successor { name: &'a str, options: &'a AttachOptions, settings: Vec<(String, String)> },
    /// A block device whose daemon has exited. If the start fails, it stays an orphan.
    Recovery { options: &'a AttachOptions, orphan: Box<Orphan> },
}

/// The daemon of one device, in this process. The commands do not name the type that implements this: `main` does.
pub trait Serve: Sized {
    /// The io_uring operations that a daemon uses.
    const OPERATIONS: &'static [Operation];

    /// If the options have no NBD address, the `inherited` sockets are used. When this returns, the device is
    /// usable and `parent` has been notified.
    fn start(start: Start<'_>, inherited: Vec<OwnedFd>, parent: &mut Parent) -> Outcome<Self>;

    /// Includes the warnings that are printed at attach. Fails if the device has stopped.
    fn info(&self) -> Outcome<DeviceInfo>;

    /// Serves the device until it is detached or handed to another daemon. Returns the exit code of the process.
    fn run(self) -> ExitCode;

    /// Detaches the device by force, because the user could not get a report of it.
    fn give_up(self);

    /// Finds the reasons for which `attach` would refuse `options`. Changes nothing; the image may be in use.
    fn obstacles(options: &AttachOptions) -> Vec<Obstacle>;

    /// Checks that this program could take over `block_device`: the kernel's device, the image and the
    /// certificates. Changes nothing.
    fn check_take_over(options: &AttachOptions, block_device: &BlockDevice) -> Outcome;

    /// As [`Serve::check_take_over`], for a device of `bytes` without a block device. Such a device is attached
    /// again, which fails if its group does not exist.
    fn check_successor(dir: &StateDir, options: &AttachOptions, bytes: u64) -> Outcome;
}

//! A process that issues commands to the control device. The kernel executes such a command in the process
//! that issues it, which cannot exit before the command completes. Three commands may hang:
//!
//! - Some kernels never complete the creation of a device.
//! - Starting a device waits for the server, because the kernel reads the partition table.
//! - Stopping a device waits for the requests in flight, which the kernel aborts only when the server exits.
//!
//! If this process hangs, nothing is lost: it holds no image and no lock, and neither the server nor a
//! command waits for it without a timeout. It exits with the server.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use blkq::Error;
use io_uring::{IoUring, opcode, squeue, types};
use rustix::process::{Signal, set_parent_process_death_signal};
use zerocopy::IntoBytes;

use super::abi::{DeviceInfo, command};
use super::child::{self, Message, ServerEnd, receive, reply};
use super::control::{ControlDevice, START_TIMEOUT, complete_one, failed, not_added};

/// How much longer the server waits for a reply than the process waits for the kernel.
const SLACK: Duration = Duration::from_secs(2);
/// How long the process waits for the kernel to apply a setting of a new device. Must be less than [`SLACK`].
const SETTING_TIMEOUT: Duration = Duration::from_secs(1);

const TASK: &str = "controls the ublk device";

/// Directory of the settings of block devices without hardware. The process changes the settings of a new
/// device there.
pub const SETTINGS_DIRECTORY: &str = "/sys/devices/virtual/block";

/// The server's end of the process, which exits when this is dropped.
#[derive(Debug)]
pub struct SetupProcess {
    socket: ServerEnd,
    /// The process did not reply in time, and would not reply to another request either.
    silent: bool,
}

impl SetupProcess {
    /// Forks the process. There, `confine` drops all privileges but `/dev/ublk-control` and the settings of
    /// block devices, and returns whether that succeeded; if not, the process exits.
    ///
    /// # Safety
    /// This process must have only one thread: the new process contains only a copy of the forking thread,
    /// and a lock that another thread holds would stay locked in it.
    pub unsafe fn fork(confine: impl FnOnce() -> bool) -> Result<SetupProcess, Error> {
        let server = std::process::id();
        let body = |mut socket: UnixStream| {
            if confine() {
                let mut unfinished = None;
                while serve(&mut socket, server, &mut unfinished).is_ok() {}
            }
            Ok(())
        };
        // SAFETY: the caller guarantees that there are no other threads.
        let forked = unsafe { ServerEnd::fork(c"blkq-setup", (TASK, START_TIMEOUT + SLACK), &[], body) };
        let socket =
            forked.map_err(|e| Error::system("cannot start the process that controls the ublk device", e))?;
        Ok(SetupProcess { socket, silent: false })
    }

    fn ask(&mut self, what: u32, info: DeviceInfo) -> io::Result<DeviceInfo> {
        if self.silent {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.socket.ask(what, info).inspect_err(|e| {
            if e.kind() == io::ErrorKind::TimedOut {
                // The process cannot exit before the command completes.
                self.socket.abandon();
                // The error of a process that replied has a number.
                self.silent = e.raw_os_error().is_none();
            }
        })
    }

    /// Creates a device. The kernel changes `info` to the values that it has chosen. Fails with the kernel's
    /// error.
    pub(super) fn add(&mut self, info: &mut DeviceInfo) -> Result<(), Error> {
        *info = self.ask(command::ADD_DEV, *info).map_err(not_added)?;
        Ok(())
    }

    pub(super) fn start(&mut self, info: &DeviceInfo) -> Result<(), Error> {
        self.ask(command::START_DEV, *info).map(drop).map_err(|e| failed(command::START_DEV, e))
    }

    /// As [`ControlDevice::issue`], with its error as the source.
    pub(super) fn issue(&mut self, code: u32, id: u32) -> Result<(), Error> {
        let info = DeviceInfo { dev_id: id, ..DeviceInfo::default() };
        self.ask(code, info).map(drop).map_err(|e| failed(code, e))
    }
}

/// A command that did not complete in time: its code, its device, and the control device. The kernel may still
/// complete it.
type Unfinished = ((u32, u32), ControlDevice);

/// Executes the next request. If the same command for the same device has not completed yet, this waits for
/// it again, because a second command would only wait for the first one.
///
/// # Errors
/// Returns an error if the server has exited.
fn serve(socket: &mut UnixStream, server: u32, unfinished: &mut Option<Unfinished>) -> io::Result<()> {
    let Message { code, sequence, mut info } = receive(socket)?;
    let command = (code, info.dev_id);
    let (result, control) = match unfinished.take_if(|(unfinished, _)| *unfinished == command) {
        Some((_, mut control)) => (control.wait_again(), Some(control)),
        None => match ControlDevice::open() {
            Ok(mut control) => (execute(&mut control, code, server, &mut info), Some(control)),
            // The server has opened the control device before. The reply has only a number, so EIO
            // represents the reason.
            Err(_) => (Err(io::Error::from_raw_os_error(libc::EIO)), None),
        },
    };
    if let Some(control) = control
        && result.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::TimedOut)
    {
        // The ring of the previous command stays open, too: closing it would wait for the command.
        std::mem::forget(unfinished.replace((command, control)));
    }
    let added = code == command::ADD_DEV && result.is_ok();
    let sent = reply(socket, sequence, result.map(|()| info));
    if sent.is_err() && added {
        // The server has been killed, and its state file does not contain the number of the device.
        let _ = ControlDevice::open().map(|mut control| control.issue(command::DEL_DEV, info.dev_id));
    }
    sent
}

fn execute(control: &mut ControlDevice, what: u32, server: u32, info: &mut DeviceInfo) -> io::Result<()> {
    match what {
        command::ADD_DEV => control.call(command::ADD_DEV, info.dev_id, 0, info.as_mut_bytes()),
        command::START_DEV => while_server_runs(server, || {
            control.call(command::START_DEV, info.dev_id, server.into(), &mut [])?;
            remove_scheduler(info.dev_id);
            Ok(())
        }),
        _ => control.issue(what, info.dev_id),
    }
}

/// Runs `start`. The kernel kills this process if the server exits in the meantime; otherwise the command
/// would wait for the queues of a device that no process serves.
fn while_server_runs(server: u32, start: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // If the server exited before prctl(2), the kernel does not send the signal.
    if !child::is_child_of(server) {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    let started = start();
    set_parent_process_death_signal(None)?;
    started
}

/// Switches off the kernel's scheduler, as the kernel does for its loop devices: the disk of the image has
/// one, and the server can have one. Without permission the default stays, which only costs time.
fn remove_scheduler(id: u32) {
    let setting =
        OpenOptions::new().write(true).open(format!("{SETTINGS_DIRECTORY}/ublkb{id}/queue/scheduler"));
    // The kernel first waits for the requests of the device, and the storage of the image may never complete
    // one.
    let _ = setting.and_then(|setting| write_within(SETTING_TIMEOUT, setting, b"none"));
}

/// Writes in a kernel worker thread, which continues in the background if that takes longer than `limit`.
/// Fails with the kernel's error, or with [`io::ErrorKind::TimedOut`].
fn write_within(limit: Duration, file: File, text: &'static [u8]) -> io::Result<()> {
    let mut ring = IoUring::new(1)?;
    let fd = types::Fd(file.as_raw_fd());
    let entry = opcode::Write::new(fd, text.as_ptr(), text.len() as u32).build().flags(squeue::Flags::ASYNC);
    // SAFETY: the text is static, and the file stays open until the write has completed.
    unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
    complete_one(&mut ring, limit).unwrap_or_else(|error| {
        // Leaked, because closing the ring would wait for the write.
        std::mem::forget((ring, file));
        Err(error)
    })
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::OwnedFd;
    use std::time::Instant;

    use super::*;
    use crate::ublk::child::EXIT_TIMEOUT;

    fn setup_process() -> (SetupProcess, UnixStream) {
        let (socket, other) = ServerEnd::pair(TASK, Duration::from_millis(50)).unwrap();
        (SetupProcess { socket, silent: false }, other)
    }

    fn stop(setup: &mut SetupProcess) -> io::Result<DeviceInfo> {
        setup.ask(command::STOP_DEV, DeviceInfo::default())
    }

    #[test]
    fn a_killed_setup_process_is_not_taken_for_a_hung_kernel() {
        let (mut setup, other) = setup_process();
        drop(other);
        let error = setup.issue(command::STOP_DEV, 0).unwrap_err();
        assert!(error.to_string().contains("killed"), "{error}");
        assert!(!setup.silent, "drop waits for its exit");
    }

    // Contract: detach
    #[test]
    fn drop_does_not_wait_for_a_setup_process_without_a_reply() {
        let (mut setup, mut other) = setup_process();
        assert_eq!(stop(&mut setup).unwrap_err().kind(), io::ErrorKind::TimedOut);
        // The late reply is not taken for the reply to another command.
        reply(&mut other, 1, Ok(DeviceInfo::default())).unwrap();
        let deleted = setup.ask(command::DEL_DEV, DeviceInfo::default());
        assert_eq!(deleted.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_command_that_did_not_complete_can_be_repeated() {
        let (mut setup, mut other) = setup_process();
        reply(&mut other, 1, Err(io::ErrorKind::TimedOut.into())).unwrap();
        reply(&mut other, 2, Ok(DeviceInfo::default())).unwrap();
        assert_eq!(stop(&mut setup).unwrap_err().raw_os_error(), Some(libc::ETIMEDOUT));
        setup.issue(command::STOP_DEV, 0).unwrap();
        let begin = Instant::now();
        drop(setup);
        assert!(begin.elapsed() < EXIT_TIMEOUT, "drop does not wait for its exit");
    }

    // Contract: detach
    #[test]
    fn the_setup_process_exits_with_its_server() {
        // SAFETY: the child runs only the code of the setup process, which takes no lock that another thread
        // may hold.
        let setup = unsafe { SetupProcess::fork(|| true) }.unwrap();
        let mut socket = setup.socket.stream.try_clone().unwrap();
        drop(setup);
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(socket.read(&mut [0]).unwrap(), 0, "its side of the socket is the last that it closes");
    }

    // Contract: detach
    #[test]
    fn a_setting_that_the_kernel_does_not_apply_is_left_behind() {
        let (reader, writer) = io::pipe().unwrap();
        let writer = OwnedFd::from(writer);
        write_within(Duration::from_secs(10), writer.try_clone().unwrap().into(), b"none").unwrap();
        let flags = rustix::fs::fcntl_getfl(&writer).unwrap();
        rustix::fs::fcntl_setfl(&writer, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
        while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
        rustix::fs::fcntl_setfl(&writer, flags).unwrap();
        let (begin, limit) = (Instant::now(), Duration::from_millis(50));
        let error = write_within(limit, writer.into(), b"none").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(begin.elapsed() >= limit, "it waits until the limit");
        let mut text = [0; 4];
        File::from(OwnedFd::from(reader)).read_exact(&mut text).unwrap();
        assert_eq!(&text, b"none");
    }

    #[test]
    fn nothing_is_started_for_a_server_that_has_exited() {
        let never = || -> io::Result<()> { panic!("started") };
        let not_the_parent = std::process::id();
        assert_eq!(while_server_runs(not_the_parent, never).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        set_parent_process_death_signal(None).unwrap();
    }
}

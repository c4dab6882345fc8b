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
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blkq::Error;
use io_uring::{IoUring, opcode, squeue, types};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::abi::DeviceInfo;
use super::child;
use super::command::{ADD, Command, DELETE, START};
use super::control::{ControlDevice, START_TIMEOUT, failed, not_added};

const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// How much longer the server waits for a reply than the process waits for the kernel.
const SLACK: Duration = Duration::from_secs(2);
/// How long the process waits for the kernel to apply a setting of a new device. Must be less than [`SLACK`].
const SETTING_TIMEOUT: Duration = Duration::from_secs(1);

/// Directory of the settings of block devices without hardware.
pub const SETTINGS_DIRECTORY: &str = "/sys/devices/virtual/block";

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Request {
    what: Command,
    pid: u32,
    info: DeviceInfo,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Reply {
    errno: i32,
    pad: u32,
    info: DeviceInfo,
}

/// The server's end of the process, which exits when this is dropped.
#[derive(Debug)]
pub struct SetupProcess {
    socket: UnixStream,
    /// The process did not reply in time: the next reply on the socket would belong to an earlier request.
    silent: bool,
    /// A command did not complete in time. The process cannot exit before it does.
    hangs: bool,
}

impl SetupProcess {
    /// Forks the process. There, `confine` drops all privileges but `/dev/ublk-control` and the settings of
    /// block devices, and returns whether that succeeded; if not, the process exits.
    ///
    /// # Safety
    /// This process must have only one thread: the new process contains only a copy of the forking thread,
    /// and a lock that another thread holds would stay locked in it.
    pub unsafe fn fork(confine: impl FnOnce() -> bool) -> Result<SetupProcess, Error> {
        let failure = |e| Error::system("cannot start the process that controls the ublk device", e);
        let (socket, other) = UnixStream::pair().map_err(failure)?;
        let answer_timeout = Some(START_TIMEOUT + SLACK);
        socket.set_read_timeout(answer_timeout).map_err(failure)?;
        let body = |[socket]: [OwnedFd; 1]| {
            let mut socket = UnixStream::from(socket);
            if confine() {
                let mut unfinished = None;
                while serve(&mut socket, &mut unfinished).is_ok() {}
            }
            Ok(())
        };
        // SAFETY: the caller guarantees that there are no other threads.
        unsafe { child::fork(c"blkq-setup", [other.into()], body) }.map_err(failure)?;
        Ok(SetupProcess { socket, silent: false, hangs: false })
    }

    fn ask(&mut self, request: Request) -> io::Result<DeviceInfo> {
        if self.silent {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut reply = Reply::new_zeroed();
        let exchange = self
            .socket
            .write_all(request.as_bytes())
            .and_then(|()| self.socket.read_exact(reply.as_mut_bytes()));
        match exchange {
            Ok(()) if reply.errno == 0 => Ok(reply.info),
            Ok(()) => {
                self.hangs |= reply.errno == libc::ETIMEDOUT;
                Err(io::Error::from_raw_os_error(reply.errno))
            }
            // A socket reports its timeout as EAGAIN.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.silent = true;
                Err(io::ErrorKind::TimedOut.into())
            }
            Err(_) => Err(io::Error::other("the process that controls the ublk device was killed")),
        }
    }

    /// As [`ControlDevice::add`], with its error as the source.
    pub(super) fn add(&mut self, info: &mut DeviceInfo) -> Result<(), Error> {
        *info = self.ask(Request { what: ADD, pid: 0, info: *info }).map_err(not_added)?;
        Ok(())
    }

    pub(super) fn start(&mut self, info: &DeviceInfo) -> Result<(), Error> {
        let request = Request { what: START, pid: std::process::id(), info: *info };
        self.ask(request).map(|_| ()).map_err(|e| failed("start a device", e))
    }

    /// As [`ControlDevice::issue`]; also fails with [`io::ErrorKind::TimedOut`].
    pub(super) fn issue(&mut self, what: Command, id: u32) -> io::Result<()> {
        let info = DeviceInfo { dev_id: id, ..DeviceInfo::default() };
        self.ask(Request { what, pid: 0, info }).map(|_| ())
    }
}

impl Drop for SetupProcess {
    fn drop(&mut self) {
        // The process exits when the server's side is shut down, and closes its own side last. So the end of
        // the stream means that it has exited.
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
        if !self.silent && !self.hangs && self.socket.set_read_timeout(Some(EXIT_TIMEOUT)).is_ok() {
            let _ = self.socket.read(&mut [0]);
        }
    }
}

/// A command that did not complete in time. The kernel may still complete it.
struct Unfinished {
    what: Command,
    id: u32,
    control: ControlDevice,
}

/// Executes the next request. If the same command for the same device has not completed, this waits for that
/// one again, because a second command would only wait for the first. Fails if the server has exited.
fn serve(socket: &mut UnixStream, unfinished: &mut Option<Unfinished>) -> io::Result<()> {
    let mut request = Request::new_zeroed();
    socket.read_exact(request.as_mut_bytes())?;
    let mut info = request.info;
    let (what, id) = (request.what, info.dev_id);
    let given = match unfinished.take_if(|unfinished| (unfinished.what, unfinished.id) == (what, id)) {
        Some(Unfinished { mut control, .. }) => Ok((control.wait_again(), control)),
        None => ControlDevice::open().map(|mut control| {
            let done = match what {
                ADD => control.add(&mut info),
                START => while_server_runs(request.pid, || {
                    control.start(id, request.pid)?;
                    remove_scheduler(id);
                    Ok(())
                }),
                _ => control.issue(what, id),
            };
            (done, control)
        }),
    };
    let result = match given {
        Ok((done, control)) => {
            if done.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::TimedOut) {
                // The ring of the previous command stays open, too: closing it would wait for the command.
                std::mem::forget(unfinished.replace(Unfinished { what, id, control }));
            }
            done
        }
        // The server has opened the control device before. The reply has only a number, so EIO represents the
        // reason.
        Err(_) => Err(io::Error::from_raw_os_error(libc::EIO)),
    };
    let result =
        result.map_err(|e| if e.kind() == io::ErrorKind::TimedOut { libc::ETIMEDOUT } else { raw(&e) });
    let reply = Reply { errno: result.err().unwrap_or(0), pad: 0, info };
    let sent = socket.write_all(reply.as_bytes());
    if sent.is_err() && request.what == ADD && reply.errno == 0 {
        // The server has been killed, and its state file does not contain the number of the device.
        if let Ok(mut control) = ControlDevice::open() {
            let _ = control.issue(DELETE, info.dev_id);
        }
    }
    sent
}

/// Runs `start`. The kernel kills this process if the server exits in the meantime; otherwise the command
/// would wait for the queues of a device that no process serves.
fn while_server_runs(server: u32, start: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // If the server exited before prctl(2), the kernel does not send the signal.
    if getppid().is_none_or(|parent| parent.as_raw_nonzero().get() as u32 != server) {
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
    let until = Instant::now() + limit;
    loop {
        let left = types::Timespec::from(until.saturating_duration_since(Instant::now()));
        let waited = ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&left));
        if let Some(cqe) = ring.completion().next() {
            return if cqe.result() < 0 { Err(io::Error::from_raw_os_error(-cqe.result())) } else { Ok(()) };
        }
        let error = match waited {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) if e.raw_os_error() == Some(libc::ETIME) => io::ErrorKind::TimedOut.into(),
            Err(e) => e,
            Ok(_) => continue,
        };
        // Leaked, because closing the ring would wait for the write.
        std::mem::forget((ring, file));
        return Err(error);
    }
}

fn raw(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ublk::command::STOP;

    fn setup_process_of(socket: UnixStream) -> SetupProcess {
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        SetupProcess { socket, silent: false, hangs: false }
    }

    #[test]
    fn a_killed_setup_process_is_not_taken_for_a_hung_kernel() {
        let (socket, other) = UnixStream::pair().unwrap();
        let mut setup = setup_process_of(socket);
        drop(other);
        let error = setup.issue(STOP, 0).unwrap_err();
        assert!(error.to_string().contains("killed"), "{error}");
        assert!(!setup.silent && !setup.hangs, "drop waits for its exit");
    }

    // Contract: detach
    #[test]
    fn drop_does_not_wait_for_a_setup_process_without_a_reply() {
        let (socket, mut other) = UnixStream::pair().unwrap();
        let mut setup = setup_process_of(socket);
        assert_eq!(setup.issue(STOP, 0).unwrap_err().kind(), io::ErrorKind::TimedOut);
        // The late reply is not taken for the reply to another command.
        other.write_all(Reply::new_zeroed().as_bytes()).unwrap();
        assert_eq!(setup.issue(DELETE, 0).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_command_that_did_not_complete_can_be_repeated() {
        let (socket, mut other) = UnixStream::pair().unwrap();
        let mut setup = setup_process_of(socket);
        for errno in [libc::ETIMEDOUT, 0] {
            other.write_all(Reply { errno, ..Reply::new_zeroed() }.as_bytes()).unwrap();
        }
        assert_eq!(setup.issue(STOP, 0).unwrap_err().raw_os_error(), Some(libc::ETIMEDOUT));
        setup.issue(STOP, 0).unwrap();
        assert!(setup.hangs, "drop does not wait for its exit");
    }

    // Contract: detach
    #[test]
    fn the_setup_process_exits_with_its_server() {
        // SAFETY: the child runs only the code of the setup process, which takes no lock that another thread
        // may hold.
        let setup = unsafe { SetupProcess::fork(|| true) }.unwrap();
        let mut socket = setup.socket.try_clone().unwrap();
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

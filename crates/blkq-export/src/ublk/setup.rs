//! A process that gives commands to the control device in place of the server. The kernel runs them
//! inside the process that gives them, which cannot exit before they complete: there are kernels that
//! never complete making a device; starting one waits for its server, for partitions are read; and
//! stopping one waits for the requests that the server has, which are aborted only when that exits.
//! Then only this process hangs, which holds nothing, and neither a server with its image nor a command.
//! It lives as long as the server, and exits with it.

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

/// How long the idle process may take to exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// How much longer the server waits than the process.
const SLACK: Duration = Duration::from_secs(2);
/// How long writing a setting of a new device is waited for: less than [`SLACK`].
const SETTING_TIMEOUT: Duration = Duration::from_secs(1);

/// Where block devices without hardware have their settings. The process writes there, if it can.
pub const SETTINGS_DIRECTORY: &str = "/sys/devices/virtual/block";

/// A request to the process.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Request {
    what: Command,
    /// The server's process.
    pid: u32,
    info: DeviceInfo,
}

/// The reply to a request.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Reply {
    /// 0, or why not.
    errno: i32,
    pad: u32,
    info: DeviceInfo,
}

/// The process, which exits when this is dropped.
#[derive(Debug)]
pub struct SetupProcess {
    socket: UnixStream,
    /// It did not reply: the next reply would be that to an earlier request.
    silent: bool,
    /// A command did not complete in time, and keeps the process from exiting until it does.
    hangs: bool,
}

impl SetupProcess {
    /// Makes the process. In it `confine` drops all but `/dev/ublk-control`, and returns whether
    /// that was possible.
    ///
    /// # Errors
    /// The kernel's error.
    ///
    /// # Safety
    /// This process must have one thread only: the new one has but that, and what others had
    /// locked would stay so in it.
    pub unsafe fn fork(confine: impl FnOnce() -> bool) -> Result<SetupProcess, Error> {
        let failure = |e| Error::system("cannot start the process that gives ublk's commands", e);
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
            // A socket's timeout is reported as EAGAIN.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.silent = true;
                Err(io::ErrorKind::TimedOut.into())
            }
            Err(_) => Err(io::Error::other("the process that gives ublk's commands was killed")),
        }
    }

    /// Makes a device. The kernel changes `info` to what it became.
    ///
    /// # Errors
    /// The kernel's error, or that it did not reply in time.
    pub(super) fn add(&mut self, info: &mut DeviceInfo) -> Result<(), Error> {
        *info = self.ask(Request { what: ADD, pid: 0, info: *info }).map_err(not_added)?;
        Ok(())
    }

    /// Makes the block device of `info` appear, served by this process.
    ///
    /// # Errors
    /// As [`SetupProcess::add`].
    pub(super) fn start(&mut self, info: &DeviceInfo) -> Result<(), Error> {
        let request = Request { what: START, pid: std::process::id(), info: *info };
        self.ask(request).map(|_| ()).map_err(|e| failed("starting a device", e))
    }

    /// Gives one of the commands that need the number of a device only.
    ///
    /// # Errors
    /// The kernel's error, or that it did not reply in time.
    pub(super) fn give(&mut self, what: Command, id: u32) -> io::Result<()> {
        let info = DeviceInfo { dev_id: id, ..DeviceInfo::default() };
        self.ask(Request { what, pid: 0, info }).map(|_| ())
    }
}

impl Drop for SetupProcess {
    fn drop(&mut self) {
        // Without its socket it exits; its side of the socket is the last that it closes.
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
        if !self.silent && !self.hangs && self.socket.set_read_timeout(Some(EXIT_TIMEOUT)).is_ok() {
            let _ = self.socket.read(&mut [0]);
        }
    }
}

/// A command about a device that did not complete in time.
struct Unfinished {
    what: Command,
    id: u32,
    control: ControlDevice,
}

/// Carries out the next request. A command that is given again while the kernel still has it is waited for:
/// another one would only wait for that.
///
/// # Errors
/// If the server has exited.
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
                _ => control.give(what, id),
            };
            (done, control)
        }),
    };
    let result = match given {
        Ok((done, control)) => {
            if done.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::TimedOut) {
                // The ring of the one before stays open, too.
                std::mem::forget(unfinished.replace(Unfinished { what, id, control }));
            }
            done
        }
        // The server opened it before; EIO has to do for why it cannot be opened now.
        Err(_) => Err(io::Error::from_raw_os_error(libc::EIO)),
    };
    let result =
        result.map_err(|e| if e.kind() == io::ErrorKind::TimedOut { libc::ETIMEDOUT } else { raw(&e) });
    let reply = Reply { errno: result.err().unwrap_or(0), pad: 0, info };
    let sent = socket.write_all(reply.as_bytes());
    if sent.is_err() && request.what == ADD && reply.errno == 0 {
        // No process is left that knows of the device.
        if let Ok(mut control) = ControlDevice::open() {
            let _ = control.give(DELETE, info.dev_id);
        }
    }
    sent
}

/// Runs `start`, and is killed if the server exits: without that, the kernel waits for the queues of the
/// device for as long as it may, and this process with it.
fn while_server_runs(server: u32, start: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have exited already.
    if getppid().is_none_or(|parent| parent.as_raw_nonzero().get() as u32 != server) {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    let started = start();
    set_parent_process_death_signal(None)?;
    started
}

/// Removes the kernel's scheduler of a new device, which its loop devices do not have either: the disk
/// below the image has one, and the server can have one. Where that is not permitted, the kernel keeps
/// the one that it gives to every device with one queue, which costs time and changes nothing else.
fn remove_scheduler(id: u32) {
    let setting =
        OpenOptions::new().write(true).open(format!("{SETTINGS_DIRECTORY}/ublkb{id}/queue/scheduler"));
    // The kernel waits for the requests that it has passed on, and the image perhaps never completes one.
    let _ = setting.and_then(|setting| write_within(SETTING_TIMEOUT, setting, b"none"));
}

/// Writes `text` to `file` on a thread of the kernel's, which is left behind if it takes longer than `limit`.
///
/// # Errors
/// The kernel's error, or [`io::ErrorKind::TimedOut`]: then it is written later, or never.
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
        // Closing the ring would wait for the write.
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
    fn a_dead_setup_process_is_not_a_hung_kernel() {
        let (socket, other) = UnixStream::pair().unwrap();
        let mut setup = setup_process_of(socket);
        drop(other);
        let error = setup.give(STOP, 0).unwrap_err();
        assert!(error.to_string().contains("killed"), "{error}");
        assert!(!setup.silent && !setup.hangs, "its exit is waited for");
    }

    // Contract: detach
    #[test]
    fn a_setup_process_without_a_reply_is_not_waited_for() {
        let (socket, mut other) = UnixStream::pair().unwrap();
        let mut setup = setup_process_of(socket);
        assert_eq!(setup.give(STOP, 0).unwrap_err().kind(), io::ErrorKind::TimedOut);
        // Its late reply is not taken for that to another command.
        other.write_all(Reply::new_zeroed().as_bytes()).unwrap();
        assert_eq!(setup.give(DELETE, 0).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_command_that_did_not_complete_can_be_given_again() {
        let (socket, mut other) = UnixStream::pair().unwrap();
        let mut setup = setup_process_of(socket);
        for errno in [libc::ETIMEDOUT, 0] {
            other.write_all(Reply { errno, ..Reply::new_zeroed() }.as_bytes()).unwrap();
        }
        assert_eq!(setup.give(STOP, 0).unwrap_err().raw_os_error(), Some(libc::ETIMEDOUT));
        setup.give(STOP, 0).unwrap();
        assert!(setup.hangs, "its exit is not waited for");
    }

    // Contract: detach
    #[test]
    fn the_setup_process_exits_with_its_server() {
        // SAFETY: the copy runs the setup process's code only, which takes no lock of another thread.
        let setup = unsafe { SetupProcess::fork(|| true) }.unwrap();
        let mut socket = setup.socket.try_clone().unwrap();
        drop(setup);
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(socket.read(&mut [0]).unwrap(), 0, "its side of the socket is the last that it closes");
    }

    // Contract: detach
    #[test]
    fn a_setting_that_the_kernel_does_not_take_is_left_behind() {
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
        assert!(begin.elapsed() >= limit, "it waits that long");
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

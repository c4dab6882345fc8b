//! Processes for work that a server must not do in its own process. The server forks them before it starts
//! threads, and sends requests about a device through a socket, to each of which the process replies. A process
//! shares no memory with the server, and keeps only the descriptors that it needs.

use std::ffi::CStr;
use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::process::getppid;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::abi::DeviceInfo;

/// Name of the process of [`IdleWatch`](super::IdleWatch). [`usage`](super::usage) recognizes the process by
/// it.
pub(super) const IDLE_NAME: &CStr = c"blkq-idle";

/// How long a process may take to exit if no request hangs.
pub(super) const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// A request, or the reply to the request with the same `sequence`.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Message {
    /// The command of a request; the errno of a reply, 0 if the request succeeded.
    pub code: u32,
    pub sequence: u32,
    pub info: DeviceInfo,
}

/// The server's end. The process exits when this is dropped, which waits for the exit.
#[derive(Debug)]
pub(super) struct ServerEnd {
    pub stream: UnixStream,
    /// The sequence number of the last request.
    sequence: u32,
    /// The task of the process, for messages.
    task: &'static str,
    /// The process cannot exit soon, so nothing waits for its exit.
    abandoned: bool,
}

impl ServerEnd {
    /// Forks a process called `name` that runs `body` with its end of the socket, and keeps the descriptors
    /// `kept` open. It ignores the signals that a terminal or a service manager sends to all processes of a
    /// server, because it must still be running when the server stops its device; so `body` must return when the
    /// server has exited. Fails as fork(2) does. The other arguments are those of [`ServerEnd::pair`].
    ///
    /// # Safety
    /// This process must have only one thread: the new process contains only a copy of the forking thread, and a
    /// lock that another thread holds would stay locked in it.
    pub unsafe fn fork(
        name: &CStr,
        (task, timeout): (&'static str, Duration),
        kept: &[BorrowedFd<'_>],
        body: impl FnOnce(UnixStream) -> io::Result<()>,
    ) -> io::Result<ServerEnd> {
        let (server_end, socket) = ServerEnd::pair(task, timeout)?;
        // Signals are blocked until the child ignores them: a handler of the server, run in the child, would
        // report the signal to the server a second time.
        let before = signals(libc::SIG_BLOCK, &all_signals())?;
        // SAFETY: the caller guarantees that there are no other threads.
        let forked = unsafe { libc::fork() };
        let error = io::Error::last_os_error();
        if forked == 0 {
            for signal in IGNORED {
                // SAFETY: SIG_IGN installs no handler, so no code of this program runs.
                unsafe { libc::signal(signal, libc::SIG_IGN) };
            }
        }
        signals(libc::SIG_SETMASK, &before)?;
        match forked {
            -1 => Err(error),
            0 => {
                let _ = rustix::thread::set_name(name);
                let done = keep_only(&[kept, &[socket.as_fd()]].concat()).and_then(|()| body(socket));
                // SAFETY: _exit runs no destructor and no exit handler, which in this copy would act for the
                // server.
                unsafe { libc::_exit(i32::from(done.is_err())) }
            }
            _ => Ok(server_end),
        }
    }

    /// Creates a socket, and returns the process's end as well. The process has `timeout` to reply.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn pair(task: &'static str, timeout: Duration) -> io::Result<(ServerEnd, UnixStream)> {
        let (stream, other) = UnixStream::pair()?;
        stream.set_read_timeout(Some(timeout))?;
        Ok((ServerEnd { stream, sequence: 0, task, abandoned: false }, other))
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// Returns the process's error, which has a number, or one without a number: [`io::ErrorKind::TimedOut`]
    /// if there is no reply, or that the process was killed.
    pub fn ask(&mut self, code: u32, info: DeviceInfo) -> io::Result<DeviceInfo> {
        self.send(code, info)?;
        loop {
            let reply = receive(&mut self.stream).map_err(|e| self.no_reply(&e))?;
            // A reply with another sequence number is the late one of an earlier request.
            if reply.sequence == self.sequence {
                return match reply.code {
                    0 => Ok(reply.info),
                    errno => Err(io::Error::from_raw_os_error(errno as i32)),
                };
            }
        }
    }

    /// Sends a request without waiting for its reply.
    ///
    /// # Errors
    /// As [`ServerEnd::ask`].
    pub fn send(&mut self, code: u32, info: DeviceInfo) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let request = Message { code, sequence: self.sequence, info };
        self.stream.write_all(request.as_bytes()).map_err(|e| self.no_reply(&e))
    }

    fn no_reply(&self, error: &io::Error) -> io::Error {
        match error.kind() {
            // A socket reports its timeout as EAGAIN.
            io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
            _ => io::Error::other(format!("the process that {} was killed", self.task)),
        }
    }

    /// Notes that the process hangs: dropping this will not wait for its exit.
    pub fn abandon(&mut self) {
        self.abandoned = true;
    }
}

impl Drop for ServerEnd {
    fn drop(&mut self) {
        // The process exits when the server's side is shut down, and closes its own side last. So the end of
        // the stream means that it has exited.
        let _ = self.stream.shutdown(Shutdown::Write);
        if !self.abandoned && self.stream.set_read_timeout(Some(EXIT_TIMEOUT)).is_ok() {
            // Replies that came late are still in the stream.
            while self.stream.read(&mut [0; size_of::<Message>()]).is_ok_and(|bytes| bytes > 0) {}
        }
    }
}

/// Waits for the next message: in the forked process, for a request.
///
/// # Errors
/// Returns an error if the other process has exited, or after the timeout of the server.
pub(super) fn receive(socket: &mut UnixStream) -> io::Result<Message> {
    let mut message = Message::new_zeroed();
    socket.read_exact(message.as_mut_bytes())?;
    Ok(message)
}

/// Replies to the request number `sequence`, in the forked process.
///
/// # Errors
/// Returns an error if the server has exited.
pub(super) fn reply(
    socket: &mut UnixStream,
    sequence: u32,
    result: io::Result<DeviceInfo>,
) -> io::Result<()> {
    let (errno, info) = match result {
        Ok(info) => (0, info),
        Err(e) if e.kind() == io::ErrorKind::TimedOut => (libc::ETIMEDOUT, DeviceInfo::default()),
        Err(e) => (e.raw_os_error().unwrap_or(libc::EIO), DeviceInfo::default()),
    };
    socket.write_all(Message { code: errno as u32, sequence, info }.as_bytes())
}

/// Whether the process `server` is the parent of this one. If the server has exited, another process is.
pub(super) fn is_child_of(server: u32) -> bool {
    getppid().is_some_and(|parent| parent.as_raw_nonzero().get() as u32 == server)
}

/// Sent to all processes of a server by a terminal or a service manager.
const IGNORED: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

fn all_signals() -> libc::sigset_t {
    // SAFETY: all zeroes are a valid sigset_t, and sigfillset writes a valid pointer.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        all
    }
}

fn signals(how: libc::c_int, set: &libc::sigset_t) -> io::Result<libc::sigset_t> {
    // SAFETY: all zeroes are a valid sigset_t, and both pointers are valid.
    unsafe {
        let mut before: libc::sigset_t = std::mem::zeroed();
        match libc::pthread_sigmask(how, set, &mut before) {
            0 => Ok(before),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Closes all descriptors but `kept` and the standard streams, which become /dev/null. An open file
/// description of the image, for one, would keep the locks of the image.
fn keep_only(kept: &[BorrowedFd<'_>]) -> io::Result<()> {
    std::env::set_current_dir("/")?;
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    std::mem::forget(null);
    let mut numbers: Vec<RawFd> = kept.iter().map(AsRawFd::as_raw_fd).collect();
    numbers.sort_unstable();
    let mut first = libc::STDERR_FILENO + 1;
    for number in numbers {
        close_range(first, number - 1)?;
        first = number + 1;
    }
    close_range(first, RawFd::MAX)
}

fn close_range(first: RawFd, last: RawFd) -> io::Result<()> {
    // SAFETY: this process uses no descriptors but `kept`, which the caller leaves out of the range, and the
    // standard streams, which are below the range.
    if first <= last && unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

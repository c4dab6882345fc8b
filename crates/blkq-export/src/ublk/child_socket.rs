//! The socket between a server and a process that it has forked: the server sends requests about a device, and
//! the process replies to each.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::abi::DeviceInfo;

/// How long a process may take to exit if no request hangs.
pub(super) const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Request {
    pub what: u32,
    pub sequence: u32,
    pub info: DeviceInfo,
}

/// The reply to the request with the same `sequence`.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Reply {
    sequence: u32,
    /// 0 if the request succeeded.
    errno: i32,
    info: DeviceInfo,
}

/// The server's end. The process exits when this is dropped, which waits for the exit.
#[derive(Debug)]
pub(super) struct ServerEnd {
    stream: UnixStream,
    /// The sequence number of the last request.
    sequence: u32,
    /// The task of the process, for messages.
    task: &'static str,
    /// The process cannot exit soon, so nothing waits for its exit.
    abandoned: bool,
}

impl ServerEnd {
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
    pub fn ask(&mut self, what: u32, info: DeviceInfo) -> io::Result<DeviceInfo> {
        self.send(what, info)?;
        loop {
            let mut reply = Reply::new_zeroed();
            self.stream.read_exact(reply.as_mut_bytes()).map_err(|e| self.no_reply(&e))?;
            // A reply with another sequence number is the late one of an earlier request.
            if reply.sequence == self.sequence {
                return match reply.errno {
                    0 => Ok(reply.info),
                    errno => Err(io::Error::from_raw_os_error(errno)),
                };
            }
        }
    }

    /// Sends a request without waiting for its reply.
    ///
    /// # Errors
    /// As [`ServerEnd::ask`].
    pub fn send(&mut self, what: u32, info: DeviceInfo) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let request = Request { what, sequence: self.sequence, info };
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

    #[cfg(test)]
    pub fn try_clone(&self) -> io::Result<UnixStream> {
        self.stream.try_clone()
    }
}

impl Drop for ServerEnd {
    fn drop(&mut self) {
        // The process exits when the server's side is shut down, and closes its own side last. So the end of
        // the stream means that it has exited.
        let _ = self.stream.shutdown(Shutdown::Write);
        if !self.abandoned && self.stream.set_read_timeout(Some(EXIT_TIMEOUT)).is_ok() {
            // Replies that came late are still in the stream.
            while self.stream.read(&mut [0; size_of::<Reply>()]).is_ok_and(|bytes| bytes > 0) {}
        }
    }
}

/// Waits for the next request, in the forked process.
///
/// # Errors
/// Returns an error if the server has exited.
pub(super) fn receive(socket: &mut UnixStream) -> io::Result<Request> {
    let mut request = Request::new_zeroed();
    socket.read_exact(request.as_mut_bytes())?;
    Ok(request)
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
    socket.write_all(Reply { sequence, errno, info }.as_bytes())
}

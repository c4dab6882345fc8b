//! When a connection receives later: requests that trickle in from a client that is itself busy
//! cost a wake-up and two system calls for one or two of them. Left to gather for a moment, they
//! are done in one go, for half the processor time, and the client loses nothing by it.

use std::os::fd::{AsRawFd, BorrowedFd};

/// How long a connection backs off, at most how many requests came before it does, and how
/// many bytes of replies its client has not read.
const BACKOFF_NS: u64 = 100_000;
const REQUESTS_MAX: u64 = 24;
const UNREAD_BYTES: i32 = 64 << 10;

/// The receive back-off of one connection.
#[derive(Default)]
pub(super) struct ReceiveBackoff {
    /// Until when nothing is received, 0 if that is not so.
    until_ns: u64,
    /// Requests when it was last considered.
    requests: u64,
    /// Whether all requests had been answered when the last bytes came: then the client is what
    /// is waited for, not the device.
    device_idle: bool,
}

/// The decision of [`ReceiveBackoff::consider`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Decision {
    /// Receive at that time.
    Later(u64),
    /// The back-off is over: what came meanwhile is there at once.
    Over,
    /// Receive now.
    Now,
}

impl ReceiveBackoff {
    /// When it is over, `u64::MAX` if there is none.
    pub fn until_ns(&self) -> u64 {
        if self.until_ns == 0 { u64::MAX } else { self.until_ns }
    }

    /// Bytes came; `idle` if all earlier requests had been answered by then.
    pub fn note_device(&mut self, idle: bool) {
        self.device_idle = idle;
    }

    /// Cancels it, if there is one.
    pub fn cancel(&mut self) {
        self.until_ns = 0;
    }

    /// Whether to receive later, after `requests` of the connection in all: few came since
    /// the last time, though the client has many replies to read from `socket`.
    pub fn consider(&mut self, requests: u64, now_ns: u64, socket: BorrowedFd<'_>) -> Decision {
        if self.until_ns > now_ns {
            // Considered again in the same turn, or woken by another's deadline.
            return Decision::Later(self.until_ns);
        }
        let few = requests - self.requests <= REQUESTS_MAX;
        self.requests = requests;
        if self.until_ns != 0 {
            self.until_ns = 0;
            return Decision::Over;
        }
        if !few || !self.device_idle || unread_bytes(socket) < UNREAD_BYTES {
            return Decision::Now;
        }
        self.until_ns = now_ns + BACKOFF_NS;
        Decision::Later(self.until_ns)
    }
}

/// Memory of a socket that its peer has not yet taken, in bytes.
fn unread_bytes(socket: BorrowedFd<'_>) -> i32 {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ (the same number as TIOCOUTQ) writes one int.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 { bytes } else { 0 }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn only_a_client_with_much_to_read_is_left_alone_and_briefly() {
        let (mut server, mut client) = UnixStream::pair().unwrap();
        let mut backoff = ReceiveBackoff::default();
        backoff.note_device(true);
        assert_eq!(backoff.consider(1, 1_000, server.as_fd()), Decision::Now, "it has read everything");
        server.write_all(&[0; 96 << 10]).unwrap();
        assert_eq!(backoff.consider(100, 2_000, server.as_fd()), Decision::Now, "it asks for much");
        backoff.note_device(false);
        assert_eq!(backoff.consider(101, 3_000, server.as_fd()), Decision::Now, "the device is busy");
        backoff.note_device(true);
        let later = Decision::Later(4_000 + BACKOFF_NS);
        assert_eq!(backoff.consider(102, 4_000, server.as_fd()), later);
        assert_eq!(backoff.consider(102, 5_000, server.as_fd()), later);
        assert_eq!(backoff.until_ns(), 4_000 + BACKOFF_NS);
        assert_eq!(backoff.consider(102, 4_000 + BACKOFF_NS, server.as_fd()), Decision::Over);
        assert_eq!(backoff.until_ns(), u64::MAX);
        client.read_exact(&mut [0; 96 << 10]).unwrap();
        assert_eq!(backoff.consider(103, 300_000, server.as_fd()), Decision::Now);
    }
}

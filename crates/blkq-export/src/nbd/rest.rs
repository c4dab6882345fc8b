//! When a connection rests: requests that trickle in from a client that is itself busy cost
//! a wake-up and two system calls for one or two of them. Left to gather for a moment, they
//! are done in one go, for half the processor time, and the client loses nothing by it.

use std::os::fd::{AsRawFd, BorrowedFd};

/// How long a connection rests, at most how many requests came before it does, and how
/// many bytes of replies its client has not read.
const REST_NS: u64 = 100_000;
const REST_REQUESTS_MAX: u64 = 24;
const REST_UNREAD_BYTES: i32 = 64 << 10;

/// The rest of one connection.
#[derive(Default)]
pub(super) struct Rest {
    /// Until when nothing is received, 0 if that is not so.
    until_ns: u64,
    /// Requests when it was last considered to rest.
    requests: u64,
    /// Whether all that was asked had been answered when the last bytes came: then the client
    /// is what is waited for, not the device.
    pub device_idle: bool,
}

/// What [`Rest::consider`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Resting {
    /// Until then.
    Until(u64),
    /// It has just ended: what came meanwhile is there at once.
    Ended,
    /// It does not rest.
    No,
}

impl Rest {
    /// When it ends, `u64::MAX` if the connection does not rest.
    pub fn until_ns(&self) -> u64 {
        if self.until_ns == 0 { u64::MAX } else { self.until_ns }
    }

    /// Ends it, if there is one.
    pub fn end(&mut self) {
        self.until_ns = 0;
    }

    /// Whether to receive later, after `requests` of the connection in all: few came since
    /// the last time, though the client has many replies to read from `socket`.
    pub fn consider(&mut self, requests: u64, now_ns: u64, socket: BorrowedFd<'_>) -> Resting {
        if self.until_ns > now_ns {
            // Looked at again in the same turn, or woken by another's deadline.
            return Resting::Until(self.until_ns);
        }
        let few = requests - self.requests <= REST_REQUESTS_MAX;
        self.requests = requests;
        if self.until_ns != 0 {
            self.until_ns = 0;
            return Resting::Ended;
        }
        if !few || !self.device_idle || unread_bytes(socket) < REST_UNREAD_BYTES {
            return Resting::No;
        }
        self.until_ns = now_ns + REST_NS;
        Resting::Until(self.until_ns)
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
    fn only_a_client_with_much_to_read_is_left_to_it_and_only_for_a_moment() {
        let (mut server, mut client) = UnixStream::pair().unwrap();
        let mut rest = Rest { device_idle: true, ..Rest::default() };
        assert_eq!(rest.consider(1, 1_000, server.as_fd()), Resting::No, "it has read everything");
        server.write_all(&[0; 96 << 10]).unwrap();
        assert_eq!(rest.consider(100, 2_000, server.as_fd()), Resting::No, "it asks for much");
        rest.device_idle = false;
        assert_eq!(rest.consider(101, 3_000, server.as_fd()), Resting::No, "the device is busy");
        rest.device_idle = true;
        let until = Resting::Until(4_000 + REST_NS);
        assert_eq!(rest.consider(102, 4_000, server.as_fd()), until);
        assert_eq!(rest.consider(102, 5_000, server.as_fd()), until);
        assert_eq!(rest.until_ns(), 4_000 + REST_NS);
        assert_eq!(rest.consider(102, 4_000 + REST_NS, server.as_fd()), Resting::Ended);
        assert_eq!(rest.until_ns(), u64::MAX);
        client.read_exact(&mut [0; 96 << 10]).unwrap();
        assert_eq!(rest.consider(103, 300_000, server.as_fd()), Resting::No);
    }
}

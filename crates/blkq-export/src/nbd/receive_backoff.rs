//! Delays the next receive of a client that is busy reading replies. Its requests arrive one by one, and each
//! costs a wake-up and two system calls; received together they take half the CPU time.

use std::os::fd::{AsRawFd, BorrowedFd};

/// Delay of a receive in nanoseconds: time for several requests to arrive.
const BACKOFF_NS: u64 = 100_000;
/// A receive is delayed only if at most this number of requests arrived since the last decision.
const REQUESTS_MAX: u64 = 24;
/// A receive is delayed only if the client has not read at least this number of bytes of replies.
const UNREAD_BYTES: i32 = 64 << 10;

#[derive(Default)]
pub(super) struct ReceiveBackoff {
    /// End of the current back-off; 0 if there is none.
    until_ns: u64,
    requests: u64,
    /// All requests had been answered when the last bytes arrived: the client limits the throughput.
    device_idle: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Decision {
    /// Receive at the given time.
    Later(u64),
    /// The back-off is over: receive now, and expect that data has arrived.
    Over,
    /// There is no reason to delay: receive now.
    Now,
}

impl ReceiveBackoff {
    pub fn until_ns(&self) -> u64 {
        if self.until_ns == 0 { u64::MAX } else { self.until_ns }
    }

    pub fn note_device(&mut self, idle: bool) {
        self.device_idle = idle;
    }

    pub fn cancel(&mut self) {
        self.until_ns = 0;
    }

    /// Delays if few of the `requests` so far arrived since the last call, although many replies are unread
    /// in `socket`.
    pub fn consider(&mut self, requests: u64, now_ns: u64, socket: BorrowedFd<'_>) -> Decision {
        if self.until_ns > now_ns {
            // This is called again in the same turn, or because of another deadline.
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

/// The memory of the socket's send buffer that the peer has not read yet, in bytes.
fn unread_bytes(socket: BorrowedFd<'_>) -> i32 {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ, which has the same number as TIOCOUTQ, writes one int.
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
    fn receives_are_delayed_only_if_many_replies_are_unread() {
        let (mut server, mut client) = UnixStream::pair().unwrap();
        let mut backoff = ReceiveBackoff::default();
        backoff.note_device(true);
        assert_eq!(
            backoff.consider(1, 1_000, server.as_fd()),
            Decision::Now,
            "the client has read everything"
        );
        server.write_all(&[0; 96 << 10]).unwrap();
        assert_eq!(backoff.consider(100, 2_000, server.as_fd()), Decision::Now, "many requests arrived");
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

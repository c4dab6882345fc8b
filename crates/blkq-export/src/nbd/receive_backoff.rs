//! Delays the next receive of a client that is busy reading replies. Its requests arrive one by one, and each
//! costs a wake-up and two system calls; received together they take half the CPU time.

use std::os::fd::AsRawFd;

/// Delay of a receive in nanoseconds: time for several requests to arrive.
const BACKOFF_NS: u64 = 100_000;
/// A receive is delayed only if at most this number of requests arrived since the last decision.
const REQUESTS_MAX: u64 = 24;
/// A receive is delayed only if the client has not read at least this number of bytes of replies.
const UNREAD_BYTES: i32 = 64 << 10;

#[derive(Default)]
pub(super) struct ReceiveBackoff {
    /// End of the current back-off.
    pub until_ns: Option<u64>,
    requests: u64,
    /// All requests had been answered when the last bytes arrived: the client limits the throughput.
    pub device_idle: bool,
}

impl ReceiveBackoff {
    /// Whether to receive later. A back-off begins if few of the `requests` so far arrived since the last call,
    /// although many replies are unread in `socket`. When it is over, the next receive is not delayed.
    pub fn delays(&mut self, requests: u64, now_ns: u64, socket: &impl AsRawFd) -> bool {
        let was_delayed = match self.until_ns {
            // This is called again in the same turn, or because of another deadline.
            Some(until_ns) if until_ns > now_ns => return true,
            until_ns => until_ns.is_some(),
        };
        let few = requests - self.requests <= REQUESTS_MAX;
        self.requests = requests;
        let delays = !was_delayed && few && self.device_idle && unread_bytes(socket) >= UNREAD_BYTES;
        self.until_ns = delays.then_some(now_ns + BACKOFF_NS);
        delays
    }
}

/// The memory of the socket's send buffer that the peer has not read yet, in bytes.
fn unread_bytes(socket: &impl AsRawFd) -> i32 {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ, which has the same number as TIOCOUTQ, writes one int.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 { bytes } else { 0 }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn receives_are_delayed_only_if_many_replies_are_unread() {
        let (mut server, mut client) = UnixStream::pair().unwrap();
        let mut backoff = ReceiveBackoff { device_idle: true, ..ReceiveBackoff::default() };
        assert!(!backoff.delays(1, 1_000, &server), "the client has read everything");
        server.write_all(&[0; 96 << 10]).unwrap();
        assert!(!backoff.delays(100, 2_000, &server), "many requests arrived");
        backoff.device_idle = false;
        assert!(!backoff.delays(101, 3_000, &server), "the device is busy");
        backoff.device_idle = true;
        assert!(backoff.delays(102, 4_000, &server));
        assert!(backoff.delays(102, 5_000, &server));
        assert_eq!(backoff.until_ns, Some(4_000 + BACKOFF_NS));
        assert!(!backoff.delays(102, 4_000 + BACKOFF_NS, &server), "the back-off is over");
        assert_eq!(backoff.until_ns, None);
        client.read_exact(&mut [0; 96 << 10]).unwrap();
        assert!(!backoff.delays(103, 300_000, &server));
    }
}

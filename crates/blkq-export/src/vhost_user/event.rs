//! The eventfds of a front end: what one may be, and how not to wait for it.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, FileType, StatxFlags, statx};
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, Shutdown, SocketType, shutdown};

use super::message::{Refusal, refuse};

/// Refuses what is neither an eventfd nor a unix stream socket (user-mode Linux has a pair of those, and
/// calls it a pipe): an engine writes to it, and must not wait for a file system. A pipe would be as good,
/// but for [`unblock`].
pub fn check_event(file: &OwnedFd) -> Result<(), Refusal> {
    let found = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::TYPE)
        .map_err(|errno| refuse(format!("its descriptor: {errno}")))?;
    // The kernel's anonymous files have no type.
    let kind = u32::from(found.stx_mode) & libc::S_IFMT;
    let is_stream = || {
        FileType::from_raw_mode(kind) == FileType::Socket
            && socket_domain(file) == Ok(AddressFamily::UNIX)
            && socket_type(file) == Ok(SocketType::STREAM)
    };
    if kind == 0 || is_stream() {
        return Ok(());
    }
    Err(refuse("its descriptor is neither an eventfd nor a unix stream socket"))
}

/// Whether a write to it ([`PollFlags::OUT`]) or a read of it would not block now.
pub fn is_ready(file: &OwnedFd, events: PollFlags) -> bool {
    let mut polls = [PollFd::from_borrowed_fd(file.as_fd(), events)];
    let ready = poll(&mut polls, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    ready == Ok(1) && polls[0].revents().contains(events)
}

/// Writes to it, or does nothing where it does not block and is full.
pub fn signal(file: &OwnedFd) {
    let _ = rustix::io::write(file, &1u64.to_ne_bytes());
}

/// Lets a thread go on that is blocked in writing to it: its front end has filled it. An eventfd is read; a
/// socket is shut down, as its other end reads it or nobody does.
pub fn unblock(file: &OwnedFd) {
    if is_ready(file, PollFlags::OUT) || shutdown(file, Shutdown::Write).is_ok() {
        return;
    }
    if is_ready(file, PollFlags::IN) {
        let _ = rustix::io::read(file, &mut [0; 8]);
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{OFlags, fcntl_setfl};
    use rustix::net::{SocketFlags, socketpair};

    use super::*;

    fn sockets(kind: SocketType) -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn eventfds_and_stream_sockets_are_accepted_and_nothing_else() {
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        assert_eq!(check_event(&event), Ok(()));
        assert_eq!(check_event(&sockets(SocketType::STREAM).0), Ok(()));
        assert!(check_event(&sockets(SocketType::DGRAM).0).is_err());
        assert!(check_event(&std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into()).is_err());
        assert!(check_event(&rustix::pipe::pipe().unwrap().1).is_err());
        for path in ["/dev/null", "/proc/self/exe", "/tmp"] {
            assert!(check_event(&std::fs::File::open(path).unwrap().into()).is_err(), "{path}");
        }
    }

    #[test]
    fn a_thread_that_is_blocked_in_writing_goes_on() {
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let (socket, _other_end) = sockets(SocketType::STREAM);
        fcntl_setfl(&socket, OFlags::NONBLOCK).unwrap();
        while rustix::io::write(&socket, &[0; 8]).is_ok() {}
        fcntl_setfl(&socket, OFlags::empty()).unwrap();
        for full in [event, socket] {
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| signal(&full));
                std::thread::sleep(std::time::Duration::from_millis(20));
                assert!(!writer.is_finished(), "it is full");
                unblock(&full);
                writer.join().unwrap();
            });
        }
    }

    #[test]
    fn a_full_eventfd_is_not_ready() {
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        assert!(is_ready(&event, PollFlags::OUT) && !is_ready(&event, PollFlags::IN));
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert!(!is_ready(&event, PollFlags::OUT) && is_ready(&event, PollFlags::IN));
    }
}

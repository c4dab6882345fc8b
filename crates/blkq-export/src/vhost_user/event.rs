//! The eventfds of a front end, and how not to wait for them.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};

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
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn sockets(kind: SocketType) -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
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

//! The eventfds of a front end: what one may be, and how not to wait for it.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, FileType, StatxFlags, statx};

use super::message::{Refusal, refuse};

/// Refuses what is neither an eventfd nor a pipe (user-mode Linux has those): an engine writes to it,
/// and must not wait for a file system.
pub fn check_event(file: &OwnedFd) -> Result<(), Refusal> {
    let found = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::TYPE)
        .map_err(|errno| refuse(format!("its descriptor: {errno}")))?;
    // The kernel's anonymous files have no type.
    let kind = u32::from(found.stx_mode) & libc::S_IFMT;
    if kind == 0 || FileType::from_raw_mode(kind) == FileType::Fifo {
        return Ok(());
    }
    Err(refuse("its descriptor is neither an eventfd nor a pipe"))
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

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn eventfds_and_pipes_are_accepted_and_nothing_else() {
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        assert_eq!(check_event(&event), Ok(()));
        assert_eq!(check_event(&rustix::pipe::pipe().unwrap().1), Ok(()));
        for path in ["/dev/null", "/proc/self/exe", "/tmp"] {
            assert!(check_event(&std::fs::File::open(path).unwrap().into()).is_err(), "{path}");
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

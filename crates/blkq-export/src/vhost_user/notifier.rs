//! Notifies a front end through an eventfd, which the front end may fill and make blocking. So this module
//! never writes to an eventfd, but registers it with an io_uring of its own. When a NOP completes there, the
//! kernel adds 1 to the counter, up to its limit, and never blocks.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use blkq::Error;
use io_uring::register::Restriction;
use io_uring::{IoUring, opcode};
use rustix::net::{SendFlags, send};

use super::untrusted_fd::CallFile;
use crate::retry::retry;

/// Time that [`Notifier::prepare`] waits for memory: that of a closed ring counts until the kernel frees it.
pub const MEMORY_WAIT: Duration = Duration::from_secs(2);
const MEMORY_RETRY: Duration = Duration::from_millis(20);

// The only operations that a ring may register: IORING_REGISTER_EVENTFD, IORING_UNREGISTER_EVENTFD.
const REGISTER_OPERATIONS: [u8; 2] = [4, 5];

/// Sends notifications to a front end. Its io_uring is created once and stays: the kernel frees closed rings
/// late, so rings are not created for each connection.
#[derive(Default)]
pub struct Notifier {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// `None` until it is needed. An errno if there is no ring and none can be created later.
    ring: Option<Result<Box<IoUring>, i32>>,
    target: Target,
}

#[derive(Default)]
enum Target {
    #[default]
    None,
    Event,
    Socket(OwnedFd),
}

impl Notifier {
    /// Creates the ring, for a process that cannot create one later. Waits for memory until `deadline`. After
    /// an error of io_uring_setup(2), [`Notifier::set`] rejects eventfds.
    pub fn prepare(&self, deadline: Instant) -> Result<(), Error> {
        let lacks_memory = |e: &io::Error| e.raw_os_error() == Some(libc::ENOMEM);
        let make = || {
            let ring = retry(deadline, MEMORY_RETRY, make_ring, lacks_memory);
            ring.map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))
        };
        match self.state().ring.get_or_insert_with(make) {
            Err(errno) => Err(failed(io::Error::from_raw_os_error(*errno))),
            Ok(_) => Ok(()),
        }
    }

    /// Sets the descriptor, or none after an error of io_uring_setup(2) or io_uring_register(2).
    pub fn set(&self, file: Option<CallFile>) -> Result<(), Error> {
        self.state().set(file).map_err(failed)
    }

    /// Notifies the front end, and returns whether a descriptor is set. Never blocks: a full or closed socket
    /// is skipped. Does nothing while another thread sets a descriptor; that thread must then make the engine
    /// notify the new descriptor. Fails as io_uring_enter(2) does, if the kernel has no memory.
    pub fn notify(&self) -> io::Result<bool> {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(false),
        };
        let State { ring, target } = &mut *state;
        match (target, ring) {
            (Target::Event, Some(Ok(ring))) => complete_one(ring)?,
            (Target::Socket(socket), _) => send_one(socket),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Notifies through `file` once. Fails as [`Notifier::set`] and [`Notifier::notify`] do.
    pub fn notify_once(&self, file: &CallFile) -> Result<(), Error> {
        match file {
            CallFile::Socket(socket) => send_one(socket),
            CallFile::Event(event) => {
                let mut state = self.state();
                let done = state.register(event).and_then(complete_one);
                let cleared = state.set(None);
                done.and(cleared).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn set(&mut self, file: Option<CallFile>) -> io::Result<()> {
        if let (Target::Event, Some(Ok(ring))) = (std::mem::take(&mut self.target), &self.ring) {
            ring.submitter().unregister_eventfd()?;
        }
        match file {
            None => {}
            Some(CallFile::Event(event)) => _ = self.register(&event)?,
            Some(CallFile::Socket(socket)) => self.target = Target::Socket(socket),
        }
        Ok(())
    }

    fn register(&mut self, event: &OwnedFd) -> io::Result<&mut IoUring> {
        let ring = self.ring.take().map_or_else(|| make_ring().map(Ok), Ok)?;
        let ring = self.ring.insert(ring).as_mut().map_err(|errno| io::Error::from_raw_os_error(*errno))?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        self.target = Target::Event;
        Ok(ring)
    }
}

/// Creates a ring that can only execute NOPs and register an eventfd.
fn make_ring() -> io::Result<Box<IoUring>> {
    let ring = IoUring::builder().dontfork().setup_r_disabled().build(1)?;
    let mut allowed = vec![Restriction::sqe_op(opcode::Nop::CODE)];
    allowed.extend(REGISTER_OPERATIONS.map(Restriction::register_op));
    ring.submitter().register_restrictions(&mut allowed)?;
    ring.submitter().register_enable_rings()?;
    Ok(Box::new(ring))
}

fn complete_one(ring: &mut IoUring) -> io::Result<()> {
    // SAFETY: a NOP has no memory. If the queue is full, a NOP that could not be submitted before is still in
    // it.
    let _ = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
    ring.submit()?;
    ring.completion().for_each(drop);
    Ok(())
}

fn send_one(socket: &OwnedFd) {
    let _ = send(socket, &1u64.to_ne_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

fn failed(error: io::Error) -> Error {
    let hint = match error.raw_os_error() {
        Some(libc::ENOMEM) => "raise the limit of locked memory (ulimit -l)",
        Some(libc::EMFILE) => "raise the limit of open files (ulimit -n)",
        _ => "see io_uring_register(2)",
    };
    Error::system("cannot signal an eventfd through io_uring", error).with_hint(hint)
}

#[cfg(test)]
mod tests;

//! Notifies a front end through a descriptor that it controls as well: it may fill an eventfd, and choose
//! whether a write to it then waits, at any time. So nothing here writes to one. It is registered with
//! a ring of its own, and the kernel signals it when a request without any effect completes there: that
//! adds to the count, up to its limit, and never waits.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use blkq::Error;
use io_uring::register::Restriction;
use io_uring::{IoUring, opcode};
use rustix::net::{SendFlags, send};

use super::foreign::CallFile;

/// How long a ring that is made ahead waits for memory: as those of engines, the kernel frees a closed one
/// some time later.
pub const MEMORY_WAIT: Duration = Duration::from_secs(2);
const MEMORY_RETRY: Duration = Duration::from_millis(20);

/// All that a ring may register: `IORING_REGISTER_EVENTFD`, `IORING_UNREGISTER_EVENTFD`.
const REGISTER_OPERATIONS: [u8; 2] = [4, 5];

/// Sends notifications to a front end. Its ring is made with the first eventfd, if not before, and
/// stays: however often front ends connect and set descriptors, the kernel has no more rings to free.
#[derive(Default)]
pub struct Notifier {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    ring: Ring,
    target: Target,
}

#[derive(Default)]
enum Ring {
    #[default]
    None,
    Made(Box<IoUring>),
    /// There is none, and none can be made any more: the error number of the attempt.
    Missing(i32),
}

#[derive(Default)]
enum Target {
    #[default]
    None,
    /// The eventfd that is registered with the ring.
    Event,
    Socket(CallFile),
}

impl Notifier {
    /// Makes the ring, for a process that can make none later; waits for memory until `deadline`.
    ///
    /// # Errors
    /// Those of io_uring_setup(2); [`Notifier::set`] rejects eventfds then.
    pub fn prepare(&self, deadline: Instant) -> Result<(), Error> {
        let mut state = self.state();
        if matches!(state.ring, Ring::None) {
            state.ring = loop {
                match make_ring() {
                    Ok(ring) => break Ring::Made(Box::new(ring)),
                    Err(e) if e.raw_os_error() == Some(libc::ENOMEM) && Instant::now() < deadline => {
                        thread::sleep(MEMORY_RETRY);
                    }
                    Err(e) => break Ring::Missing(e.raw_os_error().unwrap_or(libc::EIO)),
                }
            };
        }
        match state.ring {
            Ring::Missing(errno) => Err(failed(io::Error::from_raw_os_error(errno))),
            _ => Ok(()),
        }
    }

    /// Notifies through `file` from now on.
    ///
    /// # Errors
    /// Those of io_uring_setup(2) and io_uring_register(2); there is no descriptor then.
    pub fn set(&self, file: Option<CallFile>) -> Result<(), Error> {
        self.state().set(file).map_err(failed)
    }

    /// Notifies the front end, and returns whether it has set a descriptor. Never waits: a socket that is
    /// full or closed gets nothing. Does nothing while another thread sets a descriptor, after which that
    /// one must have the front end notified.
    ///
    /// # Errors
    /// Those of io_uring_enter(2): the kernel is out of memory.
    pub fn notify(&self) -> io::Result<bool> {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(false),
        };
        let State { ring, target } = &mut *state;
        match (target, ring) {
            (Target::Event, Ring::Made(ring)) => complete_one(ring)?,
            (Target::Socket(socket), _) => send_one(socket),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Notifies through `file`, once.
    ///
    /// # Errors
    /// As [`Notifier::set`] and [`Notifier::notify`].
    pub fn notify_once(&self, file: &CallFile) -> Result<(), Error> {
        if matches!(file, CallFile::Socket(_)) {
            send_one(file);
            return Ok(());
        }
        let mut state = self.state();
        let done = state.register(file).and_then(complete_one);
        let cleared = state.set(None);
        done.and(cleared).map_err(failed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn set(&mut self, file: Option<CallFile>) -> io::Result<()> {
        if let (Target::Event, Ring::Made(ring)) = (std::mem::take(&mut self.target), &self.ring) {
            ring.submitter().unregister_eventfd()?;
        }
        match file {
            None => {}
            Some(file @ CallFile::Event(_)) => _ = self.register(&file)?,
            Some(socket) => self.target = Target::Socket(socket),
        }
        Ok(())
    }

    /// Registers an eventfd, which nothing need keep open from then on. Returns the ring.
    fn register(&mut self, event: &CallFile) -> io::Result<&mut IoUring> {
        if matches!(self.ring, Ring::None) {
            self.ring = Ring::Made(Box::new(make_ring()?));
        }
        let ring = match &mut self.ring {
            Ring::Made(ring) => ring,
            Ring::Missing(errno) => return Err(io::Error::from_raw_os_error(*errno)),
            Ring::None => return Err(io::ErrorKind::NotFound.into()),
        };
        ring.submitter().register_eventfd(event.as_fd().as_raw_fd())?;
        self.target = Target::Event;
        Ok(ring)
    }
}

/// A ring that can do nothing but what this needs.
fn make_ring() -> io::Result<IoUring> {
    let ring = IoUring::builder().dontfork().setup_r_disabled().build(1)?;
    let mut allowed = vec![Restriction::sqe_op(opcode::Nop::CODE)];
    allowed.extend(REGISTER_OPERATIONS.map(Restriction::register_op));
    ring.submitter().register_restrictions(&mut allowed)?;
    ring.submitter().register_enable_rings()?;
    Ok(ring)
}

/// Has a request complete that does nothing.
fn complete_one(ring: &mut IoUring) -> io::Result<()> {
    // SAFETY: no memory is passed. There is room, unless one is left that could not be submitted.
    let _ = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
    ring.submit()?;
    ring.completion().for_each(drop);
    Ok(())
}

fn send_one(socket: &CallFile) {
    let _ = send(socket, &1u64.to_ne_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

fn failed(error: io::Error) -> Error {
    let cure = match error.raw_os_error() {
        Some(libc::ENOMEM) => "raise the limit of locked memory (ulimit -l)",
        Some(libc::EMFILE) => "raise the limit of open files (ulimit -n)",
        _ => "see io_uring_register(2)",
    };
    Error::system("cannot signal an eventfd through io_uring", error).with_cure(cure)
}

#[cfg(test)]
mod tests;

//! Waking the owner of a queue, which may sleep in the kernel: an eventfd that is written
//! only if the owner sleeps.

#[cfg(all(test, model_check))]
mod model;
#[cfg(all(test, not(model_check)))]
mod tests;

#[cfg(not(model_check))]
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::error::Error;
use crate::layout::{CachePadded, HotField, Writer};
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst, fence};

const RUNNING: u32 = 0;
const SLEEPING: u32 = 1;
/// The eventfd was written since the owner went to sleep.
const KICKED: u32 = 2;

/// A thread that can be woken to check for work: the owner of a queue, or one that sleeps.
pub trait Wake: Send + Sync {
    /// Wakes it. Called on threads that must not block; may come without a cause.
    fn wake(&self);
}

/// How other threads wake the owner of a queue.
///
/// Others make their work visible and then [`kick`](Kick::kick). The owner calls
/// [`prepare_sleep`](Kick::prepare_sleep), checks for work once more, sleeps until
/// [`fd`](Kick::fd) is readable if there is none, and calls [`woke`](Kick::woke) in any
/// case. If the descriptor was readable it calls [`drain`](Kick::drain) before it prepares
/// to sleep again. A kick that came late may cut the next sleep short without a cause.
#[derive(Debug)]
pub struct Kick {
    /// Written each time that the owner sleeps, and read for each bio that it is to take.
    state: CachePadded<AtomicU32>,
    /// [`Wake::wake`] was called since the owner last checked.
    woken: AtomicBool,
    event: Event,
}

impl Kick {
    /// A kick whose owner runs.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) if the process has no descriptor left.
    pub fn new() -> Result<Kick, Error> {
        let state = CachePadded::new(AtomicU32::new(RUNNING));
        Ok(Kick { state, woken: AtomicBool::new(false), event: Event::new()? })
    }

    /// The words that the owner and those that wake it use, with their addresses.
    pub(crate) fn hot_fields(&self, writer: Writer, fields: &mut Vec<HotField>) {
        let Kick { state, woken, event: _ } = self;
        fields.push(HotField::of("kick", writer, &**state));
        fields.push(HotField::of("woken", writer, woken));
    }

    /// The owner, to sleep next, checks for work after this and before it sleeps.
    #[inline]
    pub fn prepare_sleep(&self) {
        self.state.swap(SLEEPING, SeqCst);
        fence(SeqCst);
    }

    /// The owner does not sleep, or no longer.
    #[inline]
    pub fn woke(&self) {
        self.state.swap(RUNNING, SeqCst);
    }

    /// Wakes the owner if it sleeps; else it will check for work before it sleeps. Never blocks.
    #[inline]
    pub fn kick(&self) {
        // The caller's stores come before the load of the state.
        fence(SeqCst);
        if self.state.load(SeqCst) == SLEEPING {
            self.kick_sleeper();
        }
    }

    #[cold]
    fn kick_sleeper(&self) {
        if self.state.compare_exchange(SLEEPING, KICKED, SeqCst, SeqCst).is_ok() {
            self.event.write();
        }
    }

    /// Whether the owner was woken, and has not checked since.
    #[inline]
    pub fn is_woken(&self) -> bool {
        self.woken.load(SeqCst)
    }

    /// Whether the owner was woken. It checks, next, all that it may have been woken for.
    #[inline]
    pub fn take_woken(&self) -> bool {
        self.woken.load(SeqCst) && self.woken.swap(false, SeqCst)
    }

    /// Empties the descriptor, which may be empty.
    pub fn drain(&self) {
        self.event.drain();
    }

    /// The descriptor that becomes readable when the sleeping owner is kicked.
    #[cfg(not(model_check))]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.event.0.as_fd()
    }
}

#[cfg(model_check)]
impl Kick {
    /// Sleeps until kicked.
    pub(crate) fn wait(&self) {
        self.event.readable.wait_until(|| self.is_readable());
    }

    /// Whether there is something to drain.
    pub(crate) fn is_readable(&self) -> bool {
        self.event.count.load(SeqCst) > 0
    }
}

/// Only the driver can see why its queue is woken. So the wake-up is noted, for the owner
/// that has asked the driver already and is about to sleep.
impl Wake for Kick {
    fn wake(&self) {
        self.woken.swap(true, SeqCst);
        self.kick();
    }
}

#[cfg(not(model_check))]
#[derive(Debug)]
struct Event(OwnedFd);

#[cfg(not(model_check))]
impl Event {
    fn new() -> Result<Event, Error> {
        use rustix::event::{EventfdFlags, eventfd};
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Event)
            .map_err(|e| Error::system("cannot make an eventfd", e))
    }

    fn write(&self) {
        // It fails only when the counter is at its end, and then it is readable.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn drain(&self) {
        // One read empties it; it fails when it was empty.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

/// The twin of the eventfd for the checkers.
#[cfg(model_check)]
#[derive(Default, Debug)]
struct Event {
    count: AtomicU32,
    readable: crate::sync::WaitQueue,
}

#[cfg(model_check)]
impl Event {
    fn new() -> Result<Event, Error> {
        Ok(Event::default())
    }

    fn write(&self) {
        self.count.fetch_add(1, SeqCst);
        self.readable.wake_all();
    }

    fn drain(&self) {
        self.count.swap(0, SeqCst);
    }
}

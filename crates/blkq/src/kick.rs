//! Wakes the owner of a queue, which may be sleeping in the kernel, through an eventfd that is written only
//! while the owner sleeps.

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
/// The eventfd was written since the owner started to sleep.
const KICKED: u32 = 2;

/// A thread that can be woken to check for work: the owner of a queue, or a waiting submitter.
pub trait Wake: Send + Sync {
    /// Wakes the thread. Must not block. The thread must tolerate wake-ups without a cause.
    fn wake(&self);
}

/// Lets other threads wake the owner of a queue.
///
/// Another thread makes its work visible and then calls [`kick`](Kick::kick). The owner calls
/// [`prepare_sleep`](Kick::prepare_sleep) and checks for work once more. If there is none, it sleeps until
/// [`fd`](Kick::fd) is readable. In any case it calls [`woke`](Kick::woke) then. If the descriptor was
/// readable, the owner calls [`drain`](Kick::drain) before it prepares to sleep again. A late kick may end
/// the next sleep without a cause.
#[derive(Debug)]
pub struct Kick {
    /// Written whenever the owner sleeps or wakes, and read by submitters for each bio.
    state: CachePadded<AtomicU32>,
    /// [`Wake::wake`] was called since the owner last checked.
    woken: AtomicBool,
    event: Event,
}

impl Kick {
    /// A kick whose owner is running. Fails if the process cannot open another descriptor.
    pub fn new() -> Result<Kick, Error> {
        let state = CachePadded::new(AtomicU32::new(RUNNING));
        Ok(Kick { state, woken: AtomicBool::new(false), event: Event::new()? })
    }

    pub(crate) fn hot_fields(&self, writer: Writer, fields: &mut Vec<HotField>) {
        let Kick { state, woken, event: _ } = self;
        fields.push(HotField::of("kick", writer, &**state));
        fields.push(HotField::of("woken", writer, woken));
    }

    /// Announces that the owner will sleep. It must check for work between this call and the sleep.
    pub fn prepare_sleep(&self) {
        self.state.swap(SLEEPING, SeqCst);
        fence(SeqCst);
    }

    /// Announces that the owner does not sleep, or no longer sleeps.
    pub fn woke(&self) {
        self.state.swap(RUNNING, SeqCst);
    }

    /// Wakes the owner if it sleeps. An owner that is running checks for work before it sleeps. Never blocks.
    #[inline]
    pub fn kick(&self) {
        // Orders the caller's stores before the load of the state. Pairs with the owner, which stores the
        // state before it checks for work.
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

    pub fn is_woken(&self) -> bool {
        self.woken.load(SeqCst)
    }

    /// Whether [`Wake::wake`] was called. The caller must then check everything that may have woken it.
    pub fn take_woken(&self) -> bool {
        self.woken.load(SeqCst) && self.woken.swap(false, SeqCst)
    }

    /// Empties the descriptor. Harmless if the descriptor is empty.
    pub fn drain(&self) {
        self.event.drain();
    }

    #[cfg(not(model_check))]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.event.0.as_fd()
    }
}

#[cfg(model_check)]
impl Kick {
    pub(crate) fn wait(&self) {
        self.event.readable.wait_until(|| self.is_readable());
    }

    pub(crate) fn is_readable(&self) -> bool {
        self.event.count.load(SeqCst) > 0
    }
}

/// A driver wakes its queue for a reason that only the driver can see. So the wake-up is recorded, for an
/// owner that has already polled the driver and is about to sleep.
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
            .map_err(|e| Error::system("cannot create an eventfd", e))
    }

    fn write(&self) {
        // Fails only if the counter has its maximum, and then the descriptor is readable anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn drain(&self) {
        // One read resets the counter. It fails if the counter was 0.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

/// A replacement of the eventfd for the model checkers.
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

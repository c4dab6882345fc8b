//! A hardware queue: everything that one thread owns of a disk. Bios come in through
//! [`Queue::submit`], become requests under the plug, reach the driver in batches, and
//! end in completion batches. No lock, no hand-over, no allocation on that way.
//!
//! The ring is lent to every call that may reach the driver, because one thread has one
//! ring and perhaps several queues.

mod complete;
mod dispatch;
mod flush;
pub mod hang;
mod merge;
mod parts;
pub mod plug;
mod pull;
mod submit;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::bio::Completion;
use crate::buffer::{Data, IoBuffer};
use crate::clock::Clock;
use crate::completer::Completer;
use crate::disk::{Disk, HardwareQueue, Settings};
use crate::driver::{DriverContext, DriverQueue};
use crate::error::{Error, ErrorKind, IoResult, Status};
use crate::limits::QueueLimits;
use crate::queue::flush::FlushMachine;
use crate::queue::hang::Watch;
use crate::queue::plug::Plug;
use crate::queue::submit::FastLimits;
use crate::request::Request;
use crate::ring::{Cqe, Registrar, Ring};
use crate::sched::Scheduler;
use crate::slab::{BioList, BioSlab};
use crate::stats::StatsWriter;
use crate::tags::Tag;
use crate::tags::{TagHint, TagSet, WaiterId};

/// Bios that a queue takes for each of its tags before it refuses more.
const BIOS_PER_TAG: u32 = 8;
/// Fewest bios that a queue takes.
const BIOS_MIN: u32 = 1024;
/// Size of the queue's zeroes, from which emulated write-zeroes write.
const ZEROES_BYTES: u32 = 64 << 10;

/// The zeroes that emulated write-zeroes write from: as a segment they must be legal.
fn zeroes_for(limits: &QueueLimits) -> IoBuffer {
    let longest = limits.max_segment_bytes & !(limits.logical_block_bytes - 1);
    IoBuffer::zeroed(longest.min(ZEROES_BYTES) as usize)
}

/// One hardware queue of a disk, owned by one thread.
pub(crate) struct Queue {
    pub(crate) disk: Arc<Disk>,
    pub(crate) index: usize,
    pub(crate) owner: u16,
    pub(crate) driver: Box<dyn DriverQueue>,
    pub(crate) limits: QueueLimits,
    pub(crate) fast: FastLimits,
    pub(crate) settings: Settings,
    pub(crate) generation: u64,
    pub(crate) requests: Box<[Request]>,
    pub(crate) bios: BioSlab,
    pub(crate) tags: Arc<TagSet>,
    pub(crate) hint: TagHint,
    pub(crate) plug: Plug,
    /// Bios that have no tag yet, and parts of split bios, in order.
    pub(crate) waiting: BioList,
    /// Requests that the driver refused, or that go before all others.
    pub(crate) dispatch: VecDeque<Tag>,
    pub(crate) scheduler: Option<Box<dyn Scheduler>>,
    pub(crate) flush: FlushMachine,
    pub(crate) completed: Vec<(Tag, IoResult)>,
    pub(crate) done: Vec<Completion>,
    /// Completions that other threads wait for.
    pub(crate) remote_completions: Vec<(Completer, IoResult, Data)>,
    pub(crate) clock: Clock,
    pub(crate) stats: StatsWriter,
    /// Between `enter` and `leave`: limits and settings stay as they are.
    pub(crate) entered: bool,
    /// Requests built and not ended.
    pub(crate) in_use: u32,
    /// Requests that the driver has.
    pub(crate) started: u32,
    /// When a driver that was out of resources is asked again.
    pub(crate) rerun_at_ns: Option<u64>,
    pub(crate) limits_changed: bool,
    /// The software queue that is looked at first.
    pub(crate) software_from: u32,
    /// The owner goes: nothing more is taken from submitters.
    pub(crate) closing: bool,
    /// The driver was not to be given requests when there were some.
    pub(crate) held_back: bool,
    /// The place among the tag set's waiters, if other queues use the set too.
    pub(crate) sharing: Option<WaiterId>,
    /// Ends owed to the request gate: reads, writes.
    pub(crate) gate_owed: [u32; 2],
    pub(crate) zeroes: IoBuffer,
    pub(crate) watch: Watch,
}

/// The driver's view of a queue, out of disjoint parts of it.
macro_rules! driver_context {
    ($queue:expr, $ring:expr) => {
        DriverContext {
            requests: &mut $queue.requests,
            bios: &$queue.bios,
            zeroes: &$queue.zeroes,
            completed: &mut $queue.completed,
            clock: &mut $queue.clock,
            ring: $ring,
            owner: $queue.owner,
            limits_changed: &mut $queue.limits_changed,
        }
    };
}
pub(crate) use driver_context;

impl Queue {
    /// Opens queue `index` of `disk` on this thread. `owner` is its name on the ring.
    ///
    /// # Errors
    /// The driver's, or that the queue is open already.
    pub fn open(disk: &Arc<Disk>, index: usize, owner: u16, ring: Option<&mut Ring>) -> Result<Queue, Error> {
        disk.claim_queue(index)?;
        Queue::open_claimed(disk, index, owner, ring).inspect_err(|_| disk.release_queue(index))
    }

    fn open_claimed(
        disk: &Arc<Disk>,
        index: usize,
        owner: u16,
        ring: Option<&mut Ring>,
    ) -> Result<Queue, Error> {
        // Before all that it is about: a change that comes in between is then seen by `enter`.
        let generation = disk.control.generation();
        let settings = disk.settings();
        let limits = disk.limits();
        limits.validate()?;
        let tags = disk.hardware_queue(index).tags.clone();
        // One request beyond the tags is the queue's own flush.
        let slots = usize::from(tags.capacity()) + 1;
        let kick = disk.hardware_queue(index).kick.clone();
        let driver = disk.driver().open_queue(index as u16, slots, ring.map(Registrar::new), kick)?;
        let sharing = if disk.has_shared_tags() {
            let kick = disk.hardware_queue(index).kick.clone();
            Some(
                tags.register(kick)
                    .ok_or_else(|| Error::new(ErrorKind::Busy, "too many queues share the tags"))?,
            )
        } else {
            None
        };
        let zeroes = zeroes_for(&limits);
        let bios = BioSlab::new((slots as u32 * BIOS_PER_TAG).max(BIOS_MIN));
        Ok(Queue {
            disk: disk.clone(),
            index,
            owner,
            driver,
            fast: FastLimits::new(&limits),
            limits,
            generation,
            requests: (0..slots).map(|_| Request::idle()).collect(),
            bios,
            hint: tags.hint(),
            tags,
            plug: Plug::new(),
            waiting: BioList::new(),
            dispatch: VecDeque::with_capacity(slots),
            scheduler: settings.scheduler.open(slots),
            flush: FlushMachine::new(Tag(slots as u16 - 1)),
            completed: Vec::with_capacity(slots),
            done: Vec::with_capacity(slots),
            remote_completions: Vec::new(),
            clock: Clock::new(settings.clock),
            stats: StatsWriter::over(disk.hardware_queue(index).stats.clone()),
            settings,
            entered: false,
            in_use: 0,
            started: 0,
            rerun_at_ns: None,
            limits_changed: false,
            software_from: 0,
            closing: false,
            held_back: false,
            sharing,
            gate_owed: [0; 2],
            zeroes,
            watch: Watch::default(),
        })
    }

    /// The part of the queue that other threads see.
    #[inline]
    pub(crate) fn shared(&self) -> &HardwareQueue {
        self.disk.hardware_queue(self.index)
    }

    /// The queue goes from rest to having requests, and takes over what changed meanwhile.
    /// False while the disk is frozen.
    #[cold]
    pub(crate) fn enter(&mut self, ring: Option<&mut Ring>) -> bool {
        self.entered = self.disk.control.enter(self.index);
        if self.entered {
            if self.sharing.is_some() {
                self.tags.join();
            }
            let generation = self.disk.control.generation();
            if generation != self.generation {
                self.generation = generation;
                self.reload(ring);
            }
        }
        self.entered
    }

    /// The queue is at rest again, if it has no request any more.
    #[inline]
    pub(crate) fn leave_if_idle(&mut self) {
        if self.entered && self.in_use == 0 {
            self.entered = false;
            self.clock.rest();
            if self.sharing.is_some() {
                self.tags.leave();
            }
            self.disk.control.leave(self.index);
        }
    }

    /// Takes over limits and settings that were changed under a freeze.
    #[cold]
    fn reload(&mut self, ring: Option<&mut Ring>) {
        let scheduler = self.settings.scheduler;
        self.settings = self.disk.settings();
        self.clock.set_mode(self.settings.clock);
        if scheduler != self.settings.scheduler {
            self.scheduler = self.settings.scheduler.open(self.requests.len());
        }
        self.reload_limits();
        let mut cx = driver_context!(self, ring);
        self.driver.reload(&mut cx);
    }

    pub(crate) fn reload_limits(&mut self) {
        self.limits_changed = false;
        let limits = self.disk.limits();
        // A driver that comes to contradict itself has shown its defect to whoever changed it.
        if limits == self.limits || limits.validate().is_err() {
            return;
        }
        self.limits = limits;
        // A driver in use only gives up capabilities: then no segment becomes too long.
        if self.in_use == 0 {
            self.zeroes = zeroes_for(&self.limits);
        }
        self.fast = FastLimits::new(&self.limits);
        // What waits was checked against the old limits: check and split it again.
        for _ in 0..self.waiting.len() {
            let Some(index) = self.waiting.pop_front(&mut self.bios) else { break };
            match self.check(index) {
                Ok(()) => self.begin_data(index),
                Err(status) => self.refuse(index, status),
            }
        }
    }

    /// Takes over changed settings even while nothing is submitted.
    #[inline]
    fn refresh(&mut self, ring: Option<&mut Ring>) {
        if !self.entered && self.disk.control.generation() != self.generation {
            self.enter(ring);
        }
    }

    /// Hands a completion of the ring to the driver.
    #[inline]
    pub fn complete_cqe(&mut self, cqe: Cqe, ring: Option<&mut Ring>) {
        let mut cx = driver_context!(self, ring);
        self.driver.complete_cqe(&mut cx, cqe);
    }

    /// Ends what the driver completed, and takes in what other threads submitted.
    pub fn run(&mut self, mut ring: Option<&mut Ring>) {
        self.shared().kick.take_woken();
        let mut cx = driver_context!(self, ring.as_deref_mut());
        self.driver.poll(&mut cx);
        if !self.completed.is_empty() {
            self.complete_batch();
        }
        self.refresh(ring.as_deref_mut());
        self.kick_flush(ring.as_deref_mut());
        self.pull_software_queues(ring.as_deref_mut());
        self.admit_waiting(ring);
        // Some may have ended without a request: refused, or empty.
        if self.gate_owed != [0; 2] {
            self.pay_gate();
        }
        self.tell_ended();
    }

    /// Flushes the plug and dispatches until nothing moves any more.
    #[inline]
    pub fn flush(&mut self, mut ring: Option<&mut Ring>) {
        loop {
            self.kick_flush(ring.as_deref_mut());
            self.flush_plug(ring.as_deref_mut());
            if self.completed.is_empty() {
                break;
            }
            self.complete_batch();
            self.admit_waiting(ring.as_deref_mut());
        }
        self.plug.return_tags(&self.tags);
        self.clock.invalidate();
        self.leave_if_idle();
        if self.gate_owed != [0; 2] {
            self.pay_gate();
        }
        self.tell_ended();
    }

    /// Has the driver give back what it registered with a ring that lives on.
    pub fn close(&mut self, ring: Option<&mut Ring>) {
        let mut cx = driver_context!(self, ring);
        self.driver.close(&mut cx);
    }

    /// Requests and bios that have not ended.
    pub fn in_flight(&self) -> u32 {
        self.bios.len()
    }

    /// When the queue wants to run at the latest, in nanoseconds of the monotonic clock.
    pub fn deadline_ns(&self) -> Option<u64> {
        // A frozen disk flushes when it thaws.
        let flush_ns = if self.disk.control.is_frozen() { None } else { self.flush.deadline_ns() };
        [self.driver.deadline_ns(), self.rerun_at_ns, flush_ns].into_iter().flatten().min()
    }

    /// Whether other threads have left work, or ends are waiting to be fetched.
    pub fn has_work(&self) -> bool {
        !self.done.is_empty()
            || !self.completed.is_empty()
            || self.shared().kick.is_woken()
            || (self.can_take() && self.shared().software.has_pending())
            || (!self.disk.control.is_frozen() && self.was_held_up())
            || (self.held_back && !self.disk.control.is_quiesced())
    }

    /// Whether something waits although nothing holds it up now: a freeze ended, or another
    /// queue gave tags back, after this one had looked and before it said that it sleeps.
    fn was_held_up(&self) -> bool {
        let changed = self.disk.control.generation() != self.generation;
        if !self.entered && (self.flush.is_due() || changed) {
            return true;
        }
        // At rest only a freeze, or want of shared tags, can have held up what waits. Whoever
        // was woken while it ran must look again: nobody wakes it twice.
        let may_get = match &self.sharing {
            None => !self.entered,
            Some(waiter) => self.tags.may_get(self.in_use) && !self.tags.is_waiting(waiter),
        };
        may_get && !self.waiting.is_empty()
    }

    /// Whether all that can end has: of a disk that is stopped nothing else does.
    pub fn is_drained(&self) -> bool {
        let stopped = self.disk.control.is_frozen() || self.disk.control.is_quiesced();
        self.in_flight() == 0 || (stopped && self.started == 0)
    }

    /// Ends with [`Status::Offline`] what the driver never got.
    fn abandon(&mut self) {
        let plugged = self.unplug();
        self.dispatch.extend(plugged);
        if let Some(scheduler) = &mut self.scheduler {
            // Not by dispatching: it may want others to end before.
            let tags = (0..self.requests.len()).map(|index| Tag(index as u16));
            self.dispatch.extend(tags.filter(|&tag| scheduler.remove(tag)));
        }
        self.started += self.dispatch.len() as u32;
        self.completed.extend(self.dispatch.drain(..).map(|tag| (tag, Err(Status::Offline))));
        self.complete_batch();
        self.end_pending_flushes(Err(Status::Offline));
        while let Some(index) = self.waiting.pop_front(&mut self.bios) {
            self.refuse(index, Status::Offline);
        }
        if self.gate_owed != [0; 2] {
            self.pay_gate();
        }
        self.tell_ended();
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.abandon();
        // Memory of I/O in flight belongs to the kernel until it completes: LocalQueue and Engine
        // drain a queue before they drop it. What a panic leaves is leaked, not freed.
        if self.bios.len() > 0 {
            self.bios
                .take_completers()
                .for_each(|completer| completer.notify(Err(Status::Offline), Data::None));
            std::mem::forget(std::mem::replace(&mut self.bios, BioSlab::new(0)));
            std::mem::forget(std::mem::replace(&mut self.zeroes, IoBuffer::zeroed(0)));
        }
        self.plug.return_tags(&self.tags);
        self.in_use = 0;
        self.leave_if_idle();
        if let Some(waiter) = self.sharing.take() {
            self.tags.unregister(waiter);
        }
        self.disk.release_queue(self.index);
    }
}

//! A [`Disk`] is a driver with queues: what control threads hold, what queues and
//! submitters share. Nothing here is on the data path but what is said to be.

#[cfg(all(test, any(loom, shuttle)))]
mod model;

pub(crate) mod freeze;

use std::sync::Arc;
use std::time::Duration;

use crate::clock::ClockMode;
use crate::disk::freeze::DiskControl;
use crate::driver::{Change, Driver};
use crate::engine::local::LocalQueue;
use crate::error::{Error, ErrorKind, Status};
use crate::layout::{CachePadded, HotField, Writer};
use crate::limits::QueueLimits;
use crate::remote::gate::{Direction, GateCounters, RequestGate};
use crate::remote::kick::Kick;
use crate::remote::software::SoftwareQueues;
use crate::remote::submitter::{self, Submitter};
use crate::sched::SchedulerKind;
use crate::stats::{QueueStats, StatsSnapshot};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Mutex, lock};
use crate::tags::TagSet;

/// Requests of a queue unless said otherwise (BLKDEV_DEFAULT_RQ, and loop's depth).
pub const DEPTH_DEFAULT: u16 = 128;
/// Most requests of a queue (BLK_MQ_MAX_DEPTH).
pub const DEPTH_MAX: u16 = 10240;
/// Most hardware queues of a disk.
pub const QUEUES_MAX: usize = 64;
/// How long a live change waits for I/O in flight to end.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(30);

/// What can be changed on a live disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Requests that the driver gets at once, per queue.
    pub depth: u16,
    /// Who orders requests before the driver.
    pub scheduler: SchedulerKind,
    /// Whether neighbours merge.
    pub merge: bool,
    /// Whether submitters get requests in batches when the device is full.
    pub batching: bool,
    /// Whether I/O is counted and timed.
    pub iostats: bool,
    /// How time stamps are taken.
    pub clock: ClockMode,
}

impl Settings {
    /// Requests per queue: the depth, or with a scheduler twice that (at most 256), so
    /// that it has something to choose from (`q->nr_requests` in block/blk-mq-sched.c).
    pub fn requests(&self) -> u16 {
        match self.scheduler {
            SchedulerKind::None => self.depth,
            _ => self.depth.max(2 * self.depth.min(128)),
        }
    }
}

/// The part of a hardware queue that other threads see.
pub(crate) struct HardwareQueue {
    pub tags: Arc<TagSet>,
    pub kick: Arc<Kick>,
    pub software: SoftwareQueues,
    pub stats: Arc<CachePadded<QueueStats>>,
    open: AtomicBool,
}

/// A block device in user space.
pub struct Disk {
    name: String,
    driver: Box<dyn Driver>,
    settings: Mutex<Settings>,
    /// Held while a change is made: one at a time.
    changing: Mutex<()>,
    /// Changed while frozen, read when limits are.
    read_only: AtomicBool,
    shared_tags: bool,
    pub(crate) control: DiskControl,
    pub(crate) gate: RequestGate,
    queues: Box<[HardwareQueue]>,
    next_queue: AtomicUsize,
}

/// Makes a [`Disk`].
pub struct DiskBuilder {
    driver: Box<dyn Driver>,
    name: String,
    queues: usize,
    shared_tags: bool,
    read_only: bool,
    settings: Settings,
}

impl DiskBuilder {
    /// The name for messages and statistics; the driver's by default.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> DiskBuilder {
        self.name = name.into();
        self
    }

    /// Number of hardware queues, 1 to [`QUEUES_MAX`]; 1 by default.
    #[must_use]
    pub fn queues(mut self, queues: usize) -> DiskBuilder {
        self.queues = queues;
        self
    }

    /// Requests in flight per queue, 1 to [`DEPTH_MAX`]; [`DEPTH_DEFAULT`] by default.
    #[must_use]
    pub fn depth(mut self, depth: u16) -> DiskBuilder {
        self.settings.depth = depth;
        self
    }

    /// One tag set for all queues, instead of one for each.
    #[must_use]
    pub fn shared_tags(mut self, shared: bool) -> DiskBuilder {
        self.shared_tags = shared;
        self
    }

    /// Refuses writes whatever the driver could do.
    #[must_use]
    pub fn read_only(mut self, read_only: bool) -> DiskBuilder {
        self.read_only = read_only;
        self
    }

    /// The scheduler; none by default.
    #[must_use]
    pub fn scheduler(mut self, scheduler: SchedulerKind) -> DiskBuilder {
        self.settings.scheduler = scheduler;
        self
    }

    /// Whether neighbours merge; true by default.
    #[must_use]
    pub fn merge(mut self, merge: bool) -> DiskBuilder {
        self.settings.merge = merge;
        self
    }

    /// Whether submitters get requests in batches; true by default.
    #[must_use]
    pub fn batching(mut self, batching: bool) -> DiskBuilder {
        self.settings.batching = batching;
        self
    }

    /// Whether I/O is counted and timed; true by default.
    #[must_use]
    pub fn iostats(mut self, iostats: bool) -> DiskBuilder {
        self.settings.iostats = iostats;
        self
    }

    /// How time stamps are taken; cached by default.
    #[must_use]
    pub fn clock(mut self, clock: ClockMode) -> DiskBuilder {
        self.settings.clock = clock;
        self
    }

    /// The disk.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for limits that make no sense and numbers out of range.
    pub fn build(self) -> Result<Arc<Disk>, Error> {
        let DiskBuilder { driver, name, queues, shared_tags, read_only, settings } = self;
        let invalid = |message: String| Err(Error::new(ErrorKind::Invalid, message));
        if !(1..=QUEUES_MAX).contains(&queues) {
            return invalid(format!("{queues} queues: give a number from 1 to {QUEUES_MAX}"));
        }
        if queues > driver.queues_max() {
            let (driver, most) = (driver.name(), driver.queues_max());
            return invalid(format!("{queues} queues: this {driver} device has at most {most}; give fewer"));
        }
        if !(1..=DEPTH_MAX).contains(&settings.depth) {
            return invalid(format!("depth {}: give a number from 1 to {DEPTH_MAX}", settings.depth));
        }
        driver.limits().validate()?;
        let capacity = capacity_for(settings.depth);
        let new_tags = || {
            let tags = TagSet::new(capacity);
            tags.set_depth(settings.requests());
            Arc::new(tags)
        };
        let shared = shared_tags.then(new_tags);
        let hardware = || -> Result<HardwareQueue, Error> {
            Ok(HardwareQueue {
                tags: shared.clone().unwrap_or_else(new_tags),
                kick: Arc::new(Kick::new()?),
                software: SoftwareQueues::new(),
                stats: QueueStats::shared(),
                open: AtomicBool::new(false),
            })
        };
        let disk = Disk {
            control: DiskControl::new(queues),
            gate: RequestGate::new(gate_requests(&settings, queues, shared_tags), settings.batching),
            queues: (0..queues).map(|_| hardware()).collect::<Result<_, _>>()?,
            name,
            driver,
            settings: Mutex::new(settings),
            changing: Mutex::new(()),
            read_only: AtomicBool::new(read_only),
            shared_tags,
            next_queue: AtomicUsize::new(0),
        };
        Ok(Arc::new(disk))
    }
}

/// Requests that all submitters together may have (`nr_requests`): as many as there are tags.
fn gate_requests(settings: &Settings, queues: usize, shared_tags: bool) -> u32 {
    let sets = if shared_tags { 1 } else { queues as u32 };
    u32::from(settings.requests()) * sets
}

/// Tags that a disk of `depth` is made with: room for a scheduler and for growing live.
fn capacity_for(depth: u16) -> u16 {
    depth.saturating_mul(2).clamp(256, DEPTH_MAX)
}

impl Disk {
    /// Begins to make a disk of `driver`.
    pub fn builder(driver: Box<dyn Driver>) -> DiskBuilder {
        DiskBuilder {
            name: driver.name().to_string(),
            driver,
            queues: 1,
            shared_tags: false,
            read_only: false,
            settings: Settings {
                depth: DEPTH_DEFAULT,
                scheduler: SchedulerKind::None,
                merge: true,
                batching: true,
                iostats: true,
                clock: ClockMode::Cached,
            },
        }
    }

    /// The disk's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device behind it.
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// What the device can do now, and how large it is.
    pub fn limits(&self) -> QueueLimits {
        let mut limits = self.driver.limits();
        limits.read_only |= self.read_only.load(Ordering::SeqCst);
        limits
    }

    /// The settings in force.
    pub fn settings(&self) -> Settings {
        *lock(&self.settings)
    }

    /// Number of hardware queues.
    pub fn queue_count(&self) -> usize {
        self.queues.len()
    }

    /// Statistics, summed over the queues.
    pub fn stats(&self) -> StatsSnapshot {
        let mut sum = StatsSnapshot::default();
        for queue in &self.queues {
            sum += &queue.stats.snapshot();
        }
        sum
    }

    /// What the request gate did: batches granted, waits, wake-ups.
    pub fn gate_counters(&self) -> GateCounters {
        self.gate.counters()
    }

    /// Submitters that wait at the request gate: for reads, and for all else.
    pub fn gate_waiting(&self) -> [u32; 2] {
        [Direction::Read, Direction::Write].map(|direction| self.gate.waiting(direction))
    }

    /// Whether queue `index` has nothing to look for ([`watch`](crate::queue::hang)): neither
    /// requests, nor bios that a freeze or want of a tag keeps from being requests.
    pub fn is_at_rest(&self, index: usize) -> bool {
        // Bios without a tag wait in a queue without requests only in these two cases.
        !self.shared_tags && !self.control.is_frozen() && !self.control.is_active(index)
    }

    /// The structures that several threads use while I/O goes on, and where they lie in
    /// memory: for measuring and checking the layout.
    #[doc(hidden)]
    pub fn hot_fields(&self) -> Vec<HotField> {
        let mut fields = vec![HotField::of("queues", Writer::Nobody, &self.queues)];
        self.control.hot_fields(&mut fields);
        self.gate.hot_fields(&mut fields);
        for (index, queue) in self.queues.iter().enumerate() {
            let HardwareQueue { tags, kick, software, stats, open } = queue;
            fields.push(HotField::of("tag set", Writer::Nobody, tags));
            fields.push(HotField::of("kick", Writer::Nobody, kick));
            fields.push(HotField::of("statistics", Writer::Nobody, stats));
            fields.push(HotField::of("open", Writer::Nobody, open));
            fields.push(HotField::of("counters", Writer::Owner(index), &***stats));
            software.hot_fields(index, &mut fields);
            // A set that the queues share has one field each, whoever takes it.
            if !self.shared_tags {
                tags.hot_fields(index, &mut fields);
            }
        }
        fields
    }

    /// Opens hardware queue `index` for this thread to submit to and poll.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if it is open, and the driver's own.
    pub fn open_queue(self: &Arc<Self>, index: usize) -> Result<LocalQueue, Error> {
        LocalQueue::open(self, index)
    }

    /// A way in for a thread that owns no queue.
    pub fn submitter(self: &Arc<Self>) -> Submitter {
        Submitter::new(self)
    }

    /// Changes a setting while I/O goes on: I/O in flight ends first, what comes
    /// meanwhile waits, nothing is lost. Keys: `scheduler`, `depth`, `merge`, `batching`,
    /// `iostats`, `clock`, `read-only`, and the driver's own (`direct-io`, `dispatch`, `fault`).
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for an unknown key, [`ErrorKind::Invalid`] for a bad value,
    /// [`ErrorKind::Unsupported`] if a device that only reads is to be written to,
    /// [`ErrorKind::Busy`] if I/O in flight does not complete within 30 seconds. Only the last
    /// has frozen the disk.
    pub fn set(&self, key: &str, value: &str) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        let mut settings = self.settings();
        match key {
            "scheduler" => settings.scheduler = value.parse()?,
            "depth" => settings.depth = self.parse_depth(value)?,
            "merge" => settings.merge = parse_switch(key, value)?,
            "batching" => settings.batching = parse_switch(key, value)?,
            "iostats" => settings.iostats = parse_switch(key, value)?,
            "clock" => settings.clock = value.parse()?,
            "read-only" => {
                let read_only = parse_switch(key, value)?;
                // A driver with a file has more to do: how that is open, and its locks.
                let by_driver = match self.driver.prepare_set(key, value) {
                    Err(error) if error.kind() == ErrorKind::NotFound => false,
                    prepared => prepared.map(|_| true)?,
                };
                return self.frozen(|| self.set_read_only(read_only, by_driver));
            }
            _ => {
                return match self.driver.prepare_set(key, value)? {
                    Change::Live => self.driver.set(key, value),
                    Change::Frozen => self.frozen(|| self.driver.set(key, value)),
                };
            }
        }
        self.frozen(|| {
            *lock(&self.settings) = settings;
            for queue in &self.queues {
                queue.tags.set_depth(settings.requests());
            }
            let requests = gate_requests(&settings, self.queues.len(), self.shared_tags);
            self.gate.set(requests, settings.batching);
            Ok(())
        })
    }

    fn set_read_only(&self, read_only: bool, by_driver: bool) -> Result<(), Error> {
        if by_driver {
            self.driver.set("read-only", if read_only { "on" } else { "off" })?;
        }
        if !read_only && self.driver.limits().read_only {
            let message = format!("{}: the {} device itself is read-only", self.name, self.driver.name());
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        self.read_only.store(read_only, Ordering::SeqCst);
        Ok(())
    }

    fn parse_depth(&self, value: &str) -> Result<u16, Error> {
        let most = self.queues[0].tags.capacity();
        match value.parse() {
            Ok(depth) if (1..=most).contains(&depth) => Ok(depth),
            _ => Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "depth {value:?}: give a number from 1 to {most} (more needs a new attach with --depth)"
                ),
            )),
        }
    }

    /// The size in bytes that [`Disk::resize`] would give the disk now, which stays as it is.
    ///
    /// # Errors
    /// The driver's.
    pub fn prepare_resize(&self, bytes: Option<u64>) -> Result<u64, Error> {
        self.driver.prepare_resize(bytes)
    }

    /// Takes over a new size, in bytes; `None` asks the backing store. Returns the size.
    ///
    /// # Errors
    /// The driver's, and [`ErrorKind::Busy`] as with [`Disk::set`].
    pub fn resize(&self, bytes: Option<u64>) -> Result<u64, Error> {
        let _one_at_a_time = lock(&self.changing);
        self.frozen(|| self.driver.resize(bytes))?;
        Ok(self.limits().size_bytes())
    }

    /// Does `change` while no request is in flight anywhere.
    fn frozen(&self, change: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        if !self.control.freeze_timeout(FREEZE_TIMEOUT, |queue| self.queues[queue].kick.kick()) {
            let message = format!(
                "{}: I/O in flight did not end within {} s; try again when the backing store answers",
                self.name,
                FREEZE_TIMEOUT.as_secs()
            );
            return Err(Error::new(ErrorKind::Busy, message));
        }
        let _frozen = Frozen(self);
        change()?;
        // Queues stay with the limits that they have, if those of now cannot be.
        self.driver.limits().validate()
    }

    /// Freezes the disk: when this returns no request is in flight, and none starts until what
    /// it returns is dropped. Freezes nest.
    pub fn freeze(&self) -> Frozen<'_> {
        self.control.freeze(|queue| self.queues[queue].kick.kick());
        Frozen(self)
    }

    /// Keeps requests from the driver: when this returns it gets none until what it returns is
    /// dropped; what the driver has completes. Nests.
    pub fn quiesce(&self) -> Quiesced<'_> {
        self.control.quiesce();
        Quiesced(self)
    }

    pub(crate) fn hardware_queue(&self, index: usize) -> &HardwareQueue {
        &self.queues[index]
    }

    pub(crate) fn has_shared_tags(&self) -> bool {
        self.shared_tags
    }

    pub(crate) fn next_queue(&self) -> usize {
        self.next_queue.fetch_add(1, Ordering::Relaxed) % self.queues.len()
    }

    pub(crate) fn check_queue(&self, index: usize) -> Result<(), Error> {
        if index < self.queues.len() {
            return Ok(());
        }
        let message = format!("{}: there is no queue {index} of {}", self.name, self.queues.len());
        Err(Error::new(ErrorKind::NotFound, message))
    }

    pub(crate) fn claim_queue(&self, index: usize) -> Result<(), Error> {
        self.check_queue(index)?;
        let queue = &self.queues[index];
        if queue.open.swap(true, Ordering::SeqCst) {
            let message = format!("{}: queue {index} is open already; each is used by one thread", self.name);
            return Err(Error::new(ErrorKind::Busy, message));
        }
        Ok(())
    }

    /// The owner of a queue is gone: what submitters left there will never be done.
    pub(crate) fn release_queue(&self, index: usize) {
        self.queues[index].open.store(false, Ordering::SeqCst);
        self.end_staged(index);
    }

    /// Ends what submitters staged, if nobody owns the queue. A submitter calls it after it
    /// has staged a bio, and the owner after it said that it goes: one of them finds the bio.
    pub(crate) fn end_staged_if_closed(&self, index: usize) {
        if !self.queues[index].open.load(Ordering::SeqCst) {
            self.end_staged(index);
        }
    }

    fn end_staged(&self, index: usize) {
        for staged in self.queues[index].software.take_all() {
            for (bio, completer) in staged.bios {
                completer.notify(Err(Status::Offline), bio.data);
            }
            self.gate.leave(submitter::direction(staged.operation), 1);
        }
    }
}

/// A freeze of a disk ([`Disk::freeze`]), over when this is dropped.
#[must_use = "the freeze is over when this is dropped"]
pub struct Frozen<'a>(&'a Disk);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.control.unfreeze(|queue| self.0.queues[queue].kick.kick());
    }
}

/// A quiesce of a disk ([`Disk::quiesce`]), over when this is dropped.
#[must_use = "the quiesce is over when this is dropped"]
pub struct Quiesced<'a>(&'a Disk);

impl Drop for Quiesced<'_> {
    fn drop(&mut self) {
        self.0.control.unquiesce(|queue| self.0.queues[queue].kick.kick());
    }
}

fn parse_switch(key: &str, value: &str) -> Result<bool, Error> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(Error::new(ErrorKind::Invalid, format!("{key} {value:?}: give on or off"))),
    }
}

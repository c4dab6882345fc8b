//! A [`Disk`] is a driver with hardware queues (the kernel's `gendisk` and `request_queue`): the state that
//! control threads change, and the state that queues and submitters share. Nothing in this module is on the
//! data path unless noted.

#[cfg(all(test, model_check))]
mod model;

mod auto_limiter;
mod bitmaps;
pub(crate) mod builder;
pub(crate) mod freeze;
mod hold;
mod settings;

use std::sync::Arc;
use std::time::Duration;

use crate::bitmap::BitmapSet;
use crate::disk::freeze::DiskControl;
use crate::driver::{Change, Driver, DriverSetting};
use crate::error::{Error, ErrorKind, Status};
use crate::kick::{Kick, Wake};
use crate::layout::{CachePadded, HotField, Writer};
use crate::limits::QueueLimits;
use crate::remote::gate::{Direction, GateCounters, RequestGate};
use crate::remote::software::{SoftwareQueues, Staged};
use crate::stats::{QueueStats, StatsSnapshot};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::tags::TagSet;
use crate::throttle::{Ceiling, Member, RateLimits, ThrottleControl};

/// How long a change of the disk waits for I/O in flight before it fails with [`ErrorKind::Busy`].
const FREEZE_TIMEOUT: Duration = Duration::from_secs(30);

pub use crate::limits::QUEUES_MAX;
pub use auto_limiter::{AutoLimiter, CeilingSearch};
pub use builder::DiskBuilder;
use hold::HoldControl;
pub use hold::{ErrorPolicy, Resume};
pub use settings::{DEPTH_DEFAULT, DEPTH_MAX, Setting, Settings};

/// The part of a hardware queue that other threads use.
pub(crate) struct HardwareQueue {
    /// The tag set that all queues share, if they share one. Otherwise each queue's owner has its own tags.
    pub tags: Option<Arc<TagSet>>,
    pub kick: Arc<Kick>,
    pub software: SoftwareQueues,
    pub stats: Arc<CachePadded<QueueStats>>,
    /// Whether the queue has an owner.
    open: AtomicBool,
}

/// A block device in user space.
///
/// A freeze, a quiesce and each live change need membarrier(2). If a seccomp filter that was installed after
/// the disk was built refuses the system call, the calling thread panics, and nothing has changed.
pub struct Disk {
    name: String,
    number: u32,
    /// Exchanged only under a freeze.
    driver: Mutex<Arc<dyn Driver>>,
    settings: Mutex<Settings>,
    /// Locked during a change of the disk, so that changes do not overlap. The first lock in the lock order.
    changing: Mutex<()>,
    /// Changed only under a freeze. A part of [`Disk::limits`].
    read_only: AtomicBool,
    /// The largest number of tags of a queue, or of the set that all queues share.
    depth_max: u16,
    shared_tags: bool,
    pub(crate) control: DiskControl,
    pub(crate) throttle: ThrottleControl,
    pub(crate) hold: HoldControl,
    pub(crate) bitmaps: BitmapSet,
    ignore_flushes: bool,
    pub(crate) gate: RequestGate,
    queues: Box<[Arc<HardwareQueue>]>,
    next_queue: AtomicUsize,
    broken: Mutex<Option<String>>,
}

impl Disk {
    /// The name of the disk in messages and statistics.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of the disk in this process, counted from 0, by which USDT probes identify the disk.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The current driver of the disk ([`Exchange`]).
    pub fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&lock(&self.driver))
    }

    /// The current limits of the device, including its size.
    pub fn limits(&self) -> QueueLimits {
        let mut limits = self.driver().limits();
        limits.read_only |= self.read_only.load(Ordering::SeqCst);
        limits.write_cache &= !self.ignore_flushes;
        limits
    }

    /// The settings in force on all queues.
    pub fn settings(&self) -> Settings {
        *lock(&self.settings)
    }

    /// The largest depth that [`Setting::Depth`] can set. The disk was built with room for that number of
    /// requests per queue.
    pub fn depth_max(&self) -> u16 {
        self.depth_max
    }

    /// The number of hardware queues.
    pub fn queue_count(&self) -> usize {
        self.queues.len()
    }

    /// Why a queue fails all its requests, if one does: it could not open its part of a driver that was
    /// exchanged while the disk was in use ([`Exchange::replace`]).
    pub fn broken(&self) -> Option<String> {
        lock(&self.broken).clone()
    }

    pub(crate) fn set_broken(&self, why: Option<String>) {
        *lock(&self.broken) = why;
    }

    /// The statistics of the disk: the sum over its queues.
    pub fn stats(&self) -> StatsSnapshot {
        let mut sum = StatsSnapshot::default();
        self.queue_stats().for_each(|queue| sum += &queue);
        sum
    }

    #[cfg(simulation)]
    pub(crate) fn counter(&self, counter: crate::stats::Counter) -> u64 {
        self.queues.iter().map(|queue| queue.stats.counter(counter)).sum()
    }

    #[cfg(simulation)]
    pub(crate) fn throttled(&self) -> u64 {
        self.queues.iter().map(|queue| queue.stats.throttled()).sum()
    }

    /// The statistics of each queue, by its index.
    pub fn queue_stats(&self) -> impl Iterator<Item = StatsSnapshot> {
        self.queues.iter().map(|queue| queue.stats.snapshot())
    }

    /// The counters of the request gate: batches admitted, waits, wake-ups.
    pub fn gate_counters(&self) -> GateCounters {
        self.gate.counters()
    }

    /// The number of submitters that wait at the request gate to read, and of those with other operations.
    pub fn gate_waiting(&self) -> [u32; 2] {
        [Direction::Read, Direction::Write].map(|direction| self.gate.waiting(direction))
    }

    /// Number of requests of queue `index` that have failed or were held.
    pub fn failed_requests(&self, index: usize) -> u64 {
        self.queues[index].stats.failed_requests()
    }

    /// Whether a scan of queue `index` for hangs ([`hang`](crate::queue::hang)) can be skipped: the queue has
    /// no requests, and no bios that a freeze, a lack of tags or held writes keep from becoming requests.
    pub fn has_nothing_to_scan(&self, index: usize) -> bool {
        // A queue without requests has waiting bios only in these three cases, and until its next turn.
        let may_wait = self.shared_tags || self.control.is_frozen() || self.hold.has_writes();
        !may_wait && !self.control.is_active(index)
    }

    /// The structures that several threads use while I/O runs, for checks of the memory layout.
    #[doc(hidden)]
    pub fn hot_fields(&self) -> Vec<HotField> {
        let mut fields = vec![HotField::of("queues", Writer::Nobody, &self.queues)];
        self.control.hot_fields(&mut fields);
        self.gate.hot_fields(&mut fields);
        for (index, queue) in self.queues.iter().enumerate() {
            let HardwareQueue { tags, kick, software, stats, open } = &**queue;
            fields.push(HotField::of("tag set", Writer::Nobody, tags));
            fields.push(HotField::of("kick of the queue", Writer::Nobody, kick));
            fields.push(HotField::of("statistics", Writer::Nobody, stats));
            fields.push(HotField::of("open", Writer::Nobody, open));
            fields.push(HotField::of("counters", Writer::Owner(index), &***stats));
            // The number of each shared word: the gate has 0 and 1, each queue has two, and the tag set has
            // all further ones.
            kick.hot_fields(Writer::Everybody(2 + 2 * index), &mut fields);
            software.hot_fields(index, Writer::Everybody(3 + 2 * index), &mut fields);
        }
        if let Some(tags) = &self.queues[0].tags {
            tags.hot_fields(2 + 2 * self.queues.len(), &mut fields);
        }
        fields
    }

    /// Changes a setting while I/O runs. I/O in flight completes first, and I/O that arrives meanwhile waits.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for a depth for which the disk has no room, [`ErrorKind::Unsupported`] if a
    /// read-only device must become writable, [`ErrorKind::Busy`] if I/O in flight does not complete within
    /// 30 seconds, [`ErrorKind::Held`] if requests are held after errors, and the driver's errors for
    /// [`Setting::ReadOnly`]. An invalid value is rejected without a freeze, but the freeze comes before the
    /// check whether a device can become writable.
    pub fn set(&self, setting: Setting) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        let mut settings = self.settings();
        match setting {
            Setting::Scheduler(scheduler) => settings.scheduler = scheduler,
            Setting::Depth(depth) => {
                let most = self.depth_max();
                if !(1..=most).contains(&depth) {
                    let message = format!("depth must be 1 to {most}, not {depth}");
                    return Err(Error::new(ErrorKind::Invalid, message));
                }
                settings.depth = depth;
            }
            Setting::Merge(on) => settings.merge = on,
            Setting::EarlySubmission(on) => settings.early_submission = on,
            Setting::Batching(on) => settings.batching = on,
            Setting::Iostats(on) => settings.iostats = on,
            Setting::Clock(mode) => settings.clock = mode,
            Setting::ReadOnly(read_only) => {
                self.driver().prepare_read_only(read_only)?;
                return self.frozen(|| self.set_read_only(read_only));
            }
        }
        self.frozen(|| {
            *lock(&self.settings) = settings;
            if let Some(tags) = &self.queues[0].tags {
                tags.set_depth(settings.requests());
            }
            let requests = settings.gate_requests(self.queues.len(), self.shared_tags);
            self.gate.set(requests, settings.batching);
            Ok(())
        })
    }

    /// Changes a setting of the driver, as [`Disk::set`] changes one of the disk. There is no freeze if the
    /// driver needs none ([`Change::Live`]).
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for a setting of another driver; otherwise the driver's errors, and
    /// [`ErrorKind::Busy`] and [`ErrorKind::Held`] as for [`Disk::set`].
    pub fn set_driver(&self, setting: &dyn DriverSetting) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        match self.driver().prepare_set(setting)? {
            Change::Live => self.driver().set(setting),
            Change::Frozen => self.frozen(|| self.driver().set(setting)),
        }
    }

    /// Changes the disk's own rate limits while I/O runs, without waiting for I/O. The new limits also apply
    /// to requests that wait already.
    pub fn set_rate_limits(&self, limits: &RateLimits) {
        self.throttle.set_limits(limits);
        self.wake_queues();
    }

    /// The disk's own rate limits.
    pub fn rate_limits(&self) -> RateLimits {
        self.throttle.get().limits
    }

    /// The ceiling of the disk, for which an [`AutoLimiter`] searches.
    pub fn ceiling(&self) -> Ceiling {
        self.throttle.ceiling()
    }

    /// Makes the disk a member of a group, in place of a previous membership.
    pub fn join_group(&self, member: Member) {
        self.throttle.set_member(Some(member));
        self.wake_queues();
    }

    /// Removes the disk from its group, if it is in one.
    pub fn leave_group(&self) {
        self.throttle.set_member(None);
        self.wake_queues();
    }

    /// The disk's membership in a group.
    pub fn group_member(&self) -> Option<Arc<Member>> {
        self.throttle.get().member().cloned()
    }

    /// Changes the policy for requests that fail from now on, while I/O runs and without waiting for it.
    /// Requests that are held already stay held until [`Disk::resume`].
    pub fn set_error_policy(&self, policy: ErrorPolicy) {
        self.hold.set_policy(policy);
        self.wake_queues();
    }

    /// The policy for requests that the driver fails.
    pub fn error_policy(&self) -> ErrorPolicy {
        self.hold.policy()
    }

    /// The number of requests that are held after errors now.
    pub fn held(&self) -> u64 {
        self.queues.iter().map(|queue| queue.stats.held()).sum()
    }

    /// Resumes the held requests: reissues or fails them. Requests that fail again are held again. Does not
    /// wait. Returns the number of resumed requests; those that an earlier call has resumed do not count
    /// again.
    pub fn resume(&self, how: Resume) -> u64 {
        let resumed = self.hold.resume(how, |queue| self.queues[queue].stats.held());
        self.wake_queues();
        resumed
    }

    /// Fails the held requests, and until the returned value is dropped reports errors instead of holding
    /// requests: for a disk that is stopping. Nests.
    pub fn report_errors(self: &Arc<Disk>) -> Suspension {
        self.hold.set_reporting(true);
        self.wake_queues();
        Suspension { disk: self.clone(), end: |disk| disk.hold.set_reporting(false) }
    }

    /// Lets all requests pass the rate limits uncharged until the returned value is dropped: for a disk that
    /// is stopping. Nests.
    pub fn bypass_limits(self: &Arc<Disk>) -> Suspension {
        self.throttle.set_bypassed(true);
        self.wake_queues();
        Suspension { disk: self.clone(), end: |disk| disk.throttle.set_bypassed(false) }
    }

    pub(crate) fn wake_queues(&self) {
        self.queues.iter().for_each(|queue| queue.kick.wake());
    }

    fn set_read_only(&self, read_only: bool) -> Result<(), Error> {
        self.driver().set_read_only(read_only)?;
        let is_refused = !read_only && self.driver().limits().read_only;
        let name = self.driver().name();
        self.refuse_if(is_refused, format_args!("the device of the {name} driver is read-only"))?;
        self.read_only.store(read_only, Ordering::SeqCst);
        Ok(())
    }

    /// Returns the size in bytes that [`Disk::resize`] would give the disk, or its error; changes nothing.
    pub fn prepare_resize(&self, bytes: Option<u64>) -> Result<u64, Error> {
        self.driver().prepare_resize(bytes)
    }

    /// Resizes the disk to `bytes`, or, for `None`, to the size of the backing store. Returns the new size.
    /// New space is dirty in the bitmaps of the disk.
    ///
    /// # Errors
    /// The driver's errors; [`ErrorKind::Unsupported`] if the bitmaps would need too much memory, or were
    /// closed by [`Disk::close_bitmaps`]; [`ErrorKind::Busy`] and [`ErrorKind::Held`] as for [`Disk::set`].
    pub fn resize(&self, bytes: Option<u64>) -> Result<u64, Error> {
        let _one_at_a_time = lock(&self.changing);
        if self.bitmaps.list().is_empty() {
            self.frozen(|| self.driver().resize(bytes))?;
        } else {
            self.check_bitmaps_open()?;
            let expected = self.driver().prepare_resize(bytes)?;
            self.bitmaps.check_size(expected)?;
            self.frozen(|| self.resize_with_bitmaps(bytes, expected))?;
        }
        Ok(self.limits().size_bytes())
    }

    /// Freezes the disk so that its driver can be exchanged. Other changes of the disk wait until the
    /// returned value is dropped. Fails with `Busy` and `Held` as [`Disk::set`] does.
    pub fn begin_exchange(&self) -> Result<Exchange<'_>, Error> {
        let one_at_a_time = lock(&self.changing);
        Ok(Exchange { disk: self, _frozen: self.freeze_timeout()?, _one_at_a_time: one_at_a_time })
    }

    /// Checks whether `driver` could replace the disk's driver without a difference that users notice.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the driver has fewer queues, another size or sector size, or a stricter
    /// memory alignment; [`ErrorKind::Invalid`] if its limits are invalid.
    pub fn check_exchange(&self, driver: &dyn Driver) -> Result<(), Error> {
        let (now, then) = (self.driver().limits(), driver.limits());
        then.validate()?;
        let (queues, most, name) = (self.queue_count(), driver.queues_max(), driver.name());
        let why = format_args!("a {name} device has at most {most} queues, and {queues} are needed");
        self.refuse_if(queues > most, why)?;
        let bytes = |value: u32| u64::from(value);
        let same = [
            ("the size", now.size_bytes(), then.size_bytes()),
            ("the sector size", bytes(now.logical_block_bytes), bytes(then.logical_block_bytes)),
            ("the padding after the end", bytes(now.padding_bytes), bytes(then.padding_bytes)),
        ];
        for (what, now, then) in same {
            self.refuse_if(now != then, format_args!("{what} would change from {now} to {then} bytes"))?;
        }
        let (now, then) = (now.memory_align, then.memory_align);
        let why = format_args!("the required memory alignment would rise from {now} to {then} bytes");
        self.refuse_if(then > now, why)
    }

    fn frozen(&self, change: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let _frozen = self.freeze_timeout()?;
        change()?;
        // If the new limits are invalid, queues keep the ones that they have.
        self.driver().limits().validate()
    }

    /// Freezes the disk. Fails, unfrozen, if requests in flight do not complete in time, or if requests are held.
    fn freeze_timeout(&self) -> Result<Frozen<'_>, Error> {
        // Held requests do not complete until the operator resumes the disk, so waiting for them is futile.
        let has_held = || self.held() > 0;
        if self.control.freeze_timeout(FREEZE_TIMEOUT, has_held, |queue| self.queues[queue].kick.kick()) {
            return Ok(Frozen(self));
        }
        let (kind, what) = match self.held() {
            0 => {
                let (seconds, hint) = (FREEZE_TIMEOUT.as_secs(), "try again when the backing store responds");
                (ErrorKind::Busy, format!("I/O in flight did not complete within {seconds} s; {hint}"))
            }
            1 => (ErrorKind::Held, "1 request is held after I/O errors".to_owned()),
            held => (ErrorKind::Held, format!("{held} requests are held after I/O errors")),
        };
        Err(self.error(kind, what))
    }

    /// Fails with [`ErrorKind::Unsupported`] and the reason `why` if `is_refused`.
    fn refuse_if(&self, is_refused: bool, why: impl std::fmt::Display) -> Result<(), Error> {
        if is_refused { Err(self.error(ErrorKind::Unsupported, why)) } else { Ok(()) }
    }

    /// An error whose message begins with the name of the disk.
    fn error(&self, kind: ErrorKind, what: impl std::fmt::Display) -> Error {
        Error::new(kind, format!("{}: {what}", self.name))
    }

    /// Freezes the disk: when this returns, no request is in flight, and none starts until the returned value
    /// is dropped. Freezes nest. Waits without a limit, also for held requests.
    pub fn freeze(&self) -> Frozen<'_> {
        self.control.freeze(|queue| self.queues[queue].kick.kick());
        Frozen(self)
    }

    /// Releases the backing store for the process that serves it next ([`Driver::release`]). Requests in
    /// flight complete first. Requests that arrive afterwards wait until this process exits. Fails with
    /// `Busy` and `Held` as [`Disk::set`] does, and then the disk continues; or with the driver's errors.
    pub fn release(&self) -> Result<(), Error> {
        // A backing store without an owner has no lock that must be released.
        if self.driver().owner().is_none() {
            return Ok(());
        }
        let _one_at_a_time = lock(&self.changing);
        std::mem::forget(self.freeze_timeout()?);
        // SAFETY: the disk is frozen, and nothing ends this freeze, because its [`Frozen`] was forgotten.
        unsafe { self.driver().release() }
    }

    /// Freezes the disk until this process exits: for a process that saves state which must no longer change.
    /// Fails with `Busy` and `Held` as [`Disk::set`] does, and then the disk continues.
    pub fn freeze_until_exit(&self) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        self.freeze_timeout().map(std::mem::forget)
    }

    /// Quiesces the disk: when this returns, the driver gets no further requests until the returned value is
    /// dropped. Requests that the driver has complete. Nests.
    pub fn quiesce(&self) -> Quiesced<'_> {
        self.control.quiesce();
        Quiesced(self)
    }

    pub(crate) fn hardware_queue(&self, index: usize) -> &Arc<HardwareQueue> {
        &self.queues[index]
    }

    pub(crate) fn next_queue(&self) -> usize {
        // Relaxed: the number only spreads submitters over the queues.
        self.next_queue.fetch_add(1, Ordering::Relaxed) % self.queues.len()
    }

    /// Makes the caller the owner of a queue, until the returned value is dropped.
    pub(crate) fn claim_queue(self: &Arc<Disk>, index: usize) -> Result<QueueClaim, Error> {
        let Some(queue) = self.queues.get(index) else {
            let what = format!("there is no queue {index}; the disk has {}", self.queues.len());
            return Err(self.error(ErrorKind::NotFound, what));
        };
        if queue.open.swap(true, Ordering::SeqCst) {
            let what = format!("queue {index} is already open; each queue has one owner");
            return Err(self.error(ErrorKind::Busy, what));
        }
        Ok(QueueClaim { disk: self.clone(), index })
    }

    /// Fails the bios that submitters have staged if the queue has no owner. A submitter calls this after it
    /// has staged a bio, and the owner after it has released the queue, so that one of them finds the bio.
    pub(crate) fn fail_staged_if_closed(&self, queue: &HardwareQueue) {
        if !queue.open.load(Ordering::SeqCst) {
            self.fail(queue.software.take_all());
        }
    }

    /// Completes staged bios with [`Status::Offline`], and returns their allocations to the request gate.
    #[cold]
    pub(crate) fn fail(&self, staged: impl IntoIterator<Item = Staged>) {
        for staged in staged {
            let direction = Direction::of(staged.operation());
            let (first, others) = staged.into_bios();
            for (bio, completer) in std::iter::once(first).chain(others.into_iter().flatten()) {
                completer.notify(Err(Status::Offline), bio.data);
            }
            self.gate.leave(direction, 1);
        }
    }
}

/// Ownership of an open queue. The owner must drop it after everything else, because the next owner may open
/// the queue from then on. Bios that submitters have staged in the queue fail.
pub(crate) struct QueueClaim {
    disk: Arc<Disk>,
    index: usize,
}

impl Drop for QueueClaim {
    fn drop(&mut self) {
        let queue = &self.disk.queues[self.index];
        queue.open.store(false, Ordering::SeqCst);
        self.disk.fail(queue.software.take_all());
    }
}

/// A freeze of a disk ([`Disk::freeze`]). Dropping this lifts it.
#[must_use = "the freeze is over when this is dropped"]
pub struct Frozen<'a>(&'a Disk);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.control.unfreeze(|queue| self.0.queues[queue].kick.kick());
    }
}

/// A freeze under which the driver may be exchanged ([`Disk::begin_exchange`]). Dropping this lifts it.
#[must_use = "the freeze is over when this is dropped"]
pub struct Exchange<'a> {
    disk: &'a Disk,
    /// Fields are dropped in this order: the freeze is lifted before the next change may begin.
    _frozen: Frozen<'a>,
    _one_at_a_time: MutexGuard<'a, ()>,
}

impl Exchange<'_> {
    /// Checks as [`Disk::check_exchange`] does, under the freeze.
    pub fn check(&self, driver: &dyn Driver) -> Result<(), Error> {
        self.disk.check_exchange(driver)
    }

    /// Replaces the driver of the disk with `driver`, and returns the old one. Each queue of the disk opens a
    /// queue of the new driver when it runs again. If it cannot, its requests fail, and [`Disk::broken`]
    /// returns the reason. Fails as [`Exchange::check`] and [`Driver::prepare_queues`] do; then nothing has
    /// changed.
    pub fn replace(&self, driver: Arc<dyn Driver>) -> Result<Arc<dyn Driver>, Error> {
        self.check(&*driver)?;
        driver.prepare_queues(self.disk.queue_count())?;
        self.disk.set_broken(None);
        Ok(std::mem::replace(&mut *lock(&self.disk.driver), driver))
    }
}

/// A time in which no rate limit applies ([`Disk::bypass_limits`]), or no request is held
/// ([`Disk::report_errors`]). Dropping this ends it.
#[must_use = "the disk's own rules apply again when this is dropped"]
pub struct Suspension {
    disk: Arc<Disk>,
    end: fn(&Disk),
}

impl Drop for Suspension {
    fn drop(&mut self) {
        (self.end)(&self.disk);
        self.disk.wake_queues();
    }
}

/// A quiesce of a disk ([`Disk::quiesce`]). Dropping this lifts it.
#[must_use = "the quiesce is over when this is dropped"]
pub struct Quiesced<'a>(&'a Disk);

impl Drop for Quiesced<'_> {
    fn drop(&mut self) {
        self.0.control.unquiesce(|queue| self.0.queues[queue].kick.kick());
    }
}

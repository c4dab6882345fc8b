use std::sync::Arc;

use crate::bitmap::BitmapSet;
use crate::clock::ClockMode;
use crate::driver::Driver;
use crate::error::{Error, ErrorKind};
use crate::kick::Kick;
use crate::limits::QUEUES_MAX;
use crate::remote::gate::RequestGate;
use crate::remote::software::SoftwareQueues;
use crate::sched::SchedulerKind;
use crate::stats::QueueStats;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::tags::TagSet;
use crate::throttle::{RateLimits, ThrottleControl};

use super::freeze::DiskControl;
use super::hold::{ErrorPolicy, HoldControl};
use super::settings::{DEPTH_DEFAULT, DEPTH_MAX, Settings};
use super::{Disk, HardwareQueue};

/// The number of the next disk of this process. Not an atomic of [`sync`](crate::sync): nothing depends on
/// the order of its changes, so the model checkers need not see them.
static NEXT_NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

/// Builds a [`Disk`] from a driver and settings.
pub struct DiskBuilder {
    driver: Arc<dyn Driver>,
    name: String,
    queues: usize,
    shared_tags: bool,
    read_only: bool,
    settings: Settings,
    rate_limits: RateLimits,
    error_policy: ErrorPolicy,
    ignore_flushes: bool,
}

/// Defines methods that set one field of [`DiskBuilder`] each.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $value:ty => $($field:ident).+;)*) => {
        impl DiskBuilder {
            $($(#[$doc])*
            #[must_use]
            pub fn $name(mut self, $name: $value) -> DiskBuilder {
                self.$($field).+ = $name;
                self
            })*
        }
    };
}

setters! {
    /// Sets the number of hardware queues, from 1 to [`QUEUES_MAX`]. The default is 1.
    queues: usize => queues;

    /// Sets the number of requests in flight per queue, from 1 to [`DEPTH_MAX`]. The default is
    /// [`DEPTH_DEFAULT`].
    depth: u16 => settings.depth;

    /// Lets all queues share one tag set, as BLK_MQ_F_TAG_HCTX_SHARED does, instead of one for each queue.
    shared_tags: bool => shared_tags;

    /// Rejects writes, also if the device is writable.
    read_only: bool => read_only;

    /// Sets the scheduler. The default is none.
    scheduler: SchedulerKind => settings.scheduler;

    /// Sets whether neighbouring bios are merged. The default is true.
    merge: bool => settings.merge;

    /// Sets [`Settings::early_submission`]. The default is true.
    early_submission: bool => settings.early_submission;

    /// Sets whether submitters get requests in batches when the device is full. The default is true.
    batching: bool => settings.batching;

    /// Sets whether I/O is counted and timed. The default is true.
    iostats: bool => settings.iostats;

    /// Sets how time stamps are taken. The default is a cached clock.
    clock: ClockMode => settings.clock;

    /// Sets limits of I/Os and bytes per second. The default is no limits.
    rate_limits: RateLimits => rate_limits;

    /// Sets the policy for requests that the driver fails. The default is to report their errors.
    error_policy: ErrorPolicy => error_policy;

    /// Sets whether flushes and FUA do nothing. The default is false. If true, nothing is durable until the
    /// backing store writes it back on its own.
    ignore_flushes: bool => ignore_flushes;
}

impl DiskBuilder {
    /// Sets the name for messages and statistics. The default is the driver's name.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> DiskBuilder {
        self.name = name.into();
        self
    }

    /// Builds the disk. Fails with [`ErrorKind::Invalid`] if the number of queues, the depth or the driver's
    /// limits are invalid, and with the error of [`Driver::prepare_queues`].
    pub fn build(self) -> Result<Arc<Disk>, Error> {
        let DiskBuilder { driver, name, queues, shared_tags, settings, .. } = self;
        let invalid = |message: String| Err(Error::new(ErrorKind::Invalid, message));
        if !(1..=QUEUES_MAX).contains(&queues) {
            return invalid(format!("the number of queues must be 1 to {QUEUES_MAX}, not {queues}"));
        }
        if queues > driver.queues_max() {
            let (driver, most) = (driver.name(), driver.queues_max());
            return invalid(format!("this {driver} device has at most {most} queues, not {queues}"));
        }
        if !(1..=DEPTH_MAX).contains(&settings.depth) {
            return invalid(format!("depth must be 1 to {DEPTH_MAX}, not {}", settings.depth));
        }
        driver.limits().validate()?;
        driver.prepare_queues(queues)?;
        let depth_max = settings.tags();
        let shared = shared_tags.then(|| {
            let tags = TagSet::new(depth_max);
            tags.set_depth(settings.requests());
            Arc::new(tags)
        });
        let hardware = || -> Result<Arc<HardwareQueue>, Error> {
            Ok(Arc::new(HardwareQueue {
                tags: shared.clone(),
                kick: Arc::new(Kick::new()?),
                software: SoftwareQueues::new(),
                stats: QueueStats::shared(),
                open: AtomicBool::new(false),
            }))
        };
        let disk = Arc::new(Disk {
            control: DiskControl::new(queues),
            throttle: ThrottleControl::default(),
            hold: HoldControl::new(queues),
            bitmaps: BitmapSet::default(),
            ignore_flushes: self.ignore_flushes,
            gate: RequestGate::new(settings.gate_requests(queues, shared_tags), settings.batching),
            queues: (0..queues).map(|_| hardware()).collect::<Result<_, _>>()?,
            name,
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            driver: Mutex::new(driver),
            settings: Mutex::new(settings),
            changing: Mutex::new(()),
            read_only: AtomicBool::new(self.read_only),
            depth_max,
            shared_tags,
            next_queue: AtomicUsize::new(0),
            broken: Mutex::new(None),
        });
        disk.hold.set_policy(self.error_policy);
        if !self.rate_limits.is_none() {
            disk.set_rate_limits(&self.rate_limits);
        }
        Ok(disk)
    }
}

impl Disk {
    /// Starts to build a disk with `driver`.
    pub fn builder(driver: Box<dyn Driver>) -> DiskBuilder {
        Disk::builder_shared(driver.into())
    }

    /// Starts to build a disk with `driver`, which the caller also uses, for example as an image.
    pub fn builder_shared(driver: Arc<dyn Driver>) -> DiskBuilder {
        DiskBuilder {
            name: driver.name().to_string(),
            driver,
            queues: 1,
            shared_tags: false,
            read_only: false,
            rate_limits: RateLimits::default(),
            error_policy: ErrorPolicy::Report,
            ignore_flushes: false,
            settings: Settings {
                depth: DEPTH_DEFAULT,
                scheduler: SchedulerKind::None,
                merge: true,
                early_submission: true,
                batching: true,
                iostats: true,
                clock: ClockMode::Cached,
            },
        }
    }
}

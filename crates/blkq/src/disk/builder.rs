use std::sync::Arc;

use crate::clock::ClockMode;
use crate::driver::Driver;
use crate::error::{Error, ErrorKind};
use crate::limits::QUEUES_MAX;
use crate::sched::SchedulerKind;
use crate::throttle::RateLimits;

use super::Disk;
use super::hold::ErrorPolicy;
use super::settings::{DEPTH_DEFAULT, DEPTH_MAX, Settings};

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

impl DiskBuilder {
    /// Sets the name for messages and statistics. The default is the driver's name.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> DiskBuilder {
        self.name = name.into();
        self
    }

    /// Sets the number of hardware queues, from 1 to [`QUEUES_MAX`]. The default is 1.
    #[must_use]
    pub fn queues(mut self, queues: usize) -> DiskBuilder {
        self.queues = queues;
        self
    }

    /// Sets the number of requests in flight per queue, from 1 to [`DEPTH_MAX`]. The default is
    /// [`DEPTH_DEFAULT`].
    #[must_use]
    pub fn depth(mut self, depth: u16) -> DiskBuilder {
        self.settings.depth = depth;
        self
    }

    /// Lets all queues share one tag set, as BLK_MQ_F_TAG_HCTX_SHARED does, instead of one for each queue.
    #[must_use]
    pub fn shared_tags(mut self, shared: bool) -> DiskBuilder {
        self.shared_tags = shared;
        self
    }

    /// Rejects writes, also if the device is writable.
    #[must_use]
    pub fn read_only(mut self, read_only: bool) -> DiskBuilder {
        self.read_only = read_only;
        self
    }

    /// Sets the scheduler. The default is none.
    #[must_use]
    pub fn scheduler(mut self, scheduler: SchedulerKind) -> DiskBuilder {
        self.settings.scheduler = scheduler;
        self
    }

    /// Sets whether neighbouring bios are merged. The default is true.
    #[must_use]
    pub fn merge(mut self, merge: bool) -> DiskBuilder {
        self.settings.merge = merge;
        self
    }

    /// Sets [`Settings::early_submission`]. The default is true.
    #[must_use]
    pub fn early_submission(mut self, early_submission: bool) -> DiskBuilder {
        self.settings.early_submission = early_submission;
        self
    }

    /// Sets whether submitters get requests in batches when the device is full. The default is true.
    #[must_use]
    pub fn batching(mut self, batching: bool) -> DiskBuilder {
        self.settings.batching = batching;
        self
    }

    /// Sets whether I/O is counted and timed. The default is true.
    #[must_use]
    pub fn iostats(mut self, iostats: bool) -> DiskBuilder {
        self.settings.iostats = iostats;
        self
    }

    /// Sets how time stamps are taken. The default is a cached clock.
    #[must_use]
    pub fn clock(mut self, clock: ClockMode) -> DiskBuilder {
        self.settings.clock = clock;
        self
    }

    /// Sets limits of I/Os and bytes per second. The default is no limits.
    #[must_use]
    pub fn rate_limits(mut self, limits: RateLimits) -> DiskBuilder {
        self.rate_limits = limits;
        self
    }

    /// Sets the policy for requests that the driver fails. The default is to report their errors.
    #[must_use]
    pub fn error_policy(mut self, policy: ErrorPolicy) -> DiskBuilder {
        self.error_policy = policy;
        self
    }

    /// Sets whether flushes and FUA do nothing. The default is false. If true, nothing is durable until the
    /// backing store writes it back on its own.
    #[must_use]
    pub fn ignore_flushes(mut self, ignore: bool) -> DiskBuilder {
        self.ignore_flushes = ignore;
        self
    }

    /// Builds the disk. Fails with [`ErrorKind::Invalid`] if the number of queues, the depth or the driver's
    /// limits are invalid.
    pub fn build(self) -> Result<Arc<Disk>, Error> {
        let DiskBuilder {
            driver,
            name,
            queues,
            shared_tags,
            read_only,
            settings,
            rate_limits,
            error_policy,
            ignore_flushes,
        } = self;
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
        let disk = Disk::assemble(driver, name, settings, queues, shared_tags, read_only, ignore_flushes)?;
        disk.hold.set_policy(error_policy);
        if !rate_limits.is_none() {
            disk.set_rate_limits(&rate_limits);
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

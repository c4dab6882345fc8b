//! [`DiskBuilder`]: how a [`Disk`] is made.

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

/// Makes a [`Disk`].
pub struct DiskBuilder {
    driver: Box<dyn Driver>,
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

    /// Refuses writes, also where the driver has them.
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

    /// Whether a driver's I/O reaches the kernel a few at a time; true by default.
    #[must_use]
    pub fn early_submission(mut self, early_submission: bool) -> DiskBuilder {
        self.settings.early_submission = early_submission;
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

    /// Limits of I/Os and bytes per second; none by default.
    #[must_use]
    pub fn rate_limits(mut self, limits: RateLimits) -> DiskBuilder {
        self.rate_limits = limits;
        self
    }

    /// The policy for requests that the driver fails; their errors are reported by default.
    #[must_use]
    pub fn error_policy(mut self, policy: ErrorPolicy) -> DiskBuilder {
        self.error_policy = policy;
        self
    }

    /// Whether flushes and FUA do nothing; false by default. With true nothing is durable until the
    /// backing store writes it back by itself.
    #[must_use]
    pub fn ignore_flushes(mut self, ignore: bool) -> DiskBuilder {
        self.ignore_flushes = ignore;
        self
    }

    /// The disk.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for limits that make no sense and numbers out of range.
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
        let disk =
            Disk::assemble(driver.into(), name, settings, queues, shared_tags, read_only, ignore_flushes)?;
        disk.hold.set_policy(error_policy);
        if !rate_limits.is_none() {
            disk.set_rate_limits(&rate_limits);
        }
        Ok(disk)
    }
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

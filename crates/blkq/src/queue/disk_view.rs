//! A queue's view of its disk: the settings and limits in force, and whether the queue
//! has entered, so that a freeze waits for it.

use std::sync::Arc;

use crate::bio::Operation;
use crate::disk::{Disk, HardwareQueue, Settings};
use crate::driver::Driver;
use crate::error::Error;
use crate::limits::QueueLimits;
use crate::request::Request;
use crate::sched::SchedulerKind;
use crate::sector::Sector;

use super::fast_limits::FastLimits;

/// A queue's view of its disk.
pub(super) struct DiskView {
    disk: Arc<Disk>,
    index: usize,
    shared: Arc<HardwareQueue>,
    /// The driver that the queue's part is of.
    driver: Arc<dyn Driver>,
    /// Of the changes that were taken over.
    generation: u64,
    settings: Settings,
    limits: QueueLimits,
    fast: FastLimits,
    /// Between `enter` and `leave`: limits and settings stay as they are.
    entered: bool,
}

impl DiskView {
    /// The view that queue `index` has of `disk`.
    ///
    /// # Errors
    /// If the driver's limits are invalid.
    pub fn new(disk: &Arc<Disk>, index: usize) -> Result<DiskView, Error> {
        // Before all that it is about: a change that comes in between is then seen by `enter`.
        let generation = disk.control.generation();
        let settings = disk.settings();
        let driver = disk.driver();
        let limits = disk.limits();
        limits.validate()?;
        let fast = FastLimits::new(&limits);
        let shared = disk.hardware_queue(index).clone();
        Ok(DiskView {
            disk: disk.clone(),
            index,
            shared,
            driver,
            generation,
            settings,
            limits,
            fast,
            entered: false,
        })
    }

    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// The driver that the queue's part is of.
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Takes over the disk's driver. Returns whether that is another one.
    pub fn reload_driver(&mut self) -> bool {
        let driver = self.disk.driver();
        let is_new = !Arc::ptr_eq(&driver, &self.driver);
        self.driver = driver;
        is_new
    }

    /// The queue's number.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The part of the queue that other threads see.
    #[inline]
    pub fn shared(&self) -> &HardwareQueue {
        &self.shared
    }

    #[inline]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    #[inline]
    pub fn limits(&self) -> &QueueLimits {
        &self.limits
    }

    /// Whether one request of `operation` may have so many sectors from `start` on, in so many pieces
    /// of memory.
    #[inline]
    pub fn allows(&self, operation: Operation, start: Sector, sectors: u64, segments: u32) -> bool {
        self.fast.allows(operation, sectors, segments)
            || self.limits.allow(operation, start, sectors, segments)
    }

    /// Whether the driver declares that it does what the flags of `request` demand.
    pub fn declares(&self, request: &Request) -> bool {
        self.limits.declares(request.operation, request.flags)
    }

    #[inline]
    pub fn fast(&self) -> &FastLimits {
        &self.fast
    }

    #[inline]
    pub fn is_entered(&self) -> bool {
        self.entered
    }

    #[inline]
    pub fn is_frozen(&self) -> bool {
        self.disk.control.is_frozen()
    }

    /// Whether flushes wait for writes that are held.
    #[inline]
    pub fn has_held_writes(&self) -> bool {
        self.disk.hold.has_writes()
    }

    #[inline]
    pub fn is_quiesced(&self) -> bool {
        self.disk.control.is_quiesced()
    }

    /// The queue is to have requests. False while the disk is frozen.
    pub fn enter(&mut self) -> bool {
        self.entered = self.disk.control.enter(self.index);
        self.entered
    }

    /// The queue has no request any more.
    #[inline]
    pub fn leave(&mut self) {
        self.entered = false;
        self.disk.control.leave(self.index);
    }

    /// The driver is to be given requests. False while the disk is quiesced.
    #[inline]
    pub fn begin_dispatch(&self) -> bool {
        self.disk.control.begin_dispatch(self.index)
    }

    #[inline]
    pub fn leave_dispatch(&self) {
        self.disk.control.leave_dispatch(self.index);
    }

    /// Whether something was changed under a freeze since it was last taken over.
    #[inline]
    pub fn is_outdated(&self) -> bool {
        self.disk.control.generation() != self.generation
    }

    /// Takes over the settings. Returns the scheduler, if that is another now.
    pub fn reload_settings(&mut self) -> Option<SchedulerKind> {
        self.generation = self.disk.control.generation();
        let before = self.settings.scheduler;
        self.settings = self.disk.settings();
        (before != self.settings.scheduler).then_some(self.settings.scheduler)
    }

    /// Takes over the driver's limits. False if they are as they were.
    pub fn reload_limits(&mut self) -> bool {
        let limits = self.disk.limits();
        // A driver that comes to contradict itself has shown its bug to whatever changed it.
        if limits == self.limits || limits.validate().is_err() {
            return false;
        }
        self.limits = limits;
        self.fast = FastLimits::new(&self.limits);
        true
    }
}

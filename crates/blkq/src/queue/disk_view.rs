//! A queue's view of its disk: the settings and limits in force, and whether the queue has entered the disk,
//! so that a freeze waits for it. The view changes only between `enter` and the first request, or when the
//! driver itself lowers its limits.

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

pub(super) struct DiskView {
    disk: Arc<Disk>,
    index: usize,
    shared: Arc<HardwareQueue>,
    /// The driver whose queue this queue has open.
    driver: Arc<dyn Driver>,
    /// The generation of [`DiskControl`](crate::disk::freeze::DiskControl) that the view includes.
    generation: u64,
    settings: Settings,
    limits: QueueLimits,
    fast: FastLimits,
    /// True between `enter` and `leave`: control threads change neither limits nor settings.
    entered: bool,
}

impl DiskView {
    /// Fails with [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if the driver's limits are invalid.
    pub fn new(disk: &Arc<Disk>, index: usize) -> Result<DiskView, Error> {
        // Read before the settings, so that `enter` notices a change made in between.
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

    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Takes the disk's current driver. Returns whether the driver was exchanged.
    pub fn reload_driver(&mut self) -> bool {
        let driver = self.disk.driver();
        let is_new = !Arc::ptr_eq(&driver, &self.driver);
        self.driver = driver;
        is_new
    }

    pub fn index(&self) -> usize {
        self.index
    }

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

    #[inline]
    pub fn allows(&self, operation: Operation, start: Sector, sectors: u64, segments: u32) -> bool {
        self.fast.allows(operation, sectors, segments)
            || self.limits.allow(operation, start, sectors, segments)
    }

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

    #[inline]
    pub fn has_held_writes(&self) -> bool {
        self.disk.hold.has_writes()
    }

    #[inline]
    pub fn is_quiesced(&self) -> bool {
        self.disk.control.is_quiesced()
    }

    /// Enters the disk, so that the queue may have requests. Returns false while the disk is frozen.
    pub fn enter(&mut self) -> bool {
        self.entered = self.disk.control.enter(self.index);
        self.entered
    }

    #[inline]
    pub fn leave(&mut self) {
        self.entered = false;
        self.disk.control.leave(self.index);
    }

    /// Begins to offer requests to the driver. Returns false while the disk is quiesced; otherwise the caller
    /// must call [`DiskView::leave_dispatch`].
    #[inline]
    pub fn begin_dispatch(&self) -> bool {
        self.disk.control.begin_dispatch(self.index)
    }

    #[inline]
    pub fn leave_dispatch(&self) {
        self.disk.control.leave_dispatch(self.index);
    }

    #[inline]
    pub fn is_outdated(&self) -> bool {
        self.disk.control.generation() != self.generation
    }

    /// Takes the disk's current settings. Returns the scheduler if it was changed.
    pub fn reload_settings(&mut self) -> Option<SchedulerKind> {
        self.generation = self.disk.control.generation();
        let before = self.settings.scheduler;
        self.settings = self.disk.settings();
        (before != self.settings.scheduler).then_some(self.settings.scheduler)
    }

    /// Takes the driver's current limits. Returns false if they have not changed.
    pub fn reload_limits(&mut self) -> bool {
        let limits = self.disk.limits();
        // `Disk::frozen` has reported invalid limits to the caller that made the change. The queue keeps its
        // old limits.
        if limits == self.limits || limits.validate().is_err() {
            return false;
        }
        self.limits = limits;
        self.fast = FastLimits::new(&self.limits);
        true
    }
}

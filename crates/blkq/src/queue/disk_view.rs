//! A queue's view of its disk: the settings and limits in force, and whether the queue has entered the disk,
//! so that a freeze waits for it. The view changes only between `enter` and the first request, or when the
//! driver itself lowers its limits.

use std::sync::Arc;

use crate::disk::freeze::DiskControl;
use crate::disk::{Disk, HardwareQueue, Settings};
use crate::driver::Driver;
use crate::error::Error;
use crate::limits::QueueLimits;

use super::plug::FastLimits;

pub(super) struct DiskView {
    pub disk: Arc<Disk>,
    pub index: usize,
    pub shared: Arc<HardwareQueue>,
    /// The driver whose queue this queue has open.
    pub driver: Arc<dyn Driver>,
    /// The generation of [`DiskControl`] that the view includes.
    generation: u64,
    pub settings: Settings,
    pub limits: QueueLimits,
    pub fast: FastLimits,
    /// True between [`DiskControl::enter`] and [`DiskControl::leave`]: control threads change neither limits nor
    /// settings.
    pub entered: bool,
}

impl DiskView {
    /// Fails with [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if the driver's limits are invalid.
    pub fn new(disk: &Arc<Disk>, index: usize) -> Result<DiskView, Error> {
        // Read before the settings, so that `is_outdated` notices a change made in between.
        let generation = disk.control.generation();
        let (settings, driver, limits) = (disk.settings(), disk.driver(), disk.limits());
        limits.validate()?;
        let (fast, shared) = (FastLimits::new(&limits), disk.hardware_queue(index).clone());
        let (disk, entered) = (disk.clone(), false);
        Ok(DiskView { disk, index, shared, driver, generation, settings, limits, fast, entered })
    }

    pub fn control(&self) -> &DiskControl {
        &self.disk.control
    }

    pub fn is_frozen(&self) -> bool {
        self.disk.control.is_frozen()
    }

    pub fn is_outdated(&self) -> bool {
        self.disk.control.generation() != self.generation
    }

    /// Takes the disk's current settings and driver. Returns whether the scheduler was changed, and whether the driver
    /// was exchanged.
    pub fn reload(&mut self) -> (bool, bool) {
        self.generation = self.disk.control.generation();
        let before = std::mem::replace(&mut self.settings, self.disk.settings());
        let driver = std::mem::replace(&mut self.driver, self.disk.driver());
        (before.scheduler != self.settings.scheduler, !Arc::ptr_eq(&driver, &self.driver))
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

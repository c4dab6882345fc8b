//! Exchanges the driver of a disk in use, for snapshots and block commits.

use std::sync::Arc;

use crate::driver::Driver;
use crate::error::Error;
use crate::sync::{MutexGuard, lock};

use super::{Disk, Frozen};

/// A freeze under which the driver may be exchanged ([`Disk::begin_exchange`]). Dropping this lifts it.
#[must_use = "the freeze is over when this is dropped"]
pub struct Exchange<'a> {
    disk: &'a Disk,
    /// Fields are dropped in this order: the freeze is lifted before the next change may begin.
    _frozen: Frozen<'a>,
    _one_at_a_time: MutexGuard<'a, ()>,
}

impl Disk {
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

//! Another driver for a disk in use.

use std::sync::Arc;

use crate::driver::Driver;
use crate::error::{Error, ErrorKind};
use crate::sync::{MutexGuard, lock};

use super::{Disk, Frozen};

/// A freeze in which the driver may be exchanged ([`Disk::begin_exchange`]). Over when this is dropped.
#[must_use = "the freeze is over when this is dropped"]
pub struct Exchange<'a> {
    disk: &'a Disk,
    /// Before the next change: fields are dropped in this order.
    _frozen: Frozen<'a>,
    _one_at_a_time: MutexGuard<'a, ()>,
}

impl Disk {
    /// Freezes the disk, so that its driver can be exchanged. Other changes wait until that is over.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] as with [`Disk::set`].
    pub fn begin_exchange(&self) -> Result<Exchange<'_>, Error> {
        let one_at_a_time = lock(&self.changing);
        self.freeze_timeout()?;
        Ok(Exchange { disk: self, _frozen: Frozen(self), _one_at_a_time: one_at_a_time })
    }

    /// Checks whether `driver` could take the place of the disk's: its device must be the same for those that use it.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if it has fewer queues, another size or sector, or wants more of memory.
    pub fn check_exchange(&self, driver: &dyn Driver) -> Result<(), Error> {
        let (now, then) = (self.driver().limits(), driver.limits());
        then.validate()?;
        let (queues, most) = (self.queue_count(), driver.queues_max());
        let refused =
            |why: String| Err(Error::new(ErrorKind::Unsupported, format!("{}: {why}", self.name())));
        if queues > most {
            return refused(format!("it has {queues} queues, and a {} device at most {most}", driver.name()));
        }
        let bytes = |value: u32| u64::from(value);
        let same = [
            ("the size", now.size_bytes(), then.size_bytes()),
            ("the sector size", bytes(now.logical_block_bytes), bytes(then.logical_block_bytes)),
            ("the padding behind the end", bytes(now.padding_bytes), bytes(then.padding_bytes)),
        ];
        if let Some((what, now, then)) = same.into_iter().find(|(_, now, then)| now != then) {
            return refused(format!("{what} would be {then} bytes instead of {now}"));
        }
        let (now, then) = (now.memory_align, then.memory_align);
        if then > now {
            return refused(format!("memory would be aligned to {then} bytes instead of {now}"));
        }
        Ok(())
    }
}

impl Exchange<'_> {
    /// As [`Disk::check_exchange`].
    ///
    /// # Errors
    /// As that.
    pub fn check(&self, driver: &dyn Driver) -> Result<(), Error> {
        self.disk.check_exchange(driver)
    }

    /// Puts `driver`, which was checked, in the place of the disk's, which is returned. Each queue of the disk opens
    /// its own of the driver's when it goes on; if it cannot, its requests fail, and [`Disk::broken`] has the reason.
    ///
    /// # Errors
    /// As [`Exchange::check`]; nothing has changed then.
    pub fn replace(&self, driver: Box<dyn Driver>) -> Result<Arc<dyn Driver>, Error> {
        self.check(&*driver)?;
        self.disk.set_broken(None);
        Ok(std::mem::replace(&mut *lock(&self.disk.driver), driver.into()))
    }
}

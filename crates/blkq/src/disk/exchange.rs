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
        let sizes = [now.size_bytes(), then.size_bytes()];
        let sectors = [now.logical_block_bytes, then.logical_block_bytes];
        if sizes[0] != sizes[1] || sectors[0] != sectors[1] || now.padding_bytes != then.padding_bytes {
            return refused(format!("the size would be {} instead of {}", sizes[1], sizes[0]));
        }
        if then.memory_align > now.memory_align {
            return refused(format!(
                "memory would be aligned to {} instead of {}",
                then.memory_align, now.memory_align
            ));
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

    /// Puts `driver`, which was checked, in the place of the disk's, which is returned. Each queue of the disk opens its
    /// own of the driver's when it goes on; if it cannot, its requests fail, and [`Disk::broken`] has the reason.
    ///
    /// # Errors
    /// As [`Exchange::check`]; nothing has changed then.
    pub fn replace(&self, driver: Box<dyn Driver>) -> Result<Arc<dyn Driver>, Error> {
        self.check(&*driver)?;
        self.disk.set_broken(None);
        Ok(std::mem::replace(&mut *lock(&self.disk.driver), driver.into()))
    }
}

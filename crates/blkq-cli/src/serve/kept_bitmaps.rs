//! Keeping the dirty bitmaps of a device with its image.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use blkq::drivers::bitmaps;
use blkq::{Disk, Driver};

use crate::failure::{Failure, Outcome};
use crate::log;

/// The bitmaps of a disk, which are kept with its image when this is dropped, or before.
pub(super) struct KeptBitmaps {
    disk: Arc<Disk>,
    kept: AtomicBool,
}

impl KeptBitmaps {
    /// Loads the bitmaps that are kept with the image of `disk`, no queue of which is open yet. From now on they are
    /// marked there as in use: if this process is killed, they are inconsistent. Returns warnings, too.
    ///
    /// # Errors
    /// Those of the files.
    pub(super) fn load(disk: &Arc<Disk>) -> Outcome<(KeptBitmaps, Vec<String>)> {
        let (bitmaps, mut warnings) = bitmaps::load(&*disk.driver())?;
        let kept = KeptBitmaps { disk: disk.clone(), kept: AtomicBool::new(false) };
        let left_out = disk.load_bitmaps(bitmaps)?;
        warnings.extend(left_out.into_iter().map(|error| format!("not kept up to date: {error}")));
        Ok((kept, warnings))
    }

    /// Keeps the bitmaps with the image, once. The device has no clients, and gets none.
    ///
    /// # Errors
    /// Those of the files; the bitmaps are inconsistent then.
    pub(super) fn keep(&self) -> Outcome {
        let _frozen = self.disk.begin_exchange()?;
        self.keep_stopped()
    }

    /// The same while no request reaches the driver any more.
    ///
    /// # Errors
    /// As [`KeptBitmaps::keep`].
    pub(super) fn keep_stopped(&self) -> Outcome {
        if self.kept.swap(true, SeqCst) {
            return Ok(());
        }
        bitmaps::store(&*self.disk.driver(), &self.disk.bitmaps()).map_err(|e| {
            Failure::from(e).during("the bitmaps are not kept, and are inconsistent from now on")
        })
    }
}

impl KeptBitmaps {
    /// Keeps the bitmaps as they are now with the image of `driver` too, to which nothing is written any more. The
    /// device goes on without it.
    pub(super) fn leave_in(&self, driver: &dyn Driver) {
        if let Err(error) = bitmaps::store(driver, &self.disk.bitmaps()) {
            log::line(&format!("warning: the bitmaps in the image before are inconsistent: {error}"));
        }
    }
}

impl Drop for KeptBitmaps {
    fn drop(&mut self) {
        if !self.kept.load(SeqCst)
            && let Err(failure) = self.keep()
        {
            log::line(&format!("warning: {failure}"));
        }
    }
}

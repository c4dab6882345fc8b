//! Keeping the dirty bitmaps of a device with its image.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use blkq::bitmap::{Bitmap, BitmapStore};
use blkq::{Disk, Driver};

use crate::failure::{Failure, Outcome};
use crate::log;

/// The bitmaps of a disk, which are kept with its image when this is dropped, or before.
pub(super) struct KeptBitmaps {
    disk: Arc<Disk>,
    /// The image had some at attach.
    loaded: bool,
    kept: AtomicBool,
}

impl KeptBitmaps {
    /// Loads the bitmaps that are kept with the image of `disk`, no queue of which is open yet. From now on they are
    /// marked there as in use: if this process is killed, they are inconsistent. Returns warnings, too.
    ///
    /// # Errors
    /// Those of the files.
    pub(super) fn load(disk: &Arc<Disk>) -> Outcome<(KeptBitmaps, Vec<String>)> {
        let driver = disk.driver();
        let store = driver.bitmap_store();
        let (bitmaps, mut warnings) = store.map_or_else(|| Ok(Default::default()), BitmapStore::load)?;
        let kept =
            KeptBitmaps { disk: disk.clone(), loaded: !bitmaps.is_empty(), kept: AtomicBool::new(false) };
        let left_out = disk.load_bitmaps(bitmaps)?;
        if !left_out.is_empty() {
            // The image has room for those that are kept, and not only at detach.
            let reserved = store.map_or(Ok(()), |store| store.reserve(&disk.bitmaps()));
            warnings.extend(reserved.err().map(|error| format!("bitmaps may not be kept: {error}")));
        }
        warnings.extend(left_out.into_iter().map(|error| format!("not kept up to date: {error}")));
        Ok((kept, warnings))
    }

    /// Keeps the bitmaps with the image, once: they are changed no more. The device has no clients, and gets none.
    ///
    /// # Errors
    /// Those of the files; the bitmaps are inconsistent then.
    pub(super) fn keep(&self) -> Outcome {
        if self.kept.load(SeqCst) {
            return Ok(());
        }
        let bitmaps = self.disk.close_bitmaps();
        let _frozen = match self.disk.begin_exchange() {
            // None is lost.
            Err(_) if self.has_none(&bitmaps) => return Ok(()),
            frozen => frozen.map_err(not_kept)?,
        };
        self.kept.store(true, SeqCst);
        self.store(&bitmaps)
    }

    /// The same for the next daemon, which takes over the device when this process exits. Its block device may have
    /// requests until then: they wait, and are that daemon's.
    ///
    /// # Errors
    /// As [`KeptBitmaps::keep`], and if I/O in flight does not complete: it would not be in them.
    pub(super) fn keep_for_next(&self) -> Outcome {
        let bitmaps = self.disk.close_bitmaps();
        if self.has_none(&bitmaps) || self.kept.swap(true, SeqCst) {
            return Ok(());
        }
        let frozen = self.disk.freeze_until_exit();
        frozen.map_err(not_kept)?;
        self.store(&bitmaps)
    }

    /// Whether the image names none either.
    fn has_none(&self, bitmaps: &[Arc<Bitmap>]) -> bool {
        !self.loaded && bitmaps.is_empty()
    }

    fn store(&self, all: &[Arc<Bitmap>]) -> Outcome {
        store_in(&*self.disk.driver(), all).map_err(not_kept)
    }
}

impl KeptBitmaps {
    /// Keeps the bitmaps as they are now with the image of `driver` too, to which nothing is written any more. The
    /// device goes on without it.
    pub(super) fn leave_in(&self, driver: &dyn Driver) {
        if let Err(error) = store_in(driver, &self.disk.bitmaps()) {
            log::line(&format!("warning: the bitmaps in the image before are inconsistent: {error}"));
        }
    }
}

/// Keeps `all` with the image of `driver`, if it has a place for them.
fn store_in(driver: &dyn Driver, all: &[Arc<Bitmap>]) -> Result<(), blkq::Error> {
    driver.bitmap_store().map_or(Ok(()), |store| store.store(all))
}

fn not_kept(error: blkq::Error) -> Failure {
    Failure::from(error).during("the bitmaps are not kept, and are inconsistent from now on")
}

impl Drop for KeptBitmaps {
    fn drop(&mut self) {
        if let Err(failure) = self.keep() {
            log::line(&format!("warning: {failure}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use blkq::EngineThread;
    use blkq::drivers::ram::Ram;

    use super::*;

    #[test]
    fn no_write_completes_once_the_next_daemon_has_bitmaps() {
        let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap())).build().unwrap();
        let bitmaps = KeptBitmaps::load(&disk).unwrap().0;
        disk.add_bitmap("b", 512).unwrap();
        // As this process does when it exits.
        std::mem::forget(EngineThread::spawn("test", vec![(disk.clone(), 0)]).unwrap());
        disk.submitter().write_at(&[1; 512], 0).unwrap();
        bitmaps.keep_for_next().unwrap();
        let (sender, completed) = channel();
        let writer = disk.clone();
        std::thread::spawn(move || sender.send(writer.submitter().write_at(&[1; 512], 512).is_ok()));
        assert!(completed.recv_timeout(Duration::from_millis(100)).is_err());
        assert_eq!(disk.bitmaps()[0].dirty_bytes(), 512);
    }

    #[test]
    fn bitmaps_are_not_changed_once_they_are_kept() {
        for keep in [KeptBitmaps::keep, KeptBitmaps::keep_for_next] {
            let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap())).build().unwrap();
            let bitmaps = KeptBitmaps::load(&disk).unwrap().0;
            disk.add_bitmap("b", 512).unwrap();
            disk.add_bitmap("c", 512).unwrap();
            keep(&bitmaps).unwrap();
            for changed in [
                disk.add_bitmap("d", 512),
                disk.remove_bitmap("b"),
                disk.clear_bitmap("b"),
                disk.set_bitmap_recording("b", false),
                disk.merge_bitmaps(&["b".to_owned()], "c"),
                disk.resize(Some(2 << 20)).map(drop),
            ] {
                assert!(changed.unwrap_err().to_string().contains("the device is stopping"));
            }
        }
    }

    #[test]
    fn none_is_added_once_the_next_daemon_has_no_bitmaps() {
        let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap())).build().unwrap();
        let bitmaps = KeptBitmaps::load(&disk).unwrap().0;
        bitmaps.keep_for_next().unwrap();
        assert!(disk.add_bitmap("b", 512).is_err());
    }
}

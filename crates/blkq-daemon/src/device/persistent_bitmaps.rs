use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use blkq::bitmap::{Bitmap, BitmapStore};
use blkq::{Disk, Driver};
use blkq_protocol::failure::{Failure, Outcome};

use crate::log;

/// The dirty bitmaps of a disk. [`PersistentBitmaps::save`], or dropping, saves them in its image.
pub(super) struct PersistentBitmaps {
    disk: Arc<Disk>,
    /// The image had bitmaps at attach.
    loaded: bool,
    saved: AtomicBool,
}

impl PersistentBitmaps {
    /// The queues of `disk` must not be open yet. The image marks the bitmaps as in use from now on: if this
    /// process is killed, they are inconsistent. Also returns warnings.
    pub(super) fn load(disk: &Arc<Disk>) -> Outcome<(PersistentBitmaps, Vec<String>)> {
        let driver = disk.driver();
        let store = driver.bitmap_store();
        let (bitmaps, mut warnings) = store.map_or_else(|| Ok(Default::default()), BitmapStore::load)?;
        let saved = PersistentBitmaps {
            disk: disk.clone(),
            loaded: !bitmaps.is_empty(),
            saved: AtomicBool::new(false),
        };
        let left_out = disk.load_bitmaps(bitmaps)?;
        if !left_out.is_empty() {
            // Reserve the space for the remaining bitmaps now, and not only at detach.
            let reserved = store.map_or(Ok(()), |store| store.reserve(&disk.bitmaps()));
            warnings.extend(reserved.err().map(|e| format!("the dirty bitmaps may not be saved: {e}")));
        }
        warnings.extend(left_out.into_iter().map(|e| format!("a dirty bitmap is not kept up to date: {e}")));
        Ok((saved, warnings))
    }

    /// Saves the bitmaps once. They cannot be changed afterwards. The device must have no clients, now or
    /// later. If this fails, the bitmaps are inconsistent.
    pub(super) fn save(&self) -> Outcome {
        if self.saved.load(SeqCst) {
            return Ok(());
        }
        let bitmaps = self.disk.close_bitmaps();
        let _frozen = match self.disk.begin_exchange() {
            // No bitmap is lost.
            Err(_) if self.has_none(&bitmaps) => return Ok(()),
            frozen => frozen.map_err(not_saved)?,
        };
        self.saved.store(true, SeqCst);
        store_in(&*self.disk.driver(), &bitmaps).map_err(not_saved)
    }

    /// Saves the bitmaps for the next daemon, which takes over the device when this process exits. The block
    /// device may still receive requests: they wait for the next daemon. Also fails if I/O in flight does not
    /// complete, because the bitmaps would not include it.
    pub(super) fn save_for_next(&self) -> Outcome {
        let bitmaps = self.disk.close_bitmaps();
        if self.has_none(&bitmaps) || self.saved.swap(true, SeqCst) {
            return Ok(());
        }
        self.disk.freeze_until_exit().map_err(not_saved)?;
        store_in(&*self.disk.driver(), &bitmaps).map_err(not_saved)
    }

    fn has_none(&self, bitmaps: &[Arc<Bitmap>]) -> bool {
        !self.loaded && bitmaps.is_empty()
    }

    /// The device continues without the image of `driver`, which is no longer written.
    pub(super) fn save_in(&self, driver: &dyn Driver) {
        if let Err(error) = store_in(driver, &self.disk.bitmaps()) {
            log::line(&format!("warning: the dirty bitmaps in the previous image are inconsistent: {error}"));
        }
    }
}

/// Does nothing if the image has no place for bitmaps.
fn store_in(driver: &dyn Driver, all: &[Arc<Bitmap>]) -> Result<(), blkq::Error> {
    driver.bitmap_store().map_or(Ok(()), |store| store.store(all))
}

fn not_saved(error: blkq::Error) -> Failure {
    Failure::from(error).during("cannot save the dirty bitmaps, which are inconsistent now")
}

impl Drop for PersistentBitmaps {
    fn drop(&mut self) {
        if let Err(failure) = self.save() {
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
        let bitmaps = PersistentBitmaps::load(&disk).unwrap().0;
        disk.add_bitmap("b", 512).unwrap();
        // As in the daemon, which exits without stopping its engines.
        std::mem::forget(EngineThread::spawn("test", vec![(disk.clone(), 0)]).unwrap());
        disk.submitter().write_at(&[1; 512], 0).unwrap();
        bitmaps.save_for_next().unwrap();
        let (sender, completed) = channel();
        let writer = disk.clone();
        std::thread::spawn(move || sender.send(writer.submitter().write_at(&[1; 512], 512).is_ok()));
        assert!(completed.recv_timeout(Duration::from_millis(100)).is_err());
        assert_eq!(disk.bitmaps()[0].dirty_bytes(), 512);
    }

    #[test]
    fn bitmaps_cannot_be_changed_once_they_are_saved() {
        for save in [PersistentBitmaps::save, PersistentBitmaps::save_for_next] {
            let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap())).build().unwrap();
            let bitmaps = PersistentBitmaps::load(&disk).unwrap().0;
            disk.add_bitmap("b", 512).unwrap();
            disk.add_bitmap("c", 512).unwrap();
            save(&bitmaps).unwrap();
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
    fn no_bitmap_is_added_once_the_next_daemon_has_none() {
        let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap())).build().unwrap();
        let bitmaps = PersistentBitmaps::load(&disk).unwrap().0;
        bitmaps.save_for_next().unwrap();
        assert!(disk.add_bitmap("b", 512).is_err());
    }
}

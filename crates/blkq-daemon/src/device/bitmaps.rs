use std::fs::File;

use blkq::bitmap::{Bitmap, BitmapState};
use blkq_protocol::control::bitmaps::{BitmapChange, BitmapInfo};
use blkq_protocol::failure::Outcome;

use super::{Device, Permit};

impl Device {
    /// Sorted by name. Fails if the device has stopped.
    pub fn bitmaps(&self) -> Outcome<Vec<BitmapInfo>> {
        Ok(self.running()?.disk.bitmaps().iter().map(|bitmap| describe(bitmap)).collect())
    }

    /// Saves the bitmaps of a raw image in the new `file` from now on, unless the image already has such a
    /// file. Fails if the image cannot have a bitmap file, or the device is stopping, and as `permit` does.
    pub fn set_bitmap_file(&self, file: File, permit: Permit) -> Outcome {
        let _changing = self.begin_change_if(permit)?;
        Ok(self.running()?.disk.set_bitmap_file(file)?)
    }

    /// Atomic: no I/O is in flight during the change. Fails if the device cannot have such a bitmap, has no
    /// bitmap of that name, or is stopping, and as `permit` does.
    pub fn change_bitmap(&self, change: &BitmapChange, permit: Permit) -> Outcome {
        let running = self.running()?;
        if matches!(change, BitmapChange::Add { .. }) {
            // The name of the new bitmap is in the image when this returns; flushing first makes that write
            // short. No lock is held: a flush may hang.
            self.flush()?;
        }
        // Keeps a block commit from beginning.
        let _changing = self.begin_change_if(permit)?;
        self.check_not_changed()?;
        match change {
            BitmapChange::Add { name, granularity } => {
                running.disk.driver().require_bitmap_store()?.check()?;
                running.disk.add_bitmap(name, *granularity)?;
            }
            BitmapChange::Remove { name } => running.disk.remove_bitmap(name)?,
            BitmapChange::Clear { name } => running.disk.clear_bitmap(name)?,
            BitmapChange::Enable { name } => running.disk.set_bitmap_recording(name, true)?,
            BitmapChange::Disable { name } => running.disk.set_bitmap_recording(name, false)?,
            BitmapChange::Merge { from, into } => running.disk.merge_bitmaps(from, into)?,
        }
        Ok(())
    }
}

fn describe(bitmap: &Bitmap) -> BitmapInfo {
    let (state, dirty) = match bitmap.state() {
        BitmapState::Recording => ("recording", Some(bitmap.dirty_bytes())),
        BitmapState::Disabled => ("disabled", Some(bitmap.dirty_bytes())),
        BitmapState::Inconsistent => ("inconsistent", None),
    };
    BitmapInfo {
        name: bitmap.name().to_owned(),
        granularity: bitmap.granularity(),
        state: state.to_owned(),
        dirty,
    }
}

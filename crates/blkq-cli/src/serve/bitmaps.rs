//! The dirty bitmaps of a device, and changes of them.

use std::fs::File;

use blkq::bitmap::{Bitmap, BitmapState};

use super::Device;
use crate::bitmaps::{BitmapChange, BitmapInfo};
use crate::failure::Outcome;

impl Device {
    /// The bitmaps, by name.
    ///
    /// # Errors
    /// If the device has stopped.
    pub fn bitmaps(&self) -> Outcome<Vec<BitmapInfo>> {
        Ok(self.running()?.disk.bitmaps().iter().map(|bitmap| describe(bitmap)).collect())
    }

    /// Has the bitmaps of a raw image kept in `file`, which is new; one that has a file keeps that.
    ///
    /// # Errors
    /// If the image can have none, or the device is stopping.
    pub fn set_bitmap_file(&self, file: File) -> Outcome {
        Ok(self.running()?.disk.set_bitmap_file(file)?)
    }

    /// Changes the bitmaps: at one moment, for which I/O in flight completes.
    ///
    /// # Errors
    /// If the device can have no such bitmap, has none of that name, or is stopping.
    pub fn change_bitmap(&self, change: &BitmapChange) -> Outcome {
        let running = self.running()?;
        if matches!(change, BitmapChange::Add { .. }) {
            // The image has its name when this returns: its file is durable soon. Not under the lock: a flush may hang.
            self.flush_for_change()?;
        }
        // No block commit begins.
        let _changing = self.begin_change();
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

//! Keeping the dirty bitmaps of a raw image beside it.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use crate::bitmap::{Bitmap, BitmapState};
use crate::error::{Error, ErrorKind};
use crate::sync::{Mutex, lock as locked};

use super::backing::Backing;
use super::bitmap_file::{BitmapFile, Stamp};
use super::options::LoopOptions;
use super::shared::Shared;

/// Why the bitmaps of an image cannot be kept, if they cannot.
pub(super) fn cannot_keep(options: &LoopOptions, backing: &Backing) -> Option<&'static str> {
    let reasons = [
        (backing.block_device, "it is a block device"),
        (options.offset != 0 || options.size_limit.is_some(), "only a part of it is served"),
        (options.shared, "others may write to it"),
    ];
    reasons.into_iter().find(|(is, _)| *is).map(|(_, why)| why)
}

/// The image whose bitmaps they are.
pub(super) struct Image<'a> {
    pub shared: &'a Shared,
    pub path: &'a Path,
    pub bitmaps: &'a Result<Mutex<Option<BitmapFile>>, &'static str>,
}

impl Image<'_> {
    fn stamp(&self) -> Result<Stamp, Error> {
        let state = locked(&self.shared.state);
        Stamp::of(&state.file, state.size)
            .map_err(|e| Error::system(format!("cannot read {}", self.path.display()), e))
    }

    fn is_writable(&self) -> bool {
        locked(&self.shared.state).writable
    }

    /// Loads the bitmaps that are kept beside the image, and marks them as in use there if it is open for writing.
    /// Returns warnings, too.
    ///
    /// # Errors
    /// Those of the files. A damaged one is none: there are no bitmaps then, and a warning.
    pub fn load_bitmaps(&self) -> Result<(Vec<Bitmap>, Vec<String>), Error> {
        let Ok(place) = self.bitmaps else { return Ok((Vec::new(), Vec::new())) };
        let place = locked(place);
        let Some(file) = &*place else { return Ok((Vec::new(), Vec::new())) };
        let stamp = self.stamp()?;
        let (bitmaps, mut warnings) = match file.load(stamp) {
            Ok(bitmaps) => (bitmaps, Vec::new()),
            Err(error) if error.kind() == ErrorKind::Format => {
                (Vec::new(), vec![format!("the dirty bitmaps are lost: {error}")])
            }
            Err(error) => return Err(error),
        };
        for bitmap in bitmaps.iter().filter(|bitmap| bitmap.state() == BitmapState::Inconsistent) {
            warnings.push(format!(
                "the bitmap {} of {} is inconsistent: it was not closed, or the image was written to since; remove \
                 it, and make a full backup",
                bitmap.name(),
                self.path.display()
            ));
        }
        if self.is_writable() {
            file.mark(&bitmaps, stamp)?;
        }
        Ok((bitmaps, warnings))
    }

    /// Checks whether there is a place for bitmaps.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the image can have none, [`ErrorKind::NotFound`] if there is no file for them.
    pub fn check_bitmaps(&self) -> Result<(), Error> {
        let refused = |kind, why: &str| {
            Err(Error::new(kind, format!("{} has no place for bitmaps: {why}", self.path.display())))
        };
        match self.bitmaps {
            Err(why) => refused(ErrorKind::Unsupported, why),
            Ok(_) if !self.is_writable() => refused(ErrorKind::Unsupported, "it is read-only"),
            Ok(place) if locked(place).is_none() => refused(ErrorKind::NotFound, "there is no file for them"),
            Ok(_) => Ok(()),
        }
    }

    /// Has the bitmaps kept in `file`, which is new, unless there is one.
    ///
    /// # Errors
    /// As [`Image::check_bitmaps`], and if the file is not a new one.
    pub fn set_bitmap_file(&self, file: File) -> Result<(), Error> {
        match (self.check_bitmaps(), self.bitmaps) {
            (Err(error), Ok(place)) if error.kind() == ErrorKind::NotFound => {
                let file = BitmapFile::new(file, self.path)?;
                file.mark(&[], self.stamp()?)?;
                *locked(place) = Some(file);
                Ok(())
            }
            (checked, _) => checked,
        }
    }

    /// Writes the bitmaps beside the image, durably. Nothing is written to the image meanwhile, nor afterwards.
    ///
    /// # Errors
    /// That of the file; the bitmaps that it has stay marked as in use then.
    pub fn store_bitmaps(&self, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
        let Ok(place) = self.bitmaps else { return Ok(()) };
        match &*locked(place) {
            Some(file) if self.is_writable() => file.store(bitmaps, self.stamp()?),
            _ => Ok(()),
        }
    }
}

//! Loads and saves the persistent dirty bitmaps of a raw image.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use blkq::bitmap::{Bitmap, BitmapState};
use blkq::sync::{Mutex, lock as locked};
use blkq::{Error, ErrorKind};

use crate::image_file::ImageFile;

use super::bitmap_file::BitmapFile;
use super::fingerprint::ImageFingerprint;
use super::options::LoopOptions;
use super::shared::Shared;

/// Where the bitmaps of an image are stored: the bitmap file, `None` if it does not exist yet, or the reason why this
/// image cannot have one.
pub(super) type Place = Result<Mutex<Option<Box<BitmapFile>>>, &'static str>;

const BLOCK_DEVICE: &str = "it is a block device";

/// Opens the bitmap file of an image. If it cannot be used, it is left unchanged, and a warning is returned.
pub(super) fn open(options: &LoopOptions, image: &ImageFile) -> (Place, Option<String>) {
    let reasons = [
        (image.block_device, BLOCK_DEVICE),
        (options.offset != 0 || options.size_limit.is_some(), "the device serves only a part of it"),
        (options.shared, "it is shared, and other processes may write to it"),
    ];
    if let Some((_, why)) = reasons.into_iter().find(|(is, _)| *is) {
        return (Err(why), None);
    }
    match BitmapFile::open(&image.path, options.read_only) {
        Ok(file) => (Ok(Mutex::new(file.map(Box::new))), None),
        Err(error) => (Ok(Mutex::new(None)), Some(format!("no dirty bitmaps are loaded: {error}"))),
    }
}

/// Takes `file`, the open bitmap file of an image that a device of `size` bytes will write to, and marks its bitmaps as
/// in use. If the file cannot be used, it is left unchanged, and a warning is returned.
///
/// # Errors
/// Returns the I/O error of the bitmap file.
pub(super) fn take(
    file: Option<File>,
    image: &ImageFile,
    size: u64,
) -> Result<(Place, Option<String>), Error> {
    if image.block_device {
        return Ok((Err(BLOCK_DEVICE), None));
    }
    let Some(file) = file else { return Ok((Ok(Mutex::new(None)), None)) };
    let fingerprint = ImageFingerprint::of(image, size)
        .map_err(|e| Error::system(format!("cannot read {}", image.path.display()), e))?;
    let loaded = BitmapFile::of_image(file, &image.path);
    match loaded.and_then(|mut file| file.load(fingerprint).map(|bitmaps| (file, bitmaps))) {
        Ok((mut file, bitmaps)) => {
            file.mark(&bitmaps.iter().collect::<Vec<_>>(), fingerprint)?;
            Ok((Ok(Mutex::new(Some(Box::new(file)))), None))
        }
        Err(error) => Ok((Ok(Mutex::new(None)), Some(format!("no dirty bitmaps are loaded: {error}")))),
    }
}

/// An image and its bitmap file.
pub(super) struct Image<'a> {
    pub shared: &'a Shared,
    pub path: &'a Path,
    pub bitmaps: &'a Place,
}

impl Image<'_> {
    fn fingerprint(&self) -> Result<ImageFingerprint, Error> {
        let state = locked(&self.shared.state);
        ImageFingerprint::of(&state.file, state.size)
            .map_err(|e| Error::system(format!("cannot read {}", self.path.display()), e))
    }

    /// The fingerprint after the last write to the image. The image is durable when it is taken, so the fingerprint stays
    /// valid after a power loss, and a later write by another program changes it.
    fn final_fingerprint(&self) -> Result<ImageFingerprint, Error> {
        let image = locked(&self.shared.state).file.clone();
        image.sync_all().map_err(|e| Error::system(format!("cannot flush {}", self.path.display()), e))?;
        let fingerprint = self.fingerprint()?;
        fingerprint.wait_until_older();
        Ok(fingerprint)
    }

    fn is_writable(&self) -> bool {
        locked(&self.shared.state).writable
    }

    /// Loads the saved bitmaps, and marks them as in use in their file if the image is open for writing. Also returns
    /// warnings. A damaged file is left unchanged; it leads to a warning, and no bitmaps.
    ///
    /// # Errors
    /// Returns the I/O errors of the image and of the bitmap file.
    pub fn load_bitmaps(&self) -> Result<(Vec<Bitmap>, Vec<String>), Error> {
        let Ok(place) = self.bitmaps else { return Ok((Vec::new(), Vec::new())) };
        let mut place = locked(place);
        let Some(file) = &mut *place else { return Ok((Vec::new(), Vec::new())) };
        let fingerprint = self.fingerprint()?;
        let (bitmaps, mut warnings) = match file.load(fingerprint) {
            Ok(bitmaps) => (bitmaps, Vec::new()),
            Err(error) => {
                *place = None;
                return Ok((Vec::new(), vec![format!("the dirty bitmaps are lost: {error}")]));
            }
        };
        for bitmap in bitmaps.iter().filter(|bitmap| bitmap.state() == BitmapState::Inconsistent) {
            warnings.push(format!(
                "the bitmap {} of {} is inconsistent: it was not closed, or another program has written to the \
                 image; remove the bitmap and make a full backup",
                bitmap.name(),
                self.path.display()
            ));
        }
        if self.is_writable() {
            let all: Vec<&Bitmap> = bitmaps.iter().collect();
            file.mark(&all, fingerprint)?;
            let reserved = file.reserve(&all, fingerprint);
            warnings
                .extend(reserved.err().map(|error| format!("the dirty bitmaps may not be saved: {error}")));
        } else if bitmaps.is_empty() {
            // Releases the file, so that `check_reopen` allows the image to be opened for writing later.
            *place = None;
        }
        Ok((bitmaps, warnings))
    }

    /// Checks whether an image that was opened read-only may become writable. Its bitmaps were not marked as in use when
    /// they were loaded, so it must not have any.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the image has bitmaps.
    pub fn check_reopen(&self) -> Result<(), Error> {
        if !self.is_writable() && self.bitmaps.as_ref().is_ok_and(|place| locked(place).is_some()) {
            let message = format!(
                "{} has dirty bitmaps and was opened read-only; close it and open it for writing",
                self.path.display()
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        Ok(())
    }

    /// Records in the bitmap file that exactly `bitmaps` exist and are in use, and reserves space for their bits.
    ///
    /// # Errors
    /// Returns the I/O error of the bitmap file, whose content stays.
    pub fn reserve_bitmaps(&self, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
        let Ok(place) = self.bitmaps else { return Ok(()) };
        let all: Vec<&Bitmap> = bitmaps.iter().map(|bitmap| &**bitmap).collect();
        if let Some(file) = locked(place).as_mut().filter(|_| self.is_writable()) {
            let fingerprint = self.fingerprint()?;
            file.reserve(&all, fingerprint)?;
            file.mark(&all, fingerprint)?;
        }
        Ok(())
    }

    /// Checks whether bitmaps can be saved.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the image cannot have persistent bitmaps, [`ErrorKind::NotFound`] if it has no
    /// bitmap file, or the file was removed.
    pub fn check_bitmaps(&self) -> Result<(), Error> {
        let refused = |kind, why: &str| {
            Err(Error::new(kind, format!("{} cannot store dirty bitmaps: {why}", self.path.display())))
        };
        match self.bitmaps {
            Err(why) => refused(ErrorKind::Unsupported, why),
            Ok(_) if !self.is_writable() => refused(ErrorKind::Unsupported, "it is read-only"),
            Ok(place) => match &*locked(place) {
                None => refused(ErrorKind::NotFound, "it has no bitmap file"),
                Some(file) if !file.is_linked()? => {
                    refused(ErrorKind::NotFound, "its bitmap file was removed")
                }
                Some(_) => Ok(()),
            },
        }
    }

    /// Uses the new `file` for the bitmaps. If the image already has a bitmap file, `file` must be that one.
    ///
    /// # Errors
    /// The errors of [`Image::check_bitmaps`], and [`ErrorKind::Invalid`] if `file` is neither new nor the present
    /// bitmap file.
    pub fn set_bitmap_file(&self, file: File) -> Result<(), Error> {
        match (self.check_bitmaps(), self.bitmaps) {
            (Err(error), Ok(place)) if error.kind() == ErrorKind::NotFound => {
                *locked(place) = Some(Box::new(BitmapFile::new(file, self.path)?));
                Ok(())
            }
            (Ok(()), Ok(place)) => locked(place).as_ref().map_or(Ok(()), |own| own.check_same(&file)),
            (checked, _) => checked,
        }
    }

    /// Saves the bitmaps durably. The image must not be written to during this call or afterwards.
    ///
    /// # Errors
    /// Returns the I/O error of the image or of the bitmap file, in which the bitmaps stay marked as in use.
    pub fn store_bitmaps(&self, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
        let Ok(place) = self.bitmaps else { return Ok(()) };
        let mut place = locked(place);
        if let Some(file) = place.as_mut().filter(|_| self.is_writable()) {
            let all: Vec<&Bitmap> = bitmaps.iter().map(|bitmap| &**bitmap).collect();
            let fingerprint =
                if bitmaps.is_empty() { self.fingerprint()? } else { self.final_fingerprint()? };
            file.store(&all, fingerprint)?;
            // Releases the lock, so that other processes can read the file.
            *place = None;
        }
        Ok(())
    }
}

//! Keeping the dirty bitmaps of a raw image beside it.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use blkq::bitmap::{Bitmap, BitmapState};
use blkq::sync::{Mutex, lock as locked};
use blkq::{Error, ErrorKind};

use super::backing::Backing;
use super::bitmap_file::BitmapFile;
use super::fingerprint::ImageFingerprint;
use super::options::LoopOptions;
use super::shared::Shared;

/// Where the bitmaps of an image are kept: the file that has them, if there is one, or why they cannot be kept.
pub(super) type Place = Result<Mutex<Option<Box<BitmapFile>>>, &'static str>;

const BLOCK_DEVICE: &str = "it is a block device";

/// Opens the file with the bitmaps of an image. One that cannot be used has none, and is left as it is: a warning.
pub(super) fn open(options: &LoopOptions, backing: &Backing) -> (Place, Option<String>) {
    let reasons = [
        (backing.block_device, BLOCK_DEVICE),
        (options.offset != 0 || options.size_limit.is_some(), "the device serves only a part of it"),
        (options.shared, "it is shared, and other processes may write to it"),
    ];
    if let Some((_, why)) = reasons.into_iter().find(|(is, _)| *is) {
        return (Err(why), None);
    }
    match BitmapFile::open(&backing.path, options.read_only) {
        Ok(file) => (Ok(Mutex::new(file.map(Box::new))), None),
        Err(error) => (Ok(Mutex::new(None)), Some(format!("no dirty bitmaps are loaded: {error}"))),
    }
}

/// Takes `file`, which may have bitmaps of an image with a device of `size` bytes, and marks these as in use: the
/// image is about to be written to. One that cannot be used is left as it is: a warning.
///
/// # Errors
/// That of writing to it.
pub(super) fn take(
    file: Option<File>,
    backing: &Backing,
    size: u64,
) -> Result<(Place, Option<String>), Error> {
    if backing.block_device {
        return Ok((Err(BLOCK_DEVICE), None));
    }
    let Some(file) = file else { return Ok((Ok(Mutex::new(None)), None)) };
    let fingerprint = ImageFingerprint::of(&backing.file, size)
        .map_err(|e| Error::system(format!("cannot read {}", backing.path.display()), e))?;
    let loaded = BitmapFile::of_image(file, &backing.path);
    match loaded.and_then(|mut file| file.load(fingerprint).map(|bitmaps| (file, bitmaps))) {
        Ok((mut file, bitmaps)) => {
            file.mark(&bitmaps.iter().collect::<Vec<_>>(), fingerprint)?;
            Ok((Ok(Mutex::new(Some(Box::new(file)))), None))
        }
        Err(error) => Ok((Ok(Mutex::new(None)), Some(format!("no dirty bitmaps are loaded: {error}")))),
    }
}

/// The image whose bitmaps they are.
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

    /// The fingerprint of an image that was written to for the last time: it outlives a power loss, and no write by others
    /// gives the image the same.
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

    /// Loads the bitmaps that are kept beside the image, and marks them as in use there if it is open for writing.
    /// Returns warnings, too.
    ///
    /// # Errors
    /// Those of the files. A damaged one is none: there are no bitmaps then, and a warning, and it stays as it is.
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
            // The image may get others once it is open for writing.
            *place = None;
        }
        Ok((bitmaps, warnings))
    }

    /// Checks whether the image may be opened for writing now, if it is not: its bitmaps would not be marked as in use.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if it has some.
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

    /// Has the file name `bitmaps`, and no others, as in use, with room for their bits.
    ///
    /// # Errors
    /// That of the file, which has those that it had then.
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

    /// Checks whether there is a place for bitmaps.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the image can have none, [`ErrorKind::NotFound`] if there is no file for them.
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

    /// Has the bitmaps kept in `file`, which is new, unless there is one that was not removed.
    ///
    /// # Errors
    /// As [`Image::check_bitmaps`], and if the file is not a new one.
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

    /// Writes the bitmaps beside the image, durably. Nothing is written to the image meanwhile, nor afterwards.
    ///
    /// # Errors
    /// That of the file; the bitmaps that it has stay marked as in use then.
    pub fn store_bitmaps(&self, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
        let Ok(place) = self.bitmaps else { return Ok(()) };
        let mut place = locked(place);
        if let Some(file) = place.as_mut().filter(|_| self.is_writable()) {
            let all: Vec<&Bitmap> = bitmaps.iter().map(|bitmap| &**bitmap).collect();
            let fingerprint =
                if bitmaps.is_empty() { self.fingerprint()? } else { self.final_fingerprint()? };
            file.store(&all, fingerprint)?;
            // Others may read it from now on.
            *place = None;
        }
        Ok(())
    }
}

//! Loads and saves the persistent dirty bitmaps of a raw image.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkq::bitmap::Bitmap;
use blkq::sync::{Mutex, MutexGuard, lock as locked};
use blkq::{Error, ErrorKind};

use crate::bitmaps::{BitmapFormat, Loaded};
use crate::errors::unsupported;
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

/// Takes `file`, the open bitmap file of an image that a device of `size` bytes will write to, and marks its
/// bitmaps as in use. If the file cannot be used, it is left unchanged, and a warning is returned.
pub(super) fn take(
    file: Option<File>,
    image: &ImageFile,
    size: u64,
) -> Result<(Place, Option<String>), Error> {
    if image.block_device {
        return Ok((Err(BLOCK_DEVICE), None));
    }
    let Some(file) = file else { return Ok((Ok(Mutex::new(None)), None)) };
    let fingerprint = ImageFingerprint::of(image, size)?;
    let loaded = BitmapFile::of_image(file, &image.path);
    match loaded.and_then(|mut file| file.load(fingerprint).map(|bitmaps| (file, bitmaps))) {
        Ok((mut file, bitmaps)) => {
            file.mark(&bitmaps.iter().collect::<Vec<_>>(), fingerprint)?;
            Ok((Ok(Mutex::new(Some(Box::new(file)))), None))
        }
        Err(error) => Ok((Ok(Mutex::new(None)), Some(format!("no dirty bitmaps are loaded: {error}")))),
    }
}

pub(super) struct FileBitmaps {
    pub shared: Arc<Shared>,
    pub path: PathBuf,
    pub place: Place,
}

impl FileBitmaps {
    fn fingerprint(&self) -> Result<ImageFingerprint, Error> {
        let state = locked(&self.shared.state);
        ImageFingerprint::of(&state.file, state.size)
    }

    /// The fingerprint after the last write to the image. The image is durable when it is taken, so the fingerprint stays
    /// valid after a power loss, and a later write by another program changes it.
    fn final_fingerprint(&self) -> Result<ImageFingerprint, Error> {
        let image = locked(&self.shared.state).file.clone();
        image.sync_all().map_err(|e| image.failed("flush", e))?;
        let fingerprint = self.fingerprint()?;
        fingerprint.wait_until_older();
        Ok(fingerprint)
    }

    fn file(&self) -> Option<MutexGuard<'_, Option<Box<BitmapFile>>>> {
        self.place.as_ref().ok().map(locked)
    }

    /// Fails with [`ErrorKind::Unsupported`] if an image that was opened read-only has bitmaps: they were not
    /// marked as in use when they were loaded, so it must not become writable.
    pub fn check_reopen(&self) -> Result<(), Error> {
        if !self.is_writable() && self.file().is_some_and(|file| file.is_some()) {
            return Err(unsupported(format!(
                "{} has dirty bitmaps and was opened read-only; close it and open it for writing",
                self.path.display()
            )));
        }
        Ok(())
    }
}

impl BitmapFormat for FileBitmaps {
    type Place = ImageFingerprint;

    const INCONSISTENT: &'static str = "the image was not closed, or another program has written to it";

    fn path(&self) -> &Path {
        &self.path
    }

    fn is_writable(&self) -> bool {
        locked(&self.shared.state).writable
    }

    fn unsupported(&self) -> Option<&str> {
        self.place.as_ref().err().copied()
    }

    fn read(&self) -> Result<Loaded<ImageFingerprint>, Error> {
        let is_writable = self.is_writable();
        let Some(mut place) = self.file() else { return Ok(Loaded::nothing(None)) };
        let Some(file) = &mut *place else { return Ok(Loaded::nothing(None)) };
        let fingerprint = self.fingerprint()?;
        match file.load(fingerprint) {
            Ok(bitmaps) => {
                if !is_writable && bitmaps.is_empty() {
                    // Releases the file, so that `check_reopen` allows the image to be opened for writing later.
                    *place = None;
                }
                Ok(Loaded { bitmaps, warnings: Vec::new(), place: Some(fingerprint) })
            }
            // A damaged file is left unchanged.
            Err(error) => {
                *place = None;
                Ok(Loaded::nothing(Some(format!("the dirty bitmaps are lost: {error}"))))
            }
        }
    }

    fn mark(&self, fingerprint: ImageFingerprint, bitmaps: &[&Bitmap]) -> Result<Option<Error>, Error> {
        let Some(mut place) = self.file() else { return Ok(None) };
        let Some(file) = &mut *place else { return Ok(None) };
        file.mark(bitmaps, fingerprint)?;
        Ok(file.reserve(bitmaps, fingerprint).err())
    }

    fn check(&self) -> Result<(), Error> {
        let missing = |why| Err(Error::new(ErrorKind::NotFound, why));
        match self.file().as_deref() {
            Some(Some(file)) if file.is_linked()? => Ok(()),
            Some(Some(_)) => missing("its bitmap file was removed"),
            _ => missing("it has no bitmap file"),
        }
    }

    /// Uses the new `file`. If the image already has a bitmap file, `file` must be that one.
    fn set_file(&self, file: File, checked: Result<(), Error>) -> Result<(), Error> {
        match (checked, self.file()) {
            (Err(error), Some(mut place)) if error.kind() == ErrorKind::NotFound => {
                *place = Some(Box::new(BitmapFile::new(file, &self.path)?));
                Ok(())
            }
            (Ok(()), Some(place)) => place.as_ref().map_or(Ok(()), |own| own.check_same(&file)),
            (checked, _) => checked,
        }
    }

    fn reserve(&self, bitmaps: &[&Bitmap]) -> Result<(), Error> {
        let Some(mut place) = self.file() else { return Ok(()) };
        let Some(file) = &mut *place else { return Ok(()) };
        let fingerprint = self.fingerprint()?;
        file.reserve(bitmaps, fingerprint)?;
        file.mark(bitmaps, fingerprint)
    }

    fn write(&self, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
        let Some(mut place) = self.file() else { return Ok(()) };
        let Some(file) = &mut *place else { return Ok(()) };
        let all: Vec<&Bitmap> = bitmaps.iter().map(|bitmap| &**bitmap).collect();
        let fingerprint = if bitmaps.is_empty() { self.fingerprint()? } else { self.final_fingerprint()? };
        file.store(&all, fingerprint)?;
        // Releases the lock, so that other processes can read the file.
        *place = None;
        Ok(())
    }
}

//! Loads and saves the persistent dirty bitmaps of a raw image.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use blkq::bitmap::Bitmap;
use blkq::sync::{Mutex, lock as locked};
use blkq::{Error, ErrorKind};

use crate::bitmaps::{BitmapFormat, Loaded};
use crate::errors::unsupported;
use crate::image_file::ImageFile;

use super::bitmap_file::BitmapFile;
use super::fingerprint::ImageFingerprint;
use super::options::LoopOptions;
use super::shared::Shared;

const BLOCK_DEVICE: &str = "it is a block device";

/// Where the bitmaps of an image are stored.
pub(super) struct Place {
    /// `None` if the bitmap file does not exist yet, or cannot be used.
    file: Mutex<Option<BitmapFile>>,
    /// Why the image cannot have a bitmap file.
    unsupported: Option<&'static str>,
}

impl Place {
    fn unsupported(why: &'static str) -> (Place, Option<String>) {
        (Place { file: Mutex::new(None), unsupported: Some(why) }, None)
    }

    /// If the bitmap file cannot be used, also returns a warning.
    fn of(opened: Result<Option<BitmapFile>, Error>) -> (Place, Option<String>) {
        let (file, warning) = match opened {
            Ok(file) => (file, None),
            Err(error) => (None, Some(format!("no dirty bitmaps are loaded: {error}"))),
        };
        (Place { file: Mutex::new(file), unsupported: None }, warning)
    }
}

/// Opens the bitmap file of an image. If it cannot be used, it is left unchanged, and a warning is returned.
pub(super) fn open(options: &LoopOptions, image: &ImageFile) -> (Place, Option<String>) {
    let reasons = [
        (image.block_device, BLOCK_DEVICE),
        (options.offset != 0 || options.size_limit.is_some(), "the device serves only a part of it"),
        (options.shared, "it is shared, and other processes may write to it"),
    ];
    if let Some((_, why)) = reasons.into_iter().find(|(is, _)| *is) {
        return Place::unsupported(why);
    }
    Place::of(BitmapFile::open(&image.path, options.read_only))
}

/// Takes `file`, the open bitmap file of an image that a device of `size` bytes will write to, and marks its
/// bitmaps as in use. If the file cannot be used, it is left unchanged, and a warning is returned.
pub(super) fn take(
    file: Option<File>,
    image: &ImageFile,
    size: u64,
) -> Result<(Place, Option<String>), Error> {
    if image.block_device {
        return Ok(Place::unsupported(BLOCK_DEVICE));
    }
    let Some(file) = file else { return Ok(Place::of(Ok(None))) };
    let fingerprint = ImageFingerprint::of(image, size)?;
    let loaded = BitmapFile::of_image(file, &image.path);
    match loaded.and_then(|mut file| file.load(fingerprint).map(|bitmaps| (file, bitmaps))) {
        Ok((mut file, bitmaps)) => {
            file.mark(&bitmaps.iter().collect::<Vec<_>>(), fingerprint)?;
            Ok(Place::of(Ok(Some(file))))
        }
        Err(error) => Ok(Place::of(Err(error))),
    }
}

pub(super) struct FileBitmaps {
    pub shared: Arc<Shared>,
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

    /// Fails with [`ErrorKind::Unsupported`] if an image that was opened read-only has bitmaps: they were not
    /// marked as in use when they were loaded, so it must not become writable.
    pub fn check_reopen(&self) -> Result<(), Error> {
        if !self.is_writable() && locked(&self.place.file).is_some() {
            return Err(unsupported(format!(
                "{} has dirty bitmaps and was opened read-only; close it and open it for writing",
                self.path().display()
            )));
        }
        Ok(())
    }
}

impl BitmapFormat for FileBitmaps {
    type Place = ImageFingerprint;

    const INCONSISTENT: &'static str = "the image was not closed, or another program has written to it";

    fn path(&self) -> &Path {
        &self.shared.window.path
    }

    fn is_writable(&self) -> bool {
        locked(&self.shared.state).writable
    }

    fn unsupported(&self) -> Option<&str> {
        self.place.unsupported
    }

    fn read(&self) -> Result<Loaded<ImageFingerprint>, Error> {
        let is_writable = self.is_writable();
        let mut place = locked(&self.place.file);
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
        let mut place = locked(&self.place.file);
        let Some(file) = &mut *place else { return Ok(None) };
        file.mark(bitmaps, fingerprint)?;
        Ok(file.reserve(bitmaps, fingerprint).err())
    }

    fn check(&self) -> Result<(), Error> {
        let missing = |why| Err(Error::new(ErrorKind::NotFound, why));
        match &*locked(&self.place.file) {
            Some(file) if file.is_linked()? => Ok(()),
            Some(_) => missing("its bitmap file was removed"),
            None => missing("it has no bitmap file"),
        }
    }

    /// Uses the new `file`. If the image already has a bitmap file, `file` must be that one.
    fn set_file(&self, file: File, checked: Result<(), Error>) -> Result<(), Error> {
        let mut place = locked(&self.place.file);
        match checked {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                *place = Some(BitmapFile::new(file, self.path())?);
                Ok(())
            }
            Ok(()) => place.as_ref().map_or(Ok(()), |own| own.check_same(&file)),
            Err(error) => Err(error),
        }
    }

    fn reserve(&self, bitmaps: &[&Bitmap]) -> Result<(), Error> {
        let mut place = locked(&self.place.file);
        let Some(file) = &mut *place else { return Ok(()) };
        let fingerprint = self.fingerprint()?;
        file.reserve(bitmaps, fingerprint)?;
        file.mark(bitmaps, fingerprint)
    }

    fn write(&self, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
        let mut place = locked(&self.place.file);
        let Some(file) = &mut *place else { return Ok(()) };
        let all: Vec<&Bitmap> = bitmaps.iter().map(|bitmap| &**bitmap).collect();
        let fingerprint = if bitmaps.is_empty() { self.fingerprint()? } else { self.final_fingerprint()? };
        file.store(&all, fingerprint)?;
        // Releases the lock, so that other processes can read the file.
        *place = None;
        Ok(())
    }
}

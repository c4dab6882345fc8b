//! Persistent dirty bitmaps: the rules that the formats share. The bitmaps of an image that is open for writing are
//! marked as in use when they are loaded, and their bits are written when the device is detached. If the daemon is killed
//! before that, they stay marked, so that no program trusts them. A format only encodes and decodes them.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use blkq::bitmap::{Bitmap, BitmapState, BitmapStore};
use blkq::{Error, ErrorKind};

/// The bitmaps that were read from an image.
pub(crate) struct Loaded<P> {
    pub bitmaps: Vec<Bitmap>,
    /// Messages about bitmaps that are lost or not kept up to date, one line each.
    pub warnings: Vec<String>,
    /// The place in which the format marks these bitmaps as in use; `None` if there is nothing to mark.
    pub place: Option<P>,
}

impl<P> Loaded<P> {
    pub fn nothing(warning: Option<String>) -> Loaded<P> {
        Loaded { bitmaps: Vec::new(), warnings: Vec::from_iter(warning), place: None }
    }
}

/// A format in which an image stores its bitmaps. Every method may block, and no queue may do I/O meanwhile.
pub(crate) trait BitmapFormat: Send + Sync {
    type Place;

    /// The reasons for which a bitmap in this format can be inconsistent.
    const INCONSISTENT: &'static str;

    /// The path of the image.
    fn path(&self) -> &Path;

    /// Whether the image is open for writing.
    fn is_writable(&self) -> bool;

    /// Why the image can never have persistent bitmaps.
    fn unsupported(&self) -> Option<&str> {
        None
    }

    /// Reads the bitmaps. If their place is damaged, returns a warning instead.
    ///
    /// # Errors
    /// The I/O error of a file.
    fn read(&self) -> Result<Loaded<Self::Place>, Error>;

    /// Marks the bitmaps that were read as in use, durably, and reserves space for their bits. Returns the error if no
    /// space could be reserved.
    ///
    /// # Errors
    /// The I/O error of a file.
    fn mark(&self, place: Self::Place, bitmaps: &[&Bitmap]) -> Result<Option<Error>, Error>;

    /// Checks whether bitmaps can be saved. The error has only the reason.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if a file is missing that [`BitmapFormat::set_file`] provides, else the reason.
    fn check(&self) -> Result<(), Error>;

    /// Uses `file` for the bitmaps, if the format needs one. `checked` is the result of [`BitmapStore::check`].
    ///
    /// # Errors
    /// The error of `checked`, or of the file.
    fn set_file(&self, _file: File, checked: Result<(), Error>) -> Result<(), Error> {
        checked
    }

    /// Makes the image name exactly `bitmaps`, in use and with space for their bits.
    ///
    /// # Errors
    /// The I/O error of a file. The image then keeps the bitmaps that it had.
    fn reserve(&self, bitmaps: &[&Bitmap]) -> Result<(), Error>;

    /// Writes the bits durably. Nothing may be written to the device afterwards.
    ///
    /// # Errors
    /// The I/O error of a file. The bitmaps in the image then stay marked as in use.
    fn write(&self, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error>;
}

/// The bitmaps of an image in the format `F`.
pub(crate) struct ImageBitmaps<F>(pub F);

impl<F: BitmapFormat> BitmapStore for ImageBitmaps<F> {
    fn load(&self) -> Result<(Vec<Bitmap>, Vec<String>), Error> {
        let Loaded { bitmaps, mut warnings, place } = self.0.read()?;
        for bitmap in bitmaps.iter().filter(|bitmap| bitmap.state() == BitmapState::Inconsistent) {
            warnings.push(format!(
                "the bitmap {} in {} is inconsistent: {}; remove the bitmap and make a full backup",
                bitmap.name(),
                self.0.path().display(),
                F::INCONSISTENT
            ));
        }
        if let Some(place) = place.filter(|_| self.0.is_writable()) {
            let unreserved = self.0.mark(place, &bitmaps.iter().collect::<Vec<_>>())?;
            warnings.extend(unreserved.map(|error| format!("the dirty bitmaps may not be saved: {error}")));
        }
        Ok((bitmaps, warnings))
    }

    fn check(&self) -> Result<(), Error> {
        let read_only = (!self.0.is_writable()).then_some("it is read-only");
        let checked = match self.0.unsupported().or(read_only) {
            Some(why) => Err(Error::new(ErrorKind::Unsupported, why)),
            None => self.0.check(),
        };
        checked.map_err(|error| {
            let message = format!("{} cannot store dirty bitmaps: {error}", self.0.path().display());
            Error::new(error.kind(), message)
        })
    }

    fn set_file(&self, file: File) -> Result<(), Error> {
        self.0.set_file(file, self.check())
    }

    fn reserve(&self, all: &[Arc<Bitmap>]) -> Result<(), Error> {
        if !self.0.is_writable() {
            return Ok(());
        }
        self.0.reserve(&all.iter().map(|bitmap| &**bitmap).collect::<Vec<_>>())
    }

    fn store(&self, all: &[Arc<Bitmap>]) -> Result<(), Error> {
        if !self.0.is_writable() {
            return Ok(());
        }
        self.0.write(all)
    }
}

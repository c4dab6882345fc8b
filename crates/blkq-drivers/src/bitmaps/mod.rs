//! Persistent dirty bitmaps: the rules that the formats share. The bitmaps of an image that is open for writing
//! are marked as in use when they are loaded, and their bits are written when the device is detached. If the
//! daemon is killed before that, they stay marked, so that no program trusts them. A format only encodes and
//! decodes them.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use blkq::bitmap::{Bitmap, BitmapState, BitmapStore};
use blkq::{Error, ErrorKind};

pub(crate) struct Loaded<P> {
    pub bitmaps: Vec<Bitmap>,
    pub warnings: Vec<String>,
    /// The place in which the format marks these bitmaps as in use; `None` if there is nothing to mark.
    pub place: Option<P>,
}

impl<P> Loaded<P> {
    pub fn nothing(warning: Option<String>) -> Loaded<P> {
        Loaded { bitmaps: Vec::new(), warnings: Vec::from_iter(warning), place: None }
    }
}

/// A format in which an image stores its bitmaps. Every method may block, and no queue may do I/O meanwhile,
/// except during [`BitmapFormat::check`].
pub(crate) trait BitmapFormat: Send + Sync {
    type Place;

    /// The reasons for which a bitmap in this format can be inconsistent.
    const INCONSISTENT: &'static str;

    fn path(&self) -> &Path;

    fn is_writable(&self) -> bool;

    /// Why the image can never have persistent bitmaps.
    fn unsupported(&self) -> Option<&str> {
        None
    }

    /// If the place of the bitmaps is damaged, returns a warning instead.
    fn read(&self) -> Result<Loaded<Self::Place>, Error>;

    /// Marks the bitmaps that were read as in use, durably, and reserves space for their bits. Returns the
    /// error if no space could be reserved.
    fn mark(&self, place: Self::Place, bitmaps: &[&Bitmap]) -> Result<Option<Error>, Error>;

    /// Checks whether bitmaps can be saved. Queues may do I/O meanwhile. The error has only the reason, without
    /// the path of the image; [`ErrorKind::NotFound`] means that a file is missing that
    /// [`BitmapFormat::set_file`] provides.
    fn check(&self) -> Result<(), Error>;

    /// Uses `file` for the bitmaps, if the format needs one. `checked` is the result of
    /// [`BitmapStore::check`].
    fn set_file(&self, _file: File, checked: Result<(), Error>) -> Result<(), Error> {
        checked
    }

    /// Makes the image name exactly `bitmaps`, in use and with space for their bits. After an error, the
    /// image keeps the bitmaps that it had.
    fn reserve(&self, bitmaps: &[&Bitmap]) -> Result<(), Error>;

    /// Writes the bits durably. Nothing may be written to the device afterwards. After an error, the bitmaps
    /// in the image stay marked as in use.
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
        if self.0.is_writable() { self.0.write(all) } else { Ok(()) }
    }
}

//! Keeping the dirty bitmaps of a disk with its image.

use std::fs::File;
use std::sync::Arc;

use crate::error::Error;

use super::Bitmap;

/// The place where a driver keeps bitmaps with its image. Only control threads call it, and no queue does I/O meanwhile.
pub trait BitmapStore: Send + Sync {
    /// Loads the bitmaps that are kept with the image, and marks them there as in use if it is to be written to. To be
    /// called before a queue is opened. Returns them, and warnings, each one line.
    ///
    /// # Errors
    /// Those of the files.
    fn load(&self) -> Result<(Vec<Bitmap>, Vec<String>), Error>;

    /// Checks whether bitmaps can be kept with the image.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported): why not;
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if they can, once it has a file for them
    /// ([`BitmapStore::set_file`]).
    fn check(&self) -> Result<(), Error>;

    /// Has the bitmaps of a raw image kept in `file`, which is new and open for reading and writing: the image's path
    /// with `.bitmaps` behind it, where they are found when it is opened next. One that has a file keeps that.
    ///
    /// # Errors
    /// As [`BitmapStore::check`], and if the file is not a new one.
    fn set_file(&self, file: File) -> Result<(), Error>;

    /// Has the image name `all`, and no others, as in use, durably, with room for their bits: if this process is killed
    /// they are inconsistent, and [`BitmapStore::store`] does not fail for a file system that is full. To be called
    /// whenever a bitmap is added, removed or gets another size, and with a driver that is to take the place of that
    /// which keeps them. Does nothing where [`BitmapStore::check`] fails.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if the image has a bitmap of such a name that is not
    /// known here; those of the files, such as one that has no room. The image names those that it named then.
    fn reserve(&self, all: &[Arc<Bitmap>]) -> Result<(), Error>;

    /// Keeps `all` with the image, in the place of those that it has. Nothing is written to the device meanwhile, nor
    /// afterwards.
    ///
    /// # Errors
    /// Those of the files; bitmaps that were loaded are marked as in use there still.
    fn store(&self, all: &[Arc<Bitmap>]) -> Result<(), Error>;
}

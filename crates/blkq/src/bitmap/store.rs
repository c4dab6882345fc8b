use std::fs::File;
use std::sync::Arc;

use crate::error::Error;

use super::Bitmap;

/// The storage of bitmaps in a driver's image. Only control threads call it. Queues do no I/O meanwhile,
/// except during [`BitmapStore::check`].
pub trait BitmapStore: Send + Sync {
    /// Loads the bitmaps that are stored with the image, and marks them in the image as in use if the image
    /// is writable. Must be called before a queue is opened. Returns the bitmaps, and warnings of one line
    /// each. Fails with the I/O errors of the files.
    fn load(&self) -> Result<(Vec<Bitmap>, Vec<String>), Error>;

    /// Checks whether bitmaps can be stored with the image.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) with the reason if they cannot;
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if they can, but only in a separate file that does
    /// not exist yet ([`BitmapStore::set_file`]).
    fn check(&self) -> Result<(), Error>;

    /// Stores the bitmaps of a raw image in `file`, a new file that is open for reading and writing. Its path
    /// must be that of the image with `.bitmaps` appended, where the bitmaps are searched when the image is
    /// opened next. Has no effect if the image already has such a file.
    ///
    /// # Errors
    /// The errors of [`BitmapStore::check`], or an error if the file is not new.
    fn set_file(&self, file: File) -> Result<(), Error>;

    /// Durably lists exactly the bitmaps `all` in the image as in use, with space for their bits. If this
    /// process is killed, they are inconsistent; and a full file system cannot make [`BitmapStore::store`]
    /// fail. Must be called whenever a bitmap is added, removed or resized, and for a driver that will
    /// replace the one that stores the bitmaps. Does nothing if [`BitmapStore::check`] fails.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if the image contains a bitmap of the same
    /// name that was not loaded; or the I/O error of the files, for example if there is no space. After an
    /// error the image lists the same bitmaps as before.
    fn reserve(&self, all: &[Arc<Bitmap>]) -> Result<(), Error>;

    /// Stores `all` with the image, and replaces the bitmaps that are stored there. The device must not be
    /// written during this call or later. After an I/O error, loaded bitmaps are still marked as in use.
    fn store(&self, all: &[Arc<Bitmap>]) -> Result<(), Error>;
}

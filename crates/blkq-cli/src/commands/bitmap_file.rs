//! The file with the dirty bitmaps of a raw image, which a confined daemon cannot open.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use super::attach::create::NewImage;
use crate::failure::{Failure, Outcome};

/// The file `IMAGE.bitmaps`. One that was made here is removed again unless it is kept.
pub(super) enum BitmapFile {
    Found(File),
    Made(NewImage),
}

impl BitmapFile {
    /// Opens that of `image`; `None` if there is none.
    ///
    /// # Errors
    /// That of opening it.
    pub(super) fn open(image: &Path) -> Outcome<Option<BitmapFile>> {
        let path = path_for(image);
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        match File::options().read(true).write(true).custom_flags(flags).open(&path) {
            Ok(file) => Ok(Some(BitmapFile::Found(file))),
            Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENAMETOOLONG) => {
                Ok(None)
            }
            Err(e) => Err(Failure::new(e.to_string()).during(path.display())),
        }
    }

    /// Opens that of `image`, and makes it if there is none.
    ///
    /// # Errors
    /// That of opening or making it.
    pub(super) fn open_or_make(image: &Path) -> Outcome<BitmapFile> {
        if let Some(file) = BitmapFile::open(image)? {
            return Ok(file);
        }
        let path = path_for(image);
        let made = NewImage::make(&path, "another made it just now; try again", |file| {
            own_as(file, image);
            Ok(())
        });
        made.map(BitmapFile::Made).map_err(|e| e.during(path.display()))
    }

    /// It, open for reading and writing.
    pub(super) fn file(&self) -> Option<&File> {
        match self {
            BitmapFile::Found(file) => Some(file),
            BitmapFile::Made(made) => made.file(),
        }
    }

    /// Lets it stay.
    pub(super) fn keep(self) {
        if let BitmapFile::Made(made) = self {
            made.keep();
        }
    }
}

fn path_for(image: &Path) -> PathBuf {
    let mut path = image.as_os_str().to_owned();
    path.push(".bitmaps");
    path.into()
}

/// Gives `file` to the owner of the image: the next daemon of the device may be another user's than this command.
/// One that may not do that has it as its own.
fn own_as(file: &File, image: &Path) {
    let _ = fs::metadata(image).and_then(|owner| fchown(file, Some(owner.uid()), Some(owner.gid())));
}

//! The file with the dirty bitmaps of a raw image. A confined daemon cannot open it itself.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use blkq_drivers::r#loop::is_bitmap_file;
use blkq_protocol::failure::{Failure, Outcome};

use super::attach::create::NewImage;

pub(super) enum BitmapFile {
    Found(File),
    /// Created by this command. Dropping removes the file, unless [`BitmapFile::keep`] was called.
    Created(NewImage),
}

impl BitmapFile {
    pub(super) fn open(image: &Path) -> Outcome<Option<BitmapFile>> {
        let path = path_for(image);
        // Another user may own the directory: a symbolic link could name any file, and opening a FIFO would
        // block.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        match File::options().read(true).write(true).custom_flags(flags).open(&path) {
            // The daemon gets the file for writing, so it must not be an image that has this name.
            Ok(file) => match is_bitmap_file(&file) {
                Ok(true) => Ok(Some(BitmapFile::Found(file))),
                Ok(false) => {
                    let shown = path.display();
                    Err(Failure::new(format!("{shown} is not a bitmap file; move it away or remove it")))
                }
                Err(e) => Err(Failure::new(format!("cannot read {}: {e}", path.display()))),
            },
            Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENAMETOOLONG) => {
                Ok(None)
            }
            Err(e) => Err(Failure::new(format!("cannot open {}: {e}", path.display()))),
        }
    }

    pub(super) fn open_or_create(image: &Path) -> Outcome<BitmapFile> {
        if let Some(file) = BitmapFile::open(image)? {
            return Ok(file);
        }
        let path = path_for(image);
        let created = NewImage::make(&path, "another command has just created the file; try again", |file| {
            give_to_owner(file, image);
            Ok(())
        });
        created.map(BitmapFile::Created).map_err(|e| e.during(path.display()))
    }

    pub(super) fn file(&self) -> &File {
        match self {
            BitmapFile::Found(file) => file,
            BitmapFile::Created(created) => created.file(),
        }
    }

    pub(super) fn keep(self) {
        if let BitmapFile::Created(created) = self {
            created.keep();
        }
    }
}

fn path_for(image: &Path) -> PathBuf {
    let mut path = image.as_os_str().to_owned();
    path.push(".bitmaps");
    path.into()
}

/// Gives `file` the owner of the image, because the next daemon of the device may run as another user than
/// this command. Without the privilege to do so, the owner does not change.
fn give_to_owner(file: &File, image: &Path) {
    let _ = fs::metadata(image).and_then(|owner| fchown(file, Some(owner.uid()), Some(owner.gid())));
}

//! The file with the dirty bitmaps of a raw image. A confined daemon cannot open it itself.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use blkq_drivers::r#loop::is_bitmap_file;
use blkq_protocol::failure::{Failure, Outcome};

use super::attach::create::FileGuard;

/// `None` if the image has no such file.
pub(super) fn open(image: &Path) -> Outcome<Option<FileGuard>> {
    let path = path_for(image);
    let failed = |what: &str, e: io::Error| Failure::new(format!("cannot {what} {}: {e}", path.display()));
    // Another user may own the directory: a symbolic link could name any file, and opening a FIFO would
    // block.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = match File::options().read(true).write(true).custom_flags(flags).open(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENAMETOOLONG) => {
            return Ok(None);
        }
        file => file.map_err(|e| failed("open", e))?,
    };
    // The daemon gets the file for writing, so it must not be an image that has this name.
    if !is_bitmap_file(&file).map_err(|e| failed("read", e))? {
        let shown = path.display();
        return Err(Failure::new(format!("{shown} is not a bitmap file; move it away or remove it")));
    }
    Ok(Some(FileGuard::existing(path, file)))
}

pub(super) fn open_or_create(image: &Path) -> Outcome<FileGuard> {
    if let Some(file) = open(image)? {
        return Ok(file);
    }
    let path = path_for(image);
    let exists = "another command has just created the file; try again";
    let created = FileGuard::create(&path, exists, |file| {
        // The next daemon of the device may run as another user than this command. Without the privilege to give the
        // file to the owner of the image, the owner does not change.
        let _ = fs::metadata(image).and_then(|owner| fchown(file, Some(owner.uid()), Some(owner.gid())));
        Ok(())
    });
    created.map_err(|e| e.during(path.display()))
}

fn path_for(image: &Path) -> PathBuf {
    let mut path = image.as_os_str().to_owned();
    path.push(".bitmaps");
    path.into()
}

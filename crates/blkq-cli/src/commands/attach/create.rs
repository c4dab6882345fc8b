//! `attach --create SIZE` and `attach --overlay FILE`: an image that was not there before.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;

use blkq::drivers::DriverSpec;
use blkq::units::format_bytes;

use crate::failure::{Failure, Outcome};
use crate::options::image_text;

/// The content of a disk is for its owner alone.
const MODE: u32 = 0o600;

/// An image that this command made, which is removed again unless it is kept.
#[derive(Debug)]
pub struct NewImage {
    path: PathBuf,
    /// `None`: it is kept.
    file: Option<File>,
}

impl NewImage {
    /// Makes a sparse image of `bytes`, which outlives a power loss from now on. Never replaces anything.
    ///
    /// # Errors
    /// If there is something of that name, the image is none in a file, or the file system has no room.
    pub fn create(image: &DriverSpec, bytes: u64) -> Outcome<NewImage> {
        let DriverSpec::Image(path) = image else {
            let text = image_text(image);
            return Err(Failure::new(format!("--create makes image files, and {text} is none; omit it")));
        };
        let there = "already exists and --create never overwrites; omit --create to attach it";
        let fill = |file: &File| {
            let failed = |e| Failure::new(format!("cannot create an image of {}: {e}", format_bytes(bytes)));
            file.set_len(bytes).map_err(failed)
        };
        NewImage::make(path, there, fill)
    }

    /// Makes the file at `path`, with what `fill` writes; durable, as is its name. Fails with `there` if there is
    /// something of that name. The failure does not name the path.
    ///
    /// # Errors
    /// If it cannot be made; it is removed again then.
    pub fn make(path: &Path, there: &str, fill: impl FnOnce(&File) -> Outcome) -> Outcome<NewImage> {
        let failure = |e: io::Error| Failure::new(format!("cannot create the file: {e}"));
        let opened = OpenOptions::new().read(true).write(true).create_new(true).mode(MODE).open(path);
        let file = opened.map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => Failure::new(there),
            _ => failure(e),
        })?;
        // From here on it is removed if anything fails.
        let image = NewImage { path: path.to_owned(), file: Some(file) };
        if let Some(file) = &image.file {
            fill(file)?;
            sync(file, directory_of(path)).map_err(failure)?;
        }
        Ok(image)
    }

    /// The file, until it is kept.
    pub fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Lets it stay.
    pub fn keep(mut self) {
        self.file = None;
    }
}

/// Makes a file and its name in `directory` durable: at once, as a journal of the file system writes both together.
fn sync(file: &File, directory: &Path) -> io::Result<()> {
    let sync_name = || File::open(directory)?.sync_all();
    thread::scope(|scope| {
        let name = thread::Builder::new().spawn_scoped(scope, sync_name);
        file.sync_all()?;
        match name {
            Ok(name) => name.join().unwrap_or_else(|_| Err(io::Error::other("cannot sync the directory"))),
            Err(_) => sync_name(),
        }
    })
}

/// The directory that a file is in.
pub fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

impl Drop for NewImage {
    fn drop(&mut self) {
        let Some(file) = &self.file else { return };
        let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        // A file that somebody else has put there since is not removed.
        if let (Ok(mine), Ok(there)) = (file.metadata(), fs::symlink_metadata(&self.path))
            && same(mine, there)
        {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::tests::scratch;

    #[test]
    fn a_new_image_is_sparse_private_and_removed_unless_kept() {
        let dir = scratch("create");
        let path = dir.file("new", ".img");
        let image = DriverSpec::Image(path.clone());
        let new = NewImage::create(&image, 1 << 30).unwrap();
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.len(), metadata.blocks(), metadata.mode() & 0o777), (1 << 30, 0, MODE));
        drop(new);
        assert!(!path.exists());
        NewImage::create(&image, 512).unwrap().keep();
        assert!(path.exists());
        let refused = NewImage::create(&image, 1024).unwrap_err().to_string();
        assert!(refused.contains("already exists"), "{refused}");
        assert_eq!(fs::metadata(&path).unwrap().len(), 512, "as it was");
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn nothing_is_created_through_a_link_or_without_room() {
        let dir = scratch("create-link");
        let link = dir.file("link", ".img");
        std::os::unix::fs::symlink(dir.file("target", ".img"), &link).unwrap();
        assert!(NewImage::create(&DriverSpec::Image(link), 512).is_err());
        assert!(!dir.file("target", ".img").exists());
        let path = dir.file("huge", ".img");
        assert!(NewImage::create(&DriverSpec::Image(path.clone()), u64::MAX).is_err());
        assert!(!path.exists());
        assert!(NewImage::create(&DriverSpec::Image("/dev/null".into()), 512).is_err());
        assert!(NewImage::create(&DriverSpec::Ram(512), 512).is_err());
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn an_image_that_was_replaced_meanwhile_stays() {
        let dir = scratch("create-replaced");
        let path = dir.file("new", ".img");
        let new = NewImage::create(&DriverSpec::Image(path.clone()), 512).unwrap();
        fs::rename(&path, dir.file("moved", ".img")).unwrap();
        fs::write(&path, "other").unwrap();
        drop(new);
        assert_eq!(fs::read(&path).unwrap(), b"other");
        fs::remove_dir_all(dir.path()).unwrap();
    }
}

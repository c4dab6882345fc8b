//! The file `IMAGE.bitmaps` beside a raw image, which stores its dirty bitmaps in the format of `bitmap_format`. A file
//! of that name with other content is never written to, because it may be an image.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use blkq::Error;
use blkq::bitmap::Bitmap;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use crate::errors::{invalid, malformed};
use crate::image_file::lock::{self, LockKind};

use super::bitmap_format::{
    FILE_MAX_BYTES, MAGIC, SlotNumber, Step, VERSION, file_bytes, mark_steps, parse, store_steps,
};
use super::fingerprint::ImageFingerprint;

pub(super) struct BitmapFile {
    file: File,
    path: PathBuf,
    slot: SlotNumber,
}

fn path_for(image: &Path) -> PathBuf {
    let mut path = image.as_os_str().to_owned();
    path.push(".bitmaps");
    path.into()
}

/// Whether `file` is a regular file that is empty or begins as a file with the dirty bitmaps of a raw image does.
///
/// # Errors
/// The I/O error of the file.
pub fn is_bitmap_file(file: &File) -> io::Result<bool> {
    if !file.metadata()?.is_file() {
        return Ok(false);
    }
    let mut magic = [0; MAGIC.len()];
    let bytes = file.read_at(&mut magic, 0)?;
    Ok(bytes == 0 || magic == *MAGIC)
}

impl BitmapFile {
    /// Opens and locks the bitmap file of `image`, if it exists. Fails with [`blkq::ErrorKind::Invalid`] if it is
    /// not a regular file, with [`blkq::ErrorKind::Format`] if it is not a bitmap file, and with
    /// [`blkq::ErrorKind::Busy`] if it is in use.
    pub fn open(image: &Path, read_only: bool) -> Result<Option<BitmapFile>, Error> {
        let path = path_for(image);
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
        match File::options().read(true).write(!read_only).custom_flags(flags).open(&path) {
            Ok(file) => BitmapFile::of_open(file, path, read_only)?.require_magic().map(Some),
            // A file whose name would be too long cannot exist.
            Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENAMETOOLONG) => {
                Ok(None)
            }
            Err(e) => Err(Error::system(format!("cannot open {}", path.display()), e)),
        }
    }

    /// Takes `file`, the bitmap file of `image`, which is open for reading and writing, and locks it. Errors
    /// are as for [`BitmapFile::open`].
    pub fn of_image(file: File, image: &Path) -> Result<BitmapFile, Error> {
        BitmapFile::of_open(file, path_for(image), false)?.require_magic()
    }

    /// Takes `file`, a new bitmap file of `image`, which is open, and locks it. Fails with
    /// [`blkq::ErrorKind::Invalid`] if it is not empty or not a regular file, and with [`blkq::ErrorKind::Busy`] if it is
    /// in use.
    pub fn new(file: File, image: &Path) -> Result<BitmapFile, Error> {
        let created = BitmapFile::of_open(file, path_for(image), false)?;
        if created.metadata()?.len() == 0 {
            return Ok(created);
        }
        let message = format!("{} is not empty and not a bitmap file of this image", created.path.display());
        Err(invalid(message).with_hint("remove it"))
    }

    fn of_open(file: File, path: PathBuf, read_only: bool) -> Result<BitmapFile, Error> {
        let opened = BitmapFile { file, path, slot: 0 };
        if !opened.metadata()?.is_file() {
            let message = format!("{} is not a regular file", opened.path.display());
            return Err(invalid(message).with_hint("remove it"));
        }
        // Locked as an image is, because the file may be an image that is in use.
        lock::acquire(&opened.file, &opened.path, &lock::WHOLE_FILE, LockKind::of(read_only, false), false)?;
        Ok(opened)
    }

    /// Rejects a file that is not empty and does not begin with the magic.
    fn require_magic(self) -> Result<BitmapFile, Error> {
        if is_bitmap_file(&self.file).map_err(|e| self.failed("read", e))? {
            return Ok(self);
        }
        Err(malformed(format!("{} is not a bitmap file; it is left unchanged", self.path.display())))
    }

    /// Loads the bitmaps. They are inconsistent if the image no longer has the `fingerprint` with which they
    /// were saved, or if they are still marked as in use. Fails with [`blkq::ErrorKind::Format`] if the file is
    /// damaged or has an unknown version.
    pub fn load(&mut self, fingerprint: ImageFingerprint) -> Result<Vec<Bitmap>, Error> {
        let bytes = self.metadata()?.len();
        if bytes == 0 {
            return Ok(Vec::new());
        }
        if bytes > FILE_MAX_BYTES {
            return Err(self.damaged());
        }
        let mut content = vec![0; bytes as usize];
        self.file.read_exact_at(&mut content, 0).map_err(|e| self.failed("read", e))?;
        let version = content.get(8..12).and_then(|version| version.first_chunk());
        if let Some(version) = version.map(|version| u32::from_le_bytes(*version)).filter(|v| *v != VERSION) {
            let message = format!("{} has the unknown format version {version}", self.path.display());
            return Err(malformed(message));
        }
        let (bitmaps, slot) = parse(&content, fingerprint).ok_or_else(|| self.damaged())?;
        self.slot = slot;
        Ok(bitmaps)
    }

    pub fn is_linked(&self) -> Result<bool, Error> {
        Ok(self.metadata()?.nlink() > 0)
    }

    /// Fails with [`blkq::ErrorKind::Invalid`] if `other` is another file.
    pub fn check_same(&self, other: &File) -> Result<(), Error> {
        let own = self.metadata()?;
        let other = other.metadata().map_err(|e| self.failed("read", e))?;
        if (own.dev(), own.ino()) == (other.dev(), other.ino()) {
            return Ok(());
        }
        let shown = self.path.display();
        let message = format!("{shown} is not the bitmap file that the device uses, which was moved");
        Err(invalid(message).with_hint("move that file back"))
    }

    /// Reserves space for `bitmaps`, so that they can be saved even if the file system is full by then. File
    /// systems without preallocation reserve nothing. After an error, the content of the file stays.
    pub fn reserve(&mut self, bitmaps: &[&Bitmap], fingerprint: ImageFingerprint) -> Result<(), Error> {
        if self.slot == 0 {
            // The magic is written before the file grows. Otherwise, if this process were killed here, the file
            // would contain only zeroes and be rejected as another file.
            self.mark(&[], fingerprint)?;
        }
        let bytes = file_bytes(bitmaps.iter().copied());
        match fallocate(&self.file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
            Err(e) => Err(self.failed("reserve space in", e.into())),
        }
    }

    /// Records durably that exactly `bitmaps` exist and are in use. Must precede the first write to the
    /// image.
    pub fn mark(&mut self, bitmaps: &[&Bitmap], fingerprint: ImageFingerprint) -> Result<(), Error> {
        self.run(mark_steps(bitmaps, fingerprint, self.slot))
    }

    /// Saves the bitmaps durably, with the `fingerprint` of the image. They must be marked as in use; after
    /// an error they stay so, and thus become inconsistent.
    pub fn store(&mut self, bitmaps: &[&Bitmap], fingerprint: ImageFingerprint) -> Result<(), Error> {
        if bitmaps.is_empty() {
            self.slot = 0;
            let emptied = self.file.set_len(0).and_then(|()| self.file.sync_data());
            return emptied.map_err(|e| self.failed("write", e));
        }
        self.reserve(bitmaps, fingerprint)?;
        self.run(store_steps(bitmaps, fingerprint, self.slot))
    }

    fn run(&mut self, steps: Vec<Step>) -> Result<(), Error> {
        for step in steps {
            let done = match step {
                Step::Write(at, bytes) => self.file.write_all_at(&bytes, at),
                Step::Sync => self.file.sync_data(),
            };
            done.map_err(|e| self.failed("write", e))?;
        }
        self.slot += 1;
        Ok(())
    }

    fn metadata(&self) -> Result<Metadata, Error> {
        self.file.metadata().map_err(|e| self.failed("read", e))
    }

    fn failed(&self, what: &str, e: io::Error) -> Error {
        Error::system(format!("cannot {what} {}", self.path.display()), e)
    }

    fn damaged(&self) -> Error {
        malformed(format!("{} is damaged", self.path.display()))
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;
    use blkq::bitmap::BitmapState;

    const FINGERPRINT: ImageFingerprint = ImageFingerprint { size: 1 << 20, modified: (7, 8), inode: 9 };

    #[test]
    fn a_kill_before_the_first_bitmap_is_marked_leaves_no_bitmaps() {
        let image = std::env::temp_dir().join(format!("blkq-bitmap-file-{}", std::process::id()));
        let path = path_for(&image);
        let mut file = BitmapFile::new(File::create_new(&path).unwrap(), &image).unwrap();
        let bitmap = Bitmap::new("b", 512, FINGERPRINT.size, BitmapState::Recording).unwrap();
        file.reserve(&[&bitmap], FINGERPRINT).unwrap();
        drop(file);
        let mut file = BitmapFile::open(&image, false).unwrap().unwrap();
        assert!(file.load(FINGERPRINT).unwrap().is_empty());
        file.mark(&[&bitmap], FINGERPRINT).unwrap();
        assert_eq!(file.load(FINGERPRINT).unwrap().len(), 1);
        std::fs::remove_file(path).unwrap();
    }
}

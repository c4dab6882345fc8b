//! The dirty bitmaps of a raw image, in a file beside it: `IMAGE.bitmaps`, of the format of `bitmap_format`. Another
//! file of that name is never written to: it may be anybody's image.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use blkq::bitmap::Bitmap;
use blkq::{Error, ErrorKind};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use super::bitmap_format::{
    FILE_MAX_BYTES, MAGIC, SlotNumber, Step, VERSION, file_bytes, mark_steps, parse, store_steps,
};
use super::fingerprint::ImageFingerprint;
use super::lock::{self, LockKind};

/// The file with the bitmaps of an image.
pub(super) struct BitmapFile {
    file: File,
    path: PathBuf,
    /// The slot of the file that counts.
    slot: SlotNumber,
}

/// The place of the file for `image`.
fn path_for(image: &Path) -> PathBuf {
    let mut path = image.as_os_str().to_owned();
    path.push(".bitmaps");
    path.into()
}

impl BitmapFile {
    /// Opens that of `image`, if there is one, and locks it.
    ///
    /// # Errors
    /// If it cannot be opened, is no regular file, is in use, or is no file of bitmaps.
    pub fn open(image: &Path, read_only: bool) -> Result<Option<BitmapFile>, Error> {
        let path = path_for(image);
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
        let opened = File::options().read(true).write(!read_only).custom_flags(flags).open(&path);
        match opened {
            Ok(file) => {
                let opened = BitmapFile::of_open(file, path, read_only)?;
                opened.check_magic().map(|()| Some(opened))
            }
            // Nor is there one of a name that is too long.
            Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENAMETOOLONG) => {
                Ok(None)
            }
            Err(e) => Err(Error::system(format!("cannot open {}", path.display()), e)),
        }
    }

    /// That of `image`, open for reading and writing, which it locks.
    ///
    /// # Errors
    /// As [`BitmapFile::open`].
    pub fn of_image(file: File, image: &Path) -> Result<BitmapFile, Error> {
        let opened = BitmapFile::of_open(file, path_for(image), false)?;
        opened.check_magic().map(|()| opened)
    }

    /// The new one of `image`, which is open and empty.
    ///
    /// # Errors
    /// If it is not, or is in use.
    pub fn new(file: File, image: &Path) -> Result<BitmapFile, Error> {
        let created = BitmapFile::of_open(file, path_for(image), false)?;
        match created.file.metadata() {
            Ok(metadata) if metadata.len() == 0 => Ok(created),
            Ok(_) => {
                let message =
                    format!("{} is not empty and not a bitmap file of this image", created.path.display());
                Err(Error::new(ErrorKind::Invalid, message).with_cure("remove it"))
            }
            Err(e) => Err(created.failed("read", e)),
        }
    }

    fn of_open(file: File, path: PathBuf, read_only: bool) -> Result<BitmapFile, Error> {
        let opened = BitmapFile { file, path, slot: 0 };
        let metadata = opened.file.metadata().map_err(|e| opened.failed("read", e))?;
        if !metadata.is_file() {
            let message = format!("{} is not a regular file", opened.path.display());
            return Err(Error::new(ErrorKind::Invalid, message).with_cure("remove it"));
        }
        // As an image: it may be one.
        lock::acquire(&opened.file, &opened.path, &lock::WHOLE_FILE, LockKind::of(read_only, false), false)?;
        Ok(opened)
    }

    /// Rejects a file that is not empty, and does not begin as one with bitmaps.
    fn check_magic(&self) -> Result<(), Error> {
        let mut magic = [0; MAGIC.len()];
        let bytes = self.file.read_at(&mut magic, 0).map_err(|e| self.failed("read", e))?;
        if bytes == 0 || magic == *MAGIC {
            return Ok(());
        }
        let message = format!("{} is not a bitmap file; it is left unchanged", self.path.display());
        Err(Error::new(ErrorKind::Format, message))
    }

    /// Loads the bitmaps of the image that is as `fingerprint` says. If it was written to since, or is open for writing as
    /// far as the file says, they are inconsistent.
    ///
    /// # Errors
    /// [`ErrorKind::Format`] if it is damaged; that of the file.
    pub fn load(&mut self, fingerprint: ImageFingerprint) -> Result<Vec<Bitmap>, Error> {
        let bytes = self.file.metadata().map_err(|e| self.failed("read", e))?.len();
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
            return Err(Error::new(ErrorKind::Format, message));
        }
        let (bitmaps, slot) = parse(&content, fingerprint).ok_or_else(|| self.damaged())?;
        self.slot = slot;
        Ok(bitmaps)
    }

    /// Whether it has a name still.
    ///
    /// # Errors
    /// That of the file.
    pub fn is_linked(&self) -> Result<bool, Error> {
        self.file.metadata().map(|metadata| metadata.nlink() > 0).map_err(|e| self.failed("read", e))
    }

    /// Rejects another file than this one.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if `other` is one.
    pub fn check_same(&self, other: &File) -> Result<(), Error> {
        let identity = |file: &File| file.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
        match (identity(&self.file), identity(other)) {
            (Ok(own), Ok(other)) if own == other => Ok(()),
            (Ok(_), Ok(_)) => {
                let message = format!(
                    "{} is not the bitmap file that the device uses, which was moved",
                    self.path.display()
                );
                Err(Error::new(ErrorKind::Invalid, message).with_cure("move that file back"))
            }
            (Err(e), _) | (_, Err(e)) => Err(self.failed("read", e)),
        }
    }

    /// Reserves the space for `bitmaps` of the image that is as `fingerprint` says, on file systems that can.
    ///
    /// # Errors
    /// That of the file, which has no room for them; the bitmaps in it stay.
    pub fn reserve(&mut self, bitmaps: &[&Bitmap], fingerprint: ImageFingerprint) -> Result<(), Error> {
        if self.slot == 0 {
            // If this process is killed, zeroes alone are no file with bitmaps.
            self.mark(&[], fingerprint)?;
        }
        let bytes = file_bytes(bitmaps.iter().copied());
        match fallocate(&self.file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
            Err(e) => Err(self.failed("reserve space in", e.into())),
        }
    }

    /// Names `bitmaps`, and no others, as in use, durably: the image is about to be written to.
    ///
    /// # Errors
    /// That of the file.
    pub fn mark(&mut self, bitmaps: &[&Bitmap], fingerprint: ImageFingerprint) -> Result<(), Error> {
        self.run(mark_steps(bitmaps, fingerprint, self.slot))
    }

    /// Writes the bitmaps of the image that is as `fingerprint` says, durably. They are marked as in use.
    ///
    /// # Errors
    /// That of the file; they stay marked then.
    pub fn store(&mut self, bitmaps: &[&Bitmap], fingerprint: ImageFingerprint) -> Result<(), Error> {
        if bitmaps.is_empty() {
            self.slot = 0;
            return self.file.set_len(0).and_then(|()| self.sync()).map_err(|e| self.failed("write", e));
        }
        self.reserve(bitmaps, fingerprint)?;
        self.run(store_steps(bitmaps, fingerprint, self.slot))
    }

    /// Writes the next slot.
    fn run(&mut self, steps: Vec<Step>) -> Result<(), Error> {
        for step in steps {
            let done = match step {
                Step::Write(at, bytes) => self.file.write_all_at(&bytes, at),
                Step::Sync => self.sync(),
            };
            done.map_err(|e| self.failed("write", e))?;
        }
        self.slot += 1;
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        // SAFETY: no memory is passed, and the file is open.
        match unsafe { libc::fdatasync(self.file.as_raw_fd()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn failed(&self, what: &str, e: io::Error) -> Error {
        Error::system(format!("cannot {what} {}", self.path.display()), e)
    }

    fn damaged(&self) -> Error {
        Error::new(ErrorKind::Format, format!("{} is damaged", self.path.display()))
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;
    use blkq::bitmap::BitmapState;

    const FINGERPRINT: ImageFingerprint = ImageFingerprint { size: 1 << 20, modified: (7, 8), inode: 9 };

    #[test]
    fn a_kill_before_the_first_bitmap_is_named_leaves_none() {
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

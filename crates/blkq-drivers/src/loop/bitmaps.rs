//! The persistent dirty bitmaps of a raw image, in the file `IMAGE.bitmaps` beside it. The format of that file is in
//! `bitmap_format`. A file of that name with other content is never written to, because it may be an image.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkq::bitmap::Bitmap;
use blkq::sync::{Mutex, lock as locked};
use blkq::{Error, ErrorKind};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use crate::bitmaps::{BitmapFormat, Loaded};
use crate::errors::{invalid, malformed, unsupported};
use crate::image_file::lock::{self, LockKind};
use crate::options::DriverOptions;

use super::bitmap_format::{self as format, ImageFingerprint, MAGIC, VERSION, Write};
use super::shared::Shared;

struct BitmapFile {
    file: File,
    path: PathBuf,
    /// The number of the current slot; 0: there is no slot yet.
    slot: u64,
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
    Ok(file.read_at(&mut magic, 0)? == 0 || magic == *MAGIC)
}

impl BitmapFile {
    /// Opens and locks the bitmap file of `image`, if it exists. Fails with [`ErrorKind::Invalid`] if it is not a
    /// regular file, with [`ErrorKind::Format`] if it is not a bitmap file, and with [`ErrorKind::Busy`] if it is in
    /// use.
    fn open(image: &Path, read_only: bool) -> Result<Option<BitmapFile>, Error> {
        let path = path_for(image);
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
        match File::options().read(true).write(!read_only).custom_flags(flags).open(&path) {
            Ok(file) => BitmapFile::of_image(file, image, read_only).map(Some),
            // A file whose name would be too long cannot exist.
            Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENAMETOOLONG) => {
                Ok(None)
            }
            Err(e) => Err(Error::system(format!("cannot open {}", path.display()), e)),
        }
    }

    /// Takes `file`, the open bitmap file of `image`, and locks it. Errors are as for [`BitmapFile::open`].
    fn of_image(file: File, image: &Path, read_only: bool) -> Result<BitmapFile, Error> {
        let opened = BitmapFile::lock(file, image, read_only)?;
        if is_bitmap_file(&opened.file).map_err(|e| opened.failed("read", e))? {
            return Ok(opened);
        }
        Err(malformed(format!("{} is not a bitmap file; it is left unchanged", opened.path.display())))
    }

    fn lock(file: File, image: &Path, read_only: bool) -> Result<BitmapFile, Error> {
        let opened = BitmapFile { file, path: path_for(image), slot: 0 };
        if !opened.metadata()?.is_file() {
            return Err(opened.unfit("is not a regular file", "remove it"));
        }
        // Locked as an image is, because the file may be an image that is in use.
        lock::acquire(&opened.file, &opened.path, &lock::WHOLE_FILE, LockKind::of(read_only, false))?;
        Ok(opened)
    }

    /// Loads the bitmaps. They are inconsistent if the image no longer has the `fingerprint` with which they
    /// were saved, or if they are still marked as in use. Fails with [`ErrorKind::Format`] if the file is
    /// damaged or has an unknown version.
    fn load(&mut self, fingerprint: ImageFingerprint) -> Result<Vec<Bitmap>, Error> {
        let path = self.path.display();
        let bytes = self.metadata()?.len();
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let mut content = Vec::new();
        if bytes <= format::FILE_MAX_BYTES {
            content.resize(bytes as usize, 0);
            self.file.read_exact_at(&mut content, 0).map_err(|e| self.failed("read", e))?;
        }
        let version = content.get(8..12).and_then(|version| version.first_chunk());
        if let Some(version) = version.map(|version| u32::from_le_bytes(*version)).filter(|v| *v != VERSION) {
            return Err(malformed(format!("{path} has the unknown format version {version}")));
        }
        let parsed = format::parse(&content, fingerprint);
        let (bitmaps, slot) = parsed.ok_or_else(|| malformed(format!("{path} is damaged")))?;
        self.slot = slot;
        Ok(bitmaps)
    }

    /// Reserves space for `bitmaps`, so that they can be saved even if the file system is full by then. File
    /// systems without preallocation reserve nothing. After an error, the content of the file stays.
    fn reserve(&mut self, bitmaps: &[&Bitmap], fingerprint: ImageFingerprint) -> Result<(), Error> {
        if self.slot == 0 {
            // The magic is written before the file grows. Otherwise, if this process were killed here, the file
            // would contain only zeroes and be rejected as another file.
            self.mark(&[], fingerprint)?;
        }
        match fallocate(&self.file, FallocateFlags::empty(), 0, format::file_bytes(bitmaps.iter().copied())) {
            Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
            Err(e) => Err(self.failed("reserve space in", e.into())),
        }
    }

    /// Records durably that exactly `bitmaps` exist and are in use. Must precede the first write to the
    /// image.
    fn mark(&mut self, bitmaps: &[&Bitmap], fingerprint: ImageFingerprint) -> Result<(), Error> {
        self.write(format::mark(bitmaps, fingerprint, self.slot))
    }

    /// Saves the bitmaps durably, with the `fingerprint` of the image. They must be marked as in use; after
    /// an error they stay so, and thus become inconsistent.
    fn store(&mut self, bitmaps: &[&Bitmap], fingerprint: ImageFingerprint) -> Result<(), Error> {
        if bitmaps.is_empty() {
            self.slot = 0;
            let emptied = self.file.set_len(0).and_then(|()| self.file.sync_data());
            return emptied.map_err(|e| self.failed("write", e));
        }
        self.reserve(bitmaps, fingerprint)?;
        self.write(format::store(bitmaps, fingerprint, self.slot))
    }

    /// Writes the next slot, durably.
    fn write(&mut self, writes: Vec<Write>) -> Result<(), Error> {
        let written = writes.iter().try_for_each(|(at, bytes)| self.file.write_all_at(bytes, *at));
        written.and_then(|()| self.file.sync_data()).map_err(|e| self.failed("write", e))?;
        self.slot += 1;
        Ok(())
    }

    fn metadata(&self) -> Result<Metadata, Error> {
        self.file.metadata().map_err(|e| self.failed("read", e))
    }

    fn failed(&self, what: &str, e: io::Error) -> Error {
        Error::system(format!("cannot {what} {}", self.path.display()), e)
    }

    fn unfit(&self, why: &str, hint: &str) -> Error {
        invalid(format!("{} {why}", self.path.display())).with_hint(hint)
    }
}

pub(super) struct FileBitmaps {
    shared: Arc<Shared>,
    /// `None` if the bitmap file does not exist yet, or cannot be used.
    file: Mutex<Option<BitmapFile>>,
    /// Why the image cannot have a bitmap file.
    unsupported: Option<&'static str>,
}

impl FileBitmaps {
    /// Opens the bitmap file of an image. If it cannot be used, it is left unchanged, and a warning is returned.
    pub fn open(shared: &Arc<Shared>) -> (FileBitmaps, Option<String>) {
        let read_only = locked(&shared.state).options.read_only;
        FileBitmaps::new(shared, || BitmapFile::open(shared.path(), read_only))
    }

    /// Takes `file`, the open bitmap file of an image that the device will write to, and marks its bitmaps as in use.
    /// If the file cannot be used, it is left unchanged, and a warning is returned.
    pub fn take(shared: &Arc<Shared>, file: Option<File>) -> Result<(FileBitmaps, Option<String>), Error> {
        let fingerprint = fingerprint(shared)?;
        let mut marked = Ok(());
        let taken = FileBitmaps::new(shared, || {
            let Some(file) = file else { return Ok(None) };
            let mut file = BitmapFile::of_image(file, shared.path(), false)?;
            let bitmaps = file.load(fingerprint)?;
            marked = file.mark(&bitmaps.iter().collect::<Vec<_>>(), fingerprint);
            Ok(Some(file))
        });
        marked.map(|()| taken)
    }

    fn new(
        shared: &Arc<Shared>,
        open: impl FnOnce() -> Result<Option<BitmapFile>, Error>,
    ) -> (FileBitmaps, Option<String>) {
        let DriverOptions { offset, size_limit, shared: is_shared, .. } = locked(&shared.state).options;
        let reasons = [
            (shared.block_device, "it is a block device"),
            (offset != 0 || size_limit.is_some(), "the device serves only a part of it"),
            (is_shared, "it is shared, and other processes may write to it"),
        ];
        let unsupported = reasons.into_iter().find(|(is, _)| *is).map(|(_, why)| why);
        let opened = if unsupported.is_some() { Ok(None) } else { open() };
        let warning = opened.as_ref().err().map(|error| format!("no dirty bitmaps are loaded: {error}"));
        let file = Mutex::new(opened.unwrap_or_default());
        (FileBitmaps { shared: Arc::clone(shared), file, unsupported }, warning)
    }

    /// The fingerprint after the last write to the image. The image is durable when it is taken, so the fingerprint stays
    /// valid after a power loss, and a later write by another program changes it.
    fn final_fingerprint(&self) -> Result<ImageFingerprint, Error> {
        let image = locked(&self.shared.state).file.clone();
        image.file.sync_all().map_err(|e| image.failed("flush", e))?;
        let fingerprint = fingerprint(&self.shared)?;
        fingerprint.wait_until_older();
        Ok(fingerprint)
    }

    /// Fails with [`ErrorKind::Unsupported`] if an image that was opened read-only has bitmaps: they were not
    /// marked as in use when they were loaded, so it must not become writable.
    pub fn check_reopen(&self) -> Result<(), Error> {
        if !self.is_writable() && locked(&self.file).is_some() {
            return Err(unsupported(format!(
                "{} has dirty bitmaps and was opened read-only; close it and open it for writing",
                self.path().display()
            )));
        }
        Ok(())
    }
}

impl BitmapFormat for FileBitmaps {
    type Place = ImageFingerprint;

    const INCONSISTENT: &'static str = "the image was not closed, or another program has written to it";

    fn path(&self) -> &Path {
        self.shared.path()
    }

    fn is_writable(&self) -> bool {
        locked(&self.shared.state).writable
    }

    fn unsupported(&self) -> Option<&str> {
        self.unsupported
    }

    fn read(&self) -> Result<Loaded<ImageFingerprint>, Error> {
        let is_writable = self.is_writable();
        let mut place = locked(&self.file);
        let Some(file) = &mut *place else { return Ok(Loaded::nothing(None)) };
        let fingerprint = fingerprint(&self.shared)?;
        match file.load(fingerprint) {
            Ok(bitmaps) => {
                if !is_writable && bitmaps.is_empty() {
                    // Releases the file, so that `check_reopen` allows the image to be opened for writing later.
                    *place = None;
                }
                Ok(Loaded { bitmaps, warnings: Vec::new(), place: Some(fingerprint) })
            }
            // A damaged file is left unchanged.
            Err(error) => {
                *place = None;
                Ok(Loaded::nothing(Some(format!("the dirty bitmaps are lost: {error}"))))
            }
        }
    }

    fn mark(&self, fingerprint: ImageFingerprint, bitmaps: &[&Bitmap]) -> Result<Option<Error>, Error> {
        let mut place = locked(&self.file);
        let Some(file) = &mut *place else { return Ok(None) };
        file.mark(bitmaps, fingerprint)?;
        Ok(file.reserve(bitmaps, fingerprint).err())
    }

    fn check(&self) -> Result<(), Error> {
        let missing = |why| Err(Error::new(ErrorKind::NotFound, why));
        match &*locked(&self.file) {
            Some(file) if file.metadata()?.nlink() > 0 => Ok(()),
            Some(_) => missing("its bitmap file was removed"),
            None => missing("it has no bitmap file"),
        }
    }

    /// Uses the new `file`. If the image already has a bitmap file, `file` must be that one.
    fn set_file(&self, file: File, checked: Result<(), Error>) -> Result<(), Error> {
        let mut place = locked(&self.file);
        match checked {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let created = BitmapFile::lock(file, self.path(), false)?;
                if created.metadata()?.len() > 0 {
                    let why = "is not empty and not a bitmap file of this image";
                    return Err(created.unfit(why, "remove it"));
                }
                *place = Some(created);
                Ok(())
            }
            Ok(()) => match &*place {
                Some(own) if !is_same(&own.file, &file).map_err(|e| own.failed("read", e))? => {
                    let why = "is not the bitmap file that the device uses, which was moved";
                    Err(own.unfit(why, "move that file back"))
                }
                _ => Ok(()),
            },
            Err(error) => Err(error),
        }
    }

    fn reserve(&self, bitmaps: &[&Bitmap]) -> Result<(), Error> {
        let mut place = locked(&self.file);
        let Some(file) = &mut *place else { return Ok(()) };
        let fingerprint = fingerprint(&self.shared)?;
        file.reserve(bitmaps, fingerprint)?;
        file.mark(bitmaps, fingerprint)
    }

    fn write(&self, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
        let mut place = locked(&self.file);
        let Some(file) = &mut *place else { return Ok(()) };
        let all: Vec<&Bitmap> = bitmaps.iter().map(|bitmap| &**bitmap).collect();
        let fingerprint =
            if bitmaps.is_empty() { fingerprint(&self.shared)? } else { self.final_fingerprint()? };
        file.store(&all, fingerprint)?;
        // Releases the lock, so that other processes can read the file.
        *place = None;
        Ok(())
    }
}

fn is_same(one: &File, other: &File) -> io::Result<bool> {
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

/// The present fingerprint of the image.
fn fingerprint(shared: &Shared) -> Result<ImageFingerprint, Error> {
    let state = locked(&shared.state);
    ImageFingerprint::of(&state.file, state.size)
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;
    use blkq::bitmap::BitmapState;

    const FINGERPRINT: ImageFingerprint = ImageFingerprint { size: 1 << 20, modified: (7, 8), inode: 9 };

    #[test]
    fn a_kill_before_the_first_bitmap_is_marked_leaves_no_bitmaps() {
        let image = std::env::temp_dir().join(format!("blkq-bitmap-file-{}", std::process::id()));
        let path = path_for(&image);
        let mut file = BitmapFile::lock(File::create_new(&path).unwrap(), &image, false).unwrap();
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

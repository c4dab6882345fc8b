//! The dirty bitmaps of a raw image, in a file beside it: `IMAGE.bitmaps`. It is rewritten as a whole, with a
//! checksum over all of it: what was not written to its end is damaged, and has no bitmaps. Another file of that name
//! is never written to: it may be anybody's image.
//!
//! All numbers are little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `blkqbmap` |
//! | 4, 4 | version, 2; flags: 1 while the image is open for writing, and then there are no bits |
//! | 8, 8, 8, 8 | size of the device in bytes; when the image was last written to, seconds and nanoseconds; its inode |
//! | 8, 8 | number of bitmaps; checksum, FNV-1a of 64 bits of the file with zeroes here |
//! | 2, 1, 1, 4, 8 | of each bitmap: bytes of the name, bits of the granularity, state, zeroes, bytes of the bits |
//! | | the name, the bits, the lowest of each byte first |

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use crate::bitmap::{BITMAPS_MAX, Bitmap, BitmapState, MEMORY_MAX_BYTES, NAME_MAX_BYTES, bytes_for};
use crate::error::{Error, ErrorKind};

use super::lock::{self, LockKind};

const MAGIC: &[u8; 8] = b"blkqbmap";
const VERSION: u32 = 2;
const FLAG_IN_USE: u32 = 1;
const HEADER_BYTES: usize = 64;
const CHECKSUM_AT: usize = 56;
const ENTRY_BYTES: usize = 16;
/// Longest wait for another time of the image.
const OUTWAIT_MAX: Duration = Duration::from_millis(2500);
/// Longest file that is read.
const FILE_MAX_BYTES: u64 =
    MEMORY_MAX_BYTES + (HEADER_BYTES + BITMAPS_MAX * (ENTRY_BYTES + NAME_MAX_BYTES)) as u64;

/// The state of an image when its bitmaps were kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stamp {
    /// Of the device, in bytes.
    pub size: u64,
    /// When it was last written to: seconds and nanoseconds.
    pub modified: (i64, i64),
    /// Another image may have the same time: a copy, or an older one put back.
    pub inode: u64,
}

impl Stamp {
    /// That of `image` now, with a device of `size` bytes.
    ///
    /// # Errors
    /// That of the file.
    pub fn of(image: &File, size: u64) -> io::Result<Stamp> {
        let metadata = image.metadata()?;
        Ok(Stamp { size, modified: (metadata.mtime(), metadata.mtime_nsec()), inode: metadata.ino() })
    }

    /// Waits until a write gives the image another time than this one: file systems count it in ticks of the kernel
    /// or in seconds, FAT in two.
    pub fn outwait(&self) {
        let tick = Duration::from_secs(if self.modified.1 == 0 { 2 } else { 0 });
        let modified = Duration::new(self.modified.0.max(0) as u64, self.modified.1 as u32) + tick;
        let now = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
            Duration::new(now.tv_sec.max(0) as u64, now.tv_nsec as u32)
        };
        // A time far ahead was set by hand; no write gives it.
        let until = now() + OUTWAIT_MAX;
        while (now() <= modified) && modified < until && now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The file with the bitmaps of an image.
pub(super) struct BitmapFile {
    file: File,
    path: PathBuf,
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
                    format!("{} has no bitmaps of this image, and is not empty", created.path.display());
                Err(Error::new(ErrorKind::Invalid, message).with_cure("remove it"))
            }
            Err(e) => Err(created.failed("read", e)),
        }
    }

    fn of_open(file: File, path: PathBuf, read_only: bool) -> Result<BitmapFile, Error> {
        let opened = BitmapFile { file, path };
        let metadata = opened.file.metadata().map_err(|e| opened.failed("read", e))?;
        if !metadata.is_file() {
            let message = format!("{} is no regular file", opened.path.display());
            return Err(Error::new(ErrorKind::Invalid, message).with_cure("remove it"));
        }
        // As an image: it may be one.
        let range = 0..i64::MAX as u64;
        lock::acquire(&opened.file, &opened.path, &range, LockKind::of(read_only, false), false)?;
        Ok(opened)
    }

    /// Rejects a file that is not empty, and does not begin as one with bitmaps.
    fn check_magic(&self) -> Result<(), Error> {
        let mut magic = [0; MAGIC.len()];
        let bytes = self.file.read_at(&mut magic, 0).map_err(|e| self.failed("read", e))?;
        if bytes == 0 || magic == *MAGIC {
            return Ok(());
        }
        let message = format!("{} is no file with bitmaps, and stays as it is", self.path.display());
        Err(Error::new(ErrorKind::Format, message))
    }

    /// Loads the bitmaps of the image that is as `stamp` says. If it was written to since, or is open for writing as
    /// far as the file says, they are inconsistent.
    ///
    /// # Errors
    /// [`ErrorKind::Format`] if it is damaged; that of the file.
    pub fn load(&self, stamp: Stamp) -> Result<Vec<Bitmap>, Error> {
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
            let message = format!("{} is of version {version}, which is not known", self.path.display());
            return Err(Error::new(ErrorKind::Format, message));
        }
        parse(&content, stamp).ok_or_else(|| self.damaged())
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
                    "{} is another file than the one with the bitmaps, which was moved",
                    self.path.display()
                );
                Err(Error::new(ErrorKind::Invalid, message).with_cure("move that one to its place"))
            }
            (Err(e), _) | (_, Err(e)) => Err(self.failed("read", e)),
        }
    }

    /// Marks the bitmaps as in use, durably: the image is about to be written to.
    ///
    /// # Errors
    /// That of the file.
    pub fn mark(&self, bitmaps: &[Bitmap], stamp: Stamp) -> Result<(), Error> {
        self.write(&encode(bitmaps.iter(), stamp, true))
    }

    /// Writes the bitmaps of the image that is as `stamp` says, durably.
    ///
    /// # Errors
    /// That of the file.
    pub fn store(&self, bitmaps: &[Arc<Bitmap>], stamp: Stamp) -> Result<(), Error> {
        if bitmaps.is_empty() {
            return self.write(&[]);
        }
        self.write(&encode(bitmaps.iter().map(|bitmap| &**bitmap), stamp, false))
    }

    fn write(&self, content: &[u8]) -> Result<(), Error> {
        let write = || -> io::Result<()> {
            self.reserve(content.len())?;
            self.file.write_all_at(content, 0)?;
            self.file.set_len(content.len() as u64)?;
            // SAFETY: no memory is passed, and the file is open.
            match unsafe { libc::fdatasync(self.file.as_raw_fd()) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        write().map_err(|e| self.failed("write", e))
    }

    /// Reserves the space first, where the file system can: without room for it the file stays as it is.
    fn reserve(&self, bytes: usize) -> io::Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let reserved = fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, bytes as u64);
        reserved.or_else(|e| if e == Errno::OPNOTSUPP { Ok(()) } else { Err(e.into()) })
    }

    fn failed(&self, what: &str, e: io::Error) -> Error {
        Error::system(format!("cannot {what} {}", self.path.display()), e)
    }

    fn damaged(&self) -> Error {
        Error::new(ErrorKind::Format, format!("{} is damaged", self.path.display()))
    }
}

fn encode<'a>(bitmaps: impl ExactSizeIterator<Item = &'a Bitmap>, stamp: Stamp, in_use: bool) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((if in_use { FLAG_IN_USE } else { 0 }).to_le_bytes());
    bytes.extend(stamp.size.to_le_bytes());
    bytes.extend(stamp.modified.0.to_le_bytes());
    bytes.extend(stamp.modified.1.to_le_bytes());
    bytes.extend(stamp.inode.to_le_bytes());
    bytes.extend((bitmaps.len() as u64).to_le_bytes());
    bytes.extend([0; 8]);
    for bitmap in bitmaps {
        let has_bits = !in_use && bitmap.state() != BitmapState::Inconsistent;
        let bits = if has_bits { bitmap.to_bytes() } else { Vec::new() };
        bytes.extend((bitmap.name().len() as u16).to_le_bytes());
        let state = STATES.iter().position(|state| *state == bitmap.state()).unwrap_or(STATES.len());
        bytes.extend([bitmap.granularity().trailing_zeros() as u8, state as u8, 0, 0, 0, 0]);
        bytes.extend((bits.len() as u64).to_le_bytes());
        bytes.extend(bitmap.name().as_bytes());
        bytes.extend(bits);
    }
    let checksum = checksum(&bytes);
    bytes[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// The states of a bitmap, by their number in the file.
const STATES: [BitmapState; 3] = [BitmapState::Recording, BitmapState::Disabled, BitmapState::Inconsistent];

/// The bitmaps in a file; `None` if it is damaged.
fn parse(bytes: &[u8], now: Stamp) -> Option<Vec<Bitmap>> {
    let (header, mut rest) = bytes.split_at_checked(HEADER_BYTES)?;
    let number = |at: usize| header[at..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let flags = u32::from_le_bytes(*header[12..].first_chunk()?);
    let version = u32::from_le_bytes(*header[8..].first_chunk()?);
    let mut zeroed = bytes.to_vec();
    zeroed[CHECKSUM_AT..HEADER_BYTES].fill(0);
    if header[..8] != *MAGIC || version != VERSION || checksum(&zeroed) != number(CHECKSUM_AT)? {
        return None;
    }
    let modified = (number(24)? as i64, number(32)? as i64);
    let kept = Stamp { size: number(16)?, modified, inode: number(40)? };
    let is_consistent = flags & FLAG_IN_USE == 0 && kept == now;
    let mut bitmaps = Vec::new();
    for _ in 0..number(48)?.min(BITMAPS_MAX as u64) {
        let (entry, after) = rest.split_at_checked(ENTRY_BYTES)?;
        let name_bytes = usize::from(u16::from_le_bytes(*entry.first_chunk()?));
        let bits_bytes = u64::from_le_bytes(*entry[8..].first_chunk()?);
        let (name, after) = after.split_at_checked(name_bytes)?;
        let (bits, after) = after.split_at_checked(usize::try_from(bits_bytes).ok()?)?;
        rest = after;
        let granularity = 1u64.checked_shl(u32::from(entry[2]))?;
        let state = match STATES.get(usize::from(entry[3]))? {
            state if is_consistent => *state,
            _ => BitmapState::Inconsistent,
        };
        let is_loaded = state != BitmapState::Inconsistent;
        if is_loaded && bits_bytes != bytes_for(now.size, granularity.max(1)) {
            return None;
        }
        let size = if is_loaded { now.size } else { 0 };
        let mut bitmap = Bitmap::new(std::str::from_utf8(name).ok()?, granularity, size, state).ok()?;
        if is_loaded {
            bitmap.load(0, bits);
        }
        bitmaps.push(bitmap);
    }
    rest.is_empty().then_some(bitmaps)
}

/// FNV-1a.
fn checksum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    const STAMP: Stamp = Stamp { size: 1 << 20, modified: (7, 8), inode: 9 };

    fn bitmaps() -> Vec<Bitmap> {
        let bitmap = |name: &str, state| Bitmap::new(name, 512, STAMP.size, state).unwrap();
        let bitmaps = vec![bitmap("a", BitmapState::Recording), bitmap("b c", BitmapState::Disabled)];
        bitmaps[0].mark(4096..8192);
        bitmaps
    }

    #[test]
    fn bitmaps_are_read_as_they_were_written() {
        let bytes = encode(bitmaps().iter(), STAMP, false);
        let read = parse(&bytes, STAMP).unwrap();
        let facts = |bitmap: &Bitmap| (bitmap.name().to_owned(), bitmap.state(), bitmap.to_bytes());
        assert_eq!(
            read.iter().map(facts).collect::<Vec<_>>(),
            bitmaps().iter().map(facts).collect::<Vec<_>>()
        );
        for (in_use, stamp) in [
            (true, STAMP),
            (false, Stamp { size: 2 << 20, ..STAMP }),
            (false, Stamp { modified: (7, 9), ..STAMP }),
            (false, Stamp { inode: 10, ..STAMP }),
        ] {
            let read = parse(&encode(bitmaps().iter(), STAMP, in_use), stamp).unwrap();
            assert_eq!(read.len(), 2);
            assert!(read.iter().all(|bitmap| bitmap.state() == BitmapState::Inconsistent));
        }
    }

    #[test]
    fn a_write_after_the_wait_gives_another_stamp() {
        let path = std::env::temp_dir().join(format!("blkq-stamp-{}", std::process::id()));
        let image = File::create(&path).unwrap();
        for byte in 0..50 {
            image.write_at(&[byte], 0).unwrap();
            let stamp = Stamp::of(&image, 1).unwrap();
            stamp.outwait();
            image.write_at(&[byte], 0).unwrap();
            assert_ne!(Stamp::of(&image, 1).unwrap(), stamp);
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_that_was_changed_anywhere_is_damaged() {
        let bytes = encode(bitmaps().iter(), STAMP, false);
        for at in 0..bytes.len() {
            assert!(parse(&bytes[..at], STAMP).is_none(), "cut off at {at}");
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            assert!(parse(&changed, STAMP).is_none(), "changed at {at}");
        }
    }
}

//! Overlays: creates an empty qcow2 image over a backing file, which is not changed. For an external snapshot, opens
//! such an image over the active image as the new active image; no I/O runs meanwhile.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkq::bitmap::BitmapStore;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::lock as locked;
use blkq::{Driver, Error};

use crate::errors::{invalid, malformed, unsupported};
use crate::image_file::{ImageFile, LockKind, WHOLE_FILE, check_not_longer, name_now, sync};
use crate::options::{ImageFormat, Journals};
use crate::qcow2::chain::{self, OverlayBase, check_is_no_link};
use crate::qcow2::format::{EXTENSION_BACKING_FORMAT, FIXED_BYTES, L1_MAX_BYTES, MAGIC, NAME_MAX_BYTES};
use crate::qcow2::journal;
use crate::qcow2::tables::state::Layer;
use crate::qcow2::{Qcow2, check_repaired, choose_file_mode, open_writer, slice_bytes};

/// The base-2 logarithm of the cluster size in bytes; QEMU's default.
const CLUSTER_BITS: u32 = 16;
const CLUSTER_BYTES: u64 = 1 << CLUSTER_BITS;
const REFCOUNT_ORDER: u32 = 4;
/// Numbers of the clusters of the refcount table, of its first block, and of the start of the L1 table.
const REFCOUNT_TABLE: u64 = 1;
const REFCOUNT_BLOCK: u64 = 2;
const L1_TABLE: u64 = 3;

/// The backing file of a new overlay.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Base {
    /// Absolute and without symbolic links.
    pub(super) path: PathBuf,
    pub(super) qcow2: bool,
    /// Virtual size in bytes.
    pub(super) size: u64,
}

impl Base {
    /// Reads the size of the image at `path`.
    ///
    /// # Errors
    /// The message has one line: what is wrong, why, and a hint, which the caller adds to
    /// [`blkq::ErrorKind::Format`] (the image has another format than `format`).
    pub fn open(path: &Path, format: ImageFormat) -> Result<Base, Error> {
        let backing = ImageFile::open(path, true)?;
        let file_bytes = backing.size()?;
        if format == ImageFormat::Qcow2 {
            let image = Layer::with_tables(backing)?;
            check_is_no_link(&image.file.path)?;
            return Ok(Base { path: image.file.path.clone(), qcow2: true, size: image.size });
        }
        if format == ImageFormat::Checked
            && let Some(format) = backing.detect_format(file_bytes)
        {
            return Err(malformed(format!("{} is a {format} image, not raw data", backing.path.display())));
        }
        Ok(Base { path: backing.path, qcow2: false, size: file_bytes })
    }

    /// Makes `file` an overlay over this backing file, of the same size rounded up to whole sectors. `file`
    /// must be empty and in `directory`, which must be absolute and without symbolic links. The overlay names
    /// the backing file relative to `directory` if it is there or below. Nothing is made durable.
    ///
    /// # Errors
    /// [`blkq::ErrorKind::Invalid`] for a name or a size that the format does not allow; the I/O error of the file.
    pub fn write_overlay(&self, file: &File, directory: &Path) -> Result<(), Error> {
        let name = name_in(directory, &self.path)?;
        let size = self.size.next_multiple_of(512);
        let l2_covers = CLUSTER_BYTES << (CLUSTER_BITS - 3);
        let l1_entries = size.div_ceil(l2_covers);
        if l1_entries * 8 > L1_MAX_BYTES {
            return Err(invalid(format!(
                "an image with clusters of 64 KiB can have at most {} bytes, not {size}",
                L1_MAX_BYTES / 8 * l2_covers
            )));
        }
        let clusters = L1_TABLE + (l1_entries * 8).div_ceil(CLUSTER_BYTES).max(1);
        let header = header(size, l1_entries as u32, &name, if self.qcow2 { b"qcow2" } else { b"raw" });
        let block: Vec<u8> = (0..clusters).flat_map(|_| 1u16.to_be_bytes()).collect();
        let write = || -> io::Result<()> {
            file.write_all_at(&header, 0)?;
            let block_at = REFCOUNT_BLOCK * CLUSTER_BYTES;
            file.write_all_at(&block_at.to_be_bytes(), REFCOUNT_TABLE * CLUSTER_BYTES)?;
            file.write_all_at(&block, block_at)?;
            // The L1 table is a hole, which reads as zeroes: no entry names a table.
            file.set_len(clusters * CLUSTER_BYTES)
        };
        write().map_err(|e| Error::system("cannot write the new image", e))
    }
}

fn name_in(directory: &Path, base: &Path) -> Result<Vec<u8>, Error> {
    let below = base.strip_prefix(directory).unwrap_or(base).as_os_str().as_bytes();
    // QEMU takes letters before a colon for a protocol, unless a slash precedes the colon.
    let first = below.split(|byte| *byte == b'/').next().unwrap_or_default();
    let prefix: &[u8] = if first.contains(&b':') { b"./" } else { b"" };
    let name = [prefix, below].concat();
    let why = if name.len() > NAME_MAX_BYTES {
        format!("longer than {NAME_MAX_BYTES} bytes")
    } else if String::from_utf8_lossy(&name).contains(char::is_control) {
        "with control characters".to_owned()
    } else {
        return Ok(name);
    };
    Err(invalid(format!(
        "an image cannot name its backing file by a path {why}; rename or move the backing file"
    )))
}

fn header(size: u64, l1_entries: u32, name: &[u8], format: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; FIXED_BYTES];
    let mut extension = EXTENSION_BACKING_FORMAT.to_be_bytes().to_vec();
    extension.extend((format.len() as u32).to_be_bytes());
    extension.extend(format);
    extension.resize(extension.len().next_multiple_of(8), 0);
    // The end marker of the extensions takes 8 bytes.
    let name_at = (FIXED_BYTES + extension.len() + 8) as u64;
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, &MAGIC);
    put(4, &3u32.to_be_bytes());
    put(8, &name_at.to_be_bytes());
    put(16, &(name.len() as u32).to_be_bytes());
    put(20, &CLUSTER_BITS.to_be_bytes());
    put(24, &size.to_be_bytes());
    put(36, &l1_entries.to_be_bytes());
    put(40, &(L1_TABLE * CLUSTER_BYTES).to_be_bytes());
    put(48, &(REFCOUNT_TABLE * CLUSTER_BYTES).to_be_bytes());
    put(56, &1u32.to_be_bytes());
    put(96, &REFCOUNT_ORDER.to_be_bytes());
    put(100, &(FIXED_BYTES as u32).to_be_bytes());
    bytes.extend(extension);
    bytes.extend([0; 8]);
    bytes.extend(name);
    bytes
}

impl Qcow2 {
    /// Makes all writes durable, and returns the image as the base of a new overlay. The disk must be frozen.
    /// Fails with [`blkq::ErrorKind::Unsupported`] if the image is read-only, and with
    /// [`blkq::ErrorKind::Mismatch`] if a file of the chain was truncated.
    pub(crate) fn overlay_base(&self) -> Result<OverlayBase, Error> {
        if !self.writable || self.read_only.load(Relaxed) {
            return Err(unsupported(format!(
                "{} is read-only, so there is nothing to take a snapshot of",
                self.path().display()
            )));
        }
        self.sync()?;
        let base = self.chain_from(0);
        base.chain.iter().try_for_each(|layer| layer.file.check_not_truncated(layer.file_bytes))?;
        Ok(base)
    }

    fn chain_from(&self, first: usize) -> OverlayBase {
        let state = locked(&self.shared.state);
        let with_tables = |(number, layer): (usize, &Layer)| {
            let tables = state.tables(number).cloned();
            Layer { file: Arc::clone(&layer.file), tables, ..*layer }
        };
        let chain = state.layers.iter().enumerate().skip(first).map(with_tables).collect();
        OverlayBase { chain, size: state.size, terms: self.terms.clone() }
    }

    /// Opens the backing file of this image, at `path`, as a device, for a block commit. `file` is open for
    /// writing and locked; the image must be qcow2. Marks its persistent bitmaps as in use.
    pub(in crate::qcow2) fn of_base(
        &self,
        file: File,
        path: &Path,
        journals: Option<&Journals>,
    ) -> Result<Qcow2, Error> {
        let base = Layer::with_tables(ImageFile::of_open(file, path.to_owned())?)?;
        check_repaired(&base)?;
        if let (Some(all), Some(header)) = (journals, base.header()) {
            journal::check_base(all, &base.file, header.tag, self.file().identity)?;
        }
        let mut below = self.chain_from(2);
        let bytes = base.size - base.size % u64::from(self.terms.logical_block_bytes);
        // Checked before anything is written to the base.
        let device_bytes = std::mem::replace(&mut below.size, bytes);
        check_not_longer(path, bytes, device_bytes)?;
        let base = Qcow2::on_top(base, below, journals, Some(self.file().identity))?;
        // A device that cannot be resized must be refused before its bitmaps are marked as in use.
        base.prepare_resize(Some(device_bytes)).inspect_err(|_| _ = base.supersede())?;
        // Loading marks the bitmaps as in use, because the commit is about to write to the base.
        base.bitmaps.load().inspect_err(|_| _ = base.supersede())?;
        Ok(base)
    }

    /// Makes `file` a qcow2 overlay over `below`, and opens it as a device of the same size. `file` must be
    /// empty, open for reading and writing, and at the absolute `path`; the disk of `below` must be frozen.
    ///
    /// When this returns, the overlay is durable, except for its directory entry. If `journals` are given,
    /// the writes that complete from then on survive a kill of this process. Nothing changes for clients
    /// until the device replaces the other one ([`Exchange::replace`](blkq::disk::Exchange::replace)).
    ///
    /// # Errors
    /// The message has one line: what is wrong, why, and a hint.
    pub fn over(
        below: OverlayBase,
        file: File,
        path: &Path,
        journals: Option<&Journals>,
    ) -> Result<Qcow2, Error> {
        let top = ImageFile::of_open(file, path.to_owned())?;
        if top.size()? != 0 || top.block_device {
            return Err(invalid(format!("{} is not an empty new file", top.path.display())));
        }
        if below.chain.len() > chain::DEPTH_MAX {
            return Err(unsupported(format!(
                "{} would have more than {} backing files; commit some first",
                path.display(),
                chain::DEPTH_MAX
            )));
        }
        top.lock(&WHOLE_FILE, LockKind::Writer)?;
        let Some(layer) = below.chain.first() else {
            return Err(invalid("the new overlay has no backing file"));
        };
        check_is_no_link(&layer.file.path)?;
        let base = Base { path: path_of(&layer.file)?, qcow2: layer.tables.is_some(), size: below.size };
        let cannot = |e| Error::system("cannot duplicate a descriptor of the new image", e);
        let file = top.file.try_clone().map_err(cannot)?;
        base.write_overlay(&file, path.parent().unwrap_or(Path::new("/")))?;
        sync(&top.file).map_err(|e| Error::system(format!("cannot make {} durable", path.display()), e))?;
        Qcow2::on_top(Layer::with_tables(top)?, below, journals, None)
    }

    /// Builds the device of the image `top`, which is open for writing and locked, over the images of
    /// `below`. `overlay` is the overlay that is committed into `top`, if this is for a block commit.
    fn on_top(
        mut top: Layer,
        mut below: OverlayBase,
        journals: Option<&Journals>,
        overlay: Option<(u64, u64)>,
    ) -> Result<Qcow2, Error> {
        // `open_writer` reads the file through the page cache. This must happen before direct I/O is set, after
        // which reads have to be aligned.
        let writer = open_writer(&top, false)?;
        let slice_bytes = slice_bytes(std::iter::once(&top).chain(&below.chain));
        let choose = || choose_file_mode(&top, &below.terms, slice_bytes);
        let mode = below.terms.mode(&top.file.path, choose)?;
        below.terms.buffered = mode.direct.is_none().then_some(mode.reason);
        top.set_align(mode.direct);
        below.chain.insert(0, top);
        Qcow2::assemble(below, writer, false)?.start(journals, overlay, true)
    }

    /// Gives the image's file to another driver, which only reads it, even if writing the tables fails.
    /// Writes all tables back, ends the journal and makes the lock a shared one.
    pub(crate) fn supersede(&self) -> Result<(), Error> {
        self.superseded.store(true, Relaxed);
        let written = self.close();
        self.file().downgrade(&WHOLE_FILE);
        written
    }
}

/// The current path of `file`. Fails with [`blkq::ErrorKind::Unsupported`] if no path leads to the file any longer.
pub fn path_of(file: &ImageFile) -> Result<PathBuf, Error> {
    let path = &file.path;
    let found = file.file.metadata().ok().and_then(|mine| {
        // The old path comes first: it may be a symbolic link that must be kept (`prefer_link`).
        let names = [Some(path.to_owned()), name_now(&file.file)];
        let there = |path: &PathBuf| {
            std::fs::metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (mine.dev(), mine.ino()))
        };
        names.into_iter().flatten().find(there)
    });
    found.ok_or_else(|| {
        unsupported(format!("{} was removed, so no overlay can name it as its backing file", path.display()))
    })
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;
    use crate::qcow2::format::Header;

    #[test]
    fn a_new_image_has_a_valid_header() {
        let bytes = header(5 << 40, 10240, b"base.img", b"raw");
        let parsed = Header::parse(&bytes).unwrap();
        assert_eq!((parsed.version, parsed.size, parsed.l1_entries), (3, 5 << 40, 10240));
        let backing = parsed.backing.unwrap();
        assert_eq!((&backing.name[..], backing.format.as_deref()), (&b"base.img"[..], Some("raw")));
        assert!(bytes.len() < CLUSTER_BYTES as usize);
    }

    #[test]
    fn a_base_is_named_relative_to_the_directory_of_the_image() {
        let name = |base: &str| {
            name_in(Path::new("/a"), Path::new(base)).map(|name| String::from_utf8(name).unwrap())
        };
        assert_eq!(name("/a/b.img").unwrap(), "b.img");
        assert_eq!(name("/a/c/b.img").unwrap(), "c/b.img");
        assert_eq!(name("/b/b.img").unwrap(), "/b/b.img");
        assert_eq!(name("/a/nbd:b").unwrap(), "./nbd:b");
        assert!(name("/a/b\n").is_err());
        assert!(name(&format!("/b/{}", "x/".repeat(600))).is_err());
    }
}

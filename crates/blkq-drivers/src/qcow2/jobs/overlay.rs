//! External snapshots: creates a qcow2 overlay over the active image and opens it as the new active image. No
//! I/O runs meanwhile.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkq::bitmap::BitmapStore;
use blkq::sync::atomic::AtomicBool;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::{Mutex, lock as locked};
use blkq::{Driver, Error, ErrorKind};

use crate::image_file::{DirectIo, ImageFile, ImageName, LockKind};
use crate::r#loop::RawImage;
use crate::r#loop::base::check_not_longer;
use crate::qcow2::bitmaps::store::PersistentBitmaps;
use crate::qcow2::chain::{self, LOCKED, Opened, read_tables};
use crate::qcow2::format::entry::SLICE_MAX_BYTES;
use crate::qcow2::io::env::Shared;
use crate::qcow2::io::flush_metadata::flush_metadata;
use crate::qcow2::io::reserve::free_reserved;
use crate::qcow2::journal::{self, Journals};
use crate::qcow2::tables::cache::{CACHE_BYTES, Cache};
use crate::qcow2::tables::state::{Layer, State, Tables};
use crate::qcow2::{Qcow2, check_repaired, choose_file_mode, open_writer};

use super::create::Base;

/// The active image with its backing files, from which a new overlay is made.
pub struct OverlayBase {
    /// The active image first.
    files: Vec<Arc<ImageFile>>,
    layers: Vec<Layer>,
    /// The size of the device in bytes.
    size: u64,
    slice_bytes: u64,
    logical_block_bytes: u32,
    memory_align: u32,
    requested: DirectIo,
    /// Why direct I/O is off; `None` if it is on.
    buffered: Option<String>,
}

impl OverlayBase {
    /// The base for an overlay over a raw image.
    pub(crate) fn of_raw(raw: RawImage) -> OverlayBase {
        let layer = Layer { tables: None, size: raw.size, align: raw.align, file_bytes: raw.size };
        OverlayBase {
            files: vec![raw.file],
            layers: vec![layer],
            size: raw.size,
            slice_bytes: SLICE_MAX_BYTES,
            logical_block_bytes: raw.logical_block_bytes,
            memory_align: raw.memory_align,
            requested: raw.requested,
            buffered: raw.buffered,
        }
    }

    /// Whether the active image is qcow2; else it is raw.
    fn is_qcow2(&self) -> bool {
        self.layers.first().is_some_and(|layer| layer.tables.is_some())
    }
}

impl Qcow2 {
    /// Makes all writes durable, and returns the image as the base of a new overlay. The disk must be frozen.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the image is read-only; the I/O error of the file.
    pub(crate) fn overlay_base(&self) -> Result<OverlayBase, Error> {
        if !self.writable || self.read_only.load(Relaxed) {
            let message =
                format!("{} is read-only, so there is nothing to take a snapshot of", self.path().display());
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        // A flush of its own, because data that was overwritten in place makes no table dirty.
        self.run("make the data durable", async |env| flush_metadata(&env, true).await)?;
        self.flush_all_metadata()?;
        Ok(self.chain_from(0))
    }

    /// The images of the chain from `first` on, with copies of their tables in memory.
    fn chain_from(&self, first: usize) -> OverlayBase {
        let state = locked(&self.shared.state);
        let copy = |layer: &Layer| Layer {
            tables: layer
                .tables
                .as_ref()
                .map(|tables| Tables { header: tables.header.clone(), l1: tables.l1.clone() }),
            size: layer.size,
            align: layer.align,
            file_bytes: layer.file_bytes,
        };
        OverlayBase {
            files: self.files[first..].to_vec(),
            layers: state.layers[first..].iter().map(copy).collect(),
            size: state.size,
            slice_bytes: state.cache.slice_bytes() as u64,
            logical_block_bytes: self.logical_block_bytes,
            memory_align: self.memory_align,
            requested: self.requested,
            buffered: self.buffered.clone(),
        }
    }

    /// Opens the backing file of this image, at `path`, as a device, for a block commit. `file` is open for
    /// writing and locked; the image must be qcow2. Marks its persistent bitmaps as in use.
    ///
    /// # Errors
    /// The message has one line: what is wrong, why, and a hint.
    pub(in crate::qcow2) fn of_base(
        &self,
        file: File,
        path: &Path,
        journals: Option<&Journals>,
    ) -> Result<Qcow2, Error> {
        let file = ImageFile::of_open(file, path.to_owned())?;
        let tables = read_tables(&file)?;
        check_repaired(&tables.header, path)?;
        if let Some(all) = journals {
            journal::check_base(all, path, (file.identity, tables.header.tag), self.identity())?;
        }
        let size = tables.header.size;
        let mut below = self.chain_from(2);
        let bytes = size - size % u64::from(self.logical_block_bytes);
        // Checked before anything is written to the base.
        let device_bytes = std::mem::replace(&mut below.size, bytes);
        check_not_longer(path, bytes, device_bytes)?;
        let base = Opened { file, size, tables: Some(tables) };
        let base = Qcow2::assemble(base, below, journals, Some(self.identity()))?;
        // A device that cannot be resized must be refused before its bitmaps are marked as in use.
        base.prepare_resize(Some(device_bytes)).inspect_err(|_| _ = base.supersede())?;
        // Loading marks the bitmaps as in use, because the commit is about to write to the base.
        base.load().inspect_err(|_| _ = base.supersede())?;
        Ok(base)
    }

    /// Makes `file` a qcow2 overlay over `below`, and opens it as a device of the same size. `file` must be
    /// empty, open for reading and writing, and at the absolute `path`; the disk of `below` must be frozen.
    ///
    /// When this returns, the overlay is durable, except for its directory entry. If `journals` are given,
    /// the writes that complete from then on survive a kill of this process. The device replaces the other
    /// one ([`Exchange::replace`](blkq::disk::Exchange::replace)) or is dropped; until then, nothing changes
    /// for clients.
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
            let message = format!("{} is not an empty new file", top.path.display());
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        if below.files.len() > chain::DEPTH_MAX {
            let message = format!(
                "{} would have more than {} backing files; commit some first",
                path.display(),
                chain::DEPTH_MAX
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        top.lock(&LOCKED, LockKind::Exclusive, false)?;
        let Some(file) = below.files.first() else {
            return Err(Error::new(ErrorKind::Invalid, "the new overlay has no backing file"));
        };
        chain::check_is_no_link(&file.path)?;
        let base = path_of(file)?;
        let directory = path.parent().unwrap_or(Path::new("/"));
        Base::of_open(base, below.is_qcow2(), below.size).write_to(&top, directory)?;
        top.sync().map_err(|e| Error::system(format!("cannot make {} durable", path.display()), e))?;
        let tables = read_tables(&top)?;
        let size = tables.header.size;
        Qcow2::assemble(Opened { file: top, size, tables: Some(tables) }, below, journals, None)
    }

    /// Builds the device of the image `top`, which is open for writing and locked, over the images of
    /// `below`. `overlay` is the overlay that is committed into `top`, if this is for a block commit.
    fn assemble(
        mut top: Opened,
        below: OverlayBase,
        journals: Option<&Journals>,
        overlay: Option<(u64, u64)>,
    ) -> Result<Qcow2, Error> {
        let Some((version, cluster_bytes)) =
            top.tables.as_ref().map(|tables| (tables.header.version, tables.header.cluster_bytes()))
        else {
            return Err(Error::new(ErrorKind::Format, "not a qcow2 image"));
        };
        // `open_writer` reads the file through the page cache. This must happen before `set_direct`, after
        // which reads have to be aligned.
        let writer = open_writer(&top, false)?;
        let slice_bytes = below.slice_bytes.min(cluster_bytes);
        let buffered = choose_buffered(&top, &below, slice_bytes)?;
        let direct = buffered.is_none();
        let align = match &top.file.direct {
            Ok(align) if direct => u64::from(align.offset),
            _ => 1,
        };
        let file_bytes = top.file.size()?;
        let tables = top.tables.take();
        let mut layers = vec![Layer { tables, size: top.size, align, file_bytes }];
        layers.extend(below.layers);
        let cache = Cache::new(CACHE_BYTES, slice_bytes as usize);
        let state = State { layers, cache, size: below.size, writer, flushes: 0, journal: None };
        let name = ImageName::new(&top.file.path);
        let mut files = vec![Arc::new(top.file)];
        files.extend(below.files);
        let device = Qcow2 {
            shared: Shared::new(state),
            files,
            name,
            writable: true,
            read_only: AtomicBool::new(false),
            superseded: AtomicBool::new(false),
            logical_block_bytes: below.logical_block_bytes,
            memory_align: below.memory_align,
            requested: below.requested,
            buffered,
            version,
            cluster_bytes,
            warnings: Vec::new(),
            persistent_bitmaps: Mutex::new(PersistentBitmaps::default()),
        };
        let device = device.begin_journal(journals, overlay)?;
        device.set_direct(&[direct])?;
        Ok(device)
    }

    /// Switches direct I/O on or off for the first files of the chain, as `direct` says. It runs after
    /// [`Qcow2::begin_journal`], whose change of the header may go through the page cache and then need not
    /// wait for the disk.
    pub(in crate::qcow2) fn set_direct(&self, direct: &[bool]) -> Result<(), Error> {
        self.files.iter().zip(direct).try_for_each(|(file, direct)| file.set_direct(*direct))
    }

    /// Gives the image's file to another driver, which only reads it. Writes all tables back, ends the
    /// journal and makes the lock a shared one.
    ///
    /// # Errors
    /// The I/O error of writing the tables. The file belongs to the other driver in this case too.
    pub(crate) fn supersede(&self) -> Result<(), Error> {
        self.superseded.store(true, Relaxed);
        let written = self.flush_all_metadata();
        if written.is_ok() {
            self.end_journal();
        }
        let _ = self.run("free the space that is reserved", async |env| free_reserved(&env).await);
        self.files[0].downgrade(&LOCKED);
        written
    }
}

/// The current path of `file`.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if no path leads to the file any longer.
pub(in crate::qcow2) fn path_of(file: &ImageFile) -> Result<PathBuf, Error> {
    let path = &file.path;
    let found = file.metadata().ok().and_then(|mine| {
        // The old path comes first: it may be a symbolic link that must be kept (`prefer_link`).
        let names = [Some(path.to_owned()), file.name_now()];
        let there = |path: &PathBuf| {
            std::fs::metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (mine.dev(), mine.ino()))
        };
        names.into_iter().flatten().find(there)
    });
    found.ok_or_else(|| {
        let message =
            format!("{} was removed, so no overlay can name it as its backing file", path.display());
        Error::new(ErrorKind::Unsupported, message)
    })
}

/// Why the new image uses the page cache; `None` if it uses direct I/O.
fn choose_buffered(top: &Opened, below: &OverlayBase, slice_bytes: u64) -> Result<Option<String>, Error> {
    if let Some(why) = &below.buffered {
        return Ok(Some(why.clone()));
    }
    let mode = choose_file_mode(top, below.requested, below.logical_block_bytes, slice_bytes)?;
    let Some(align) = mode.direct else { return Ok(Some(mode.reason)) };
    if align.memory.max(align.offset) <= below.memory_align {
        return Ok(None);
    }
    let reason = format!(
        "it requires an alignment of {} bytes, but the device's clients align to {} bytes",
        align.memory.max(align.offset),
        below.memory_align
    );
    if below.requested == DirectIo::On {
        let message = format!("no direct I/O on {}: {reason}", top.file.path.display());
        return Err(Error::new(ErrorKind::NoDirectIo, message));
    }
    Ok(Some(reason))
}

//! External snapshots: creates a qcow2 overlay over the active image and opens it as the new active image. No
//! I/O runs meanwhile.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkq::bitmap::BitmapStore;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::lock as locked;
use blkq::{Driver, Error};

use crate::errors::{invalid, unsupported};
use crate::image_file::{ImageFile, LockKind, check_not_longer};
use crate::qcow2::chain::{self, LOCKED, Opened, OverlayBase};
use crate::qcow2::journal::{self, Journals};
use crate::qcow2::tables::state::Layer;
use crate::qcow2::{Qcow2, check_repaired, choose_file_mode, open_writer, slice_bytes};

use super::create::Base;

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
        base.chain.iter().try_for_each(|(file, layer)| file.check_not_truncated(layer.file_bytes))?;
        Ok(base)
    }

    fn chain_from(&self, first: usize) -> OverlayBase {
        let state = locked(&self.shared.state);
        let with_tables = |number: usize| {
            let tables = state.tables(number).cloned();
            (Arc::clone(&self.shared.files[number]), Layer { tables, ..state.layers[number] })
        };
        let chain = (first..state.layers.len()).map(with_tables).collect();
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
        let base = Opened::with_tables(ImageFile::of_open(file, path.to_owned())?)?;
        check_repaired(&base)?;
        if let (Some(all), Some(header)) = (journals, base.header()) {
            journal::check_base(all, &base.file, header.tag, self.identity())?;
        }
        let mut below = self.chain_from(2);
        let bytes = base.size - base.size % u64::from(self.terms.logical_block_bytes);
        // Checked before anything is written to the base.
        let device_bytes = std::mem::replace(&mut below.size, bytes);
        check_not_longer(path, bytes, device_bytes)?;
        let base = Qcow2::on_top(base, below, journals, Some(self.identity()))?;
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
        top.lock(&LOCKED, LockKind::Exclusive, false)?;
        let Some((file, layer)) = below.chain.first() else {
            return Err(invalid("the new overlay has no backing file"));
        };
        chain::check_is_no_link(&file.path)?;
        let base = Base { path: path_of(file)?, qcow2: layer.tables.is_some(), size: below.size };
        let cannot = |e| Error::system("cannot duplicate a descriptor of the new image", e);
        let file = File::from(top.ring_file().try_clone_to_owned().map_err(cannot)?);
        base.write_overlay(&file, path.parent().unwrap_or(Path::new("/")))?;
        top.sync().map_err(|e| Error::system(format!("cannot make {} durable", path.display()), e))?;
        Qcow2::on_top(Opened::with_tables(top)?, below, journals, None)
    }

    /// Builds the device of the image `top`, which is open for writing and locked, over the images of
    /// `below`. `overlay` is the overlay that is committed into `top`, if this is for a block commit.
    fn on_top(
        top: Opened,
        mut below: OverlayBase,
        journals: Option<&Journals>,
        overlay: Option<(u64, u64)>,
    ) -> Result<Qcow2, Error> {
        // `open_writer` reads the file through the page cache. This must happen before direct I/O is set, after
        // which reads have to be aligned.
        let writer = open_writer(&top, false)?;
        let tables = std::iter::once(&top.tables).chain(below.chain.iter().map(|(_, layer)| &layer.tables));
        let slice_bytes = slice_bytes(tables);
        let choose = || choose_file_mode(&top, &below.terms, slice_bytes);
        let mode = below.terms.choose_mode(&top.file.path, choose)?;
        below.terms.buffered = mode.direct.is_none().then_some(mode.reason);
        below.chain.insert(0, top.into_layer(mode.direct)?);
        Qcow2::assemble(below, writer, false, Vec::new())?.start(journals, overlay, true)
    }

    /// Gives the image's file to another driver, which only reads it, even if writing the tables fails.
    /// Writes all tables back, ends the journal and makes the lock a shared one.
    pub(crate) fn supersede(&self) -> Result<(), Error> {
        self.superseded.store(true, Relaxed);
        let written = self.close();
        self.file().downgrade(&LOCKED);
        written
    }
}

/// The current path of `file`. Fails with [`blkq::ErrorKind::Unsupported`] if no path leads to the file any longer.
pub fn path_of(file: &ImageFile) -> Result<PathBuf, Error> {
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
        unsupported(format!("{} was removed, so no overlay can name it as its backing file", path.display()))
    })
}

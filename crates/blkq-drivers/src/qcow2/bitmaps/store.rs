//! Keeps persistent dirty bitmaps in the image. As soon as a bitmap is added or loaded, the image has space
//! for its bits, and the directory names it as in use. The bits are written when the device is detached. If
//! the daemon is killed before that, the bitmap stays marked as in use, so that no program trusts it.

use std::rc::Rc;
use std::sync::Arc;

use blkq::bitmap::{Bitmap, BitmapState};
use blkq::sync::{Mutex, lock as locked};
use blkq::{Error, ErrorKind, IoResult, Status};

use crate::image_file::ImageFile;
use crate::qcow2::format::header::{AUTOCLEAR_AT, AUTOCLEAR_BITMAPS, BitmapsExtension, Header};
use crate::qcow2::io::allocate::change_header;
use crate::qcow2::io::blocking;
use crate::qcow2::io::env::{Env, Shared};
use crate::qcow2::io::flush_metadata::sync;

use super::format::{Layout, Stored, plan_extension, read};
use super::places::{BitmapEntry, Places, adopt, exchange, read_head, store, write, write_extension};

#[derive(Default)]
pub(in crate::qcow2) struct PersistentBitmaps {
    places: Places,
    /// The bitmaps in the image are marked as in use, or the image has none.
    marked: bool,
}

/// The parts of a device that this module needs.
pub(in crate::qcow2) struct Image<'a> {
    pub shared: &'a Arc<Shared>,
    /// The files of the chain, the active image first.
    pub files: &'a [Arc<ImageFile>],
    /// The image is open for writing.
    pub writable: bool,
    pub persistent_bitmaps: &'a Mutex<PersistentBitmaps>,
}

impl Image<'_> {
    /// Loads the dirty bitmaps of the image. If the image is open for writing, marks them as in use there
    /// until [`Image::store_bitmaps`]. Must be called once, before a queue is opened. Returns the bitmaps and
    /// warnings.
    ///
    /// # Errors
    /// The I/O error of the file. A damaged directory is not an error: a warning says that the bitmaps are
    /// lost.
    pub fn load_bitmaps(&self) -> Result<(Vec<Bitmap>, Vec<String>), Error> {
        let shown = self.files[0].path.display();
        let (header, size) = {
            let state = locked(&self.shared.state);
            let tables = state.top().map_err(|e| Error::system(format!("cannot read {shown}"), e))?;
            (tables.header.clone(), tables.header.size)
        };
        let is_trusted = header.autoclear & AUTOCLEAR_BITMAPS != 0;
        if header.bitmaps.is_none() || !is_trusted {
            let lost = header.bitmaps.as_ref().map(|_| {
                format!(
                    "the dirty bitmaps in {shown} are lost, because a program wrote to it without \
                     updating them"
                )
            });
            self.ignore_bitmaps(&header)?;
            return Ok((Vec::new(), Vec::from_iter(lost)));
        }
        let Stored { bitmaps, mut warnings, layout } =
            match read(&self.files[0], &header, size).and_then(|stored| {
                self.check_directory(&stored.layout)?;
                Ok(stored)
            }) {
                Ok(stored) => stored,
                Err(error) if error.kind() == ErrorKind::Format => {
                    self.ignore_bitmaps(&header)?;
                    return Ok((
                        Vec::new(),
                        vec![format!("the dirty bitmaps in {shown} are damaged: {error}")],
                    ));
                }
                Err(error) => return Err(error),
            };
        for bitmap in bitmaps.iter().filter(|bitmap| bitmap.state() == BitmapState::Inconsistent) {
            warnings.push(format!(
                "the bitmap {} in {shown} is inconsistent, because the image was not closed; remove the \
                 bitmap and make a full backup",
                bitmap.name()
            ));
        }
        if self.writable {
            let named: Vec<BitmapEntry> =
                bitmaps.iter().map(|bitmap| BitmapEntry::of(bitmap, size)).collect();
            self.change_places("mark its bitmaps as in use", async move |env, _| {
                if header.autoclear != AUTOCLEAR_BITMAPS {
                    change_header(&env, AUTOCLEAR_AT, &AUTOCLEAR_BITMAPS.to_be_bytes()).await?;
                }
                write(&env, layout.directory, &layout.marked).await?;
                sync(&env).await?;
                Ok(adopt(&env, layout, named).await)
            })?;
            let reserved = self.reserve(bitmaps.iter(), size);
            warnings.extend(reserved.err().map(|error| format!("the bitmaps may not be saved: {error}")));
        }
        Ok((bitmaps, warnings))
    }

    /// Rejects a directory that overlaps a table of the image, because the directory is about to be written.
    fn check_directory(&self, layout: &Layout) -> Result<(), Error> {
        let state = locked(&self.shared.state);
        let clusters = (layout.directory..layout.directory + layout.marked.len() as u64)
            .step_by(1 << state.cluster_bits());
        match state.tables_among(clusters).is_empty() {
            true => Ok(()),
            false => {
                Err(Error::new(ErrorKind::Format, "their directory overlaps another table of the image"))
            }
        }
    }

    /// Clears the autoclear bit, so that no program trusts the bitmaps in the image.
    fn ignore_bitmaps(&self, header: &Header) -> Result<(), Error> {
        locked(self.persistent_bitmaps).marked = true;
        if header.autoclear == 0 || !self.writable {
            return Ok(());
        }
        self.run("change its header", async |env| change_header(&env, AUTOCLEAR_AT, &[0; 4]).await)
    }

    /// Marks bitmaps that were not loaded as outdated. To be called before the image is written to.
    ///
    /// # Errors
    /// The I/O error of the file.
    pub fn mark_bitmaps(&self) -> Result<(), Error> {
        if locked(self.persistent_bitmaps).marked {
            return Ok(());
        }
        let header = locked(&self.shared.state).top().map(|tables| tables.header.clone());
        header.map_or(Ok(()), |header| self.ignore_bitmaps(&header))
    }

    /// Checks whether the header has room for bitmaps.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`], with the reason, if it has not.
    pub fn check_bitmaps(&self) -> Result<(), Error> {
        let of_image = |e: Error| Error::new(e.kind(), format!("{}: {e}", self.files[0].path.display()));
        if !self.writable {
            return Err(of_image(Error::new(ErrorKind::Unsupported, "it is read-only")));
        }
        let head = Arc::new(Mutex::new(Vec::new()));
        let copy = head.clone();
        self.run("read its header", async move |env| {
            *locked(&copy) = read_head(&env).await?;
            Ok(())
        })?;
        let extension = BitmapsExtension { count: 1, directory_bytes: 0, directory: 0 };
        plan_extension(&locked(&head), Some(&extension)).map_err(of_image).map(drop)
    }

    /// Makes the image name exactly `bitmaps`, besides entries that blkq does not know, all in use and with
    /// space for their bits. No queue may do I/O meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the image has an unknown entry with the name of one of `bitmaps`; the
    /// I/O error of the file. The image then keeps the bitmaps that it had.
    pub fn reserve_bitmaps(&self, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
        if !self.writable {
            return Ok(());
        }
        // Before the image grows, the bitmaps already have the new size.
        let size = bitmaps.iter().map(|bitmap| bitmap.size()).fold(self.size(), u64::max);
        self.reserve(bitmaps.iter().map(|bitmap| &**bitmap), size)
    }

    /// Writes the bits of the bitmaps to the image, durably. No queue may do I/O meanwhile, and nothing may
    /// be written to the device afterwards.
    ///
    /// # Errors
    /// The I/O error of the file. The bitmaps in the image then stay marked as in use.
    pub fn store_bitmaps(&self, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
        if !self.writable {
            return Ok(());
        }
        self.reserve(bitmaps.iter().map(|bitmap| &**bitmap), self.size())?;
        let named = bitmaps.iter().map(|bitmap| BitmapEntry::of(bitmap, self.size())).collect();
        let (bitmaps, places) = (bitmaps.to_vec(), locked(self.persistent_bitmaps).places.begin_store(named));
        self.run("save the bitmaps", async move |env| store(&env, &places, &bitmaps).await)
    }

    /// Makes the image name `bitmaps`, for a device of `size` bytes.
    fn reserve<'a>(&self, bitmaps: impl Iterator<Item = &'a Bitmap>, size: u64) -> Result<(), Error> {
        let named: Vec<BitmapEntry> = bitmaps.map(|bitmap| BitmapEntry::of(bitmap, size)).collect();
        if locked(self.persistent_bitmaps).places.has(&named) {
            return Ok(());
        }
        if let Some(name) = locked(self.persistent_bitmaps).places.find_other(&named) {
            let shown = self.files[0].path.display();
            let message = format!("{shown} already has a bitmap {name}, of a kind that blkq does not know");
            return Err(Error::new(ErrorKind::Unsupported, message)
                .with_cure("detach the device, and remove the bitmap with `qemu-img bitmap`"));
        }
        self.change_places("make room for the bitmaps", async |env, old| exchange(&env, old, named).await)
    }

    /// Runs a task that gets the present places and returns the new ones, and stores these.
    fn change_places<F: Future<Output = Result<Places, Status>> + 'static>(
        &self,
        what: &str,
        task: impl FnOnce(Rc<Env>, Places) -> F + 'static,
    ) -> Result<(), Error> {
        let places = Arc::new(Mutex::new(locked(self.persistent_bitmaps).places.clone()));
        let changed = places.clone();
        self.run(what, async move |env| {
            let old = locked(&changed).clone();
            *locked(&changed) = task(env, old).await?;
            Ok(())
        })?;
        *locked(self.persistent_bitmaps) =
            PersistentBitmaps { places: locked(&places).clone(), marked: true };
        Ok(())
    }

    /// The virtual size in the image's header, in bytes.
    fn size(&self) -> u64 {
        locked(&self.shared.state).top().map_or(0, |tables| tables.header.size)
    }

    /// Removes all bitmaps from the header, durably. Their clusters stay allocated.
    ///
    /// # Errors
    /// The I/O error of the file.
    pub fn remove_bitmaps(&self) -> Result<(), Error> {
        let header = locked(&self.shared.state).top().map(|tables| tables.header.clone());
        if header.is_ok_and(|header| header.bitmaps.is_none()) {
            return Ok(());
        }
        self.run("remove the bitmaps", async |env| write_extension(&env, None).await)
    }

    /// Runs a task on this thread. No queue may do I/O meanwhile.
    fn run<F: Future<Output = IoResult> + 'static>(
        &self,
        what: &str,
        task: impl FnOnce(Rc<Env>) -> F,
    ) -> Result<(), Error> {
        blocking::run(self.shared, self.files, &format!("{what} in {}", self.files[0].path.display()), task)
    }
}

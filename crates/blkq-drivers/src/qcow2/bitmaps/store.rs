//! Keeps persistent dirty bitmaps in the image. As soon as a bitmap is added or loaded, the image has space
//! for its bits, and the directory names it as in use. The bits are written when the device is detached. If
//! the daemon is killed before that, the bitmap stays marked as in use, so that no program trusts it.

use std::path::Path;
use std::sync::Arc;

use blkq::bitmap::Bitmap;
use blkq::sync::{Mutex, lock as locked};
use blkq::{Error, ErrorKind, Status};

use crate::bitmaps::{BitmapFormat, Loaded};
use crate::errors::{malformed, unsupported};
use crate::qcow2::format::{AUTOCLEAR_AT, AUTOCLEAR_BITMAPS, BitmapsExtension};
use crate::qcow2::io::allocate::change_header;
use crate::qcow2::io::env::{self, Env, Shared};
use crate::qcow2::io::flush_metadata::sync;

use super::format::{BitmapEntry, Layout, plan_extension, read};
use super::places::{Places, adopt, exchange, read_head, store, write, write_extension};

pub struct Qcow2Bitmaps {
    shared: Arc<Shared>,
    writable: bool,
    places: Mutex<Places>,
}

impl Qcow2Bitmaps {
    pub fn new(shared: &Arc<Shared>, writable: bool) -> Qcow2Bitmaps {
        Qcow2Bitmaps { shared: Arc::clone(shared), writable, places: Mutex::default() }
    }

    /// Rejects a directory that overlaps a table of the image, because the directory is about to be written.
    fn check_directory(&self, loaded: Loaded<Layout>) -> Result<Loaded<Layout>, Error> {
        let state = locked(&self.shared.state);
        let range = |layout: &Layout| layout.directory..layout.directory + layout.marked.len() as u64;
        let range = loaded.place.as_ref().map_or(0..0, range);
        match state.tables_among(range.step_by(1 << state.cluster_bits())).is_empty() {
            true => Ok(loaded),
            false => Err(malformed("their directory overlaps another table of the image")),
        }
    }

    /// Clears the autoclear bit, so that no program trusts the bitmaps in the image.
    fn ignore_bitmaps(&self) -> Result<(), Error> {
        locked(&self.places).marked = true;
        if locked(&self.shared.state).top.header.autoclear == 0 || !self.writable {
            return Ok(());
        }
        self.shared.run("change its header", async |env| change_header(env, AUTOCLEAR_AT, &[0; 4]).await)
    }

    /// Marks bitmaps that were not loaded as outdated. To be called before the image is written to.
    pub fn mark_bitmaps(&self) -> Result<(), Error> {
        let marked = locked(&self.places).marked;
        if marked { Ok(()) } else { self.ignore_bitmaps() }
    }

    /// Makes the image name `bitmaps`, for a device of `size` bytes, besides entries that blkq does not know.
    fn reserve_for(&self, bitmaps: &[&Bitmap], size: u64) -> Result<(), Error> {
        let named: Vec<BitmapEntry> = bitmaps.iter().map(|bitmap| BitmapEntry::of(bitmap, size)).collect();
        if locked(&self.places).has(&named) {
            return Ok(());
        }
        if let Some(name) = locked(&self.places).find_other(&named) {
            let shown = self.path().display();
            return Err(unsupported(format!(
                "{shown} already has a bitmap {name}, of a kind that blkq does not know"
            ))
            .with_hint("detach the device, and remove the bitmap with `qemu-img bitmap`"));
        }
        self.change_places("make room for the bitmaps", async move |env, old| exchange(env, old, named).await)
    }

    /// Runs a task that gets the present places and returns the new ones, and stores these.
    fn change_places(
        &self,
        what: &str,
        task: impl AsyncFnOnce(&Env, Places) -> Result<Places, Status> + 'static,
    ) -> Result<(), Error> {
        let old = locked(&self.places).clone();
        let mut places = self.shared.run(what, async move |env| task(env, old).await)?;
        places.marked = true;
        *locked(&self.places) = places;
        Ok(())
    }

    fn size(&self) -> u64 {
        locked(&self.shared.state).top.header.size
    }

    /// Removes all bitmaps from the header, durably. Their clusters stay allocated.
    pub fn remove_bitmaps(&self) -> Result<(), Error> {
        if locked(&self.shared.state).top.header.bitmaps.is_none() {
            return Ok(());
        }
        self.shared.run("remove the bitmaps", async |env| write_extension(env, None).await)
    }
}

impl BitmapFormat for Qcow2Bitmaps {
    type Place = Layout;

    const INCONSISTENT: &'static str = "the image was not closed";

    fn path(&self) -> &Path {
        self.shared.path()
    }

    fn is_writable(&self) -> bool {
        self.writable
    }

    /// If the bitmaps cannot be trusted, clears the autoclear bit. Must be called once, before a queue is opened.
    fn read(&self) -> Result<Loaded<Layout>, Error> {
        let shown = self.path().display();
        let header = locked(&self.shared.state).top.header.clone();
        let unusable = if header.bitmaps.is_none() {
            None
        } else if header.autoclear & AUTOCLEAR_BITMAPS == 0 {
            Some(format!(
                "the dirty bitmaps in {shown} are lost, because a program wrote to it without updating them"
            ))
        } else {
            let loaded = read(&self.shared.files[0], &header, header.size);
            match loaded.and_then(|loaded| self.check_directory(loaded)) {
                Ok(loaded) => return Ok(loaded),
                Err(error) if error.kind() == ErrorKind::Format => {
                    Some(format!("the dirty bitmaps in {shown} are damaged: {error}"))
                }
                Err(error) => return Err(error),
            }
        };
        self.ignore_bitmaps()?;
        Ok(Loaded::nothing(unusable))
    }

    fn mark(&self, layout: Layout, bitmaps: &[&Bitmap]) -> Result<Option<Error>, Error> {
        let (size, autoclear) = (self.size(), locked(&self.shared.state).top.header.autoclear);
        let named: Vec<BitmapEntry> = bitmaps.iter().map(|bitmap| BitmapEntry::of(bitmap, size)).collect();
        self.change_places("mark its bitmaps as in use", async move |env, _| {
            if autoclear != AUTOCLEAR_BITMAPS {
                change_header(env, AUTOCLEAR_AT, &AUTOCLEAR_BITMAPS.to_be_bytes()).await?;
            }
            write(env, layout.directory, &layout.marked).await?;
            sync(env).await?;
            Ok(adopt(env, layout, named).await)
        })?;
        Ok(self.reserve_for(bitmaps, size).err())
    }

    fn check(&self) -> Result<(), Error> {
        // Without the path of the image, which `ImageBitmaps` adds to the error.
        let head = env::run(&self.shared, "read its header", async |env| read_head(env).await)?;
        let extension = BitmapsExtension { count: 1, directory_bytes: 0, directory: 0 };
        plan_extension(&head, Some(&extension)).map(drop)
    }

    /// Fails with [`ErrorKind::Unsupported`] if the image has an unknown entry with the name of one of `bitmaps`.
    fn reserve(&self, bitmaps: &[&Bitmap]) -> Result<(), Error> {
        // Before the image grows, the bitmaps already have the new size.
        let size = bitmaps.iter().map(|bitmap| bitmap.size()).fold(self.size(), u64::max);
        self.reserve_for(bitmaps, size)
    }

    fn write(&self, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
        let size = self.size();
        self.reserve_for(&bitmaps.iter().map(|bitmap| &**bitmap).collect::<Vec<_>>(), size)?;
        let named = bitmaps.iter().map(|bitmap| BitmapEntry::of(bitmap, size)).collect();
        let (bitmaps, places) = (bitmaps.to_vec(), locked(&self.places).begin_store(named));
        self.shared.run("save the bitmaps", async move |env| store(env, &places, &bitmaps).await)
    }
}

//! The qcow2 driver: an image of QEMU's format, with the images behind it, on the ring of its queue.
//!
//! `header` and `entry` read the format, `chain` opens the files, `state` is what is in memory: tables, slices
//! of tables (`cache`), what is allocated. `io` has operations on the files as futures and the tasks that wait
//! for them, `env` what tasks share. `read` (`inflate`), `write` and `zero` are the tasks; `allocate` finds clusters
//! (`refcounts`), `commit` writes the tables, in an order that survives a power loss. `queue` is the data
//! path, `bitmaps` are the dirty bitmaps in an image, `keep` writes them to their `places`, `blocking` runs
//! tasks without a queue, `create` makes images, `over` one over the image that is served, `extents` and `grow`
//! are for the control plane; `block_commit` has what the image has (`own`, found beside the queue by `slices`)
//! go to the one behind it (`block_commit_base`), with what is written meanwhile (`changes`), and then `empty`
//! of its own. `journal` (`mapping`) has what the file lacks when the process is killed, and `recover` applies it
//! (`replay`) when the image is opened, and frees the clusters that the process leaked (`leaks`, `unlinked`).

mod allocate;
mod bitmaps;
mod block_commit;
mod block_commit_base;
mod blocking;
mod cache;
mod chain;
mod changes;
mod commit;
mod create;
mod empty;
mod entry;
mod env;
mod epochs;
mod extents;
mod grow;
mod header;
mod inflate;
mod io;
mod journal;
mod keep;
mod leaks;
mod mapping;
mod options;
mod over;
mod own;
mod places;
mod queue;
mod read;
mod recover;
mod refcounts;
mod replay;
mod reserve;
mod slices;
mod state;
#[cfg(test)]
#[cfg(not(model_check))]
mod tests;
mod unlinked;
mod write;
mod zero;

use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkq::bitmap::{Bitmap, BitmapStore};
use blkq::sync::atomic::AtomicBool;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::{Mutex, lock as locked};
use blkq::text::shell_word;
use blkq::{DepthExtent, Driver, DriverQueue, Error, ErrorKind, Extent, OpenContext, QueueLimits};

pub use super::r#loop::backing::link_elsewhere;
use super::r#loop::backing::{self, Backing};
use super::r#loop::lock::{self, LockKind};
use super::r#loop::name::ImageName;
use super::r#loop::options::{Mode, choose_mode};
use super::r#loop::{DirectIo, claim};
use super::size::check_logical_block;
pub use block_commit::{BaseImage, BlockCommit, CommitSource};
pub use block_commit_base::{BaseFiles, OpenedBase, Target, open_base};
use cache::{CACHE_BYTES, Cache, SLICE_MAX_BYTES};
use chain::{LOCKED, Opened};
pub use create::Base;
use entry::OFFSET;
use env::Shared;
use header::Header;
pub use journal::Journals;
use keep::{Image, KeptBitmaps};
pub use options::{BackingChain, Qcow2Options};
pub use over::OverlayBase;
use queue::{Qcow2Queue, SEGMENTS_MAX};
use reserve::free_reserved;
use state::{Layer, State, Writer};
use unlinked::Unlinked;

/// Largest read or write, as of the loop driver.
const REQUEST_MAX_BYTES: u32 = 2560 << 9;
/// Largest discard and write zeroes.
const DISCARD_MAX_BYTES: u64 = 1 << 30;
/// How often the last commit is tried: each may leave refcounts of what the one before released.
const COMMITS_MAX: usize = 4;

/// A device backed by a qcow2 image.
pub struct Qcow2 {
    shared: Arc<Shared>,
    /// Those of the chain, the image's own first.
    files: Vec<Arc<File>>,
    name: ImageName,
    path: PathBuf,
    behind: Vec<PathBuf>,
    /// Device and inode of the image.
    identity: (u64, u64),
    /// Whether the image is open for writing.
    writable: bool,
    read_only: AtomicBool,
    /// Another driver has its files.
    superseded: AtomicBool,
    logical_block_bytes: u32,
    memory_align: u32,
    physical_block: u32,
    rotational: bool,
    requested: DirectIo,
    /// Why there is no direct I/O, if there is none.
    buffered: Option<String>,
    version: u32,
    cluster_bytes: u64,
    warnings: Vec<String>,
    /// The dirty bitmaps in the image.
    kept: Mutex<KeptBitmaps>,
}

/// The image itself, with a lock on it.
fn open_top(options: &Qcow2Options) -> Result<(Opened, Option<String>), Error> {
    if options.shared && !options.read_only {
        let message = "a qcow2 image has one writer, and is not shared with others; open it read-only";
        return Err(Error::new(ErrorKind::Invalid, message));
    }
    let mut backing = Backing::open(&options.path, options.read_only)?;
    let kind = LockKind::of(options.read_only, false);
    let warning = lock::acquire(&backing.file, &backing.path, &LOCKED, kind, options.shared)?;
    if !options.shared {
        claim::check(&backing, &LOCKED, options.read_only)?;
    }
    let tables = chain::read_tables(&backing)?;
    chain::prefer_link(&mut backing, &tables.header);
    if !options.read_only {
        check_repaired(&tables.header, &backing.path)?;
    }
    let size = tables.header.size;
    Ok((Opened { backing, tables: Some(tables), size }, warning))
}

/// Rejects an image for writing that is to be repaired first.
fn check_repaired(header: &Header, path: &Path) -> Result<(), Error> {
    let why = match (header.corrupt, header.dirty) {
        (true, _) => "is marked as corrupt",
        (_, true) => "was not closed, and its refcounts may be wrong",
        _ => return Ok(()),
    };
    let shown = path.display();
    let message = format!(
        "{shown} {why}; repair it with `qemu-img check -r all {}`, or open it read-only",
        shell_word(path)
    );
    Err(Error::new(ErrorKind::Unsupported, message))
}

impl Qcow2 {
    /// Opens and locks an image, and those behind it.
    ///
    /// # Errors
    /// One line: what is wrong, why, and the cure. [`ErrorKind::Busy`] if another process has locked one of
    /// the files, [`ErrorKind::Claimed`] if the kernel uses it, [`ErrorKind::BackingFile`] if the image names a
    /// backing file that it may not have: those have what and why, the cure is the caller's.
    pub fn open(options: &Qcow2Options) -> Result<Qcow2, Error> {
        let (top, warning) = open_top(options)?;
        let mut warnings = Vec::from_iter(warning);
        let path = top.backing.path.clone();
        let logical_block_bytes = choose_logical_block(options, &top.backing)?;
        let Some(header) = top.tables.as_ref().map(|tables| tables.header.clone()) else {
            return Err(Error::new(ErrorKind::Format, "not a qcow2 image"));
        };
        let size = header.size - header.size % u64::from(logical_block_bytes);
        if size == 0 {
            return Err(Error::new(ErrorKind::Invalid, format!("{} has no sector", path.display())));
        }
        if size != header.size {
            let left_out = header.size - size;
            warnings.push(format!(
                "the last {left_out} bytes of {} do not fill a sector of {logical_block_bytes} and are left out",
                path.display()
            ));
        }
        let size = options.device_bytes.map_or(size, |bytes| bytes.min(size));
        let journals = options.journals.as_deref();
        let behind = chain::open_behind(&top, options.backing_chain, journals, &mut warnings)?;
        let writer = open_writer(&top, options.read_only)?;
        let smallest = std::iter::once(&top)
            .chain(&behind)
            .filter_map(|one| one.tables.as_ref().map(|tables| tables.header.cluster_bytes()))
            .fold(SLICE_MAX_BYTES, u64::min);
        let chain: Vec<Opened> = std::iter::once(top).chain(behind).collect();
        let (mut layers, mut files, mut memory_align) = (Vec::new(), Vec::new(), 1);
        let (mut paths, mut facts, mut direct) = (Vec::new(), None, Vec::new());
        let mut buffered = None;
        for (number, one) in chain.into_iter().enumerate() {
            let shown = one.backing.path.display();
            let align = if buffered.is_some() {
                None
            } else {
                let mode = choose_file_mode(&one, options.direct_io, logical_block_bytes, smallest)?;
                match mode.direct {
                    Some(align) if align.assumed => warnings.push(format!(
                        "the file system of {shown} does not report what direct I/O demands: 512 bytes are assumed"
                    )),
                    Some(_) => {}
                    None if number == 0 => buffered = Some(mode.reason),
                    None => warnings.push(format!("direct I/O is off for {shown}: {}", mode.reason)),
                }
                mode.direct
            };
            direct.push(align.is_some());
            memory_align = memory_align.max(align.map_or(1, |align| align.memory.max(align.offset)));
            let align = align.map_or(1, |align| u64::from(align.offset));
            let file_bytes = backing::size(&one.backing.file, &one.backing.path)?;
            layers.push(Layer { tables: one.tables, size: one.size, align, file_bytes });
            facts.get_or_insert((one.backing.identity, one.backing.physical_block, one.backing.rotational));
            paths.push(one.backing.path);
            files.push(Arc::new(one.backing.file));
        }
        let (identity, physical_block, rotational) = facts.unwrap_or(((0, 0), 512, false));
        let cache = Cache::new(CACHE_BYTES, smallest as usize);
        let state = State { layers, cache, size, writer, commits: 0, journal: None };
        let device = Qcow2 {
            shared: Shared::new(state),
            files,
            name: ImageName::new(&path),
            path,
            behind: paths.split_off(1),
            identity,
            writable: !options.read_only,
            read_only: AtomicBool::new(options.read_only),
            superseded: AtomicBool::new(false),
            logical_block_bytes,
            memory_align,
            physical_block,
            rotational,
            requested: options.direct_io,
            buffered,
            version: header.version,
            cluster_bytes: header.cluster_bytes(),
            warnings,
            kept: Mutex::new(KeptBitmaps::default()),
        };
        let device = device.begin_journal(journals, None)?;
        device.set_direct(&direct)?;
        Ok(device)
    }

    /// The image, for what keeps its bitmaps.
    fn image(&self) -> Image<'_> {
        let Qcow2 { shared, files, path, writable, kept, .. } = self;
        Image { shared, files, path, writable: *writable, kept }
    }

    /// The device and the inode of the image.
    pub(crate) fn identity(&self) -> (u64, u64) {
        self.identity
    }

    /// The image itself.
    pub(crate) fn file(&self) -> &File {
        &self.files[0]
    }

    /// Runs a task while no queue does I/O.
    fn run<F: Future<Output = blkq::IoResult> + 'static>(
        &self,
        what: &str,
        task: impl FnOnce(std::rc::Rc<env::Env>) -> F,
    ) -> Result<(), Error> {
        blocking::run(&self.shared, &self.files, &format!("{what} in {}", self.path.display()), task)
    }

    /// Writes all tables, and makes them durable.
    fn write_back(&self) -> Result<(), Error> {
        if !self.writable {
            return Ok(());
        }
        for _ in 0..COMMITS_MAX {
            if !locked(&self.shared.state).is_dirty() {
                break;
            }
            self.run("write the tables", async |env| commit::commit(&env, true).await)?;
        }
        Ok(())
    }

    /// The image: absolute, without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// How one file of a chain is read and written if `requested` is asked for: by the rule of raw images
/// ([`choose_mode`]). Direct I/O must suit its tables too, which are read in units of `slice` bytes, and the last sector
/// of the image, which may be read alone.
///
/// # Errors
///
/// Returns [`ErrorKind::NoDirectIo`] and the like if direct I/O is demanded and impossible.
fn choose_file_mode(image: &Opened, requested: DirectIo, block: u32, slice: u64) -> Result<Mode, Error> {
    let path = &image.backing.path;
    let mode = choose_mode(requested, &image.backing.direct, path, block, 0)?;
    let Some(align) = mode.direct else { return Ok(mode) };
    let unit = u64::from(align.offset.max(align.memory));
    if (512..=slice).contains(&u64::from(align.offset)) && image.size.is_multiple_of(unit) {
        return Ok(mode);
    }
    let reason = format!(
        "it demands an alignment of {unit} bytes, which its size of {} bytes or the tables of the chain do not have",
        image.size
    );
    if requested == DirectIo::On {
        return Err(Error::new(
            ErrorKind::NoDirectIo,
            format!("no direct I/O on {}: {reason}", path.display()),
        ));
    }
    Ok(Mode { direct: None, reason })
}

fn choose_logical_block(options: &Qcow2Options, backing: &Backing) -> Result<u32, Error> {
    if let Some(bytes) = options.logical_block_bytes {
        return check_logical_block(bytes);
    }
    let demanded = match &backing.direct {
        Ok(align) if options.direct_io == DirectIo::On => align.offset.max(align.memory),
        _ => 512,
    };
    Ok(demanded.max(backing.logical_block).clamp(512, 4096).next_power_of_two())
}

/// The state of a writer, read from the image.
fn open_writer(top: &Opened, read_only: bool) -> Result<Writer, Error> {
    let file_bytes = backing::size(&top.backing.file, &top.backing.path)?;
    let (mut refcount_table, mut bits) = (Vec::new(), 16);
    if let Some(tables) = top.tables.as_ref().filter(|_| !read_only) {
        let header = &tables.header;
        bits = header.cluster_bits;
        let entries = (u64::from(header.refcount_table_clusters) << bits) / 8;
        refcount_table = chain::read_numbers(&top.backing, header.refcount_table_offset, entries as usize)?;
        // The other bits are reserved: an entry without an offset is none.
        refcount_table.iter_mut().for_each(|block| *block &= OFFSET);
        let mut blocks = HashSet::new();
        if refcount_table.iter().any(|block| *block != 0 && !blocks.insert(*block)) {
            let shown = top.backing.path.display();
            let message = format!(
                "the refcount table of {shown} names a block twice; repair it with `qemu-img check -r all \
                 {shown}`, or open it read-only"
            );
            return Err(Error::new(ErrorKind::Format, message));
        }
    }
    let block_device = top.backing.block_device;
    Ok(Writer {
        refcount_table,
        refcount_table_dirty: BTreeSet::new(),
        l1_dirty: BTreeSet::new(),
        next_free: 0,
        // A block device has old data behind the image.
        fresh_from: if block_device { u64::MAX } else { file_bytes.div_ceil(1 << bits) },
        extended_to: (!block_device).then_some(file_bytes),
        extending: false,
        clusters_max: if block_device { file_bytes >> bits } else { 1 << (56 - bits) },
        released: Vec::new(),
        unlinked: Unlinked::default(),
        locked: HashSet::new(),
        changing: 0,
        making_l2: HashSet::new(),
        growing: false,
        committing: false,
        failed: false,
    })
}

impl Driver for Qcow2 {
    fn name(&self) -> &'static str {
        "qcow2"
    }

    fn uses_ring(&self) -> bool {
        true
    }

    fn queues_max(&self) -> usize {
        // The tables have one owner.
        1
    }

    fn limits(&self) -> QueueLimits {
        let read_only = self.read_only.load(Relaxed);
        // Without zero flags, what is behind an image would show through.
        let unmaps = !read_only && (self.version >= 3 || self.behind.is_empty());
        let most = |able: bool| if able { DISCARD_MAX_BYTES } else { 0 };
        QueueLimits {
            capacity_bytes: locked(&self.shared.state).size,
            logical_block_bytes: self.logical_block_bytes,
            physical_block_bytes: self.physical_block.max(self.logical_block_bytes),
            max_request_bytes: REQUEST_MAX_BYTES,
            max_segments: SEGMENTS_MAX,
            memory_align: self.memory_align,
            max_discard_bytes: most(unmaps),
            discard_granularity: (self.cluster_bytes as u32).max(self.logical_block_bytes),
            max_write_zeroes_bytes: most(unmaps),
            max_write_zeroes_no_unmap_bytes: most(!read_only && self.version >= 3),
            write_cache: !read_only,
            read_only,
            rotational: self.rotational,
            page_cache: self.buffered.is_some(),
            ..QueueLimits::default()
        }
    }

    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        if self.writable {
            self.image().mark_bitmaps()?;
        }
        if let Some(journal) = &mut locked(&self.shared.state).journal {
            journal.set_own();
        }
        let ring =
            cx.ring.ok_or_else(|| Error::new(ErrorKind::Invalid, "the qcow2 driver needs an io_uring"))?;
        let shared = Arc::clone(&self.shared);
        Ok(Box::new(Qcow2Queue::open(shared, &self.files, self.writable, (cx.tags, cx.wake), ring)?))
    }

    fn extents(&self, range: Range<u64>, max: usize) -> Result<Vec<Extent>, Error> {
        extents::of_chain(&self.shared, &self.files, range, max)
            .map_err(|e| Error::system(format!("cannot find the holes of {}", self.path.display()), e))
    }

    fn allocation_depths(&self, range: Range<u64>, max: usize) -> Result<Vec<DepthExtent>, Error> {
        extents::depths(&self.shared, &self.files, range, max)
            .map_err(|e| Error::system(format!("cannot find what {} has", self.path.display()), e))
    }

    fn set_read_only(&self, read_only: bool) -> Result<(), Error> {
        if !read_only && !self.writable {
            let message = format!("{} was opened read-only; open it anew for writing", self.path.display());
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        self.write_back()?;
        self.read_only.store(read_only, Relaxed);
        Ok(())
    }

    fn is_lost_with_process(&self) -> bool {
        self.writable && locked(&self.shared.state).journal.is_none()
    }

    fn prepare_resize(&self, bytes: Option<u64>) -> Result<u64, Error> {
        let (now, image) = {
            let state = locked(&self.shared.state);
            (state.size, state.layers[0].size)
        };
        let bytes = bytes.unwrap_or(image - image % u64::from(self.logical_block_bytes));
        if bytes == now {
            return Ok(now);
        }
        let refused = |why: &str, cure: &str| {
            let message = format!("{} cannot have {bytes} bytes: {why}", self.path.display());
            Err(Error::new(ErrorKind::Unsupported, message).with_cure(cure))
        };
        let elsewhere = "resize it with qemu-img while nothing has it open";
        if bytes < now {
            let why = format!("a qcow2 image does not shrink while it is served; it has {now}");
            return refused(&why, elsewhere);
        }
        if !bytes.is_multiple_of(u64::from(self.logical_block_bytes)) {
            return refused(&format!("they are not whole sectors of {}", self.logical_block_bytes), "");
        }
        if self.read_only.load(Relaxed) {
            return refused("it is read-only", "");
        }
        match grow::room(&locked(&self.shared.state)) {
            room if bytes > room => refused(&format!("its L1 table has room for {room}"), elsewhere),
            _ => Ok(bytes),
        }
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), Error> {
        let bytes = self.prepare_resize(bytes)?;
        {
            let mut state = locked(&self.shared.state);
            // A part of the image was served.
            if bytes <= state.layers[0].size {
                state.size = bytes;
                return Ok(());
            }
        }
        self.run("change the size", move |env| async move { grow::grow(&env, bytes).await })
    }

    fn bitmap_store(&self) -> Option<&dyn BitmapStore> {
        Some(self)
    }

    fn warnings(&self) -> Vec<String> {
        let buffered = self.buffered.as_ref().filter(|_| self.requested == DirectIo::Auto);
        let buffered = buffered.map(|why| format!("direct I/O is off: {why}"));
        buffered.into_iter().chain(self.warnings.iter().cloned()).collect()
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let name = self.files.first().map(|file| self.name.now(file));
        let behind: Vec<String> = self.behind.iter().map(|path| path.display().to_string()).collect();
        vec![
            ("backing-file", name.unwrap_or_default()),
            ("backing-device", format!("{}:{}", libc::major(self.identity.0), libc::minor(self.identity.0))),
            ("backing-inode", self.identity.1.to_string()),
            ("offset", "0".to_owned()),
            ("size-limit", "none".to_owned()),
            ("format", format!("qcow2, version {}", self.version)),
            ("cluster-size", self.cluster_bytes.to_string()),
            ("backing-chain", if behind.is_empty() { "none".to_owned() } else { behind.join(", ") }),
            ("direct-io-requested", self.requested.name().to_owned()),
            ("direct-io", if self.buffered.is_some() { "off" } else { "on" }.to_owned()),
            ("direct-io-reason", self.buffered.clone().unwrap_or_default()),
            ("tables-failed", locked(&self.shared.state).writer.failed.to_string()),
        ]
    }
}

impl BitmapStore for Qcow2 {
    fn load(&self) -> Result<(Vec<Bitmap>, Vec<String>), Error> {
        self.image().load_bitmaps()
    }

    fn check(&self) -> Result<(), Error> {
        self.image().check_bitmaps()
    }

    /// The image itself has them.
    fn set_file(&self, _file: File) -> Result<(), Error> {
        self.image().check_bitmaps()
    }

    fn reserve(&self, all: &[Arc<Bitmap>]) -> Result<(), Error> {
        self.image().reserve_bitmaps(all)
    }

    fn store(&self, all: &[Arc<Bitmap>]) -> Result<(), Error> {
        self.image().store_bitmaps(all)
    }
}

impl Drop for Qcow2 {
    fn drop(&mut self) {
        if self.superseded.load(Relaxed) {
            return;
        }
        // The last flush has written what clients were promised; this frees what they discarded, and what
        // was reserved.
        if self.writable && self.write_back().is_ok() {
            self.end_journal();
            let _ = self.run("free the space that is reserved", async |env| free_reserved(&env).await);
        }
        if let Some(file) = self.files.first() {
            // A ring may keep the file open for longer than the device is used.
            lock::release(file, &LOCKED);
        }
    }
}

//! The qcow2 driver. It serves an image in QEMU's format, together with its chain of backing files, on the
//! io_uring of one queue.
//!
//! The modules, each of which names only those before it:
//!
//! * `format`: parses and builds the structures of the format.
//! * `journal`: keeps completed writes if the process is killed.
//! * `tables`: the tables of the image in memory. `chain` reads them from the files of a chain.
//! * `io`: operations on the files, the tasks that use them, the queue, and the flush of metadata.
//! * `bitmaps`: saves the persistent dirty bitmaps in the image.
//! * `jobs`: recovery after a kill or a power loss, overlays, external snapshots and block commit.

mod bitmaps;
mod chain;
mod format;
mod io;
mod jobs;
mod journal;
mod tables;
#[cfg(test)]
#[cfg(not(model_check))]
mod tests;

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use blkq::bitmap::BitmapStore;
use blkq::sync::atomic::AtomicBool;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::lock as locked;
use blkq::text::shell_word;
use blkq::{DepthExtent, Driver, DriverQueue, Error, ErrorKind, Extent, OpenContext, QueueLimits};

use crate::bitmaps::ImageBitmaps;
use crate::errors::{invalid, malformed, unsupported};
use crate::extents::query_until_ns;
pub use crate::image_file::link_elsewhere;
use crate::image_file::{
    ClientTerms, DirectAlign, ImageFile, ImageName, LockKind, Mode, WHOLE_FILE, buffered, choose_mode,
};
pub use crate::options::{BackingChain, DriverOptions, Journals};
use crate::options::{DirectIo, refuse_file_options};

use bitmaps::places::Qcow2Bitmaps;
pub use chain::{BackingFile, OverlayBase, backing_files};
use format::{Header, OFFSET, SLICE_MAX_BYTES};
use io::allocate::free_reserved;
use io::blocking_reader::BlockingReader;
use io::env::Shared;
use io::flush_metadata::flush_metadata;
use io::grow::{grow, room};
use io::queue::{Qcow2Queue, SEGMENTS_MAX};
pub use jobs::block_commit::{BaseFiles, BlockCommit, CommitSource, OpenedBase, Target, open_base};
pub use jobs::overlay::Base;
use tables::cache::{CACHE_BYTES, Cache};
use tables::state::{Layer, State, Writer};

/// Largest read or write in bytes, the same as of the loop driver.
const REQUEST_MAX_BYTES: u32 = 2560 << 9;
const DISCARD_MAX_BYTES: u64 = 1 << 30;
/// Attempts to write all tables back. A flush counts down the refcounts of the clusters that were released
/// before it, and so makes refcount blocks dirty for the next one.
const FLUSHES_MAX: usize = 4;

/// A device backed by a qcow2 image.
pub struct Qcow2 {
    shared: Arc<Shared>,
    name: ImageName,
    writable: bool,
    /// Accessed with `Relaxed`, like `superseded`: no other memory depends on these flags.
    read_only: AtomicBool,
    /// Another driver uses the image's file now, so that dropping this driver must not write to it.
    superseded: AtomicBool,
    terms: ClientTerms,
    warnings: Vec<String>,
    bitmaps: ImageBitmaps<Qcow2Bitmaps>,
}

/// The size of a cached slice in bytes, which must not exceed a cluster of any image in the chain.
fn slice_bytes<'a>(chain: impl IntoIterator<Item = &'a Layer>) -> u64 {
    chain.into_iter().filter_map(Layer::header).map(Header::cluster_bytes).fold(SLICE_MAX_BYTES, u64::min)
}

fn check_repaired(image: &Layer) -> Result<(), Error> {
    let why = match image.header() {
        Some(header) if header.corrupt => "is marked as corrupt",
        Some(header) if header.dirty => "was not closed, and its refcounts may be wrong",
        _ => return Ok(()),
    };
    let path = &image.file.path;
    Err(unsupported(format!("{} {why}", path.display())).with_hint(repair_hint(path)).or_read_only())
}

/// The hint for an image whose tables are wrong or contradict each other.
fn repair_hint(path: &Path) -> String {
    format!("repair it with `qemu-img check -r all {}`", shell_word(path))
}

impl Qcow2 {
    /// Opens and locks an image and its backing files.
    ///
    /// # Errors
    /// The message has one line: what is wrong, why, and a hint. [`blkq::ErrorKind::Busy`] if another process has
    /// locked one of the files, [`blkq::ErrorKind::Claimed`] if the kernel uses the image,
    /// [`blkq::ErrorKind::BackingFile`] if the image names a backing file that `options` does not allow. The last
    /// two have no hint, because the caller knows its own options.
    pub fn open(options: &DriverOptions) -> Result<Qcow2, Error> {
        refuse_file_options("qcow2", true, options)?;
        if options.shared && !options.read_only {
            let message = "a qcow2 image has one writer and cannot be shared; open it read-only";
            return Err(invalid(message));
        }
        let file = ImageFile::open(&options.path, options.read_only)?;
        let kind = LockKind::of(options.read_only, options.shared);
        let mut warnings = Vec::from_iter(file.lock(&WHOLE_FILE, kind)?);
        if !options.shared {
            file.check_unclaimed(&WHOLE_FILE, options.read_only)?;
        }
        let top = Layer::with_tables(file)?;
        if !options.read_only {
            check_repaired(&top)?;
        }
        let shown = top.file.path.display();
        let logical_block_bytes =
            top.file.choose_logical_block(options.logical_block_bytes, options.direct_io)?;
        let size = top.size - top.size % u64::from(logical_block_bytes);
        if size == 0 {
            let message = format!("{shown} is smaller than one sector of {logical_block_bytes} bytes");
            return Err(invalid(message));
        }
        if size != top.size {
            warnings.push(format!(
                "the last {} bytes of {shown} do not fill a sector of {logical_block_bytes} bytes and are \
                 not served",
                top.size - size
            ));
        }
        let size = options.device_bytes.map_or(size, |bytes| bytes.min(size));
        let journals = options.journals.as_deref();
        let mut chain = chain::open_chain(top, options.backing_chain, journals, &mut warnings)?;
        let writer = open_writer(&chain[0], options.read_only)?;
        let slice_bytes = slice_bytes(&chain);
        let requested = options.direct_io;
        let mut terms = ClientTerms { logical_block_bytes, memory_align: 1, requested, buffered: None };
        for (number, layer) in chain.iter_mut().enumerate() {
            if terms.buffered.is_none() {
                let mode = choose_file_mode(layer, &terms, slice_bytes)?;
                let shown = layer.file.path.display();
                match mode.direct {
                    Some(align) if align.assumed => warnings.push(format!(
                        "the file system of {shown} does not report its alignment for direct I/O; 512 \
                         bytes are assumed"
                    )),
                    Some(_) => {}
                    None if number == 0 => terms.buffered = Some(mode.reason),
                    None => warnings.push(format!("direct I/O is off for {shown}: {}", mode.reason)),
                }
                layer.set_align(mode.direct);
                terms.memory_align = terms.memory_align.max(mode.direct.map_or(1, DirectAlign::largest));
            }
        }
        let image = OverlayBase { chain, size, terms };
        let mut device = Qcow2::assemble(image, writer, options.read_only)?;
        device.warnings = warnings;
        device.start(journals, None, options.device_bytes.is_some())
    }

    /// The device of `image`. [`Qcow2::start`] must follow.
    fn assemble(image: OverlayBase, writer: Writer, read_only: bool) -> Result<Qcow2, Error> {
        let OverlayBase { chain: mut layers, size, terms } = image;
        let cache = Cache::new(CACHE_BYTES, slice_bytes(&layers) as usize);
        let files = layers.iter().map(|layer| Arc::clone(&layer.file)).collect();
        let Some(top) = layers.first_mut().and_then(|layer| layer.tables.take()) else {
            return Err(malformed("not a qcow2 image"));
        };
        let state = State { top, layers, cache, size, writer, flushes: 0, journal: None };
        let shared = Shared::new(state, files);
        let bitmaps = Qcow2Bitmaps::new(&shared, !read_only);
        Ok(Qcow2 {
            name: ImageName::new(shared.path()),
            shared,
            writable: !read_only,
            read_only: AtomicBool::new(read_only),
            superseded: AtomicBool::new(false),
            terms,
            warnings: Vec::new(),
            bitmaps: ImageBitmaps(bitmaps),
        })
    }

    /// `overlay` is the overlay that a block commit commits into this image. `in_use`: clients use the device already,
    /// and wait until it is open.
    fn start(
        self,
        journals: Option<&Journals>,
        overlay: Option<(u64, u64)>,
        in_use: bool,
    ) -> Result<Qcow2, Error> {
        let device = self.begin_journal(journals, overlay, in_use)?;
        // Set after `begin_journal`, whose change of the header may go through the page cache and then need not
        // wait for the disk.
        for layer in &locked(&device.shared.state).layers {
            layer.file.set_direct(layer.align > 1)?;
        }
        Ok(device)
    }

    pub(crate) fn file(&self) -> &ImageFile {
        &self.shared.files[0]
    }

    /// Makes all writes durable. No queue may do I/O meanwhile.
    fn sync(&self) -> Result<(), Error> {
        // A flush of its own, because data that was overwritten in place makes no table dirty.
        self.shared.run("make the data durable", async |env| flush_metadata(env, true).await)?;
        self.flush_all_metadata()
    }

    /// Flushes all metadata, durably, until no table in memory is dirty; nothing if the image is read-only.
    fn flush_all_metadata(&self) -> Result<(), Error> {
        if !self.writable {
            return Ok(());
        }
        for _ in 0..FLUSHES_MAX {
            if !locked(&self.shared.state).is_dirty() {
                break;
            }
            self.shared.run("write the tables", async |env| flush_metadata(env, true).await)?;
        }
        Ok(())
    }

    /// Writes all tables back, which frees discarded clusters, then ends the journal. Frees reserved space in any case.
    fn close(&self) -> Result<(), Error> {
        let written = self.flush_all_metadata();
        if written.is_ok() {
            self.end_journal();
        }
        let _ = self.shared.run("free the space that is reserved", async |env| free_reserved(env).await);
        written
    }

    /// The path of the image: absolute, with symbolic links resolved unless `prefer_link` chose the link.
    pub fn path(&self) -> &Path {
        self.shared.path()
    }
}

/// Chooses direct or buffered I/O for one file of a chain, by the rule of raw images ([`choose_mode`]).
/// Direct I/O must also suit the tables, which are read in units of `slice` bytes, and the end of the image,
/// because the last sector may be read alone. Fails with [`blkq::ErrorKind::NoDirectIo`] if `terms` demand
/// what is impossible.
fn choose_file_mode(image: &Layer, terms: &ClientTerms, slice: u64) -> Result<Mode, Error> {
    let path = &image.file.path;
    let mode = choose_mode(terms.requested, &image.file.direct, path, terms.logical_block_bytes, 0)?;
    let Some(align) = mode.direct else { return Ok(mode) };
    let unit = u64::from(align.largest());
    if (512..=slice).contains(&u64::from(align.offset)) && image.size.is_multiple_of(unit) {
        return Ok(mode);
    }
    let reason = format!(
        "it requires an alignment of {unit} bytes, which the image size ({} bytes) or the tables of the \
         chain do not have",
        image.size
    );
    buffered(terms.requested, path, reason, ErrorKind::NoDirectIo)
}

fn open_writer(top: &Layer, read_only: bool) -> Result<Writer, Error> {
    let file_bytes = top.file.size()?;
    let (mut refcount_table, mut bits) = (Vec::new(), 16);
    if let Some(header) = top.header().filter(|_| !read_only) {
        bits = header.cluster_bits;
        let entries = (u64::from(header.refcount_table_clusters) << bits) / 8;
        refcount_table = chain::read_numbers(&top.file, header.refcount_table_offset, entries as usize)?;
        // The other bits of an entry are reserved. An entry without an offset names no block.
        refcount_table.iter_mut().for_each(|block| *block &= OFFSET);
        let mut blocks = HashSet::new();
        if refcount_table.iter().any(|block| *block != 0 && !blocks.insert(*block)) {
            let path = &top.file.path;
            let error = malformed(format!("the refcount table of {} names a block twice", path.display()));
            return Err(error.with_hint(repair_hint(path)).or_read_only());
        }
    }
    let block_device = top.file.block_device;
    Ok(Writer {
        refcount_table,
        // Clusters at the end of a block device contain old data; they never read as zeroes.
        fresh_from: if block_device { u64::MAX } else { file_bytes.div_ceil(1 << bits) },
        extended_to: (!block_device).then_some(file_bytes),
        clusters_max: if block_device { file_bytes >> bits } else { 1 << (56 - bits) },
        // Only the page cache may have it.
        tag_is_new: top.header().is_some_and(|header| header.tag != 0),
        ..Writer::default()
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
        // One queue changes the tables in memory; a second one would need its own copy.
        1
    }

    fn limits(&self) -> QueueLimits {
        let read_only = self.read_only.load(Relaxed);
        let state = locked(&self.shared.state);
        let header = &state.top.header;
        // Without zero flags (version 2) a discard would make the data of the backing file visible.
        let unmaps = !read_only && (header.version >= 3 || self.shared.files.len() == 1);
        let most = |able: bool| if able { DISCARD_MAX_BYTES } else { 0 };
        QueueLimits {
            capacity_bytes: state.size,
            logical_block_bytes: self.terms.logical_block_bytes,
            physical_block_bytes: self.file().physical_block.max(self.terms.logical_block_bytes),
            max_request_bytes: REQUEST_MAX_BYTES,
            max_segments: SEGMENTS_MAX,
            memory_align: self.terms.memory_align,
            max_discard_bytes: most(unmaps),
            discard_granularity: (header.cluster_bytes() as u32).max(self.terms.logical_block_bytes),
            max_write_zeroes_bytes: most(unmaps),
            max_write_zeroes_no_unmap_bytes: most(!read_only && header.version >= 3),
            write_cache: !read_only,
            read_only,
            rotational: self.file().rotational,
            page_cache: self.terms.buffered.is_some(),
            ..QueueLimits::default()
        }
    }

    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        if self.writable {
            self.bitmaps.0.mark_bitmaps()?;
        }
        if let Some(journal) = &mut locked(&self.shared.state).journal {
            journal.set_overlay(None);
        }
        let ring = cx.ring.ok_or_else(|| invalid("the qcow2 driver needs an io_uring"))?;
        let shared = Arc::clone(&self.shared);
        Ok(Box::new(Qcow2Queue::open(shared, self.writable, (cx.tags, cx.wake), ring)?))
    }

    fn extents(&self, range: Range<u64>, max: usize) -> Result<Vec<Extent>, Error> {
        let found = BlockingReader::new(&self.shared).extents(range, max, query_until_ns());
        found.map_err(|e| self.file().failed("read the extents of", e))
    }

    fn allocation_depths(&self, range: Range<u64>, max: usize) -> Result<Vec<DepthExtent>, Error> {
        let found = BlockingReader::new(&self.shared).depths(range, max, query_until_ns());
        found.map_err(|e| self.file().failed("read the allocation of", e))
    }

    fn set_read_only(&self, read_only: bool) -> Result<(), Error> {
        if !read_only && !self.writable {
            let message = format!("{} is open read-only; open it again for writing", self.path().display());
            return Err(unsupported(message));
        }
        self.flush_all_metadata()?;
        self.read_only.store(read_only, Relaxed);
        Ok(())
    }

    fn is_lost_with_process(&self) -> bool {
        self.writable && locked(&self.shared.state).journal.is_none()
    }

    fn prepare_resize(&self, bytes: Option<u64>) -> Result<u64, Error> {
        let (now, image, room) = {
            let state = locked(&self.shared.state);
            (state.size, state.layers[0].size, room(&state))
        };
        let sector = u64::from(self.terms.logical_block_bytes);
        let bytes = bytes.unwrap_or(image - image % sector);
        if bytes == now {
            return Ok(now);
        }
        let offline = "detach the device and run qemu-img resize";
        let (why, hint) = if bytes < now {
            (format!("a qcow2 image in use cannot shrink, and its size is {now} bytes"), offline)
        } else if !bytes.is_multiple_of(sector) {
            (format!("the size is not a multiple of the sector size, {sector} bytes"), "")
        } else if self.read_only.load(Relaxed) {
            ("it is read-only".to_owned(), "")
        } else if bytes > room {
            (format!("its L1 table maps {room} bytes and cannot grow while the image is in use"), offline)
        } else {
            return Ok(bytes);
        };
        let message = format!("cannot resize {} to {bytes} bytes: {why}", self.path().display());
        Err(unsupported(message).with_hint(hint))
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), Error> {
        let bytes = self.prepare_resize(bytes)?;
        {
            let mut state = locked(&self.shared.state);
            // The device uses only a part of the image, so the image itself need not change.
            if bytes <= state.layers[0].size {
                state.size = bytes;
                return Ok(());
            }
        }
        self.shared.run("change the size", async move |env| grow(env, bytes).await)
    }

    fn bitmap_store(&self) -> Option<&dyn BitmapStore> {
        Some(&self.bitmaps)
    }

    fn warnings(&self) -> Vec<String> {
        let buffered = self.terms.buffered.as_ref().filter(|_| self.terms.requested == DirectIo::Auto);
        let buffered = buffered.map(|why| format!("direct I/O is off: {why}"));
        buffered.into_iter().chain(self.warnings.iter().cloned()).collect()
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let (device, inode) = self.file().identity;
        let shown = |file: &Arc<ImageFile>| file.path.display().to_string();
        let chain: Vec<String> = self.shared.files[1..].iter().map(shown).collect();
        let chain = if chain.is_empty() { "none".to_owned() } else { chain.join(", ") };
        let name = self.name.now(self.file());
        let state = locked(&self.shared.state);
        vec![
            ("backing-file", name),
            ("backing-device", format!("{}:{}", libc::major(device), libc::minor(device))),
            ("backing-inode", inode.to_string()),
            ("offset", "0".to_owned()),
            ("size-limit", "none".to_owned()),
            ("format", format!("qcow2, version {}", state.top.header.version)),
            ("cluster-size", state.top.header.cluster_bytes().to_string()),
            ("backing-chain", chain),
            ("direct-io-requested", self.terms.requested.name().to_owned()),
            ("direct-io", if self.terms.buffered.is_some() { "off" } else { "on" }.to_owned()),
            ("direct-io-reason", self.terms.buffered.clone().unwrap_or_default()),
            ("tables-failed", state.writer.failed.to_string()),
        ]
    }
}

impl Drop for Qcow2 {
    fn drop(&mut self) {
        if self.superseded.load(Relaxed) {
            return;
        }
        // The last flush has written everything that clients were promised, so errors are ignored.
        if self.writable {
            let _ = self.close();
        }
        // Released explicitly, because a ring may keep a reference to the file for longer than the device exists.
        self.file().unlock(&WHOLE_FILE);
    }
}

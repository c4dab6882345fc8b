//! The loop driver: serves a regular file or a block device as raw data, with direct I/O or through the page
//! cache.
//!
//! - `options`: the options, and the part of the image that is served. The image itself is an `image_file`.
//! - `queue`: the data path of one queue. `image` builds the submissions, `outcome` interprets the results,
//!   `progress` is the state of a call, `writer` the token that admits one writing queue at a time, `tail` the
//!   end of a device whose size is not a multiple of the sector size, `counters` the statistics.
//! - `base`: switches a device to the raw backing file of its image after a commit.
//! - `bitmaps`, `bitmap_file`, `bitmap_format`: the persistent dirty bitmaps in a file beside the image.
//!   `fingerprint` detects that another program has written to the image since they were saved.

mod base;
mod bitmap_file;
mod bitmap_format;
mod bitmaps;
mod counters;
mod fingerprint;
mod image;
mod options;
mod outcome;
mod progress;
mod queue;
mod shared;
mod tail;
#[cfg(test)]
#[cfg(not(model_check))]
pub(super) mod tests;
mod writer;

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use blkq::bitmap::BitmapStore;
use blkq::layout::CachePadded;
use blkq::sync::atomic::AtomicBool;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::{Mutex, lock as locked};
use blkq::{Change, Driver, DriverQueue, DriverSetting, Error, ErrorKind, Extent, OpenContext, QueueLimits};

use crate::bitmaps::ImageBitmaps;
use crate::errors::{invalid, malformed, unsupported};
use crate::extents::query_until_ns;
use crate::image_file::{
    ClientTerms, DirectAlign, ImageFile, ImageName, LockKind, Mode, RawImage, WHOLE_FILE, choose_mode,
};

pub use crate::image_file::DirectIo;
pub use bitmap_file::is_bitmap_file;
use bitmaps::FileBitmaps;
pub use counters::{LoopCounters, LoopSnapshot};
use options::Window;
pub use options::{Dispatch, LoopOptions, LoopSetting};
use queue::LoopQueue;
use shared::{REQUEST_MAX_BYTES, SEGMENTS_MAX, Shared, State};
use writer::{QUEUES_MAX, WriterToken};

/// Each discard and write zeroes is one call of the file system, and an engine must not wait long for one.
const DISCARD_MAX_BYTES: u64 = 1 << 30;

/// Opens the image again, through the page cache, for the last bytes of a device.
fn tail_file(file: &ImageFile, writable: bool) -> Result<Arc<ImageFile>, Error> {
    let tail = file.reopen(writable)?;
    // The kernel must cache only the page that `tail` reserves for the page cache, and none that direct I/O uses.
    tail.turn_off_read_ahead()?;
    Ok(Arc::new(tail))
}

struct Chosen {
    window: Window,
    mode: Mode,
    size: u64,
    /// See [`Shared::synced`].
    synced: ImageFile,
    bitmaps: bitmaps::Place,
    warnings: Vec<String>,
}

/// A device backed by an image.
pub struct LoopDevice {
    shared: Arc<Shared>,
    name: ImageName,
    shared_use: bool,
    /// Another driver in this process uses the open file and its locks, so this one must not release them.
    superseded: AtomicBool,
    bitmaps: ImageBitmaps<FileBitmaps>,
    warnings: Vec<String>,
}

impl LoopDevice {
    /// Opens and locks an image.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if another process has locked bytes of the range, [`ErrorKind::Claimed`] if the kernel
    /// uses them, [`ErrorKind::Format`] if the image is not raw: for these the caller adds a hint.
    /// [`ErrorKind::Invalid`] if the options do not fit the image, and the I/O errors of the image file.
    pub fn open(options: &LoopOptions) -> Result<LoopDevice, Error> {
        let image = ImageFile::open(&options.path, options.read_only)?;
        let mut warnings = Vec::new();
        let logical_block_bytes =
            image.choose_logical_block(options.logical_block_bytes, options.direct_io)?;
        if !options.offset.is_multiple_of(u64::from(logical_block_bytes)) {
            return Err(invalid(format!(
                "the offset {} is not a multiple of the sector size {logical_block_bytes}; choose one that is",
                options.offset
            )));
        }
        let mode =
            choose_mode(options.direct_io, &image.direct, &image.path, logical_block_bytes, options.offset)?;
        if options.direct_io == DirectIo::On && mode.direct.is_some_and(|align| align.assumed) {
            warnings.push(format!(
                "the file system of {} does not report the alignment that direct I/O requires; 512 bytes are assumed",
                image.path.display()
            ));
        }
        let file_size = image.size()?;
        // A block device consists of whole blocks.
        let partial = options.partial_block && !image.block_device;
        let path = image.path.clone();
        let window = Window { path, offset: options.offset, logical_block_bytes, partial };
        let (size, left_out) = window.capacity(file_size, options.size_limit)?;
        if left_out > 0 {
            warnings.push(format!(
                "the last {left_out} bytes of {} do not fill a sector of {logical_block_bytes} bytes and are not served",
                image.path.display()
            ));
        }
        let range = options.offset..options.offset + size;
        let kind = LockKind::of(options.read_only, options.shared);
        warnings.extend(image.lock(&range, kind, options.shared)?);
        image.set_direct(mode.direct.is_some())?;
        // After the lock, and on the open file: the path may name another file by now.
        if !options.shared {
            image.check_unclaimed(&range, options.read_only)?;
        }
        if let Some(format) = image.detect_format(file_size).filter(|_| !options.raw) {
            return Err(malformed(format!("{} is a {format} image, not raw data", image.path.display())));
        }
        let (bitmaps, warning) = bitmaps::open(options, &image);
        warnings.extend(warning);
        let synced = image.reopen(false)?;
        LoopDevice::assemble(image, options, Chosen { window, mode, size, synced, bitmaps, warnings })
    }

    fn assemble(image: ImageFile, options: &LoopOptions, chosen: Chosen) -> Result<LoopDevice, Error> {
        let Chosen { window, mode, size, synced, bitmaps, warnings } = chosen;
        let tail = window.partial.then(|| tail_file(&image, !options.read_only)).transpose()?;
        let (block_device, discards) = (image.block_device, image.discards);
        // The kernel rejects fallocate(2) on a part of a block of a block device.
        let takes_any_sector = !block_device || image.logical_block <= window.logical_block_bytes;
        let name = ImageName::new(&image.path);
        let shared = Shared {
            window,
            discard_unit: if takes_any_sector { 1 } else { u64::from(image.logical_block) },
            cache_unit: u64::from(image.physical_block).max(rustix::param::page_size() as u64),
            block_device,
            synced,
            synced_by_queues: std::array::from_fn(|_| OnceLock::new()),
            state: Mutex::new(State {
                file: Arc::new(image),
                writable: !options.read_only,
                requested: options.direct_io,
                mode,
                dispatch: options.dispatch,
                read_only: options.read_only,
                size_limit: options.size_limit,
                size,
                tail,
            }),
            writer: CachePadded::new(WriterToken::new()),
            wakes: std::array::from_fn(|_| OnceLock::new()),
            counters: Arc::new(LoopCounters::new()),
            discard_by_command: AtomicBool::new(block_device),
            writeback_failed: AtomicBool::new(false),
            discards: AtomicBool::new(discards),
            zeroes: AtomicBool::new(takes_any_sector),
            zeroes_no_unmap: AtomicBool::new(takes_any_sector),
        };
        let shared = Arc::new(shared);
        let bitmaps = FileBitmaps { shared: Arc::clone(&shared), place: bitmaps };
        Ok(LoopDevice {
            shared,
            name,
            shared_use: options.shared,
            superseded: AtomicBool::new(false),
            bitmaps: ImageBitmaps(bitmaps),
            warnings,
        })
    }

    pub(crate) fn identity(&self) -> (u64, u64) {
        self.file().identity
    }

    pub(crate) fn file(&self) -> Arc<ImageFile> {
        locked(&self.shared.state).file.clone()
    }

    /// The driver's counters. A clone stays readable after the device was given to a disk.
    pub fn counters(&self) -> &Arc<LoopCounters> {
        &self.shared.counters
    }

    /// Makes all writes durable. The sync runs without the lock on the state, so it delays no reader of the state.
    /// If a sync of the page cache has failed once, every later one fails, too: see `flushed` in `outcome`.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        let (shared, path) = (&self.shared, self.shared.window.path.display());
        // The last bytes may go through the page cache although the rest uses direct I/O.
        let buffered = shared.window.partial || locked(&shared.state).mode.direct.is_none();
        if let Err(e) = shared.synced.sync() {
            shared.writeback_failed.fetch_or(buffered, Relaxed);
            return Err(Error::system(format!("cannot make {path} durable"), e));
        }
        if shared.writeback_failed.load(Relaxed) {
            let message = format!("earlier writes to {path} could not be made durable");
            return Err(Error::new(ErrorKind::Lost, message));
        }
        Ok(())
    }

    fn choose_mode(&self, requested: DirectIo) -> Result<Mode, Error> {
        let Window { path, offset, logical_block_bytes, .. } = &self.shared.window;
        choose_mode(requested, &self.file().direct, path, *logical_block_bytes, *offset)
    }

    fn set_direct_io(&self, requested: DirectIo) -> Result<(), Error> {
        let mode = self.choose_mode(requested)?;
        // Direct reads do not see dirty pages, so these must be written before I/O bypasses the page cache.
        self.sync()?;
        let mut state = locked(&self.shared.state);
        state.file.set_direct(mode.direct.is_some())?;
        state.requested = requested;
        state.mode = mode;
        Ok(())
    }

    /// The size of the file, and the size of the device after a resize: `bytes`, or, if that is `None`, the size that
    /// follows from the file.
    fn sizes_after_resize(&self, state: &State, bytes: Option<u64>) -> Result<(u64, u64), Error> {
        let (window, file_size) = (&self.shared.window, state.file.size()?);
        let (size, _) = match bytes {
            None => {
                // If the file has shrunk below the limit, the device ends with the file.
                let available = file_size.saturating_sub(window.offset);
                let limit = state.size_limit.filter(|limit| *limit <= available);
                window.capacity(file_size, limit)?
            }
            Some(bytes) => window.capacity(u64::MAX >> 1, Some(bytes))?,
        };
        Ok((file_size, size))
    }

    /// The image as the backing file of an overlay, after all writes were made durable. The disk must be
    /// frozen. Fails with [`ErrorKind::Unsupported`] if the device serves a part of the image, is shared or
    /// read-only, or ends within a sector, and with [`ErrorKind::Mismatch`] if the image was truncated.
    pub(crate) fn raw_image(&self) -> Result<RawImage, Error> {
        let image = {
            let (state, window) = (locked(&self.shared.state), &self.shared.window);
            let block = window.logical_block_bytes;
            let is_part = window.offset != 0 || state.size_limit.is_some();
            let refused = [
                (is_part, "the device serves only a part of it"),
                (self.shared_use, "it is shared, and other processes may write to it"),
                (state.read_only || !state.writable, "it is read-only, so nothing in it changes"),
                (!state.size.is_multiple_of(u64::from(block)), "its size is not a whole number of sectors"),
            ];
            if let Some((_, why)) = refused.iter().find(|(is, _)| *is) {
                let message = format!("{} cannot become a backing file: {why}", window.path.display());
                return Err(unsupported(message));
            }
            state.file.check_not_truncated(state.size)?;
            let direct = state.mode.direct;
            RawImage {
                file: Arc::clone(&state.file),
                size: state.size,
                align: direct.map_or(1, |align| u64::from(align.offset)),
                terms: ClientTerms {
                    logical_block_bytes: block,
                    memory_align: direct.map_or(1, DirectAlign::largest),
                    requested: state.requested,
                    buffered: direct.is_none().then(|| state.mode.reason.clone()),
                },
            }
        };
        self.sync()?;
        Ok(image)
    }

    /// Leaves the image to another driver of this process, which only reads it: the lock becomes a reader's.
    pub(crate) fn supersede(&self) {
        self.superseded.store(true, Relaxed);
        locked(&self.shared.state).file.downgrade(&WHOLE_FILE);
    }

    fn loop_setting(&self, setting: &dyn DriverSetting) -> Result<LoopSetting, Error> {
        setting.downcast_ref().copied().ok_or_else(|| setting.unknown_to(self.name()))
    }
}

impl Driver for LoopDevice {
    fn name(&self) -> &'static str {
        "loop"
    }

    fn uses_ring(&self) -> bool {
        true
    }

    fn queues_max(&self) -> usize {
        usize::from(QUEUES_MAX)
    }

    fn limits(&self) -> QueueLimits {
        let state = locked(&self.shared.state);
        let block = self.shared.window.logical_block_bytes;
        let discard_unit = block.max(self.shared.discard_unit as u32);
        // Relaxed, as for all flags of what the file system supports: each flag is independent and only ever
        // becomes false. A stale value costs one more failed attempt.
        let max_bytes = |supported: &AtomicBool| {
            if supported.load(Relaxed) && !state.read_only { DISCARD_MAX_BYTES } else { 0 }
        };
        // Kernels before 6.18 require the alignment of the file offset for the length of each segment, too.
        let memory_align = state.mode.direct.map_or(1, DirectAlign::largest);
        let capacity_bytes = state.size.next_multiple_of(u64::from(block));
        QueueLimits {
            capacity_bytes,
            padding_bytes: (capacity_bytes - state.size) as u32,
            logical_block_bytes: block,
            physical_block_bytes: state.file.physical_block.max(block),
            max_request_bytes: REQUEST_MAX_BYTES,
            max_segments: SEGMENTS_MAX,
            memory_align,
            // The driver zeroes the padding after the last bytes, which it cannot do in pages of the kernel.
            kernel_pages: !self.shared.window.partial,
            max_discard_bytes: max_bytes(&self.shared.discards),
            discard_granularity: state.file.discard_granularity.max(discard_unit),
            discard_zeroes: !self.shared.block_device,
            max_write_zeroes_bytes: max_bytes(&self.shared.zeroes),
            max_write_zeroes_no_unmap_bytes: max_bytes(&self.shared.zeroes_no_unmap),
            write_cache: !state.read_only,
            fua: !state.read_only,
            read_only: state.read_only,
            rotational: state.file.rotational,
            page_cache: state.mode.direct.is_none(),
            ..QueueLimits::default()
        }
    }

    fn prepare_queues(&self, queues: usize) -> Result<(), Error> {
        (0..queues as u16).try_for_each(|queue| self.shared.synced_by(queue).map(drop))
    }

    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        // Setting it fails if the queue was open before. The wake is the same then, because it belongs to the
        // disk and not to the owner of the queue.
        let _ = self.shared.wakes[usize::from(cx.index)].set(cx.wake);
        let ring = cx.ring.ok_or_else(|| invalid("the loop driver needs an io_uring".to_owned()))?;
        Ok(Box::new(LoopQueue::open(Arc::clone(&self.shared), cx.index, cx.tags, ring)?))
    }

    fn extents(&self, range: Range<u64>, max: usize) -> Result<Vec<Extent>, Error> {
        let (file, size) = {
            let state = locked(&self.shared.state);
            (Arc::clone(&state.file), state.size)
        };
        let range = range.start.min(size)..range.end.min(size);
        if self.shared.block_device {
            return Ok(vec![Extent { length: range.end - range.start, hole: false, zero: false }]);
        }
        let Window { offset, logical_block_bytes, .. } = self.shared.window;
        file.extents(offset, u64::from(logical_block_bytes), range, max, query_until_ns())
            .map_err(|e| file.failed("read the extents of", e))
    }

    fn prepare_set(&self, setting: &dyn DriverSetting) -> Result<Change, Error> {
        if let LoopSetting::DirectIo(requested) = self.loop_setting(setting)? {
            self.choose_mode(requested)?;
            // Writes back most dirty pages before the freeze, so that the sync under the freeze is short.
            self.sync()?;
        }
        Ok(Change::Frozen)
    }

    fn set(&self, setting: &dyn DriverSetting) -> Result<(), Error> {
        match self.loop_setting(setting)? {
            LoopSetting::DirectIo(requested) => self.set_direct_io(requested)?,
            LoopSetting::Dispatch(dispatch) => locked(&self.shared.state).dispatch = dispatch,
        }
        Ok(())
    }

    fn prepare_read_only(&self, _: bool) -> Result<(), Error> {
        self.sync()
    }

    fn set_read_only(&self, read_only: bool) -> Result<(), Error> {
        if !read_only {
            self.bitmaps.0.check_reopen()?;
        }
        self.sync()?;
        let mut state = locked(&self.shared.state);
        if read_only == state.read_only {
            return Ok(());
        }
        let start = self.shared.window.offset;
        let range = start..start + state.size;
        let relock = |file: &ImageFile, kind| file.lock(&range, kind, self.shared_use);
        if self.shared_use && (read_only || state.writable) {
            // A shared device has the same lock for reading and for writing.
        } else if read_only {
            state.file.downgrade(&range);
        } else if state.writable {
            relock(&state.file, LockKind::Exclusive).inspect_err(|_| state.file.downgrade(&range))?;
        } else {
            let file = state.file.reopen(true)?;
            let tail = self.shared.window.partial.then(|| tail_file(&file, true)).transpose()?;
            file.set_direct(state.mode.direct.is_some())?;
            // The locks of the two open file descriptions conflict with each other, and the image must not be
            // unlocked in between. So the new one first takes a reader's lock beside the old one's.
            relock(&file, LockKind::Shared)?;
            state.file.unlock(&WHOLE_FILE);
            if let Err(error) = relock(&file, LockKind::of(false, self.shared_use)) {
                file.downgrade(&range);
                relock(&state.file, LockKind::Shared)?;
                return Err(error);
            }
            state.tail = tail;
            state.file = Arc::new(file);
            state.writable = true;
        }
        state.read_only = read_only;
        Ok(())
    }

    fn prepare_resize(&self, bytes: Option<u64>) -> Result<u64, Error> {
        Ok(self.sizes_after_resize(&locked(&self.shared.state), bytes)?.1)
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), Error> {
        let mut state = locked(&self.shared.state);
        let (file_size, size) = self.sizes_after_resize(&state, bytes)?;
        let window = &self.shared.window;
        let (old_end, end) = (window.offset + state.size, window.offset + size);
        if end > file_size && (self.shared.block_device || !state.writable || state.read_only) {
            let why = if self.shared.block_device { "it is a block device" } else { "it is read-only" };
            let message =
                format!("{} ends at byte {file_size} and cannot grow: {why}", window.path.display());
            return Err(unsupported(message));
        }
        let kind = LockKind::of(state.read_only, self.shared_use);
        state.file.lock(&(window.offset..end), kind, self.shared_use)?;
        if end > file_size
            && let Err(e) = state.file.set_size(end)
        {
            state.file.unlock(&(old_end.min(end)..end));
            let message = format!("cannot extend {} to {end} bytes", window.path.display());
            return Err(Error::system(message, e).with_hint("choose a smaller size"));
        }
        state.file.unlock(&(end..old_end.max(end)));
        state.size = size;
        if bytes.is_some() && state.size_limit.is_some() {
            state.size_limit = bytes;
        }
        Ok(())
    }

    fn bitmap_store(&self) -> Option<&dyn BitmapStore> {
        Some(&self.bitmaps)
    }

    fn warnings(&self) -> Vec<String> {
        let state = locked(&self.shared.state);
        let buffered = (state.requested == DirectIo::Auto && state.mode.direct.is_none())
            .then(|| format!("direct I/O is off: {}", state.mode.reason));
        buffered.into_iter().chain(self.warnings.iter().cloned()).collect()
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let state = locked(&self.shared.state);
        let counters = self.shared.counters.snapshot();
        let (device, inode) = state.file.identity;
        let (effective, reason) = match &state.mode.direct {
            Some(align) => {
                ("on", format!("alignment {} for offsets, {} for memory", align.offset, align.memory))
            }
            None => ("off", state.mode.reason.to_string()),
        };
        vec![
            ("backing-file", self.name.now(&state.file)),
            ("backing-device", format!("{}:{}", libc::major(device), libc::minor(device))),
            ("backing-inode", inode.to_string()),
            ("offset", self.shared.window.offset.to_string()),
            ("size-limit", state.size_limit.map_or("none".to_owned(), |limit| limit.to_string())),
            ("direct-io-requested", state.requested.name().to_owned()),
            ("direct-io", effective.to_owned()),
            ("direct-io-reason", reason),
            ("dispatch", state.dispatch.name().to_owned()),
            ("reads-in-flight-max", counters.reads_in_flight_max.to_string()),
            ("reads-in-flight-mean", format!("{:.1}", counters.reads_in_flight_mean())),
            ("turns-in-flight-max", counters.turns_in_flight_max.to_string()),
            ("writers-max", counters.writers_max.to_string()),
            ("writes-joined", counters.writes_joined.to_string()),
            ("short-transfers", counters.short_transfers.to_string()),
            ("retries", counters.retries.to_string()),
            ("fdatasyncs", counters.flushes.to_string()),
            ("writeback-failed", self.shared.writeback_failed.load(Relaxed).to_string()),
        ]
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if self.superseded.load(Relaxed) {
            return;
        }
        // A ring may keep the file open after the device was removed, and the locks are released only with it.
        locked(&self.shared.state).file.unlock(&WHOLE_FILE);
    }
}

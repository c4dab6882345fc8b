//! The loop driver: serves a regular file or a block device as raw data, with direct I/O or through the page
//! cache.
//!
//! - `queue`: the data path of one queue. `writer` is the token that admits one writing queue at a time, `shared`
//!   the state that the queues share, with the statistics. The image itself is an `image_file`.
//! - `bitmaps`: the persistent dirty bitmaps in a file beside the image, in the format of `bitmap_format`.

mod bitmap_format;
mod bitmaps;
mod queue;
mod shared;
#[cfg(test)]
#[cfg(not(model_check))]
pub(super) mod tests;
mod writer;

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use blkq::bitmap::BitmapStore;
use blkq::sync::atomic::AtomicBool;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::lock as locked;
use blkq::{
    Change, Driver, DriverQueue, DriverSetting, Error, ErrorKind, Extent, IoBuffer, OpenContext, QueueLimits,
};

use crate::bitmaps::ImageBitmaps;
use crate::errors::{invalid, malformed, unsupported};
use crate::extents::{all_data, query_until_ns};
use crate::image_file::{
    ClientTerms, DirectAlign, ImageFile, ImageName, LockKind, Mode, WHOLE_FILE, check_not_longer,
    choose_mode, sync,
};
use crate::options::ImageFormat;
pub use crate::options::{DirectIo, Dispatch, DriverOptions};

use bitmaps::FileBitmaps;
pub use bitmaps::is_bitmap_file;
use queue::LoopQueue;
use shared::{REQUEST_MAX_BYTES, SEGMENTS_MAX, Shared, State, Window};
use writer::QUEUES_MAX;

/// Each discard and write zeroes is one call of the file system, and an engine must not wait long for one.
const DISCARD_MAX_BYTES: u64 = 1 << 30;

/// A setting of the loop driver that can be changed while the device is in use
/// ([`Disk::set_driver`](blkq::Disk::set_driver)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LoopSetting {
    /// Whether I/O bypasses the page cache ([`DriverOptions::direct_io`]).
    DirectIo(DirectIo),
    /// How requests are submitted to the file ([`DriverOptions::dispatch`]).
    Dispatch(Dispatch),
}

impl DriverSetting for LoopSetting {
    fn name(&self) -> &'static str {
        match self {
            LoopSetting::DirectIo(_) => "direct-io",
            LoopSetting::Dispatch(_) => "dispatch",
        }
    }
}

/// A device backed by an image.
pub struct LoopDevice {
    shared: Arc<Shared>,
    name: ImageName,
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
    pub fn open(options: &DriverOptions) -> Result<LoopDevice, Error> {
        let image = ImageFile::open(&options.path, options.read_only)?;
        let mut warnings = Vec::new();
        let sector_bytes = image.choose_logical_block(options.logical_block_bytes, options.direct_io)?;
        if !options.offset.is_multiple_of(u64::from(sector_bytes)) {
            return Err(invalid(format!(
                "the offset {} is not a multiple of the sector size {sector_bytes}; choose one that is",
                options.offset
            )));
        }
        let mode = choose_mode(options.direct_io, &image.direct, &image.path, sector_bytes, options.offset)?;
        if options.direct_io == DirectIo::On && mode.direct.is_some_and(|align| align.assumed) {
            warnings.push(format!(
                "the file system of {} does not report the alignment that direct I/O requires; 512 bytes are assumed",
                image.path.display()
            ));
        }
        let file_size = image.size()?;
        // A block device consists of whole blocks.
        let partial = options.partial_block && !image.block_device;
        let window = Window { offset: options.offset, logical_block_bytes: sector_bytes, partial };
        let (size, left_out) = window.capacity(&image.path, file_size, options.size_limit)?;
        if left_out > 0 {
            warnings.push(format!(
                "the last {left_out} bytes of {} do not fill a sector of {sector_bytes} bytes and are not served",
                image.path.display()
            ));
        }
        let range = options.offset..options.offset + size;
        warnings.extend(image.lock(&range, LockKind::of(options.read_only, options.shared))?);
        image.set_direct(mode.direct.is_some())?;
        // After the lock, and on the open file: the path may name another file by now.
        if !options.shared {
            image.check_unclaimed(&range, options.read_only)?;
        }
        if let Some(format) = image.detect_format(file_size).filter(|_| options.format != ImageFormat::Raw) {
            return Err(malformed(format!("{} is a {format} image, not raw data", image.path.display())));
        }
        let synced = image.reopen(false)?;
        let shared = Shared::new(image, synced, window, options, mode, size)?;
        let (bitmaps, warning) = FileBitmaps::open(&shared);
        warnings.extend(warning);
        Ok(LoopDevice::new(shared, bitmaps, warnings))
    }

    /// Makes a device of the raw image at `path`, with `size` bytes: the base of a commit, which replaces its overlay.
    /// `file` has the image open for writing and locked. `synced` has it open twice more, for the syncs of control
    /// threads and of queue 0. An image that is shorter than the device is extended. `bitmaps` is the open bitmap file of
    /// the image; its dirty bitmaps are marked as in use.
    ///
    /// Fails with [`ErrorKind::Mismatch`] if the image is longer than the device, and with
    /// [`ErrorKind::Unsupported`] if its sectors are larger or it is a block device that is too small.
    pub(crate) fn of_base(
        file: File,
        (synced, synced_by_queue): (File, File),
        bitmaps: Option<File>,
        path: PathBuf,
        size: u64,
        terms: ClientTerms,
    ) -> Result<LoopDevice, Error> {
        let image = ImageFile::of_open(file, path)?;
        let synced = image.with_file(synced);
        let block = terms.logical_block_bytes;
        if image.block_device && image.logical_block > block {
            let shown = image.path.display();
            return Err(unsupported(format!(
                "{shown} has sectors of {} bytes, and the device has sectors of {block}",
                image.logical_block
            )));
        }
        let bytes = image.size()?;
        check_not_longer(&image.path, bytes - bytes % u64::from(block), size)?;
        let mode =
            terms.mode(&image.path, || choose_mode(terms.requested, &image.direct, &image.path, block, 0))?;
        let is_direct = mode.direct.is_some();
        if bytes < size && image.block_device {
            return Err(unsupported(format!(
                "{} has {bytes} bytes, fewer than the device ({size}), and a block device cannot grow",
                image.path.display()
            )));
        }
        let options = DriverOptions {
            direct_io: terms.requested,
            format: ImageFormat::Raw,
            ..DriverOptions::new(&image.path)
        };
        let window = Window { offset: 0, logical_block_bytes: block, partial: false };
        let shared = Shared::new(image, synced, window, &options, mode, size)?;
        // This succeeds, because the device has no queues yet.
        let _ = shared.synced_by_queues[0].set(synced_by_queue);
        // This marks the bitmaps as in use, so the checks precede it.
        let (bitmaps, warning) = FileBitmaps::take(&shared, bitmaps)?;
        let image = locked(&shared.state).file.clone();
        if bytes < size {
            // This write of one byte must come before O_DIRECT is set, which requires whole blocks.
            image.file.write_all_at(&[0], size - 1).map_err(|e| {
                Error::system(format!("cannot extend {} to {size} bytes", image.path.display()), e)
            })?;
        }
        image.set_direct(is_direct)?;
        Ok(LoopDevice::new(shared, bitmaps, Vec::from_iter(warning)))
    }

    /// Writes to the image on the calling thread. No queue may be in use.
    pub(crate) fn write_now(&self, position: u64, data: &IoBuffer) -> Result<(), Error> {
        let file = self.file();
        file.file.write_all_at(data, position).map_err(|e| file.failed("write to", e))
    }

    /// Zeroes a range of the image on the calling thread. No queue may be in use.
    pub(crate) fn zero_now(&self, range: Range<u64>) -> Result<(), Error> {
        let file = self.file();
        file.zero(range).map_err(|e| file.failed("write to", e))
    }

    fn new(shared: Arc<Shared>, bitmaps: FileBitmaps, warnings: Vec<String>) -> LoopDevice {
        LoopDevice {
            name: ImageName::new(shared.path()),
            shared,
            superseded: AtomicBool::new(false),
            bitmaps: ImageBitmaps(bitmaps),
            warnings,
        }
    }

    fn file(&self) -> Arc<ImageFile> {
        locked(&self.shared.state).file.clone()
    }

    /// Makes all writes durable. The sync runs without the lock on the state, so it delays no reader of the state.
    /// If a sync of the page cache has failed once, every later one fails, too: see `LoopQueue::outcome_without_data`.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        let (shared, path) = (&self.shared, self.shared.path().display());
        // The last bytes may go through the page cache although the rest uses direct I/O.
        let buffered = shared.window.partial || locked(&shared.state).mode.direct.is_none();
        if let Err(e) = sync(&shared.synced.file) {
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
        let (file, window) = (self.file(), &self.shared.window);
        choose_mode(requested, &file.direct, &file.path, window.logical_block_bytes, window.offset)
    }

    /// The size of the file, and the size of the device after a resize: `bytes`, or, if that is `None`, the size that
    /// follows from the file.
    fn sizes_after_resize(&self, state: &State, bytes: Option<u64>) -> Result<(u64, u64), Error> {
        let (window, path, file_size) = (&self.shared.window, self.shared.path(), state.file.size()?);
        let (size, _) = match bytes {
            None => {
                // If the file has shrunk below the limit, the device ends with the file.
                let available = file_size.saturating_sub(window.offset);
                let limit = state.options.size_limit.filter(|limit| *limit <= available);
                window.capacity(path, file_size, limit)?
            }
            Some(bytes) => window.capacity(path, u64::MAX >> 1, Some(bytes))?,
        };
        Ok((file_size, size))
    }

    /// The image as the backing file of an overlay, after all writes were made durable. The disk must be
    /// frozen. Fails with [`ErrorKind::Unsupported`] if the device serves a part of the image, is shared or
    /// read-only, or ends within a sector, and with [`ErrorKind::Mismatch`] if the image was truncated. Returns the file,
    /// the size of the image and the alignment of offsets and lengths in bytes (1 for buffered I/O), and the terms.
    pub(crate) fn raw_image(&self) -> Result<(Arc<ImageFile>, u64, u64, ClientTerms), Error> {
        let image = {
            let (state, window) = (locked(&self.shared.state), &self.shared.window);
            let block = window.logical_block_bytes;
            let is_part = window.offset != 0 || state.options.size_limit.is_some();
            let refused = [
                (is_part, "the device serves only a part of it"),
                (state.options.shared, "it is shared, and other processes may write to it"),
                (state.options.read_only || !state.writable, "it is read-only, so nothing in it changes"),
                (!state.size.is_multiple_of(u64::from(block)), "its size is not a whole number of sectors"),
            ];
            if let Some((_, why)) = refused.iter().find(|(is, _)| *is) {
                let message = format!("{} cannot become a backing file: {why}", self.shared.path().display());
                return Err(unsupported(message));
            }
            state.file.check_not_truncated(state.size)?;
            let direct = state.mode.direct;
            let align = direct.map_or(1, |align| u64::from(align.offset));
            let terms = ClientTerms {
                logical_block_bytes: block,
                memory_align: direct.map_or(1, DirectAlign::largest),
                requested: state.options.direct_io,
                buffered: direct.is_none().then(|| state.mode.reason.clone()),
            };
            (Arc::clone(&state.file), state.size, align, terms)
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
            if supported.load(Relaxed) && !state.options.read_only { DISCARD_MAX_BYTES } else { 0 }
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
            write_cache: !state.options.read_only,
            fua: !state.options.read_only,
            read_only: state.options.read_only,
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
        let (file, size) = (self.file(), locked(&self.shared.state).size);
        let range = range.start.min(size)..range.end.min(size);
        if self.shared.block_device {
            return Ok(all_data(&range));
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
            LoopSetting::Dispatch(dispatch) => locked(&self.shared.state).options.dispatch = dispatch,
            LoopSetting::DirectIo(requested) => {
                let mode = self.choose_mode(requested)?;
                // Direct reads do not see dirty pages, so these must be written before I/O bypasses the page cache.
                self.sync()?;
                let mut state = locked(&self.shared.state);
                state.file.set_direct(mode.direct.is_some())?;
                state.options.direct_io = requested;
                state.mode = mode;
            }
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
        if read_only == state.options.read_only {
            return Ok(());
        }
        let start = self.shared.window.offset;
        let range = start..start + state.size;
        let shared = state.options.shared;
        if shared && (read_only || state.writable) {
            // A shared device has the same lock for reading and for writing.
        } else if read_only {
            state.file.downgrade(&range);
        } else if state.writable {
            state.file.lock(&range, LockKind::Writer).inspect_err(|_| state.file.downgrade(&range))?;
        } else {
            let file = state.file.reopen(true)?;
            let tail = self.shared.window.open_tail(&file, true)?;
            file.set_direct(state.mode.direct.is_some())?;
            // The locks of the two open file descriptions conflict with each other, and the image must not be
            // unlocked in between. So the new one first takes a reader's lock beside the old one's.
            file.lock(&range, LockKind::of(true, shared))?;
            state.file.unlock(&WHOLE_FILE);
            if let Err(error) = file.lock(&range, LockKind::of(false, shared)) {
                file.downgrade(&range);
                state.file.lock(&range, LockKind::of(true, shared))?;
                return Err(error);
            }
            state.tail = tail;
            state.file = Arc::new(file);
            state.writable = true;
        }
        state.options.read_only = read_only;
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
        let path = self.shared.path().display();
        if end > file_size && (self.shared.block_device || !state.writable || state.options.read_only) {
            let why = if self.shared.block_device { "it is a block device" } else { "it is read-only" };
            return Err(unsupported(format!("{path} ends at byte {file_size} and cannot grow: {why}")));
        }
        let DriverOptions { read_only, shared, .. } = state.options;
        state.file.lock(&(window.offset..end), LockKind::of(read_only, shared))?;
        if end > file_size
            && let Err(e) = state.file.file.set_len(end)
        {
            state.file.unlock(&(old_end.min(end)..end));
            return Err(Error::system(format!("cannot extend {path} to {end} bytes"), e)
                .with_hint("choose a smaller size"));
        }
        state.file.unlock(&(end..old_end.max(end)));
        state.size = size;
        if bytes.is_some() && state.options.size_limit.is_some() {
            state.options.size_limit = bytes;
        }
        Ok(())
    }

    fn bitmap_store(&self) -> Option<&dyn BitmapStore> {
        Some(&self.bitmaps)
    }

    fn warnings(&self) -> Vec<String> {
        let state = locked(&self.shared.state);
        let buffered = (state.options.direct_io == DirectIo::Auto && state.mode.direct.is_none())
            .then(|| format!("direct I/O is off: {}", state.mode.reason));
        buffered.into_iter().chain(self.warnings.iter().cloned()).collect()
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let state = locked(&self.shared.state);
        let (device, inode) = state.file.identity;
        let (effective, reason) = match &state.mode.direct {
            Some(align) => {
                ("on", format!("alignment {} for offsets, {} for memory", align.offset, align.memory))
            }
            None => ("off", state.mode.reason.to_string()),
        };
        let mut facts = vec![
            ("backing-file", self.name.now(&state.file)),
            ("backing-device", format!("{}:{}", libc::major(device), libc::minor(device))),
            ("backing-inode", inode.to_string()),
            ("offset", self.shared.window.offset.to_string()),
            ("size-limit", state.options.size_limit.map_or("none".to_owned(), |limit| limit.to_string())),
            ("direct-io-requested", state.options.direct_io.name().to_owned()),
            ("direct-io", effective.to_owned()),
            ("direct-io-reason", reason),
            ("dispatch", state.options.dispatch.name().to_owned()),
        ];
        facts.extend(self.shared.counters.describe());
        facts.push(("writeback-failed", self.shared.writeback_failed.load(Relaxed).to_string()));
        facts
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

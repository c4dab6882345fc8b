//! The state that a loop device shares with its queues.

use std::fs::File;
use std::path::Path;
// Not `blkq::sync` for the counters: there is no protocol between them that a model checker could check.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use blkq::layout::CachePadded;
use blkq::stats::{add, raise};
use blkq::sync::atomic::AtomicBool;
use blkq::sync::{Mutex, lock as locked};
use blkq::text::shell_word;
use blkq::{Error, Operation, Request, Wake};

use crate::errors::invalid;
use crate::image_file::{ImageFile, Mode};
use crate::options::{Dispatch, DriverOptions, LOGICAL_BLOCK_SIZES};

use super::writer::{QUEUES_MAX, WriterToken};

/// 2560 sectors, as in the kernel's loop driver.
pub(super) const REQUEST_MAX_BYTES: u32 = 2560 << 9;
/// Each tag has room for the arguments of one vectored call of that length.
pub(super) const SEGMENTS_MAX: u16 = 128;
/// Largest number of calls in flight where the kernel executes them one after the other. Another queue that
/// waits for the writer token waits for all of them.
pub(super) const CALLS_MAX: usize = 32;

/// The requests that wait until no other is at the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turns {
    /// No request waits: direct I/O.
    None,
    /// Writes, discards and write zeroes of all queues: buffered I/O, as a file admits one writer at a time.
    Writes,
    /// Every request: serial dispatch.
    All,
}

/// The part of an image that is served.
pub(super) struct Window {
    /// Offset of the device in the file, in bytes.
    pub offset: u64,
    pub logical_block_bytes: u32,
    /// The device may end within a sector.
    pub partial: bool,
}

impl Window {
    /// The size of the device in the image at `path`, which has `file_size` bytes, and the number of bytes after it that
    /// do not fill a sector. Fails with [`blkq::ErrorKind::Invalid`] if the window does not suit the image or the sectors.
    pub fn capacity(&self, path: &Path, file_size: u64, limit: Option<u64>) -> Result<(u64, u64), Error> {
        let (shown, offset, block) = (path.display(), self.offset, u64::from(self.logical_block_bytes));
        let available = file_size.saturating_sub(offset);
        Err(invalid(match limit {
            _ if file_size == 0 => {
                format!("{shown} is empty; give it a size with `truncate -s SIZE {}`", shell_word(path))
            }
            _ if available == 0 => format!(
                "the offset {offset} is beyond the end of {shown} ({file_size} bytes); choose a smaller offset"
            ),
            Some(0) => "the size limit must be more than 0".to_owned(),
            Some(limit) if !self.partial && !limit.is_multiple_of(block) => format!(
                "the size {limit} is not a multiple of the sector size {block}; choose a multiple, such as {}",
                (limit - limit % block).max(block)
            ),
            Some(limit) if limit > available => format!(
                "{limit} bytes from offset {offset} reach beyond the end of {shown} ({file_size} bytes); \
                 choose less, or extend the image"
            ),
            Some(limit) => return Ok((limit, 0)),
            None if self.partial => return Ok((available, 0)),
            None if available < block => {
                let plural = if available == 1 { "" } else { "s" };
                let has_smaller = block > u64::from(LOGICAL_BLOCK_SIZES[0]);
                let smaller = if has_smaller { ", or use a smaller sector size" } else { "" };
                format!(
                    "{shown} has only {available} byte{plural} from offset {offset}, less than a sector of {block}; extend it{smaller}"
                )
            }
            None => return Ok((available - available % block, available % block)),
        }))
    }

    /// Opens the image again, through the page cache, for the last bytes of a device that may end within a sector.
    pub fn open_tail(&self, image: &ImageFile, writable: bool) -> Result<Option<Arc<ImageFile>>, Error> {
        if !self.partial {
            return Ok(None);
        }
        let tail = image.reopen(writable)?;
        // The kernel must cache only the page that the queues reserve for the page cache, and none that direct I/O uses.
        tail.turn_off_read_ahead()?;
        Ok(Some(Arc::new(tail)))
    }
}

pub(super) struct Shared {
    pub window: Window,
    /// Discards are narrowed to whole units of this many bytes: the logical block of a block device if that is
    /// larger than the device's sector, else 1.
    pub discard_unit: u64,
    /// The unit in which the page cache reads and writes, in bytes: a power of two.
    pub cache_unit: u64,
    pub block_device: bool,
    /// The image in an open file description of its own, which control threads use only for syncs. The kernel
    /// reports a failed write-back once to each description. So the report to a FUA write, or to a flush whose
    /// completion no thread has reaped yet, does not hide the loss from other syncs.
    pub synced: ImageFile,
    /// The descriptions that the queues use only for syncs, by queue: see [`Shared::synced_by`].
    pub synced_by_queues: [OnceLock<File>; QUEUES_MAX as usize],
    pub state: Mutex<State>,
    /// On a cache line of its own, because queues that only read use the fields around it.
    pub writer: CachePadded<WriterToken>,
    pub wakes: [OnceLock<Arc<dyn Wake>>; QUEUES_MAX as usize],
    pub counters: LoopCounters,
    /// Discards use BLOCK_URING_CMD_DISCARD (Linux 6.12) instead of fallocate(2).
    pub discard_by_command: AtomicBool,
    /// A sync of the page cache has failed. Never reset: the kernel marks lost pages as clean.
    pub writeback_failed: AtomicBool,
    /// The operations that the file system supports. One that fails as unsupported becomes false and stays so.
    pub discards: AtomicBool,
    pub zeroes: AtomicBool,
    pub zeroes_no_unmap: AtomicBool,
}

/// The part of the state that changes while the device is in use.
pub(super) struct State {
    pub file: Arc<ImageFile>,
    /// Whether `file` is open for writing. It may be while the device is read-only.
    pub writable: bool,
    /// The options with the changes since the device was opened.
    pub options: DriverOptions,
    pub mode: Mode,
    pub size: u64,
    /// The image, opened a second time without direct I/O, if the device may end within a sector.
    pub tail: Option<Arc<ImageFile>>,
}

/// The settings that a queue copies when it is opened, and again after each change.
pub(super) struct QueueSettings {
    pub direct: bool,
    /// The unit of offsets and lengths in bytes, in which a direct transfer can continue; 1 for buffered I/O.
    pub align: u64,
    /// Size of the device in bytes.
    size: u64,
    /// Offset in the device of its tail, at which calls must be cut: with direct I/O the unit of the page cache that
    /// contains the end. `u64::MAX` if the size is a multiple of the sector size.
    tail_begin: u64,
    pub read_only: bool,
    pub turns: Turns,
    pub calls_max: usize,
}

impl QueueSettings {
    /// Whether requests with this operation wait until no other is at the file.
    pub fn takes_turns(&self, operation: Operation) -> bool {
        self.turns == Turns::All || self.turns == Turns::Writes && operation.is_write()
    }

    /// Whether `request` extends into the tail.
    pub fn reaches_tail(&self, request: &Request) -> bool {
        request.offset() + request.bytes() > self.tail_begin
    }

    /// The number of bytes of `request` that are within the device.
    pub fn bytes(&self, request: &Request) -> u64 {
        request.bytes().min(self.size.saturating_sub(request.offset()))
    }

    /// Where the call ends that continues `request` at byte `done`, in bytes of the request, which reaches the tail.
    /// Also returns whether the call must go through the page cache although the device uses direct I/O.
    pub fn tail_call(&self, request: &Request, done: u64) -> (u64, bool) {
        let begin = self.tail_begin.saturating_sub(request.offset());
        if self.direct && done < begin { (begin, false) } else { (self.bytes(request), self.direct) }
    }

    /// The number of bytes at the end of `request` that can be read alone, and whether such a read must go through the
    /// page cache although the device uses direct I/O.
    pub fn end_unit(&self, request: &Request) -> (u64, bool) {
        let in_tail = self.direct && self.reaches_tail(request);
        (if in_tail { 1 } else { self.align }, in_tail)
    }
}

impl Shared {
    /// `image` is the image, opened with `options`, in the mode `mode`. `synced` is the image in another open file
    /// description.
    pub fn new(
        image: ImageFile,
        synced: ImageFile,
        window: Window,
        options: &DriverOptions,
        mode: Mode,
        size: u64,
    ) -> Result<Arc<Shared>, Error> {
        // The kernel rejects fallocate(2) on a part of a block of a block device.
        let takes_any_sector = !image.block_device || image.logical_block <= window.logical_block_bytes;
        Ok(Arc::new(Shared {
            discard_unit: if takes_any_sector { 1 } else { u64::from(image.logical_block) },
            cache_unit: u64::from(image.physical_block).max(rustix::param::page_size() as u64),
            block_device: image.block_device,
            synced,
            synced_by_queues: std::array::from_fn(|_| OnceLock::new()),
            writer: CachePadded::default(),
            wakes: std::array::from_fn(|_| OnceLock::new()),
            counters: LoopCounters::new(),
            discard_by_command: AtomicBool::new(image.block_device),
            writeback_failed: AtomicBool::new(false),
            discards: AtomicBool::new(image.discards),
            zeroes: AtomicBool::new(takes_any_sector),
            zeroes_no_unmap: AtomicBool::new(takes_any_sector),
            state: Mutex::new(State {
                tail: window.open_tail(&image, !options.read_only)?,
                file: Arc::new(image),
                writable: !options.read_only,
                options: options.clone(),
                mode,
                size,
            }),
            window,
        }))
    }

    pub fn path(&self) -> &Path {
        &self.synced.path
    }

    /// The image, its [`State::tail`], and the settings for a queue.
    pub fn queue_settings(&self) -> (Arc<ImageFile>, Option<Arc<ImageFile>>, QueueSettings) {
        let state = locked(&self.state);
        let direct = state.mode.direct;
        let turns = match state.options.dispatch {
            Dispatch::Serial => Turns::All,
            Dispatch::Concurrent if direct.is_some() => Turns::None,
            Dispatch::Concurrent => Turns::Writes,
        };
        // io_uring executes the buffered writes of one ring to a regular file one after the other on one worker
        // (IO_WQ_HASHED), so several can be submitted. In all other cases the driver queues them itself.
        let queued_in_kernel = turns == Turns::Writes && !self.block_device;
        let rest = state.size % u64::from(self.window.logical_block_bytes);
        let start = self.window.offset;
        let settings = QueueSettings {
            direct: direct.is_some(),
            align: direct.map_or(1, |align| u64::from(align.offset)),
            size: state.size,
            tail_begin: match direct {
                _ if rest == 0 => u64::MAX,
                Some(_) => ((start + state.size) & !(self.cache_unit - 1)).saturating_sub(start),
                None => state.size - rest,
            },
            read_only: state.options.read_only,
            turns,
            calls_max: if queued_in_kernel { CALLS_MAX } else { 1 },
        };
        (Arc::clone(&state.file), state.tail.clone(), settings)
    }

    /// The image in the open file description for the syncs of `queue`, which is opened now if it is not open yet.
    /// A confined thread cannot open it.
    pub fn synced_by(&self, queue: u16) -> Result<&File, Error> {
        let place = &self.synced_by_queues[usize::from(queue)];
        if let Some(file) = place.get() {
            return Ok(file);
        }
        let file = self.synced.reopen(false)?.file;
        Ok(place.get_or_init(|| file))
    }
}

/// The counters of one queue, which continue when the queue gets another owner: see [`LoopCounters::describe`]. Each queue
/// writes only its own, on cache lines of their own, so counting causes no contention. All accesses are relaxed: the
/// counters are statistics, and no other memory depends on them.
#[derive(Default)]
pub(super) struct QueueCounters {
    reads: AtomicU64,
    reads_in_flight_sum: AtomicU64,
    reads_in_flight_max: AtomicU64,
    /// The owner of the queue changes these with [`add`] and [`raise`].
    pub turns_in_flight_max: AtomicU64,
    pub writes_joined: AtomicU64,
    pub short_transfers: AtomicU64,
    pub retries: AtomicU64,
    pub flushes: AtomicU64,
}

/// Only the owner of the queue may call these.
impl QueueCounters {
    /// Counts a read that begins; `in_flight` includes it.
    pub fn read(&self, in_flight: u32) {
        add(&self.reads, 1);
        add(&self.reads_in_flight_sum, u64::from(in_flight));
        raise(&self.reads_in_flight_max, u64::from(in_flight));
    }
}

/// The counters of a loop device. They may be read while the device is in use.
pub(super) struct LoopCounters {
    pub queues: [CachePadded<QueueCounters>; QUEUES_MAX as usize],
    /// The queues that write: only the one that has the writer token, so more than 1 is a defect.
    pub writers: AtomicU64,
    pub writers_max: AtomicU64,
}

impl LoopCounters {
    pub fn new() -> LoopCounters {
        LoopCounters {
            queues: std::array::from_fn(|_| CachePadded::default()),
            writers: AtomicU64::new(0),
            writers_max: AtomicU64::new(0),
        }
    }

    /// The current values over all queues, as in [`blkq::Driver::describe`]:
    ///
    /// - the largest number of reads that one queue had in flight, and the mean number when a read began, that read
    ///   included;
    /// - the largest number of calls of one queue in flight that take turns: buffered writes, which the kernel executes
    ///   one at a time, or with serial dispatch all calls, and then it is 1;
    /// - the largest number of queues with writes in flight that take turns; more than 1 is a defect;
    /// - writes that were added to the call of the adjacent write before them; transfers that returned fewer bytes than
    ///   requested; calls that were interrupted or would have blocked, and were repeated; calls of fdatasync(2) for
    ///   flushes.
    pub fn describe(&self) -> [(&'static str, String); 8] {
        type Field = fn(&QueueCounters) -> &AtomicU64;
        let values = |of: Field| self.queues.iter().map(move |queue| of(queue).load(Relaxed));
        let sum = |of: Field| values(of).fold(0, u64::wrapping_add);
        let max = |of: Field| values(of).fold(0, u64::max);
        let mean = sum(|queue| &queue.reads_in_flight_sum) as f64 / sum(|queue| &queue.reads).max(1) as f64;
        [
            ("reads-in-flight-max", max(|queue| &queue.reads_in_flight_max).to_string()),
            ("reads-in-flight-mean", format!("{mean:.1}")),
            ("turns-in-flight-max", max(|queue| &queue.turns_in_flight_max).to_string()),
            ("writers-max", self.writers_max.load(Relaxed).to_string()),
            ("writes-joined", sum(|queue| &queue.writes_joined).to_string()),
            ("short-transfers", sum(|queue| &queue.short_transfers).to_string()),
            ("retries", sum(|queue| &queue.retries).to_string()),
            ("fdatasyncs", sum(|queue| &queue.flushes).to_string()),
        ]
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;
    use blkq::layout::{HotField, Writer, contended_lines};

    #[test]
    fn queues_that_count_at_the_same_time_lose_nothing() {
        const QUEUES: u16 = 4;
        const READS: u32 = 100_000;
        let counters = LoopCounters::new();
        std::thread::scope(|scope| {
            for index in 0..QUEUES {
                let queue = &counters.queues[usize::from(index)];
                scope.spawn(move || {
                    for read in 0..READS {
                        queue.read(read % 8 + 1);
                        add(&queue.writes_joined, 2);
                    }
                    raise(&queue.turns_in_flight_max, u64::from(index));
                    (0..=index).for_each(|_| add(&queue.flushes, 1));
                });
            }
        });
        let joined = u64::from(QUEUES) * u64::from(READS) * 2;
        let expected = ["8", "4.5", "3", "0", &joined.to_string(), "0", "0", "10"];
        assert_eq!(counters.describe().map(|(_, value)| value), expected);
        assert_eq!(LoopCounters::new().describe()[1].1, "0.0");
    }

    #[test]
    fn no_cache_line_contains_counters_of_two_queues() {
        let counters = LoopCounters::new();
        let mut fields = vec![
            HotField::of("writers", Writer::Everybody(0), &counters.writers),
            HotField::of("most writers", Writer::Everybody(0), &counters.writers_max),
        ];
        for (index, queue) in counters.queues.iter().enumerate() {
            fields.push(HotField::of("counters", Writer::Owner(index), &**queue));
        }
        assert_eq!(contended_lines(&fields), Vec::<Vec<HotField>>::new());
    }
}

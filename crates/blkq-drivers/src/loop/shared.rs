//! The state that a loop device shares with its queues.

use std::fs::File;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use blkq::layout::CachePadded;
use blkq::sync::atomic::AtomicBool;
use blkq::sync::{Mutex, lock as locked};
use blkq::{Error, Wake};

use crate::image_file::{DirectIo, ImageFile, Mode};

use super::counters::LoopCounters;
use super::options::{Dispatch, Window};
use super::tail::TailSettings;
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
    pub counters: Arc<LoopCounters>,
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
    pub requested: DirectIo,
    pub mode: Mode,
    pub dispatch: Dispatch,
    pub read_only: bool,
    pub size_limit: Option<u64>,
    pub size: u64,
    /// The image, opened a second time without direct I/O, if the device may end within a sector.
    pub tail: Option<Arc<ImageFile>>,
}

/// The settings that a queue copies when it is opened, and again after each change.
pub(super) struct QueueSettings {
    pub file: Arc<ImageFile>,
    pub align: u64,
    pub tail: TailSettings,
    pub read_only: bool,
    pub turns: Turns,
    pub calls_max: usize,
}

impl Shared {
    pub fn queue_settings(&self) -> QueueSettings {
        let state = locked(&self.state);
        let tail = TailSettings {
            begin: self.tail_begin(&state),
            size: state.size,
            direct: state.mode.direct.is_some(),
            file: state.tail.clone(),
        };
        let turns = match (state.dispatch, &state.mode.direct) {
            (Dispatch::Serial, _) => Turns::All,
            (Dispatch::Concurrent, None) => Turns::Writes,
            (Dispatch::Concurrent, Some(_)) => Turns::None,
        };
        // io_uring executes the buffered writes of one ring to a regular file one after the other on one worker
        // (IO_WQ_HASHED), so several can be submitted. In all other cases the driver queues them itself.
        let queued_in_kernel = turns == Turns::Writes && !self.block_device;
        QueueSettings {
            tail,
            calls_max: if queued_in_kernel { CALLS_MAX } else { 1 },
            file: Arc::clone(&state.file),
            align: state.mode.direct.map_or(1, |align| u64::from(align.offset)),
            read_only: state.read_only,
            turns,
        }
    }

    /// The image in the open file description for the syncs of `queue`, which is opened now if it is not open yet.
    /// A confined thread cannot open it.
    pub fn synced_by(&self, queue: u16) -> Result<&File, Error> {
        let place = &self.synced_by_queues[usize::from(queue)];
        if let Some(file) = place.get() {
            return Ok(file);
        }
        let file = self.synced.reopen(false)?.into_file();
        Ok(place.get_or_init(|| file))
    }

    /// See [`TailSettings::begin`].
    fn tail_begin(&self, state: &State) -> u64 {
        let rest = state.size % u64::from(self.window.logical_block_bytes);
        let start = self.window.offset;
        match state.mode.direct {
            _ if rest == 0 => u64::MAX,
            Some(_) => ((start + state.size) & !(self.cache_unit - 1)).saturating_sub(start),
            None => state.size - rest,
        }
    }

    /// The whole units of a discard, as a range of the file; it may be empty. `offset` is in bytes of the
    /// device.
    pub fn discard_range(&self, offset: u64, bytes: u64) -> Range<u64> {
        let start = self.window.offset + offset;
        let end = start + bytes;
        let first = start.next_multiple_of(self.discard_unit);
        first..(end - end % self.discard_unit).max(first)
    }

    pub fn wake(&self, queue: u16) {
        if let Some(wake) = self.wakes.get(usize::from(queue)).and_then(OnceLock::get) {
            wake.wake();
        }
    }
}

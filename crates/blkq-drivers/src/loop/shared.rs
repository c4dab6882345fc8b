//! The state that a loop device and its queues share: the image, and how it is used.

use std::fs::File;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use blkq::Wake;
use blkq::layout::CachePadded;
use blkq::sync::atomic::AtomicBool;
use blkq::sync::{Mutex, lock as locked};

use super::counters::LoopCounters;
use super::options::{DirectIo, Dispatch, Mode};
use super::tail::TailSettings;
use super::writer::{QUEUES_MAX, WriterToken};

/// Largest read or write, as of the kernel's loop driver (2560 sectors).
pub(super) const REQUEST_MAX_BYTES: u32 = 2560 << 9;
/// Segments of a request.
pub(super) const SEGMENTS_MAX: u16 = 128;
/// Calls in flight that take turns, where the kernel does one at a time: as many as another
/// queue may have to wait for.
pub(super) const CALLS_MAX: usize = 32;

/// The requests that take turns on the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turns {
    /// Nothing: direct I/O.
    None,
    /// Writes of any kind, across all queues: buffered.
    Writes,
    /// Everything: serial dispatch.
    All,
}

/// The state that the device and its queues share.
pub(super) struct Shared {
    /// Where in the file the device begins.
    pub offset: u64,
    pub logical_block_bytes: u32,
    /// The unit in which discards are passed on, in bytes: the sector of a block device, if that of this device is
    /// smaller, else 1.
    pub discard_unit: u64,
    /// In what the page cache reads and writes, in bytes: a power of two.
    pub cache_unit: u64,
    pub block_device: bool,
    /// The image once more, for syncs alone: a failed write-back is reported once to each
    /// open file, and an error that a FUA write got must not be missed by a flush.
    pub synced: File,
    pub state: Mutex<State>,
    /// Apart from what the queues that do not write read.
    pub writer: CachePadded<WriterToken>,
    pub wakes: [OnceLock<Arc<dyn Wake>>; QUEUES_MAX as usize],
    pub counters: Arc<LoopCounters>,
    /// Discards go to the block device itself instead of through fallocate.
    pub discard_by_command: AtomicBool,
    /// A sync of the page cache failed: what was to be durable may not be, for good.
    pub writeback_failed: AtomicBool,
    /// Operations that the file system turned out not to do become false for good.
    pub discards: AtomicBool,
    pub zeroes: AtomicBool,
    pub zeroes_no_unmap: AtomicBool,
}

/// The state that live changes change.
pub(super) struct State {
    pub file: Arc<File>,
    /// Whether it is open for writing.
    pub writable: bool,
    pub requested: DirectIo,
    pub mode: Mode,
    pub dispatch: Dispatch,
    pub read_only: bool,
    pub size_limit: Option<u64>,
    /// Of the device, in bytes.
    pub size: u64,
    /// The image through the page cache, if the device may end within a sector.
    pub tail: Option<Arc<File>>,
}

/// The part of the state that a queue needs.
pub(super) struct QueueSettings {
    pub file: Arc<File>,
    pub align: u64,
    pub direct: bool,
    pub tail: TailSettings,
    pub read_only: bool,
    pub turns: Turns,
    pub calls_max: usize,
}

impl Shared {
    pub fn queue_settings(&self) -> QueueSettings {
        let state = locked(&self.state);
        let turns = match (state.dispatch, &state.mode.direct) {
            (Dispatch::Serial, _) => Turns::All,
            (Dispatch::Concurrent, None) => Turns::Writes,
            (Dispatch::Concurrent, Some(_)) => Turns::None,
        };
        // The writes of one ring to a regular file through the page cache have one worker in the
        // kernel, which does one after the other: they may be queued there. Else they are here.
        let queued_in_kernel = turns == Turns::Writes && !self.block_device;
        let direct_unit = state.mode.direct.is_some().then_some(self.cache_unit);
        let logical_block_bytes = u64::from(self.logical_block_bytes);
        QueueSettings {
            direct: state.mode.direct.is_some(),
            tail: TailSettings::new(
                state.size,
                logical_block_bytes,
                self.offset,
                direct_unit,
                state.tail.as_ref(),
            ),
            calls_max: if queued_in_kernel { CALLS_MAX } else { 1 },
            file: Arc::clone(&state.file),
            align: state.mode.direct.map_or(1, |align| u64::from(align.offset)),
            read_only: state.read_only,
            turns,
        }
    }

    /// The whole units of a discard of `bytes` from byte `offset` of the device on, as bytes of the file; maybe none.
    pub fn discard_range(&self, offset: u64, bytes: u64) -> Range<u64> {
        let start = self.offset + offset;
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

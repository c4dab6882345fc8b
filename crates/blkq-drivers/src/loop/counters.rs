//! The counters of a loop device. Each queue has its own, which it alone writes, on cache lines of
//! their own: queues do not wait for each other to count. They are summed when they are read.

// There is no protocol between these counters that a model checker could check.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use blkq::layout::CachePadded;
use blkq::stats::{add, raise};

use super::writer::QUEUES_MAX;

/// The counters of one queue, over all its owners. See [`LoopSnapshot`].
#[derive(Debug, Default)]
pub(super) struct QueueCounters {
    reads: AtomicU64,
    reads_in_flight_sum: AtomicU64,
    reads_in_flight_max: AtomicU64,
    turns_in_flight_max: AtomicU64,
    writes_joined: AtomicU64,
    short_transfers: AtomicU64,
    retries: AtomicU64,
    flushes: AtomicU64,
}

/// For the owner of the queue.
impl QueueCounters {
    /// A read begins, with which `in_flight` are.
    pub fn read(&self, in_flight: u32) {
        add(&self.reads, 1);
        add(&self.reads_in_flight_sum, u64::from(in_flight));
        raise(&self.reads_in_flight_max, u64::from(in_flight));
    }

    /// A call that took its turn begins, with which `in_flight` are.
    pub fn turn(&self, in_flight: usize) {
        raise(&self.turns_in_flight_max, in_flight as u64);
    }

    /// So many writes are done by the call of the one before them.
    pub fn joined(&self, writes: usize) {
        add(&self.writes_joined, writes as u64);
    }

    /// A transfer was shorter than asked.
    pub fn short_transfer(&self) {
        add(&self.short_transfers, 1);
    }

    /// A call is made again.
    pub fn retry(&self) {
        add(&self.retries, 1);
    }

    /// A flush begins.
    pub fn flush(&self) {
        add(&self.flushes, 1);
    }
}

/// The counters of a loop device, which count on while they are read.
#[derive(Debug)]
pub struct LoopCounters {
    queues: [CachePadded<QueueCounters>; QUEUES_MAX as usize],
    /// Written by the queue that has the writer's token.
    writers: AtomicU64,
    writers_max: AtomicU64,
}

impl LoopCounters {
    pub(super) fn new() -> LoopCounters {
        LoopCounters {
            queues: std::array::from_fn(|_| CachePadded::default()),
            writers: AtomicU64::new(0),
            writers_max: AtomicU64::new(0),
        }
    }

    /// Those of one queue, for its owner.
    pub(super) fn queue(&self, index: u16) -> &QueueCounters {
        &self.queues[usize::from(index)]
    }

    /// A queue begins to write. More than one at a time is a bug, which has to be seen.
    pub(super) fn begin_writing(&self) {
        let writers = self.writers.fetch_add(1, Relaxed) + 1;
        self.writers_max.fetch_max(writers, Relaxed);
    }

    /// A queue has nothing more to write.
    pub(super) fn finish_writing(&self) {
        self.writers.fetch_sub(1, Relaxed);
    }

    /// The values now, over all queues.
    pub fn snapshot(&self) -> LoopSnapshot {
        let sum = |of: fn(&QueueCounters) -> &AtomicU64| {
            self.queues.iter().fold(0_u64, |sum, queue| sum.wrapping_add(of(queue).load(Relaxed)))
        };
        let max = |of: fn(&QueueCounters) -> &AtomicU64| {
            self.queues.iter().fold(0, |max, queue| of(queue).load(Relaxed).max(max))
        };
        LoopSnapshot {
            reads_in_flight_max: max(|queue| &queue.reads_in_flight_max),
            reads: sum(|queue| &queue.reads),
            reads_in_flight_sum: sum(|queue| &queue.reads_in_flight_sum),
            turns_in_flight_max: max(|queue| &queue.turns_in_flight_max),
            writers: self.writers.load(Relaxed),
            writers_max: self.writers_max.load(Relaxed),
            writes_joined: sum(|queue| &queue.writes_joined),
            short_transfers: sum(|queue| &queue.short_transfers),
            retries: sum(|queue| &queue.retries),
            flushes: sum(|queue| &queue.flushes),
        }
    }
}

/// The counters of a loop device at one time, over all queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct LoopSnapshot {
    /// Most reads that one queue had in flight.
    pub reads_in_flight_max: u64,
    /// Reads put to the file.
    pub reads: u64,
    /// Sum, over those reads, of how many their queue had in flight when each began, itself
    /// included. Divided by `reads` it is the mean.
    pub reads_in_flight_sum: u64,
    /// Most calls that one queue had in flight of those that take turns: buffered writes, whose
    /// like the kernel does one at a time, and with serial dispatch everything, of which it is 1.
    pub turns_in_flight_max: u64,
    /// Queues that have writes at the file which take turns. 0 or 1; of those writes the
    /// kernel does one at a time.
    pub writers: u64,
    /// The most there were of them, over all queues; more than 1 is a defect.
    pub writers_max: u64,
    /// Writes that were done by the call of the one before them.
    pub writes_joined: u64,
    /// Transfers that were shorter than asked.
    pub short_transfers: u64,
    /// Calls that were interrupted or would have blocked, and were made again.
    pub retries: u64,
    /// Calls of fdatasync for flushes.
    pub flushes: u64,
}

impl LoopSnapshot {
    /// Mean number of reads in flight that a read found when it began, itself included;
    /// 0 if there was none.
    pub fn reads_in_flight_mean(&self) -> f64 {
        self.reads_in_flight_sum as f64 / self.reads.max(1) as f64
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;
    use blkq::layout::{HotField, Writer, contended_lines};

    #[test]
    fn queues_that_count_at_once_lose_nothing() {
        const QUEUES: u16 = 4;
        const READS: u32 = 100_000;
        let counters = LoopCounters::new();
        std::thread::scope(|scope| {
            for index in 0..QUEUES {
                let queue = counters.queue(index);
                scope.spawn(move || {
                    for read in 0..READS {
                        queue.read(read % 8 + 1);
                        queue.joined(2);
                    }
                    queue.turn(usize::from(index));
                    (0..=index).for_each(|_| queue.flush());
                });
            }
        });
        let reads = u64::from(QUEUES) * u64::from(READS);
        let (turns_in_flight_max, flushes) = (3, 1 + 2 + 3 + 4);
        let expected = LoopSnapshot {
            reads,
            reads_in_flight_sum: reads / 8 * 36,
            reads_in_flight_max: 8,
            turns_in_flight_max,
            writes_joined: 2 * reads,
            flushes,
            ..LoopSnapshot::default()
        };
        assert_eq!(counters.snapshot(), expected);
        assert_eq!(counters.snapshot().reads_in_flight_mean(), 4.5);
        assert_eq!(LoopCounters::new().snapshot().reads_in_flight_mean(), 0.0);
    }

    #[test]
    fn no_line_has_counters_of_two_queues() {
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

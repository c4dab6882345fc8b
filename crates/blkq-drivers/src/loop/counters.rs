//! The counters of a loop device. Each queue writes only its own, on cache lines of their own, so counting
//! causes no contention. All accesses are relaxed: the counters are statistics, and no other memory depends
//! on them.

// Not `blkq::sync`: there is no protocol between the counters that a model checker could check.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use blkq::layout::CachePadded;
use blkq::stats::{add, raise};

use super::writer::QUEUES_MAX;

/// The counters of one queue, which continue when the queue gets another owner. See [`LoopSnapshot`].
#[derive(Debug, Default)]
pub(super) struct QueueCounters {
    reads: AtomicU64,
    reads_in_flight_sum: AtomicU64,
    reads_in_flight_max: AtomicU64,
    turns_in_flight_max: AtomicU64,
    /// The owner of the queue adds to these with [`add`].
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

    /// Counts a call of requests that take turns; `in_flight` includes it.
    pub fn turn(&self, in_flight: usize) {
        raise(&self.turns_in_flight_max, in_flight as u64);
    }
}

/// The counters of a loop device. They may be read while the device is in use.
#[derive(Debug)]
pub struct LoopCounters {
    queues: [CachePadded<QueueCounters>; QUEUES_MAX as usize],
    /// Written only by the queue that has the writer token.
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

    pub(super) fn queue(&self, index: u16) -> &QueueCounters {
        &self.queues[usize::from(index)]
    }

    /// Counts a queue that begins to write. The count exists to detect a defect: it must never exceed 1.
    pub(super) fn begin_writing(&self) {
        let writers = self.writers.fetch_add(1, Relaxed) + 1;
        self.writers_max.fetch_max(writers, Relaxed);
    }

    pub(super) fn finish_writing(&self) {
        self.writers.fetch_sub(1, Relaxed);
    }

    /// The current values, added up over all queues.
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

/// The values of a loop device's counters at one time, over all queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct LoopSnapshot {
    /// The largest number of reads that one queue had in flight.
    pub reads_in_flight_max: u64,
    /// Reads that were submitted to the file.
    pub reads: u64,
    /// The sum of the numbers of reads in flight, the new one included, that each read found in its queue when it
    /// began. Divided by `reads` this is the mean.
    pub reads_in_flight_sum: u64,
    /// The largest number of calls of one queue in flight that take turns: buffered writes, which the kernel
    /// executes one at a time, or with serial dispatch all calls. With serial dispatch it is 1.
    pub turns_in_flight_max: u64,
    /// Queues with writes in flight that take turns: 0 or 1.
    pub writers: u64,
    /// The largest value that `writers` has had. More than 1 is a defect.
    pub writers_max: u64,
    /// Writes that were added to the call of the adjacent write before them.
    pub writes_joined: u64,
    /// Transfers that returned fewer bytes than requested.
    pub short_transfers: u64,
    /// Calls that were interrupted or would have blocked, and were repeated.
    pub retries: u64,
    /// Calls of fdatasync(2) for flushes.
    pub flushes: u64,
}

impl LoopSnapshot {
    /// The mean number of reads in flight when a read began, that read included; 0 without reads.
    pub fn reads_in_flight_mean(&self) -> f64 {
        self.reads_in_flight_sum as f64 / self.reads.max(1) as f64
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
                let queue = counters.queue(index);
                scope.spawn(move || {
                    for read in 0..READS {
                        queue.read(read % 8 + 1);
                        add(&queue.writes_joined, 2);
                    }
                    queue.turn(usize::from(index));
                    (0..=index).for_each(|_| add(&queue.flushes, 1));
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

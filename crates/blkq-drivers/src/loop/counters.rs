//! The counters of a loop device. Each queue writes only its own, on cache lines of their own, so counting
//! causes no contention. All accesses are relaxed: the counters are statistics, and no other memory depends
//! on them.

// Not `blkq::sync`: there is no protocol between the counters that a model checker could check.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use blkq::layout::CachePadded;
use blkq::stats::{add, raise};

use super::writer::QUEUES_MAX;

/// The counters of one queue, which continue when the queue gets another owner: see [`LoopCounters::describe`].
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
    queues: [CachePadded<QueueCounters>; QUEUES_MAX as usize],
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

    pub fn queue(&self, index: u16) -> &QueueCounters {
        &self.queues[usize::from(index)]
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
                let queue = counters.queue(index);
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

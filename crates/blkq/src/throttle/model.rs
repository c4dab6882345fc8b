//! The words of limits under the model checkers: what queues let through at the same time.

use super::*;
use crate::bio::{BioFlags, Operation, Outline};
use crate::request::Request;
use crate::sector::Sector;
use crate::sync::atomic::{AtomicU64 as Word, Ordering::Relaxed};
use crate::sync::{model_within, thread};
use crate::tags::Tag;

const NOW_NS: u64 = 5_000_000_000_000;
/// A request takes a millisecond.
const COST_NS: u64 = 1_000_000;

fn limits(text: &str) -> RateLimits {
    text.parse().expect("limits")
}

fn reads(count: usize) -> Vec<Request> {
    let outline = Outline {
        operation: Operation::Read,
        flags: BioFlags::empty(),
        sector: Sector(0),
        sectors: 8,
        start_ns: 0,
    };
    let request = |_| {
        let mut request = Request::of_tag(0);
        request.begin(0, &outline, 1);
        request
    };
    (0..count).map(request).collect()
}

/// Queues that want two requests each when there is room for `room`: so many begin, and the word has their cost.
fn a_word_lets_through_what_it_has(queues: usize, room: u64) {
    let buckets = Arc::new(Buckets::new());
    buckets.average[0].store(NOW_NS - (room - 1) * COST_NS, Relaxed);
    let passed = Arc::new(Word::new(0));
    let threads: Vec<_> = (0..queues)
        .map(|_| {
            let (buckets, passed) = (buckets.clone(), passed.clone());
            thread::spawn(move || {
                let mut meters = Meter::of_device(&limits("iops=1000"), &buckets);
                let admitted = meters[0].admit(&[Tag(0), Tag(1)], &reads(2), NOW_NS, true);
                passed.fetch_add(admitted.count as u64, Relaxed);
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    let passed = passed.load(Relaxed);
    assert_eq!(passed, room.min(2 * queues as u64));
    assert_eq!(buckets.average[0].load(Relaxed), NOW_NS + (passed * COST_NS) - (room - 1) * COST_NS);
}

#[cfg(loom)]
mod loom_throttle {
    use super::*;

    #[test]
    fn loom_a_word_lets_through_what_it_has() {
        model_within(3, "two queues, room for one", 0, || a_word_lets_through_what_it_has(2, 1));
        model_within(3, "two queues, room for three", 0, || a_word_lets_through_what_it_has(2, 3));
    }
}

#[cfg(shuttle)]
mod shuttle_throttle {
    use super::*;

    #[test]
    fn shuttle_a_word_lets_through_what_it_has() {
        model_within(0, "four queues, room for five", 4_000, || a_word_lets_through_what_it_has(4, 5));
    }
}

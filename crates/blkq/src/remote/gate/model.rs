//! The properties of the request gate that the model checkers prove.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32 as Plain, AtomicU64 as Plain64, Ordering::SeqCst};

use super::*;
use crate::sync::{model, thread};

const W: Direction = Direction::Write;

impl RequestGate {
    pub fn in_flight(&self, direction: Direction) -> u32 {
        in_flight(self.side(direction).load.load(SeqCst))
    }
}

/// Submitters and an engine. Requests in flight are also counted outside of the gate.
struct Checked {
    gate: RequestGate,
    in_flight: Plain,
    limit: u32,
    batched: Plain64,
    clock_ns: Plain64,
}

impl Checked {
    fn new(nr_requests: u32, batching: bool) -> Arc<Checked> {
        let limit = if batching { nr_requests + nr_requests / 2 } else { nr_requests };
        let gate = RequestGate::new(nr_requests, batching);
        Arc::new(Checked {
            gate,
            in_flight: Plain::new(0),
            limit,
            batched: Plain64::new(0),
            clock_ns: Plain64::new(1),
        })
    }

    fn enter(&self, batcher: &mut Batcher) {
        let (credit, waited) = (batcher.credit, batcher.last_waited_ns);
        let read = Cell::new(0);
        let now = || {
            read.set(self.clock_ns.load(SeqCst));
            read.get()
        };
        self.gate.enter(W, batcher, now, || {});
        assert!(self.in_flight.fetch_add(1, SeqCst) < self.limit, "more requests in flight than the limit");
        let used = credit > 0 && batcher.credit == credit - 1 && batcher.last_waited_ns == waited;
        assert!(
            !used || credit == BATCH_REQUESTS || read.get() < waited + BATCH_TIME_NS,
            "a request of an expired batch"
        );
        self.batched.fetch_add(u64::from(batcher.credit != credit), SeqCst);
    }

    fn leave(&self, count: u32) {
        self.in_flight.fetch_sub(count, SeqCst);
        self.gate.leave(W, count);
    }
}

fn join(threads: Vec<thread::JoinHandle<()>>) {
    for thread in threads {
        thread.join().expect("a thread panicked");
    }
}

/// Every submitter gets through; a lost wake-up shows as a deadlock. Each submitter takes `burst` requests
/// before it returns them, and each step takes `tick_ns`.
fn every_submitter_gets_through(
    nr: u32,
    batching: bool,
    threads: usize,
    rounds: usize,
    burst: u32,
    tick_ns: u64,
) {
    let checked = Checked::new(nr, batching);
    let work = move |checked: &Checked| {
        let mut batcher = Batcher::default();
        for _ in 0..rounds {
            (0..burst).for_each(|_| checked.enter(&mut batcher));
            checked.clock_ns.fetch_add(tick_ns, SeqCst);
            checked.leave(burst);
        }
    };
    let others = (1..threads)
        .map(|_| {
            let checked = checked.clone();
            thread::spawn(move || work(&checked))
        })
        .collect();
    work(&checked);
    join(others);
    assert_eq!((checked.gate.in_flight(W), checked.gate.waiting(W)), (0, 0));
    let batches = checked.gate.counters().grants;
    assert!(checked.batched.load(SeqCst) <= batches * u64::from(BATCH_REQUESTS), "a batch was too large");
}

/// A thread that arrives while another waits does not enter before it.
fn no_submitter_overtakes_a_waiter(batching: bool, newcomers: usize) {
    let checked = Checked::new(2, batching);
    let mut first = Batcher::default();
    (0..2).for_each(|_| checked.enter(&mut first));
    let mut threads = Vec::new();
    let queued = Arc::new((Mutex::new(false), crate::sync::Condvar::new()));
    {
        let (checked, queued) = (checked.clone(), queued.clone());
        threads.push(thread::spawn(move || {
            let notify = || {
                *lock(&queued.0) = true;
                queued.1.notify_all();
            };
            checked.gate.enter(W, &mut Batcher::default(), || 1, notify);
            checked.gate.leave(W, 1);
        }));
    }
    let mut seen = lock(&queued.0);
    while !*seen {
        seen = queued.1.wait(seen).expect("not poisoned");
    }
    drop(seen);
    for _ in 0..newcomers {
        let checked = checked.clone();
        threads.push(thread::spawn(move || {
            if checked.gate.try_enter(W, &mut Batcher::default(), || 1) {
                assert_eq!(checked.gate.waiting(W), 0, "the thread overtook a waiter");
                checked.gate.leave(W, 1);
            }
        }));
    }
    checked.leave(1);
    checked.leave(1);
    join(threads);
    assert_eq!(checked.gate.in_flight(W), 0);
}

/// A waiter enters when the limit is raised, although no request completes.
fn a_higher_limit_wakes(waiters: u32) {
    let checked = Checked::new(1, false);
    checked.gate.enter(W, &mut Batcher::default(), || 1, || {});
    let threads = (0..waiters)
        .map(|_| {
            let checked = checked.clone();
            thread::spawn(move || checked.gate.enter(W, &mut Batcher::default(), || 1, || {}))
        })
        .collect();
    checked.gate.set(waiters + 1, false);
    join(threads);
    assert_eq!(checked.gate.in_flight(W), waiters + 1);
}

/// The last request completes while the settings change. The thread that has the lock wakes the waiters.
fn a_change_loses_no_waiter(waiters: usize) {
    let checked = Checked::new(1, false);
    checked.gate.enter(W, &mut Batcher::default(), || 1, || {});
    let mut threads: Vec<_> = (0..waiters)
        .map(|_| {
            let checked = checked.clone();
            thread::spawn(move || {
                checked.gate.enter(W, &mut Batcher::default(), || 1, || {});
                checked.gate.leave(W, 1);
            })
        })
        .collect();
    let changed = checked.clone();
    threads.push(thread::spawn(move || changed.gate.set(1, false)));
    checked.gate.leave(W, 1);
    join(threads);
}

#[cfg(loom)]
mod loom_gate {
    use super::*;

    // Contract: tags
    #[test]
    fn loom_every_submitter_gets_through() {
        model("base, one request, three threads", 0, || every_submitter_gets_through(1, false, 3, 1, 1, 0));
        model("base, one request, two threads, twice", 0, || {
            every_submitter_gets_through(1, false, 2, 2, 1, 0)
        });
        model("batching, two requests, three threads", 0, || {
            every_submitter_gets_through(2, true, 3, 1, 1, 0)
        });
    }

    // Contract: tags
    #[test]
    fn loom_no_submitter_overtakes_a_waiter() {
        model("base", 0, || no_submitter_overtakes_a_waiter(false, 1));
        model("batching", 0, || no_submitter_overtakes_a_waiter(true, 1));
    }

    #[test]
    fn loom_a_higher_limit_wakes() {
        model("one waits while the limit is raised", 0, || a_higher_limit_wakes(1));
    }

    #[test]
    fn loom_a_change_loses_no_waiter() {
        model("one waits while the settings change", 0, || a_change_loses_no_waiter(1));
    }
}

#[cfg(shuttle)]
mod shuttle_gate {
    use super::*;

    #[test]
    fn shuttle_every_submitter_gets_through() {
        model("base, 3 requests, 8 threads", 10_000, || every_submitter_gets_through(3, false, 8, 6, 1, 0));
        model("batching, 4 requests, 8 threads", 10_000, || {
            every_submitter_gets_through(4, true, 8, 12, 1, 0)
        });
        let tick = BATCH_TIME_NS / 3;
        model("batching, 4 requests, time passes", 10_000, move || {
            every_submitter_gets_through(4, true, 8, 12, 1, tick)
        });
        model("batching, 16 requests, streams", 3_000, || {
            every_submitter_gets_through(16, true, 6, 60, 2, 100_000)
        });
    }

    // Contract: tags
    #[test]
    fn shuttle_a_batch_is_bounded() {
        // The two submitters fill the queue together and never wait, so a batch is granted only for filling
        // it.
        model("batching, 8 requests, two that keep 4", 1_000, || {
            every_submitter_gets_through(8, true, 2, 40, 4, 0)
        });
    }

    #[test]
    fn shuttle_no_submitter_overtakes_a_waiter() {
        model("base", 10_000, || no_submitter_overtakes_a_waiter(false, 4));
        model("batching", 10_000, || no_submitter_overtakes_a_waiter(true, 4));
    }

    #[test]
    fn shuttle_a_higher_limit_wakes() {
        model("four wait while the limit is raised", 10_000, || a_higher_limit_wakes(4));
    }

    #[test]
    fn shuttle_a_change_loses_no_waiter() {
        model("three wait while the settings change", 10_000, || a_change_loses_no_waiter(3));
    }
}

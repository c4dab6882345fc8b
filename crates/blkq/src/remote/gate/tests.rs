use std::sync::atomic::{AtomicU64 as Clock, Ordering::SeqCst};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::*;
use crate::testing::wait_until;

const R: Direction = Direction::Read;
const W: Direction = Direction::Write;
const MS: u64 = 1_000_000;

impl RequestGate {
    fn in_flight(&self, direction: Direction) -> u32 {
        in_flight(self.side(direction).load.load(SeqCst))
    }
}

fn enters(gate: &RequestGate, batcher: &mut Batcher, now_ns: u64) -> u32 {
    (0..).take_while(|_| gate.try_enter(W, batcher, || now_ns)).count() as u32
}

fn until_waiting(gate: &RequestGate, count: u32) {
    wait_until("submitters wait at the gate", || gate.waiting(W) == count);
}

#[test]
fn the_submitter_that_fills_the_queue_becomes_a_batcher() {
    let gate = RequestGate::new(128, true);
    let mut filler = Batcher::default();
    // The 128th request is the first of a batch.
    assert_eq!(enters(&gate, &mut filler, MS), 128 + 31);
    assert!(!gate.try_enter(W, &mut Batcher::default(), || MS), "other submitters cannot enter");
    assert!(gate.try_enter(R, &mut Batcher::default(), || MS), "reads have their own limit");
    assert_eq!(gate.counters().grants, 1);
    assert_eq!(gate.counters().largest_grant, 32);
    assert_eq!(gate.counters().largest_in_flight, [1, 159]);
}

// Contract: tags
#[test]
fn a_batcher_stops_at_one_and_a_half_times_the_limit() {
    let gate = RequestGate::new(16, true);
    assert_eq!(enters(&gate, &mut Batcher::default(), MS), 24);
}

// Contract: tags
#[test]
fn a_batch_is_over_after_its_time() {
    let gate = RequestGate::new(128, true);
    let mut filler = Batcher::default();
    for _ in 0..130 {
        assert!(gate.try_enter(W, &mut filler, || MS));
    }
    assert!(gate.try_enter(W, &mut filler, || MS + BATCH_TIME_NS - 1));
    assert!(!gate.try_enter(W, &mut filler, || MS + BATCH_TIME_NS));
}

// Contract: tags
#[test]
fn the_first_of_a_batch_is_granted_however_late() {
    let batcher = Batcher { credit: BATCH_REQUESTS, ..Batcher::default() };
    assert!(batcher.is_batching(u64::MAX));
    let batcher = Batcher { credit: BATCH_REQUESTS - 1, ..Batcher::default() };
    assert!(!batcher.is_batching(u64::MAX));
}

#[test]
fn without_batching_the_limit_is_the_limit() {
    let gate = RequestGate::new(8, false);
    let mut batcher = Batcher { credit: 20, last_waited_ns: MS, ..Batcher::default() };
    assert_eq!(enters(&gate, &mut batcher, MS), 8);
    assert_eq!((batcher.credit, gate.counters().grants), (20, 0));
}

/// Starts submitters one after the other. Each takes `want` requests when it enters, and reports them.
fn queue_of<'s>(
    scope: &'s thread::Scope<'s, '_>,
    gate: &'s RequestGate,
    clock: &'s Clock,
    submitters: u32,
    want: u32,
) -> mpsc::Receiver<u32> {
    let (entered, entries) = mpsc::channel();
    for number in 0..submitters {
        let entered = entered.clone();
        scope.spawn(move || {
            let mut batcher = Batcher::default();
            gate.enter(W, &mut batcher, || clock.load(SeqCst), || {});
            let more =
                (1..want).take_while(|_| gate.try_enter(W, &mut batcher, || clock.load(SeqCst))).count();
            entered.send(number * 100 + 1 + more as u32).expect("the test listens");
        });
        until_waiting(gate, number + 1);
    }
    entries
}

#[test]
fn without_batching_each_request_wakes_one_in_order() {
    let gate = RequestGate::new(4, false);
    let clock = Clock::new(MS);
    assert_eq!(enters(&gate, &mut Batcher::default(), MS), 4);
    thread::scope(|scope| {
        let entries = queue_of(scope, &gate, &clock, 4, 32);
        for number in 0..4 {
            gate.leave(W, 1);
            assert_eq!(entries.recv().expect("it got in"), number * 100 + 1, "one request each, in order");
            assert!(!gate.try_enter(W, &mut Batcher::default(), || MS));
        }
    });
    assert_eq!(gate.in_flight(W), 4);
    let counters = gate.counters();
    assert_eq!((counters.waits, counters.wakeups, counters.grants), (4, 4, 0));
    assert_eq!(counters.largest_in_flight, [0, 4]);
}

// Contract: tags
#[test]
fn a_woken_submitter_takes_a_batch() {
    let gate = RequestGate::new(64, true);
    let clock = Clock::new(MS);
    assert_eq!(enters(&gate, &mut Batcher::default(), MS), 95);
    thread::scope(|scope| {
        let entries = queue_of(scope, &gate, &clock, 2, 100);
        gate.leave(W, 31);
        assert!(entries.recv_timeout(Duration::from_millis(20)).is_err(), "still full");
        gate.leave(W, 1);
        assert_eq!(entries.recv().expect("it got in"), 32);
        assert_eq!((gate.in_flight(W), gate.waiting(W)), (95, 1));
        gate.leave(W, 32);
        assert_eq!(entries.recv().expect("it got in"), 132);
    });
    let counters = gate.counters();
    assert_eq!((counters.waits, counters.wakeups, counters.grants), (2, 2, 3));
}

#[test]
fn one_batcher_is_woken_for_the_room_of_a_batch() {
    let gate = RequestGate::new(128, true);
    let clock = Clock::new(MS);
    assert_eq!(enters(&gate, &mut Batcher::default(), MS), 159);
    thread::scope(|scope| {
        let entries = queue_of(scope, &gate, &clock, 8, 32);
        // Room for 33: two batches begin, where the base would wake 33.
        gate.leave(W, 64);
        entries.recv().expect("the first");
        entries.recv().expect("the second");
        assert_eq!((gate.waiting(W), gate.counters().wakeups), (6, 2));
        assert_eq!(gate.in_flight(W), 95 + 64);
        // Promises that are not kept are void when half of the requests are back.
        gate.leave(W, 95 + 64);
        for _ in 0..4 {
            entries.recv().expect("four more");
        }
        gate.leave(W, 128);
        entries.recv().expect("the last but one");
        entries.recv().expect("the last");
    });
    assert_eq!(gate.counters().wakeups, 8);
}

#[test]
fn submitters_of_single_requests_keep_the_queue_filled() {
    let gate = RequestGate::new(8, true);
    let clock = Clock::new(MS);
    let once = Batcher { credit: BATCH_REQUESTS - 1, ..Batcher::default() };
    assert_eq!(once.promise(u64::MAX), 0, "the submitter took one request of its last batch");
    assert_eq!(enters(&gate, &mut Batcher::default(), MS), 12);
    thread::scope(|scope| {
        let gate = &gate;
        for number in 0..4 {
            scope.spawn({
                let clock = &clock;
                move || {
                    let mut batcher = Batcher { credit: BATCH_REQUESTS - 1, ..Batcher::default() };
                    clock.fetch_max(BATCH_TIME_NS * 2, SeqCst);
                    gate.enter(W, &mut batcher, || clock.load(SeqCst), || {});
                }
            });
            until_waiting(gate, number + 1);
        }
        gate.leave(W, 7);
        until_waiting(gate, 1);
        assert_eq!(gate.in_flight(W), 8);
        gate.leave(W, 1);
    });
}

#[test]
fn a_submitter_is_notified_before_it_sleeps() {
    let gate = RequestGate::new(1, false);
    let mut asked = false;
    gate.enter(W, &mut Batcher::default(), || MS, || asked = true);
    assert!(!asked);
    // It waits for the requests that it has plugged itself.
    gate.enter(W, &mut Batcher::default(), || MS, || gate.leave(W, 1));
    assert_eq!((gate.in_flight(W), gate.counters().waits), (1, 1));
}

#[test]
fn settings_change_while_requests_are_in_flight() {
    let gate = RequestGate::new(4, false);
    let clock = Clock::new(MS);
    assert_eq!(enters(&gate, &mut Batcher::default(), MS), 4);
    thread::scope(|scope| {
        let entries = queue_of(scope, &gate, &clock, 3, 1);
        gate.set(6, false);
        entries.recv().expect("the first");
        entries.recv().expect("the second");
        assert_eq!((gate.in_flight(W), gate.waiting(W)), (6, 1));
        gate.set(2, true);
        gate.leave(W, 4);
        assert_eq!(gate.waiting(W), 1);
        gate.leave(W, 1);
        entries.recv().expect("the third");
    });
    assert_eq!(
        (gate.nr_requests.load(Relaxed), gate.batching.load(Relaxed), gate.in_flight(W)),
        (2, true, 2)
    );
}

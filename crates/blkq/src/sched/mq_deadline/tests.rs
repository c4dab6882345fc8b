//! Properties of mq-deadline, and a comparison of random sequences of steps with a plain model.

use proptest::prelude::*;

use super::*;
use crate::bio::BioFlags;

const TAGS: usize = 64;

fn bio(operation: Operation, sector: Sector, sectors: u64) -> Outline {
    Outline { operation, flags: BioFlags::empty(), sector, sectors, start_ns: 0 }
}

/// A scheduler with the requests of its tags, and a device that needs `SERVICE_NS` per request.
struct TestBed {
    scheduler: MqDeadline,
    requests: Vec<Request>,
    held: Vec<bool>,
    now_ns: u64,
}

const SERVICE_NS: u64 = NS_PER_MS;

impl TestBed {
    fn new() -> TestBed {
        let requests = (0..TAGS).map(|_| Request::idle()).collect();
        TestBed { scheduler: MqDeadline::new(TAGS), requests, held: vec![false; TAGS], now_ns: NS_PER_MS }
    }

    fn insert(&mut self, operation: Operation, sector: u64, sectors: u64) -> Option<Tag> {
        let index = self.held.iter().position(|held| !held)?;
        let request = &mut self.requests[index];
        (request.operation, request.sector, request.sectors) = (operation, Sector(sector), sectors as _);
        self.held[index] = true;
        self.scheduler.insert(Tag(index as u16), &self.requests, self.now_ns);
        Some(Tag(index as u16))
    }

    fn dispatch(&mut self) -> Option<(Tag, Operation, Sector)> {
        let before = (self.scheduler.batch_direction, self.scheduler.batched);
        let tag = self.scheduler.dispatch(&self.requests, [true; 2], self.now_ns)?;
        let request = &self.requests[tag.index()];
        assert!(std::mem::take(&mut self.held[tag.index()]), "{tag:?} was not queued");
        let after = (self.scheduler.batch_direction, self.scheduler.batched);
        assert!(after.1 <= self.scheduler.fifo_batch.max(1));
        assert!(after == (before.0, before.1.wrapping_add(1)) || after.1 == 1, "a batch has one direction");
        self.now_ns += SERVICE_NS;
        Some((tag, request.operation, request.sector))
    }

    /// Fills up the queue to 30 requests of `operation`, each at the end of the previous one.
    fn flood(&mut self, operation: Operation, sector: &mut u64) {
        for _ in self.held().filter(|(_, request)| request.operation == operation).count()..30 {
            *sector += 8;
            self.insert(operation, *sector, 8);
        }
    }

    fn held(&self) -> impl Iterator<Item = (Tag, &Request)> {
        let all = self.requests.iter().enumerate().map(|(i, request)| (Tag(i as u16), request));
        all.filter(|(tag, _)| self.held[tag.index()])
    }
}

#[test]
fn a_batch_ascends_from_the_last_position() {
    let mut bed = TestBed::new();
    for sector in [500, 100, 300, 200, 400] {
        bed.insert(Operation::Read, sector, 8);
    }
    bed.scheduler.directions[READ].latest = Sector(250);
    let order: Vec<u64> = std::iter::from_fn(|| bed.dispatch()).map(|(_, _, sector)| sector.0).collect();
    // Behind the last position the oldest request is next, and the batch continues from there.
    assert_eq!(order, [300, 400, 500, 100, 200]);
}

#[test]
fn batches_are_bounded_and_writes_get_every_third() {
    let mut bed = TestBed::new();
    let mut directions = Vec::new();
    let mut sector = 0;
    for _ in 0..16 * 9 {
        bed.flood(Operation::Read, &mut sector);
        bed.flood(Operation::Write, &mut sector);
        let (_, operation, _) = bed.dispatch().unwrap();
        if bed.scheduler.batched == 1 {
            directions.push(operation);
        }
    }
    use Operation::{Read, Write};
    assert_eq!(directions, [Read, Read, Write, Read, Read, Write, Read, Read, Write]);
}

#[test]
fn a_read_waits_one_batch_of_a_write_flood() {
    for arrives in 0..40 {
        let mut bed = TestBed::new();
        let mut sector = 1_000_000;
        let mut read = None;
        for turn in 0..100 {
            bed.flood(Operation::Write, &mut sector);
            if turn == arrives {
                read = Some((bed.insert(Operation::Read, 8, 8), bed.now_ns));
            }
            let (tag, ..) = bed.dispatch().unwrap();
            if let Some((wanted, since_ns)) = read
                && wanted == Some(tag)
            {
                assert!(bed.now_ns - since_ns <= 17 * SERVICE_NS);
                read = None;
            }
        }
        assert_eq!(read, None);
    }
}

/// The time that a request of `waits` needs behind a stream of others of its direction, while the other
/// direction is flooded.
fn expired_wait_ns(waits: Operation, floods: Operation) -> u64 {
    let mut bed = TestBed::new();
    let mut sector = 1_000_000;
    bed.scheduler.directions[direction_of(waits)].latest = Sector(sector);
    let since_ns = bed.now_ns;
    let wanted = bed.insert(waits, 8, 8);
    loop {
        bed.flood(waits, &mut sector);
        bed.flood(floods, &mut sector);
        let tag = bed.dispatch().map(|(tag, ..)| tag);
        assert!(bed.now_ns < 60_000 * NS_PER_MS, "it waits for ever");
        if tag == wanted {
            return bed.now_ns - since_ns;
        }
    }
}

#[test]
fn deadlines_bound_the_wait_behind_a_stream() {
    let batch_ns = 16 * SERVICE_NS;
    // The batch that runs when the read expires, and the write batch that may be due after it.
    let wait_ns = expired_wait_ns(Operation::Read, Operation::Write);
    assert!((500 * NS_PER_MS..=500 * NS_PER_MS + 2 * batch_ns + SERVICE_NS).contains(&wait_ns));
    // A write may additionally wait for two read batches.
    let wait_ns = expired_wait_ns(Operation::Write, Operation::Read);
    assert!((5000 * NS_PER_MS..=5000 * NS_PER_MS + 3 * batch_ns + SERVICE_NS).contains(&wait_ns));
}

#[test]
fn the_tunables_are_those_of_the_kernel() {
    let scheduler = MqDeadline::new(4);
    assert_eq!((scheduler.writes_starved, scheduler.fifo_batch), (2, 16));
    assert_eq!(scheduler.directions.each_ref().map(|d| d.expire_ns / NS_PER_MS), [500, 5000]);
}

#[test]
fn a_bio_is_merged_at_the_front_or_at_the_back() {
    let mut bed = TestBed::new();
    let tag = bed.insert(Operation::Write, 100, 8).unwrap();
    let find = |bed: &TestBed, sector| {
        bed.scheduler.find_merge(&bed.requests, &bio(Operation::Write, Sector(sector), 8))
    };
    assert_eq!(find(&bed, 92), Some((tag, MergeSide::Front)));
    assert_eq!(find(&bed, 108), Some((tag, MergeSide::Back)));
}

#[derive(Clone, Debug)]
enum Step {
    Insert(Operation, u64, u64),
    /// Merges with a request, if one is found, and joins the neighbour, if there is one.
    Merge(Operation, u64, u64),
    Dispatch(u8),
    Remove(u8),
    Wait(u64),
    Set(Tunable, u8),
}

#[derive(Clone, Copy, Debug)]
enum Tunable {
    WritesStarved,
    FifoBatch,
    ReadExpire,
}

fn step() -> impl Strategy<Value = Step> {
    let operation = prop_oneof![
        3 => Just(Operation::Read),
        3 => Just(Operation::Write),
        1 => Just(Operation::Discard),
        1 => Just(Operation::WriteZeroes),
    ];
    let place = (operation, 0u64..40, 1u64..4);
    let key = prop::sample::select(vec![Tunable::WritesStarved, Tunable::FifoBatch, Tunable::ReadExpire]);
    prop_oneof![
        8 => place.clone().prop_map(|(operation, at, n)| Step::Insert(operation, at, n)),
        8 => place.prop_map(|(operation, at, n)| Step::Merge(operation, at, n)),
        6 => (1u8..20).prop_map(Step::Dispatch),
        1 => any::<u8>().prop_map(Step::Remove),
        1 => (0u64..3_000_000_000).prop_map(Step::Wait),
        1 => (key, 0u8..20).prop_map(|(key, value)| Step::Set(key, value)),
    ]
}

/// The invariants after every step.
fn check(bed: &TestBed) {
    let scheduler = &bed.scheduler;
    assert_eq!(scheduler.len(), bed.held().count());
    for (number, direction) in scheduler.directions.iter().enumerate() {
        let mut sorted: Vec<_> = bed
            .held()
            .filter(|(_, request)| direction_of(request.operation) == number)
            .map(|(tag, request)| (request.sector, tag))
            .collect();
        sorted.sort_unstable();
        assert!(direction.sorted.iter().eq(&sorted));
        let (mut index, mut inserted_ns, mut linked) = (direction.oldest, 0, 0);
        while let Some(entry) = scheduler.entries.get(index as usize) {
            assert!(entry.held && entry.direction == number && entry.inserted_ns >= inserted_ns);
            (index, inserted_ns, linked) = (entry.next, entry.inserted_ns, linked + 1);
        }
        assert_eq!(linked, sorted.len());
        assert_eq!(direction.sorted.capacity(), VecDeque::<(Sector, Tag)>::with_capacity(TAGS).capacity());
    }
}

fn merge(bed: &mut TestBed, operation: Operation, sector: Sector, sectors: u64) {
    let found = bed.scheduler.find_merge(&bed.requests, &bio(operation, sector, sectors));
    let Some((tag, side)) = found else {
        // A touching request may be missed only if requests overlap.
        let direction = direction_of(operation);
        let touching = bed
            .held()
            .any(|(_, r)| r.operation == operation && (r.end() == sector || r.sector == sector + sectors));
        let overlapping = bed.held().any(|(a, r)| {
            bed.held().any(|(b, s)| {
                let same = direction_of(r.operation) == direction && direction_of(s.operation) == direction;
                a != b && same && r.sector <= s.sector && s.sector < r.end()
            })
        });
        assert!(!touching || overlapping);
        return;
    };
    assert!(bed.held[tag.index()]);
    let request = &mut bed.requests[tag.index()];
    let end = request.end().max(sector + sectors);
    assert_eq!(request.operation, operation);
    match side {
        MergeSide::Back => assert_eq!(request.end(), sector),
        MergeSide::Front => {
            assert_eq!(request.sector, sector + sectors);
            request.sector = sector;
        }
    }
    request.sectors = (end - request.sector) as _;
    bed.scheduler.merged(tag, &bed.requests);
    check(bed);
    let Some(other) = bed.scheduler.find_neighbour(&bed.requests, tag, side) else { return };
    let (kept, gone) = if side == MergeSide::Back { (tag, other) } else { (other, tag) };
    assert!(kept != gone && bed.held[kept.index()] && bed.held[gone.index()]);
    assert_eq!(bed.requests[kept.index()].end(), bed.requests[gone.index()].sector);
    assert_eq!(bed.requests[kept.index()].operation, bed.requests[gone.index()].operation);
    let inserted_ns = [kept, gone].map(|tag| bed.scheduler.entries[tag.index()].inserted_ns);
    let end = bed.requests[gone.index()].end();
    let request = &mut bed.requests[kept.index()];
    request.sectors = (end - request.sector) as _;
    bed.held[gone.index()] = false;
    bed.scheduler.joined(kept, gone);
    let joined_ns = bed.scheduler.entries[kept.index()].inserted_ns;
    assert_eq!(Some(joined_ns), inserted_ns.into_iter().min());
}

proptest! {
    #[test]
    fn every_request_leaves_once_and_batches_ascend(steps in proptest::collection::vec(step(), 1..120)) {
        let mut bed = TestBed::new();
        let (mut last, mut read_batches) = (Sector(0), 0);
        let mut dispatch = |bed: &mut TestBed| {
            let writes_waited = bed.held().any(|(_, request)| request.operation.is_write());
            let Some((_, operation, sector)) = bed.dispatch() else { return false };
            if bed.scheduler.batched > 1 {
                assert!(sector >= last);
            } else if operation.is_write() || !writes_waited {
                read_batches = 0;
            } else {
                read_batches += 1;
                assert!(read_batches <= 20, "no more than writes_starved may be set to");
            }
            last = sector;
            true
        };
        for step in steps {
            match step {
                Step::Insert(operation, at, sectors) => {
                    bed.insert(operation, at, sectors);
                }
                Step::Merge(operation, at, sectors) => merge(&mut bed, operation, Sector(at), sectors),
                Step::Dispatch(n) => (0..n).for_each(|_| {
                    dispatch(&mut bed);
                }),
                Step::Remove(index) => {
                    let tag = Tag(u16::from(index) % TAGS as u16);
                    let held = std::mem::take(&mut bed.held[tag.index()]);
                    prop_assert_eq!(bed.scheduler.remove(tag), held);
                }
                Step::Wait(ns) => bed.now_ns += ns,
                Step::Set(Tunable::WritesStarved, value) => bed.scheduler.writes_starved = value.into(),
                Step::Set(Tunable::FifoBatch, value) => bed.scheduler.fifo_batch = value.into(),
                Step::Set(Tunable::ReadExpire, value) => {
                    bed.scheduler.directions[READ].expire_ns = u64::from(value) * NS_PER_MS;
                }
            }
            check(&bed);
        }
        while dispatch(&mut bed) {}
        prop_assert_eq!(bed.held().count(), 0);
        check(&bed);
    }
}

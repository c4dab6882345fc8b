//! Properties of kyber, and a comparison of random sequences of steps with a plain model.

use proptest::prelude::*;

use super::*;
use crate::bio::BioFlags;
use crate::sector::Sector;

const TAGS: usize = 640;
const ONE_OF_EACH: [Operation; 4] =
    [Operation::Read, Operation::Write, Operation::Discard, Operation::WriteZeroes];

fn bio(operation: Operation, sector: Sector, sectors: u64) -> Outline {
    Outline { operation, flags: BioFlags::empty(), sector, sectors, start_ns: 0 }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Place {
    Free,
    Queued,
    InFlight,
}

struct TestBed {
    scheduler: Kyber,
    requests: Vec<Request>,
    places: Vec<Place>,
    now_ns: u64,
}

impl TestBed {
    fn new() -> TestBed {
        TestBed {
            scheduler: Kyber::new(TAGS),
            requests: (0..TAGS).map(|_| Request::idle()).collect(),
            places: vec![Place::Free; TAGS],
            now_ns: NS_PER_MS,
        }
    }

    fn insert(&mut self, operation: Operation, sector: u64, sectors: u64) -> Option<Tag> {
        let index = self.places.iter().position(|&place| place == Place::Free)?;
        let request = &mut self.requests[index];
        (request.operation, request.sector, request.sectors) = (operation, Sector(sector), sectors);
        self.places[index] = Place::Queued;
        self.scheduler.insert(Tag(index as u16), &self.requests, self.now_ns);
        Some(Tag(index as u16))
    }

    fn dispatch(&mut self) -> Option<(Tag, Operation)> {
        let tag = self.scheduler.dispatch(&self.requests, [true; 2], self.now_ns)?;
        assert_eq!(std::mem::replace(&mut self.places[tag.index()], Place::InFlight), Place::Queued);
        let operation = self.requests[tag.index()].operation;
        let domain = domain_of(operation);
        assert!(self.count(domain, Place::InFlight) <= self.scheduler.domains[domain].depth as usize);
        Some((tag, operation))
    }

    fn complete(&mut self, tags: &[Tag]) {
        for tag in tags {
            assert_eq!(std::mem::replace(&mut self.places[tag.index()], Place::Free), Place::InFlight);
        }
        let completed: Vec<(Tag, IoResult)> = tags.iter().map(|&tag| (tag, Ok(()))).collect();
        self.scheduler.completed(&completed, self.now_ns);
    }

    fn all(&self, domain: usize, place: Place) -> impl Iterator<Item = Tag> {
        let of_domain = move |index: &usize| domain_of(self.requests[*index].operation) == domain;
        let all = (0..TAGS).filter(of_domain).filter(move |&index| self.places[index] == place);
        all.map(|index| Tag(index as u16))
    }

    fn count(&self, domain: usize, place: Place) -> usize {
        self.all(domain, place).count()
    }

    /// Ensures that 20 requests of `operation` are queued.
    fn flood(&mut self, operation: Operation) {
        for _ in self.count(domain_of(operation), Place::Queued)..20 {
            self.insert(operation, 0, 8);
        }
    }

    /// Runs `count` requests of `operation`. Each waits here for `waits_ms` and in the driver for `io_ms`.
    fn run(&mut self, operation: Operation, count: u32, waits_ms: u64, io_ms: u64) {
        for _ in 0..count {
            let begin_ns = self.now_ns;
            let tag = self.insert(operation, 0, 8).unwrap();
            self.now_ns += waits_ms * NS_PER_MS;
            assert_eq!(self.dispatch(), Some((tag, operation)));
            self.now_ns += io_ms * NS_PER_MS;
            // The time goes back for the next request, because a device runs many requests concurrently.
            self.complete_at(tag, begin_ns);
        }
    }

    fn complete_at(&mut self, tag: Tag, begin_ns: u64) {
        // Only `check_latencies` evaluates latencies.
        self.scheduler.evaluate_at_ns = Some(u64::MAX);
        self.complete(&[tag]);
        self.now_ns = begin_ns;
    }

    /// Evaluates the latencies when that is due, and returns the depths.
    fn check_latencies(&mut self) -> [u32; 4] {
        self.scheduler.evaluate_at_ns = None;
        self.complete(&[]);
        self.now_ns += EVALUATE_AFTER_NS - 1;
        let before = self.depths();
        self.complete(&[]);
        assert_eq!(self.depths(), before, "it is not due");
        self.now_ns += 1;
        self.complete(&[]);
        self.depths()
    }

    fn depths(&self) -> [u32; 4] {
        self.scheduler.domains.each_ref().map(|domain| domain.depth)
    }
}

#[test]
fn the_tunables_are_those_of_the_kernel() {
    let domains = Kyber::new(4).domains.map(|domain| (domain.depth, domain.batch, domain.target_ns));
    let target = |ms: u64| Some(ms * NS_PER_MS);
    assert_eq!(domains, [(256, 16, target(2)), (128, 8, target(10)), (64, 1, target(5000)), (16, 1, None)]);
}

#[test]
fn domains_have_their_batches_in_turn() {
    let mut bed = TestBed::new();
    let mut order = Vec::new();
    for _ in 0..3 * (16 + 8 + 1 + 1) {
        ONE_OF_EACH.iter().for_each(|&operation| bed.flood(operation));
        let (tag, operation) = bed.dispatch().unwrap();
        bed.complete(&[tag]);
        order.push(operation);
    }
    let turn =
        [(16, Operation::Read), (8, Operation::Write), (1, Operation::Discard), (1, Operation::WriteZeroes)];
    let turn: Vec<Operation> = turn.iter().flat_map(|&(count, of)| vec![of; count]).collect();
    assert_eq!(order, turn.repeat(3));
}

#[test]
fn nothing_waits_longer_than_a_batch_of_each_other_domain() {
    for waits in ONE_OF_EACH {
        let others = ONE_OF_EACH.into_iter().filter(|&operation| operation != waits);
        let domains = TestBed::new().scheduler.domains;
        let most: u32 = others.clone().map(|operation| domains[domain_of(operation)].batch).sum();
        for arrives in 0..60 {
            let mut bed = TestBed::new();
            let mut waited = None;
            for turn in 0..200 {
                others.clone().for_each(|operation| bed.flood(operation));
                if turn == arrives {
                    bed.insert(waits, 0, 8);
                    waited = Some(0);
                }
                let (tag, operation) = bed.dispatch().unwrap();
                bed.complete(&[tag]);
                if operation == waits {
                    assert!(waited.take() <= Some(most));
                }
                waited = waited.map(|turns| turns + 1);
            }
            assert_eq!(waited, None, "a {} waits for ever", waits.name());
        }
    }
}

#[test]
fn a_domain_stays_within_its_tokens_and_delays_no_other() {
    let mut bed = TestBed::new();
    for operation in ONE_OF_EACH {
        let domain = domain_of(operation);
        let depth = bed.scheduler.domains[domain].depth as usize;
        (0..depth + 5).for_each(|_| assert!(bed.insert(operation, 0, 8).is_some()));
        let dispatched: Vec<Operation> = std::iter::from_fn(|| bed.dispatch()).map(|(_, of)| of).collect();
        assert_eq!(dispatched, vec![operation; depth]);
        // The others wait until a request of their own domain completes.
        assert_eq!(bed.count(domain, Place::Queued), 5);
    }
    for operation in ONE_OF_EACH {
        let completed: Vec<Tag> = bed.all(domain_of(operation), Place::InFlight).take(3).collect();
        bed.complete(&completed);
        let dispatched: Vec<Operation> = std::iter::from_fn(|| bed.dispatch()).map(|(_, of)| of).collect();
        assert_eq!(dispatched, [operation; 3]);
    }
}

#[test]
fn a_domain_on_target_yields_to_a_late_one_and_recovers() {
    use Operation::{Read, Write};
    let mut bed = TestBed::new();
    // The device is slow for reads. Writes, which are fast, lose tokens until they have one.
    for writes in [32, 8, 2, 1, 1] {
        bed.run(Read, SAMPLES, 0, 3);
        bed.run(Write, SAMPLES, 0, 2);
        assert_eq!(bed.check_latencies(), [256, writes, 64, 16]);
    }
    // Reads are fast again, and writes do not need more tokens.
    bed.run(Read, SAMPLES, 0, 1);
    bed.run(Write, SAMPLES, 5, 2);
    assert_eq!(bed.check_latencies(), [256, 1, 64, 16]);
    // Writes need more tokens, because they wait in the scheduler. The number doubles up to the original one.
    for writes in [2, 4, 8, 16, 32, 64, 128, 128] {
        bed.run(Read, SAMPLES, 0, 1);
        bed.run(Write, SAMPLES, 30, 1);
        assert_eq!(bed.check_latencies(), [256, writes, 64, 16]);
    }
    // Now with reads and writes exchanged. Reads that stay below three quarters of their target keep
    // their tokens.
    bed.run(Write, SAMPLES, 0, 20);
    bed.run(Read, SAMPLES, 0, 1);
    assert_eq!(bed.check_latencies(), [128, 128, 64, 16]);
    bed.run(Write, SAMPLES, 0, 1);
    bed.run(Read, SAMPLES, 9, 1);
    assert_eq!(bed.check_latencies(), [256, 128, 64, 16]);
}

#[test]
fn one_in_a_hundred_may_be_slow_and_one_in_ten_in_the_device() {
    use Operation::{Read, Write};
    for (slow_reads, writes) in [(50, 128), (51, 32)] {
        let mut bed = TestBed::new();
        bed.run(Read, 500 - slow_reads, 0, 1);
        bed.run(Read, slow_reads, 0, 3);
        bed.run(Write, 500, 0, 1);
        assert_eq!(bed.check_latencies()[WRITE], writes);
    }
    for (slow_writes, depth) in [(5, 32), (6, 64)] {
        let mut bed = TestBed::new();
        bed.scheduler.domains[WRITE].depth = 32;
        bed.run(Write, 500 - slow_writes, 0, 1);
        bed.run(Write, slow_writes, 30, 1);
        assert_eq!(bed.check_latencies()[WRITE], depth);
    }
}

#[test]
fn few_samples_count_when_they_are_a_second_old() {
    let mut bed = TestBed::new();
    bed.scheduler.domains[WRITE].depth = 32;
    bed.run(Operation::Write, SAMPLES - 1, 30, 1);
    for _ in 0..9 {
        assert_eq!(bed.check_latencies()[WRITE], 32);
    }
    // `run` has stamped the samples 31 ms ahead of the time to which it returned.
    bed.now_ns += 31 * NS_PER_MS;
    assert_eq!(bed.check_latencies()[WRITE], 64);
    assert_eq!(bed.check_latencies()[WRITE], 64, "they were used up");
}

#[test]
fn a_kept_percentile_limits_its_domain_once() {
    let mut bed = TestBed::new();
    bed.run(Operation::Write, SAMPLES, 0, 1);
    assert_eq!(bed.check_latencies()[WRITE], 128);
    for _ in 0..3 {
        bed.run(Operation::Read, SAMPLES, 0, 3);
        assert_eq!(bed.check_latencies()[WRITE], 32);
    }
}

#[test]
fn a_depth_below_what_is_in_flight_lets_it_complete_first() {
    let mut bed = TestBed::new();
    let in_flight: Vec<Tag> = (0..4).map(|_| bed.insert(Operation::Write, 0, 8).unwrap()).collect();
    in_flight.iter().for_each(|&tag| assert_eq!(bed.dispatch(), Some((tag, Operation::Write))));
    bed.scheduler.domains[WRITE].depth = 2;
    let next = bed.insert(Operation::Write, 0, 8).unwrap();
    for completed in in_flight.chunks(1).take(3) {
        assert_eq!(bed.dispatch(), None);
        bed.complete(completed);
    }
    assert_eq!(bed.dispatch(), Some((next, Operation::Write)));
}

#[test]
fn a_bio_is_compared_with_the_youngest_eight() {
    let mut bed = TestBed::new();
    let tags: Vec<Tag> = (0..9).map(|n| bed.insert(Operation::Write, 100 * n, 8).unwrap()).collect();
    bed.insert(Operation::Read, 1000, 8);
    let find =
        |operation, sector| bed.scheduler.find_merge(&bed.requests, &bio(operation, Sector(sector), 8));
    assert_eq!(find(Operation::Write, 8), None);
    assert_eq!(find(Operation::Write, 108), Some((tags[1], MergeSide::Back)));
    assert_eq!(find(Operation::Write, 792), Some((tags[8], MergeSide::Front)));
    assert_eq!((find(Operation::Read, 808), find(Operation::Write, 1008)), (None, None));
}

#[derive(Clone, Debug)]
enum Step {
    Insert(Operation, u64, u64),
    Merge(Operation, u64, u64),
    Join(u16, u16),
    Dispatch(u16),
    Complete(u16),
    Remove(u16),
    Wait(u64),
    SetDepth(usize, u32),
}

fn step() -> impl Strategy<Value = Step> {
    let operation = prop::sample::select(ONE_OF_EACH.to_vec());
    let place = (operation, 0u64..40, 1u64..4);
    let tag = || 0u16..32;
    prop_oneof![
        8 => place.clone().prop_map(|(operation, at, n)| Step::Insert(operation, at, n)),
        4 => place.prop_map(|(operation, at, n)| Step::Merge(operation, at, n)),
        1 => (tag(), tag()).prop_map(|(kept, gone)| Step::Join(kept, gone)),
        4 => (1u16..20).prop_map(Step::Dispatch),
        4 => (1u16..20).prop_map(Step::Complete),
        1 => tag().prop_map(Step::Remove),
        2 => (0u64..300 * NS_PER_MS).prop_map(Step::Wait),
        1 => (0usize..4, 1u32..6).prop_map(|(domain, depth)| Step::SetDepth(domain, depth)),
    ]
}

/// The invariants after every step. `queued` has the expected requests in order of arrival.
fn check(bed: &TestBed, queued: &[Vec<Tag>; 4]) {
    assert_eq!(bed.scheduler.len(), queued.iter().map(Vec::len).sum::<usize>());
    for (number, domain) in bed.scheduler.domains.iter().enumerate() {
        assert!(domain.held.iter().eq(&queued[number]));
        assert_eq!(domain.in_flight as usize, bed.count(number, Place::InFlight));
        assert!((1..=domain.depth_max).contains(&domain.depth));
        assert_eq!(domain.held.capacity(), VecDeque::<Tag>::with_capacity(TAGS).capacity());
    }
}

proptest! {
    #[test]
    fn every_request_leaves_once_and_in_order(steps in proptest::collection::vec(step(), 1..150)) {
        let mut bed = TestBed::new();
        let mut queued: [Vec<Tag>; 4] = Default::default();
        let dispatch = |bed: &mut TestBed, queued: &mut [Vec<Tag>; 4]| {
            if let Some((tag, operation)) = bed.dispatch() {
                assert_eq!(queued[domain_of(operation)].remove(0), tag);
                return true;
            }
            for (domain, queued) in bed.scheduler.domains.iter().zip(queued) {
                assert!(queued.is_empty() || domain.in_flight >= domain.depth, "it throttles for nothing");
            }
            false
        };
        for step in steps {
            match step {
                Step::Insert(operation, at, sectors) => {
                    queued[domain_of(operation)].extend(bed.insert(operation, at, sectors));
                }
                Step::Merge(operation, at, sectors) => {
                    let sector = Sector(at);
                    let found = bed.scheduler.find_merge(&bed.requests, &bio(operation, sector, sectors));
                    let youngest = queued[domain_of(operation)].iter().rev().take(MERGE_CANDIDATES);
                    let touches = |tag: &Tag| {
                        let request = &bed.requests[tag.index()];
                        request.end() == sector || sector + sectors == request.sector
                    };
                    prop_assert_eq!(found.map(|(tag, _)| tag), youngest.copied().find(touches));
                    if let Some((tag, side)) = found {
                        let request = &mut bed.requests[tag.index()];
                        prop_assert_eq!(request.operation, operation);
                        prop_assert_eq!(side == MergeSide::Back, request.end() == sector);
                        request.sectors += sectors;
                        if side == MergeSide::Front {
                            request.sector = sector;
                        }
                        bed.scheduler.merged(tag, &bed.requests);
                        prop_assert_eq!(bed.scheduler.find_neighbour(&bed.requests, tag, side), None);
                    }
                }
                Step::Join(kept, gone) => {
                    let (kept, gone) = (Tag(kept), Tag(gone));
                    let domain = domain_of(bed.requests[kept.index()].operation);
                    if kept != gone && [kept, gone].iter().all(|tag| queued[domain].contains(tag)) {
                        let inserted_ns = |bed: &TestBed, tag: Tag| bed.scheduler.entries[tag.index()].inserted_ns;
                        let earlier_ns = inserted_ns(&bed, kept).min(inserted_ns(&bed, gone));
                        bed.scheduler.joined(kept, gone);
                        prop_assert_eq!(inserted_ns(&bed, kept), earlier_ns);
                        queued[domain].retain(|&tag| tag != gone);
                        bed.places[gone.index()] = Place::Free;
                    }
                }
                Step::Dispatch(count) => {
                    for _ in 0..count {
                        dispatch(&mut bed, &mut queued);
                    }
                }
                Step::Complete(count) => {
                    let in_flight = (0..4).flat_map(|domain| bed.all(domain, Place::InFlight));
                    let completed: Vec<Tag> = in_flight.take(count.into()).collect();
                    bed.complete(&completed);
                }
                Step::Remove(index) => {
                    let tag = Tag(index);
                    let held = bed.places[tag.index()] == Place::Queued;
                    prop_assert_eq!(bed.scheduler.remove(tag), held);
                    if held {
                        queued.iter_mut().for_each(|queued| queued.retain(|&other| other != tag));
                        bed.places[tag.index()] = Place::Free;
                        // The request completes without having been dispatched.
                        bed.scheduler.completed(&[(tag, Ok(()))], bed.now_ns);
                    }
                }
                Step::Wait(ns) => bed.now_ns += ns,
                Step::SetDepth(domain, depth) => bed.scheduler.domains[domain].depth = depth,
            }
            check(&bed, &queued);
        }
        // The rest is dispatched as earlier requests complete.
        while bed.scheduler.len() > 0 || bed.places.contains(&Place::InFlight) {
            while dispatch(&mut bed, &mut queued) {}
            let completed: Vec<Tag> = (0..4).flat_map(|domain| bed.all(domain, Place::InFlight)).collect();
            prop_assert!(!completed.is_empty(), "nothing is in flight and nothing leaves");
            bed.complete(&completed);
        }
        check(&bed, &queued);
    }
}

// Contract: errors
#[test]
fn a_request_that_is_held_returns_its_token_and_is_no_sample() {
    let mut bed = TestBed::new();
    let depth = bed.scheduler.domains[OTHER].depth as usize;
    for _ in 0..depth + 1 {
        bed.insert(Operation::WriteZeroes, 0, 8);
    }
    let (held, _) = std::iter::from_fn(|| bed.dispatch()).collect::<Vec<_>>()[0];
    assert_eq!(bed.count(OTHER, Place::InFlight), depth);
    bed.scheduler.requeued(held);
    bed.places[held.index()] = Place::Free;
    assert!(bed.dispatch().is_some(), "no token was returned");
    // Resumed an hour later, the write is reissued without a token and completes.
    bed.run(Operation::Read, 1, 0, 1);
    let (write, _) = (bed.insert(Operation::Write, 0, 8).unwrap(), bed.dispatch());
    bed.scheduler.requeued(write);
    bed.now_ns += 3_600_000 * NS_PER_MS;
    bed.complete(&[write]);
    assert_eq!(bed.scheduler.domains[WRITE].samples.count, 0);
    assert_eq!(bed.scheduler.domains[WRITE].in_flight, 0);
}

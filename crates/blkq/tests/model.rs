//! Random bios on random devices, compared with a list of versions per sector: reads return what was written,
//! each bio completes once and completely, requests obey the declared limits, and promised data survives a
//! power loss.

use std::collections::HashMap;
use std::ops::Range;

use crate::common::{self, Behaviour, Device, Finish, Scattered, bytes_of, content};
use blkq::{
    Bio, BioFlags, ClockMode, Completion, Data, Operation, QueueLimits, SchedulerKind, Sector, Status,
};
use proptest::prelude::*;

const SECTORS: u64 = 512;

#[derive(Clone, Debug)]
struct Step {
    operation: Operation,
    flags: BioFlags,
    sector: u64,
    sectors: u64,
    /// The lengths of the pieces of memory. Empty for one buffer.
    cuts: Vec<usize>,
    surplus: usize,
    /// The step begins where the previous one ended.
    sequential: bool,
    poll: bool,
}

#[derive(Clone, Debug)]
struct Setup {
    limits: QueueLimits,
    behaviour: Behaviour,
    depth: u16,
    scheduler: SchedulerKind,
    merge: bool,
    iostats: bool,
    clock: ClockMode,
    bad: Vec<(Range<u64>, Status)>,
}

fn limits() -> impl Strategy<Value = QueueLimits> {
    let sizes = (0u32..3, 0u32..3, 1u32..24, 1u16..6, 1u32..12, prop_oneof![Just(0u32), 1u32..12], 0u32..4);
    let discards = (0u64..40, 1u32..5, 0u64..40, 0u64..40);
    (sizes, discards, any::<(bool, bool)>()).prop_map(|(sizes, discards, (write_cache, fua))| {
        let (block, physical, request, segments, segment, chunk, align) = sizes;
        let (discard, granularity, zeroes, keep) = discards;
        let block = 512 << block;
        let no_tens = |n: u64| if n < 12 { 0 } else { n * u64::from(block) };
        QueueLimits {
            capacity_bytes: SECTORS << 9,
            logical_block_bytes: block,
            physical_block_bytes: block << physical,
            max_request_bytes: block * request,
            max_segments: segments,
            max_segment_bytes: block * segment,
            chunk_bytes: block * chunk,
            memory_align: [1, 4, 64, 512][align as usize],
            max_discard_bytes: no_tens(discard),
            discard_granularity: granularity * block,
            max_write_zeroes_bytes: no_tens(zeroes),
            max_write_zeroes_no_unmap_bytes: no_tens(keep),
            write_cache,
            fua,
            ..QueueLimits::default()
        }
    })
}

fn setup() -> impl Strategy<Value = Setup> {
    let behaviour = (
        prop_oneof![Just(Finish::AtOnce), Just(Finish::Random)],
        any::<u64>(),
        prop_oneof![2 => Just(0u64), 1 => 4u64..200],
        prop_oneof![4 => Just(None), 1 => (0u32..10).prop_map(Some)],
        prop::bool::weighted(0.2),
    );
    let bad =
        (0..SECTORS, 1u64..6, prop_oneof![Just(Status::Medium), Just(Status::Io), Just(Status::NoSpace)]);
    let bad = prop_oneof![2 => Just(Vec::new()), 1 => prop::collection::vec(bad, 1..4)];
    let depth = prop_oneof![Just(1u16), Just(2), 3u16..40, Just(128)];
    let scheduler = prop::sample::select(SchedulerKind::ALL.to_vec());
    (limits(), behaviour, depth, scheduler, any::<(bool, bool, bool)>(), bad).prop_map(
        |(
            limits,
            (finish, seed, busy_every, revoke_after, revoke_fua),
            depth,
            scheduler,
            (merge, iostats, cached),
            bad,
        )| Setup {
            limits,
            behaviour: Behaviour { finish, seed, busy_every, revoke_after, revoke_fua },
            depth,
            scheduler,
            merge,
            iostats,
            clock: if cached { ClockMode::Cached } else { ClockMode::Precise },
            bad: bad.into_iter().map(|(at, len, status)| (at..at + len, status)).collect(),
        },
    )
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let operation = prop_oneof![
        6 => Just(Operation::Read),
        8 => Just(Operation::Write),
        2 => Just(Operation::Discard),
        3 => Just(Operation::WriteZeroes),
        2 => Just(Operation::Flush),
    ];
    let flags = (any::<u8>(), any::<u8>()).prop_map(|(a, b)| BioFlags::from_bits_truncate(a & b));
    let cuts = prop_oneof![1 => Just(vec![]), 1 => prop::collection::vec(0usize..3000, 1..8)];
    let sectors = prop_oneof![4 => 1u64..16, 1 => 1u64..200];
    let step =
        (operation, flags, 0..SECTORS, sectors, cuts, 0usize..600, any::<bool>(), prop::bool::weighted(0.2))
            .prop_map(|(operation, flags, sector, sectors, cuts, surplus, sequential, poll)| Step {
                operation,
                flags,
                sector,
                sectors,
                cuts,
                surplus,
                sequential,
                poll,
            });
    prop::collection::vec(step, 1..120)
}

/// The contents of a sector, oldest first. `None` if a change failed, so that any earlier or intended content
/// is possible.
struct Sectors {
    history: Vec<Vec<[u8; 512]>>,
    /// The oldest entry of the history that may be read now, and that may remain after a power loss.
    now: Vec<usize>,
    promised: Vec<usize>,
}

impl Sectors {
    fn may_be(&self, sector: usize, oldest: usize, bytes: &[u8]) -> bool {
        self.history[sector][oldest..].iter().any(|version| version == bytes)
    }
}

struct InFlight {
    operation: Operation,
    flags: BioFlags,
    range: Range<u64>,
    log: usize,
    /// The bios that had completed when this one was submitted.
    completed: Vec<usize>,
}

struct Model {
    device: Device,
    sectors: Sectors,
    in_flight: HashMap<u64, InFlight>,
}

impl Model {
    fn complete(&mut self, completion: Completion) {
        let bio = self
            .in_flight
            .remove(&completion.user_data)
            .expect("a bio in flight that completes for the first time");
        let (range, result) = (bio.range.clone(), completion.result);
        let state = self.device.state();
        let log = &state.log[bio.log..];
        if bio.operation != Operation::Flush {
            let own = |seen: &&common::Seen| seen.overlaps(&range) && seen.result.is_some();
            let failed: Vec<Status> =
                log.iter().filter(own).filter_map(|s| s.result.unwrap().err()).collect();
            let worked_around =
                bio.operation == Operation::WriteZeroes && !bio.flags.contains(BioFlags::NO_FALLBACK);
            let fatal: Vec<_> =
                failed.iter().filter(|s| !(worked_around && **s == Status::NotSupported)).copied().collect();
            // A range that must stay allocated is never deallocated.
            if bio.operation == Operation::WriteZeroes && bio.flags.contains(BioFlags::NO_UNMAP) {
                let deallocates = |seen: &common::Seen| {
                    matches!(seen.operation, Operation::WriteZeroes | Operation::Discard)
                        && !seen.flags.contains(BioFlags::NO_UNMAP)
                };
                assert!(!log.iter().filter(own).any(deallocates), "no-unmap was not honoured");
            }
            match result {
                Ok(()) => assert_eq!(fatal, [], "the error did not reach {bio:?}", bio = bio.operation),
                Err(Status::Again) => assert!(bio.flags.contains(BioFlags::NO_WAIT)),
                Err(Status::NotSupported) if fatal.is_empty() => {
                    assert!(
                        bio.operation == Operation::Discard
                            || bio.operation == Operation::WriteZeroes
                                && bio.flags.contains(BioFlags::NO_FALLBACK)
                    );
                }
                Err(Status::Invalid) => {
                    // The only possible reason is memory in too many pieces.
                    assert!(bio.operation.has_data() && state.limits.max_segments < 6);
                }
                Err(status) => assert!(fatal.contains(&status), "{status:?} came from nowhere: {fatal:?}"),
            }
        }
        drop(state);
        let sectors = &mut self.sectors;
        for sector in range.clone().map(|sector| sector as usize) {
            if result.is_ok() && bio.operation.is_write() {
                let last = sectors.history[sector].len() - 1;
                let undefined = bio.operation == Operation::Discard;
                sectors.now[sector] = if undefined { sectors.now[sector].min(last) } else { last };
                if bio.flags.contains(BioFlags::FUA) && !undefined {
                    sectors.promised[sector] = last;
                }
            }
        }
        if bio.operation == Operation::Read && result.is_ok() {
            let bytes = bytes_of(&completion.data, ((range.end - range.start) << 9) as usize);
            for (sector, bytes) in range.zip(bytes.chunks_exact(512)) {
                let sector = sector as usize;
                assert!(
                    sectors.may_be(sector, sectors.now[sector], bytes),
                    "sector {sector} read back wrong"
                );
            }
        }
        let flushed = bio.operation == Operation::Flush || bio.flags.contains(BioFlags::PREFLUSH);
        if flushed && result.is_ok() {
            for (promised, completed) in sectors.promised.iter_mut().zip(bio.completed) {
                *promised = (*promised).max(completed);
            }
        }
    }
}

fn check(setup: Setup, steps: Vec<Step>) {
    let device = Device::new(setup.limits.clone(), setup.behaviour.clone());
    device.state().bad = setup.bad.clone();
    let disk = device
        .builder()
        .depth(setup.depth)
        .scheduler(setup.scheduler)
        .merge(setup.merge)
        .iostats(setup.iostats)
        .clock(setup.clock)
        .build()
        .unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    let zeroes = vec![[0; 512]];
    let sectors = Sectors {
        history: vec![zeroes; SECTORS as usize],
        now: vec![0; SECTORS as usize],
        promised: vec![0; SECTORS as usize],
    };
    let mut model = Model { device: device.clone(), sectors, in_flight: HashMap::new() };
    let block = u64::from(setup.limits.logical_block_bytes) >> 9;
    let (mut previous, mut next) = (0, 0);
    for (number, step) in (1..).zip(steps) {
        let start = if step.sequential { next } else { step.sector } / block * block;
        let start = if start >= SECTORS { 0 } else { start };
        let length = (step.sectors.next_multiple_of(block)).min(SECTORS - start);
        // Alternatively, the step ends where the previous one began.
        let backwards = step.sequential && step.surplus % 2 == 1 && length <= previous;
        let start = if backwards { previous - length } else { start };
        let mut range = start..start + length;
        let mut flags = step.flags;
        if !step.operation.is_write() {
            flags.remove(BioFlags::FUA | BioFlags::PREFLUSH);
        }
        if step.operation == Operation::Flush {
            range = 0..0;
        } else {
            (previous, next) = (range.start, range.end);
        }
        // The order of overlapping changes in flight is not defined. Of two overlapping reads, one alone may
        // fail, if only one of them was merged with a failing request.
        let overlaps = |bio: &InFlight| {
            bio.range.start < range.end
                && range.start < bio.range.end
                && (bio.operation.is_write() || step.operation.is_write() || !setup.bad.is_empty())
        };
        if model.in_flight.values().any(overlaps) {
            common::drain(&mut queue).into_iter().for_each(|completion| model.complete(completion));
        }
        let bytes: Vec<u8> = match step.operation {
            Operation::Write => range.clone().flat_map(|sector| content(sector, number)).collect(),
            _ => vec![0xEE; ((range.end - range.start) << 9) as usize],
        };
        let data = match step.operation.has_data() {
            false => Data::None,
            true if step.cuts.is_empty() => {
                let mut buffer = blkq::IoBuffer::zeroed(bytes.len());
                buffer.copy_from_slice(&bytes);
                buffer.into()
            }
            true => Scattered::data(&bytes, &step.cuts, setup.limits.memory_align as usize, step.surplus),
        };
        if step.operation.is_write() {
            for sector in range.clone() {
                let version =
                    if step.operation == Operation::Write { content(sector, number) } else { [0; 512] };
                model.sectors.history[sector as usize].push(version);
            }
        }
        let bio = InFlight {
            operation: step.operation,
            flags,
            range: range.clone(),
            log: device.state().log.len(),
            completed: model.sectors.now.clone(),
        };
        model.in_flight.insert(number, bio);
        let (sector, sectors) = (Sector(range.start), range.end - range.start);
        let mut bio = Bio { operation: step.operation, flags, sector, sectors, data, user_data: number };
        while let Err(refused) = queue.submit(bio) {
            bio = refused;
            queue.wait(1);
            queue.completions().for_each(|completion| model.complete(completion));
        }
        if step.poll {
            queue.poll();
            queue.completions().for_each(|completion| model.complete(completion));
        }
    }
    common::drain(&mut queue).into_iter().for_each(|completion| model.complete(completion));
    assert!(model.in_flight.is_empty(), "bios were lost");
    device.assert_legal();
    assert_eq!(device.state().held, 0);
    let stats = disk.stats();
    assert_eq!(stats.in_flight, [0, 0]);
    assert_eq!(stats.counter(blkq::Counter::NegativeLatencies), 0);
    drop(queue);
    let mut state = device.state();
    state.lose_power();
    for (sector, bytes) in state.current.chunks_exact(512).enumerate() {
        let promised = model.sectors.promised[sector];
        assert!(model.sectors.may_be(sector, promised, bytes), "sector {sector} lost promised data");
    }
}

proptest! {
    // Contract: accepted-once, durability
    #[test]
    fn reads_return_writes_and_promises_survive_a_power_loss(setup in setup(), steps in steps()) {
        check(setup, steps);
    }

    // Contract: statistics
    #[test]
    fn merges_and_ios_are_bios(
        steps in prop::collection::vec((any::<bool>(), 0u64..60, 1u64..4, prop::bool::weighted(0.1)), 1..200),
        scheduler in prop::sample::select(SchedulerKind::ALL.to_vec()),
        depth in prop_oneof![Just(1u16), Just(2), Just(128)],
        finish in prop_oneof![Just(Finish::AtOnce), Just(Finish::Random)],
        merge: bool,
    ) {
        let device = Device::plain(Behaviour { finish, busy_every: 50, ..Behaviour::default() });
        let disk = device.builder().scheduler(scheduler).depth(depth).merge(merge).build().unwrap();
        let mut queue = disk.open_queue(0).unwrap();
        let (mut bios, mut sectors) = ([0u64; 2], [0u64; 2]);
        for (write, place, length, poll) in steps {
            let buffer = common::filled((length << 9) as usize, 7);
            let bio = if write { Bio::write(Sector(place), buffer, 0) } else { Bio::read(Sector(place), buffer, 0) };
            queue.submit(bio).unwrap();
            bios[usize::from(write)] += 1;
            sectors[usize::from(write)] += length;
            if poll {
                queue.poll();
            }
        }
        common::drain(&mut queue);
        device.assert_legal();
        let stats = disk.stats();
        for group in 0..2 {
            prop_assert_eq!(stats.groups[group].ios + stats.groups[group].merges, bios[group]);
            prop_assert_eq!(stats.groups[group].sectors, sectors[group]);
        }
        prop_assert_eq!(stats.groups[0].ios as usize, device.count(Operation::Read));
        prop_assert_eq!(stats.groups[1].ios as usize, device.count(Operation::Write));
        prop_assert!(merge || stats.groups[0].merges + stats.groups[1].merges == 0);
        prop_assert_eq!(stats.in_flight, [0, 0]);
    }
}

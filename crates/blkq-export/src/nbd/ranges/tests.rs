use std::time::Duration;

use proptest::prelude::*;
use rustix::time::{ClockId, clock_gettime};

use super::*;

fn member(lock: &Arc<RangeLock>) -> (Member, Arc<AtomicUsize>) {
    let wakes = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&wakes);
    (lock.join(Arc::new(move || _ = counted.fetch_add(1, Relaxed))), wakes)
}

fn granted(session: &mut LockedTable<'_>) -> Vec<u32> {
    session.take_granted().collect()
}

#[test]
fn overlapping_ranges_are_granted_in_order() {
    let lock = Arc::new(RangeLock::default());
    let (a, _) = member(&lock);
    assert!(!lock.is_taken());
    let mut session = a.try_enter().unwrap();
    let first = session.lock(0..1024, 1);
    let second = session.lock(512..1536, 2);
    let apart = session.lock(1536..2048, 3);
    assert_eq!(session.wait(2048..4096, 4), None, "nothing overlaps");
    let whole = session.wait(0..512, 5).unwrap();
    let other_whole = session.wait(0..512, 6).unwrap();
    let behind = session.lock(0..512, 7);
    assert!(granted(&mut session).is_empty());
    assert!(!session.check(|_| false));
    assert_eq!(granted(&mut session), [1, 3]);
    session.release(first);
    assert_eq!(granted(&mut session), [2, 5]);
    session.release(whole);
    assert_eq!(granted(&mut session), [6]);
    session.release(other_whole);
    assert_eq!(granted(&mut session), [7], "no entry is overtaken");
    [second, apart, behind].into_iter().for_each(|ticket| session.release(ticket));
    drop(session);
    assert!(!lock.is_taken());
}

#[test]
fn every_member_checks_for_writes_in_flight_first() {
    let lock = Arc::new(RangeLock::default());
    let ((a, a_woken), (b, b_woken)) = (member(&lock), member(&lock));
    let mut session = a.try_enter().unwrap();
    let ticket = session.lock(0..512, 1);
    assert!(!session.check(|_| false) && granted(&mut session).is_empty());
    drop(session);
    assert_eq!((a_woken.load(Relaxed), b_woken.load(Relaxed)), (0, 1));
    let mut session = b.try_enter().unwrap();
    assert!(session.check(|range| *range == (0..512)), "this member has a write in flight");
    drop(session);
    assert!(granted(&mut a.try_enter().unwrap()).is_empty());
    assert!(!b.try_enter().unwrap().check(|_| false));
    assert_eq!(a_woken.load(Relaxed), 1);
    let mut session = a.try_enter().unwrap();
    assert_eq!(granted(&mut session), [1]);
    session.release(ticket);
}

#[test]
fn a_member_that_is_dropped_releases_its_ranges() {
    let lock = Arc::new(RangeLock::default());
    let ((a, _), (b, b_woken)) = (member(&lock), member(&lock));
    a.try_enter().unwrap().lock(0..512, 1);
    let mut session = b.try_enter().unwrap();
    session.lock(0..512, 2);
    assert!(!session.check(|_| false));
    drop(session);
    assert_eq!(b_woken.load(Relaxed), 1);
    drop(a);
    assert_eq!(granted(&mut b.try_enter().unwrap()), [2]);
    assert!(lock.is_taken());
    drop(b);
    assert!(!lock.is_taken());
}

/// An entry of the model, which is granted as soon as no older entry overlaps it.
struct Modelled {
    ticket: u64,
    range: Range<u64>,
    member: usize,
    key: u32,
    granted: bool,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Grants the entries that no older entry blocks, and drops those whose member has left.
fn grant(entries: &mut Vec<Modelled>, left: usize, keys: &mut [Vec<u32>; 2]) {
    loop {
        let blocked = |at: usize| entries[..at].iter().any(|e| overlap(&e.range, &entries[at].range));
        let Some(at) = (0..entries.len()).find(|at| !entries[*at].granted && !blocked(*at)) else {
            return;
        };
        entries[at].granted = true;
        match entries[at].member {
            member if member == left => drop(entries.remove(at)),
            member => keys[member].push(entries[at].key),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ranges_are_granted_in_the_order_of_a_simple_model(
        steps in prop::collection::vec((0u8..4, 0u64..40, 1u64..20, any::<prop::sample::Index>()), 1..80),
        leaves: prop::sample::Index,
    ) {
        let lock = Arc::new(RangeLock::default());
        let mut members = [Some(member(&lock).0), Some(member(&lock).0)];
        let (mut entries, mut left) = (Vec::<Modelled>::new(), usize::MAX);
        for (number, (kind, start, length, chosen)) in steps.iter().enumerate() {
            let (range, key) = (*start..start + length, number as u32);
            let member = (number % 2).min(usize::from(left > 1));
            let mut session = members[member].as_mut().unwrap().try_enter().unwrap();
            let mut wanted = [Vec::new(), Vec::new()];
            if *kind == 0 {
                let granted: Vec<usize> = (0..entries.len()).filter(|at| entries[*at].granted).collect();
                if !granted.is_empty() {
                    session.release(entries.remove(*chosen.get(&granted)).ticket);
                }
            } else {
                let free = !entries.iter().any(|e| overlap(&e.range, &range));
                let ticket = match kind {
                    1 => session.wait(range.clone(), key),
                    _ => Some(session.lock(range.clone(), key)),
                };
                prop_assert_eq!(ticket.is_none(), *kind == 1 && free);
                entries.extend(ticket.map(|ticket| Modelled { ticket, range, member, key, granted: false }));
            }
            drop(session);
            if number == leaves.index(steps.len()) {
                left = 1;
                members[1] = None;
                entries.retain(|entry| entry.member != left || !entry.granted);
            }
            grant(&mut entries, left, &mut wanted);
            members.iter_mut().flatten().for_each(|m| assert!(!m.try_enter().unwrap().check(|_| false)));
            for (member, wanted) in members.iter_mut().zip(&mut wanted) {
                let Some(member) = member else { continue };
                let mut found = granted(&mut member.try_enter().unwrap());
                found.sort_unstable();
                wanted.sort_unstable();
                prop_assert_eq!(&found, wanted);
            }
        }
        while let Some(at) = entries.iter().position(|entry| entry.granted) {
            members[0].as_mut().unwrap().try_enter().unwrap().release(entries.remove(at).ticket);
            grant(&mut entries, left, &mut [Vec::new(), Vec::new()]);
        }
        let table = lock.table.lock().unwrap();
        prop_assert!(entries.is_empty() && table.entries.is_empty() && table.newest.ranges.is_empty());
        prop_assert!(!lock.is_taken());
    }
}

/// A linear cost for each range would make 32 times as many ranges take 1024 times as long. With a search by
/// offset, they take little more than 32 times as long.
#[test]
fn the_cost_of_a_range_does_not_grow_with_their_number() {
    let time = |count: u64| {
        let lock = Arc::new(RangeLock::default());
        let (member, _) = member(&lock);
        let mut session = member.try_enter().unwrap();
        // The CPU time of this thread, as other threads may run meanwhile.
        let now = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
        let begin = now();
        let tickets: Vec<u64> = (0..count).map(|at| session.lock(at * 4096..at * 4096 + 512, 0)).collect();
        session.check(|_| false);
        assert_eq!(granted(&mut session).len(), count as usize);
        tickets.into_iter().for_each(|ticket| session.release(ticket));
        now() - begin
    };
    let (few, many) = (time(2000), time(64_000));
    assert!(many < few * 200, "{few:?} for 2000, {many:?} for 64000");
}

/// Several threads increment shared blocks, as engines do: exclusively in two steps, or as a write of whole
/// blocks. A lost update shows in the sum.
// Contract: data
#[test]
fn no_update_of_concurrent_threads_is_lost() {
    use std::sync::atomic::AtomicU64;
    const THREADS: usize = 4;
    const ROUNDS: u64 = 2000;
    let lock = Arc::new(RangeLock::default());
    let blocks: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(0)).collect();
    let writers: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(0)).collect();
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (member, woken) = member(&lock);
            let (lock, blocks, writers, done) = (&lock, &blocks, &writers, &done);
            scope.spawn(move || {
                let mut seen = 0;
                let mut keys = Vec::new();
                for round in 0..ROUNDS {
                    let block = (round as usize * 7 + thread) % blocks.len();
                    let range = block as u64 * 512..(block as u64 + 1) * 512;
                    if round % 3 != 0 && !lock.is_taken() {
                        // A write of whole blocks. While it is in flight, other members must wait for this
                        // member's check, which this thread makes below.
                        writers[block].fetch_add(1, Relaxed);
                        blocks[block].fetch_add(1, Relaxed);
                        writers[block].fetch_sub(1, Relaxed);
                    } else {
                        let ticket = loop {
                            let Some(mut session) = member.try_enter() else { continue };
                            let ticket = session.lock(range.clone(), 0);
                            session.check(|_| false);
                            break ticket;
                        };
                        while keys.is_empty() {
                            if let Some(mut session) = member.try_enter() {
                                session.check(|_| false);
                                keys.extend(session.take_granted());
                            }
                            std::thread::yield_now();
                        }
                        keys.clear();
                        assert_eq!(writers[block].load(Relaxed), 0, "a write is in flight");
                        let old = blocks[block].load(Relaxed);
                        std::thread::yield_now();
                        blocks[block].store(old + 1, Relaxed);
                        loop {
                            let Some(mut session) = member.try_enter() else { continue };
                            session.check(|_| false);
                            break session.release(ticket);
                        }
                    }
                    // An engine makes the check when it has been woken.
                    let wakes = woken.load(Relaxed);
                    if wakes > seen
                        && let Some(mut session) = member.try_enter()
                    {
                        session.check(|_| false);
                        seen = wakes;
                    }
                }
                // Other members may still wait for this one to check.
                done.fetch_add(1, Relaxed);
                while done.load(Relaxed) < THREADS {
                    if let Some(mut session) = member.try_enter() {
                        session.check(|_| false);
                    }
                    std::thread::yield_now();
                }
            });
        }
    });
    let sum: u64 = blocks.iter().map(|block| block.load(Relaxed)).sum();
    assert_eq!(sum, THREADS as u64 * ROUNDS);
    assert!(!lock.is_taken());
}

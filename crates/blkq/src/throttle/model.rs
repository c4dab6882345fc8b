//! Properties of the words of limits and groups that the model checkers verify.

use super::group::SequencedWords;
use super::*;
use crate::bio::{BioFlags, Operation, Outline};
use crate::request::Request;
use crate::sector::Sector;
use crate::sync::atomic::{AtomicU64 as Word, Ordering::Relaxed};
use crate::sync::{model_within, thread};
use crate::tags::Tag;

const NOW_NS: u64 = 5_000_000_000_000;
/// A request costs a millisecond.
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

/// Queues request two admissions each while there is room for `room` requests. That number is admitted, and
/// the word contains their cost.
fn a_word_admits_what_it_has_room_for(queues: usize, room: u64) {
    let buckets = Arc::new(Buckets::default());
    buckets.average[0].store((NOW_NS - (room - 1) * COST_NS).cast_signed(), Relaxed);
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
    let spent_ns = NOW_NS + (passed * COST_NS) - (room - 1) * COST_NS;
    assert_eq!(buckets.average[0].load(Relaxed), spent_ns.cast_signed());
}

/// A reader of changing words gets the words of one change, or none.
fn readers_get_the_words_of_one_change(changes: u64) {
    let shared = Arc::new(SequencedWords::<2>::default());
    let writer = {
        let shared = shared.clone();
        thread::spawn(move || (1..=changes).for_each(|change| shared.write(&[change, change], || {})))
    };
    for _ in 0..2 {
        if let Some((number, words)) = shared.read() {
            assert_eq!(words, [number / 2; 2], "torn");
        }
    }
    writer.join().expect("no panic");
    assert_eq!(shared.read(), Some((2 * changes, [changes; 2])));
}

/// A group with room for `room` requests, whose members have used up their shares.
fn group_with_room(members: usize, room: u64) -> (Arc<Group>, Vec<Arc<Member>>) {
    let group = Arc::new(Group::default());
    group.set_limits_at(&limits("iops=1000"), NOW_NS);
    let members: Vec<_> =
        (0..members).map(|slot| Arc::new(group.clone().join(slot, "m", 100).expect("a slot"))).collect();
    for member in &members {
        member.buckets().average[0].store((NOW_NS - (room - 1) * COST_NS).cast_signed(), Relaxed);
        member.spent_ns(LimitKey::Iops).store(NOW_NS.cast_signed(), Relaxed);
        member.note_active(LimitKey::Iops, NOW_NS);
    }
    (group, members)
}

/// Each member requests two admissions, and the first member then leaves. The number of admitted requests is
/// that for which there is room, and at most one more for each member that is within its share. All of them
/// are charged. A member that has left has no share.
fn members_charge_one_word(count: usize, room: u64) {
    let (group, members) = group_with_room(count, room);
    let threads: Vec<_> = members
        .into_iter()
        .enumerate()
        .map(|(index, member)| {
            thread::spawn(move || {
                let mut meters = Meter::of_group(&limits("iops=1000"), &member);
                let passed = meters[0].admit(&[Tag(0), Tag(1)], &reads(2), NOW_NS, true).count as u64;
                (passed, (index > 0).then_some(member))
            })
        })
        .collect();
    let (passed, members): (Vec<_>, Vec<_>) =
        threads.into_iter().map(|thread| thread.join().expect("no panic")).unzip();
    let passed: u64 = passed.into_iter().sum();
    let wanted = 2 * count as u64;
    assert!((room.min(wanted)..=wanted.min(room + count as u64)).contains(&passed), "{passed}");
    let left: Vec<_> = members.into_iter().flatten().collect();
    let word = left[0].buckets().average[0].load(Relaxed).cast_unsigned();
    assert_eq!(word, NOW_NS + passed * COST_NS - (room - 1) * COST_NS, "a charge is lost");
    assert_eq!(left[0].weights(LimitKey::Iops, NOW_NS), (100, 100 * left.len() as u64));
    drop((left, group));
}

/// Members charge requests while the limits are changed, and are killed meanwhile. Every reader sees the old
/// limits or the new ones, and no debt remains except for requests that were admitted after the change.
#[cfg(shuttle)]
fn limits_change_under_members(count: usize) {
    let (group, members) = group_with_room(count, 1);
    // This debt must be forgiven by the change.
    members[0].buckets().average[0].store((NOW_NS + 50 * COST_NS).cast_signed(), Relaxed);
    let threads: Vec<_> = members
        .into_iter()
        .map(|member| {
            thread::spawn(move || {
                let seen = member.group().limits();
                let known = seen.map_or_else(|| limits("iops=1000"), |(_, limits)| limits);
                assert!([limits("iops=1000"), limits("iops=500,burst=2000x1s")].contains(&known), "{known}");
                let mut meters = Meter::of_group(&known, &member);
                let passed = meters[0].admit(&[Tag(0)], &reads(1), NOW_NS, true).count as u64;
                // The member is killed, so nothing is undone.
                std::mem::forget(member);
                passed
            })
        })
        .collect();
    group.set_limits_at(&limits("iops=500,burst=2000x1s"), NOW_NS);
    let passed: u64 = threads.into_iter().map(|thread| thread.join().expect("no panic")).sum();
    assert_eq!(group.limits().map(|(_, limits)| limits), Some(limits("iops=500,burst=2000x1s")));
    let next = Arc::new(group.clone().join(count, "next", 100).expect("a slot"));
    let word = next.buckets().average[0].load(Relaxed).cast_unsigned();
    assert!(word <= NOW_NS + 2 * passed * COST_NS, "a debt is left: {} for {passed}", word - NOW_NS);
    // Members that were killed count as active for a while.
    assert_eq!(next.weights(LimitKey::Iops, NOW_NS + group::ACTIVE_NS * 2), (100, 100));
}

#[cfg(loom)]
mod loom_throttle {
    use super::*;

    #[test]
    fn loom_a_word_admits_what_it_has_room_for() {
        model_within(3, "two queues, room for one", 0, || a_word_admits_what_it_has_room_for(2, 1));
        model_within(3, "two queues, room for three", 0, || a_word_admits_what_it_has_room_for(2, 3));
    }

    #[test]
    fn loom_readers_get_the_words_of_one_change() {
        model_within(2, "words that change", 0, || readers_get_the_words_of_one_change(1));
    }

    #[test]
    fn loom_members_charge_one_word() {
        model_within(2, "two members, room for one", 0, || members_charge_one_word(2, 1));
        model_within(2, "two members, room for three", 0, || members_charge_one_word(2, 3));
    }
}

#[cfg(shuttle)]
mod shuttle_throttle {
    use super::*;

    #[test]
    fn shuttle_a_word_admits_what_it_has_room_for() {
        model_within(0, "four queues, room for five", 4_000, || a_word_admits_what_it_has_room_for(4, 5));
    }

    #[test]
    fn shuttle_readers_get_the_words_of_one_change() {
        model_within(0, "words that change", 4_000, || readers_get_the_words_of_one_change(5));
    }

    #[test]
    fn shuttle_members_charge_one_word() {
        model_within(0, "three members, room for four", 4_000, || members_charge_one_word(3, 4));
    }

    #[test]
    fn shuttle_limits_change_under_members() {
        model_within(0, "limits change under two members", 4_000, || limits_change_under_members(2));
    }
}

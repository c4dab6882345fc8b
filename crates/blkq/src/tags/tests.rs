use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use proptest::prelude::*;

use super::wait::WAITERS_MAX;
use super::*;

#[derive(Default)]
struct Counter(AtomicU32);

impl Wake for Counter {
    fn wake(&self) {
        self.0.fetch_add(1, SeqCst);
    }
}

fn take_all(set: &TagSet) -> Vec<Tag> {
    let mut hint = set.hint();
    std::iter::from_fn(|| set.get(&mut hint)).collect()
}

#[test]
fn a_set_of_four_or_more_has_four_words_or_more() {
    for depth in 1..=1024 {
        let set = TagSet::new(depth);
        assert!(depth < 4 || set.words.len() >= 4, "{depth}");
        let all = take_all(&set);
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), usize::from(depth));
        assert!(all.iter().all(|tag| tag.0 < depth));
        assert_eq!(set.in_use(), u32::from(depth));
        set.put_batch(all.iter().copied());
        assert_eq!(set.in_use(), 0);
    }
    assert_eq!(take_all(&TagSet::new(u16::MAX)).len(), usize::from(u16::MAX));
}

#[test]
fn words_do_not_share_a_cache_line() {
    let set = TagSet::new(128);
    let address = |index: usize| &raw const set.words[index] as usize;
    assert!(address(1) - address(0) >= 64);
}

#[test]
#[should_panic(expected = "put twice")]
fn a_free_tag_cannot_be_put() {
    TagSet::new(8).put_batch([Tag(3)]);
}

#[test]
fn a_smaller_depth_hands_out_smaller_tags_only() {
    let set = TagSet::new(200);
    set.set_depth(70);
    assert_eq!(set.depth(), 70);
    let all = take_all(&set);
    assert_eq!(all.len(), 70);
    assert!(all.iter().all(|tag| tag.0 < 70));
    set.put_batch(all.iter().copied());
    set.set_depth(200);
    assert_eq!(take_all(&set).len(), 200);
}

#[test]
fn users_share_equally_but_may_hold_four() {
    let set = TagSet::new(64);
    set.join();
    assert!(set.may_get(63));
    set.join();
    assert!(set.may_get(31) && !set.may_get(32));
    set.join();
    assert!(set.may_get(21) && !set.may_get(22), "the share is rounded up");
    for _ in 0..40 {
        set.join();
    }
    assert!(set.may_get(3) && !set.may_get(4));
    for _ in 0..41 {
        set.leave();
    }
    assert!(set.may_get(31) && !set.may_get(32));
    let one = TagSet::new(1);
    one.join();
    one.join();
    assert!(one.may_get(9), "one tag is not divided");
}

#[test]
fn waiters_are_woken_a_batch_at_a_time() {
    let set = TagSet::new(64);
    let all = take_all(&set);
    let counters: Vec<_> = (0..20).map(|_| Arc::new(Counter::default())).collect();
    let mut ids: Vec<_> = counters.iter().map(|c| set.register(c.clone()).expect("room")).collect();
    ids.iter_mut().for_each(|id| set.prepare_wait(id));
    ids.iter_mut().for_each(|id| set.prepare_wait(id));
    let woken = || counters.iter().map(|c| c.0.load(SeqCst)).sum::<u32>();
    set.put_batch(all[..7].iter().copied());
    assert_eq!(woken(), 0);
    set.put_batch([all[7]]);
    assert_eq!(woken(), 8);
    assert!(counters[..8].iter().all(|c| c.0.load(SeqCst) == 1), "one of each queue");
    set.put_batch(all[8..26].iter().copied());
    assert_eq!(woken(), 20, "18 puts are two batches, and 12 waited");
    for tag in &all[26..] {
        set.put_batch([*tag]);
    }
    assert_eq!(woken(), 20);
}

#[test]
fn the_last_put_wakes_though_its_batch_is_not_full() {
    let set = TagSet::new(64);
    let all = take_all(&set);
    set.put_batch(all[3..].iter().copied());
    let counter = Arc::new(Counter::default());
    let mut id = set.register(counter.clone()).expect("room");
    set.prepare_wait(&mut id);
    set.put_batch(all[..3].iter().copied());
    assert_eq!(counter.0.load(SeqCst), 1);
}

#[test]
fn every_waiter_of_a_full_table_has_its_turn() {
    let set = TagSet::new(8);
    let order = Arc::new(Mutex::new(Vec::new()));
    struct Note(usize, Arc<Mutex<Vec<usize>>>);
    impl Wake for Note {
        fn wake(&self) {
            self.1.lock().expect("not poisoned").push(self.0);
        }
    }
    let mut ids: Vec<_> =
        (0..WAITERS_MAX).map(|n| set.register(Arc::new(Note(n, order.clone()))).expect("room")).collect();
    assert!(set.register(Arc::new(Counter::default())).is_none());
    // Each waiter that was woken waits again immediately, and none may be skipped for long.
    ids.iter_mut().for_each(|id| set.prepare_wait(id));
    for _ in 0..WAITERS_MAX {
        set.waiters.wake(1);
        let last = *order.lock().expect("not poisoned").last().expect("one was woken");
        set.prepare_wait(&mut ids[last]);
    }
    let woken: HashSet<usize> = order.lock().expect("not poisoned").iter().copied().collect();
    assert_eq!(woken.len(), WAITERS_MAX);
    set.unregister(ids.pop().expect("one"));
    assert!(set.register(Arc::new(Counter::default())).is_some());
}

#[derive(Clone, Debug)]
enum Step {
    Get { hint: usize, want: usize },
    Put { from: usize, count: usize },
    Resize(u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3usize, 0..70usize).prop_map(|(hint, want)| Step::Get { hint, want }),
        4 => (0..300usize, 0..70usize).prop_map(|(from, count)| Step::Put { from, count }),
        1 => (1..300u16).prop_map(Step::Resize),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// After any sequence of steps the set agrees with a plain set of the tags in use.
    #[test]
    fn the_set_agrees_with_a_plain_one(depth in 1..300u16, steps in prop::collection::vec(step(), 1..80)) {
        let set = TagSet::new(depth);
        let mut hints: Vec<TagHint> = (0..3).map(|_| set.hint()).collect();
        let mut used: HashSet<Tag> = HashSet::new();
        let mut order: Vec<Tag> = Vec::new();
        let mut now = depth;
        for step in steps {
            match step {
                Step::Get { hint, want } => {
                    for _ in 0..want {
                        let Some(tag) = set.get(&mut hints[hint]) else {
                            prop_assert_eq!(used.len(), usize::from(now));
                            break;
                        };
                        prop_assert!(tag.0 < now && used.insert(tag));
                        order.push(tag);
                    }
                }
                Step::Put { from, count } => {
                    let from = from.min(order.len());
                    let until = (from + count).min(order.len());
                    let tags: Vec<Tag> = order.drain(from..until).collect();
                    tags.iter().for_each(|tag| { used.remove(tag); });
                    set.put_batch(tags.iter().copied());
                }
                Step::Resize(to) => {
                    set.put_batch(order.iter().copied());
                    order.clear();
                    used.clear();
                    now = to.min(depth);
                    set.set_depth(now);
                }
            }
            prop_assert_eq!(set.in_use() as usize, used.len());
        }
    }
}

// Contract: tags
#[test]
fn a_batch_of_wake_ups_does_not_wait_for_held_tags() {
    // Waiters of this set are woken in batches of two.
    let set = TagSet::new(16);
    let all = take_all(&set);
    let woken = Arc::new(Counter::default());
    let mut id = set.register(woken.clone()).unwrap();
    set.prepare_wait(&mut id);
    set.put_batch([all[0]]);
    assert_eq!(woken.0.load(SeqCst), 0, "another tag is to come back");
    set.hold(15);
    assert_eq!(woken.0.load(SeqCst), 1);
    set.prepare_wait(&mut id);
    set.resume(15);
    set.put_batch(all[1..].iter().copied());
    assert_eq!(woken.0.load(SeqCst), 2);
    set.unregister(id);
}

// Contract: tags
#[test]
fn a_queue_with_a_share_of_held_tags_is_woken_when_it_grows() {
    let set = TagSet::new(16);
    let woken = Arc::new(Counter::default());
    let id = set.register(woken.clone()).unwrap();
    (0..2).for_each(|_| set.join());
    assert!(!set.may_get(8));
    set.await_share();
    assert!(!set.may_get(8));
    set.leave();
    assert_eq!(woken.0.load(SeqCst), 1);
    assert!(set.may_get(8));
    set.join();
    set.leave();
    assert_eq!(woken.0.load(SeqCst), 1, "it waits no longer");
    set.unregister(id);
}

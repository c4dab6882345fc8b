//! Properties of the tag set that the model checkers verify: in every order of a few threads (loom), and in
//! random orders of more threads (shuttle).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool as Mark, Ordering::SeqCst};

use super::{Tag, TagHint, TagSet, WaiterId};
use crate::kick::Wake;
use crate::sync::atomic::AtomicBool;
use crate::sync::{WaitQueue, model, thread};

#[derive(Default)]
struct Sleeper {
    woken: AtomicBool,
    queue: WaitQueue,
}

impl Wake for Sleeper {
    fn wake(&self) {
        self.woken.swap(true, SeqCst);
        self.queue.wake_all();
    }
}

/// A tag set, with a mark for each tag in use. A mark that is set twice is a tag that was handed out twice.
struct Checked {
    set: TagSet,
    in_use: Vec<Mark>,
}

impl Checked {
    fn new(depth: u16) -> Arc<Checked> {
        let in_use = (0..depth).map(|_| Mark::new(false)).collect();
        Arc::new(Checked { set: TagSet::new(depth), in_use })
    }

    /// Takes up to `want` tags.
    fn take(&self, hint: &mut TagHint, want: usize) -> Vec<Tag> {
        let tags: Vec<Tag> = (0..want).map_while(|_| self.set.get(hint)).collect();
        for tag in &tags {
            assert!(!self.in_use[tag.index()].swap(true, SeqCst), "{tag:?} was handed out twice");
        }
        tags
    }

    fn put(&self, tags: &[Tag]) {
        for tag in tags {
            self.in_use[tag.index()].store(false, SeqCst);
        }
        self.set.put_batch(tags.iter().copied());
    }

    /// Takes a tag as a waiter must: see [`TagSet::prepare_wait`].
    fn take_waiting(&self, hint: &mut TagHint, id: &mut WaiterId, sleeper: &Sleeper) -> Vec<Tag> {
        loop {
            let tags = self.take(hint, 1);
            if !tags.is_empty() {
                return tags;
            }
            self.set.prepare_wait(id);
            let tags = self.take(hint, 1);
            if !tags.is_empty() {
                self.set.finish_wait(id);
                return tags;
            }
            sleeper.queue.wait_until(|| sleeper.woken.swap(false, SeqCst));
        }
    }

    fn waiter(&self) -> (WaiterId, Arc<Sleeper>) {
        let sleeper = Arc::new(Sleeper::default());
        (self.set.register(sleeper.clone()).expect("room for a waiter"), sleeper)
    }
}

fn join(threads: Vec<thread::JoinHandle<()>>) {
    for thread in threads {
        thread.join().expect("a thread panicked");
    }
}

/// No tag is handed out twice, and none is missing at the end.
fn no_tag_twice(depth: u16, threads: usize, rounds: usize, want: usize) {
    let checked = Checked::new(depth);
    let work = move |checked: Arc<Checked>| {
        let mut hint = checked.set.hint();
        for _ in 0..rounds {
            let tags = checked.take(&mut hint, want);
            assert!(checked.set.in_use() >= tags.len() as u32);
            checked.put(&tags);
        }
    };
    let others = (1..threads).map(|_| checked.clone()).map(|c| thread::spawn(move || work(c))).collect();
    work(checked.clone());
    join(others);
    assert_eq!(checked.set.in_use(), 0);
    let all = checked.take(&mut checked.set.hint(), usize::from(depth));
    assert_eq!(all.len(), usize::from(depth), "a tag was lost");
}

/// Each thread gets its tag, however many others wait: the checker reports a lost wake-up as a deadlock.
/// `hold` tags are taken first and returned in two batches.
fn every_waiter_is_woken(depth: u16, hold: usize, threads: usize, rounds: usize) {
    let checked = Checked::new(depth);
    let taken = checked.take(&mut checked.set.hint(), hold);
    let others = (0..threads)
        .map(|_| {
            let checked = checked.clone();
            thread::spawn(move || {
                let (mut id, sleeper) = checked.waiter();
                let mut hint = checked.set.hint();
                for _ in 0..rounds {
                    let tags = checked.take_waiting(&mut hint, &mut id, &sleeper);
                    checked.put(&tags);
                }
                checked.set.unregister(id);
            })
        })
        .collect();
    let (some, rest) = taken.split_at(hold.min(1));
    checked.put(some);
    checked.put(rest);
    join(others);
    assert_eq!(checked.set.in_use(), 0);
}

/// A waiter that leaves without a tag passes its wake-up on.
fn a_wake_up_is_passed_on(quitters: usize) {
    let checked = Checked::new(1);
    let held = checked.take(&mut checked.set.hint(), 1);
    let mut others: Vec<_> = (0..quitters)
        .map(|_| {
            let (mut id, _sleeper) = checked.waiter();
            checked.set.prepare_wait(&mut id);
            let checked = checked.clone();
            thread::spawn(move || checked.set.unregister(id))
        })
        .collect();
    let (mut id, sleeper) = checked.waiter();
    let stays = checked.clone();
    others.push(thread::spawn(move || {
        let tags = stays.take_waiting(&mut stays.set.hint(), &mut id, &sleeper);
        stays.put(&tags);
    }));
    checked.put(&held);
    join(others);
}

/// A waiter that needs the whole set to be free is woken by the last freed tag, although no batch is full.
fn the_last_put_wakes(holders: usize) {
    let checked = Checked::new(16);
    let mut hint = checked.set.hint();
    let threads = (0..holders)
        .map(|_| {
            let tags = checked.take(&mut hint, 1);
            let checked = checked.clone();
            thread::spawn(move || checked.put(&tags))
        })
        .collect();
    let (mut id, sleeper) = checked.waiter();
    loop {
        checked.set.prepare_wait(&mut id);
        if checked.set.in_use() == 0 {
            break;
        }
        sleeper.queue.wait_until(|| sleeper.woken.swap(false, SeqCst));
    }
    checked.set.unregister(id);
    join(threads);
}

/// A waiter is woken when one tag is freed and all others are held, although no batch of wake-ups fills.
fn held_tags_fill_no_batch() {
    let checked = Checked::new(16);
    let taken = checked.take(&mut checked.set.hint(), 16);
    let waits = checked.clone();
    let waiter = thread::spawn(move || {
        let (mut id, sleeper) = waits.waiter();
        let tags = waits.take_waiting(&mut waits.set.hint(), &mut id, &sleeper);
        waits.put(&tags);
        waits.set.unregister(id);
    });
    checked.put(&taken[..1]);
    checked.set.hold(15);
    waiter.join().expect("a thread panicked");
}

/// A user that has its share, and no request that completes, is woken by users that leave.
fn a_share_grows(others: usize) {
    let checked = Checked::new(16);
    let (id, sleeper) = checked.waiter();
    (0..=others).for_each(|_| checked.set.join());
    let share = 16_u32.div_ceil(others as u32 + 1);
    let threads =
        (0..others).map(|_| checked.clone()).map(|c| thread::spawn(move || c.set.leave())).collect();
    loop {
        if checked.set.may_get(share) {
            break;
        }
        checked.set.await_share();
        if checked.set.may_get(share) {
            break;
        }
        sleeper.queue.wait_until(|| sleeper.woken.swap(false, SeqCst));
    }
    join(threads);
    checked.set.unregister(id);
}

#[cfg(loom)]
mod loom_tags {
    use super::*;

    // Contract: tags
    #[test]
    fn loom_no_tag_twice() {
        model("two threads, two words", 0, || no_tag_twice(8, 2, 2, 1));
        model("three threads, one word", 0, || no_tag_twice(2, 3, 1, 1));
    }

    // Contract: tags
    #[test]
    fn loom_every_waiter_is_woken() {
        model("one tag, one holder, two waiters", 0, || every_waiter_is_woken(1, 1, 2, 1));
        model("two threads, one tag, twice", 0, || every_waiter_is_woken(1, 0, 2, 2));
    }

    // Contract: tags
    #[test]
    fn loom_a_batch_that_does_not_fill_wakes() {
        model("wake-ups in twos, two waiters", 0, || every_waiter_is_woken(16, 16, 2, 1));
        model("wake-ups in twos, one put", 0, || the_last_put_wakes(1));
        model("wake-ups in twos, two puts", 0, || the_last_put_wakes(2));
    }

    // Contract: tags
    #[test]
    fn loom_held_tags_fill_no_batch() {
        model("wake-ups in twos, one put", 0, held_tags_fill_no_batch);
    }

    // Contract: tags
    #[test]
    fn loom_a_share_that_grows_wakes() {
        model("one leaves, one waits", 0, || a_share_grows(1));
    }

    // Contract: tags
    #[test]
    fn loom_a_wake_up_is_passed_on() {
        model("one quits, one stays", 0, || a_wake_up_is_passed_on(1));
    }
}

#[cfg(shuttle)]
mod shuttle_tags {
    use super::*;

    #[test]
    fn shuttle_no_tag_twice() {
        model("six threads, 16 tags", 10_000, || no_tag_twice(16, 6, 4, 3));
    }

    #[test]
    fn shuttle_every_waiter_is_woken() {
        model("eight threads, two tags", 10_000, || every_waiter_is_woken(2, 2, 8, 3));
        model("ten waiters, 16 tags, wake-ups in twos", 10_000, || every_waiter_is_woken(16, 16, 20, 2));
        model("twelve waiters, 64 tags, wake-ups in eights", 3_000, || every_waiter_is_woken(64, 64, 12, 2));
    }

    #[test]
    fn shuttle_a_batch_that_does_not_fill_wakes() {
        model("wake-ups in twos, five puts", 10_000, || the_last_put_wakes(5));
    }

    #[test]
    fn shuttle_held_tags_fill_no_batch() {
        model("wake-ups in twos, one put", 10_000, held_tags_fill_no_batch);
    }

    #[test]
    fn shuttle_a_share_that_grows_wakes() {
        model("three leave, one waits", 10_000, || a_share_grows(3));
    }

    #[test]
    fn shuttle_a_wake_up_is_passed_on() {
        model("three quit, one stays", 10_000, || a_wake_up_is_passed_on(3));
    }
}

//! The properties of the software queues that the model checkers prove: each staged bio reaches the owner once,
//! in the order of its submitter, and none is left while the owner sleeps.

use std::sync::Arc;

use super::*;
use crate::buffer::IoBuffer;
use crate::kick::Kick;
use crate::sync::{model, thread};

const BLOCK_BYTES: usize = 512;

/// Each submitter stages `count` blocks on a software queue that it may share with others. Every second block
/// is adjacent to the previous one. The owner takes the blocks as a queue does, and sleeps in between.
fn all_that_is_staged_arrives_once(submitters: usize, count: u64, queues: usize) {
    let software = Arc::new(SoftwareQueues::new());
    let kick = Arc::new(Kick::new().expect("the twin has no descriptors"));
    let threads: Vec<_> = (0..submitters)
        .map(|submitter| {
            let (software, kick) = (software.clone(), kick.clone());
            thread::spawn(move || {
                let limits = QueueLimits { capacity_bytes: 1 << 30, ..QueueLimits::default() };
                for number in 0..count {
                    let sector = Sector(((submitter as u64) << 16) + number / 2 * 8 + number % 2);
                    let mark = ((submitter as u64) << 32) + number;
                    let bio = Bio::write(sector, IoBuffer::zeroed(BLOCK_BYTES), mark);
                    let index = submitter % queues;
                    let completer = Completer::Owner(mark);
                    match software.stage(index, bio, completer, Some(&limits), || number % 3 != 2) {
                        Staging::Merged => {}
                        Staging::Pushed => kick.kick(),
                        Staging::Full(bio, completer) => {
                            software.push(index, bio, completer);
                            kick.kick();
                        }
                    }
                }
            })
        })
        .collect();
    let mut next = vec![0; submitters];
    let mut left = submitters as u64 * count;
    while left > 0 {
        let pending = software.take_pending();
        for index in (0..queues).filter(|index| pending >> index & 1 == 1) {
            let mut taken = VecDeque::new();
            if software.try_take(index, 2, &mut taken).unwrap_or(true) {
                software.set_pending(index);
            }
            for staged in taken {
                let (mut at, end) = (staged.start(), staged.end);
                let (first, others) = staged.into_bios();
                for (bio, _) in std::iter::once(first).chain(others.into_iter().flatten()) {
                    assert_eq!(bio.sector, at, "merged bios continue each other");
                    at = at + bio.sectors;
                    let (submitter, number) = ((bio.user_data >> 32) as usize, bio.user_data & 0xffff_ffff);
                    assert_eq!(number, next[submitter], "once, and in order");
                    next[submitter] += 1;
                    left -= 1;
                }
                assert_eq!(at, end);
            }
        }
        if left == 0 {
            break;
        }
        kick.prepare_sleep();
        let sleeps = !software.has_pending();
        if sleeps {
            kick.wait();
        } else {
            // The engine enters the kernel here, and the holder of the lock continues.
            thread::yield_now();
        }
        kick.woke();
        if sleeps {
            kick.drain();
        }
    }
    for thread in threads {
        thread.join().expect("a thread panicked");
    }
}

// Contract: accepted-once
#[cfg(loom)]
#[test]
fn loom_all_that_is_staged_arrives_once() {
    model("one submitter, two blocks", 0, || all_that_is_staged_arrives_once(1, 2, 1));
}

#[cfg(shuttle)]
#[test]
fn shuttle_all_that_is_staged_arrives_once() {
    model("three submitters, a queue each", 5_000, || all_that_is_staged_arrives_once(3, 5, 3));
    model("three submitters on one queue", 5_000, || all_that_is_staged_arrives_once(3, 5, 1));
}

//! The properties of the kick that the model checkers prove: no work is left while the owner sleeps.

use std::sync::Arc;

use super::*;
use crate::sync::atomic::AtomicU64;
use crate::sync::{model, thread};

/// Submitters mark work `rounds` times each, and kick. The owner sleeps in between. A lost kick deadlocks.
fn no_work_stays_behind(submitters: usize, rounds: u32) {
    let kick = Arc::new(Kick::new().expect("the twin has no descriptors"));
    let pending = Arc::new(AtomicU64::new(0));
    let work: Arc<Vec<AtomicU32>> = Arc::new((0..submitters).map(|_| AtomicU32::new(0)).collect());
    let threads: Vec<_> = (0..submitters)
        .map(|index| {
            let (kick, pending, work) = (kick.clone(), pending.clone(), work.clone());
            thread::spawn(move || {
                for _ in 0..rounds {
                    work[index].fetch_add(1, SeqCst);
                    if pending.fetch_or(1 << index, SeqCst) & 1 << index == 0 {
                        kick.kick();
                    }
                }
            })
        })
        .collect();
    let mut left = submitters as u32 * rounds;
    while left > 0 {
        let marked = pending.swap(0, SeqCst);
        for (_, work) in work.iter().enumerate().filter(|(index, _)| marked >> index & 1 == 1) {
            left -= work.swap(0, SeqCst);
        }
        if left == 0 {
            break;
        }
        kick.prepare_sleep();
        let sleeps = pending.load(SeqCst) == 0;
        if sleeps {
            kick.wait();
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

#[cfg(loom)]
#[test]
fn loom_no_work_stays_behind() {
    model("one submitter, twice", 0, || no_work_stays_behind(1, 2));
    model("two submitters", 0, || no_work_stays_behind(2, 1));
}

#[cfg(shuttle)]
#[test]
fn shuttle_no_work_stays_behind() {
    model("four submitters", 10_000, || no_work_stays_behind(4, 5));
}

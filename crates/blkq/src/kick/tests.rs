use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;

fn is_readable(kick: &Kick, timeout_ms: i64) -> bool {
    let fd = kick.fd();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let timeout = Timespec { tv_sec: timeout_ms / 1000, tv_nsec: timeout_ms % 1000 * 1_000_000 };
    poll(&mut fds, Some(&timeout)).expect("poll") == 1
}

#[test]
fn only_a_sleeper_is_written_to_and_once() {
    let kick = Kick::new().expect("an eventfd");
    kick.kick();
    assert!(!is_readable(&kick, 0), "the owner runs");
    kick.prepare_sleep();
    kick.kick();
    kick.kick();
    assert!(is_readable(&kick, 0));
    let mut count = [0; 8];
    rustix::io::read(kick.fd(), &mut count).expect("readable");
    assert_eq!(u64::from_ne_bytes(count), 1);
    kick.woke();
    kick.drain();
    kick.kick();
    assert!(!is_readable(&kick, 0));
}

#[test]
fn a_sleeping_owner_takes_everything() {
    let kick = Arc::new(Kick::new().expect("an eventfd"));
    let work = Arc::new(AtomicU64::new(0));
    let submitters: Vec<_> = (0..2)
        .map(|_| {
            let (kick, work) = (kick.clone(), work.clone());
            std::thread::spawn(move || {
                for _ in 0..2000 {
                    work.fetch_add(1, SeqCst);
                    kick.kick();
                }
            })
        })
        .collect();
    let mut done = 0;
    while done < 4000 {
        done += work.swap(0, SeqCst);
        kick.prepare_sleep();
        if work.load(SeqCst) == 0 && done < 4000 {
            assert!(is_readable(&kick, 10_000), "a kick was lost");
            kick.drain();
        }
        kick.woke();
    }
    submitters.into_iter().for_each(|submitter| submitter.join().expect("no panic"));
}

#[test]
fn a_wake_up_while_running_is_not_forgotten() {
    let kick = Kick::new().expect("an eventfd");
    kick.kick();
    assert!(!kick.is_woken(), "a kick is not a wake-up");
    kick.wake();
    kick.prepare_sleep();
    assert!(kick.is_woken() && !is_readable(&kick, 0));
    kick.woke();
    kick.take_woken();
    assert!(!kick.is_woken());
    kick.prepare_sleep();
    kick.wake();
    assert!(kick.is_woken() && is_readable(&kick, 0));
}

use std::sync::atomic::{AtomicBool, AtomicU32 as Count, Ordering::SeqCst};
use std::thread;

use super::*;
use crate::testing::wait_until;

#[test]
fn freezes_nest_and_kick_at_begin_and_end() {
    let control = DiskControl::new(2);
    let kicks = Count::new(0);
    let kick = |_| {
        kicks.fetch_add(1, SeqCst);
    };
    control.freeze(kick);
    control.freeze(kick);
    assert_eq!(kicks.load(SeqCst), 4);
    control.unfreeze(kick);
    assert!(control.is_frozen() && !control.enter(0));
    assert_eq!((kicks.load(SeqCst), control.generation()), (4, 1));
    control.unfreeze(kick);
    assert_eq!((kicks.load(SeqCst), control.generation()), (6, 2));
    assert!(control.enter(0) && control.enter(1));
}

#[test]
fn a_freeze_that_times_out_leaves_the_disk_as_it_was() {
    let control = DiskControl::new(1);
    assert!(control.enter(0));
    let mut kicks = 0;
    assert!(!control.freeze_timeout(Duration::from_millis(5), || false, |_| kicks += 1));
    assert_eq!((kicks, control.generation(), control.is_frozen()), (2, 0, false));
    control.leave(0);
    assert!(control.freeze_timeout(Duration::from_millis(5), || false, |_| {}));
    assert!(control.is_frozen());
    control.unfreeze(|_| {});
}

#[test]
fn a_freeze_waits_for_the_last_request() {
    let control = DiskControl::new(1);
    assert!(control.enter(0));
    let left = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            wait_until("the freeze begins", || control.is_frozen());
            left.store(true, SeqCst);
            control.leave(0);
        });
        control.freeze(|_| {});
        assert!(left.load(SeqCst));
    });
}

#[test]
fn quiesce_stops_dispatch_and_not_submission() {
    let control = DiskControl::new(1);
    control.quiesce();
    assert!(control.enter(0) && !control.begin_dispatch(0));
    let mut kicked = false;
    control.unquiesce(|_| kicked = true);
    assert!(kicked && control.begin_dispatch(0));
    control.leave_dispatch(0);
    control.leave(0);
}

#[test]
#[should_panic(expected = "more often than stopped")]
fn an_unfreeze_needs_a_freeze() {
    DiskControl::new(1).unfreeze(|_| {});
}

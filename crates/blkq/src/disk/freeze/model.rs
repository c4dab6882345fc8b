//! Properties of freeze and quiesce that the model checkers verify.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32 as Plain, AtomicU64 as Plain64, Ordering::SeqCst};

use super::DiskControl;
use crate::sync::{WaitQueue, model, thread};

/// A disk whose owners count requests and dispatches, so that a control thread can check that none exist.
struct Disk {
    control: DiskControl,
    requests: Plain,
    dispatches: Plain,
    /// Changed only under a freeze.
    limits: Plain64,
    kicked: WaitQueue,
}

fn join(threads: Vec<thread::JoinHandle<()>>) {
    for thread in threads {
        thread.join().expect("a thread panicked");
    }
}

impl Disk {
    fn new(queues: usize) -> Arc<Disk> {
        Arc::new(Disk {
            control: DiskControl::new(queues),
            requests: Plain::new(0),
            dispatches: Plain::new(0),
            limits: Plain64::new(0),
            kicked: WaitQueue::default(),
        })
    }

    fn kick(&self, _queue: usize) {
        self.kicked.wake_all();
    }

    fn submit(&self, queue: usize) {
        while !self.control.enter(queue) {
            self.kicked.wait_until(|| !self.control.is_frozen());
        }
        self.requests.fetch_add(1, SeqCst);
        assert_eq!(
            self.limits.load(SeqCst),
            self.control.generation(),
            "new limits without a new generation"
        );
        self.requests.fetch_sub(1, SeqCst);
        self.control.leave(queue);
    }

    fn dispatch(&self, queue: usize) {
        while !self.control.begin_dispatch(queue) {
            self.kicked.wait_until(|| !self.control.is_quiesced());
        }
        self.dispatches.fetch_add(1, SeqCst);
        self.dispatches.fetch_sub(1, SeqCst);
        self.control.leave_dispatch(queue);
    }

    fn freeze(&self, may_time_out: bool) {
        if may_time_out {
            if !self.control.freeze_timeout(std::time::Duration::ZERO, || false, |q| self.kick(q)) {
                return;
            }
        } else {
            self.control.freeze(|q| self.kick(q));
        }
        assert_eq!(self.requests.load(SeqCst), 0, "a request in a frozen disk");
        assert_eq!(self.requests.load(SeqCst), 0, "a request began in a frozen disk");
        self.limits.fetch_add(1, SeqCst);
        self.control.unfreeze(|q| self.kick(q));
    }

    fn quiesce(&self) {
        self.control.quiesce();
        assert_eq!(self.dispatches.load(SeqCst), 0, "a dispatch in a quiesced disk");
        assert_eq!(self.dispatches.load(SeqCst), 0, "a dispatch began in a quiesced disk");
        self.control.unquiesce(|q| self.kick(q));
    }
}

fn freeze_and_submit(owners: usize, rounds: usize, timeouts: usize) {
    let disk = Disk::new(owners);
    let mut threads = Vec::new();
    for queue in 0..owners {
        let disk = disk.clone();
        threads.push(thread::spawn(move || (0..rounds).for_each(|_| disk.submit(queue))));
    }
    for _ in 0..timeouts {
        let disk = disk.clone();
        threads.push(thread::spawn(move || disk.freeze(true)));
    }
    disk.freeze(false);
    join(threads);
    assert!(!disk.control.is_frozen());
}

fn quiesce_and_dispatch(owners: usize, rounds: usize) {
    let disk = Disk::new(owners);
    let mut threads = Vec::new();
    for queue in 0..owners {
        let disk = disk.clone();
        threads.push(thread::spawn(move || (0..rounds).for_each(|_| disk.dispatch(queue))));
    }
    disk.quiesce();
    join(threads);
    assert!(!disk.control.is_quiesced());
}

#[cfg(loom)]
mod loom_control {
    use super::*;

    // Contract: live-changes
    #[test]
    fn loom_freeze_and_submit() {
        model("freeze, one owner, twice", 0, || freeze_and_submit(1, 2, 0));
        model("freeze, two owners", 0, || freeze_and_submit(2, 1, 0));
    }

    // Contract: live-changes
    #[test]
    fn loom_quiesce_and_dispatch() {
        model("quiesce, one owner, twice", 0, || quiesce_and_dispatch(1, 2));
        model("quiesce, two owners", 0, || quiesce_and_dispatch(2, 1));
    }
}

#[cfg(shuttle)]
mod shuttle_control {
    use super::*;

    #[test]
    fn shuttle_freeze_and_submit() {
        model("freeze, four owners, freezers that time out", 10_000, || freeze_and_submit(4, 5, 2));
    }

    #[test]
    fn shuttle_quiesce_and_dispatch() {
        model("quiesce, four owners", 10_000, || quiesce_and_dispatch(4, 5));
    }
}

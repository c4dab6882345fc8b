//! A vhost-user-blk device on one thread, which turns its engine too, against a front end that sends what
//! it likes: messages in any order, with any numbers and any descriptors, or only bytes; a guest that
//! writes anything into its memory, kicks at any time, and truncates it. Nothing panics, hangs or leaks
//! descriptors, and the next front end is served.
//!
//! Input: as that of `vhost_device`, which does the same on the device's own threads.
// Contract: bounded-input

#![no_main]

#[path = "../../crates/blkq-export/tests/vhost/mod.rs"]
mod vhost;

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blkq::Disk;
use blkq::engine::SimulatedEngine;
use blkq::io_uring::squeue;
use blkq::simulation::{World, install};
use blkq_export::nbd::Listen;
use blkq_export::vhost_user::fuzzing::Control;
use blkq_export::vhost_user::{VhostUserDevice, VhostUserOptions};
use blkq_fuzz::vhost::{Input, check_descriptors, run};
use libfuzzer_sys::fuzz_target;

/// Rings are served as if each queue had an engine.
const QUEUES: usize = 2;
/// Turns within which the device notices that a front end has closed.
const TURNS_MAX: usize = 1000;

thread_local! {
    static DISK: Arc<Disk> = Disk::builder(vhost::ram()).build().expect("a disk");
    static ENGINE: RefCell<SimulatedEngine> =
        RefCell::new(SimulatedEngine::new(vec![(DISK.with(Arc::clone), 0)]).expect("an engine"));
    static DEVICE: RefCell<(VhostUserDevice, Control)> = RefCell::new(device());
}

fn device() -> (VhostUserDevice, Control) {
    let handle = ENGINE.with_borrow(|engine| engine.handle().clone());
    let disk = DISK.with(Arc::clone);
    let path = std::env::temp_dir().join(format!("blkq-vhost-messages-{}.sock", std::process::id()));
    let options = VhostUserOptions { serial: "fuzz".into(), ..VhostUserOptions::default() };
    let device = VhostUserDevice::listen(Listen::Unix(path), options, &disk, &vec![handle; QUEUES])
        .expect("it listens");
    let control = device.control();
    install(&OneThread);
    (device, control)
}

fn turn() {
    // One that has just been accepted is served in the next turn.
    let has_rings = DEVICE.with_borrow_mut(|(device, control)| {
        (0..2).for_each(|_| control.poll());
        device.front_end().is_some_and(|front_end| !front_end.rings.is_empty())
    });
    if has_rings {
        ENGINE.with_borrow_mut(SimulatedEngine::poll);
    }
}

/// This thread turns the engine while it waits for it; all else of the world is real.
struct OneThread;

impl World for OneThread {
    fn step(&self) {
        ENGINE.with_borrow_mut(SimulatedEngine::poll);
    }

    fn instant(&self) {
        unreachable!("it has none");
    }

    fn now_ns(&self) -> u64 {
        unreachable!("the clock is real");
    }

    fn enter(&self, _: &mut Vec<squeue::Entry>, _: &[i32], _: usize, _: Option<Duration>) {
        unreachable!("the ring is real");
    }

    fn reap(&self, _: &mut dyn FnMut(u64, i32, u32)) {
        unreachable!("the ring is real");
    }

    fn close_ring(&self) {
        unreachable!("the ring is real");
    }

    fn sync(&self, _: i32) -> std::io::Result<()> {
        unreachable!("the disk has no file");
    }

    fn exists(&self, _: &Path) -> bool {
        unreachable!("there are no trigger files");
    }
}

fuzz_target!(|input: Input| {
    let uri = DEVICE.with_borrow(|(device, _)| device.uri().to_owned());
    run(&input, Path::new(uri.trim_start_matches("vhost-user:")), turn);
    let is_gone = || DEVICE.with_borrow(|(device, _)| device.connection_count() == 0);
    assert!(
        (0..TURNS_MAX).any(|_| {
            turn();
            is_gone()
        }),
        "the front end has closed, and is still connected"
    );
    check_descriptors();
});

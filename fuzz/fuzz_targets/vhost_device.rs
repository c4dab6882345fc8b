//! A whole vhost-user-blk device on its threads, against a front end that sends what it likes, and a guest
//! that writes and kicks meanwhile. Nothing panics, hangs or leaks descriptors, and the next front end is
//! served.
//!
//! Input: how far it has negotiated, then steps as `arbitrary` reads them.
// Contract: bounded-input

#![no_main]

#[path = "../../crates/blkq-export/tests/vhost/mod.rs"]
mod vhost;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use blkq_fuzz::vhost::{Input, check_descriptors, run};
use libfuzzer_sys::fuzz_target;
use vhost::{Served, ram, serve};

/// How long the device may take until it notices that a front end has closed.
const GONE_WAIT: Duration = Duration::from_secs(10);

static SERVED: LazyLock<Served> = LazyLock::new(|| serve(ram(), 2));

fuzz_target!(|input: Input| {
    run(&input, &SERVED.path, || {});
    let begin = Instant::now();
    while SERVED.device.connection_count() != 0 {
        assert!(begin.elapsed() < GONE_WAIT, "the front end has closed, and is still connected");
        std::thread::yield_now();
    }
    check_descriptors();
});

//! The NBD server without memory for another connection: in a process of its own, with another allocator.
#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

mod nbd;

use blkq::testing::wait_until;
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{ErrorKind, Read};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI64, Ordering};

use blkq_export::nbd::reply::ReplyStyle;
use blkq_export::nbd::{NbdOptions, TlsCertificates, TlsOptions};
use nbd::pki::Pki;
use nbd::*;

/// Allocations of this size or larger fail when [`LARGE_LEFT`] is used up.
const LARGE_BYTES: usize = 128 << 10;
static LARGE_LEFT: AtomicI64 = AtomicI64::new(i64::MAX);

struct Limited;

fn refuses(layout: Layout) -> bool {
    layout.size() >= LARGE_BYTES && LARGE_LEFT.fetch_sub(1, Ordering::Relaxed) <= 0
}

// SAFETY: calls the system's allocator or fails, as an allocator may.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of `alloc`.
        if refuses(layout) { null_mut() } else { unsafe { System.alloc(layout) } }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of `alloc_zeroed`.
        if refuses(layout) { null_mut() } else { unsafe { System.alloc_zeroed(layout) } }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`, and the system's allocator made all
        // allocations.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// With fewer than `needed` large allocations, each new client is rejected; connected ones are served.
fn connect_with_limited_memory(options: NbdOptions, needed: i64) {
    let served = serve(ram(), 1, options);
    let mut connected = served.client(ReplyStyle::Simple);
    for left in 0..needed {
        LARGE_LEFT.store(left, Ordering::Relaxed);
        let mut client = served.raw();
        let mut greeting = Vec::new();
        match client.read_to_end(&mut greeting) {
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
            Ok(_) => assert_eq!(greeting, b""),
        }
        wait_until("the rejection is counted", || {
            served.server.counters().refused_connections == left as u64 + 1
        });
        assert_eq!(served.server.connection_count(), 1);
        assert_eq!(connected.write(0, &[left as u8 + 1; 4096]), 0);
        assert_eq!(connected.read(0, 4096), [left as u8 + 1; 4096]);
    }
    LARGE_LEFT.store(needed, Ordering::Relaxed);
    let mut client = served.client(ReplyStyle::Simple);
    assert_eq!(client.read(0, 4096), [needed as u8; 4096]);
    assert_eq!(LARGE_LEFT.load(Ordering::Relaxed), 0, "the client needed fewer allocations");
    let mut rejected = served.raw();
    assert_eq!(rejected.read(&mut [0]).unwrap(), 0, "an admitted client used up the rest");
    LARGE_LEFT.store(i64::MAX, Ordering::Relaxed);
}

// Contract: errors
#[test]
fn a_client_without_memory_is_rejected_and_others_are_served() {
    connect_with_limited_memory(options(), 1);
    // A client that may start TLS needs two more allocations.
    let pki = Pki::new();
    let files = ["server-cert.pem", "server-key.pem"].map(|name| (name, name));
    let certificates = TlsCertificates::load(&pki.gather("tls", &files)).unwrap();
    connect_with_limited_memory(
        NbdOptions { tls: Some(TlsOptions { certificates, required: false }), ..options() },
        3,
    );
}

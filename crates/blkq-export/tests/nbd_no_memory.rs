//! The NBD server where there is no memory for one more connection. Alone in its process, whose
//! allocator refuses.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

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

/// Memory of at least so many bytes is refused when [`LARGE_LEFT`] is used up.
const LARGE_BYTES: usize = 128 << 10;
static LARGE_LEFT: AtomicI64 = AtomicI64::new(i64::MAX);

struct Limited;

fn refuses(layout: Layout) -> bool {
    layout.size() >= LARGE_BYTES && LARGE_LEFT.fetch_sub(1, Ordering::Relaxed) <= 0
}

// SAFETY: the system's allocator, which may refuse as well.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: what the caller promises.
        if refuses(layout) { null_mut() } else { unsafe { System.alloc(layout) } }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: what the caller promises.
        if refuses(layout) { null_mut() } else { unsafe { System.alloc_zeroed(layout) } }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: what the caller promises; all memory is the system's.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// Clients come while there are only so many pieces of large memory. The first `needed` - 1 times
/// that is too few: each is turned away, and connected clients are served.
fn come(options: NbdOptions, needed: i64) {
    let served = serve(ram(), 1, options);
    let mut there = served.client(ReplyStyle::Simple);
    for left in 0..needed {
        LARGE_LEFT.store(left, Ordering::Relaxed);
        let mut client = served.raw();
        let mut greeting = Vec::new();
        match client.read_to_end(&mut greeting) {
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
            Ok(_) => assert_eq!(greeting, b""),
        }
        wait_until("it is counted", || served.server.refused_connections() == left as u64 + 1);
        assert_eq!(served.server.connection_count(), 1);
        assert_eq!(there.write(0, &[left as u8 + 1; 4096]), 0);
        assert_eq!(there.read(0, 4096), [left as u8 + 1; 4096]);
    }
    LARGE_LEFT.store(needed, Ordering::Relaxed);
    let mut client = served.client(ReplyStyle::Simple);
    assert_eq!(client.read(0, 4096), [needed as u8; 4096]);
    assert_eq!(LARGE_LEFT.load(Ordering::Relaxed), 0, "it needed less");
    let mut asks = served.raw();
    assert_eq!(asks.read(&mut [0]).unwrap(), 0, "an admitted client used up the rest");
    LARGE_LEFT.store(i64::MAX, Ordering::Relaxed);
}

// Contract: errors
#[test]
fn a_client_without_memory_is_closed_and_the_others_are_served() {
    come(options(), 1);
    // Two pieces more for TLS, which a client may begin with.
    let pki = Pki::new();
    let files = ["server-cert.pem", "server-key.pem"].map(|name| (name, name));
    let certificates = TlsCertificates::load(&pki.gather("tls", &files)).unwrap();
    come(NbdOptions { tls: Some(TlsOptions { certificates, required: false }), ..options() }, 3);
}

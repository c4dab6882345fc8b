//! The NBD server with clients that request much memory. Measures the memory of its process, which `cargo nextest`
//! runs for this test alone.

use blkq::testing::wait_until;
use std::io::Write;
use std::time::{Duration, Instant};

use crate::nbd::*;
use blkq_export::nbd::NbdOptions;
use blkq_export::nbd::reply::ReplyStyle;

/// The resident memory of this process in KiB.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

// Contract: bounded-input
#[test]
fn announced_payloads_take_no_memory_and_delay_no_client() {
    let limits = NbdOptions { transfer_timeout_s: 1, buffered_bytes_total: 32 << 20, ..options() };
    let served = serve(ram(), 1, limits);
    let before_kib = resident_kib();
    let begin = Instant::now();
    // Eight of these clients use up the shared memory.
    let stuck: Vec<_> = (0..12)
        .map(|_| {
            let mut client = served.client(ReplyStyle::Simple);
            let announcement = client.bytes(1, 0, 0, 0, 4 << 20, &[]);
            client.stream.write_all(&announcement).unwrap();
            client
        })
        .collect();
    let mut small = served.client(ReplyStyle::Simple);
    for _ in 0..50 {
        assert_eq!(small.write(0, &[1; 65536]), 0);
        assert_eq!(small.read(0, 65536).len(), 65536);
    }
    // One client at a time may exceed the limit by one read.
    assert_eq!(small.read(0, 1 << 20).len(), 1 << 20);
    assert_eq!(served.server.connection_count(), 13, "no stuck client was disconnected yet");
    assert!(resident_kib() < before_kib + (20 << 10), "announced payloads take memory");
    // The largest possible request gets its memory when the stuck clients have been disconnected.
    assert_eq!(small.write(0, &vec![2; 32 << 20]), 0);
    assert_eq!(small.read((32 << 20) - 512, 512), [2; 512]);
    wait_until("the stuck clients are disconnected", || served.server.connection_count() == 1);
    assert!(begin.elapsed() >= Duration::from_millis(4900), "one second, and one for each MiB");
    drop(stuck);
}

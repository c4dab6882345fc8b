//! How long the device itself has requests, without the time in which they wait for a limit.

use super::auto::DeviceLoad;
use crate::stats::{LATENCY_BUCKETS, latency_bucket};
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The counters of one queue, which its thread alone writes.
#[derive(Debug)]
pub(crate) struct DeviceTimes {
    latencies: [AtomicU64; LATENCY_BUCKETS],
    latency_max_ns: AtomicU64,
    bytes: AtomicU64,
    ios: AtomicU64,
    in_flight: AtomicU64,
}

impl DeviceTimes {
    pub fn new() -> DeviceTimes {
        DeviceTimes {
            latencies: std::array::from_fn(|_| AtomicU64::new(0)),
            latency_max_ns: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            ios: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
        }
    }

    /// The driver has completed so many requests, of any operation, and has `left`.
    pub fn completed(&self, count: u64, left: u64) {
        self.ios.store(self.ios.load(Relaxed) + count, Relaxed);
        self.in_flight.store(left, Relaxed);
    }

    /// One of them was a read or a write of `bytes`, and took `latency_ns`.
    pub fn timed(&self, latency_ns: u64, bytes: u64) {
        // Nobody else writes: no locked instruction.
        let raise = |counter: &AtomicU64, by| counter.store(counter.load(Relaxed) + by, Relaxed);
        raise(&self.latencies[latency_bucket(latency_ns)], 1);
        raise(&self.bytes, bytes);
        self.latency_max_ns.store(self.latency_max_ns.load(Relaxed).max(latency_ns), Relaxed);
    }

    /// Adds what it has counted.
    pub fn add_to(&self, load: &mut DeviceLoad) {
        for (sum, counter) in load.latency.buckets.iter_mut().zip(&self.latencies) {
            *sum += counter.load(Relaxed);
        }
        load.latency.max_ns = load.latency.max_ns.max(self.latency_max_ns.load(Relaxed));
        load.bytes += self.bytes.load(Relaxed);
        load.ios += self.ios.load(Relaxed);
        load.in_flight += self.in_flight.load(Relaxed);
    }
}

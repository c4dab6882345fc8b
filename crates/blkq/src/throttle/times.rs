//! Measures how long the device itself has requests, without the time for which they wait for a limit.

// Not checked by a model checker, like other statistics: readers need no order between counters.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::auto::DeviceLoad;
use crate::stats::{LATENCY_BUCKETS, add, latency_bucket, raise};

/// The counters of one queue. Only its owner writes them.
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

    /// Counts `count` completed requests of any operation. The driver has `left` other requests.
    pub fn completed(&self, count: u64, left: u64) {
        add(&self.ios, count);
        self.in_flight.store(left, Relaxed);
    }

    /// Counts one of them, a read or write of `bytes` that took `latency_ns`.
    pub fn timed(&self, latency_ns: u64, bytes: u64) {
        add(&self.latencies[latency_bucket(latency_ns)], 1);
        add(&self.bytes, bytes);
        raise(&self.latency_max_ns, latency_ns);
    }

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

//! When the driver got each request: measured only while the disk's ceiling is searched.

use std::sync::Arc;

use crate::error::IoResult;
use crate::request::Request;
use crate::tags::Tag;
use crate::throttle::DeviceTimes;

/// The times of one queue's requests.
pub(super) struct DeviceTime {
    times: Arc<DeviceTimes>,
    /// By tag; 0 if it was not issued since this is measured.
    issued_ns: Vec<u64>,
}

impl DeviceTime {
    /// For a queue with so many slots.
    pub fn new(times: Arc<DeviceTimes>, slots: usize) -> DeviceTime {
        DeviceTime { times, issued_ns: vec![0; slots] }
    }

    /// Whether these are the counters.
    pub fn counts_in(&self, times: &Arc<DeviceTimes>) -> bool {
        Arc::ptr_eq(&self.times, times)
    }

    /// The driver is given these requests.
    pub fn issued(&mut self, tags: &[Tag], now_ns: u64) {
        tags.iter().for_each(|tag| self.issued_ns[tag.index()] = now_ns);
    }

    /// It has failed these, which are held instead of being completed, and has `left`.
    pub fn held(&mut self, tags: &[Tag], left: u64) {
        let issued = tags.iter().filter(|tag| std::mem::take(&mut self.issued_ns[tag.index()]) != 0).count();
        self.times.completed(issued as u64, left);
    }

    /// It has completed these, and has `left`.
    pub fn completed(&mut self, completed: &[(Tag, IoResult)], requests: &[Request], now_ns: u64, left: u64) {
        let mut issued = 0;
        for (tag, _) in completed {
            let issued_ns = std::mem::take(&mut self.issued_ns[tag.index()]);
            let request = &requests[tag.index()];
            issued += u64::from(issued_ns != 0);
            if issued_ns != 0 && request.operation().has_data() {
                self.times.timed(now_ns.saturating_sub(issued_ns), request.bytes());
            }
        }
        self.times.completed(issued, left);
    }
}

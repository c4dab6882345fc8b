//! Measures how long the driver has each request. Used only while the disk's ceiling is searched
//! ([`CeilingSearch`](crate::disk::CeilingSearch)).

use std::sync::Arc;

use crate::error::IoResult;
use crate::request::Request;
use crate::tags::Tag;
use crate::throttle::DeviceTimes;

pub(super) struct DeviceTime {
    pub times: Arc<DeviceTimes>,
    /// The time of dispatch by tag; 0 if the request was dispatched before the measurement started.
    issued_ns: Vec<u64>,
}

impl DeviceTime {
    pub fn new(times: Arc<DeviceTimes>, slots: usize) -> DeviceTime {
        DeviceTime { times, issued_ns: vec![0; slots] }
    }

    pub fn issued(&mut self, tags: &[Tag], now_ns: u64) {
        tags.iter().for_each(|tag| self.issued_ns[tag.index()] = now_ns);
    }

    /// Forgets requests that have failed and are held. The driver has `left` other requests.
    pub fn held(&mut self, tags: &[Tag], left: u64) {
        let issued = tags.iter().filter(|tag| std::mem::take(&mut self.issued_ns[tag.index()]) != 0).count();
        self.times.completed(issued as u64, left);
    }

    /// Counts requests that the driver has completed. The driver has `left` other requests.
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

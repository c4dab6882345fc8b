use std::sync::Arc;
use std::time::Duration;

use super::Disk;
use crate::clock::monotonic_ns;
use crate::error::{Error, ErrorKind};
use crate::periodic::PeriodicThread;
use crate::stats::Counter;
use crate::throttle::{AutoLimit, DeviceLoad, DeviceTimes, RateLimits};

/// How often the thread checks the disk, and how often if the disk is idle.
const TICK: Duration = Duration::from_millis(50);
const IDLE_TICK: Duration = Duration::from_millis(500);
const STACK_BYTES: usize = 256 << 10;

/// Keeps the rate of a disk just under its ceiling ([`CeilingSearch`]). Dropping this stops the thread, and
/// removes the disk's own limits.
pub struct AutoLimiter(#[allow(dead_code, reason = "it is there to be dropped")] PeriodicThread);

/// A search for the ceiling of a disk. Dropping this, also by a panic, removes the disk's own limits.
pub struct CeilingSearch {
    disk: Arc<Disk>,
    times: Arc<[Arc<DeviceTimes>]>,
    auto: AutoLimit,
}

impl CeilingSearch {
    /// Removes the disk's own limits, and starts a search. Fails with [`ErrorKind::Busy`] if one is running.
    pub fn begin(disk: &Arc<Disk>) -> Result<CeilingSearch, Error> {
        let times: Arc<[Arc<DeviceTimes>]> =
            (0..disk.queue_count()).map(|_| Arc::<DeviceTimes>::default()).collect();
        if !disk.throttle.set_measured(Some(times.clone())) {
            let message = "a search for the ceiling of this disk is already running";
            return Err(Error::new(ErrorKind::Busy, message));
        }
        disk.set_rate_limits(&RateLimits::default());
        Ok(CeilingSearch { disk: disk.clone(), times, auto: AutoLimit::default() })
    }

    /// The work that the disk has done so far.
    pub fn load(&self) -> DeviceLoad {
        let mut load = DeviceLoad { now_ns: monotonic_ns(), ..DeviceLoad::default() };
        self.times.iter().for_each(|times| times.add_to(&mut load));
        load.throttled_ns = self.disk.stats().counter(Counter::ThrottledNs);
        load
    }

    /// Updates the limits from `load`. Must be called about 20 times per second.
    pub fn update(&mut self, load: &DeviceLoad) {
        if self.auto.update(load) {
            self.disk.set_rate_limits(self.auto.limits());
        }
        self.disk.throttle.set_ceiling(self.auto.ceiling());
    }
}

impl Drop for CeilingSearch {
    fn drop(&mut self) {
        self.disk.throttle.set_measured(None);
        self.disk.set_rate_limits(&RateLimits::default());
    }
}

impl AutoLimiter {
    /// Starts the thread, and removes the disk's own limits. Fails with [`ErrorKind::Busy`] if another search
    /// is running, or with [`ErrorKind::System`] if the thread cannot be created.
    pub fn start(disk: &Arc<Disk>) -> Result<AutoLimiter, Error> {
        let mut search = CeilingSearch::begin(disk)?;
        let mut ios = 0;
        let run = move |_| {
            let load = search.load();
            let tick = if load.ios == ios && load.in_flight == 0 { IDLE_TICK } else { TICK };
            ios = load.ios;
            search.update(&load);
            tick
        };
        PeriodicThread::start("blkq-limit", STACK_BYTES, TICK, run).map(AutoLimiter)
    }
}

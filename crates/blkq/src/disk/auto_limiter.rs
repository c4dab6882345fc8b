//! The thread that finds a disk's ceiling, and sets its limits.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::Disk;
use crate::clock::monotonic_ns;
use crate::error::{Error, ErrorKind};
use crate::stats::Counter;
use crate::throttle::{AutoLimit, DeviceLoad, DeviceTimes, RateLimits};

/// How often it looks at the disk, and how often if that does nothing.
const TICK: Duration = Duration::from_millis(50);
const IDLE_TICK: Duration = Duration::from_millis(500);
/// Stack of the thread.
const STACK_BYTES: usize = 256 << 10;

/// Keeps the rate of a disk just under its ceiling ([`AutoLimit`]), until this is dropped: then the disk has no
/// limits of its own.
pub struct AutoLimiter {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A disk whose ceiling is searched, as long as this is there: however its thread exits, no limit of it stays.
struct Searched(Arc<Disk>);

impl Drop for Searched {
    fn drop(&mut self) {
        self.0.throttle.set_measured(None);
        self.0.set_rate_limits(&RateLimits::default());
    }
}

impl AutoLimiter {
    /// Starts to, on a thread of its own; the disk's own limits are removed.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if another does; if there can be no more threads.
    pub fn start(disk: &Arc<Disk>) -> Result<AutoLimiter, Error> {
        let times: Arc<[Arc<DeviceTimes>]> =
            (0..disk.queue_count()).map(|_| Arc::new(DeviceTimes::new())).collect();
        if !disk.throttle.set_measured(Some(times.clone())) {
            return Err(Error::new(ErrorKind::Busy, "the ceiling of this disk is searched already"));
        }
        let searched = Searched(disk.clone());
        disk.set_rate_limits(&RateLimits::default());
        let (stop, stopped) = channel();
        let run = move || {
            let Searched(disk) = &searched;
            let (mut auto, mut ios) = (AutoLimit::new(), 0);
            let mut tick = TICK;
            while stopped.recv_timeout(tick) == Err(RecvTimeoutError::Timeout) {
                let load = load_of(disk, &times);
                tick = if load.latency.count() == ios && load.in_flight == 0 { IDLE_TICK } else { TICK };
                ios = load.latency.count();
                if auto.update(&load) {
                    disk.set_rate_limits(auto.limits());
                }
                disk.throttle.set_ceiling(auto.ceiling());
            }
        };
        let thread = std::thread::Builder::new().name("blkq-limit".into()).stack_size(STACK_BYTES).spawn(run);
        let thread = thread.map_err(|e| Error::system("cannot start a thread", e))?;
        Ok(AutoLimiter { stop: Some(stop), thread: Some(thread) })
    }
}

fn load_of(disk: &Disk, times: &[Arc<DeviceTimes>]) -> DeviceLoad {
    let mut load = DeviceLoad { now_ns: monotonic_ns(), ..DeviceLoad::default() };
    times.iter().for_each(|times| times.add_to(&mut load));
    load.throttled_ns = disk.stats().counter(Counter::ThrottledNs);
    load
}

impl Drop for AutoLimiter {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic has been printed by the thread itself.
            let _ = thread.join();
        }
    }
}

//! Traces a device. There can be one trace at a time.

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use blkq::ErrorKind;
use blkq::sync::lock;
use blkq::trace::TraceMemory;
use blkq_protocol::failure::{Failure, Outcome};

use super::running::Running;

/// How long to wait until the engines have stopped a trace. Only a stuck engine takes longer.
const ENGINES_WAIT: Duration = Duration::from_secs(1);

/// A trace of a device. Dropping it stops the trace.
pub struct DeviceTrace<'a> {
    /// The process that traces the device.
    tracer: &'a Mutex<Option<String>>,
    pub memory: Arc<TraceMemory>,
    running: Weak<Running>,
}

impl<'a> DeviceTrace<'a> {
    /// Begins a trace, as `Device::trace` describes it.
    pub(super) fn begin(
        traced_by: &'a Mutex<Option<String>>,
        running: &Arc<Running>,
        ring_bytes: u64,
        tracer: &str,
    ) -> Outcome<DeviceTrace<'a>> {
        let mut current = lock(traced_by);
        if let Some(other) = &*current {
            let why = format!("the device is already being traced by {other}; stop that trace first");
            return Err(Failure::new(why));
        }
        let memory = TraceMemory::new(running.disk.queue_count(), ring_bytes)
            .map_err(|e| Failure::of(e, ErrorKind::Invalid, "choose another --buffer"))?;
        // The trace holds a weak reference, so that it does not keep the device from stopping.
        let trace = DeviceTrace { tracer: traced_by, memory, running: Arc::downgrade(running) };
        *current = Some(tracer.to_owned());
        trace.set(Some(&trace.memory));
        Ok(trace)
    }

    fn set(&self, memory: Option<&Arc<TraceMemory>>) {
        if let Some(running) = self.running.upgrade() {
            running.engines.iter().for_each(|it| it.handle().trace(&running.disk, memory.cloned()));
        }
    }
}

impl Drop for DeviceTrace<'_> {
    fn drop(&mut self) {
        // Engines handle messages in order, so this message ends the trace before a later one starts another.
        self.set(None);
        // Dropping the last reference unmaps up to 1 GiB. Wait, so that this thread does it and not an
        // engine.
        let until = Instant::now() + ENGINES_WAIT;
        while Arc::strong_count(&self.memory) > 1 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        *lock(self.tracer) = None;
    }
}

#[cfg(test)]
mod tests {
    use blkq_protocol::harness::{options, scratch};

    use super::super::open;

    #[test]
    fn a_device_has_one_trace_at_a_time() {
        let dir = scratch("trace");
        let claim = dir.claim("a").unwrap();
        let options = options(&["ram:1M", "--export", "nbd", "--no-sandbox"]);
        let device = open(&options, Vec::new(), &claim, Vec::new()).unwrap();
        assert!(device.trace(10_000, "process 1").is_err(), "not a multiple of the page size");
        let trace = device.trace(1 << 16, "process 1").unwrap();
        let refused = device.trace(1 << 16, "process 2").err().unwrap().to_string();
        assert!(refused.contains("already being traced by process 1"), "{refused}");
        drop(trace);
        let trace = device.trace(1 << 16, "process 2").unwrap();
        device.close(true).unwrap();
        device.stop().unwrap();
        drop(trace);
        assert!(device.trace(1 << 16, "process 3").is_err(), "the device has stopped");
        drop((device, claim));
        std::fs::remove_dir_all(dir.path()).unwrap();
    }
}

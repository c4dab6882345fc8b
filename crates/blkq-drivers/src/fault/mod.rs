//! The fault driver: wraps another driver and injects the faults of a spec, to test the software above a block device.
//! The faults follow from a seed, so they repeat in each run.
//!
//! For each request it makes a second request with the same tag and offers that to the wrapped queue: shorter, at another
//! place, with other memory, or later. So the wrapped driver receives ordinary requests within its limits. The fault driver
//! allocates memory for every request, so it is not meant for measuring speed.

mod queue;
mod rules;
mod spec;

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use blkq::bitmap::BitmapStore;
use blkq::sync::atomic::AtomicU64;
use blkq::sync::atomic::Ordering::{Relaxed, Release};
use blkq::sync::{Mutex, lock};
use blkq::{
    Change, DepthExtent, Driver, DriverQueue, DriverSetting, Error, Extent, OpenContext, QueueLimits,
};

use queue::FaultQueue;
pub use rules::{Injection, observe};
use rules::{Rules, Shared};
pub use spec::{Effect, FaultSpec, Rule};

/// A device that injects faults into the I/O of another driver.
pub struct Fault {
    shared: Arc<Shared>,
}

impl Fault {
    /// Wraps `inner`. Without a seed in `spec`, the seed is taken from the clock. Never fails at present;
    /// opening a queue fails if the thread that polls for trigger files cannot be started.
    pub fn new(inner: Arc<dyn Driver>, spec: FaultSpec) -> Result<Fault, Error> {
        let rules = Mutex::new(Rules::new(spec));
        let (generation, wakes) = (AtomicU64::new(0), Mutex::new(BTreeMap::new()));
        Ok(Fault { shared: Arc::new(Shared { inner, rules, generation, wakes }) })
    }
}

/// Implements methods of [`Driver`] by those of the wrapped driver.
macro_rules! forward {
    ($(fn $name:ident(&self $(, $argument:ident: $Argument:ty)*) -> $Result:ty;)*) => {
        $(fn $name(&self $(, $argument: $Argument)*) -> $Result {
            self.shared.inner.$name($($argument),*)
        })*
    };
}

impl Driver for Fault {
    forward! {
        fn uses_ring(&self) -> bool;
        fn queues_max(&self) -> usize;
        fn prepare_queues(&self, queues: usize) -> Result<(), Error>;
        fn extents(&self, range: Range<u64>, max: usize) -> Result<Vec<Extent>, Error>;
        fn allocation_depths(&self, range: Range<u64>, max: usize) -> Result<Vec<DepthExtent>, Error>;
        fn prepare_read_only(&self, read_only: bool) -> Result<(), Error>;
        fn set_read_only(&self, read_only: bool) -> Result<(), Error>;
        fn prepare_resize(&self, bytes: Option<u64>) -> Result<u64, Error>;
        fn resize(&self, bytes: Option<u64>) -> Result<(), Error>;
        fn size_event(&self) -> Option<BorrowedFd<'_>>;
        fn owner(&self) -> Option<String>;
        fn is_lost_with_process(&self) -> bool;
        fn bitmap_store(&self) -> Option<&dyn BitmapStore>;
    }

    fn name(&self) -> &'static str {
        "fault"
    }

    fn limits(&self) -> QueueLimits {
        // Some faults read or change the data, which is not possible in pages of the kernel.
        QueueLimits { kernel_pages: false, ..self.shared.inner.limits() }
    }

    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        let (index, tags, wake) = (cx.index, cx.tags, cx.wake.clone());
        let inner = self.shared.inner.open_queue(cx)?;
        self.shared.rules().watch()?;
        lock(&self.shared.wakes).insert(index, wake);
        Ok(Box::new(FaultQueue::new(inner, self.shared.clone(), index, tags)))
    }

    fn prepare_set(&self, setting: &dyn DriverSetting) -> Result<Change, Error> {
        match setting.downcast_ref::<FaultSpec>() {
            Some(_) => Ok(Change::Live),
            None => self.shared.inner.prepare_set(setting),
        }
    }

    /// An empty spec ends the injection of faults. Delayed and stuck requests then continue without a fault.
    fn set(&self, setting: &dyn DriverSetting) -> Result<(), Error> {
        let Some(spec) = setting.downcast_ref::<FaultSpec>() else {
            return self.shared.inner.set(setting);
        };
        let rules = Rules::new(spec.clone());
        // Without open queues, the thread that opens the first queue starts the polling. A thread inherits the confinement
        // of its creator, and the engine's must apply.
        if !lock(&self.shared.wakes).is_empty() {
            rules.watch()?;
        }
        *lock(&self.shared.rules) = rules;
        // Release: a queue that sees the new generation also sees the new rules.
        self.shared.generation.fetch_add(1, Release);
        lock(&self.shared.wakes).values().for_each(|queue| queue.wake());
        Ok(())
    }

    unsafe fn release(&self) -> Result<(), Error> {
        // SAFETY: the caller promises that no request is in flight. A fault queue sends requests to its wrapped queue only
        // on behalf of its own requests.
        unsafe { self.shared.inner.release() }
    }

    fn warnings(&self) -> Vec<String> {
        let rules = self.shared.rules();
        let faults =
            (!rules.spec.rules.is_empty()).then(|| format!("faults are injected, with seed={}", rules.seed));
        self.shared.inner.warnings().into_iter().chain(faults).collect()
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let rules = self.shared.rules();
        let hits: Vec<_> = rules.states.iter().map(|state| state.hits.load(Relaxed).to_string()).collect();
        let mut facts = vec![
            ("fault", rules.spec.to_string()),
            ("fault-seed", rules.seed.to_string()),
            ("fault-hits", hits.join(" ")),
            ("fault-driver", self.shared.inner.name().to_owned()),
        ];
        facts.extend(self.shared.inner.describe());
        facts
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests;

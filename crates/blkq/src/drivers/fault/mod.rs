//! The fault driver: wraps any other and makes what a spec says go wrong, from a seed, so
//! that it goes wrong again in the same way. For testing what is above a block device.
//!
//! It keeps requests of its own, with the tags of those it was given, and offers them to
//! the wrapped queue: shorter, elsewhere, with other memory, or later. So the wrapped
//! driver sees ordinary requests within its limits, and what it does with them is real.
//! It allocates for every request; nobody measures speed through it.

mod note;
mod queue;
mod spec;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::driver::{Change, Driver, DriverQueue, Extent};
use crate::error::Error;
use crate::limits::QueueLimits;
use crate::remote::kick::Wake;
use crate::ring::Registrar;
use crate::sync::atomic::Ordering::{Relaxed, Release};
use crate::sync::atomic::{AtomicBool, AtomicU64};
use crate::sync::{Mutex, lock};

use queue::FaultQueue;
pub use spec::{Effect, FaultSpec, Rule};

/// How often the trigger files of the rules are looked for.
const FILES_INTERVAL: Duration = Duration::from_millis(20);

/// A device in which things go wrong.
pub struct Fault {
    shared: Arc<Shared>,
}

/// What the queues and the device share.
struct Shared {
    inner: Box<dyn Driver>,
    rules: Mutex<Arc<Rules>>,
    /// Raised when the rules change, so that queues look without taking the lock.
    generation: AtomicU64,
    /// Of each queue, by its index.
    wakes: Mutex<BTreeMap<u16, Arc<dyn Wake>>>,
}

/// The rules in force.
struct Rules {
    spec: FaultSpec,
    seed: u64,
    states: Vec<RuleState>,
    /// Whether there is a thread that looks for the files.
    watched: AtomicBool,
    /// When that was, in the simulated world, which has no such thread.
    #[cfg(simulation)]
    looked_ns: AtomicU64,
}

/// How far a rule has come.
struct RuleState {
    /// Its file exists, or it needs none.
    armed: AtomicBool,
    /// Requests that it was about, and those that chance and the counts let it hit.
    matched: AtomicU64,
    hits: AtomicU64,
}

impl Fault {
    /// Wraps `inner`. Without a seed in `spec` one is taken from the clock.
    ///
    /// # Errors
    /// None now; opening a queue fails if the thread that looks for trigger files cannot be started.
    pub fn new(inner: Box<dyn Driver>, spec: FaultSpec) -> Result<Fault, Error> {
        let rules = Mutex::new(Rules::new(spec));
        let (generation, wakes) = (AtomicU64::new(0), Mutex::new(BTreeMap::new()));
        Ok(Fault { shared: Arc::new(Shared { inner, rules, generation, wakes }) })
    }

    /// The seed in force: with it the faults come again.
    pub fn seed(&self) -> u64 {
        self.shared.rules().seed
    }

    /// How many requests each rule has hit.
    pub fn hits(&self) -> Vec<u64> {
        self.shared.rules().states.iter().map(|state| state.hits.load(Relaxed)).collect()
    }
}

impl Shared {
    fn rules(&self) -> Arc<Rules> {
        lock(&self.rules).clone()
    }
}

impl Rules {
    fn new(spec: FaultSpec) -> Arc<Rules> {
        let exists = |rule: &Rule| rule.file.as_deref().is_none_or(Path::exists);
        let state = |rule| RuleState {
            armed: AtomicBool::new(exists(rule)),
            matched: AtomicU64::new(0),
            hits: AtomicU64::new(0),
        };
        let states = spec.rules.iter().map(state).collect();
        let seed = spec.seed.unwrap_or_else(|| crate::clock::monotonic_ns() >> 10);
        Arc::new(Rules {
            spec,
            seed,
            states,
            watched: AtomicBool::new(false),
            #[cfg(simulation)]
            looked_ns: AtomicU64::new(crate::clock::monotonic_ns()),
        })
    }

    /// Looks for the trigger files.
    fn look(&self) {
        for (rule, state) in self.spec.rules.iter().zip(&self.states) {
            if let Some(file) = &rule.file {
                state.armed.store(file.exists(), Relaxed);
            }
        }
    }

    /// What the thread does, as often as it does it.
    #[cfg(simulation)]
    fn look_in_time(&self) {
        let now_ns = crate::clock::monotonic_ns();
        if now_ns >= self.looked_ns.load(Relaxed) + FILES_INTERVAL.as_nanos() as u64 {
            self.looked_ns.store(now_ns, Relaxed);
            self.look();
        }
    }

    /// Looks for the files of the rules from now on, on a thread that is the caller's: a confined
    /// one makes a confined one.
    fn watch(self: &Arc<Rules>) -> Result<(), Error> {
        let needless = cfg!(simulation) || self.spec.rules.iter().all(|rule| rule.file.is_none());
        if needless || self.watched.swap(true, Relaxed) {
            return Ok(());
        }
        // Looking for a file may block, and an engine thread must not.
        let watched = Arc::downgrade(self);
        std::thread::Builder::new()
            .name("blkq-fault".to_owned())
            .spawn(move || watch(&watched))
            .map_err(|e| Error::system("cannot start the thread that looks for trigger files", e))?;
        Ok(())
    }
}

/// Looks for the files until the rules are gone.
fn watch(rules: &Weak<Rules>) {
    while let Some(rules) = rules.upgrade() {
        rules.look();
        drop(rules);
        std::thread::sleep(FILES_INTERVAL);
    }
}

impl Driver for Fault {
    fn name(&self) -> &'static str {
        "fault"
    }

    fn limits(&self) -> QueueLimits {
        // Some faults look into the data.
        QueueLimits { kernel_pages: false, ..self.shared.inner.limits() }
    }

    fn uses_ring(&self) -> bool {
        self.shared.inner.uses_ring()
    }

    fn queues_max(&self) -> usize {
        self.shared.inner.queues_max()
    }

    fn open_queue(
        &self,
        index: u16,
        tags: usize,
        ring: Option<Registrar<'_>>,
        wake: Arc<dyn Wake>,
    ) -> Result<Box<dyn DriverQueue>, Error> {
        let inner = self.shared.inner.open_queue(index, tags, ring, wake.clone())?;
        self.shared.rules().watch()?;
        lock(&self.shared.wakes).insert(index, wake);
        Ok(Box::new(FaultQueue::new(inner, self.shared.clone(), index, tags)))
    }

    fn extents(&self, range: Range<u64>, max: usize) -> Result<Vec<Extent>, Error> {
        self.shared.inner.extents(range, max)
    }

    fn prepare_set(&self, key: &str, value: &str) -> Result<Change, Error> {
        if key != "fault" {
            return self.shared.inner.prepare_set(key, value);
        }
        value.parse::<FaultSpec>().map(|_| Change::Live)
    }

    /// `fault` takes a new spec, or `none`. Stuck requests go on.
    fn set(&self, key: &str, value: &str) -> Result<(), Error> {
        if key != "fault" {
            return self.shared.inner.set(key, value);
        }
        let rules = Rules::new(value.parse()?);
        // Before there are queues whoever opens the first one does: an engine may be confined.
        if !lock(&self.shared.wakes).is_empty() {
            rules.watch()?;
        }
        *lock(&self.shared.rules) = rules;
        self.shared.generation.fetch_add(1, Release);
        lock(&self.shared.wakes).values().for_each(|queue| queue.wake());
        Ok(())
    }

    fn prepare_resize(&self, bytes: Option<u64>) -> Result<u64, Error> {
        self.shared.inner.prepare_resize(bytes)
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), Error> {
        self.shared.inner.resize(bytes)
    }

    fn warnings(&self) -> Vec<String> {
        let rules = self.shared.rules();
        let faults =
            (!rules.spec.rules.is_empty()).then(|| format!("faults are injected, with seed={}", rules.seed));
        self.shared.inner.warnings().into_iter().chain(faults).collect()
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let rules = self.shared.rules();
        let hits: Vec<String> =
            rules.states.iter().map(|state| state.hits.load(Relaxed).to_string()).collect();
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
#[cfg(not(any(loom, shuttle)))]
mod tests;

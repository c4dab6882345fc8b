//! The rules in force, which the device shares with its queues, and the polling for their trigger files. Injected faults
//! are reported to an observer, so that the model of a simulated world expects exactly these.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blkq::clock::monotonic_ns;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::atomic::{AtomicBool, AtomicU64};
use blkq::sync::{Mutex, lock};
use blkq::{Driver, DriverContext, Error, IoResult, Tag, Wake};

use super::spec::{Effect, FaultSpec};

const FILES_INTERVAL: Duration = Duration::from_millis(20);

pub(super) struct Shared {
    pub inner: Arc<dyn Driver>,
    pub rules: Mutex<Arc<Rules>>,
    /// Increased after each change of the rules, so that queues detect a change without the lock.
    pub generation: AtomicU64,
    pub wakes: Mutex<BTreeMap<u16, Arc<dyn Wake>>>,
}

pub(super) struct Rules {
    pub spec: FaultSpec,
    pub seed: u64,
    pub states: Vec<RuleState>,
    /// A thread that polls for the trigger files was started.
    pub watched: AtomicBool,
    /// The time of the last poll, in the simulated world, which has no such thread.
    #[cfg(simulation)]
    pub polled_ns: AtomicU64,
}

#[derive(Default)]
pub(super) struct RuleState {
    /// The trigger file of the rule exists, or the rule has none. Relaxed: the flag protects no other memory.
    pub armed: AtomicBool,
    /// The number of requests that matched the rule's operations and range while it was armed.
    pub matched: AtomicU64,
    pub hits: AtomicU64,
}

impl Shared {
    pub fn rules(&self) -> Arc<Rules> {
        lock(&self.rules).clone()
    }
}

impl Rules {
    pub fn new(spec: FaultSpec) -> Arc<Rules> {
        let rules = Rules {
            seed: spec.seed.unwrap_or_else(|| monotonic_ns() >> 10),
            states: spec.rules.iter().map(|_| RuleState::default()).collect(),
            spec,
            watched: AtomicBool::new(false),
            #[cfg(simulation)]
            polled_ns: AtomicU64::new(monotonic_ns()),
        };
        rules.poll_files();
        Arc::new(rules)
    }

    fn poll_files(&self) {
        for (rule, state) in self.spec.rules.iter().zip(&self.states) {
            state.armed.store(rule.file.as_deref().is_none_or(exists), Relaxed);
        }
    }

    /// Polls for the trigger files if [`FILES_INTERVAL`] has passed, in place of the thread.
    #[cfg(simulation)]
    pub fn poll_files_when_due(&self) {
        let now_ns = monotonic_ns();
        if now_ns >= self.polled_ns.load(Relaxed) + FILES_INTERVAL.as_nanos() as u64 {
            self.polled_ns.store(now_ns, Relaxed);
            self.poll_files();
        }
    }

    /// Starts the thread that polls for the trigger files, unless it was started before or no rule has such a file. A thread
    /// inherits the confinement of its creator, so the caller decides which files the new thread can see.
    pub fn watch(self: &Arc<Rules>) -> Result<(), Error> {
        let needless = cfg!(simulation) || self.spec.rules.iter().all(|rule| rule.file.is_none());
        if needless || self.watched.swap(true, Relaxed) {
            return Ok(());
        }
        // Checking whether a file exists may block, and an engine thread must not block.
        let watched = Arc::downgrade(self);
        let watch = move || {
            while let Some(rules) = watched.upgrade() {
                rules.poll_files();
                drop(rules);
                std::thread::sleep(FILES_INTERVAL);
            }
        };
        std::thread::Builder::new()
            .name("blkq-fault".to_owned())
            .spawn(watch)
            .map_err(|e| Error::system("cannot start the thread that polls for trigger files", e))?;
        Ok(())
    }
}

fn exists(file: &Path) -> bool {
    #[cfg(simulation)]
    return blkq::simulation::world().exists(file);
    #[cfg(not(simulation))]
    file.exists()
}

type Observer = fn(&DriverContext<'_>, Injection<'_>);

thread_local! {
    static OBSERVER: Cell<Option<Observer>> = const { Cell::new(None) };
}

/// An event of the fault driver.
#[derive(Clone, Copy, Debug)]
pub enum Injection<'a> {
    /// A rule has hit the request with this tag. The effect is no delay. The number is, for a short or torn transfer, the
    /// number of bytes that are transferred; for a misdirected transfer its new offset on the device, in bytes; for
    /// corrupted data the number of the flipped bit, counted from the beginning of the request; else 0.
    Hit(Tag, Effect, u64),
    /// The request with this tag, which a rule had hit, has completed in the wrapped driver.
    Completed(Tag, IoResult),
    /// A rule with this trigger file has hit a request.
    Armed(&'a Path),
}

/// Makes the fault driver call `observer` for its events on this thread.
pub fn observe(observer: Observer) {
    OBSERVER.set(Some(observer));
}

pub(super) fn report(cx: &DriverContext<'_>, injection: Injection<'_>) {
    if let Some(observer) = OBSERVER.get() {
        observer(cx, injection);
    }
}

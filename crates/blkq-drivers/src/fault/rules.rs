//! The rules in force, which a device and its queues share, and their trigger files.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::atomic::{AtomicBool, AtomicU64};
use blkq::sync::{Mutex, lock};
use blkq::{Driver, Error, Wake};

use super::spec::{FaultSpec, Rule};

/// How often the trigger files of the rules are polled.
const FILES_INTERVAL: Duration = Duration::from_millis(20);

/// The state that the queues and the device share.
pub(super) struct Shared {
    pub inner: Arc<dyn Driver>,
    pub rules: Mutex<Arc<Rules>>,
    /// Raised when the rules change, so that queues check without taking the lock.
    pub generation: AtomicU64,
    /// Of each queue, by its index.
    pub wakes: Mutex<BTreeMap<u16, Arc<dyn Wake>>>,
}

/// The rules in force.
pub(super) struct Rules {
    pub spec: FaultSpec,
    pub seed: u64,
    pub states: Vec<RuleState>,
    /// Whether there is a thread that polls for the files.
    pub watched: AtomicBool,
    /// When that was, in the simulated world, which has no such thread.
    #[cfg(simulation)]
    pub polled_ns: AtomicU64,
}

/// How far a rule has come.
pub(super) struct RuleState {
    /// Its file exists, or it needs none.
    pub armed: AtomicBool,
    /// Requests that it was about, and those that chance and the counts let it hit.
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
        let armed = |rule: &Rule| rule.file.as_deref().is_none_or(exists);
        let state = |rule| RuleState {
            armed: AtomicBool::new(armed(rule)),
            matched: AtomicU64::new(0),
            hits: AtomicU64::new(0),
        };
        let states = spec.rules.iter().map(state).collect();
        let seed = spec.seed.unwrap_or_else(|| blkq::clock::monotonic_ns() >> 10);
        Arc::new(Rules {
            spec,
            seed,
            states,
            watched: AtomicBool::new(false),
            #[cfg(simulation)]
            polled_ns: AtomicU64::new(blkq::clock::monotonic_ns()),
        })
    }

    /// Checks for the trigger files.
    fn poll_files(&self) {
        for (rule, state) in self.spec.rules.iter().zip(&self.states) {
            if let Some(file) = &rule.file {
                state.armed.store(exists(file), Relaxed);
            }
        }
    }

    /// The work of the thread, as often as the thread does it.
    #[cfg(simulation)]
    pub fn poll_files_when_due(&self) {
        let now_ns = blkq::clock::monotonic_ns();
        if now_ns >= self.polled_ns.load(Relaxed) + FILES_INTERVAL.as_nanos() as u64 {
            self.polled_ns.store(now_ns, Relaxed);
            self.poll_files();
        }
    }

    /// Polls for the files of the rules from now on, on a thread that is the caller's: a confined
    /// one makes a confined one.
    pub fn watch(self: &Arc<Rules>) -> Result<(), Error> {
        let needless = cfg!(simulation) || self.spec.rules.iter().all(|rule| rule.file.is_none());
        if needless || self.watched.swap(true, Relaxed) {
            return Ok(());
        }
        // Checking for a file may block, and an engine thread must not.
        let watched = Arc::downgrade(self);
        std::thread::Builder::new()
            .name("blkq-fault".to_owned())
            .spawn(move || watch(&watched))
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

/// Polls for the files until the rules are dropped.
fn watch(rules: &Weak<Rules>) {
    while let Some(rules) = rules.upgrade() {
        rules.poll_files();
        drop(rules);
        std::thread::sleep(FILES_INTERVAL);
    }
}

//! Cleanup that also runs if a signal ends the measurement.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::sync::Mutex;

use blkq::sync::lock;

use crate::Result;

/// The pending cleanups by their numbers, which are in the order in which they were registered.
static PENDING: Mutex<BTreeMap<u64, Box<dyn FnOnce() + Send>>> = Mutex::new(BTreeMap::new());

/// Starts a thread that waits for SIGINT, SIGTERM or SIGHUP. On a signal it runs the pending cleanups, the
/// latest first, clears the progress line, and exits with 128 + the signal number.
pub fn watch() -> Result {
    let mut signals = signal_hook::iterator::Signals::new([libc::SIGINT, libc::SIGTERM, libc::SIGHUP])?;
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // The lock is held until the process exits: no cleanup can be registered after this loop.
            let mut pending = lock(&PENDING);
            while let Some((_, undo)) = pending.pop_last() {
                undo();
            }
            if std::io::stderr().is_terminal() {
                let _ = write!(std::io::stderr(), "\r\x1b[K");
            }
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

/// A cleanup that runs when this guard is dropped, or when a signal ends the process.
#[must_use = "the cleanup runs when the guard is dropped"]
pub struct Undo(u64);

impl Undo {
    /// Calls `make`, and registers `undo` as its cleanup unless `make` fails. The lock on the pending
    /// cleanups is held meanwhile, so that a signal cannot end the process between the two.
    pub fn after<T, E>(
        make: impl FnOnce() -> std::result::Result<T, E>,
        undo: impl FnOnce() + Send + 'static,
    ) -> std::result::Result<(T, Undo), E> {
        let mut pending = lock(&PENDING);
        let made = make()?;
        let number = pending.last_key_value().map_or(0, |(last, _)| last + 1);
        pending.insert(number, Box::new(undo));
        Ok((made, Undo(number)))
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        let mut pending = lock(&PENDING);
        if let Some(undo) = pending.remove(&self.0) {
            undo();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn a_cleanup_runs_once_and_only_if_its_action_succeeded() {
        let undone = Arc::new(AtomicU32::new(0));
        let count = || {
            let undone = undone.clone();
            move || {
                undone.fetch_add(1, Ordering::Relaxed);
            }
        };
        let (made, undo) = Undo::after(|| Ok::<_, ()>(7), count()).unwrap();
        let (_, other) = Undo::after(|| Ok::<_, ()>(8), count()).unwrap();
        assert_eq!((made, undone.load(Ordering::Relaxed)), (7, 0));
        drop(undo);
        assert_eq!(undone.load(Ordering::Relaxed), 1);
        assert!(Undo::after(|| Err::<(), _>(()), count()).is_err());
        assert_eq!(undone.load(Ordering::Relaxed), 1);
        drop(other);
        assert_eq!(undone.load(Ordering::Relaxed), 2);
    }
}

//! Cleanup that happens even if a signal kills the process while it measures.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Result;

/// The pending cleanups, each under a number, the youngest last.
type ToBeUndone = Vec<(u64, Box<dyn FnOnce() + Send>)>;

static TO_BE_UNDONE: Mutex<ToBeUndone> = Mutex::new(Vec::new());

fn to_be_undone() -> MutexGuard<'static, ToBeUndone> {
    TO_BE_UNDONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on SIGINT, SIGTERM and SIGHUP undo what is to be undone, clear the line of the
/// progress, and exit with 128 + the signal's number.
///
/// # Errors
/// If the signals cannot be watched.
pub fn watch() -> Result {
    let mut signals = signal_hook::iterator::Signals::new([libc::SIGINT, libc::SIGTERM, libc::SIGHUP])?;
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // Locked until the process exits: nothing is made any more.
            let mut to_be_undone = to_be_undone();
            while let Some((_, undo)) = to_be_undone.pop() {
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

/// A cleanup that runs when this is dropped, or a signal kills the process.
#[must_use = "what was made is undone when this is dropped"]
pub struct Undo(u64);

impl Undo {
    /// Makes something that `undo` undoes. No signal kills the process in between.
    ///
    /// # Errors
    /// Those of `make`: then there is nothing to undo.
    pub fn after<T, E>(
        make: impl FnOnce() -> std::result::Result<T, E>,
        undo: impl FnOnce() + Send + 'static,
    ) -> std::result::Result<(T, Undo), E> {
        let mut to_be_undone = to_be_undone();
        let made = make()?;
        let number = to_be_undone.last().map_or(0, |(last, _)| last + 1);
        to_be_undone.push((number, Box::new(undo)));
        Ok((made, Undo(number)))
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        let mut to_be_undone = to_be_undone();
        if let Some(index) = to_be_undone.iter().position(|(number, _)| *number == self.0) {
            let (_, undo) = to_be_undone.remove(index);
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
    fn what_was_made_is_undone_once_and_what_was_not_is_not() {
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

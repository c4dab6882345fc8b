//! The way in which a completed bio is reported to its submitter.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::buffer::Data;
use crate::error::IoResult;
use crate::sync::{Arc, Condvar, Mutex, lock};

/// Called once with the result of a bio and its data; must not block. It runs on the thread that
/// owns the queue; while no thread owns it, on one that submits to it, before its call of `submit`
/// returns. So it must not take a lock that a submitter has.
pub type Callback = Box<dyn FnOnce(IoResult, Data) + Send>;

/// The action taken when a bio completes.
pub(crate) enum Completer {
    /// A [`Completion`](crate::Completion) with this `user_data` is delivered to the queue's owner.
    Owner(u64),
    /// The callback runs. Boxed twice to be one word.
    Callback(Box<Callback>),
    /// A waiting thread is woken.
    Waiter(Arc<BioWaiter>),
    /// Nothing: the slot is a part of another bio, or its completer was taken.
    None,
}

impl Completer {
    /// Passes the result to a submitter on another thread. A callback that panics is that
    /// thread's bug; the queue keeps serving all others.
    pub fn notify(self, result: IoResult, data: Data) {
        match self {
            Completer::Callback(callback) => {
                let call = AssertUnwindSafe(move || callback(result, data));
                // The panic hook has printed it.
                let _ = catch_unwind(call);
            }
            Completer::Waiter(waiter) => waiter.notify(result, data),
            Completer::Owner(_) | Completer::None => {}
        }
    }
}

impl fmt::Debug for Completer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Completer::Owner(user_data) => write!(f, "Owner({user_data})"),
            Completer::Callback(_) => f.write_str("Callback"),
            Completer::Waiter(_) => f.write_str("Waiter"),
            Completer::None => f.write_str("None"),
        }
    }
}

/// One bio that a thread waits for.
pub(crate) struct BioWaiter {
    completed: Mutex<Option<(IoResult, Data)>>,
    signal: Condvar,
}

impl BioWaiter {
    pub fn new() -> Arc<BioWaiter> {
        Arc::new(BioWaiter { completed: Mutex::new(None), signal: Condvar::new() })
    }

    /// Wakes the waiting thread with the result.
    pub fn notify(&self, result: IoResult, data: Data) {
        *lock(&self.completed) = Some((result, data));
        self.signal.notify_one();
    }

    /// Waits for the completion.
    pub fn wait(&self) -> (IoResult, Data) {
        let mut completed = lock(&self.completed);
        loop {
            if let Some(result) = completed.take() {
                return result;
            }
            completed = match self.signal.wait(completed) {
                Ok(guard) => guard,
                Err(poisoned) => poisoned.into_inner(),
            };
        }
    }
}

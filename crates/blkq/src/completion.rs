//! How the end of a bio reaches whoever asked for it.

use std::fmt;

use crate::buffer::Data;
use crate::error::{IoResult, Status};
use crate::sync::{Arc, Condvar, Mutex, lock};

/// A callback for the end of a bio; runs on the thread that owns the queue and must not block.
pub type Callback = Box<dyn FnOnce(IoResult, Data) + Send>;

/// What happens when a bio ends.
pub(crate) enum End {
    /// A [`Completion`](crate::Completion) with this mark goes to the queue's owner.
    Owner(u64),
    /// The callback runs. Boxed twice to be one word.
    Callback(Box<Callback>),
    /// A waiting thread is told.
    Waiter(Arc<Waiter>),
    /// Nothing: the slot is a part of another bio, or its end was taken.
    Taken,
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Owner(mark) => write!(f, "Owner({mark})"),
            End::Callback(_) => f.write_str("Callback"),
            End::Waiter(_) => f.write_str("Waiter"),
            End::Taken => f.write_str("Taken"),
        }
    }
}

/// One bio that a thread waits for.
pub(crate) struct Waiter {
    ended: Mutex<Option<(IoResult, Data)>>,
    signal: Condvar,
}

impl Waiter {
    pub fn new() -> Arc<Waiter> {
        Arc::new(Waiter { ended: Mutex::new(None), signal: Condvar::new() })
    }

    /// Tells the waiting thread.
    pub fn end(&self, result: IoResult, data: Data) {
        *lock(&self.ended) = Some((result, data));
        self.signal.notify_one();
    }

    /// Waits for the end.
    pub fn wait(&self) -> (IoResult, Data) {
        let mut ended = lock(&self.ended);
        loop {
            if let Some(end) = ended.take() {
                return end;
            }
            ended = match self.signal.wait(ended) {
                Ok(guard) => guard,
                Err(poisoned) => poisoned.into_inner(),
            };
        }
    }
}

/// What is told when a bio can never be completed by its queue, because the queue is gone.
pub(crate) const QUEUE_GONE: Status = Status::Offline;

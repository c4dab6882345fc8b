//! The way in which a completed bio is reported to its submitter.

use std::fmt;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use crate::buffer::Data;
use crate::error::IoResult;
use crate::sync::{Arc, Condvar, Mutex, lock};

/// Called once with the result of a bio and its data; must not block. It runs on the thread that
/// owns the queue; while no thread owns it, on one that submits to it, before its call of `submit`
/// returns. So it must not take a lock that a submitter has.
pub type Callback = Box<dyn FnOnce(IoResult, Data) + Send>;

/// A callback in one allocation, behind one word: a box of a trait object is two.
pub(crate) struct ThinCallback(NonNull<CallbackHead>);

/// The part of a callback that is the same for all types.
#[repr(C)]
struct CallbackHead {
    /// Frees it, and calls it if it is to be called.
    finish: unsafe fn(NonNull<CallbackHead>, Option<(IoResult, Data)>),
}

#[repr(C)]
struct CallbackBody<F> {
    head: CallbackHead,
    callback: F,
}

// SAFETY: it owns its callback, which can be sent.
unsafe impl Send for ThinCallback {}

impl ThinCallback {
    pub fn new<F: FnOnce(IoResult, Data) + Send + 'static>(callback: F) -> ThinCallback {
        let body = Box::new(CallbackBody { head: CallbackHead { finish: finish::<F> }, callback });
        ThinCallback(NonNull::from(Box::leak(body)).cast())
    }

    pub fn call(self, result: IoResult, data: Data) {
        let head = ManuallyDrop::new(self).0;
        // SAFETY: `new` made it, and neither this nor `drop` is called again.
        unsafe { (head.as_ref().finish)(head, Some((result, data))) }
    }

    /// As a word, for [`ThinCallback::from_raw`].
    pub fn into_raw(self) -> u64 {
        ManuallyDrop::new(self).0.as_ptr() as u64
    }

    /// # Safety
    /// `into_raw` returned the word, and it was not used since.
    pub unsafe fn from_raw(word: u64) -> ThinCallback {
        // SAFETY: it was no null pointer.
        ThinCallback(unsafe { NonNull::new_unchecked(word as *mut CallbackHead) })
    }
}

impl Drop for ThinCallback {
    fn drop(&mut self) {
        // SAFETY: as in `call`.
        unsafe { (self.0.as_ref().finish)(self.0, None) }
    }
}

/// # Safety
/// `head` is that of a leaked box of a `CallbackBody<F>`, which nobody uses any more.
unsafe fn finish<F: FnOnce(IoResult, Data)>(head: NonNull<CallbackHead>, call: Option<(IoResult, Data)>) {
    // SAFETY: the caller's promise; the head is the body's first field.
    let body = unsafe { Box::from_raw(head.cast::<CallbackBody<F>>().as_ptr()) };
    if let Some((result, data)) = call {
        (body.callback)(result, data);
    }
}

/// The action taken when a bio completes.
pub(crate) enum Completer {
    /// A [`Completion`](crate::Completion) with this `user_data` is delivered to the queue's owner.
    Owner(u64),
    /// The callback runs.
    Callback(ThinCallback),
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
                let call = AssertUnwindSafe(move || callback.call(result, data));
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

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn a_thin_callback_is_called_or_dropped_once() {
        let counted = std::sync::Arc::new(());
        let make = || {
            let mine = counted.clone();
            ThinCallback::new(move |result, _| {
                assert_eq!((result, std::sync::Arc::strong_count(&mine)), (Ok(()), 2))
            })
        };
        make().call(Ok(()), Data::None);
        drop(make());
        assert_eq!(std::sync::Arc::strong_count(&counted), 1);
        // SAFETY: used once.
        unsafe { ThinCallback::from_raw(make().into_raw()) }.call(Ok(()), Data::None);
        let panics =
            catch_unwind(AssertUnwindSafe(|| make().call(Err(crate::error::Status::Io), Data::None)));
        assert!(panics.is_err());
        assert_eq!(std::sync::Arc::strong_count(&counted), 1, "what panics is dropped too");
    }
}

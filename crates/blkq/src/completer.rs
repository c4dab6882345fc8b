use std::mem::{ManuallyDrop, MaybeUninit};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::PoisonError;

use crate::buffer::Data;
use crate::error::IoResult;
use crate::sync::{Arc, Condvar, Mutex, lock};

/// Called once with the result of a bio and its data. It must not block. The owner of the queue calls it;
/// while the queue has no owner, a submitting thread calls it from within `submit`. Therefore it must not
/// take a lock that a submitter may hold.
pub type Callback = Box<dyn FnOnce(IoResult, Data) + Send>;

/// Size of a callback that is stored without an allocation: enough for a channel and two counters.
const INLINE_WORDS: usize = 4;

/// Room for a callback, or for a box with a callback.
type Words = [MaybeUninit<u64>; INLINE_WORDS];

/// A callback, stored in place if it is small, as most are. With a box per bio, one thread would allocate
/// what another one frees, which is slow in most allocators.
pub(crate) struct InlineCallback {
    /// Moves the callback out of its words, and calls it if there is a result.
    finish: unsafe fn(NonNull<Words>, Option<(IoResult, Data)>),
    words: Words,
}

// SAFETY: an InlineCallback owns its callback, which is `Send`.
unsafe impl Send for InlineCallback {}

impl InlineCallback {
    pub fn new<F: FnOnce(IoResult, Data) + Send + 'static>(callback: F) -> InlineCallback {
        if size_of::<F>() <= size_of::<Words>() && align_of::<F>() <= align_of::<Words>() {
            // SAFETY: size and alignment were just compared.
            unsafe { InlineCallback::of(callback) }
        } else {
            // SAFETY: a box is one word.
            unsafe { InlineCallback::of(Box::new(callback)) }
        }
    }

    /// # Safety
    /// A `Words` must have room for an `F`, and its alignment.
    unsafe fn of<F: FnOnce(IoResult, Data) + Send + 'static>(callback: F) -> InlineCallback {
        let mut words = [MaybeUninit::uninit(); INLINE_WORDS];
        // SAFETY: the caller's promise.
        unsafe { words.as_mut_ptr().cast::<F>().write(callback) };
        InlineCallback { finish: finish::<F>, words }
    }

    pub fn call(self, result: IoResult, data: Data) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used nor dropped again.
        unsafe { (this.finish)(NonNull::from(&mut this.words), Some((result, data))) }
    }
}

impl Drop for InlineCallback {
    fn drop(&mut self) {
        // SAFETY: as in `call`.
        unsafe { (self.finish)(NonNull::from(&mut self.words), None) }
    }
}

/// # Safety
/// The words contain an `F`, which nothing uses again.
unsafe fn finish<F: FnOnce(IoResult, Data)>(words: NonNull<Words>, call: Option<(IoResult, Data)>) {
    // SAFETY: the caller's promise.
    let callback = unsafe { words.cast::<F>().read() };
    if let Some((result, data)) = call {
        callback(result, data);
    }
}

/// The receiver of the completion of a bio.
pub(crate) enum Completer {
    /// A [`Completion`](crate::Completion) with this `user_data` is delivered to the queue's owner.
    Owner(u64),
    Callback(InlineCallback),
    /// Nothing happens here: the slot is a part of another bio, or its completer was taken.
    None,
}

impl Completer {
    /// Reports the result to a submitter on another thread. A callback that panics is a bug of that
    /// submitter, and must not keep the queue from serving others.
    pub fn notify(self, result: IoResult, data: Data) {
        if let Completer::Callback(callback) = self {
            let call = AssertUnwindSafe(move || callback.call(result, data));
            // The panic hook has printed the message.
            let _ = catch_unwind(call);
        }
    }
}

pub(crate) struct BioWaiter {
    completed: Mutex<Option<(IoResult, Data)>>,
    signal: Condvar,
}

impl BioWaiter {
    pub fn new() -> Arc<BioWaiter> {
        Arc::new(BioWaiter { completed: Mutex::new(None), signal: Condvar::new() })
    }

    pub fn notify(&self, result: IoResult, data: Data) {
        *lock(&self.completed) = Some((result, data));
        self.signal.notify_one();
    }

    pub fn wait(&self) -> (IoResult, Data) {
        let mut completed = lock(&self.completed);
        loop {
            if let Some(result) = completed.take() {
                return result;
            }
            completed = self.signal.wait(completed).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    fn called_or_dropped_once(make: impl Fn(std::sync::Arc<()>) -> InlineCallback) {
        let counted = std::sync::Arc::new(());
        make(counted.clone()).call(Ok(()), Data::None);
        assert_eq!(std::sync::Arc::strong_count(&counted), 1);
        drop(make(counted.clone()));
        assert_eq!(std::sync::Arc::strong_count(&counted), 1);
        let moved = vec![make(counted.clone()), make(counted.clone())];
        moved.into_iter().for_each(|callback| callback.call(Ok(()), Data::None));
        assert_eq!(std::sync::Arc::strong_count(&counted), 1);
        let panics = catch_unwind(AssertUnwindSafe(|| {
            make(counted.clone()).call(Err(crate::error::Status::Io), Data::None);
        }));
        assert!(panics.is_err());
        assert_eq!(std::sync::Arc::strong_count(&counted), 1, "what panics is dropped too");
    }

    #[test]
    fn a_callback_of_any_size_is_called_or_dropped_once() {
        /// Needs a larger alignment than `Words` has.
        #[derive(Clone, Copy, PartialEq, Debug)]
        #[repr(align(32))]
        struct Aligned(u64);

        fn with<T: Copy + PartialEq + std::fmt::Debug + Send + 'static>(value: T) {
            called_or_dropped_once(|mine| {
                let same = std::hint::black_box(value);
                InlineCallback::new(move |result, _| {
                    assert_eq!((result, same), (Ok(()), value));
                    assert!(std::sync::Arc::strong_count(&mine) > 1);
                    assert!(std::ptr::from_ref(&same).is_aligned());
                })
            });
        }
        with(());
        with([7_u64; 2]);
        with([7_u64; INLINE_WORDS]);
        with([7_u64; 64]);
        with([7_u8; 3]);
        with(Aligned(7));
    }
}

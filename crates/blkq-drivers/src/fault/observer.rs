//! Reports injected faults to an observer, so that the model of a simulated world expects exactly these.

use std::cell::Cell;
use std::path::Path;

use blkq::{DriverContext, IoResult, Tag};

use super::spec::Effect;

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

//! The choice between the ways from the plug to the driver.

/// How the requests of a plug reach the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DispatchPath {
    /// There is no scheduler, no tracer and no limit: `Dispatch::issue_directly`.
    Direct,
    /// There are limits and nothing else. If the queue has prepaid for the whole plug
    /// (`Dispatch::pay_limits`), `Dispatch::issue_directly`; otherwise `Dispatch::issue_limited`.
    Limited,
    /// There is a tracer and nothing else: `Dispatch::issue_traced`.
    Traced,
    /// Everything else, and whenever requeued requests must go first: `Dispatch::insert`, then
    /// `Dispatch::run`.
    Queued,
}

impl DispatchPath {
    pub fn of(has_scheduler: bool, is_traced: bool, has_limits: bool) -> DispatchPath {
        // Device time is measured only while there are limits.
        match (has_scheduler, is_traced, has_limits) {
            (false, false, false) => DispatchPath::Direct,
            (false, false, true) => DispatchPath::Limited,
            (false, true, false) => DispatchPath::Traced,
            _ => DispatchPath::Queued,
        }
    }
}

/// Whether bios and completions have observers, as flags that the fast paths test.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Observers {
    /// A scheduler, or a tracer that records each bio: no bio may take the plug's fast path.
    pub bios: bool,
    /// A scheduler, a tracer or the measurement of device time: each is notified of completions.
    pub completions: bool,
}

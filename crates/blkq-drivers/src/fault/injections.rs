//! The faults that were injected, recorded for each thread of a simulated world, so that its model can expect exactly
//! what a rule did and nothing else.

use std::cell::RefCell;
use std::path::PathBuf;

use blkq::clock::monotonic_ns;
use blkq::{BioFlags, DriverContext, IoResult, Operation, Tag};

use super::spec::{Effect, Rule};

thread_local! {
    static INJECTIONS: RefCell<Vec<Injection>> = const { RefCell::new(Vec::new()) };
}

/// A request, and what happens to it.
#[derive(Clone, Debug)]
pub struct Hit {
    /// The request's queue and tag, until it has completed.
    pub request: (u16, u16),
    /// Of the effects all but delays.
    pub effect: Effect,
    /// Of a short or torn transfer the bytes that are done; of a misdirected one where it goes,
    /// in bytes of the device; of a corrupted one the bit, counted from its beginning; else 0.
    pub at: u64,
    /// The requested operation.
    pub operation: Operation,
    /// Whether for good.
    pub fua: bool,
    /// Where, in bytes of the device.
    pub offset: u64,
    /// How much.
    pub bytes: u64,
    /// The data to write; empty for all but writes.
    pub data: Vec<u8>,
}

/// The fault that was injected.
#[derive(Clone, Debug)]
pub enum Injection {
    /// A request is hit.
    Hit(Hit),
    /// The request of this queue with this tag has completed in the wrapped driver.
    Completed((u16, u16), IoResult),
    /// A rule with this trigger file hit a request, at that time.
    Armed(PathBuf, u64),
}

/// The faults injected on this thread since the last call.
pub fn take_injections() -> Vec<Injection> {
    INJECTIONS.take()
}

fn record(injection: Injection) {
    INJECTIONS.with_borrow_mut(|all| all.push(injection));
}

fn request_of(cx: &DriverContext<'_>, tag: Tag) -> (u16, u16) {
    (cx.owner(), tag.index() as u16)
}

/// `effect` happens to a request; `at` is as in [`Hit`].
pub(super) fn hit(cx: &DriverContext<'_>, tag: Tag, effect: Effect, at: u64) {
    let request = cx.request(tag);
    let mut data = Vec::new();
    if request.operation() == Operation::Write {
        cx.for_each_segment(tag, |segment| {
            // SAFETY: the memory of a write in flight is valid.
            let bytes = unsafe { std::slice::from_raw_parts(segment.ptr, segment.len as usize) };
            data.extend_from_slice(bytes);
        });
    }
    record(Injection::Hit(Hit {
        request: request_of(cx, tag),
        effect,
        at,
        operation: request.operation(),
        fua: request.flags().contains(BioFlags::FUA),
        offset: request.offset(),
        bytes: request.bytes(),
        data,
    }));
}

/// The wrapped queue is done with a request.
pub(super) fn completed(cx: &DriverContext<'_>, tag: Tag, effect: Option<Effect>, result: IoResult) {
    if effect.is_some() {
        record(Injection::Completed(request_of(cx, tag), result));
    }
}

/// `rule` hits a request.
pub(super) fn armed(rule: &Rule) {
    if let Some(file) = &rule.file {
        record(Injection::Armed(file.clone(), monotonic_ns()));
    }
}

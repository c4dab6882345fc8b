//! Records the injected faults of each thread, for the model of the world.

use std::cell::RefCell;
use std::path::PathBuf;

use blkq::clock::monotonic_ns;
use blkq::{BioFlags, DriverContext, IoResult, Operation};
use blkq_drivers::fault::{self, Effect};

thread_local! {
    static INJECTIONS: RefCell<Vec<Injection>> = const { RefCell::new(Vec::new()) };
}

/// A request that a rule has hit, and the effect.
#[derive(Clone, Debug)]
pub struct Hit {
    /// The queue and the tag of the request. They identify the request until it has completed.
    pub request: (u16, u16),
    /// The effect; delays are not recorded.
    pub effect: Effect,
    /// For a short or torn transfer, the number of bytes that are transferred. For a misdirected transfer,
    /// its new offset on the device, in bytes. For corrupted data, the number of the flipped bit, counted from
    /// the beginning of the request. Else 0.
    pub at: u64,
    /// The operation of the request.
    pub operation: Operation,
    /// Whether the request has the flag FUA.
    pub fua: bool,
    /// Offset of the request on the device, in bytes.
    pub offset: u64,
    /// Length of the request in bytes.
    pub bytes: u64,
    /// The data to write; empty for all but writes.
    pub data: Vec<u8>,
}

/// An event of the fault driver.
#[derive(Clone, Debug)]
pub enum Injection {
    /// A rule has hit a request.
    Hit(Hit),
    /// The request of this queue with this tag has completed in the wrapped driver.
    Completed((u16, u16), IoResult),
    /// A rule with this trigger file has hit a request at this time, in nanoseconds of the monotonic clock.
    Armed(PathBuf, u64),
}

/// The events recorded on this thread since the last call.
pub fn take_injections() -> Vec<Injection> {
    INJECTIONS.take()
}

pub(crate) fn record(cx: &DriverContext<'_>, injection: fault::Injection<'_>) {
    let recorded = match injection {
        fault::Injection::Hit(tag, effect, at) => {
            let request = cx.request(tag);
            let mut data = Vec::new();
            if request.operation() == Operation::Write {
                cx.for_each_segment(tag, |segment| {
                    // SAFETY: the memory of a write in flight is valid.
                    let bytes = unsafe { std::slice::from_raw_parts(segment.ptr, segment.len as usize) };
                    data.extend_from_slice(bytes);
                });
            }
            Injection::Hit(Hit {
                request: (cx.owner(), tag.index() as u16),
                effect,
                at,
                operation: request.operation(),
                fua: request.flags().contains(BioFlags::FUA),
                offset: request.offset(),
                bytes: request.bytes(),
                data,
            })
        }
        fault::Injection::Completed(tag, result) => {
            Injection::Completed((cx.owner(), tag.index() as u16), result)
        }
        fault::Injection::Armed(file) => Injection::Armed(file.to_owned(), monotonic_ns()),
    };
    INJECTIONS.with_borrow_mut(|all| all.push(recorded));
}

//! Reports to the simulated world exactly what happens to requests, so that its model can expect that
//! and nothing else. Elsewhere nobody wants to know.

use super::spec::{Effect, Rule};
use crate::driver::DriverContext;
use crate::error::IoResult;
use crate::tags::Tag;

/// `effect` happens to a request; `at` is as in [`Hit`](crate::simulation::Hit).
#[cfg(simulation)]
pub fn hit(cx: &DriverContext<'_>, tag: Tag, effect: Effect, at: u64) {
    use crate::bio::{BioFlags, Operation};
    use crate::simulation::{Hit, Noted, world};

    let request = cx.request(tag);
    let mut data = Vec::new();
    if request.operation() == Operation::Write {
        cx.for_each_segment(tag, |segment| {
            // SAFETY: the memory of a write in flight is valid.
            let bytes = unsafe { std::slice::from_raw_parts(segment.ptr, segment.len as usize) };
            data.extend_from_slice(bytes);
        });
    }
    world().note(Noted::Hit(Hit {
        request: (cx.owner, tag.0),
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
#[cfg(simulation)]
pub fn completed(cx: &DriverContext<'_>, tag: Tag, effect: Option<Effect>, result: IoResult) {
    if effect.is_some() {
        use crate::simulation::{Noted, world};
        world().note(Noted::Completed((cx.owner, tag.0), result));
    }
}

/// `rule` hits a request.
#[cfg(simulation)]
pub fn armed(rule: &Rule) {
    if let Some(file) = &rule.file {
        let at_ns = crate::clock::monotonic_ns();
        crate::simulation::world().note(crate::simulation::Noted::Armed(file.clone(), at_ns));
    }
}

#[cfg(not(simulation))]
pub fn armed(_rule: &Rule) {}

#[cfg(not(simulation))]
pub fn hit(_cx: &DriverContext<'_>, _tag: Tag, _effect: Effect, _at: u64) {}

#[cfg(not(simulation))]
pub fn completed(_cx: &DriverContext<'_>, _tag: Tag, _effect: Option<Effect>, _result: IoResult) {}

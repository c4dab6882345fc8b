use std::borrow::Cow;

use crate::bio::Outline;
use crate::buffer::{Data, IoBuffer, Segment};
use crate::driver::{DriverContext, DriverQueue};
use crate::error::IoResult;
use crate::request::RequestState;
use crate::sector::{SECTOR_SHIFT, Sector};
use crate::slab::{InFlight, NewBio, slice_segments};
use crate::tags::Tag;

/// A queue of a wrapped driver, and the requests that it is offered instead of those of the wrapping queue:
/// one per tag, with the same tag and one bio each. Memory is allocated for every request.
pub struct WrappedQueue {
    queue: Box<dyn DriverQueue>,
    in_flight: InFlight,
    completed: Vec<(Tag, IoResult)>,
}

impl WrappedQueue {
    /// Wraps `queue`, which the wrapped driver opened for `tags` tags.
    pub fn new(queue: Box<dyn DriverQueue>, tags: usize) -> WrappedQueue {
        // A bio is in the slot of its tag.
        let in_flight = InFlight::new(tags, 0, IoBuffer::zeroed(0));
        WrappedQueue { queue, in_flight, completed: Vec::with_capacity(tags) }
    }

    /// Prepares the request with `tag` for [`DriverQueue::queue_requests`]. It has the operation and flags
    /// of the wrapping queue's request with that tag, and transfers the first `bytes` of `segments` at
    /// `sector`.
    ///
    /// # Safety
    /// The wrapped queue must have no request with this tag. The memory of the segments must stay valid until
    /// the request has completed, and no thread may access it meanwhile if the device writes to it.
    pub unsafe fn prepare(
        &mut self,
        cx: &DriverContext<'_>,
        tag: Tag,
        sector: Sector,
        bytes: u64,
        segments: &[Segment],
    ) {
        let request = cx.request(tag);
        let (operation, flags) = (request.operation(), request.flags());
        let mut first = Vec::with_capacity(segments.len());
        slice_segments(segments, 0, bytes as u32, |segment| first.push(segment));
        let count = first.len() as u16;
        let data = match operation.has_data() {
            // SAFETY: the caller keeps the memory valid until the request has completed.
            true => unsafe { Data::borrowed(first) },
            false => Data::None,
        };
        let (sectors, start_ns) = (bytes >> SECTOR_SHIFT, request.start_ns);
        let outline = Outline { operation, flags, sector, sectors, start_ns };
        let slot = u32::from(tag.0);
        self.in_flight.set(slot, NewBio::without_completer(outline, data));
        self.in_flight[tag].begin(slot, &outline, count);
    }

    /// Removes and returns the requests that the wrapped queue has completed. Must be called after each
    /// [`WrappedQueue::call`]. Panics if the wrapped driver completed a request twice.
    pub fn take_completed(&mut self) -> Vec<(Tag, IoResult)> {
        let completed = std::mem::take(&mut self.completed);
        for (tag, _) in &completed {
            let request = &mut self.in_flight[*tag];
            assert!(request.state == RequestState::Busy, "{tag:?} was completed twice");
            request.complete(*tag);
            drop(self.in_flight[u32::from(tag.0)].take_data());
        }
        completed
    }

    /// Whether the wrapped queue has no request, so that no request's memory is in use.
    pub fn is_idle(&self) -> bool {
        self.in_flight.tags().next().is_none()
    }

    /// Calls the wrapped queue with its own view of the block layer, which consists of disjoint parts of the
    /// wrapping queue's view. Only requests that were prepared may be offered to the queue, and `call` may use the
    /// view for nothing but this.
    pub fn call<R>(
        &mut self,
        cx: &mut DriverContext<'_>,
        call: impl FnOnce(&mut dyn DriverQueue, &mut DriverContext<'_>) -> R,
    ) -> R {
        let mut inner = DriverContext {
            in_flight: &mut self.in_flight,
            completed: &mut self.completed,
            clock: cx.clock,
            ring: cx.ring.as_deref_mut(),
            owner: cx.owner,
            early_submission: cx.early_submission,
            limits_changed: cx.limits_changed,
        };
        call(&mut *self.queue, &mut inner)
    }

    /// Returns [`DriverQueue::state`] of a request that was prepared.
    pub fn state(&self, tag: Tag) -> Cow<'static, str> {
        self.queue.state(tag, &self.in_flight[tag])
    }

    /// Returns [`DriverQueue::deadline_ns`] of the wrapped queue.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.queue.deadline_ns()
    }
}

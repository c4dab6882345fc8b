use std::borrow::Cow;
use std::mem::ManuallyDrop;

use crate::bio::Outline;
use crate::buffer::{Data, Segment};
use crate::completer::Completer;
use crate::driver::{DriverContext, DriverQueue};
use crate::error::IoResult;
use crate::request::{NIL, Request, RequestState};
use crate::sector::{SECTOR_SHIFT, Sector};
use crate::slab::{BioSlab, NewBio, SlotFlags, slice_segments};
use crate::tags::Tag;

/// A queue of a wrapped driver, and the requests that it is offered instead of those of the wrapping queue:
/// one per tag, with the same tag and one bio each. Memory is allocated for every request.
pub struct WrappedQueue {
    queue: Box<dyn DriverQueue>,
    requests: Box<[Request]>,
    bios: BioSlab,
    completed: Vec<(Tag, IoResult)>,
}

impl WrappedQueue {
    /// Wraps `queue`, which the wrapped driver opened for `tags` tags.
    pub fn new(queue: Box<dyn DriverQueue>, tags: usize) -> WrappedQueue {
        WrappedQueue {
            queue,
            requests: (0..tags).map(|_| Request::idle()).collect(),
            bios: BioSlab::new(0, tags as u32),
            completed: Vec::with_capacity(tags),
        }
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
        let sectors = bytes >> SECTOR_SHIFT;
        let slot = self.bios.insert(NewBio {
            outline: Outline { operation, flags, sector, sectors, start_ns: 0 },
            data: ManuallyDrop::new(data),
            completer: ManuallyDrop::new(Completer::None),
            slot_flags: SlotFlags::empty(),
        });
        self.requests[tag.index()] = Request {
            sector,
            sectors,
            first_bio: slot,
            last_bio: slot,
            start_ns: request.start_ns,
            operation,
            flags,
            state: RequestState::Busy,
            segments: count,
            pdu: [0; 2],
        };
    }

    /// Removes and returns the requests that the wrapped queue has completed. Must be called after each
    /// [`WrappedQueue::call`]. Panics if the wrapped driver completed a request twice.
    pub fn take_completed(&mut self) -> Vec<(Tag, IoResult)> {
        let completed = std::mem::take(&mut self.completed);
        for (tag, _) in &completed {
            let request = &mut self.requests[tag.index()];
            assert!(request.state == RequestState::Busy, "{tag:?} was completed twice");
            let slot = std::mem::replace(&mut request.first_bio, NIL);
            request.state = RequestState::Idle;
            drop(self.bios[slot].take_data());
            self.bios.remove(slot);
        }
        completed
    }

    /// Whether the wrapped queue has no request, so that no request's memory is in use.
    pub fn is_idle(&self) -> bool {
        self.requests.iter().all(|request| request.state != RequestState::Busy)
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
            requests: &mut self.requests,
            bios: &self.bios,
            zeroes: cx.zeroes,
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
        self.queue.state(tag, &self.requests[tag.index()])
    }

    /// Returns [`DriverQueue::deadline_ns`] of the wrapped queue.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.queue.deadline_ns()
    }
}

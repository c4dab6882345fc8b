//! Replaces a queue that a new driver could not open while the disk was in use
//! ([`Exchange::replace`](crate::disk::Exchange::replace)).

use crate::driver::{DriverContext, DriverQueue, Taken};
use crate::error::Status;
use crate::tags::Tag;

pub(super) struct BrokenQueue;

// SAFETY: each request completes immediately, and its memory is not used.
unsafe impl DriverQueue for BrokenQueue {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        tags.iter().for_each(|tag| cx.complete(*tag, Err(Status::Io)));
        Taken::All
    }
}

//! From which software queue staged bios are taken next, and whether they are at all.

use crate::remote::software::Staged;

/// Where a queue is in its round over the software queues.
#[derive(Default)]
pub(super) struct PullCursor {
    /// The software queue that comes first.
    from: u32,
    closed: bool,
    /// Room for what is taken at once.
    taken: Vec<Staged>,
}

impl PullCursor {
    pub fn from(&self) -> u32 {
        self.from
    }

    pub fn set_from(&mut self, index: u32) {
        self.from = index;
    }

    /// Room for what is taken at once, to be returned empty.
    #[inline]
    pub fn room(&mut self) -> Vec<Staged> {
        std::mem::take(&mut self.taken)
    }

    #[inline]
    pub fn return_room(&mut self, room: Vec<Staged>) {
        self.taken = room;
    }

    /// The owner of the queue stops: nothing more is taken from submitters.
    pub fn close(&mut self) {
        self.closed = true;
    }

    #[inline]
    pub fn is_closed(&self) -> bool {
        self.closed
    }
}

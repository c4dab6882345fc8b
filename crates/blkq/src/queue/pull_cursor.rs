//! From which software queue staged bios are taken next, and whether they are at all.

use std::collections::VecDeque;

use crate::remote::software::Staged;

/// Where a queue is in its round over the software queues.
#[derive(Default)]
pub(super) struct PullCursor {
    /// The software queue that comes first.
    from: u32,
    closed: bool,
    /// Staged requests that were taken at once and are not the queue's own yet.
    taken: VecDeque<Staged>,
}

impl PullCursor {
    pub fn from(&self) -> u32 {
        self.from
    }

    pub fn set_from(&mut self, index: u32) {
        self.from = index;
    }

    /// The staged requests that were taken at once, oldest first. Each stays here until it is the queue's
    /// own: a panic loses none of them.
    #[inline]
    pub fn taken(&mut self) -> &mut VecDeque<Staged> {
        &mut self.taken
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

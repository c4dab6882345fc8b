//! The round-robin position of a queue over the software queues (`hctx->dispatch_from` in the kernel).

use std::collections::VecDeque;

use crate::remote::software::Staged;

#[derive(Default)]
pub(super) struct PullCursor {
    /// The software queue from which staged bios are taken next.
    from: u32,
    closed: bool,
    taken: VecDeque<Staged>,
}

impl PullCursor {
    pub fn from(&self) -> u32 {
        self.from
    }

    pub fn set_from(&mut self, index: u32) {
        self.from = index;
    }

    /// The staged requests that were taken together, oldest first. Each one stays here until the queue
    /// accepts it, so that a panic loses none.
    #[inline]
    pub fn taken(&mut self) -> &mut VecDeque<Staged> {
        &mut self.taken
    }

    pub fn close(&mut self) {
        self.closed = true;
    }

    #[inline]
    pub fn is_closed(&self) -> bool {
        self.closed
    }
}

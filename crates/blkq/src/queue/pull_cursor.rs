//! From which software queue staged bios are taken next, and whether they are at all.

/// Where a queue is in its round over the software queues.
#[derive(Default)]
pub(super) struct PullCursor {
    /// The software queue that comes first.
    from: u32,
    closed: bool,
}

impl PullCursor {
    pub fn from(&self) -> u32 {
        self.from
    }

    pub fn set_from(&mut self, index: u32) {
        self.from = index;
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

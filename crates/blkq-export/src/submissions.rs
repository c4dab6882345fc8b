//! Submits the bios of a source that is one client of the disk.

use std::collections::VecDeque;

use blkq::trace::TraceClient;
use blkq::{Bio, SourceContext};

// An engine has one queue of the disk.
pub const ENGINE_QUEUE: usize = 0;

/// The submissions of one client.
pub struct Submissions {
    client: TraceClient,
    /// Bios that the disk's queue had no room for.
    requeued: VecDeque<Bio>,
}

impl Submissions {
    pub const fn new(client: TraceClient) -> Submissions {
        Submissions { client, requeued: VecDeque::new() }
    }

    /// Submits `bio`. If the queue is full, [`Submissions::resubmit`] submits it again later.
    #[inline]
    pub fn submit(&mut self, cx: &mut SourceContext<'_>, bio: Bio) {
        // Requeued bios go first, so that none starves.
        let result = if self.requeued.is_empty() { self.submit_now(cx, bio) } else { Err(bio) };
        if let Err(bio) = result {
            self.requeued.push_back(bio);
        }
    }

    #[inline]
    fn submit_now(&self, cx: &mut SourceContext<'_>, bio: Bio) -> Result<(), Bio> {
        cx.set_trace_client(ENGINE_QUEUE, || self.client);
        cx.submit(ENGINE_QUEUE, bio)
    }

    /// Submits requeued bios, as long as the queue has room.
    pub fn resubmit(&mut self, cx: &mut SourceContext<'_>) {
        while let Some(bio) = self.requeued.pop_front() {
            if let Err(bio) = self.submit_now(cx, bio) {
                return self.requeued.push_front(bio);
            }
        }
    }

    /// The number of bios that wait for room in the queue.
    pub fn requeued(&self) -> usize {
        self.requeued.len()
    }
}

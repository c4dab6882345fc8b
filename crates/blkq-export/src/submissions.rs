//! Submits the bios of a source.

use std::collections::VecDeque;

use blkq::trace::TraceClient;
use blkq::{Bio, SourceContext};

// An engine has one queue of the disk, unless an NBD server has several exports.
pub const ENGINE_QUEUE: usize = 0;

/// The submissions of one source.
pub struct Submissions {
    client: TraceClient,
    /// Bios that a queue had no room for, each with the index of the queue and its client.
    requeued: VecDeque<(usize, TraceClient, Bio)>,
}

impl Submissions {
    pub const fn new(client: TraceClient) -> Submissions {
        Submissions { client, requeued: VecDeque::new() }
    }

    /// Submits `bio` of the source's client to the only queue.
    #[inline]
    pub fn submit(&mut self, cx: &mut SourceContext<'_>, bio: Bio) {
        self.submit_for(cx, self.client, ENGINE_QUEUE, bio);
    }

    /// Submits `bio` of `client`. If the queue is full, [`Submissions::resubmit`] submits it again later.
    #[inline]
    pub fn submit_for(&mut self, cx: &mut SourceContext<'_>, client: TraceClient, queue: usize, bio: Bio) {
        // Requeued bios go first, so that none starves.
        let result = if self.requeued.is_empty() { submit_now(cx, client, queue, bio) } else { Err(bio) };
        if let Err(bio) = result {
            self.requeued.push_back((queue, client, bio));
        }
    }

    /// Submits requeued bios, as long as the queues have room. Returns whether there were some and none is left.
    pub fn resubmit(&mut self, cx: &mut SourceContext<'_>) -> bool {
        let had_some = !self.requeued.is_empty();
        while let Some((queue, client, bio)) = self.requeued.pop_front() {
            if let Err(bio) = submit_now(cx, client, queue, bio) {
                self.requeued.push_front((queue, client, bio));
                return false;
            }
        }
        had_some
    }

    /// The number of bios that wait for room in a queue.
    pub fn requeued(&self) -> usize {
        self.requeued.len()
    }
}

#[inline]
fn submit_now(cx: &mut SourceContext<'_>, client: TraceClient, queue: usize, bio: Bio) -> Result<(), Bio> {
    cx.set_trace_client(queue, || client);
    cx.submit(queue, bio)
}

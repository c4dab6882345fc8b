//! The requests of a source: the work that they cost in a turn, the submission of their bios, and numbered slots for
//! those in flight.

use std::collections::VecDeque;

use blkq::trace::TraceClient;
use blkq::{Bio, SourceContext, TURN_BUDGET};

/// The queue of the disk on an engine with one queue.
pub const ENGINE_QUEUE: usize = 0;
/// Bytes that a thread copies in about the time of one item.
const BYTES_PER_ITEM: usize = 32 << 10;

/// The items that a source has spent in the current turn. Everything whose amount a client chooses is
/// counted: requests, descriptors, options, and bytes that are copied, so that the clients of one source cannot
/// delay the other sources and queues of the engine. The limit is the one of [`TURN_BUDGET`].
#[derive(Default)]
pub struct TurnWork {
    turn: u64,
    items: usize,
}

impl TurnWork {
    /// Must be called before items are spent: resets the count if a new turn has begun. The engine calls
    /// [`Source::on_turn`](blkq::Source::on_turn) several times in one turn when bios complete immediately,
    /// and these calls share one budget.
    pub fn begin(&mut self, cx: &SourceContext<'_>) {
        if self.turn != cx.turn() {
            (self.turn, self.items) = (cx.turn(), 0);
        }
    }

    pub fn spend(&mut self, items: usize) {
        self.items += items;
    }

    pub fn spend_bytes(&mut self, bytes: usize) {
        self.items += bytes / BYTES_PER_ITEM;
    }

    pub fn is_over(&self) -> bool {
        self.items >= TURN_BUDGET.items
    }
}

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
    pub fn submit(&mut self, cx: &mut SourceContext<'_>, bio: Bio) {
        self.submit_for(cx, self.client, ENGINE_QUEUE, bio);
    }

    /// Submits `bio` of `client`. If the queue is full, [`Submissions::resubmit`] submits it again later.
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

fn submit_now(cx: &mut SourceContext<'_>, client: TraceClient, queue: usize, bio: Bio) -> Result<(), Bio> {
    cx.set_trace_client(queue, || client);
    cx.submit(queue, bio)
}

/// Numbered slots for requests in flight. A number is used again when its slot is free, which bounds memory.
pub struct Slots<T> {
    slots: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slots<T> {
    fn default() -> Slots<T> {
        Slots { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slots<T> {
    /// Stores `value` and returns its number. The free slot that was used last is taken first.
    pub fn insert(&mut self, value: T) -> u64 {
        let Some(number) = self.free.pop() else {
            self.slots.push(Some(value));
            return self.slots.len() as u64 - 1;
        };
        self.slots[number as usize] = Some(value);
        number.into()
    }

    pub fn get(&self, number: u64) -> Option<&T> {
        self.slots.get(number as usize)?.as_ref()
    }

    pub fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        self.slots.get_mut(number as usize)?.as_mut()
    }

    pub fn take(&mut self, number: u64) -> Option<T> {
        let value = self.slots.get_mut(number as usize)?.take()?;
        self.free.push(number as u32);
        Some(value)
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().flatten()
    }

    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_take_memory_for_the_peak_number_of_values_only() {
        let mut slots = Slots::default();
        let (one, other) = (slots.insert('a'), slots.insert('b'));
        for value in 'c'..='z' {
            assert_eq!(slots.take(one).map(|_| slots.len()), Some(1));
            assert_eq!(slots.take(one), None);
            assert_eq!(slots.get(one), None);
            assert_eq!(slots.insert(value), one);
        }
        assert_eq!(slots.get_mut(other), Some(&mut 'b'));
        assert_eq!((slots.len(), slots.slots.len()), (2, 2));
        assert_eq!(slots.take(7), None);
    }
}

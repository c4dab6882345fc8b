//! Completions on their way: of requests that the driver completed, to the queue's owner, to
//! other threads, and to the request gate.

use std::mem::ManuallyDrop;

use crate::bio::{Completion, Operation};
use crate::buffer::Data;
use crate::completer::Completer;
use crate::error::IoResult;
use crate::remote::gate::{Direction, RequestGate};
use crate::request::RequestState;
use crate::slab::BioSlot;
use crate::tags::Tag;

use super::in_flight::InFlight;

/// The completions of one queue.
pub(super) struct Completions {
    /// Requests that the driver completed.
    requests: Vec<(Tag, IoResult)>,
    /// The driver's limits are to be read again.
    limits_changed: bool,
    /// Bios that the queue's owner submitted.
    own: Vec<Completion>,
    /// How many of these have been taken one by one: they come first, and are empty.
    taken: usize,
    /// Bios that other threads submitted.
    remote: Vec<(Completer, IoResult, Data)>,
    /// Allocations owed to the request gate: reads, writes.
    gate_owed: [u32; 2],
}

impl Completions {
    pub fn new(slots: usize) -> Completions {
        Completions {
            requests: Vec::with_capacity(slots),
            limits_changed: false,
            own: Vec::with_capacity(slots),
            taken: 0,
            remote: Vec::new(),
            gate_owed: [0; 2],
        }
    }

    /// The fields that the driver writes.
    #[inline]
    pub fn for_driver(&mut self) -> (&mut Vec<(Tag, IoResult)>, &mut bool) {
        (&mut self.requests, &mut self.limits_changed)
    }

    /// Whether the driver has come to other limits since this was last asked.
    #[inline]
    pub fn take_limits_changed(&mut self) -> bool {
        std::mem::take(&mut self.limits_changed)
    }

    /// Whether the driver completed requests.
    #[inline]
    pub fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    /// How many requests the driver completed.
    #[inline]
    pub fn request_count(&self) -> usize {
        self.requests.len()
    }

    #[inline]
    pub fn take_requests(&mut self) -> Vec<(Tag, IoResult)> {
        std::mem::take(&mut self.requests)
    }

    /// The batch is done: its room is kept, unless more have completed meanwhile.
    #[inline]
    pub fn put_back_requests(&mut self, mut batch: Vec<(Tag, IoResult)>) {
        batch.clear();
        if self.requests.is_empty() {
            self.requests = batch;
        }
    }

    /// Requests that complete without the driver.
    pub fn extend_requests(&mut self, tags: impl Iterator<Item = Tag>, result: IoResult) {
        self.requests.extend(tags.map(|tag| (tag, result)));
    }

    /// A bio of the queue's owner completed.
    pub fn push_own(&mut self, user_data: u64, result: IoResult, data: Data) {
        self.own.push(Completion { user_data, result, data });
    }

    /// A bio of another thread completed.
    pub fn push_remote(&mut self, completer: Completer, result: IoResult, data: Data) {
        self.remote.push((completer, result, data));
    }

    /// The bio in `slot` completed well, with nothing else to do.
    #[inline]
    pub fn push_plain(&mut self, user_data: u64, slot: &mut BioSlot) {
        self.own.push(Completion { user_data, result: Ok(()), data: slot.take_data() });
    }

    /// Completes requests of `completed` until one is not of a plain bio alone, of `operation` and
    /// begun at `start_ns`, or has failed; their tags are `freed`. Returns how many, and the sum of their
    /// sectors.
    #[inline(always)]
    pub fn complete_plain(
        &mut self,
        in_flight: &mut InFlight,
        freed: &mut Vec<Tag>,
        completed: &[(Tag, IoResult)],
        operation: Operation,
        start_ns: u64,
    ) -> (usize, u64) {
        let Some(state) = RequestState::of_plain(operation) else { return (0, 0) };
        self.own.reserve(completed.len());
        freed.reserve(completed.len());
        let room = self.own.spare_capacity_mut().iter_mut().zip(freed.spare_capacity_mut());
        let (requests, slots) = in_flight.plain_mut();
        let (mut count, mut sectors) = (0, 0);
        for (&(tag, result), (place, freed)) in completed.iter().zip(room) {
            if result.is_err() {
                break;
            }
            let request = &mut requests[tag.index()];
            if request.state != state || request.start_ns != start_ns {
                break;
            }
            request.state = RequestState::Idle;
            let slot = &mut slots[tag.index()];
            let place = place.as_mut_ptr();
            // Written where it is to be: a literal would go through the stack (see `BioSlot`).
            // SAFETY: the place is valid for writing, all of its fields are written, and the data
            // is read once, as it is none from then on.
            unsafe {
                (&raw mut (*place).user_data).write(slot.user_data());
                (&raw mut (*place).result).write(Ok(()));
                (&raw mut (*place).data).write(std::ptr::read(&*slot.data));
            }
            slot.data = ManuallyDrop::new(Data::None);
            freed.write(tag);
            sectors += request.sectors;
            count += 1;
        }
        // SAFETY: so many places behind the others have been written, of both.
        unsafe {
            self.own.set_len(self.own.len() + count);
            freed.set_len(freed.len() + count);
        }
        in_flight.release_plain(count);
        (count, sectors)
    }

    /// A bio that came through the request gate completed, for another thread.
    #[inline]
    pub fn owe_gate(&mut self, operation: Operation) {
        self.gate_owed[usize::from(operation.is_write())] += 1;
    }

    /// Notifies other threads of bios that completed, when all that is counted of them is; before
    /// that, releases their allocations of the request gate and so lets submitters go on.
    #[inline]
    pub fn deliver_remote(&mut self, gate: &RequestGate) {
        if !self.remote.is_empty() {
            self.pay_and_notify(gate);
        }
    }

    #[inline(never)]
    fn pay_and_notify(&mut self, gate: &RequestGate) {
        let [reads, writes] = std::mem::take(&mut self.gate_owed);
        for (direction, count) in [(Direction::Read, reads), (Direction::Write, writes)] {
            if count > 0 {
                gate.leave(direction, count);
            }
        }
        for (completer, result, data) in self.remote.drain(..) {
            completer.notify(result, data);
        }
    }

    /// Completions for the queue's owner that have not been taken, oldest first.
    #[inline]
    pub fn own(&self) -> &[Completion] {
        &self.own[self.taken..]
    }

    /// The same, to be taken out.
    #[inline]
    pub fn own_mut(&mut self) -> &mut Vec<Completion> {
        self.forget_taken();
        &mut self.own
    }

    fn forget_taken(&mut self) {
        if self.taken > 0 {
            self.own.drain(..self.taken);
            self.taken = 0;
        }
    }

    /// Takes the oldest of them, in constant time: those behind it move up when they are no more
    /// than have been taken.
    pub fn take_own(&mut self) -> Option<Completion> {
        let place = self.own.get_mut(self.taken)?;
        let empty = Completion { user_data: 0, result: Ok(()), data: Data::None };
        let completion = std::mem::replace(place, empty);
        self.taken += 1;
        if self.taken * 2 >= self.own.len() {
            self.forget_taken();
        }
        Some(completion)
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn completions_are_taken_oldest_first_one_by_one_or_all() {
        let mut completions = Completions::new(4);
        let (mut pushed, mut taken) = (0, 0);
        for (push, take) in [(10, 3), (2, 0), (0, 4), (40, 1), (0, 44), (1, 2), (3, 1)] {
            for _ in 0..push {
                completions.push_own(pushed, Ok(()), Data::None);
                pushed += 1;
            }
            for _ in 0..take {
                let next = completions.take_own().map(|completion| completion.user_data);
                assert_eq!(next, (taken < pushed).then_some(taken));
                taken += u64::from(next.is_some());
            }
            assert!(completions.own().iter().map(|completion| completion.user_data).eq(taken..pushed));
        }
        let rest = completions.own_mut().drain(..).map(|completion| completion.user_data);
        assert!(rest.eq(taken..pushed));
        assert!(completions.take_own().is_none() && completions.own().is_empty());
    }
}

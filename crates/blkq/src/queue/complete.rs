//! Completes requests in batches (`struct io_comp_batch`), and the bios of each request.

use crate::bio::{BioFlags, Operation};
use crate::completer::Completer;
use crate::error::{IoResult, Status};
use crate::request::{NIL, Request};
use crate::slab::{FlushStep, SlotFlags};
use crate::stats::Counter;
use crate::tags::Tag;

use super::failures::THREAD;
use super::io::Io;

impl Io {
    /// Completes and counts requests. Requests of one operation and start time are counted together.
    #[inline]
    pub fn complete_requests(&mut self, completed: &[(Tag, IoResult)]) {
        let iostats = self.disk.settings().iostats;
        let mut rest = completed;
        while let Some(&(first, _)) = rest.first() {
            let (now_ns, stamped) = if iostats { self.clock.now_ns_for(rest.len()) } else { (0, rest.len()) };
            let stamped = &rest[..stamped];
            let Request { operation, start_ns, .. } = self.in_flight[first];
            let (in_flight, freed) = (&mut self.in_flight, self.tags.freed());
            let plain = self.completions.complete_plain(in_flight, freed, stamped, operation, start_ns);
            let (count, sectors) = if plain.0 == stamped.len() {
                plain
            } else {
                self.complete_others(stamped, plain, operation, start_ns)
            };
            if iostats {
                self.clock.count_uses(count);
                self.stats.done(operation.into(), (count as u64, sectors), start_ns, now_ns);
            }
            rest = &rest[count..];
        }
        #[cfg(simulation)]
        completed.iter().for_each(|(tag, _)| crate::simulation::request_completed(self.disk.index(), tag.0));
        self.stats.count(Counter::ClockReads, self.clock.take_reads());
        self.stats.clock_age(self.clock.age_ns_max());
        self.tags.share_freed();
    }

    /// Completes further requests of `completed`. Its first `count` requests are complete, with `sectors` in
    /// total. Stops at a request that is plain, that is not of `operation` or that has another start time.
    /// Returns the new values of `count` and `sectors`.
    #[inline(never)]
    fn complete_others(
        &mut self,
        completed: &[(Tag, IoResult)],
        (mut count, mut sectors): (usize, u64),
        operation: Operation,
        start_ns: u64,
    ) -> (usize, u64) {
        while let Some(&(tag, result)) = completed.get(count) {
            let request = &self.in_flight[tag];
            let plain = request.is_plain() && result.is_ok();
            if plain || request.operation != operation || request.start_ns != start_ns {
                break;
            }
            (count, sectors) = (count + 1, sectors + request.sectors);
            self.complete_request(tag, result);
        }
        (count, sectors)
    }

    fn complete_request(&mut self, tag: Tag, result: IoResult) {
        let (operation, first) = self.in_flight.complete(tag);
        if tag != self.flush.tag() {
            self.tags.freed().push(tag);
        }
        if result.is_err() || operation == Operation::Flush {
            return self.complete_request_slow(tag, operation, first, result);
        }
        let mut index = first;
        loop {
            let slot = &mut self.in_flight[index];
            let next = slot.next;
            if let Some(user_data) = slot.plain_user_data() {
                self.completions.push_own(user_data, Ok(()), slot.take_data());
                self.in_flight.bios_mut().remove(index);
            } else {
                self.complete_bio(index, Ok(()));
            }
            if next == NIL {
                return;
            }
            index = next;
        }
    }

    #[cold]
    fn complete_request_slow(&mut self, tag: Tag, operation: Operation, first: u32, result: IoResult) {
        let mut index = first;
        if let Err(status) = result {
            self.stats.failed(operation.into(), status);
            self.note_failure(tag, first, status);
        }
        if operation == Operation::Flush {
            return self.complete_flush(result);
        }
        while index != NIL {
            let next = self.in_flight[index].next;
            self.complete_bio(index, result);
            index = next;
        }
    }

    /// Records the failure of request `tag`, whose first bio is `first`, for the watcher.
    #[cold]
    pub fn note_failure(&mut self, tag: Tag, first: u32, status: Status) {
        // Clients try operations that a device may not support, and fall back to others.
        if status == Status::NotSupported {
            return;
        }
        let bio = if first == NIL { self.flush.running().front().copied() } else { Some(first) };
        let user_data = bio.and_then(|bio| self.user_data_of(bio));
        self.failures.note(&self.in_flight[tag], status, user_data.ok_or(THREAD));
    }

    /// Completes bio `index`, or its current step: the bio continues if it has further steps.
    pub fn complete_bio(&mut self, index: u32, result: IoResult) {
        let slot = &self.in_flight[index];
        let has_steps = slot.operation == Operation::WriteZeroes || slot.step != FlushStep::None;
        if has_steps && self.complete_step(index, result) {
            return;
        }
        let slot = &mut self.in_flight[index];
        if slot.slot_flags.contains(SlotFlags::GATED) {
            self.completions.owe_gate(slot.operation);
        }
        let (data, parent, completer) = (slot.take_data(), slot.parent, slot.take_completer());
        self.in_flight.bios_mut().remove(index);
        match completer {
            Completer::Owner(user_data) => self.completions.push_own(user_data, result, data),
            Completer::Callback(_) | Completer::Waiter(_) => {
                self.completions.push_remote(completer, result, data);
            }
            Completer::None => self.complete_part(parent, result),
        }
    }

    /// Completes one step of a bio that may have several. Returns true if the bio continues.
    #[inline(never)]
    fn complete_step(&mut self, index: u32, result: IoResult) -> bool {
        let slot = &self.in_flight[index];
        let is_zeroes =
            slot.operation == Operation::WriteZeroes && !slot.slot_flags.contains(SlotFlags::AS_ZEROES);
        // While the bio waits for a flush, `result` is that of the flush, and says nothing about support for
        // write-zeroes.
        let is_data = slot.step != FlushStep::Preflush && slot.step != FlushStep::Postflush;
        if is_zeroes
            && is_data
            && result == Err(Status::NotSupported)
            && !slot.flags.contains(BioFlags::NO_FALLBACK)
        {
            // The driver has learned from this request that the device does not support the operation.
            self.begin_zeroes(index);
            return true;
        }
        slot.step != FlushStep::None && self.complete_sequence_data(index, result)
    }

    /// Completes a bio that never became a request.
    #[cold]
    pub fn reject(&mut self, index: u32, status: Status) {
        self.stats.rejected(self.in_flight[index].operation.into(), status);
        self.complete_without_request(index, Err(status));
    }

    pub fn complete_without_request(&mut self, index: u32, result: IoResult) {
        self.trace(|tracer, in_flight, clock| tracer.completed_bio(index, &in_flight[index], result, clock));
        self.complete_bio(index, result);
    }
}

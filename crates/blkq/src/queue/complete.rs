//! How the end of a bio reaches whoever asked for it.

use std::mem::ManuallyDrop;

use crate::bio::{BioFlags, Completion, Operation};
use crate::buffer::Data;
use crate::completer::Completer;
use crate::error::{IoResult, Status};
use crate::queue::Queue;
use crate::remote::gate::Direction;
use crate::request::NIL;
use crate::request::{Request, RequestState};
use crate::slab::{BioSlot, FlushStep, SlotMarks};
use crate::stats::{Counter, StatsBatch};
use crate::tags::Tag;

impl Queue {
    /// Ends what the driver completed: one clock reading, one return of tags, one update
    /// of the shared counters for all of it (`struct io_comp_batch`).
    pub(crate) fn complete_batch(&mut self) {
        if self.limits_changed {
            self.reload_limits();
        }
        // A fresh reading: no completion is stamped earlier than its issue.
        self.clock.invalidate();
        self.rerun_at_ns = None;
        let mut completed = std::mem::take(&mut self.completed);
        let count = completed.len() as u32;
        if self.scheduler.is_some() {
            self.tell_scheduler(&completed);
        }
        if self.settings.iostats {
            self.account(&completed);
        }
        self.stats.count(Counter::ClockReads, self.clock.take_reads());
        self.stats.clock_age(self.clock.age_ns_max());
        let flushes = self.flush.in_flight();
        if self.watch.waits_for_ends() {
            self.note_ends(&completed);
        }
        for &(tag, result) in &completed {
            self.end_request(tag, result);
        }
        if flushes {
            // Its tag is none of the set's.
            completed.retain(|&(tag, _)| tag != self.flush.tag());
        }
        self.tags.put_batch(completed.iter().map(|&(tag, _)| tag));
        completed.clear();
        if self.completed.is_empty() {
            self.completed = completed;
        }
        self.started -= count;
        self.in_use -= count;
        if self.gate_owed != [0; 2] {
            self.pay_gate();
        }
        self.tell_ended();
    }

    /// Of its requests that ended, and others: most disks have no scheduler.
    #[cold]
    fn tell_scheduler(&mut self, completed: &[(Tag, IoResult)]) {
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.completed(completed, self.clock.now_ns());
        }
    }

    /// Tells the statistics of requests that ended: those alike, and stamped alike, together.
    fn account(&mut self, completed: &[(Tag, IoResult)]) {
        let mut batch = StatsBatch::default();
        let mut rest = completed;
        while !rest.is_empty() {
            let (now_ns, stamped) = self.clock.now_ns_for(rest.len());
            let mut alike = &rest[..stamped];
            rest = &rest[stamped..];
            while let Some((first, _)) = alike.first() {
                let Request { operation, start_ns, .. } = self.requests[first.index()];
                let (mut count, mut sectors) = (0, 0);
                for (tag, _) in alike {
                    let request = &self.requests[tag.index()];
                    if request.start_ns != start_ns || request.operation != operation {
                        break;
                    }
                    count += 1;
                    sectors += request.sectors;
                }
                batch.done(&mut self.stats, operation.into(), (count as u64, sectors), start_ns, now_ns);
                alike = &alike[count..];
            }
        }
        batch.finish(&mut self.stats);
    }

    #[inline(always)]
    fn end_request(&mut self, tag: Tag, result: IoResult) {
        let request = &mut self.requests[tag.index()];
        if request.state != RequestState::Busy {
            completed_twice(tag);
        }
        request.state = RequestState::Idle;
        if result.is_err() || request.operation == Operation::Flush {
            return self.end_request_slow(tag, result);
        }
        let mut index = request.first_bio;
        loop {
            let slot = &mut self.bios[index];
            let next = slot.next;
            if let Some(user_data) = slot.plain_mark() {
                push_plain(&mut self.done, user_data, slot);
                self.bios.remove(index);
            } else {
                self.end_bio(index, Ok(()));
            }
            if next == NIL {
                return;
            }
            index = next;
        }
    }

    #[cold]
    fn end_request_slow(&mut self, tag: Tag, result: IoResult) {
        let request = &self.requests[tag.index()];
        let (operation, mut index) = (request.operation, request.first_bio);
        if let Err(status) = result {
            self.stats.failed(operation.into(), status);
        }
        if operation == Operation::Flush {
            return self.end_flush(result);
        }
        while index != NIL {
            let next = self.bios[index].next;
            self.end_bio(index, result);
            index = next;
        }
    }

    /// Ends a bio, or the step of it that this was.
    pub(crate) fn end_bio(&mut self, index: u32, result: IoResult) {
        let slot = &self.bios[index];
        let is_zeroes =
            slot.operation == Operation::WriteZeroes && !slot.marks.contains(SlotMarks::AS_ZEROES);
        // Once it waits for a flush the answer is the flush's, not that of the zeroes.
        let is_data = slot.step != FlushStep::Preflush && slot.step != FlushStep::Postflush;
        if is_zeroes
            && is_data
            && result == Err(Status::NotSupported)
            && !slot.flags.contains(BioFlags::NO_FALLBACK)
        {
            // The driver found out that it cannot after all.
            return self.begin_zeroes(index);
        }
        if slot.step != FlushStep::None && self.end_sequence_data(index, result) {
            return;
        }
        let slot = &mut self.bios[index];
        if slot.marks.contains(SlotMarks::GATED) {
            self.gate_owed[usize::from(slot.operation.is_write())] += 1;
        }
        let (data, parent, completer) = (slot.take_data(), slot.parent, slot.take_completer());
        self.bios.remove(index);
        match completer {
            Completer::Owner(user_data) => self.done.push(Completion { user_data, result, data }),
            Completer::Callback(_) | Completer::Waiter(_) => {
                self.remote_completions.push((completer, result, data))
            }
            Completer::None => self.end_part(parent, result),
        }
    }

    /// Ends a bio that never became a request.
    #[cold]
    pub(crate) fn refuse(&mut self, index: u32, status: Status) {
        self.stats.refused(self.bios[index].operation.into(), status);
        self.end_bio(index, Err(status));
    }

    /// Tells other threads of bios that ended, when all that is counted of them is.
    #[inline]
    pub(crate) fn tell_ended(&mut self) {
        if self.remote_completions.is_empty() {
            return;
        }
        for (completer, result, data) in self.remote_completions.drain(..) {
            completer.notify(result, data);
        }
    }

    /// Gives allocations back to the request gate and so lets submitters go on.
    pub(crate) fn pay_gate(&mut self) {
        let [reads, writes] = std::mem::take(&mut self.gate_owed);
        for (direction, count) in [(Direction::Read, reads), (Direction::Write, writes)] {
            if count > 0 {
                self.disk.gate.leave(direction, count);
            }
        }
    }
}

/// Always on: a request that ends twice has already lost somebody's data.
#[cold]
fn completed_twice(tag: Tag) -> ! {
    panic!("the driver completed tag {} twice", tag.0);
}

/// Adds the completion of a bio that ended well, written where it is to be: a literal would
/// go through the stack (see `BioSlot`).
#[inline(always)]
fn push_plain(done: &mut Vec<Completion>, user_data: u64, slot: &mut BioSlot) {
    if done.len() == done.capacity() {
        done.reserve(1);
    }
    // SAFETY: there is room for one more, all of its fields are written, and the data is
    // read once, as it is none from then on.
    unsafe {
        let place = done.as_mut_ptr().add(done.len());
        (&raw mut (*place).user_data).write(user_data);
        (&raw mut (*place).result).write(Ok(()));
        (&raw mut (*place).data).write(std::ptr::read(&*slot.data));
        done.set_len(done.len() + 1);
    }
    slot.data = ManuallyDrop::new(Data::None);
}

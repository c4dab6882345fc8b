//! How the end of a bio reaches whoever asked for it.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::bio::{BioFlags, Completion, Operation};
use crate::buffer::Data;
use crate::error::{IoResult, Status};
use crate::gate::Direction;
use crate::queue::Queue;
use crate::request::{RequestState, Tag};
use crate::slab::{BioSlot, FlushStep, NIL, SlotMarks};
use crate::stats::{Counter, StatsBatch};
use crate::sync::{Arc, Condvar, Mutex, lock};

/// A callback for the end of a bio; runs on the thread that owns the queue and must not block.
pub type Callback = Box<dyn FnOnce(IoResult, Data) + Send>;

/// What happens when a bio ends.
pub(crate) enum End {
    /// A [`Completion`](crate::Completion) with this mark goes to the queue's owner.
    Owner(u64),
    /// The callback runs. Boxed twice to be one word.
    Callback(Box<Callback>),
    /// A waiting thread is told.
    Waiter(Arc<Waiter>),
    /// Nothing: the slot is a part of another bio, or its end was taken.
    Taken,
}

impl End {
    /// Tells whoever waits on another thread. A callback that panics is that thread's
    /// defect; the queue goes on for all others.
    pub fn tell(self, result: IoResult, data: Data) {
        match self {
            End::Callback(callback) => {
                let call = AssertUnwindSafe(move || callback(result, data));
                // The panic hook has printed it.
                let _ = catch_unwind(call);
            }
            End::Waiter(waiter) => waiter.end(result, data),
            End::Owner(_) | End::Taken => {}
        }
    }
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Owner(mark) => write!(f, "Owner({mark})"),
            End::Callback(_) => f.write_str("Callback"),
            End::Waiter(_) => f.write_str("Waiter"),
            End::Taken => f.write_str("Taken"),
        }
    }
}

/// One bio that a thread waits for.
pub(crate) struct Waiter {
    ended: Mutex<Option<(IoResult, Data)>>,
    signal: Condvar,
}

impl Waiter {
    pub fn new() -> Arc<Waiter> {
        Arc::new(Waiter { ended: Mutex::new(None), signal: Condvar::new() })
    }

    /// Tells the waiting thread.
    pub fn end(&self, result: IoResult, data: Data) {
        *lock(&self.ended) = Some((result, data));
        self.signal.notify_one();
    }

    /// Waits for the end.
    pub fn wait(&self) -> (IoResult, Data) {
        let mut ended = lock(&self.ended);
        loop {
            if let Some(end) = ended.take() {
                return end;
            }
            ended = match self.signal.wait(ended) {
                Ok(guard) => guard,
                Err(poisoned) => poisoned.into_inner(),
            };
        }
    }
}

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
        let mut batch = StatsBatch::default();
        for &(tag, result) in &completed {
            self.end_request(tag, result, &mut batch);
        }
        batch.finish(&mut self.stats);
        self.stats.count(Counter::ClockReads, self.clock.take_reads());
        self.stats.clock_age(self.clock.age_ns_max());
        completed.clear();
        if self.completed.is_empty() {
            self.completed = completed;
        }
        self.tags.put_batch(&self.freed);
        self.freed.clear();
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

    #[inline]
    fn end_request(&mut self, tag: Tag, result: IoResult, batch: &mut StatsBatch) {
        let request = &mut self.requests[tag.index()];
        // Always on: a request that ends twice has already lost somebody's data.
        assert!(request.state == RequestState::Busy, "the driver completed tag {} twice", tag.0);
        request.state = RequestState::Idle;
        let operation = request.operation;
        let first_bio = request.first_bio;
        if self.settings.iostats {
            let now_ns = self.clock.now_ns();
            batch.done(&mut self.stats, operation.into(), request.sectors, request.start_ns, now_ns);
        }
        if let Err(status) = result {
            self.stats.failed(operation.into(), status);
        }
        if operation == Operation::Flush {
            return self.end_flush(result);
        }
        self.freed.push(tag);
        let mut index = first_bio;
        while index != NIL {
            let next = self.bios[index].next;
            self.end_bio(index, result);
            index = next;
        }
    }

    /// Ends a bio, or the step of it that this was.
    #[inline(always)]
    pub(crate) fn end_bio(&mut self, index: u32, result: IoResult) {
        let slot = &mut self.bios[index];
        if let (Some(user_data), Ok(())) = (slot.plain_mark(), result) {
            push_plain(&mut self.done, user_data, slot);
            self.bios.remove(index);
            return;
        }
        self.end_bio_slow(index, result);
    }

    #[cold]
    fn end_bio_slow(&mut self, index: u32, result: IoResult) {
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
        let (data, parent, end) = (slot.take_data(), slot.parent, slot.take_end());
        self.bios.remove(index);
        match end {
            End::Owner(user_data) => self.done.push(Completion { user_data, result, data }),
            End::Callback(_) | End::Waiter(_) => self.untold.push((end, result, data)),
            End::Taken => self.end_part(parent, result),
        }
    }

    /// Tells other threads of bios that ended, when all that is counted of them is.
    #[inline]
    pub(crate) fn tell_ended(&mut self) {
        if self.untold.is_empty() {
            return;
        }
        for (end, result, data) in self.untold.drain(..) {
            end.tell(result, data);
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

/// Adds the completion of a bio that ended well, written where it is to be: built on the
/// stack and copied it would stall the processor (see `DataWords`).
#[inline(always)]
fn push_plain(done: &mut Vec<Completion>, user_data: u64, slot: &mut BioSlot) {
    if let Some(buffer) = slot.take_buffer() {
        done.reserve(1);
        let place = done.spare_capacity_mut()[0].as_mut_ptr();
        // SAFETY: there is room for one more, and all of its fields are written.
        unsafe {
            (&raw mut (*place).user_data).write(user_data);
            (&raw mut (*place).result).write(Ok(()));
            (&raw mut (*place).data).write(Data::Buffer(buffer));
            done.set_len(done.len() + 1);
        }
    } else {
        done.push(Completion { user_data, result: Ok(()), data: slot.take_data() });
    }
}

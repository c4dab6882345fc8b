use crate::bio::Completion;
use crate::buffer::Data;
use crate::completer::Completer;
use crate::error::IoResult;
use crate::remote::gate::{Direction, RequestGate};
use crate::tags::Tag;

#[derive(Default)]
pub(super) struct Completions {
    /// Requests that the driver has completed and the queue has not.
    pub requests: Vec<(Tag, IoResult)>,
    /// The driver has called [`DriverContext::limits_changed`](crate::DriverContext::limits_changed).
    pub limits_changed: bool,
    /// Completions of bios that the queue's owner submitted.
    pub own: Vec<Completion>,
    /// How many of `own`, from the beginning, were taken one by one. They are empty.
    taken: usize,
    /// Completions of bios that other threads submitted.
    pub remote: Vec<(Completer, IoResult, Data)>,
    /// Completed bios that the request gate still counts as in flight: reads, all others.
    pub gate_owed: [u32; 2],
}

impl Completions {
    pub fn new(slots: usize) -> Completions {
        let (requests, own) = (Vec::with_capacity(slots), Vec::with_capacity(slots));
        Completions { requests, own, ..Completions::default() }
    }

    /// Returns the buffer of a batch, so that it is reused. Drops the buffer if the driver has completed
    /// further requests meanwhile, which are in a new one.
    pub fn put_back_requests(&mut self, mut batch: Vec<(Tag, IoResult)>) {
        batch.clear();
        if self.requests.is_empty() {
            self.requests = batch;
        }
    }

    pub fn push_own(&mut self, user_data: u64, result: IoResult, data: Data) {
        self.own.push(Completion { user_data, result, data });
    }

    /// Notifies other threads of completed bios. Reports the bios to the gate first, so that waiting submitters
    /// continue.
    #[inline(never)]
    pub fn notify_remote(&mut self, gate: &RequestGate) {
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
    pub fn own(&self) -> &[Completion] {
        &self.own[self.taken..]
    }

    /// [`Completions::own`], for the caller to remove some.
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

    /// Takes the oldest completion, in amortised constant time: the rest is moved to the front only when at
    /// least half has been taken.
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

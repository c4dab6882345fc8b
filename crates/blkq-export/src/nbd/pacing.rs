//! How much a device gets at once. Some devices, those of virtual machines above all, report
//! completions in bursts, when they run idle. Given all that the clients ask for, such a device
//! works while clients and server wait, and waits while they work. Given half of it, it does that
//! half while the other half is answered and asked for anew.

/// Bios that must have been in flight for their completions to count.
const LOAD_MIN: usize = 16;
/// A device that answers in less is none that could do anything meanwhile.
const WAIT_MIN_NS: u64 = 50_000;
/// Completions that are no further apart than a part of the wait before them belong together.
const APART_PART: u64 = 4;
/// Times that the device completed nearly all at once (each other time subtracts one) after
/// which it is paced, and how many are remembered.
const BURSTS: u32 = 4;
const BURSTS_MAX: u32 = 8;
/// Bursts over which the load is the most that there was.
const WINDOW: u32 = 32;

/// The observed pace of the devices behind one engine.
#[derive(Default)]
pub(super) struct Pacing {
    /// Bios that the block layer has.
    in_flight: usize,
    /// Bios that completed since the last update.
    completed: usize,
    /// Bios submitted in this turn, and when the last turn with any was.
    submitted: usize,
    submitted_ns: u64,
    /// The completions that belong together: when the last was, how long to wait for another, how
    /// many there were, how many were in flight before, and whether the device had had the
    /// time to do anything.
    end_ns: u64,
    apart_ns: u64,
    burst: usize,
    burst_of: usize,
    burst_counts: bool,
    bursts: u32,
    /// The most that was in flight or waited, over a window, and in the current one.
    load: usize,
    load_now: usize,
    updates: u32,
}

impl Pacing {
    /// Whether the block layer may have one more.
    pub fn has_room(&self) -> bool {
        self.bursts < BURSTS || self.in_flight < self.load.max(LOAD_MIN).div_ceil(2)
    }

    /// A bio was submitted.
    pub fn submit(&mut self) {
        self.in_flight += 1;
        self.submitted += 1;
    }

    /// A bio completed.
    pub fn complete(&mut self) {
        self.in_flight -= 1;
        self.completed += 1;
    }

    /// Whether any completed since the last update.
    pub fn has_news(&self) -> bool {
        self.completed > 0
    }

    /// Takes in the completions until `now_ns`, while `waiting` bios wait for room.
    pub fn update(&mut self, waiting: usize, now_ns: u64) {
        let before = self.in_flight + self.completed;
        self.load_now = self.load_now.max(before + waiting);
        // One that never runs idle does not complete all at once either.
        if now_ns >= self.end_ns + self.apart_ns || self.burst > 2 * self.burst_of {
            self.judge();
            self.burst = 0;
            self.burst_of = before;
            let wait_ns = now_ns.saturating_sub(self.submitted_ns);
            self.apart_ns = wait_ns / APART_PART;
            self.burst_counts = before >= LOAD_MIN && wait_ns >= WAIT_MIN_NS;
        }
        self.burst += std::mem::take(&mut self.completed);
        self.end_ns = now_ns;
    }

    fn judge(&mut self) {
        if self.burst_counts && self.burst * 4 >= self.burst_of * 3 && self.burst <= 2 * self.burst_of {
            self.bursts = (self.bursts + 1).min(BURSTS_MAX);
        } else if self.burst_of >= LOAD_MIN {
            self.bursts = self.bursts.saturating_sub(1);
        }
        self.updates += 1;
        if self.updates >= WINDOW || self.load_now > self.load {
            self.load = std::mem::take(&mut self.load_now);
            self.updates = 0;
        }
    }

    /// The turn is over; the clock is asked if anything was submitted in it.
    pub fn turn(&mut self, now_ns: impl FnOnce() -> u64) {
        if std::mem::take(&mut self.submitted) > 0 {
            self.submitted_ns = now_ns();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Lets a client that always wants `depth` use a device that completes `at_once` bios together,
    /// `wait_ns` after the last submission, and no more than that before it is polled.
    /// Returns the most that the device had once the first rounds were over.
    fn most_in_flight(depth: usize, at_once: usize, wait_ns: u64) -> usize {
        let mut pacing = Pacing::default();
        let (mut now_ns, mut waiting, mut most) = (MS, depth, 0);
        for round in 0..200 {
            while waiting > 0 && pacing.has_room() {
                pacing.submit();
                waiting -= 1;
            }
            if round > 100 {
                most = most.max(pacing.in_flight);
            }
            pacing.turn(|| now_ns);
            now_ns += wait_ns;
            let completed = at_once.min(pacing.in_flight);
            (0..completed).for_each(|_| pacing.complete());
            assert!(pacing.has_news());
            pacing.update(waiting, now_ns);
            waiting += completed;
        }
        most
    }

    #[test]
    fn a_device_that_completes_all_at_once_gets_half() {
        assert_eq!(most_in_flight(64, 64, MS), 32);
        assert_eq!(most_in_flight(128, 128, MS), 64);
    }

    #[test]
    fn others_get_all() {
        assert_eq!(most_in_flight(64, 4, MS), 64, "completions come one after the other");
        assert_eq!(most_in_flight(64, 4, 10_000), 64, "and at short intervals");
        assert_eq!(most_in_flight(64, 64, 1000), 64, "there is no device that works meanwhile");
        assert_eq!(most_in_flight(8, 8, MS), 8, "there is too little to divide");
    }
}

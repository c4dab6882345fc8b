//! The clock of a queue. In cached mode it is read once per plug and once per batch of completions; in
//! precise mode, once per time stamp (the kernel's `blk_time_get_ns` and its plug's `cur_ktime`).

use std::time::Duration;

use crate::enumeration::enumeration;
use crate::error::{Error, ErrorKind};

/// The number of times that a cached reading is used at most: as often as a plug for several queues has
/// requests (the kernel's blk_plug_max_rq_count). A user-space thread is not notified when it was scheduled
/// out, so the age of a reading is bounded by this count, and by plug flushes and waits.
pub const CLOCK_USES_MAX: u32 = 64;

enumeration! {
    /// How time stamps are taken.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    #[non_exhaustive]
    pub enum ClockMode {
        /// One reading serves a plug, or a batch of completions.
        #[default]
        Cached => "cached",
        /// Each time stamp reads the clock.
        Precise => "precise",
    }

    /// The name of the mode.
    pub const fn name(self) -> &'static str;
    parse |mode| -> Error {
        Error::new(ErrorKind::Invalid, format!("the clock mode must be cached or precise, not {mode:?}"))
    }
}

/// A monotonic clock in nanoseconds, used by one thread.
#[derive(Debug)]
pub(crate) struct Clock {
    cached_ns: u64,
    /// The number of times that the cached reading may still be used; 0 if there is none.
    uses_left: u32,
    mode: ClockMode,
    reads: u64,
    /// The last cached reading, until the next reading shows how long it was in use; 0 if there is none, or
    /// the queue has been idle since.
    unmeasured_ns: u64,
    age_ns_max: u64,
}

impl Clock {
    pub fn new(mode: ClockMode) -> Clock {
        Clock { cached_ns: 0, uses_left: 0, mode, reads: 0, unmeasured_ns: 0, age_ns_max: 0 }
    }

    /// The time, cached or read according to the mode. Never 0.
    #[inline]
    pub fn now_ns(&mut self) -> u64 {
        match self.uses_left.checked_sub(1) {
            Some(left) => {
                self.uses_left = left;
                self.cached_ns
            }
            None => self.read(),
        }
    }

    /// The time for up to `count` (1 or more) time stamps, and the number of stamps for which it may be used.
    /// The caller must count the stamps that it uses with [`Clock::count_uses`].
    pub fn now_ns_for(&mut self, count: usize) -> (u64, usize) {
        let now_ns = if self.uses_left > 0 { self.cached_ns } else { self.read() };
        (now_ns, count.min(self.uses_left.max(1) as usize))
    }

    /// Counts `count` uses of the time, at most the number that [`Clock::now_ns_for`] returned.
    pub fn count_uses(&mut self, count: usize) {
        self.uses_left = self.uses_left.saturating_sub(count as u32);
    }

    /// Uncounts `count` uses of the reading `ns`, because the stamps were not used after all.
    pub fn return_uses(&mut self, ns: u64, count: usize) {
        if ns == self.cached_ns && self.uses_left > 0 {
            self.uses_left += count as u32;
        }
    }

    #[inline(never)]
    fn read(&mut self) -> u64 {
        let now = monotonic_ns();
        self.reads += 1;
        if self.unmeasured_ns != 0 {
            self.age_ns_max = self.age_ns_max.max(now.saturating_sub(self.unmeasured_ns));
        }
        if self.mode == ClockMode::Cached {
            self.cached_ns = now;
            self.unmeasured_ns = now;
            self.uses_left = CLOCK_USES_MAX;
        }
        now
    }

    /// Called when the queue has nothing to do, or its thread is about to sleep. The last reading is then not
    /// used until the next one, so the time in between is not its age.
    pub fn idle(&mut self) {
        self.unmeasured_ns = 0;
    }

    /// Discards the cached reading. Must be called at every plug flush, at the beginning of a batch of
    /// completions, and before any operation that may wait.
    pub fn invalidate(&mut self) {
        self.uses_left = 0;
    }

    pub fn set_mode(&mut self, mode: ClockMode) {
        self.mode = mode;
        self.invalidate();
        self.idle();
    }

    /// The last cached reading, even if it may no longer be used; 0 if there was none.
    pub fn last_read_ns(&self) -> u64 {
        self.cached_ns
    }

    pub fn take_reads(&mut self) -> u64 {
        std::mem::take(&mut self.reads)
    }

    /// The longest time between a cached reading and the next reading, in nanoseconds: an upper bound for how
    /// long any reading was used. To save readings, a reading after which the queue was idle is not measured,
    /// and other work of the thread in between counts.
    pub fn age_ns_max(&self) -> u64 {
        self.age_ns_max
    }
}

/// The time from now until `deadline_ns` of the monotonic clock: zero if the deadline has passed, `None` if
/// there is none. Must be called immediately before the sleep, because the result ages.
pub(crate) fn time_until(deadline_ns: Option<u64>) -> Option<Duration> {
    deadline_ns.map(|at_ns| Duration::from_nanos(at_ns.saturating_sub(monotonic_ns())))
}

/// The time of CLOCK_MONOTONIC in nanoseconds.
pub fn monotonic_ns() -> u64 {
    #[cfg(simulation)]
    crate::simulation::world().instant();
    worker_ns()
}

/// The time of CLOCK_MONOTONIC in nanoseconds, for a worker: the simulated world, which may kill the process when an
/// engine reads its clock, does not kill it here.
#[inline]
pub fn worker_ns() -> u64 {
    #[cfg(simulation)]
    return crate::simulation::world().now_ns();
    #[cfg(not(simulation))]
    {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `now` is a valid place for the result, and this clock always exists. rustix is not used,
        // because its vDSO call does not work under valgrind, with which instructions are counted.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    fn wait_for_2_ms() {
        let until_ns = monotonic_ns() + 2_000_000;
        crate::testing::wait_until("2 ms pass", || monotonic_ns() >= until_ns);
    }

    #[test]
    fn a_reading_is_valid_until_the_next() {
        let mut clock = Clock::new(ClockMode::Cached);
        let first = clock.now_ns();
        wait_for_2_ms();
        assert_eq!((clock.now_ns(), clock.age_ns_max()), (first, 0));
        clock.invalidate();
        let second = clock.now_ns();
        assert!(clock.age_ns_max() == second - first && second - first >= 2_000_000);
        // The first use beyond the maximum reads the clock again.
        wait_for_2_ms();
        while clock.now_ns() == second {}
        assert!(clock.age_ns_max() >= 2_000_000 && clock.take_reads() == 3);
    }

    #[test]
    fn idle_time_is_not_age() {
        let mut clock = Clock::new(ClockMode::Cached);
        clock.now_ns();
        clock.invalidate();
        clock.idle();
        wait_for_2_ms();
        clock.now_ns();
        assert_eq!(clock.age_ns_max(), 0);
    }

    #[test]
    fn a_precise_clock_has_no_age() {
        let mut clock = Clock::new(ClockMode::Precise);
        clock.now_ns();
        wait_for_2_ms();
        clock.now_ns();
        assert_eq!((clock.age_ns_max(), clock.take_reads()), (0, 2));
    }

    #[test]
    fn a_reading_serves_a_fixed_number_of_stamps() {
        let uses = CLOCK_USES_MAX as usize;
        let mut clock = Clock::new(ClockMode::Cached);
        let take = |clock: &mut Clock, count| {
            let (now_ns, served) = clock.now_ns_for(count);
            clock.count_uses(served);
            (now_ns, served)
        };
        let first = clock.now_ns();
        assert_eq!(take(&mut clock, uses - 1), (first, uses - 1));
        assert_eq!(take(&mut clock, uses), (first, 1));
        assert_eq!(clock.take_reads(), 1);
        assert_eq!(take(&mut clock, usize::from(u16::MAX)).1, uses);
        assert_eq!(clock.take_reads(), 1);
        clock.set_mode(ClockMode::Precise);
        assert_eq!((take(&mut clock, uses).1, take(&mut clock, uses).1, clock.take_reads()), (1, 1, 2));
    }
}

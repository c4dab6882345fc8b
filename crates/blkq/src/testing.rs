//! Waiting in tests. A test waits for a condition, and never for a fixed time: every test of this workspace
//! that waits calls [`wait_until`] or [`wait_for`], whose limit adapts to the machine. So a test fails only
//! if something hangs, and not because the machine is slow or busy. `lab/style` rejects other sleeps.

#[cfg(not(model_check))]
pub mod harness;

use std::time::{Duration, Instant};

/// The limit of a wait on an idle machine of usual speed.
const WAIT_LIMIT: Duration = Duration::from_secs(60);
/// The limit of a whole test body, which may contain several waits.
const BODY_LIMIT: Duration = Duration::from_secs(180);
/// The largest factor by which a limit is extended.
const SLOWNESS_MAX: f64 = 10.0;
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// The time for which [`assert_stays`] checks its condition.
const STAYS: Duration = Duration::from_millis(150);
/// The work that [`slowness`] measures: readings of the clock, because their cost is the same in debug and
/// release builds. [`CLOCK_READINGS_TIME`] is how long they take on a machine of usual speed.
const CLOCK_READINGS: u32 = 10_000;
const CLOCK_READINGS_TIME: Duration = Duration::from_millis(1);

/// Waits until `condition` holds. Panics with `what`, the condition in words, after a minute; later on a
/// machine that is slow or busy.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for(what, || condition().then_some(()));
}

/// Waits until `poll` returns a value, and returns that value. Panics as [`wait_until`] does.
#[track_caller]
pub fn wait_for<T>(what: &str, poll: impl FnMut() -> Option<T>) -> T {
    poll_within(WAIT_LIMIT, what, poll)
}

/// Runs `body` on another thread and returns its result, so that a body that hangs fails the test. Panics if
/// `body` panics, with its message, or if it does not return within three minutes (more on a machine that is
/// slow or busy).
#[track_caller]
pub fn within_limit<R: Send + 'static>(body: impl FnOnce() -> R + Send + 'static) -> R {
    let thread = std::thread::spawn(body);
    poll_within(BODY_LIMIT, "the body of the test returns", || thread.is_finished().then_some(()));
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Checks for a short time that `condition` keeps holding, to show that an event does not happen. A slow
/// machine checks less often, but does not fail. Panics with `what` if the condition does not hold.
#[track_caller]
pub fn assert_stays(what: &str, condition: impl FnMut() -> bool) {
    assert_stays_for(STAYS, what, condition);
}

/// Checks as [`assert_stays`] does, but for `time`, to show that an event does not happen later.
#[track_caller]
pub fn assert_stays_for(time: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    loop {
        let is_over = begin.elapsed() >= time;
        assert!(condition(), "no longer holds: {what}");
        if is_over {
            return;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

#[track_caller]
fn poll_within<T>(base: Duration, what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    let mut limit = base;
    loop {
        if let Some(value) = poll() {
            return value;
        }
        if begin.elapsed() >= limit {
            // The limit may have been exceeded only because the machine is slow or busy.
            limit = limit.max(base.mul_f64(slowness()));
            assert!(begin.elapsed() < limit, "waited for {} seconds in vain: {what}", limit.as_secs());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The factor by which this machine is currently slower than an idle one of usual speed; at least 1.
fn slowness() -> f64 {
    let begin = Instant::now();
    (0..CLOCK_READINGS).for_each(|_| _ = Instant::now());
    let speed = begin.elapsed().as_secs_f64() / CLOCK_READINGS_TIME.as_secs_f64();
    let processors = std::thread::available_parallelism().map_or(1.0, |count| count.get() as f64);
    (speed.max(1.0) * (load_average() / processors).max(1.0)).min(SLOWNESS_MAX)
}

/// The number of threads that are running or waiting for a processor, averaged over a minute
/// (proc_loadavg(5)).
fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0)
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn a_wait_returns_the_value_that_its_condition_got() {
        let mut polls = 0;
        let value = wait_for("the third poll", || {
            polls += 1;
            (polls == 3).then_some(polls)
        });
        assert_eq!(value, 3);
    }

    #[test]
    #[should_panic(expected = "in vain: it never happens")]
    fn a_wait_in_vain_panics_with_its_condition() {
        poll_within::<()>(Duration::from_millis(1), "it never happens", || None);
    }

    #[test]
    #[should_panic(expected = "no longer holds: it holds")]
    fn a_condition_that_does_not_stay_panics() {
        let mut polls = 0;
        assert_stays("it holds", || {
            polls += 1;
            polls < 3
        });
    }

    #[test]
    #[should_panic(expected = "the message of the body")]
    fn a_body_that_panics_fails_with_its_message() {
        within_limit(|| panic!("the message of the body"));
    }

    #[test]
    fn a_limit_is_never_shortened_and_stretched_by_at_most_ten() {
        assert!((1.0..=SLOWNESS_MAX).contains(&slowness()));
    }
}

//! Waits for what nothing reports, such as states of the kernel, by trying again.

use std::time::{Duration, Instant};

/// Calls `attempt` every `interval` until it succeeds, fails with an error for which `is_temporary` is false, or
/// `until` has passed. Returns the last result.
///
/// # Errors
/// The error of the last attempt.
pub fn retry<T, E>(
    until: Instant,
    interval: Duration,
    mut attempt: impl FnMut() -> Result<T, E>,
    is_temporary: impl Fn(&E) -> bool,
) -> Result<T, E> {
    loop {
        match attempt() {
            Err(error) if is_temporary(&error) && Instant::now() < until => std::thread::sleep(interval),
            result => return result,
        }
    }
}

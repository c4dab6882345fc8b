//! Threads that do I/O at the same time.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::Result;
use crate::measurement::Stopwatch;

/// Runs `job` on a thread for each of `inputs`. All begin together; the stopwatch is started directly before. Fails
/// if a job fails or panics.
pub fn together<I: Send, T: Send>(
    inputs: impl IntoIterator<Item = I>,
    job: impl Fn(I) -> Result<T> + Sync,
) -> Result<(Stopwatch, Vec<T>)> {
    let (stopwatch, (), results) = during(inputs, Ok, |input, _| job(input), || ())?;
    Ok((stopwatch, results))
}

/// Like [`together`], but each thread prepares its job first, and the jobs receive a flag that is set when `action`,
/// which runs on this thread meanwhile, returns.
pub fn during<I: Send, P, T: Send, A>(
    inputs: impl IntoIterator<Item = I>,
    prepare: impl Fn(I) -> Result<P> + Sync,
    job: impl Fn(P, &AtomicBool) -> Result<T> + Sync,
    action: impl FnOnce() -> A,
) -> Result<(Stopwatch, A, Vec<T>)> {
    let inputs: Vec<I> = inputs.into_iter().collect();
    let (start, over) = (&Barrier::new(inputs.len() + 1), &AtomicBool::new(false));
    let (prepare, job) = (&prepare, &job);
    std::thread::scope(|scope| {
        let threads: Vec<_> = inputs
            .into_iter()
            .map(|input| {
                scope.spawn(move || {
                    let prepared = prepare(input);
                    // The other threads wait for this thread, even if it failed.
                    start.wait();
                    start.wait();
                    job(prepared?, over)
                })
            })
            .collect();
        // All threads are ready, and none begins its job before this thread reaches the barrier again.
        start.wait();
        let stopwatch = Stopwatch::start();
        start.wait();
        let done = action();
        over.store(true, Relaxed);
        let joined = threads.into_iter().map(|thread| thread.join());
        let results: Vec<Result<T>> = joined
            .map(|result| result.unwrap_or_else(|_| Err("a measuring thread panicked".into())))
            .collect();
        Ok((stopwatch, done, results.into_iter().collect::<Result<_>>()?))
    })
}

//! Runs the models of lock-free code under loom or shuttle.

// The counter of runs is not part of a model.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

/// Multiplies the number of schedules of shuttle. The search of loom grows with LOOM_MAX_PREEMPTIONS instead.
#[cfg(shuttle)]
const FACTOR_VARIABLE: &str = "BLKQ_MODEL_FACTOR";

/// Runs `body` under loom in every order with at most two preemptions, which are enough for most defects; or
/// under shuttle in `schedules` random orders, multiplied by BLKQ_MODEL_FACTOR. Prints the number of runs.
pub fn model(name: &str, schedules: usize, body: impl Fn() + Send + Sync + 'static) {
    model_within(2, name, schedules, body);
}

/// Runs `body` as [`model`] does, but under loom with at most `switches` preemptions, or LOOM_MAX_PREEMPTIONS
/// if set.
pub fn model_within(switches: usize, name: &str, schedules: usize, body: impl Fn() + Send + Sync + 'static) {
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = {
        let runs = runs.clone();
        move || {
            runs.fetch_add(1, Relaxed);
            body();
        }
    };
    let begin = Instant::now();
    #[cfg(loom)]
    {
        let _ = schedules;
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.or(Some(switches));
        builder.max_branches = 10_000;
        builder.check(counted);
    }
    #[cfg(shuttle)]
    {
        let _ = switches;
        use shuttle::scheduler::{PctScheduler, RandomScheduler};
        let factor = std::env::var(FACTOR_VARIABLE).ok().and_then(|factor| factor.parse().ok()).unwrap_or(1);
        let half = (schedules * factor).div_ceil(2);
        let counted = Arc::new(counted);
        let (random, rare) = (counted.clone(), counted);
        let mut config = shuttle::Config::new();
        config.stack_size = 256 << 10;
        // The first scheduler switches everywhere. The second switches rarely, at places that random
        // schedules seldom reach.
        shuttle::Runner::new(RandomScheduler::new(half), config.clone()).run(move || random());
        shuttle::Runner::new(PctScheduler::new(3, half), config).run(move || rare());
    }
    let runs = runs.load(Relaxed);
    println!("{name}: {runs} schedules in {:.1} s", begin.elapsed().as_secs_f64());
}

//! Interleaved runs, their medians, and the table of them.

use std::time::{Duration, Instant};

use crate::Result;

/// What one run did.
#[derive(Clone, Copy)]
pub struct Run {
    /// 4 KiB I/Os, or what counts as one.
    pub ios: u64,
    /// Time that it took.
    pub elapsed: Duration,
    /// Processor time of this process, user and system.
    pub cpu: Duration,
    /// System calls of the ring.
    pub enters: u64,
    /// Submissions to the ring.
    pub submissions: u64,
    /// Readings of the clock.
    pub clock_reads: u64,
}

impl Run {
    fn iops(&self) -> f64 {
        self.ios as f64 / self.elapsed.as_secs_f64()
    }

    fn cpu_ns(&self) -> f64 {
        self.cpu.as_nanos() as f64 / self.ios as f64
    }
}

/// Processor time of this process so far.
pub fn cpu_time() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is ours to be written; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Runs `turn`, which does some I/Os and tells how many, until `seconds` have passed.
pub fn timed(seconds: f64, mut turn: impl FnMut() -> Result<u64>) -> Result<Run> {
    let (begin, cpu) = (Instant::now(), cpu_time());
    let mut ios = 0;
    while begin.elapsed().as_secs_f64() < seconds {
        ios += turn()?;
    }
    let (elapsed, cpu) = (begin.elapsed(), cpu_time() - cpu);
    Ok(Run { ios, elapsed, cpu, enters: 0, submissions: 0, clock_reads: 0 })
}

/// A row of a table: its name and how to run it once.
pub type Row<'a> = (String, Box<dyn FnMut() -> Result<Run> + 'a>);

fn median(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let spread = (values[values.len() - 1] - values[0]) / values[values.len() / 2];
    (values[values.len() / 2], spread)
}

/// Runs every row `rounds` times, one after the other (A B C A B C ...), and prints the
/// medians; ratios are to the first row.
pub fn compare(title: &str, rows: &mut [Row<'_>], rounds: usize) -> Result<()> {
    let mut runs: Vec<Vec<Run>> = rows.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for (index, (name, row)) in rows.iter_mut().enumerate() {
            eprint!("\r{title}: round {} of {rounds}, {name:<40}", round + 1);
            runs[index].push(row()?);
        }
    }
    eprintln!();
    println!(
        "{title:<44} {:>12} {:>7} {:>7} {:>10} {:>7} {:>8} {:>8} {:>8}",
        "IOPS", "spread", "ratio", "cpu ns/IO", "ratio", "enter/IO", "sqe/IO", "clock/IO"
    );
    let mut first = None;
    for ((name, _), runs) in rows.iter().zip(&runs) {
        let (iops, spread) = median(runs.iter().map(Run::iops).collect());
        let (cpu, _) = median(runs.iter().map(Run::cpu_ns).collect());
        let (first_iops, first_cpu) = *first.get_or_insert((iops, cpu));
        let sum = |f: fn(&Run) -> u64| runs.iter().map(f).sum::<u64>() as f64;
        let ios = sum(|run| run.ios);
        println!(
            "  {name:<42} {iops:>12.0} {:>6.0}% {:>7.3} {cpu:>10.1} {:>7.3} {:>8.4} {:>8.4} {:>8.4}",
            spread * 100.0,
            iops / first_iops,
            cpu / first_cpu,
            sum(|run| run.enters) / ios,
            sum(|run| run.submissions) / ios,
            sum(|run| run.clock_reads) / ios,
        );
    }
    Ok(())
}

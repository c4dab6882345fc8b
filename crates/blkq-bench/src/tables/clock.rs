//! Table `clock`: the clock cached in the plug, compared with a clock read per time stamp.

use std::sync::Arc;

use blkq::clock::CLOCK_USES_MAX;
use blkq::drivers::null::{Null, NullOptions};
use blkq::{ClockMode, Disk};

use crate::bench::{Bench, Pace, case};
use crate::load::{Load, Pattern, local};
use crate::measurement::Run;
use crate::metric::Metric;
use crate::result::{Expected, Published, PublishedRow, Table};
use crate::{Result, What};

const BATCHES: [usize; 3] = [1, 8, 32];

pub fn planned_seconds(pace: &Pace) -> f64 {
    pace.cost(3 * BATCHES.len())
}

/// A null device that completes immediately: a run measures nothing but the block layer.
pub fn null_disk(clock: ClockMode, iostats: bool) -> Result<Arc<Disk>> {
    let mut options = NullOptions::new(1 << 40);
    options.zero_reads = false;
    Ok(Disk::builder(Box::new(Null::new(options)?)).clock(clock).iostats(iostats).build()?)
}

pub fn run(bench: &mut Bench) -> Result<Table> {
    let mut table = Table::new(What::Clock, "cached clock: one clock reading per plug and completion batch");
    table.published = Some(Published {
        origin: "current time cached in the plug, Jens Axboe, 2024".into(),
        setting: "512 B random reads, 24 drives, one polling thread each, iostats on".into(),
        unit: "M IOPS".into(),
        rows: vec![
            PublishedRow { name: "all threads".into(), base: 108.36, feature: 118.71 },
            PublishedRow { name: "one thread".into(), base: 4.52, feature: 4.95 },
        ],
    });
    for batch in BATCHES {
        let load = Load::read(Pattern::Random, batch).batch(batch);
        let on = |clock, iostats| {
            move |length| -> Result<Run> {
                // A new disk for each run, because the statistics record the maximum age since the disk was built.
                let disk = null_disk(clock, iostats)?;
                let run = local::run(&disk, &load, length)?;
                Ok(run.with(Metric::ClockAgeMaxUs, disk.stats().clock_age_max_ns as f64 / 1e3))
            }
        };
        let cases = vec![
            case("precise", on(ClockMode::Precise, true)),
            case("cached", on(ClockMode::Cached, true)),
            case("iostats off", on(ClockMode::Cached, false)),
        ];
        let mut comparison = bench.compare(&format!("null, 4 KiB random read, batches of {batch}"), cases)?;
        let published = (batch == 32).then_some(118.71 / 108.36);
        let ratio = comparison.effect("cached clock", "precise", "cached", Metric::Iops, published).ratio;
        comparison.effect("iostats", "cached", "iostats off", Metric::Iops, None);
        comparison.effect("cached clock", "precise", "cached", Metric::NsPerIo, published.map(|r| 1.0 / r));
        let reads = |name| comparison.case(name).median(Metric::ClockReadsPerIo);
        if batch == 32 {
            table.target("IOPS, cached / precise, batches of 32", ratio, Expected::AtLeast(1.3));
            table.mechanism("cached: clock readings per I/O", reads("cached"), Expected::AtMost(2.5 / 32.0));
        }
        table.mechanism(
            format!("precise: clock readings per I/O, batches of {batch}"),
            reads("precise"),
            Expected::AtLeast(2.0),
        );
        table.mechanism(
            format!("iostats off: clock readings per I/O, batches of {batch}"),
            reads("iostats off"),
            Expected::Exactly(0.0),
        );
        table.mechanism(
            format!("precise: oldest reading used, us, batches of {batch}"),
            comparison.case("precise").max(Metric::ClockAgeMaxUs),
            Expected::Exactly(0.0),
        );
        table.comparisons.push(comparison);
    }
    table.notes = notes();
    Ok(table)
}

fn notes() -> Vec<String> {
    [
        "a cached clock gains nothing with batches of 1: in both modes, the clock is read once at submission and once \
         at completion"
            .into(),
        format!(
            "age max is the longest time between a cached reading and the next one, an upper bound for the error of a \
             time stamp. Readings before the thread sleeps or the queue is idle are not counted. A \
             cached reading is dropped when the plug is flushed, after each batch of completions and after \
             {CLOCK_USES_MAX} uses, but not when the thread is preempted: an age of milliseconds means that other \
             threads ran meanwhile"
        ),
        "without iostats the clock is not read in either mode, so one case represents both".into(),
    ]
    .into()
}

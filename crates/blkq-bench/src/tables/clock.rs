//! Table `clock`: the clock cached in the plug, compared with a clock read per time stamp.

use blkq::clock::CLOCK_USES_MAX;
use blkq::{ClockMode, Disk};

use super::{notes, null};
use crate::bench::{Bench, case};
use crate::load::{Load, local};
use crate::measurement::Run;
use crate::metric::Metric;
use crate::result::Expected::{AtLeast, AtMost, Exactly};
use crate::result::Table;
use crate::{Result, What};

const BATCHES: [usize; 3] = [1, 8, 32];
/// Published M IOPS.
const PUBLISHED: [(&str, f64, f64); 2] = [("all threads", 108.36, 118.71), ("one thread", 4.52, 4.95)];

pub fn run(bench: &mut Bench) -> Result<Table> {
    let mut table = Table::new(What::Clock, "cached clock: one clock reading per plug and completion batch");
    let setting = "512 B random reads, 24 drives, one polling thread each, iostats on";
    table.publish(["current time cached in the plug, Jens Axboe, 2024", setting, "M IOPS"], PUBLISHED);
    for batch in BATCHES {
        let load = Load { batch, ..Load::new("randread", batch) };
        let on = |clock, iostats| {
            move |length| -> Result<Run> {
                // A new disk for each run, because the statistics record the maximum age since the disk was built.
                let disk = Disk::builder(null(1 << 40)?).clock(clock).iostats(iostats).build()?;
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
        let reads = |name| comparison.median(name, Metric::ClockReadsPerIo);
        if batch == 32 {
            table.target("IOPS, cached / precise, batches of 32", ratio, AtLeast(1.3));
            table.mechanism("cached: clock readings per I/O", reads("cached"), AtMost(2.5 / 32.0));
        }
        let oldest_us = comparison.case("precise").figure(Metric::ClockAgeMaxUs).max;
        for (claim, value, expected) in [
            ("precise: clock readings per I/O", reads("precise"), AtLeast(2.0)),
            ("iostats off: clock readings per I/O", reads("iostats off"), Exactly(0.0)),
            ("precise: oldest reading used, us", oldest_us, Exactly(0.0)),
        ] {
            table.mechanism(format!("{claim}, batches of {batch}"), value, expected);
        }
        table.comparisons.push(comparison);
    }
    table.notes = notes(&format!(include_str!("notes/clock.txt"), uses = CLOCK_USES_MAX));
    Ok(table)
}

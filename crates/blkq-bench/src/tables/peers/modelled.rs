//! The cost of serving apart from any real disk, whose bursts hide it: a device that does a fixed number
//! of requests at a time, each in the same time, used in this process, and served.

use std::num::NonZeroU64;
use std::time::Duration;

use blkq::Disk;
use blkq_drivers::{DriverOptions, DriverSpec};
use rustix::thread::set_current_timer_slack;

use super::fio::Job;
use super::peer::{Peer, Place};
use super::vhost;
use crate::Result;
use crate::bench::{Bench, Pace, case};
use crate::load::local;
use crate::measurement::Run;
use crate::metric::Metric;
use crate::result::{Comparison, Expected, Table};

/// Requests that the device does at a time: its tags. With [`FAULT`] it does 100,000 a second.
const DEPTH: u16 = 32;
/// The time of each. [`NBD`] and [`VHOST`] have both among their options.
const FAULT: &str = "delay=320us";

const IN_PROCESS: &str = "in process";
const NBD: Peer = Peer::of_blkq(
    "blkq nbd",
    "blkq attach null:{bytes} --name disk --foreground --depth 32 --fault delay=320us --export nbd \
     --listen unix:{socket}",
);
const VHOST: vhost::Server = vhost::Server::of_blkq(
    "blkq vhost-user",
    "blkq attach null:{bytes} --name disk --foreground --depth 32 --fault delay=320us --export \
     vhost-user-blk",
);
const CASES: usize = 3;

/// About how long its runs take.
pub fn planned_seconds(pace: &Pace) -> f64 {
    pace.cost(CASES)
}

/// Measures it with `job`, and states its targets.
///
/// # Errors
/// If a server does not start.
pub fn run(bench: &mut Bench, pace: Pace, place: &Place, job: &Job, table: &mut Table) -> Result<Comparison> {
    let cases = vec![
        case(IN_PROCESS, |length| in_process(place, length)),
        case(NBD.name, |length| NBD.visit(place, job, length)),
        case(VHOST.name, |length| VHOST.visit(place, &vhost::RANDOM.load(), length)),
    ];
    let title = format!("a device of {DEPTH} x 320 us, {}", job.title);
    let mut comparison = bench.compare_at(pace, &title, cases)?;
    for name in [NBD.name, VHOST.name] {
        let effect =
            comparison.effect(format!("{name} by {IN_PROCESS}"), IN_PROCESS, name, Metric::Iops, None);
        let ratio = effect.ratio;
        table.target(format!("{title}: {name} by {IN_PROCESS}"), ratio, Expected::AtLeast(0.95));
    }
    Ok(comparison)
}

/// The same load on a queue that the measuring thread owns.
fn in_process(place: &Place, length: Duration) -> Result<Run> {
    let options = DriverOptions { fault: Some(FAULT.parse()?), ..DriverOptions::default() };
    let driver = blkq_drivers::open(&DriverSpec::Null(place.bytes()), &options)?.driver;
    let disk = Disk::builder_shared(driver).depth(DEPTH).build()?;
    let load = vhost::RANDOM.load();
    // It sleeps until the next completion, where an engine waits in its ring, whose timers have no slack.
    set_current_timer_slack(NonZeroU64::new(1))?;
    let run = local::run(&disk, &load, length);
    set_current_timer_slack(None)?;
    let run = run?;
    let value = |metric| run.values.iter().find(|(of, _)| *of == metric).map_or(0.0, |(_, value)| *value);
    Ok(Run { ios: run.ios, values: Vec::new() }
        .with(Metric::Iops, value(Metric::Iops))
        .with(Metric::LatencyMeanUs, value(Metric::NsPerIo) * load.depth as f64 / 1e3)
        .with(Metric::ClientCpuNsPerIo, value(Metric::CpuNsPerIo))
        .with(Metric::ClientSwitchesPerIo, value(Metric::ContextSwitchesPerIo)))
}

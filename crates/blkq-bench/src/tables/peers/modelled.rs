//! The cost of serving, without a real disk, whose bursts of completions would hide it: a device that does a fixed number
//! of requests at a time, each in the same time, used in process and over its exports.

use std::num::NonZeroU64;
use std::time::Duration;

use blkq::Disk;
use blkq_drivers::{DriverOptions, DriverSpec};
use rustix::thread::set_current_timer_slack;

use super::peer::{Peer, Place, Way};
use super::{RANDOM, vhost};
use crate::Result;
use crate::bench::{Bench, case};
use crate::load::local;
use crate::load::vhost::IS_POSSIBLE;
use crate::measurement::Run;
use crate::metric::Metric;
use crate::result::{Comparison, Expected::AtLeast, Table};

/// Tags of the device: requests that it does at a time. Together with [`FAULT`], that is 100,000 IOPS.
const DEPTH: u16 = 32;
/// The time of each request. The command lines of [`NBD`] and [`VHOST`] contain this and [`DEPTH`].
const FAULT: &str = "delay=320us";

const IN_PROCESS: &str = "in process";
const NBD: Peer = Peer::nbd(
    "blkq nbd",
    "blkq null:{bytes} --depth 32 --fault delay=320us --export nbd --listen unix:{socket}",
);
const VHOST: Peer = Peer::new(
    "blkq vhost-user",
    Way::Vhost { queues: 1 },
    "blkq null:{bytes} --depth 32 --fault delay=320us --export vhost-user-blk",
);

/// Measures 4 KiB random reads at depth 64 in this process, over NBD and over vhost-user-blk, and adds the targets to
/// `table`.
pub fn run(bench: &mut Bench, place: &Place, table: &mut Table) -> Result<Comparison> {
    let mut cases = vec![
        case(IN_PROCESS, |length| in_process(place, length)),
        case(NBD.name, |length| NBD.visit(place, &RANDOM, length)),
    ];
    if IS_POSSIBLE {
        cases.push(case(VHOST.name, |length| VHOST.visit(place, &vhost::RANDOM, length)));
    }
    let title = format!("a device that does {DEPTH} requests at a time, in 320 us each, {}", RANDOM.title);
    let mut comparison = bench.compare(&title, cases)?;
    let exports = if IS_POSSIBLE { &[NBD.name, VHOST.name][..] } else { &[NBD.name] };
    for name in exports {
        let title_of_effect = format!("{name} relative to {IN_PROCESS}");
        let ratio = comparison.effect(title_of_effect, IN_PROCESS, name, Metric::Iops, None).ratio;
        table.target(format!("{title}: {name} / {IN_PROCESS}"), ratio, AtLeast(0.95));
    }
    Ok(comparison)
}

/// Runs the load on a queue that the measuring thread owns.
fn in_process(place: &Place, length: Duration) -> Result<Run> {
    let options = DriverOptions { fault: Some(FAULT.parse()?), ..DriverOptions::default() };
    let driver = blkq_drivers::open(&DriverSpec::Null(place.bytes), &options)?.driver;
    let disk = Disk::builder_shared(driver).depth(DEPTH).build()?;
    let load = vhost::RANDOM.load();
    // This thread sleeps until the next completion with a timer that has slack by default (50 us). An engine waits in its
    // ring, whose timers have none.
    set_current_timer_slack(NonZeroU64::new(1))?;
    let run = local::run(&disk, &load, length);
    set_current_timer_slack(None)?;
    Ok(run?.of_client(load.depth))
}

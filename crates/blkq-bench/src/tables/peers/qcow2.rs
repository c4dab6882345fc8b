//! blkq and qemu-nbd on the same qcow2 image, and blkq on a raw file with the same data.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::child::Child;
use super::fio::Job;
use super::peer::{BLKQ, Peer, Place, chosen, not_there, visits};
use crate::Result;
use crate::bench::{Bench, Pace, case};
use crate::file::check_room;
use crate::interrupt::Undo;
use crate::metric::Metric;
use crate::result::{Comparison, Expected, Table};

const OURS: Peer = Peer::of_blkq(
    "blkq qcow2",
    "blkq attach {image} --format qcow2 --name disk --foreground --direct-io on --export nbd \
     --listen unix:{socket}",
);
const QEMU_NBD: Peer = Peer::of_package(
    "qemu-nbd qcow2",
    "qemu-utils",
    "qemu-nbd -f qcow2 -t -e 8 --cache=none --aio=io_uring -x disk -k {socket} {image}",
);
/// blkq on the raw file with the same data.
const RAW: Peer = Peer::of_blkq(
    BLKQ,
    "blkq attach {image} --name disk --foreground --direct-io on --export nbd --listen unix:{socket}",
);

const ALLOCATED: [Job; 2] = [
    Job {
        title: "qcow2, 4 KiB random read of allocated clusters, depth 64",
        rw: "randread",
        block_bytes: 4096,
        depth: 64,
        quick: true,
    },
    Job {
        title: "qcow2, 4 KiB random write to allocated clusters, depth 64",
        rw: "randwrite",
        block_bytes: 4096,
        depth: 64,
        quick: false,
    },
];
/// Each write is 64 KiB after the previous one, so it allocates a cluster.
const ALLOCATING: Job = Job {
    title: "qcow2, 4 KiB write to a new cluster each, depth 64",
    rw: "write:60k",
    block_bytes: 4096,
    depth: 64,
    quick: false,
};
/// Virtual size of the empty image: larger than what a run can write.
const EMPTY_BYTES: u64 = 1 << 40;

/// Upper bound for allocating writes per second on any machine.
const ALLOCATING_IOPS_MAX: f64 = 200_000.0;

/// Upper bound for the space that a run of [`ALLOCATING`] takes: 64 KiB for each write.
fn allocated_bytes(pace: &Pace) -> u64 {
    (pace.seconds * ALLOCATING_IOPS_MAX) as u64 * (64 << 10)
}

const QEMU_IMG: &str = "qemu-img";

pub fn planned_seconds(pace: &Pace) -> f64 {
    let allocated = chosen(&ALLOCATED, pace.quick, |job| job.quick).count();
    pace.cost(3 * allocated + if pace.quick { 0 } else { 2 })
}

/// Runs all jobs, and adds the targets to `table`.
pub fn run(bench: &mut Bench, pace: Pace, place: &Place, table: &mut Table) -> Result<Vec<Comparison>> {
    let made = bench.progress.aside(|_| Images::make(place));
    let images = match made {
        Ok(images) => images,
        Err(error) => {
            table.left_out.push(not_there("qcow2", "qemu-utils", &error));
            return Ok(Vec::new());
        }
    };
    let (full, empty) = (place.of(&images.full, place.bytes()), place.of(&images.empty, EMPTY_BYTES));
    let mut comparisons = Vec::new();
    for job in chosen(&ALLOCATED, pace.quick, |job| job.quick) {
        let mut cases = visits(&[&OURS, &QEMU_NBD], &full, *job);
        cases.push(case(BLKQ, |length| RAW.visit(place, job, length)));
        let mut comparison = bench.compare_at(pace, job.title, cases)?;
        add_ratios(&mut comparison, table, QEMU_NBD.name, 1.5);
        add_ratios(&mut comparison, table, BLKQ, 0.9);
        comparisons.push(comparison);
    }
    if pace.quick {
        let titles = ALLOCATED.iter().chain([&ALLOCATING]).filter(|job| !job.quick).map(|job| job.title);
        table.left_out.push(format!("because of --quick: {}", titles.collect::<Vec<_>>().join("; ")));
    } else if let Err(error) = check_room(place.image(), None, allocated_bytes(&pace)) {
        table.left_out.push(format!("{}: {error}", ALLOCATING.title));
    } else {
        let [ours, theirs] = [&OURS, &QEMU_NBD].map(|peer| {
            let (images, empty) = (&images, &empty);
            case(peer.name, move |length| {
                images.recreate_empty()?;
                peer.visit(empty, &ALLOCATING, length)
            })
        });
        let mut comparison = bench.compare_at(pace, ALLOCATING.title, vec![ours, theirs])?;
        add_ratios(&mut comparison, table, QEMU_NBD.name, 1.2);
        comparisons.push(comparison);
    }
    Ok(comparisons)
}

/// Adds the ratios blkq / `base` for IOPS and processor time, and the target that the ratio of the IOPS is at
/// least `wanted`.
fn add_ratios(comparison: &mut Comparison, table: &mut Table, base: &str, wanted: f64) {
    for metric in [Metric::Iops, Metric::ServerCpuNsPerIo] {
        comparison.effect(format!("{} relative to {base}", OURS.name), base, OURS.name, metric, None);
    }
    let iops = comparison.effects.iter().find(|effect| effect.base == base && effect.metric == Metric::Iops);
    if let Some(ratio) = iops.map(|effect| effect.ratio) {
        let title = format!("{}: {}, blkq qcow2 / {base}", comparison.title, Metric::Iops.label());
        table.target(title, ratio, Expected::AtLeast(wanted));
    }
}

/// The qcow2 images, next to the measured file. They are removed on drop.
struct Images {
    /// Contains the data of the measured file.
    full: PathBuf,
    /// Contains no clusters before each run.
    empty: PathBuf,
    _made: Undo,
}

impl Images {
    fn make(place: &Place) -> Result<Images> {
        let beside = |what: &str| {
            let name = format!(".blkq-bench-{}-{what}.qcow2", std::process::id());
            place.image().with_file_name(name)
        };
        let (full, empty) = (beside("full"), beside("empty"));
        let at = [full.clone(), empty.clone()];
        let remove = move || at.iter().for_each(|path| drop(std::fs::remove_file(path)));
        let (_, made) = Undo::after(|| Ok::<_, crate::Error>(()), remove)?;
        let images = Images { full, empty, _made: made };
        qemu_img(
            &["convert", "-t", "none", "-T", "none", "-f", "raw", "-O", "qcow2"],
            &[place.image(), &images.full],
            &[],
        )?;
        Ok(images)
    }

    /// Creates the empty image, replacing the previous one.
    fn recreate_empty(&self) -> Result {
        qemu_img(&["create", "-q", "-f", "qcow2"], &[&self.empty], &[&EMPTY_BYTES.to_string()])
    }
}

fn qemu_img(options: &[&str], paths: &[&Path], size: &[&str]) -> Result {
    let mut command = Command::new(QEMU_IMG);
    command.args(options).args(paths).args(size);
    Child::start(command, Stdio::null())?.wait(super::peer::READY_WAIT * 12).map(drop)
}

//! blkq and qemu-nbd on the same qcow2 image, and blkq on a raw file with the same data.

use std::path::Path;
use std::process::{Command, Stdio};

use super::child::Child;
use super::fio::Job;
use super::peer::{BLKQ, BLKQ_NBD, Peer, Place, READY_WAIT, not_there, relate, visits};
use crate::Result;
use crate::bench::{Bench, case};
use crate::file::check_room;
use crate::interrupt::Undo;
use crate::metric::Metric;
use crate::result::{Comparison, Expected, Expected::AtLeast, Table};

const OURS: Peer =
    Peer::nbd("blkq qcow2", "blkq {image} --format qcow2 --direct-io on --export nbd --listen unix:{socket}");
const QEMU_NBD: Peer = Peer::nbd(
    "qemu-nbd qcow2",
    "qemu-nbd -f qcow2 -t -e 8 --cache=none --aio=io_uring -x disk -k {socket} {image}",
);

const RANDOM: Job =
    Job::new("qcow2, 4 KiB random read of allocated clusters, depth 64", "randread", 4096, 64);
const OVERWRITING: Job =
    Job::new("qcow2, 4 KiB random write to allocated clusters, depth 64", "randwrite", 4096, 64).not_quick();
/// Each write is 64 KiB after the previous one, so it allocates a cluster.
const ALLOCATING: Job =
    Job::new("qcow2, 4 KiB write to a new cluster each, depth 64", "write:60k", 4096, 64).not_quick();
const JOBS: [Job; 3] = [RANDOM, OVERWRITING, ALLOCATING];
/// Virtual size of the empty image: larger than what a run can write.
const EMPTY_BYTES: u64 = 1 << 40;

/// The bounds of IOPS relative to other peers.
const TARGETS: [(&str, &str, Expected); 5] = [
    (RANDOM.title, QEMU_NBD.name, AtLeast(1.5)),
    (RANDOM.title, BLKQ, AtLeast(0.9)),
    (OVERWRITING.title, QEMU_NBD.name, AtLeast(1.5)),
    (OVERWRITING.title, BLKQ, AtLeast(0.9)),
    (ALLOCATING.title, QEMU_NBD.name, AtLeast(1.2)),
];

/// Upper bound for allocating writes per second on any machine.
const ALLOCATING_IOPS_MAX: f64 = 200_000.0;

/// Runs all jobs, and adds the targets to `table`.
pub fn run(bench: &mut Bench, place: &Place, table: &mut Table) -> Result<Vec<Comparison>> {
    let images = match bench.progress.aside(|_| Images::make(place)) {
        Ok(images) => images,
        Err(error) => {
            table.left_out.push(not_there("qcow2", "qemu-utils", &error));
            return Ok(Vec::new());
        }
    };
    let (quick, mut comparisons) = (bench.pace.quick, Vec::new());
    for job in JOBS.iter().filter(|job| job.quick || !quick) {
        let cases = if job.title == ALLOCATING.title {
            // Each write takes 64 KiB.
            let bytes_max = (bench.pace.seconds * ALLOCATING_IOPS_MAX) as u64 * (64 << 10);
            if let Err(error) = check_room(&place.image, None, bytes_max) {
                table.left_out.push(format!("{}: {error}", job.title));
                continue;
            }
            let on_empty = |peer: &'static Peer| {
                let images = &images;
                case(peer.name, move |length| {
                    images.recreate_empty()?;
                    peer.visit(&images.empty, job, length)
                })
            };
            vec![on_empty(&OURS), on_empty(&QEMU_NBD)]
        } else {
            let mut cases = visits(&[&OURS, &QEMU_NBD], &images.full, *job);
            // The raw file contains the same data.
            cases.extend(visits(&[&BLKQ_NBD], place, *job));
            cases
        };
        let mut comparison = bench.compare(job.title, cases)?;
        relate(table, &mut comparison, OURS.name, &[Metric::Iops, Metric::ServerCpuNsPerIo], &TARGETS);
        comparisons.push(comparison);
    }
    if quick {
        let titles = JOBS.iter().filter(|job| !job.quick).map(|job| job.title);
        table.left_out.push(format!("because of --quick: {}", titles.collect::<Vec<_>>().join("; ")));
    }
    Ok(comparisons)
}

/// The qcow2 images, next to the measured file. They are removed on drop.
struct Images {
    /// Contains the data of the measured file.
    full: Place,
    /// Contains no clusters before each run.
    empty: Place,
    _made: Undo,
}

impl Images {
    fn make(place: &Place) -> Result<Images> {
        let beside = |what: &str| {
            place.image.with_file_name(format!(".blkq-bench-{}-{what}.qcow2", std::process::id()))
        };
        let full = place.of(&beside("full"), place.bytes);
        let empty = place.of(&beside("empty"), EMPTY_BYTES);
        let at = [full.image.clone(), empty.image.clone()];
        let remove = move || at.iter().for_each(|path| drop(std::fs::remove_file(path)));
        let (_, made) = Undo::after(|| Ok::<_, crate::Error>(()), remove)?;
        let images = Images { full, empty, _made: made };
        let options = ["convert", "-t", "none", "-T", "none", "-f", "raw", "-O", "qcow2"];
        qemu_img(&options, &[&place.image, &images.full.image], &[])?;
        Ok(images)
    }

    /// Creates the empty image, replacing the previous one.
    fn recreate_empty(&self) -> Result {
        qemu_img(&["create", "-q", "-f", "qcow2"], &[&self.empty.image], &[&EMPTY_BYTES.to_string()])
    }
}

fn qemu_img(options: &[&str], paths: &[&Path], size: &[&str]) -> Result {
    let mut command = Command::new("qemu-img");
    command.args(options).args(paths).args(size);
    Child::start(command, Stdio::null())?.wait(READY_WAIT * 12).map(drop)
}

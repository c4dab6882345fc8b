//! Table `peers`: blkq and other servers, on the same file, with the same client.

use crate::bench::{Bench, Pace, case};
use crate::measurement::mib;
use crate::metric::Metric;
use crate::result::Expected::{AtLeast, AtMost};
use crate::result::{Case, Comparison, Figure, Table};
use crate::{Result, What};

mod child;
mod fio;
mod kernel_loop;
mod modelled;
mod peer;
mod qcow2;
mod vhost;

use fio::Job;
pub use fio::lacks;
use peer::{BLKQ, BLKQ_NBD, BLKQ_NULL, LOOP_DIRECT, Peer, Place, RAW, Way, present, relate, visits};

const RANDOM: Job = Job::new("4 KiB random read, depth 64", "randread", 4096, 64);
const ONE: Job = Job::new("4 KiB random read, depth 1", "randread", 4096, 1);
const SEQUENTIAL: Job = Job::new("4 KiB sequential read, depth 64", "read", 4096, 64);
const JOBS: [Job; 5] = [
    RANDOM,
    ONE,
    SEQUENTIAL,
    Job::new("256 KiB sequential read, depth 8", "read", 256 << 10, 8).not_quick(),
    Job::new("4 KiB random write, depth 64", "randwrite", 4096, 64).not_quick(),
];

const QEMU_NBD: &str = "qemu-nbd";

/// Peers that serve the file, without the page cache if they can.
const OVER_FILE: [Peer; 8] = [
    Peer::new(RAW, Way::Raw, ""),
    Peer::new(LOOP_DIRECT, Way::Loop { direct: true }, ""),
    Peer::new("kernel loop, buffered", Way::Loop { direct: false }, "").not_quick(),
    Peer::nbd(QEMU_NBD, "qemu-nbd -f raw -t -e 8 --cache=none --aio=io_uring -x disk -k {socket} {image}"),
    Peer::nbd(
        "qemu-storage-daemon",
        "qemu-storage-daemon --blockdev \
         driver=file,node-name=disk,filename={image},cache.direct=on,aio=io_uring \
         --nbd-server addr.type=unix,addr.path={socket},max-connections=8 --export \
         type=nbd,id=export,node-name=disk,name=disk,writable=on",
    )
    .not_quick(),
    Peer::nbd("nbdkit file, cache=none", "nbdkit -f -e disk -U {socket} file {image} cache=none").not_quick(),
    BLKQ_NBD,
    Peer::new("blkq ublk", Way::Device, "blkq {image} --direct-io on --export ublk"),
];

/// Peers that serve a null device, which shows the cost of serving.
const OVER_NOTHING: [Peer; 3] = [
    Peer::nbd(
        "qemu-nbd null-co",
        "qemu-nbd -t -e 8 -x disk -k {socket} --image-opts driver=null-co,size={bytes}",
    ),
    Peer::nbd("nbdkit null", "nbdkit -f -e disk -U {socket} null {bytes}").not_quick(),
    Peer::nbd(BLKQ_NULL, "blkq null:{bytes} --export nbd --listen unix:{socket}"),
];

/// Fails if a peer that could be started before fails to start.
pub fn run(bench: &mut Bench) -> Result<Table> {
    let mut table =
        Table::new(What::Peers, "peers: blkq and other servers, the same fio jobs on the same file");
    if let Some(lack) = lacks() {
        table.left_out.push(format!("all cases: {lack}"));
        return Ok(table);
    }
    let quick = bench.pace.quick;
    let (seconds, rounds) = if quick { (0.3, 3) } else { (0.8, 5) };
    bench.pace = Pace { seconds, rounds, quick };
    let (image, bytes) = bench.file();
    let place = Place::new(&image, bytes)?;
    let over_file = present(&OVER_FILE, quick, &place, &RANDOM, &mut table);
    let over_nothing = present(&OVER_NOTHING, quick, &place, &RANDOM, &mut table);
    if quick {
        let peers = OVER_FILE.iter().chain(&OVER_NOTHING).filter(|peer| !peer.quick).map(|peer| peer.name);
        let titles = JOBS.iter().filter(|job| !job.quick).map(|job| job.title);
        let all: Vec<&str> = peers.chain(titles).collect();
        table.left_out.push(format!("because of --quick: {}", all.join("; ")));
    }
    let mut comparisons = Vec::new();
    for job in JOBS.iter().filter(|job| job.quick || !quick) {
        let mut cases = visits(&over_file, &place, *job);
        if job.depth == 1 {
            let null = over_nothing.iter().find(|peer| peer.name == BLKQ_NULL);
            // The latency of a request to a server and back, without a file.
            cases.extend(null.map(|null| case(BLKQ_NULL, |length| null.visit(&place, job, length))));
        }
        comparisons.push(bench.compare(job.title, cases)?);
    }
    let title = format!("null devices, {}", RANDOM.title);
    let null = bench.compare(&title, visits(&over_nothing, &place, RANDOM))?;
    state_targets(&mut table, &mut comparisons, &null);
    comparisons.push(null);
    comparisons.push(modelled::run(bench, &place, &mut table)?);
    comparisons.extend(qcow2::run(bench, &place, &mut table)?);
    comparisons.extend(vhost::run(bench, &place, &mut table)?);
    table.comparisons = vec![memory(&mut comparisons)];
    table.comparisons.splice(0..0, comparisons);
    table.notes.push(
        "server ns/IO of the kernel's loop device is the processor time of the whole machine except fio, because the device \
         has no process"
            .into(),
    );
    Ok(table)
}

/// Adds the effects and targets of blkq relative to the peers that were measured.
fn state_targets(table: &mut Table, comparisons: &mut [Comparison], null: &Comparison) {
    let targets = [
        (RANDOM.title, RAW, AtLeast(0.95)),
        (RANDOM.title, QEMU_NBD, AtLeast(2.0)),
        (RANDOM.title, LOOP_DIRECT, AtLeast(1.0)),
        (SEQUENTIAL.title, RAW, AtLeast(1.5)),
        (ONE.title, QEMU_NBD, AtMost(0.6)),
    ];
    for comparison in comparisons.iter_mut().filter(|comparison| comparison.has(BLKQ)) {
        let is_one = comparison.title == ONE.title;
        let metric = if is_one { Metric::LatencyMeanUs } else { Metric::Iops };
        relate(table, comparison, BLKQ, &[metric], &targets);
        if is_one && comparison.has(BLKQ_NULL) {
            let mean_us = |name: &str| comparison.median(name, Metric::LatencyMeanUs);
            let bound = 1.25 * mean_us(RAW) + mean_us(BLKQ_NULL);
            let title = format!("{}: mean us / (1.25 x {RAW} + round trip)", comparison.title);
            table.target(title, mean_us(BLKQ) / bound, AtMost(1.0));
        }
    }
    if null.has(BLKQ_NULL) {
        let us = null.median(BLKQ_NULL, Metric::ServerCpuNsPerIo) / 1e3;
        table.target("null device, depth 64: server's processor time per I/O, us", us, AtMost(1.5));
    }
    let blkq: Vec<_> = comparisons.iter().filter(|of| of.has(BLKQ)).map(|of| (of, of.case(BLKQ))).collect();
    if blkq.is_empty() {
        return;
    }
    let most = |metric| blkq.iter().map(|(_, case)| case.figure(metric).max).fold(f64::NAN, f64::max);
    let beyond_buffers = blkq.iter().map(|(comparison, case)| {
        let job = JOBS.iter().find(|job| job.title == comparison.title).unwrap_or(&RANDOM);
        case.figure(Metric::ResidentMaxMib).max - mib(job.depth as u64 * u64::from(job.block_bytes))
    });
    table.target("resident memory when idle, MiB", most(Metric::ResidentMib), AtMost(8.0));
    let title = "resident memory under load without buffers in flight, MiB";
    table.target(title, beyond_buffers.fold(f64::NAN, f64::max), AtMost(8.0));
    table.target("cached bytes of the file after the run, MiB", most(Metric::CachedMib), AtMost(0.0));
    let start_ms = blkq.iter().flat_map(|(_, case)| case.figure(Metric::StartMs).samples.clone());
    let start_ms = Figure::new(Metric::StartMs, start_ms.collect()).median;
    table.target("start to ready, ms", start_ms, AtMost(20.0));
}

/// Moves the figures of memory and start-up from the comparisons, which do not affect them, into one
/// comparison.
fn memory(comparisons: &mut [Comparison]) -> Comparison {
    const METRICS: [Metric; 4] =
        [Metric::StartMs, Metric::ResidentMib, Metric::ResidentMaxMib, Metric::CachedMib];
    let mut all: Vec<Case> = Vec::new();
    for case in comparisons.iter_mut().flat_map(|comparison| &mut comparison.cases) {
        for figure in case.figures.extract_if(.., |figure| METRICS.contains(&figure.metric)) {
            let index = all.iter().position(|of| of.name == case.name).unwrap_or_else(|| {
                all.push(Case { name: case.name.clone(), figures: Vec::new() });
                all.len() - 1
            });
            all[index].add(figure.metric, &figure.samples);
        }
    }
    for case in &mut all {
        case.figures.sort_by_key(|figure| METRICS.iter().position(|metric| *metric == figure.metric));
    }
    let (rounds, seconds) = comparisons.first().map_or((0, 0.0), |first| (first.rounds, first.seconds));
    let title = "start-up, memory, page cache: all jobs".to_owned();
    Comparison { title, rounds: rounds * comparisons.len(), seconds, cases: all, effects: Vec::new() }
}

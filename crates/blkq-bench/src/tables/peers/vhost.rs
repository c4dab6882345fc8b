//! vhost-user-blk servers, with the front end in [`crate::load::vhost`] as client, which behaves like a virtual machine.
//! The bases are io_uring on the file and on a loop device, also from this process.

use super::fio::Job;
use super::peer::{LOOP_DIRECT, Peer, Place, RAW, Way, present, relate, visits};
use crate::Result;
use crate::bench::Bench;
use crate::metric::Metric;
use crate::result::Expected::{AtLeast, AtMost};
use crate::result::{Comparison, Table};

const BLKQ: &str = "blkq vhost-user";
const BLKQ_NULL: &str = "blkq vhost-user null";
const BLKQ_NULL_2: &str = "blkq vhost-user null, 2 queues";
const QEMU: &str = "qemu-storage-daemon vhost-user";
const RAW_ONE_BY_ONE: &str = "raw io_uring, one by one";

/// The main workload. Null devices are measured with it too.
pub const RANDOM: Job = Job::new("vhost-user-blk, 4 KiB random read, depth 64", "randread", 4096, 64);
const ONE: Job = Job::new("vhost-user-blk, 4 KiB random read, depth 1", "randread", 4096, 1);
const SEQUENTIAL: Job =
    Job::new("vhost-user-blk, 4 KiB sequential read, depth 64", "read", 4096, 64).not_quick();
const LARGE: Job =
    Job::new("vhost-user-blk, 256 KiB sequential read, depth 8", "read", 256 << 10, 8).not_quick();
const JOBS: [Job; 4] = [RANDOM, ONE, SEQUENTIAL, LARGE];
const NULL_TITLE: &str = "vhost-user-blk, null devices, 4 KiB random read, depth 64";

const ONE_QUEUE: Way = Way::Vhost { queues: 1 };
const TWO_QUEUES: Way = Way::Vhost { queues: 2 };

const OVER_FILE: [Peer; 5] = [
    Peer::new(RAW, Way::Ring { one_by_one: false }, ""),
    Peer::new(RAW_ONE_BY_ONE, Way::Ring { one_by_one: true }, ""),
    Peer::new(LOOP_DIRECT, Way::RingOnLoop, ""),
    Peer::new(
        QEMU,
        ONE_QUEUE,
        "qemu-storage-daemon --blockdev \
         driver=file,node-name=disk,filename={image},cache.direct=on,aio=io_uring --export \
         type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={socket},writable=on",
    ),
    Peer::new(BLKQ, ONE_QUEUE, "blkq {image} --direct-io on --export vhost-user-blk"),
];

const OVER_NOTHING: [Peer; 4] = [
    Peer::new(
        "qemu-storage-daemon vhost-user null-co",
        ONE_QUEUE,
        "qemu-storage-daemon --blockdev driver=null-co,node-name=disk,size={bytes} --export \
         type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={socket},writable=on",
    ),
    Peer::new(
        "qemu-storage-daemon vhost-user null-co, 2 queues",
        TWO_QUEUES,
        "qemu-storage-daemon --blockdev driver=null-co,node-name=disk,size={bytes} --export \
         type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={socket},writable=on,\
         num-queues=2",
    ),
    Peer::new(BLKQ_NULL, ONE_QUEUE, "blkq null:{bytes} --export vhost-user-blk"),
    Peer::new(BLKQ_NULL_2, TWO_QUEUES, "blkq null:{bytes} --queues 2 --export vhost-user-blk"),
];

/// Measures all servers. The comparisons are part of the table `peers`. Fails if a server that could be
/// started before fails to start.
pub fn run(bench: &mut Bench, place: &Place, table: &mut Table) -> Result<Vec<Comparison>> {
    let quick = bench.pace.quick;
    let over_file = present(&OVER_FILE, quick, place, &RANDOM, table);
    let over_nothing = present(&OVER_NOTHING, quick, place, &RANDOM, table);
    let mut comparisons = Vec::new();
    for job in &JOBS {
        if quick && !job.quick {
            table.left_out.push(format!("because of --quick: {}", job.title));
            continue;
        }
        // io_uring with one call per I/O does sequential jobs only, as the base for the gain of merging.
        let does = |peer: &&Peer| peer.name != RAW_ONE_BY_ONE || !job.load().random;
        let peers: Vec<&Peer> = over_file.iter().copied().filter(does).collect();
        let mut comparison = bench.compare(job.title, visits(&peers, place, *job))?;
        state_targets(table, &mut comparison, job);
        comparisons.push(comparison);
    }
    let mut null = bench.compare(NULL_TITLE, visits(&over_nothing, place, RANDOM))?;
    if null.has(BLKQ_NULL) {
        let us = null.median(BLKQ_NULL, Metric::ServerCpuNsPerIo) / 1e3;
        table.target(format!("{NULL_TITLE}: server's processor time per I/O, us"), us, AtMost(0.5));
    }
    if null.has(BLKQ_NULL) && null.has(BLKQ_NULL_2) {
        let name = "two queues relative to one";
        let ratio = null.effect(name, BLKQ_NULL, BLKQ_NULL_2, Metric::Iops, None).ratio;
        table.target(format!("{NULL_TITLE}: {name}"), ratio, AtLeast(1.7));
    }
    comparisons.push(null);
    table.notes.push(
        "vhost-user-blk: the client sleeps on an eventfd, as a virtual machine does; RSS max of a server \
         does not include the client's memory, which the server maps"
            .into(),
    );
    Ok(comparisons)
}

fn state_targets(table: &mut Table, comparison: &mut Comparison, job: &Job) {
    if !comparison.has(BLKQ) {
        return;
    }
    let title = job.title;
    let metric = if title == ONE.title { Metric::LatencyMeanUs } else { Metric::Iops };
    let targets = [
        (RANDOM.title, RAW, AtLeast(0.97)),
        (RANDOM.title, LOOP_DIRECT, AtLeast(1.0)),
        (RANDOM.title, QEMU, AtLeast(1.5)),
        (SEQUENTIAL.title, RAW_ONE_BY_ONE, AtLeast(1.5)),
        (ONE.title, QEMU, AtMost(0.7)),
        (LARGE.title, RAW, AtLeast(0.97)),
    ];
    relate(table, comparison, BLKQ, &[metric], &targets);
    if title == ONE.title {
        let beyond = comparison.median(BLKQ, metric) - comparison.median(RAW, metric);
        table.target(format!("{title}: mean latency, {BLKQ} minus {RAW}, us"), beyond, AtMost(15.0));
    }
    if title == LARGE.title {
        let raw_ns = comparison.median(RAW, Metric::ClientCpuNsPerIo);
        let ratio = comparison.median(BLKQ, Metric::ServerCpuNsPerIo) / raw_ns;
        table.target(format!("{title}: processor time, {BLKQ} / {RAW}"), ratio, AtMost(1.1));
    }
    let resident = comparison.case(BLKQ).figure(Metric::ResidentMaxMib).max;
    table.target(format!("{title}: resident memory without the guest's, MiB"), resident, AtMost(8.0));
}

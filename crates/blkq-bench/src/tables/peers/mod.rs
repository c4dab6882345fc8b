//! Table `peers`: blkq and other servers, on the same file, with the same client.

use crate::bench::{Bench, Pace, case};
use crate::metric::Metric;
use crate::result::{Case, Comparison, Expected, Figure, Table};
use crate::{Result, What};

mod child;
mod fio;
mod kernel_loop;
mod modelled;
mod peer;
mod qcow2;
mod vhost;

use fio::Job;
use peer::{
    BLKQ, BLKQ_NULL, LOOP_DIRECT, OVER_FILE, OVER_NOTHING, Peer, Place, QEMU_NBD, RAW, chosen, visits,
};

const RANDOM: Job =
    Job { title: "4 KiB random read, depth 64", rw: "randread", block_bytes: 4096, depth: 64, quick: true };
const ONE: Job =
    Job { title: "4 KiB random read, depth 1", rw: "randread", block_bytes: 4096, depth: 1, quick: true };
const SEQUENTIAL: Job =
    Job { title: "4 KiB sequential read, depth 64", rw: "read", block_bytes: 4096, depth: 64, quick: true };
const JOBS: [Job; 5] = [
    RANDOM,
    ONE,
    SEQUENTIAL,
    Job {
        title: "256 KiB sequential read, depth 8",
        rw: "read",
        block_bytes: 256 << 10,
        depth: 8,
        quick: false,
    },
    Job {
        title: "4 KiB random write, depth 64",
        rw: "randwrite",
        block_bytes: 4096,
        depth: 64,
        quick: false,
    },
];

/// Additional time of a run in seconds: mostly the start and exit of fio.
const AROUND_SECONDS: f64 = 0.4;

fn pace(pace: &Pace) -> Pace {
    let (seconds, rounds) = if pace.quick { (0.3, 3) } else { (0.8, 5) };
    Pace { seconds, around_seconds: AROUND_SECONDS, rounds, quick: pace.quick }
}

/// Time of a job over the whole file in seconds, for a disk with 1 GB/s.
const WARM_UP_SECONDS: f64 = 1.0;

pub fn planned_seconds(pace: &Pace) -> f64 {
    if fio::lacks().is_some() {
        return 0.0;
    }
    let pace = self::pace(pace);
    let jobs = chosen(&JOBS, pace.quick, |job| job.quick).count();
    let peers = chosen(&OVER_FILE, pace.quick, |peer| peer.quick).filter(|peer| peer.may_be_there()).count();
    let warm_ups = chosen(&JOBS, pace.quick, |job| job.quick).filter(|job| job.warms_up()).count() * peers;
    let nbd = pace.cost(jobs * peers + 1 + chosen(&OVER_NOTHING, pace.quick, |peer| peer.quick).count());
    let warm_up = WARM_UP_SECONDS * (pace.rounds * warm_ups) as f64;
    nbd + warm_up
        + modelled::planned_seconds(&pace)
        + qcow2::planned_seconds(&pace)
        + vhost::planned_seconds(&pace)
}

/// Fails if a peer that could be started before fails to start.
pub fn run(bench: &mut Bench) -> Result<Table> {
    let mut table =
        Table::new(What::Peers, "peers: blkq and other servers, the same fio jobs on the same file");
    if let Some(lack) = fio::lacks() {
        table.left_out.push(format!("all cases: {lack}"));
        return Ok(table);
    }
    let pace = pace(&bench.pace);
    let file = bench.file()?;
    let place = Place::new(file.path(), file.bytes())?;
    let mut there = |peers: &'static [Peer]| -> Vec<&Peer> {
        let lacks = |peer: &&Peer| match peer.lacks(&place) {
            None => true,
            Some(lack) => {
                table.left_out.push(lack);
                false
            }
        };
        chosen(peers, pace.quick, |peer| peer.quick).filter(lacks).collect()
    };
    let (over_file, over_nothing) = (there(&OVER_FILE), there(&OVER_NOTHING));
    if pace.quick {
        let left_out = |peer: &&Peer| !peer.quick;
        let names = OVER_FILE.iter().chain(&OVER_NOTHING).filter(left_out).map(|peer| peer.name.to_owned());
        let titles = JOBS.iter().filter(|job| !job.quick).map(|job| job.title.to_owned());
        let all: Vec<String> = names.chain(titles).collect();
        table.left_out.push(format!("because of --quick: {}", all.join("; ")));
    }
    let mut comparisons = Vec::new();
    for job in chosen(&JOBS, pace.quick, |job| job.quick) {
        let mut cases = visits(&over_file, &place, *job);
        if job.depth == 1 {
            let null = over_nothing.iter().find(|peer| peer.name == BLKQ_NULL);
            // The latency of a request to a server and back, without a file.
            cases.extend(null.map(|null| case(BLKQ_NULL, |length| null.visit(&place, job, length))));
        }
        comparisons.push(bench.compare_at(pace, job.title, cases)?);
    }
    let title = format!("null devices, {}", RANDOM.title);
    let null = bench.compare_at(pace, &title, visits(&over_nothing, &place, RANDOM))?;
    state_targets(&mut table, &mut comparisons, &null);
    comparisons.push(null);
    comparisons.push(modelled::run(bench, pace, &place, &RANDOM, &mut table)?);
    comparisons.extend(qcow2::run(bench, pace, &place, &mut table)?);
    comparisons.extend(vhost::run(bench, pace, &place, &mut table)?);
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
    let has = |comparison: &Comparison, name: &str| comparison.cases.iter().any(|case| case.name == name);
    for comparison in comparisons.iter_mut().filter(|comparison| has(comparison, BLKQ)) {
        let metric = if comparison.title == ONE.title { Metric::LatencyMeanUs } else { Metric::Iops };
        let names: Vec<String> = comparison.cases.iter().map(|case| case.name.clone()).collect();
        for name in names.iter().filter(|name| *name != BLKQ && *name != BLKQ_NULL) {
            comparison.effect(format!("{BLKQ} relative to {name}"), name, BLKQ, metric, None);
        }
        let ratio =
            |name: &str| comparison.effects.iter().find(|effect| effect.base == name).map(|e| e.ratio);
        let wanted: &[(&str, Expected)] = match comparison.title.as_str() {
            title if title == RANDOM.title => &[
                (RAW, Expected::AtLeast(0.95)),
                (QEMU_NBD, Expected::AtLeast(2.0)),
                (LOOP_DIRECT, Expected::AtLeast(1.0)),
            ],
            title if title == SEQUENTIAL.title => &[(RAW, Expected::AtLeast(1.5))],
            title if title == ONE.title => &[(QEMU_NBD, Expected::AtMost(0.6))],
            _ => &[],
        };
        for (name, wanted) in wanted {
            if let Some(ratio) = ratio(name) {
                let title = format!("{}: {}, {BLKQ} / {name}", comparison.title, metric.label());
                table.target(title, ratio, *wanted);
            }
        }
        if comparison.title == ONE.title && has(comparison, BLKQ_NULL) {
            let mean_us = |name: &str| comparison.case(name).median(Metric::LatencyMeanUs);
            let bound = 1.25 * mean_us(RAW) + mean_us(BLKQ_NULL);
            let title = format!("{}: mean us / (1.25 x {RAW} + round trip)", comparison.title);
            table.target(title, mean_us(BLKQ) / bound, Expected::AtMost(1.0));
        }
    }
    if has(null, BLKQ_NULL) {
        let us = null.case(BLKQ_NULL).median(Metric::ServerCpuNsPerIo) / 1e3;
        table.target("null device, depth 64: server's processor time per I/O, us", us, Expected::AtMost(1.5));
    }
    let blkq = || comparisons.iter().filter(|comparison| has(comparison, BLKQ));
    let most = |of: &dyn Fn(&Comparison) -> f64| blkq().map(of).fold(f64::NAN, f64::max);
    if blkq().next().is_none() {
        return;
    }
    let own = |metric| move |comparison: &Comparison| comparison.case(BLKQ).max(metric);
    let beyond_buffers = |comparison: &Comparison| {
        let job = JOBS.iter().find(|job| job.title == comparison.title).unwrap_or(&RANDOM);
        own(Metric::ResidentMaxMib)(comparison) - (job.depth * job.block_bytes) as f64 / f64::from(1 << 20)
    };
    table.target("resident memory when idle, MiB", most(&own(Metric::ResidentMib)), Expected::AtMost(8.0));
    let title = "resident memory under load without buffers in flight, MiB";
    table.target(title, most(&beyond_buffers), Expected::AtMost(8.0));
    table.target(
        "cached bytes of the file after the run, MiB",
        most(&own(Metric::CachedMib)),
        Expected::AtMost(0.0),
    );
    let start_ms: Vec<f64> =
        blkq().flat_map(|comparison| comparison.case(BLKQ).figure(Metric::StartMs).samples.clone()).collect();
    let start_ms = Figure::new(Metric::StartMs, start_ms).median;
    table.target("start to ready, ms", start_ms, Expected::AtMost(20.0));
}

/// Moves the figures of memory and start-up from the comparisons, which do not affect them, into one
/// comparison.
fn memory(comparisons: &mut [Comparison]) -> Comparison {
    const METRICS: [Metric; 4] =
        [Metric::StartMs, Metric::ResidentMib, Metric::ResidentMaxMib, Metric::CachedMib];
    let mut all: Vec<Case> = Vec::new();
    for case in comparisons.iter_mut().flat_map(|comparison| &mut comparison.cases) {
        for figure in case.figures.extract_if(.., |figure| METRICS.contains(&figure.metric)) {
            let of = match all.iter_mut().find(|of| of.name == case.name) {
                Some(of) => of,
                None => {
                    all.push(Case { name: case.name.clone(), figures: Vec::new() });
                    all.last_mut().expect("pushed above")
                }
            };
            match of.figures.iter_mut().find(|of| of.metric == figure.metric) {
                Some(of) => {
                    let samples = of.samples.iter().chain(&figure.samples).copied().collect();
                    *of = Figure::new(figure.metric, samples);
                }
                None => of.figures.push(figure),
            }
        }
    }
    // No server is started for raw I/O on the file.
    all.retain(|case| case.name != RAW);
    for case in &mut all {
        case.figures.sort_by_key(|figure| METRICS.iter().position(|metric| *metric == figure.metric));
    }
    let (rounds, seconds) = comparisons.first().map_or((0, 0.0), |first| (first.rounds, first.seconds));
    let title = "start-up, memory, page cache: all jobs".to_owned();
    Comparison { title, rounds: rounds * comparisons.len(), seconds, cases: all, effects: Vec::new() }
}

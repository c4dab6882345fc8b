//! Measures vhost-user-blk servers with the front end in [`crate::vhost`], which behaves like a virtual machine.
//! The bases are io_uring on the file and on a loop device, also from this process.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::child::{Child, POLL_INTERVAL};
use super::kernel_loop::KernelLoop;
use super::peer::{LOOP_DIRECT, Place, RAW, READY_WAIT, command, not_there};
use crate::Result;
use crate::bench::{Bench, Pace, case};
use crate::cache::{cached_bytes, evict};
use crate::load::vhost::Client;
use crate::load::{Load, Pattern, raw};
use crate::measurement::Run;
use crate::metric::Metric;
use crate::process::{Usage, forget_resident_max, resident_max_bytes};
use crate::result::{Comparison, Expected, Table};

const BLKQ: &str = "blkq vhost-user";
const BLKQ_NULL: &str = "blkq vhost-user null";
const BLKQ_NULL_2: &str = "blkq vhost-user null, 2 queues";
const QEMU: &str = "qemu-storage-daemon vhost-user";
const RAW_ONE_BY_ONE: &str = "raw io_uring, one by one";

/// A workload for all servers.
pub(super) struct Job {
    title: &'static str,
    pattern: Pattern,
    block_bytes: u32,
    depth: usize,
    quick: bool,
}

impl Job {
    pub(super) fn load(&self) -> Load {
        Load { block_bytes: self.block_bytes, ..Load::read(self.pattern, self.depth) }
    }
}

/// The main workload. Null devices are measured with it too.
pub(super) const RANDOM: Job = Job {
    title: "vhost-user-blk, 4 KiB random read, depth 64",
    pattern: Pattern::Random,
    block_bytes: 4096,
    depth: 64,
    quick: true,
};
const ONE: Job = Job {
    title: "vhost-user-blk, 4 KiB random read, depth 1",
    pattern: Pattern::Random,
    block_bytes: 4096,
    depth: 1,
    quick: true,
};
const SEQUENTIAL: Job = Job {
    title: "vhost-user-blk, 4 KiB sequential read, depth 64",
    pattern: Pattern::Sequential,
    block_bytes: 4096,
    depth: 64,
    quick: false,
};
const LARGE: Job = Job {
    title: "vhost-user-blk, 256 KiB sequential read, depth 8",
    pattern: Pattern::Sequential,
    block_bytes: 256 << 10,
    depth: 8,
    quick: false,
};
const JOBS: [Job; 4] = [RANDOM, ONE, SEQUENTIAL, LARGE];
const NULL_TITLE: &str = "vhost-user-blk, null devices, 4 KiB random read, depth 64";

enum Way {
    /// io_uring on the file, with one call for all I/Os that are submitted together, or one call per I/O.
    Raw { one_by_one: bool },
    /// io_uring on the kernel's loop device of the file.
    Loop,
    /// A server: its command line as in [`Peer`](super::peer::Peer), its socket in the temporary directory of the place,
    /// and the number of queues that the front end uses.
    Server { words: &'static str, socket: &'static str, queues: usize },
}

/// A vhost-user-blk server, or one of the bases.
pub(super) struct Server {
    pub name: &'static str,
    package: &'static str,
    way: Way,
}

const OVER_FILE: [Server; 5] = [
    Server { name: RAW, package: "", way: Way::Raw { one_by_one: false } },
    Server { name: RAW_ONE_BY_ONE, package: "", way: Way::Raw { one_by_one: true } },
    Server { name: LOOP_DIRECT, package: "", way: Way::Loop },
    Server {
        name: QEMU,
        package: "qemu-system-common",
        way: Way::Server {
            words: "qemu-storage-daemon --blockdev \
                    driver=file,node-name=disk,filename={image},cache.direct=on,aio=io_uring --export \
                    type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={socket},writable=on",
            socket: "socket",
            queues: 1,
        },
    },
    Server {
        name: BLKQ,
        package: "",
        way: Way::Server {
            words: "blkq attach {image} --name disk --foreground --direct-io on --export vhost-user-blk",
            socket: "state/disk.vhost",
            queues: 1,
        },
    },
];

const OVER_NOTHING: [Server; 4] = [
    Server {
        name: "qemu-storage-daemon vhost-user null-co",
        package: "qemu-system-common",
        way: Way::Server {
            words: "qemu-storage-daemon --blockdev driver=null-co,node-name=disk,size={bytes} --export \
                    type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={socket},writable=on",
            socket: "socket",
            queues: 1,
        },
    },
    Server {
        name: "qemu-storage-daemon vhost-user null-co, 2 queues",
        package: "qemu-system-common",
        way: Way::Server {
            words: "qemu-storage-daemon --blockdev driver=null-co,node-name=disk,size={bytes} --export \
                    type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={socket},writable=on,\
                    num-queues=2",
            socket: "socket",
            queues: 2,
        },
    },
    Server {
        name: BLKQ_NULL,
        package: "",
        way: Way::Server {
            words: "blkq attach null:{bytes} --name disk --foreground --export vhost-user-blk",
            socket: "state/disk.vhost",
            queues: 1,
        },
    },
    Server {
        name: BLKQ_NULL_2,
        package: "",
        way: Way::Server {
            words: "blkq attach null:{bytes} --name disk --foreground --queues 2 --export vhost-user-blk",
            socket: "state/disk.vhost",
            queues: 2,
        },
    },
];

impl Server {
    /// A server of this program with one queue, with its command line.
    pub(super) const fn of_blkq(name: &'static str, words: &'static str) -> Server {
        Server { name, package: "", way: Way::Server { words, socket: "state/disk.vhost", queues: 1 } }
    }

    /// Whether `job` is measured. io_uring with one call per I/O is measured with sequential jobs only, as the base
    /// for the gain of merging.
    fn takes(&self, job: &Job) -> bool {
        !matches!(self.way, Way::Raw { one_by_one: true }) || job.pattern == Pattern::Sequential
    }

    /// The reason why the server cannot be measured on this machine. Starts the server to find out.
    fn lacks(&self, place: &Place) -> Option<String> {
        let error = match self.way {
            Way::Raw { .. } => return None,
            Way::Loop => KernelLoop::attach(place.image(), true).err()?,
            Way::Server { words, socket, queues } => {
                match start(words, &place.file(socket), place, &RANDOM.load(), queues) {
                    Ok((child, client, _)) => {
                        drop(client);
                        child.stop();
                        return None;
                    }
                    Err(error) => error,
                }
            }
        };
        Some(not_there(self.name, self.package, &error))
    }

    /// Starts the server, runs `load` for `length`, and stops the server.
    pub(super) fn visit(&self, place: &Place, load: &Load, length: Duration) -> Result<Run> {
        let image = std::fs::File::open(place.image())?;
        evict(&image)?;
        match self.way {
            Way::Raw { one_by_one } => run_raw(place.image(), &Load { one_by_one, ..*load }, length),
            Way::Loop => run_raw(KernelLoop::attach(place.image(), true)?.path(), load, length),
            Way::Server { words, socket, queues } => {
                let (child, mut client, start_ms) = start(words, &place.file(socket), place, load, queues)?;
                let pid = child.pid();
                forget_resident_max(&pid.to_string())?;
                let before = Usage::of(pid)?;
                let run = client.run(load, length)?;
                let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
                let resident_max = resident_max_bytes(&pid.to_string())?;
                let cpu = Usage::of(pid)?.since(before).cpu;
                // The server maps the client's memory, so its pages count for the server, too.
                let guest = client.memory_bytes() as u64;
                drop(client);
                let switches = child.stop().since(before).context_switches;
                Ok(run
                    .per_io(Metric::ServerCpuNsPerIo, cpu.as_nanos() as u64)
                    .per_io(Metric::ServerSwitchesPerIo, switches)
                    .with(Metric::ResidentMaxMib, mib(resident_max.saturating_sub(guest)))
                    .with(Metric::StartMs, start_ms)
                    .with(Metric::CachedMib, mib(cached_bytes(&image)?)))
            }
        }
    }
}

/// Runs raw io_uring, with the metrics of a client. The mean latency follows from the rate, because `load.depth` I/Os are
/// always in flight.
fn run_raw(path: &Path, load: &Load, length: Duration) -> Result<Run> {
    let run = raw::run(path, true, load, length)?;
    let value = |metric| run.values.iter().find(|(of, _)| *of == metric).map_or(0.0, |(_, value)| *value);
    let mean_us = value(Metric::NsPerIo) * load.depth as f64 / 1e3;
    Ok(Run { ios: run.ios, values: Vec::new() }
        .with(Metric::Iops, value(Metric::Iops))
        .with(Metric::LatencyMeanUs, mean_us)
        .with(Metric::ClientCpuNsPerIo, value(Metric::CpuNsPerIo))
        .with(Metric::ClientSwitchesPerIo, value(Metric::ContextSwitchesPerIo)))
}

/// Starts a server and connects a client. Returns both, and the time in milliseconds.
fn start(
    words: &str,
    socket: &Path,
    place: &Place,
    load: &Load,
    queues: usize,
) -> Result<(Child, Client, f64)> {
    // A server that was killed has not removed its socket.
    let _ = std::fs::remove_file(socket);
    let began = Instant::now();
    let mut child = Child::start(command(words, place)?, Stdio::null())?;
    loop {
        if child.has_exited() {
            return Err(child.exit_message().into());
        }
        // Retries the connection of the client itself: a server may accept only one client, so a trial connection would
        // use it up.
        match Client::connect(socket, load, queues) {
            Ok(client) => return Ok((child, client, began.elapsed().as_secs_f64() * 1e3)),
            Err(error) if error.is::<std::io::Error>() && began.elapsed() < READY_WAIT => {}
            Err(error) => return Err(error),
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

pub fn planned_seconds(pace: &Pace) -> f64 {
    let cases = |job: &Job| OVER_FILE.iter().filter(|server| server.takes(job)).count();
    let jobs = JOBS.iter().filter(|job| job.quick || !pace.quick);
    pace.cost(jobs.map(cases).sum::<usize>() + OVER_NOTHING.len())
}

/// Measures all servers. The comparisons are part of the table `peers`. Fails if a server that could be
/// started before fails to start.
pub fn run(bench: &mut Bench, pace: Pace, place: &Place, table: &mut Table) -> Result<Vec<Comparison>> {
    let mut there = |servers: &'static [Server]| -> Vec<&Server> {
        let lacks = |server: &&Server| match server.lacks(place) {
            None => true,
            Some(lack) => {
                table.left_out.push(lack);
                false
            }
        };
        servers.iter().filter(lacks).collect()
    };
    let (over_file, over_nothing) = (there(&OVER_FILE), there(&OVER_NOTHING));
    let mut comparisons = Vec::new();
    for job in &JOBS {
        if pace.quick && !job.quick {
            table.left_out.push(format!("because of --quick: {}", job.title));
            continue;
        }
        let load = job.load();
        let cases = over_file.iter().filter(|server| server.takes(job));
        let cases = cases.map(|server| {
            let (server, place) = (*server, place);
            case(server.name, move |length| server.visit(place, &load, length))
        });
        comparisons.push(bench.compare_at(pace, job.title, cases.collect())?);
    }
    let load = RANDOM.load();
    let cases = over_nothing.iter().map(|server| {
        let (server, place) = (*server, place);
        case(server.name, move |length| server.visit(place, &load, length))
    });
    comparisons.push(bench.compare_at(pace, NULL_TITLE, cases.collect())?);
    for comparison in &mut comparisons {
        state_targets(table, comparison);
    }
    table.notes.push(
        "vhost-user-blk: the client sleeps on an eventfd, as a virtual machine does; RSS max of a server \
         does not include the client's memory, which the server maps"
            .into(),
    );
    Ok(comparisons)
}

fn state_targets(table: &mut Table, comparison: &mut Comparison) {
    let names: Vec<String> = comparison.cases.iter().map(|case| case.name.clone()).collect();
    let has = |name: &str| names.iter().any(|of| of == name);
    let median = |comparison: &Comparison, name: &str, metric| comparison.case(name).median(metric);
    let title = comparison.title.clone();
    if title == NULL_TITLE {
        if has(BLKQ_NULL) {
            let ns = median(comparison, BLKQ_NULL, Metric::ServerCpuNsPerIo);
            table.target(
                format!("{title}: server's processor time per I/O, us"),
                ns / 1e3,
                Expected::AtMost(0.5),
            );
        }
        if has(BLKQ_NULL) && has(BLKQ_NULL_2) {
            let name = "two queues relative to one";
            let ratio = comparison.effect(name, BLKQ_NULL, BLKQ_NULL_2, Metric::Iops, None).ratio;
            table.target(format!("{title}: {name}"), ratio, Expected::AtLeast(1.7));
        }
        return;
    }
    if !has(BLKQ) {
        return;
    }
    let metric = if title == ONE.title { Metric::LatencyMeanUs } else { Metric::Iops };
    for name in names.iter().filter(|name| *name != BLKQ) {
        comparison.effect(format!("{BLKQ} relative to {name}"), name, BLKQ, metric, None);
    }
    let wanted: &[(&str, Expected)] = match title.as_str() {
        title if title == RANDOM.title => &[
            (RAW, Expected::AtLeast(0.97)),
            (LOOP_DIRECT, Expected::AtLeast(1.0)),
            (QEMU, Expected::AtLeast(1.5)),
        ],
        title if title == SEQUENTIAL.title => &[(RAW_ONE_BY_ONE, Expected::AtLeast(1.5))],
        title if title == ONE.title => &[(QEMU, Expected::AtMost(0.7))],
        _ => &[(RAW, Expected::AtLeast(0.97))],
    };
    for (name, wanted) in wanted {
        if let Some(effect) = comparison.effects.iter().find(|effect| effect.base == *name) {
            table.target(format!("{title}: {}, {BLKQ} / {name}", metric.label()), effect.ratio, *wanted);
        }
    }
    if title == ONE.title {
        let beyond = median(comparison, BLKQ, metric) - median(comparison, RAW, metric);
        table.target(
            format!("{title}: mean latency, {BLKQ} minus {RAW}, us"),
            beyond,
            Expected::AtMost(15.0),
        );
    }
    if title == LARGE.title {
        let server = median(comparison, BLKQ, Metric::ServerCpuNsPerIo);
        let ratio = server / median(comparison, RAW, Metric::ClientCpuNsPerIo);
        table.target(format!("{title}: processor time, {BLKQ} / {RAW}"), ratio, Expected::AtMost(1.1));
    }
    let resident = comparison.case(BLKQ).max(Metric::ResidentMaxMib);
    table.target(
        format!("{title}: resident memory without the guest's, MiB"),
        resident,
        Expected::AtMost(8.0),
    );
}

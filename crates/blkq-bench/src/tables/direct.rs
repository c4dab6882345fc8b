//! Table `direct`: I/O through the page cache, compared with direct asynchronous I/O, below a file system's cache.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blkq::{Disk, EngineThread};
use blkq_drivers::r#loop::{DirectIo, Dispatch, DriverOptions, LoopDevice};

use super::{cold_case, notes};
use crate::bench::Bench;
use crate::client::{File, Layout, PAGE_BYTES};
use crate::load::Load;
use crate::measurement::{Run, mib, together};
use crate::metric::Metric;
use crate::process::{RESIDENT, memory_bytes, worker_switches};
use crate::result::Expected::{AtLeast, AtMost};
use crate::result::Table;
use crate::{Result, What};

/// Published figures: jobs, name, base, feature, and context switches with the feature / without.
type Row = (u64, &'static str, f64, f64, Option<f64>);
const PUBLISHED: [Row; 8] = [
    (16, "randread", 240.0, 242.0, Some(0.84)),
    (16, "read", 8705.0, 9258.0, Some(0.67)),
    (16, "randwrite", 3763.0, 4577.0, None),
    (16, "write", 20_914.0, 21_451.0, None),
    (1, "randread", 109.0, 114.0, Some(0.90)),
    (1, "read", 21_180.0, 21_018.0, Some(0.50)),
    (1, "randwrite", 4192.0, 5404.0, None),
    (1, "write", 22_782.0, 22_670.0, None),
];
/// File size / total cache size of the client, for all jobs together.
const CACHE_SHARE: u64 = 16;
/// File size / the largest part that a run reads at random, or writes.
const READ_SHARE: u64 = 4;
const WRITE_SHARE: u64 = 8;
/// Minimum context switches per write of the kernel's io_uring workers if they do the writes: one wake-up
/// serves up to 32 queued writes.
const WORKER_SWITCHES_MIN: f64 = 0.01;
/// The compared options of the loop driver.
const WAYS: [(&str, DirectIo, Dispatch); 3] = [
    ("serial buffered", DirectIo::Off, Dispatch::Serial),
    ("buffered", DirectIo::Off, Dispatch::Concurrent),
    ("direct", DirectIo::On, Dispatch::Concurrent),
];

struct Job {
    path: PathBuf,
    /// Size of the image. Each job uses a separate file in it.
    bytes: u64,
    jobs: u64,
    load: Load,
}

impl Job {
    fn run(&self, direct_io: DirectIo, dispatch: Dispatch, length: Duration) -> Result<Run> {
        let options = DriverOptions { direct_io, dispatch, ..DriverOptions::new(&self.path) };
        let disk = Disk::builder(Box::new(LoopDevice::open(&options)?)).build()?;
        let _engine = EngineThread::spawn("bench-engine", vec![(disk.clone(), 0)])?;
        let cache_bytes = (self.bytes / CACHE_SHARE / self.jobs) as usize;
        let open = |file| File::open(&disk, Layout { file, files: self.jobs }, cache_bytes);
        let mut files: Vec<File> = (0..self.jobs).map(open).collect();
        let (stopwatch, counts) = together(&mut files, |file| self.one(file, length))?;
        let run = stopwatch.run_of(counts.into_iter().sum())?;
        let resident = mib(memory_bytes(std::process::id() as i32, RESIDENT)?);
        // The workers of a run's engine exit with it, so all of them belong to this run.
        let switches = worker_switches()?;
        Ok(run.per_io(Metric::WorkerSwitchesPerIo, switches).with(Metric::ResidentMib, resident))
    }

    /// Runs one job: one I/O at a time, each page at most once, and a flush at the end of writes.
    fn one(&self, file: &mut File, length: Duration) -> Result<u64> {
        let share = match (self.load.write, self.load.random) {
            (true, _) => WRITE_SHARE,
            (false, true) => READ_SHARE,
            (false, false) => 1,
        };
        let load = Load { ios_max: Some(file.pages / share), ..self.load };
        let mut offsets = load.offsets(file.pages * PAGE_BYTES as u64);
        let mut memory = vec![0x5a; PAGE_BYTES];
        let (began, mut ios) = (Instant::now(), 0);
        while offsets.left > 0 && began.elapsed() < length {
            let page = offsets.next_bytes() / PAGE_BYTES as u64;
            if load.write {
                file.write(page, &memory)?
            } else {
                file.read(page, &mut memory)?
            }
            ios += 1;
        }
        if load.write {
            file.sync()?;
        }
        Ok(ios)
    }
}

pub fn run(bench: &mut Bench) -> Result<Table> {
    let mut table = Table::new(
        What::Direct,
        "direct: direct asynchronous I/O instead of the page cache, under a file system with its own cache",
    );
    let setting = "ext4 on a loop device, file on an HDD, psync, 16 jobs of 400 MB or 1 job of 4000 MB";
    let rows = PUBLISHED.map(|(jobs, name, base, feature, _)| (row_name(jobs, name), base, feature));
    table.publish(["loop with direct I/O and AIO, Ming Lei, 2015", setting, "IOPS"], rows);
    let (path, bytes) = bench.file();
    for row in PUBLISHED {
        compare(bench, &mut table, &path, bytes, row)?;
    }
    let of = |case: &'static str| table.comparisons.iter().map(move |comparison| comparison.case(case));
    let most = of("direct").map(|case| case.figure(Metric::CachedMib).max).fold(0.0, f64::max);
    let least =
        of("buffered").map(|case| case.figure(Metric::CachedKibPerIo).min).fold(f64::INFINITY, f64::min);
    table.mechanism("direct: maximum MiB of the file in the page cache after a run", most, AtMost(1.0));
    table.mechanism("buffered: minimum KiB of the file added to the page cache per I/O", least, AtLeast(3.5));
    let cache_mib = (bytes / CACHE_SHARE) >> 20;
    table.notes =
        notes(&format!(include_str!("notes/direct.txt"), cache_mib = cache_mib, file_mib = bytes >> 20));
    Ok(table)
}

fn row_name(jobs: u64, name: &str) -> String {
    format!("{name}, {jobs} {}", if jobs == 1 { "job" } else { "jobs" })
}

fn compare(bench: &mut Bench, table: &mut Table, path: &Path, bytes: u64, row: Row) -> Result {
    let (jobs, name, base, feature, switches) = row;
    let job = &Job { path: path.to_owned(), bytes, jobs, load: Load::new(name, 1) };
    let ways = WAYS.map(|(way, direct_io, dispatch)| {
        cold_case(path, way, &[Metric::NsPerIo], move |length| job.run(direct_io, dispatch, length))
    });
    let row = row_name(jobs, name);
    let title = format!("a file system's client over loop, cold, 4 KiB {row}");
    let mut comparison = bench.compare(&title, ways.into())?;
    let metrics = [
        (Metric::Iops, Some(feature / base)),
        (Metric::ContextSwitchesPerIo, switches),
        (Metric::CpuNsPerIo, None),
    ];
    comparison.add_effects("direct", "buffered", "direct", metrics);
    if name == "randwrite" {
        // Random writes are the only pattern here that the kernel gives to workers if buffered. A flush always uses one.
        let switches = |way| comparison.median(way, Metric::WorkerSwitchesPerIo);
        let (buffered, direct) = (switches("buffered"), switches("direct"));
        if buffered < WORKER_SWITCHES_MIN {
            table.left_out.push(format!(
                "{row}: context switches of io_uring workers: the file system does buffered writes without workers"
            ));
        } else {
            let claim = format!("{row}: context switches of io_uring workers, direct / buffered");
            table.mechanism(claim, direct / buffered, AtMost(0.2));
        }
    }
    table.comparisons.push(comparison);
    Ok(())
}

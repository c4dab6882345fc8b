//! Through the page cache, against direct and asynchronous, under a file system of its own.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blkq::{Disk, EngineThread};
use blkq_drivers::r#loop::{DirectIo, Dispatch, LoopDevice, LoopOptions};

use crate::bench::{Bench, Pace, case};
use crate::cache::cold;
use crate::client::{File, Layout, PAGE_BYTES};
use crate::load::workers::together;
use crate::load::{Load, Offsets, Pattern};
use crate::measurement::Run;
use crate::metric::Metric;
use crate::process::{resident_bytes, worker_switches};
use crate::result::{Expected, Published, PublishedRow, Table};
use crate::{Result, What};

/// The figures of the origin: jobs, name, base, feature, context switches feature by base.
const PUBLISHED: [(u64, &str, f64, f64, Option<f64>); 8] = [
    (16, "randread", 240.0, 242.0, Some(0.84)),
    (16, "read", 8705.0, 9258.0, Some(0.67)),
    (16, "randwrite", 3763.0, 4577.0, None),
    (16, "write", 20_914.0, 21_451.0, None),
    (1, "randread", 109.0, 114.0, Some(0.90)),
    (1, "read", 21_180.0, 21_018.0, Some(0.50)),
    (1, "randwrite", 4192.0, 5404.0, None),
    (1, "write", 22_782.0, 22_670.0, None),
];
/// The client's cache is this part of the file, for all jobs together.
const CACHE_SHARE: u64 = 16;
/// Largest part of the file that is read at random, and written, in a run.
const READ_SHARE: u64 = 4;
const WRITE_SHARE: u64 = 8;
/// Least context switches of the kernel's workers per write where they do the writing: 32 that wait together
/// are one wake-up.
const WORKER_SWITCHES_MIN: f64 = 0.01;
/// The ways to do I/O on the file.
const WAYS: [(&str, DirectIo, Dispatch); 3] = [
    ("serial buffered", DirectIo::Off, Dispatch::Serial),
    ("buffered", DirectIo::Off, Dispatch::Concurrent),
    ("direct", DirectIo::On, Dispatch::Concurrent),
];

/// About how long its runs take.
pub fn planned_seconds(pace: &Pace) -> f64 {
    pace.cost(WAYS.len() * PUBLISHED.len())
}

/// The operations of the jobs.
struct Job {
    path: PathBuf,
    /// Size of the file, of which each job has a part that is a file to it.
    bytes: u64,
    jobs: u64,
    pattern: Pattern,
    write: bool,
}

impl Job {
    fn run(&self, direct_io: DirectIo, dispatch: Dispatch, length: Duration) -> Result<Run> {
        let options = LoopOptions { direct_io, dispatch, ..LoopOptions::new(&self.path) };
        let disk = Disk::builder(Box::new(LoopDevice::open(&options)?)).build()?;
        let engine = EngineThread::spawn("bench-engine", vec![(disk.clone(), 0)])?;
        let cache_bytes = (self.bytes / CACHE_SHARE / self.jobs) as usize;
        let open = |file| File::open(&disk, Layout { file, files: self.jobs }, cache_bytes);
        let mut files: Vec<File> = (0..self.jobs).map(open).collect();
        let run = together(files.iter_mut().map(|file| || self.one(file, length)).collect())?;
        let resident = resident_bytes("self")? as f64 / f64::from(1 << 20);
        // Of this run alone: its engine's workers exit with it.
        let switches = worker_switches()?;
        drop(files);
        drop(engine);
        Ok(run.per_io(Metric::WorkerSwitchesPerIo, switches).with(Metric::ResidentMib, resident))
    }

    /// One job: one I/O at a time, no page twice, and a flush after the last.
    fn one(&self, file: &mut File, length: Duration) -> Result<u64> {
        let share = match (self.write, self.pattern) {
            (true, _) => WRITE_SHARE,
            (false, Pattern::Random) => READ_SHARE,
            (false, Pattern::Sequential) => 1,
        };
        let load = Load::read(self.pattern, 1).at_most(file.pages() / share);
        let mut offsets: Offsets = load.offsets(file.pages() * PAGE_BYTES as u64);
        let mut memory = vec![0x5a; PAGE_BYTES];
        let (began, mut ios) = (Instant::now(), 0);
        while offsets.left() > 0 && began.elapsed() < length {
            let page = offsets.next_bytes() / PAGE_BYTES as u64;
            if self.write {
                file.write(page, &memory)?
            } else {
                file.read(page, &mut memory)?
            }
            ios += 1;
        }
        if self.write {
            file.sync()?;
        }
        Ok(ios)
    }
}

/// Measures it.
///
/// # Errors
/// If the file cannot be made, used or evicted.
pub fn run(bench: &mut Bench) -> Result<Table> {
    let mut table = Table::new(
        What::Direct,
        "direct: around the page cache, asynchronously, below a file system's own cache",
    );
    table.published = Some(Published {
        origin: "loop with direct I/O and AIO, Ming Lei, 2015".into(),
        setting: "ext4 on a loop device, file on an HDD, psync, 16 jobs of 400 MB or 1 job of 4000 MB".into(),
        unit: "IOPS".into(),
        rows: PUBLISHED
            .map(|(jobs, name, base, feature, _)| PublishedRow { name: row_name(jobs, name), base, feature })
            .into(),
    });
    let (path, bytes) = {
        let file = bench.file()?;
        (file.path().to_owned(), file.bytes())
    };
    if let Err(error) = LoopDevice::open(&LoopOptions { direct_io: DirectIo::On, ..LoopOptions::new(&path) })
    {
        table.left_out.push(format!("direct: {error}"));
        return Ok(table);
    }
    for published in PUBLISHED {
        compare(bench, &mut table, &path, bytes, published)?;
    }
    let of = |case: &'static str| table.comparisons.iter().map(move |comparison| comparison.case(case));
    let most = of("direct").map(|case| case.max(Metric::CachedMib)).fold(0.0, f64::max);
    let least = of("buffered").map(|case| case.min(Metric::CachedKibPerIo)).fold(f64::INFINITY, f64::min);
    table.mechanism(
        "direct: MiB of the file in the page cache after a run, at most",
        most,
        Expected::AtMost(1.0),
    );
    table.mechanism(
        "buffered: KiB of the file in the page cache per I/O, at least",
        least,
        Expected::AtLeast(3.5),
    );
    table.notes = notes(bytes);
    Ok(table)
}

fn row_name(jobs: u64, name: &str) -> String {
    format!("{name}, {jobs} {}", if jobs == 1 { "job" } else { "jobs" })
}

/// One of the published rows.
fn compare(
    bench: &mut Bench,
    table: &mut Table,
    path: &Path,
    bytes: u64,
    (jobs, name, base, feature, switches): (u64, &str, f64, f64, Option<f64>),
) -> Result {
    let pattern = if name.starts_with("rand") { Pattern::Random } else { Pattern::Sequential };
    let job = &Job { path: path.to_owned(), bytes, jobs, pattern, write: name.ends_with("write") };
    let ways = WAYS.map(|(way, direct_io, dispatch)| {
        case(way, move |length| {
            let mut run = cold(path, || job.run(direct_io, dispatch, length))?;
            run.values.retain(|(metric, _)| *metric != Metric::NsPerIo);
            Ok(run)
        })
    });
    let title = format!("a file system's client over loop, cold, 4 KiB {}", row_name(jobs, name));
    let mut comparison = bench.compare(&title, ways.into())?;
    comparison.effect("direct", "buffered", "direct", Metric::Iops, Some(feature / base));
    comparison.effect("direct", "buffered", "direct", Metric::ContextSwitchesPerIo, switches);
    comparison.effect("direct", "buffered", "direct", Metric::CpuNsPerIo, None);
    if name == "randwrite" {
        // The one pattern in which the kernel has a worker do what is buffered. A flush has one in any case.
        let switches = |way| comparison.case(way).median(Metric::WorkerSwitchesPerIo);
        if switches("buffered") < WORKER_SWITCHES_MIN {
            let message =
                "context switches of the kernel's workers: the file system takes buffered writes without one";
            table.left_out.push(format!("{}: {message}", row_name(jobs, name)));
        } else {
            table.mechanism(
                format!(
                    "{}: context switches of the kernel's workers, direct by buffered",
                    row_name(jobs, name)
                ),
                switches("direct") / switches("buffered"),
                Expected::AtMost(0.2),
            );
        }
    }
    table.comparisons.push(comparison);
    Ok(())
}

fn notes(bytes: u64) -> Vec<String> {
    vec![
        format!(
            "the client does what a file system on a loop device does, in this process: files in extents of 1 MiB, a \
             page cache of {} MiB for all jobs (the file has {} MiB), read-ahead of up to 128 KiB, write-back of \
             dirty pages in the order of the file; it is the same in all cases",
            (bytes / CACHE_SHARE) >> 20,
            bytes >> 20
        ),
        "each job has a file of its own and one blocking I/O at a time, as psync has; no page is used twice in a run, \
         as with fio's random map; writes are counted when a last flush, which is timed, has made them durable"
            .into(),
        "the main pair is buffered (concurrent dispatch) against direct; the base of the origin did one buffered \
         request at a time, which is serial buffered; the file here is on a solid disk, not on an HDD"
            .into(),
        "buffered writes are done by a worker of the kernel's, which is woken for them: direct ones need none, which \
         is where context switches go down; a read waits for its data either way"
            .into(),
        "at the origin context switches fell by 16 % (randread) and 33 % (read) with 16 jobs, by 10 % and 50 % with \
         one; about 10 % of the memory was used after the four tests, against more than 55 %"
            .into(),
        "RSS is that of this process: caches of the client and buffers; what a buffered loop device keeps besides is \
         cached MiB; processor time of the kernel's own write-back threads is not counted"
            .into(),
    ]
}

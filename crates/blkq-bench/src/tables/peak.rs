//! Table `peak`: maximum IOPS on one core and on several, of the block layer alone (null, ram), and of the loop
//! driver compared with raw io_uring.

use blkq::Disk;
use blkq::disk::QUEUES_MAX;
use blkq::drivers::ram::Ram;

use super::{direct_reader, null};
use crate::bench::{Bench, CaseRun, Pace, case};
use crate::load::{Load, local, raw};
use crate::measurement::{Run, together};
use crate::metric::Metric;
use crate::result::Expected::{AtLeast, AtMost};
use crate::result::{Curve, Table};
use crate::{Result, What};

/// Size of the ram device: larger than the caches of the processor.
const RAM_BYTES: u64 = 256 << 20;

const NULL: &str = "null";
const RAM: &str = "ram";
const NOP: &str = "io_uring NOP";
const LOOP: &str = "loop";
const RAW: &str = "raw io_uring";

/// 1, 2, 3, 4, 6, 8, ...: powers of two and 1.5 times those, up to twice the number of processors.
fn threads() -> Vec<usize> {
    let processors = std::thread::available_parallelism().map_or(1, Into::into);
    let most = (2 * processors).min(QUEUES_MAX);
    let powers = (0..).map(|power| 1usize << power).flat_map(|count| [count, count + count / 2]);
    let mut counts: Vec<usize> = powers.take_while(|count| *count <= most).chain([most]).collect();
    counts.dedup();
    counts
}

pub fn run(bench: &mut Bench) -> Result<Table> {
    let mut table = Table::new(What::Peak, "peak: I/Os per second in process, compared with raw io_uring");
    without_file(bench, &mut table)?;
    over_file(bench, &mut table)?;
    Ok(table)
}

fn without_file(bench: &mut Bench, table: &mut Table) -> Result {
    let null_disk = &Disk::builder(null(1 << 40)?).build()?;
    let ram = &Disk::builder(Box::new(Ram::new(RAM_BYTES, 4096, false)?)).build()?;
    let line = |name, batch: usize| -> CaseRun<'_> {
        let load = Load { batch, ..Load::new("randread", batch) };
        match name {
            NULL => Box::new(move |length| local::run(null_disk, &load, length)),
            RAM => Box::new(move |length| local::run(ram, &load, length)),
            _ => Box::new(move |length| raw::run_nops(batch, length)),
        }
    };
    let names = [NULL, RAM, NOP];
    let cases = names.map(|name| (name.to_owned(), line(name, 32)));
    let mut comparison = bench.compare("no file, 4 KiB random read, batches of 32", cases.into())?;
    comparison.effect("null relative to io_uring NOP", NOP, NULL, Metric::Iops, None);
    let rate = comparison.median(NULL, Metric::Iops) / 1e6;
    table.comparisons.push(comparison);
    let what = "null, one core, batches of 32, iostats on, M IOPS";
    table.target(what, rate, AtLeast(50.0));
    table.target(format!("{what}: twice the 14 M IOPS of SPDK's null device"), rate, AtLeast(28.0));

    let points: &[usize] = if bench.pace.quick { &[1, 8, 64] } else { &[1, 2, 4, 8, 16, 32, 64] };
    table.curves.extend(curves(bench, "no file, one core", "batch", &names, points, line)?);

    let counts = threads();
    let load = Load { batch: 32, ..Load::new("randread", 32) };
    let line = |name, count| -> CaseRun<'_> {
        Box::new(move |length| {
            if name == NOP {
                return on_threads(count, |_| raw::run_nops(32, length));
            }
            let disk = Disk::builder(null(1 << 40)?).queues(count).build()?;
            on_threads(count, |index| {
                let bytes = disk.limits().capacity_bytes;
                local::on(&mut disk.open_queue(index)?, &load, bytes, length)
            })
        })
    };
    let plot = "no file, one queue per thread, batches of 32";
    table.curves.extend(curves(bench, plot, "threads", &[NULL, NOP], &counts, line)?);
    Ok(())
}

fn over_file(bench: &mut Bench, table: &mut Table) -> Result {
    let (path, _) = bench.file();
    let disk = Disk::builder(direct_reader(&path)?).build()?;
    let raw = |name: &'static str, load: Load| {
        let path = &path;
        case(name, move |length| raw::run(path, true, &load, length))
    };
    let own = |name: &'static str, load: Load| {
        let disk = &disk;
        case(name, move |length| local::run(disk, &load, length))
    };

    let random = |depth| Load { registered: true, ..Load::new("randread", depth) };
    let one_by_one = |load| Load { one_by_one: true, ..load };
    let at_once = random(64);
    let ways = [
        ("one by one", "raw, one by one", "loop, one by one", one_by_one(at_once)),
        ("together", "raw, together", "loop, together", at_once),
    ];
    let cases = ways.iter().flat_map(|(_, base, feature, load)| [raw(base, *load), own(feature, *load)]);
    let title = "loop direct, 4 KiB random read, depth 64, registered buffers";
    let mut comparison = bench.compare(title, cases.collect())?;
    for (way, base, feature, _) in ways {
        let mut ratio =
            |metric| comparison.effect(format!("{way}, relative to raw"), base, feature, metric, None).ratio;
        let (iops, cpu) = (ratio(Metric::Iops), ratio(Metric::CpuNsPerIo));
        let what = format!("loop direct / {RAW}, random read, submitted {way}");
        table.target(format!("{what}: IOPS"), iops, AtLeast(0.98));
        table.target(format!("{what}: processor time per I/O"), cpu, AtMost(1.05));
    }
    table.comparisons.push(comparison);

    let cases = vec![raw(RAW, random(1)), own(LOOP, random(1))];
    let mut comparison = bench.compare("loop direct, 4 KiB random read, depth 1", cases)?;
    comparison.effect("relative to raw", RAW, LOOP, Metric::NsPerIo, None);
    table.comparisons.push(comparison);

    // Raw io_uring knows the next offsets too, but submits each read as its own request.
    let load = Load::new("read", 64);
    let batches = Load { batch: 32, ..load };
    let (single, batch) = ("raw, one by one", "raw, batches of 32");
    let cases = vec![raw(single, one_by_one(load)), raw(batch, batches), own(LOOP, batches)];
    let mut comparison = bench.compare("loop direct, 4 KiB sequential read, depth 64", cases)?;
    let mut ratio =
        |base: &str, metric| comparison.effect(format!("relative to {base}"), base, LOOP, metric, None).ratio;
    for (base, iops_min) in [(single, 2.0), (batch, 1.1)] {
        let (iops, cpu) = (ratio(base, Metric::Iops), ratio(base, Metric::CpuNsPerIo));
        let what = format!("loop direct / {base}, sequential 4 KiB");
        table.target(format!("{what}: IOPS"), iops, AtLeast(iops_min));
        table.target(format!("{what}: processor time per byte"), cpu, AtMost(0.5));
    }
    table.comparisons.push(comparison);

    let points: &[usize] = if bench.pace.quick { &[1, 8, 64] } else { &[1, 2, 4, 8, 16, 32, 64, 128] };
    let line = |name, depth| (if name == RAW { raw(RAW, random(depth)) } else { own(LOOP, random(depth)) }).1;
    let plot = "loop direct, 4 KiB random read, submitted together";
    table.curves.extend(curves(bench, plot, "depth", &[RAW, LOOP], points, line)?);
    Ok(())
}

/// Measures one curve of IOPS for each of `lines`, at the x values `points`, in one comparison.
fn curves<'a>(
    bench: &mut Bench,
    plot: &str,
    x_label: &str,
    lines: &[&'static str],
    points: &[usize],
    case_of: impl Fn(&'static str, usize) -> CaseRun<'a>,
) -> Result<Vec<Curve>> {
    let title = |line: &str, point: usize| format!("{line}, {x_label} {point}");
    let at = |point: &usize| {
        lines.iter().map(|line| (title(line, *point), case_of(line, *point))).collect::<Vec<_>>()
    };
    let pace = bench.pace;
    bench.pace = Pace { seconds: pace.seconds * 0.3, rounds: 3, ..pace };
    let comparison = bench.compare(plot, points.iter().flat_map(at).collect())?;
    bench.pace = pace;
    Ok(comparison.curves([plot, x_label], Metric::Iops, lines, points, title))
}

/// Runs `run` on `count` threads, and adds up their IOPS.
fn on_threads(count: usize, run: impl Fn(usize) -> Result<Run> + Sync) -> Result<Run> {
    let (_, runs) = together(0..count, run)?;
    let iops = runs.iter().map(|run| run.value(Metric::Iops)).sum();
    Ok(Run::new(runs.iter().map(|run| run.ios).sum()).with(Metric::Iops, iops))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_iops_of_threads_add_up() {
        let one = |index: usize| Ok(Run::new(10).with(Metric::Iops, index as f64));
        let run = on_threads(3, one).unwrap();
        assert_eq!((run.ios, run.values.as_slice()), (30, [(Metric::Iops, 3.0)].as_slice()));
        assert!(on_threads(2, |_| Err("no".into())).is_err());
    }

    #[test]
    fn thread_counts_range_from_one_to_twice_the_processors() {
        let counts = threads();
        assert!(counts[0] == 1 && counts.is_sorted() && counts.len() >= 2, "{counts:?}");
    }
}

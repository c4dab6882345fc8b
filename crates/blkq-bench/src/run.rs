//! Runs `blkq bench`: measures the chosen tables, and prints and writes the results.

use std::io::Write;
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, StatxFlags};

use crate::bench::{Bench, Pace};
use crate::file::TestFile;
use crate::process::{bytes_of, value_of};
use crate::progress::Progress;
use crate::result::{Machine, Results, SCHEMA, Table};
use crate::{Arguments, Result, What, ensure, interrupt, print, report, tables};

const FILE_BYTES: u64 = 1 << 30;
const FILE_BYTES_QUICK: u64 = 256 << 20;
const FILE_BYTES_MIN: u64 = 64 << 20;

struct Measure {
    name: What,
    /// Approximate duration in seconds of a quick run and of a full run, with the default file size and all peers.
    /// Does not include work in [`Progress::aside`].
    seconds: [f64; 2],
    run: fn(&mut Bench) -> Result<Table>,
}

impl Measure {
    fn planned_seconds(&self, quick: bool) -> f64 {
        let is_left_out = self.name == What::Peers && tables::peers::lacks().is_some();
        if is_left_out { 0.0 } else { self.seconds[usize::from(!quick)] }
    }
}

/// All tables, in the order of `bench all`.
const TABLES: [Measure; 8] = [
    Measure { name: What::Dispatch, seconds: [9.0, 170.0], run: tables::dispatch::run },
    Measure { name: What::Direct, seconds: [7.0, 120.0], run: tables::direct::run },
    Measure { name: What::Batching, seconds: [14.0, 101.0], run: tables::batching::run },
    Measure { name: What::Clock, seconds: [3.0, 45.0], run: tables::clock::run },
    Measure { name: What::Layout, seconds: [5.0, 80.0], run: tables::layout::run },
    Measure { name: What::Limit, seconds: [6.0, 20.0], run: tables::limit::run },
    Measure { name: What::Peak, seconds: [6.0, 100.0], run: tables::peak::run },
    Measure { name: What::Peers, seconds: [75.0, 496.0], run: tables::peers::run },
];

/// Measures the chosen tables, prints each of them as soon as it is measured, and writes the outputs.
pub fn run(arguments: &Arguments) -> Result {
    let bytes = arguments.size.unwrap_or(if arguments.quick { FILE_BYTES_QUICK } else { FILE_BYTES });
    ensure(bytes >= FILE_BYTES_MIN && bytes.is_multiple_of(1 << 20), || {
        "--size must be at least 64M and a multiple of 1M".into()
    })?;
    arguments.check_outputs()?;
    interrupt::watch()?;
    let (seconds, rounds) = if arguments.quick { (0.1, 3) } else { (1.0, 5) };
    let pace = Pace { seconds, rounds, quick: arguments.quick };
    let chosen: Vec<_> =
        TABLES.iter().filter(|table| arguments.what == What::All || table.name == arguments.what).collect();
    let planned: Vec<f64> = chosen.iter().map(|table| table.planned_seconds(arguments.quick)).collect();
    let mut bench = Bench { pace, progress: Progress::new(planned.iter().sum()), file: None };
    let began = Instant::now();
    let mut results = Results {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started_unix: SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
        elapsed_seconds: 0.0,
        quick: arguments.quick,
        machine: Machine::describe(),
        tables: Vec::new(),
    };
    // The file is created first, so that a failure to create it is reported immediately.
    if arguments.what.needs_file() {
        let create = |progress: &mut _| {
            TestFile::create(arguments.file.as_deref(), arguments.overwrite, bytes, progress)
        };
        bench.file = Some(bench.progress.aside(create)?);
    }
    let mut planned_so_far = 0.0;
    arguments.print(print::LEGEND)?;
    for (table, planned) in chosen.into_iter().zip(planned) {
        bench.pace = pace;
        let measured = (table.run)(&mut bench)?;
        planned_so_far += planned;
        bench.progress.over_seconds = planned_so_far;
        bench.progress.clear();
        arguments.print(&format!("\n{}", print::table(&measured)))?;
        results.tables.push(measured);
    }
    results.machine.file_system = bench.file.as_ref().and_then(|file| file_system(&file.path));
    results.elapsed_seconds = began.elapsed().as_secs_f64();
    arguments.write(&results)
}

impl Arguments {
    /// Checks before the measurement that all outputs can be written.
    fn check_outputs(&self) -> Result {
        if let Some(path) = self.json.as_deref().filter(|_| !self.json_to_stdout()) {
            report::check_output(path, report::is_json)?;
        }
        self.report.as_deref().map_or(Ok(()), report::check)
    }

    fn json_to_stdout(&self) -> bool {
        self.json.as_deref() == Some(Path::new("-"))
    }

    fn print(&self, text: &str) -> Result {
        if self.json_to_stdout() { Ok(()) } else { print_out(text) }
    }

    fn write(&self, results: &Results) -> Result {
        match &self.json {
            Some(_) if self.json_to_stdout() => print_out(&report::json(results)?)?,
            Some(path) => report::write_output(path, report::is_json, &report::json(results)?)?,
            None => {}
        }
        if let Some(directory) = &self.report {
            report::write(results, directory)?;
            self.print(&format!("\nreport: {}\n", directory.join(report::PAGE).display()))?;
        }
        Ok(())
    }
}

fn print_out(text: &str) -> Result {
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.map_err(|e| format!("standard output: {e}").into())
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

impl Machine {
    pub fn describe() -> Machine {
        let cpuinfo = read("/proc/cpuinfo");
        Machine {
            processor: value_of(&cpuinfo, "model name").unwrap_or("unknown").to_owned(),
            processors: std::thread::available_parallelism().map_or(1, Into::into),
            memory_bytes: bytes_of(&read("/proc/meminfo"), "MemTotal").unwrap_or(0),
            kernel: read("/proc/sys/kernel/osrelease"),
            virtual_machine: value_of(&cpuinfo, "flags")
                .is_some_and(|f| f.split(' ').any(|f| f == "hypervisor")),
            file_system: None,
            clock_source: read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
            load: read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0),
        }
    }
}

/// Type and source of the file system that `path` is on, such as `ext4 /dev/vda1`.
pub fn file_system(path: &Path) -> Option<String> {
    let flags = (AtFlags::empty(), StatxFlags::MNT_ID);
    let id = rustix::fs::statx(rustix::fs::CWD, path, flags.0, flags.1).ok()?.stx_mnt_id.to_string();
    // ID parent device root point options [optional...] - type source options (proc(5)).
    let mounts = read("/proc/self/mountinfo");
    let mount = mounts.lines().find(|line| line.split(' ').next() == Some(id.as_str()))?;
    let (_, system) = mount.split_once(" - ")?;
    let mut words = system.split(' ');
    Some(format!("{} {}", words.next()?, words.next()?))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_machine_describes_itself() {
        let machine = super::Machine::describe();
        assert!(machine.processors > 0 && machine.memory_bytes > 0 && !machine.kernel.is_empty());
    }

    #[test]
    fn the_file_system_is_read_from_the_mount_of_the_path() {
        assert_eq!(super::file_system("/proc/self/status".as_ref()).as_deref(), Some("proc proc"));
        assert!(super::file_system("/proc/none".as_ref()).is_none());
    }
}

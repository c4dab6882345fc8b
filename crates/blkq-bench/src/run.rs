//! Runs `blkq bench`: measures the chosen tables, and prints and writes the results.

use std::io::Write;
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::bench::{Bench, Pace};
use crate::file::TestFile;
use crate::progress::Progress;
use crate::result::{Machine, Results, SCHEMA};
use crate::tables::TABLES;
use crate::{Arguments, Result, What, ensure, interrupt, print, report};

const FILE_BYTES: u64 = 1 << 30;
const FILE_BYTES_QUICK: u64 = 256 << 20;
const FILE_BYTES_MIN: u64 = 64 << 20;

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
    results.machine.file_system =
        bench.file.as_ref().and_then(|file| crate::machine::file_system(&file.path));
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

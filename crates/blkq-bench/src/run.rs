//! The command: measures the tables that were asked for, and hands the results out.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::bench::{Bench, Pace};
use crate::machine::Machine;
use crate::progress::Progress;
use crate::result::{Results, SCHEMA};
use crate::tables::TABLES;
use crate::{Arguments, Result, What, print};

/// Size of the file that is measured on.
const FILE_BYTES: u64 = 1 << 30;
/// The same with `--quick`.
const FILE_BYTES_QUICK: u64 = 256 << 20;
/// Smallest file that makes sense.
const FILE_BYTES_MIN: u64 = 64 << 20;

/// Measures, prints each table when it is there, and writes what was asked for.
///
/// # Errors
/// What could not be measured or written, in one line.
pub fn run(arguments: &Arguments) -> Result<Results> {
    let bytes = arguments.size.unwrap_or(if arguments.quick { FILE_BYTES_QUICK } else { FILE_BYTES });
    if bytes < FILE_BYTES_MIN || !bytes.is_multiple_of(1 << 20) {
        return Err("--size: at least 64M, and a multiple of 1M".into());
    }
    let pace = Pace::new(arguments.quick);
    let chosen: Vec<_> =
        TABLES.iter().filter(|table| arguments.what == What::All || table.name == arguments.what).collect();
    let planned = chosen.iter().map(|table| (table.planned_seconds)(&pace)).sum();
    let mut bench = Bench {
        pace,
        progress: Progress::new(planned),
        file: None,
        file_wanted: (arguments.file.clone(), bytes),
        over_seconds: 0.0,
    };
    let began = Instant::now();
    let started_unix = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let mut results = Results {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started_unix,
        elapsed_seconds: 0.0,
        quick: arguments.quick,
        machine: Machine::describe(),
        tables: Vec::new(),
    };
    // Tables and JSON must not be mixed on the standard output.
    let to_stdout = arguments.json.as_deref() == Some(Path::new("-"));
    let mut planned_so_far = 0.0;
    for table in chosen {
        let measured = (table.run)(&mut bench)?;
        planned_so_far += (table.planned_seconds)(&pace);
        bench.over_seconds = planned_so_far;
        bench.progress.over(planned_so_far);
        bench.progress.clear();
        if !to_stdout {
            say(&format!("{}\n", print::table(&measured)))?;
        }
        results.tables.push(measured);
    }
    results.elapsed_seconds = began.elapsed().as_secs_f64();
    if let Some(path) = &arguments.json {
        let json = serde_json::to_string_pretty(&results)? + "\n";
        if to_stdout {
            say(&json)?;
        } else {
            fs::write(path, json).map_err(|e| format!("{}: {e}", path.display()))?;
        }
    }
    Ok(results)
}

fn say(text: &str) -> Result {
    let mut stdout = std::io::stdout().lock();
    Ok(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())?)
}

/// What is to be removed when the process is told to end.
static TO_REMOVE: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Removes `path`, a file or a directory with all that is in it, when the process is told
/// to end.
///
/// # Errors
/// If the handler cannot be set.
pub(crate) fn remove_on_signal(path: &Path) -> Result {
    let mut paths = TO_REMOVE.lock().unwrap_or_else(PoisonError::into_inner);
    if paths.is_empty() {
        let mut signals = signal_hook::iterator::Signals::new([libc::SIGINT, libc::SIGTERM, libc::SIGHUP])?;
        std::thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                for path in TO_REMOVE.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                    let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
                }
                std::process::exit(128 + signal);
            }
        });
    }
    paths.push(path.to_owned());
    Ok(())
}

//! The daemon's log: standard error, which is NAME.log once the daemon is on its own.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::failure::{Failure, Outcome};

/// A log that has grown beyond this starts anew.
const LOG_BYTES_MAX: u64 = 256 << 10;

/// The log file, if standard error is one.
static FILE: Mutex<Option<File>> = Mutex::new(None);
/// Its path.
static PATH: OnceLock<PathBuf> = OnceLock::new();

/// Makes `path` the standard error of this process.
///
/// # Errors
/// If the file cannot be made.
pub fn redirect(path: &Path) -> Outcome {
    let refuse = |e: std::io::Error| Failure::new(format!("log {}: {e}", path.display()));
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path).map_err(refuse)?;
    rustix::stdio::dup2_stderr(&file).map_err(|e| refuse(e.into()))?;
    *FILE.lock().unwrap_or_else(|e| e.into_inner()) = Some(file);
    let _ = PATH.set(path.to_owned());
    Ok(())
}

/// The path of the log file; `None` if the log is what standard error was from the beginning.
pub fn path() -> Option<&'static Path> {
    PATH.get().map(PathBuf::as_path)
}

/// Writes a line with the time in seconds since 1970. Never called on an engine thread.
pub fn line(text: &str) {
    let file = FILE.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(file) = &*file
        && file.metadata().is_ok_and(|metadata| metadata.len() > LOG_BYTES_MAX)
    {
        let _ = file.set_len(0);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // A log that cannot be written stops nothing.
    let _ = writeln!(std::io::stderr(), "{}.{:03} {text}", now.as_secs(), now.subsec_millis());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_stays_bounded() {
        // The file alone, not standard error, which the test runner needs.
        let path = std::env::temp_dir().join(format!("blkq-log-{}", std::process::id()));
        let file = OpenOptions::new().create(true).append(true).open(&path).unwrap();
        file.set_len(LOG_BYTES_MAX + 1).unwrap();
        *FILE.lock().unwrap() = Some(file);
        line("one more");
        *FILE.lock().unwrap() = None;
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
        std::fs::remove_file(&path).unwrap();
    }
}

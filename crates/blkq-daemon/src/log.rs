//! The daemon's log: standard error, which is redirected to `NAME.log` when the device is ready.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};
use std::time::SystemTime;

use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::system::rfc3339;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Maximum size of the log in bytes. When it is exceeded, the newest half is kept.
const LOG_BYTES_MAX: u64 = 256 << 10;

static FILE: Mutex<Option<File>> = Mutex::new(None);
static PATH: OnceLock<PathBuf> = OnceLock::new();

/// Redirects standard error of this process to `path`.
pub fn redirect(path: &Path) -> Outcome {
    let failure = |e: std::io::Error| Failure::new(format!("cannot open the log {}: {e}", path.display()));
    let options = || OpenOptions::new().create(true).append(true).read(true).mode(0o600).open(path);
    let file = options().map_err(failure)?;
    rustix::stdio::dup2_stderr(&file).map_err(|e| failure(e.into()))?;
    *FILE.lock().unwrap_or_else(|e| e.into_inner()) = Some(file);
    let _ = PATH.set(path.to_owned());
    Ok(())
}

pub fn path() -> Option<&'static Path> {
    PATH.get().map(PathBuf::as_path)
}

/// Writes a line with a time stamp. Must not be called on an engine thread, because it may block.
pub fn line(text: &str) {
    let file = FILE.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(file) = &*file
        && let Ok(metadata) = file.metadata()
        && metadata.len() > LOG_BYTES_MAX
    {
        shorten(file, metadata.len());
    }
    write(text);
}

/// Makes each panic write its message to the log and abort the process. Unwinding would be unsafe: it would
/// free memory to which the kernel may still write.
pub fn abort_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("without a name");
        let at = panic.location().map(|at| format!(" at {at}")).unwrap_or_default();
        let message = panic.payload_as_str().unwrap_or("no message");
        // This takes no lock, because the thread that panics may hold it.
        write(&format!("panic: thread {name}{at}: {message}; the daemon aborts, please report this"));
        std::process::abort();
    }));
}

fn write(text: &str) {
    let text = text.replace('\n', " | ").replace(char::is_control, "?");
    let line = format!("{} {text}\n", rfc3339(SystemTime::now()));
    // A failed write is ignored, and a pipe or terminal that is not read must not block the daemon.
    let stderr = rustix::stdio::stderr();
    let mut writable = [PollFd::new(&stderr, PollFlags::OUT)];
    if !matches!(poll(&mut writable, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0)) {
        let _ = rustix::io::write(stderr, line.as_bytes());
    }
}

fn shorten(file: &File, length: u64) {
    let mut kept = vec![0; LOG_BYTES_MAX as usize / 2];
    let from = length.saturating_sub(LOG_BYTES_MAX / 2);
    let count = file.read_at(&mut kept, from).unwrap_or(0);
    let begin = kept[..count].iter().position(|byte| *byte == b'\n').map_or(count, |at| at + 1);
    if file.set_len(0).is_ok() {
        let _ = rustix::io::write(file, &kept[begin..count]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_stays_bounded_and_keeps_its_newest_lines() {
        // This test uses the file only: the test runner needs standard error.
        let path = std::env::temp_dir().join(format!("blkq-log-{}", std::process::id()));
        let lines: String = (0..40_000).map(|number| format!("line {number}\n")).collect();
        assert!(lines.len() as u64 > LOG_BYTES_MAX);
        std::fs::write(&path, &lines).unwrap();
        let file = OpenOptions::new().append(true).read(true).open(&path).unwrap();
        *FILE.lock().unwrap() = Some(file);
        line("one more");
        *FILE.lock().unwrap() = None;
        let kept = std::fs::read_to_string(&path).unwrap();
        assert!(kept.len() as u64 <= LOG_BYTES_MAX / 2 && kept.len() > 100_000, "{}", kept.len());
        assert!(kept.starts_with("line ") && kept.ends_with("line 39999\n"));
        std::fs::remove_file(&path).unwrap();
    }
}

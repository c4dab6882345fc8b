//! `blkq log`: prints the log of a device's daemon.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::FileId;
use blkq_protocol::system::if_exists;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::devices::{DeviceArg, Entry, inspect};
use crate::output::print;

const INTERVAL: Duration = Duration::from_millis(200);
/// More than the daemon keeps in a log.
const PIECE_BYTES: usize = 1 << 20;

/// Options of `log`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Prints the log of the daemon, oldest line first. A daemon that runs in the foreground, such as one
of a service, writes its log to standard error: for a service, run journalctl -u blkq@NAME.

Examples:
  blkq log disk.img
  blkq log disk.img --follow
  blkq log disk.img | grep 'I/O error'")]
pub struct Args {
    #[command(flatten)]
    device: DeviceArg,
    /// Continue to print lines as the daemon writes them, until the device is detached or Ctrl-C
    #[arg(long, short)]
    follow: bool,
}

/// Fails if there is no such device, or if its daemon writes no log file.
pub fn run(args: Args) -> Outcome {
    let (dir, name) = args.device.find()?;
    let path = dir.file(&name, ".log");
    let failed = |e: io::Error| Failure::new(format!("{}: {e}", path.display()));
    let mut log = match if_exists(LogReader::open(&path)).map_err(failed)? {
        Some(log) => log,
        None => match inspect(&dir, &name) {
            // The next daemon failed to start, and has renamed the log.
            Ok(Some(Entry::Remains(remains))) if remains.log != path => {
                LogReader::open(&remains.log).map_err(failed)?
            }
            found => return Err(no_log(&name, found)),
        },
    };
    loop {
        log.print().map_err(failed)?;
        if !args.follow || is_stdout_closed(INTERVAL) {
            return Ok(());
        }
        let next = if_exists(LogReader::open(&path)).map_err(failed)?;
        if next.as_ref().is_none_or(|next| next.id != log.id) {
            log.print().map_err(failed)?;
            match next {
                Some(next) => log = next,
                // The next daemon of the device creates its log when it is ready.
                None if dir.file(&name, ".lock").exists() => {}
                None => return Ok(()),
            }
        }
    }
}

fn no_log(name: &str, found: Outcome<Option<Entry>>) -> Failure {
    match found {
        Ok(Some(Entry::Device(info))) if info.log.is_none() => Failure::new(format!(
            "{name}: the daemon (pid {}) writes its log to standard error; for a service, run `journalctl -u \
             blkq@{name}`",
            info.pid
        )),
        Ok(Some(Entry::Silent { error, .. })) => Failure::new(format!("{name}: no log: {error}")),
        Err(failure) => failure,
        _ => Failure::new(format!("{name}: there is no log")),
    }
}

/// Waits for `time`, or until the reader of standard output closes it. Returns whether the reader closed it.
fn is_stdout_closed(time: Duration) -> bool {
    let stdout = rustix::stdio::stdout();
    // poll(2) reports errors and hang-ups of a descriptor even if no events are requested.
    let mut fds = [PollFd::new(&stdout, PollFlags::empty())];
    // A signal terminates this process.
    poll(&mut fds, Timespec::try_from(time).ok().as_ref()).is_ok_and(|ready| ready > 0)
}

struct LogReader {
    file: File,
    id: FileId,
    offset: u64,
    /// The last line that was read, to find it again when the daemon has dropped the older half of the log.
    last_line: String,
    /// The daemon has dropped lines since `last_line` was read. It empties the file before it writes the
    /// lines that it keeps.
    is_shortened: bool,
}

impl LogReader {
    fn open(path: &Path) -> io::Result<LogReader> {
        let file = File::open(path)?;
        let id = FileId::from(&file.metadata()?);
        Ok(LogReader { file, id, offset: 0, last_line: String::new(), is_shortened: false })
    }

    fn print(&mut self) -> io::Result<()> {
        loop {
            let text = self.read()?;
            if text.is_empty() {
                return Ok(());
            }
            print(&text).map_err(io::Error::other)?;
        }
    }

    /// The complete lines that were added since the last call, without control characters for the terminal.
    fn read(&mut self) -> io::Result<String> {
        if self.file.metadata()?.len() < self.offset {
            (self.offset, self.is_shortened) = (0, true);
        }
        let mut bytes = vec![0; PIECE_BYTES];
        let count = self.file.read_at(&mut bytes, self.offset)?;
        bytes.truncate(count);
        bytes.truncate(bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1));
        self.offset += bytes.len() as u64;
        let text = String::from_utf8_lossy(&bytes);
        let mut lines: Vec<&str> = text.lines().collect();
        let Some(newest) = lines.last().map(|line| (*line).to_owned()) else { return Ok(String::new()) };
        if std::mem::take(&mut self.is_shortened)
            && let Some(last) = lines.iter().rposition(|line| *line == self.last_line)
        {
            lines.drain(..=last);
        }
        self.last_line = newest;
        Ok(lines.iter().map(|line| line.replace(char::is_control, "?") + "\n").collect())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use blkq_protocol::harness::scratch;

    use super::*;

    #[test]
    fn each_line_of_a_growing_log_is_read_once() {
        let dir = scratch("log-follow");
        let path = dir.file("a", ".log");
        let mut file = File::options().create(true).append(true).open(&path).unwrap();
        let mut log = LogReader::open(&path).unwrap();
        assert_eq!(log.read().unwrap(), "");
        file.write_all(b"one\ntwo\x1b[2J\nthr").unwrap();
        assert_eq!(log.read().unwrap(), "one\ntwo?[2J\n");
        file.write_all(b"ee\nfour\n").unwrap();
        assert_eq!(log.read().unwrap(), "three\nfour\n");
        // The daemon drops the older half of the log and adds a line.
        file.set_len(0).unwrap();
        file.write_all(b"three\nfour\nfive\n").unwrap();
        assert_eq!(log.read().unwrap(), "five\n");
        file.set_len(0).unwrap();
        assert_eq!(log.read().unwrap(), "", "the lines that the daemon keeps are not written yet");
        file.write_all(b"four\nfive\nsix\n").unwrap();
        assert_eq!(log.read().unwrap(), "six\n");
        file.set_len(0).unwrap();
        file.write_all(b"seven\n").unwrap();
        assert_eq!(log.read().unwrap(), "seven\n", "no line that was read remains");
        assert_eq!(LogReader::open(&path).unwrap().id, log.id);
        // The device is attached again, and detached.
        fs::rename(&path, dir.file("a", ".log.1")).unwrap();
        fs::write(&path, "next\n").unwrap();
        let mut next = LogReader::open(&path).unwrap();
        assert_ne!(next.id, log.id);
        assert_eq!((log.read().unwrap(), next.read().unwrap()), (String::new(), "next\n".to_owned()));
        fs::remove_file(&path).unwrap();
        assert!(if_exists(LogReader::open(&path)).unwrap().is_none());
        fs::remove_dir_all(dir.path()).unwrap();
    }
}

//! Logs failed I/O: at most one line per device and interval, with the number of failures that were not logged.

use std::time::Duration;

use blkq::Failures;

/// Minimum time between two lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// Failures that are not in the log yet.
#[derive(Default)]
pub struct IoErrorLog {
    failures: Failures,
    /// Earliest time of the next line.
    next_ns: u64,
}

impl IoErrorLog {
    pub fn add(&mut self, failures: Failures) {
        self.failures.add(failures);
    }

    /// Writes a line if there are failures and the previous line was written long enough before `now_ns`.
    pub fn write(&mut self, now_ns: u64, log: &dyn Fn(&str)) {
        if now_ns < self.next_ns {
            return;
        }
        let Failures { first, more, .. } = std::mem::take(&mut self.failures);
        let Some(first) = first else { return };
        let others = match more {
            0 => String::new(),
            1 => " (1 more error was not logged)".to_owned(),
            _ => format!(" ({more} more errors were not logged)"),
        };
        log(&format!("I/O error: {first}{others}"));
        self.next_ns = now_ns + INTERVAL.as_nanos() as u64;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::Arc;

    use blkq::{Bio, Disk, IoBuffer, LocalQueue, Sector};
    use blkq_drivers::{DriverOptions, DriverSpec, open};

    use super::*;

    /// Submits a write at each of these sectors, which fails, and returns the failures that the queue recorded.
    fn fail(queue: &mut LocalQueue, sectors: &[u64]) -> Failures {
        for sector in sectors {
            queue.submit(Bio::write(Sector(*sector), IoBuffer::zeroed(4096), *sector)).unwrap();
            queue.wait(1);
            assert!(queue.completions().all(|completion| completion.result.is_err()));
        }
        queue.scan_for_hangs(0, u64::MAX).failures
    }

    // Contract: errors
    #[test]
    fn one_line_has_the_first_failure_and_the_number_of_the_others() {
        let fault = Some("error=ENOSPC,op=write".parse().unwrap());
        let opened = open(&DriverSpec::Ram(1 << 20), &DriverOptions { fault, ..DriverOptions::default() });
        let disk: Arc<Disk> = Disk::builder_shared(opened.unwrap().driver).build().unwrap();
        let mut queue = disk.open_queue(0).unwrap();
        let (mut errors, lines) = (IoErrorLog::default(), RefCell::new(Vec::new()));
        let log = |line: &str| lines.borrow_mut().push(line.to_owned());
        let second = 1_000_000_000;
        errors.write(second, &log);
        assert!(lines.borrow().is_empty(), "nothing has failed");
        errors.add(fail(&mut queue, &[8, 16, 24]));
        errors.write(second, &log);
        errors.add(fail(&mut queue, &[32]));
        errors.add(fail(&mut queue, &[40]));
        errors.write(10 * second, &log);
        let line = |sector: u64, others: &str| {
            let why = "no space left on the backing store";
            format!(
                "I/O error: write at sector {sector}, 8 sectors: {why}; client: user_data {sector} ({others})"
            )
        };
        let first = line(8, "2 more errors were not logged");
        assert_eq!(*lines.borrow(), [first], "the next line is not due");
        errors.write(11 * second, &log);
        assert_eq!(lines.borrow()[1..], [line(32, "1 more error was not logged")]);
        errors.write(30 * second, &log);
        assert_eq!((lines.borrow().len(), disk.failed_requests(0)), (2, 5));
    }
}

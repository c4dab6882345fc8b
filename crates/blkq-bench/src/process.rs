//! Counters that the kernel keeps of processes: processor time, context switches, memory.

use std::time::Duration;

use crate::Result;

/// Processor time and context switches that a process has used since it started.
#[derive(Clone, Copy, Default, Debug)]
pub struct Usage {
    /// Processor time, user and system.
    pub cpu: Duration,
    /// Context switches, voluntary and not.
    pub context_switches: u64,
}

impl Usage {
    /// Usage of this process, including the kernel's io_uring workers, which are threads of it.
    pub fn of_self() -> Usage {
        Usage::read(libc::RUSAGE_SELF)
    }

    /// Total usage of the child processes that have been waited for.
    pub fn of_children() -> Usage {
        Usage::read(libc::RUSAGE_CHILDREN)
    }

    fn read(who: libc::c_int) -> Usage {
        // SAFETY: the kernel fills the structure in; it knows RUSAGE_SELF and RUSAGE_CHILDREN.
        let usage = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            libc::getrusage(who, &raw mut usage);
            usage
        };
        let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
        Usage {
            cpu: time(usage.ru_utime) + time(usage.ru_stime),
            context_switches: (usage.ru_nvcsw + usage.ru_nivcsw) as u64,
        }
    }

    /// Usage of process `pid`. The processor time includes threads that have exited; the context switches do
    /// not.
    pub fn of(pid: i32) -> Result<Usage> {
        let mut clock = 0;
        // SAFETY: the C library fills the number in.
        if unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) } != 0 {
            return Err(format!("process {pid} does not exist").into());
        }
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel fills the structure in.
        if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        let context_switches = switches(pid, |_| true)?;
        Ok(Usage { cpu: Duration::new(time.tv_sec as u64, time.tv_nsec as u32), context_switches })
    }

    /// The difference to `earlier`; 0 where a count has decreased because a thread has exited.
    pub fn since(self, earlier: Usage) -> Usage {
        Usage {
            cpu: self.cpu.saturating_sub(earlier.cpu),
            context_switches: self.context_switches.saturating_sub(earlier.context_switches),
        }
    }
}

/// Context switches so far of the running io_uring workers of this process. The kernel keeps an idle worker
/// for seconds, so that a short run does not lose the counts of workers that exit.
pub fn worker_switches() -> Result<u64> {
    switches(std::process::id() as i32, |name| name.starts_with("iou-wrk-"))
}

/// Sums the context switches of the threads of a process whose name `counts` accepts.
fn switches(pid: i32, counts: impl Fn(&str) -> bool) -> Result<u64> {
    let mut sum = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // The file does not exist if the thread has exited meanwhile.
        let status = std::fs::read_to_string(thread?.path().join("status")).unwrap_or_default();
        let name = status.lines().next().and_then(|line| line.strip_prefix("Name:\t")).unwrap_or_default();
        if counts(name) {
            let lines = status.lines().filter(|line| line.contains("ctxt_switches:"));
            sum += lines.filter_map(|line| line.split('\t').nth(1)?.parse::<u64>().ok()).sum::<u64>();
        }
    }
    Ok(sum)
}

/// Resident memory of a process.
pub const RESIDENT: &str = "VmRSS";
/// Highest resident memory since the process started, or since [`forget_resident_max`].
pub const RESIDENT_MAX: &str = "VmHWM";

/// Resets [`RESIDENT_MAX`] to the current resident memory (proc(5), clear_refs).
pub fn forget_resident_max(pid: i32) -> Result {
    Ok(std::fs::write(format!("/proc/{pid}/clear_refs"), "5")?)
}

/// [`RESIDENT`] or [`RESIDENT_MAX`] in bytes.
pub fn memory_bytes(pid: i32, key: &str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    Ok(bytes_of(&status, key).ok_or_else(|| format!("/proc/{pid}/status: no {key}"))?)
}

/// The value of the first line `key : value` of a text.
pub fn value_of<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix(':').map(str::trim))
}

/// The value of the first line `key: N kB` of a text, in bytes.
pub fn bytes_of(text: &str, key: &str) -> Option<u64> {
    Some(value_of(text, key)?.trim_end_matches(" kB").parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_of_a_pid_matches_getrusage_of_the_process() {
        let inside = Usage::of_self();
        let own = std::process::id() as i32;
        let outside = Usage::of(own).unwrap();
        assert!(outside.cpu > Duration::ZERO && outside.cpu + Duration::from_millis(20) >= inside.cpu);
        assert!(Usage::of(i32::MAX).is_err());
        assert!(memory_bytes(own, RESIDENT_MAX).unwrap() >= 1 << 20);
        forget_resident_max(own).unwrap();
    }
}

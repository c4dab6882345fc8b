//! What the kernel counts of processes: processor time, context switches, memory.

use std::time::Duration;

use crate::Result;

/// Processor time and context switches of a process so far.
#[derive(Clone, Copy, Default, Debug)]
pub struct Usage {
    /// Processor time, user and system.
    pub cpu: Duration,
    /// Context switches, voluntary and not.
    pub context_switches: u64,
}

impl Usage {
    /// Of this process, with all its threads, those of its rings included.
    pub fn of_self() -> Usage {
        // SAFETY: the kernel fills the structure in; RUSAGE_SELF always exists.
        let usage = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
            usage
        };
        let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
        Usage {
            cpu: time(usage.ru_utime) + time(usage.ru_stime),
            context_switches: (usage.ru_nvcsw + usage.ru_nivcsw) as u64,
        }
    }

    /// What was used since `earlier`.
    pub fn since(self, earlier: Usage) -> Usage {
        Usage {
            cpu: self.cpu.saturating_sub(earlier.cpu),
            context_switches: self.context_switches.saturating_sub(earlier.context_switches),
        }
    }
}

/// Resident memory of a process in bytes (VmRSS in /proc/PID/status; `pid` may be "self").
///
/// # Errors
/// If there is no such process.
pub fn resident_bytes(pid: &str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    Ok(kib.ok_or_else(|| format!("/proc/{pid}/status: no VmRSS"))? << 10)
}

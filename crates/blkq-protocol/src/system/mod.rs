//! Signals, locks, files, time and kernel features, as the operating system provides them.

pub mod signals;

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// `None` if the file that was to be opened, read or removed does not exist.
pub fn if_exists<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        result => result.map(Some),
    }
}

/// Reads at most `most` bytes.
pub(crate) fn read_bounded(file: File, most: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    file.take(most).read_to_end(&mut text)?;
    Ok(text)
}

/// Lists the files in `directory` whose names end with `suffix`: sorted, without the suffix, and only the names that
/// `is_name` accepts. Returns an empty list if the directory does not exist.
pub(crate) fn file_names(
    directory: &std::path::Path,
    suffix: &str,
    is_name: impl Fn(&str) -> bool,
) -> io::Result<Vec<String>> {
    let entries = if_exists(fs::read_dir(directory))?.into_iter().flatten();
    let files = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let names = files.filter_map(|file| Some(file.strip_suffix(suffix)?.to_owned()));
    let mut names: Vec<String> = names.filter(|name| is_name(name)).collect();
    names.sort();
    Ok(names)
}

/// The version of Landlock in this kernel; 0 if the kernel does not support Landlock.
pub fn landlock_abi() -> u32 {
    // `LANDLOCK_CREATE_RULESET_VERSION`.
    const VERSION_FLAG: u32 = 1;
    let no_rules = std::ptr::null::<u8>();
    // SAFETY: without a ruleset the call only returns the version.
    let abi = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, no_rules, 0usize, VERSION_FLAG) };
    u32::try_from(abi).unwrap_or(0)
}

/// Whether the kernel supports seccomp filters.
pub fn has_seccomp() -> bool {
    let action = libc::SECCOMP_RET_ALLOW;
    // SAFETY: the kernel reads one word, and only returns whether it knows the action.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0u32, &raw const action) };
    result == 0
}

/// Raises the limits of this process as a daemon does. Open files are for connections, locked memory for
/// registered buffers. Errors are ignored: a limit that is too low is reported where it is exceeded.
pub fn raise_limits() {
    for resource in [Resource::Nofile, Resource::Memlock] {
        let maximum = getrlimit(resource).maximum;
        let _ = setrlimit(resource, Rlimit { current: maximum, maximum });
    }
    // Root may lock memory without a limit now, but not after it has dropped its privileges.
    let _ = setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None });
}

/// Locks a byte, which may be beyond the end of the file. The file must be open for writing. Fails with
/// [`io::ErrorKind::WouldBlock`] if the byte is locked through another open file description.
///
/// The lock belongs to the open file description (`F_OFD_SETLK` of fcntl(2)). The kernel releases it when the last
/// descriptor is closed, however the process exits. Unlike with POSIX locks, closing another descriptor of the same
/// file releases nothing. It is independent of flock(2) locks.
pub fn lock_byte(file: &File, byte: usize) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the structure outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock_of_byte(byte)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the byte is locked through another open file description.
pub fn is_byte_locked(file: &File, byte: usize) -> bool {
    let mut lock = lock_of_byte(byte);
    // SAFETY: the descriptor is open, and the structure outlives the call.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    asked == 0 && i32::from(lock.l_type) != libc::F_UNLCK
}

fn lock_of_byte(byte: usize) -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte as libc::off_t,
        l_len: 1,
        l_pid: 0,
    }
}

/// Formats `time` in RFC 3339, in UTC with milliseconds, like `2026-11-22T04:52:11.250Z`. Times before 1970 become 1970.
pub fn rfc3339(time: SystemTime) -> String {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (seconds, ms) = (since_epoch.as_secs(), since_epoch.subsec_millis());
    let (year, month, day) = date(seconds / 86400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

/// Year, month and day in the Gregorian calendar, for a number of days since 1970-01-01. The calculation uses
/// years that begin in March, so that the leap day is their last day and month m begins after (153 m + 2) / 5
/// days.
fn date(days: u64) -> (u64, u64, u64) {
    // Days since 0000-03-01. 400 years have 146097 days.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, calendar_month) = (day - (153 * month + 2) / 5 + 1, (month + 2) % 12 + 1);
    (era * 400 + year + u64::from(calendar_month <= 2), calendar_month, day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        // The output of `date -u -d @SECONDS +%FT%T`.
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.250Z"),
            (951_782_399, "2000-02-28T23:59:59.250Z"),
            (951_782_400, "2000-02-29T00:00:00.250Z"),
            (951_868_800, "2000-03-01T00:00:00.250Z"),
            (1_798_761_599, "2026-12-31T23:59:59.250Z"),
            (4_107_542_400, "2100-03-01T00:00:00.250Z"),
        ] {
            assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_millis(seconds * 1000 + 250)), text);
        }
        assert_eq!(rfc3339(UNIX_EPOCH - Duration::from_secs(1)), "1970-01-01T00:00:00.000Z");
    }
}

//! The page cache of a file: counts its cached pages, and evicts them.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::measurement::{Run, mib};
use crate::metric::Metric;
use crate::{Result, ensure};

/// System call number of cachestat (Linux 6.5), the same on all architectures.
const SYS_CACHESTAT: libc::c_long = 451;

/// Bytes of `file` in the page cache, counted with cachestat, or with mincore before Linux 6.5.
pub fn cached_bytes(file: &File) -> Result<u64> {
    let page = rustix::param::page_size() as u64;
    // struct cachestat_range (offset and length; 0 is the whole file), and struct cachestat, which begins with nr_cache
    // (include/uapi/linux/mman.h).
    let (range, mut found) = ([0_u64; 2], [0_u64; 5]);
    // SAFETY: both arrays have the layout of the kernel's structures, and outlive the call.
    let result =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut found, 0) };
    if result == 0 {
        return Ok(found[0] * page);
    }
    let length = file.metadata()?.len() as usize;
    if length == 0 {
        return Ok(0);
    }
    let mut resident = vec![0u8; length.div_ceil(page as usize)];
    // SAFETY: the mapping is new, covers the whole file, is not accessed, and is unmapped below. `resident` has one
    // byte for each of its pages.
    let result = unsafe {
        let map = mmap(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, file, 0)?;
        let result = libc::mincore(map, length, resident.as_mut_ptr());
        munmap(map, length)?;
        result
    };
    if result != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(resident.iter().filter(|page| **page & 1 != 0).count() as u64 * page)
}

/// How long the kernel may take to finish reading ahead: until then it keeps the pages.
const READ_AHEAD_TIME: Duration = Duration::from_secs(5);

/// Writes back and drops the cached pages of `file`. Fails if more than 1 % of them stay cached, which happens
/// while another process maps the file.
pub fn evict(file: &File) -> Result {
    let length = file.metadata()?.len();
    file.sync_data()?;
    let until = Instant::now() + READ_AHEAD_TIME;
    let left = loop {
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
        let left = cached_bytes(file)?;
        if left <= length / 100 || Instant::now() >= until {
            break left;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    ensure(left <= length / 100, || {
        format!(
            "{left} bytes of the file cannot be dropped from the page cache; another process uses the file"
        )
    })
}

/// Runs `measure` with a cold page cache: evicts the file at `path` first. Adds to the run the cached bytes
/// before and after it, and their growth per I/O. Dirty pages that `measure` leaves are written back after
/// the run, so that the next case does not pay for them.
pub fn cold(path: &Path, measure: impl FnOnce() -> Result<Run>) -> Result<Run> {
    let file = File::open(path)?;
    evict(&file)?;
    let before = cached_bytes(&file)?;
    let run = measure()?;
    let after = cached_bytes(&file)?;
    file.sync_data()?;
    let per_io = after.saturating_sub(before) as f64 / 1024.0 / run.ios as f64;
    Ok(run
        .with(Metric::CachedBeforeMib, mib(before))
        .with(Metric::CachedMib, mib(after))
        .with(Metric::CachedKibPerIo, per_io))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evict_succeeds_only_if_the_pages_are_dropped() {
        let path = std::env::temp_dir().join(format!("blkq-bench-evict-{}", std::process::id()));
        let bytes = 4 << 20;
        std::fs::write(&path, vec![1; bytes]).unwrap();
        let file = File::open(&path).unwrap();
        assert_eq!(cached_bytes(&file).unwrap(), bytes as u64);
        let evicted = evict(&file);
        let left = cached_bytes(&file).unwrap();
        // tmpfs cannot drop pages, and `evict` must report that.
        assert_eq!(evicted.is_ok(), left <= bytes as u64 / 100, "{left} bytes left: {evicted:?}");
        std::fs::remove_file(&path).unwrap();
    }
}

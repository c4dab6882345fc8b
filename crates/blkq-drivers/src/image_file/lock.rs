//! Locks on the served bytes of an image. They are OFD locks: the kernel releases them with the open file description,
//! so a killed process leaves no stale lock.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;

use blkq::{Error, ErrorKind};
use libc::c_int;

use crate::errors::unsupported;

pub(crate) const WHOLE_FILE: Range<u64> = 0..1 << 62;

/// The access that other processes have to the bytes while the lock is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LockKind {
    /// Other processes must not lock the bytes.
    Writer,
    /// Other processes may take the lock of a reader, too.
    Reader,
    /// For a device that is shared: other processes may take any lock but that of a writer.
    Shared,
}

impl LockKind {
    pub fn of(read_only: bool, shared: bool) -> LockKind {
        match (read_only, shared) {
            (_, true) => LockKind::Shared,
            (true, false) => LockKind::Reader,
            (false, false) => LockKind::Writer,
        }
    }
}

/// Locks `range` of `file`, or converts its lock on that range to `kind`. If the file system has no locks,
/// returns a warning for [`LockKind::Shared`], and else fails with [`ErrorKind::Unsupported`]. Fails with
/// [`ErrorKind::Busy`] if the lock of another process conflicts.
pub(crate) fn acquire(
    file: &File,
    path: &Path,
    range: &Range<u64>,
    kind: LockKind,
) -> Result<Option<String>, Error> {
    let Err(error) = lock(file, range, kind) else { return Ok(None) };
    let path = path.display();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => {
            let part = match range {
                range if *range == WHOLE_FILE => "it is".to_owned(),
                Range { start, end } => format!("bytes {start} to {end} are"),
            };
            Err(Error::new(ErrorKind::Busy, format!("{path} is in use: {part} locked")))
        }
        _ if kind == LockKind::Shared => Ok(Some(format!(
            "cannot lock {path} ({error}): other processes can write to it at the same time"
        ))),
        _ => Err(unsupported(format!(
            "cannot lock {path} ({error}), so another process could use it at the same time; if none does, open it shared"
        ))),
    }
}

/// The bytes that QEMU locks in an image (block/file-posix.c of QEMU), each with a read lock: byte 100 + n if QEMU uses
/// permission n, and byte 200 + n if it does not share permission n with other processes. Permission 0 is consistent
/// read, 1 is write. A process first locks its bytes and then checks those of others, so at least one of two processes
/// notices a conflict.
const QEMU_BYTES: Range<u64> = 100..300;
const QEMU_READS: u64 = 100;
const QEMU_WRITES: u64 = 101;
const UNSHARED_READS: u64 = 200;
const UNSHARED_WRITES: u64 = 201;

/// The locks for the access `kind` to `range`, in the order in which they must be set.
///
/// Two devices of blkq conflict where their ranges overlap. If the range contains QEMU's bytes, as the range of a whole
/// image does, a writer has a write lock on them, which conflicts with every lock of QEMU. A writer whose range does not
/// contain them excludes QEMU with read locks on the bytes 200 and 201, which other such devices can lock as well, and
/// a reader excludes QEMU's writers with one on 201.
///
/// During a conversion, no lock that excludes writers is released before another one that does is set.
fn steps(range: &Range<u64>, kind: LockKind) -> Vec<(Range<u64>, c_int)> {
    let has_qemu = range.start <= QEMU_BYTES.start && QEMU_BYTES.end <= range.end;
    let around = |bytes: Range<u64>| match has_qemu {
        true => vec![range.start..bytes.start, bytes.end..range.end],
        false => vec![range.clone()],
    };
    let lock = |ranges: Vec<Range<u64>>, l_type| ranges.into_iter().map(move |range| (range, l_type));
    if kind == LockKind::Writer {
        let unshared = UNSHARED_READS..UNSHARED_WRITES + 1;
        let data = around(unshared.clone());
        return lock(vec![unshared], libc::F_RDLCK).chain(lock(data, libc::F_WRLCK)).collect();
    }
    let data = around(QEMU_BYTES);
    if kind == LockKind::Shared {
        return lock(data, libc::F_RDLCK).collect();
    }
    let byte = |byte: u64| byte..byte + 1;
    let mut used = vec![byte(UNSHARED_WRITES)];
    used.extend(data);
    let unused = match has_qemu {
        true => vec![QEMU_BYTES.start..UNSHARED_WRITES, UNSHARED_WRITES + 1..QEMU_BYTES.end],
        false => vec![byte(UNSHARED_READS)],
    };
    lock(used, libc::F_RDLCK).chain(lock(unused, libc::F_UNLCK)).collect()
}

fn lock(file: &File, range: &Range<u64>, kind: LockKind) -> io::Result<()> {
    for (bytes, l_type) in steps(range, kind) {
        set(file, &bytes, l_type)?;
    }
    // Only a writer of blkq has a write lock on byte 0. Then it has QEMU's bytes too, and QEMU cannot lock any.
    let is_writer = || conflicts(file, 0, libc::F_RDLCK);
    let is_qemu = |byte| Ok::<_, io::Error>(conflicts(file, byte, libc::F_WRLCK)? && !is_writer()?);
    let in_use = match kind {
        LockKind::Shared => false,
        LockKind::Reader => is_qemu(QEMU_WRITES)?,
        LockKind::Writer => is_qemu(QEMU_WRITES)? || is_qemu(QEMU_READS)?,
    };
    if in_use { Err(io::Error::from_raw_os_error(libc::EAGAIN)) } else { Ok(()) }
}

/// Converts a writer's lock on `range` to a reader's. There is nothing to check, because the writer's lock excludes all
/// others. If a part cannot be converted, it stays locked for writing, which at worst excludes other readers.
pub(crate) fn downgrade(file: &File, range: &Range<u64>) {
    for (bytes, l_type) in steps(range, LockKind::Reader) {
        if set(file, &bytes, l_type).is_err() {
            return;
        }
    }
}

/// Whether another file description has a lock on the byte with which one of type `l_type` would conflict.
fn conflicts(file: &File, byte: u64, l_type: c_int) -> io::Result<bool> {
    Ok(i32::from(fcntl(file, libc::F_OFD_GETLK, &(byte..byte + 1), l_type)?.l_type) != libc::F_UNLCK)
}

pub(crate) fn release(file: &File, range: &Range<u64>) {
    // Unlocking can fail if the kernel has no memory to split a lock. Closing the file releases it then.
    let _ = set(file, range, libc::F_UNLCK);
}

fn set(file: &File, range: &Range<u64>, l_type: c_int) -> io::Result<()> {
    if range.is_empty() {
        // A length of 0 would mean: to the end of all files.
        return Ok(());
    }
    fcntl(file, libc::F_OFD_SETLK, range, l_type).map(drop)
}

fn fcntl(file: &File, command: c_int, range: &Range<u64>, l_type: c_int) -> io::Result<libc::flock> {
    let too_large = |_| io::Error::from_raw_os_error(libc::EOVERFLOW);
    let mut lock = libc::flock {
        l_type: l_type as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: range.start.try_into().map_err(too_large)?,
        l_len: (range.end - range.start).try_into().map_err(too_large)?,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, the structure lives through the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        0 => Ok(lock),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const BEFORE: Range<u64> = 0..MIB;
    const BEYOND: Range<u64> = MIB..2 * MIB;
    const WRITER: LockKind = LockKind::Writer;
    const READER: LockKind = LockKind::Reader;

    fn open<const COUNT: usize>() -> [File; COUNT] {
        let file =
            rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC).map(File::from).unwrap();
        std::array::from_fn(|_| {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            File::options().read(true).write(true).open(path).unwrap()
        })
    }

    /// Sets and checks the locks as QEMU does when it uses the permissions `used` and does not share `unshared`. Returns
    /// whether QEMU would open the image.
    fn qemu(file: &File, used: &[u64], unshared: &[u64]) -> bool {
        let lock = |byte: u64| set(file, &(byte..byte + 1), libc::F_RDLCK).is_ok();
        let locked = used.iter().all(|n| lock(100 + n)) && unshared.iter().all(|n| lock(200 + n));
        let free = |byte: u64| !conflicts(file, byte, libc::F_WRLCK).unwrap();
        let allowed = locked && used.iter().all(|n| free(200 + n)) && unshared.iter().all(|n| free(100 + n));
        if !allowed {
            release(file, &WHOLE_FILE);
        }
        allowed
    }

    const READS: &[u64] = &[0];
    const WRITES: &[u64] = &[0, 1];

    #[test]
    fn qemu_and_a_device_exclude_each_other_in_either_order() {
        for range in [BEFORE, BEYOND, WHOLE_FILE] {
            for (kind, used, allowed) in [
                (WRITER, READS, false),
                (WRITER, WRITES, false),
                (READER, READS, true),
                (READER, WRITES, false),
            ] {
                let [device, other] = open();
                lock(&device, &range, kind).unwrap();
                assert_eq!(qemu(&other, used, &[]), allowed, "{range:?} {kind:?} {used:?}");
                let [device, other] = open();
                assert!(qemu(&other, used, &[]));
                assert_eq!(lock(&device, &range, kind).is_ok(), allowed, "{range:?} {kind:?} {used:?}");
                // A shared device does not check for QEMU.
                let [device, other] = open();
                lock(&device, &range, LockKind::Shared).unwrap();
                assert!(qemu(&other, used, &[1]));
            }
        }
    }

    #[test]
    fn windows_that_do_not_overlap_do_not_conflict() {
        for first in [WRITER, READER] {
            for second in [WRITER, READER] {
                for (a, b) in [(BEFORE, BEYOND), (BEYOND, BEFORE)] {
                    let [one, two, three] = open();
                    lock(&one, &a, first).unwrap();
                    lock(&two, &b, second).unwrap();
                    let both_read = first == READER && second == READER;
                    assert_eq!(lock(&three, &(0..2 * MIB), READER).is_ok(), both_read);
                    assert!(lock(&three, &(MIB - 512..MIB + 512), WRITER).is_err());
                    release(&three, &WHOLE_FILE);
                    release(&one, &WHOLE_FILE);
                    release(&two, &WHOLE_FILE);
                    assert!(qemu(&three, WRITES, &[0, 1]), "nothing is left");
                }
            }
        }
    }

    #[test]
    fn a_window_beside_qemu_is_refused_beside_other_windows_too() {
        for (shared, used) in [(true, WRITES), (true, READS), (false, READS)] {
            let [before, other, device] = open();
            lock(&before, &BEFORE, LockKind::of(true, shared)).unwrap();
            assert!(qemu(&other, used, &[]));
            assert!(lock(&device, &BEYOND, WRITER).is_err(), "{shared} {used:?}");
        }
    }

    #[test]
    fn a_writer_becomes_a_reader_while_qemu_tries_to_write() {
        let [device, other] = open();
        lock(&device, &BEYOND, WRITER).unwrap();
        // QEMU has set its lock, and not yet made the check, which will fail.
        set(&other, &(QEMU_WRITES..QEMU_WRITES + 1), libc::F_RDLCK).unwrap();
        downgrade(&device, &BEYOND);
        release(&other, &WHOLE_FILE);
        assert!(!qemu(&other, WRITES, &[]) && qemu(&other, READS, &[1]));
        lock(&other, &BEYOND, READER).unwrap();
    }

    #[test]
    fn writers_stay_excluded_at_every_step_of_a_conversion() {
        let apply = |bytes: &mut Vec<c_int>, (range, l_type): &(Range<u64>, c_int)| {
            for byte in range.start.min(512)..range.end.min(512) {
                bytes[byte as usize] = *l_type;
            }
        };
        let excludes_writers = |bytes: &[c_int]| {
            let at = |byte: u64| bytes[byte as usize];
            at(UNSHARED_WRITES) != libc::F_UNLCK || at(QEMU_WRITES) == libc::F_WRLCK
        };
        for range in [BEFORE, BEYOND, WHOLE_FILE] {
            for (from, to) in [(WRITER, READER), (READER, WRITER), (READER, READER)] {
                let mut bytes = vec![libc::F_UNLCK; 512];
                steps(&range, from).iter().for_each(|step| apply(&mut bytes, step));
                for step in steps(&range, to) {
                    assert!(excludes_writers(&bytes));
                    apply(&mut bytes, &step);
                }
                let mut fresh = vec![libc::F_UNLCK; 512];
                steps(&range, to).iter().for_each(|step| apply(&mut fresh, step));
                assert!(excludes_writers(&bytes) && bytes == fresh, "{range:?} {from:?} {to:?}");
            }
        }
    }
}

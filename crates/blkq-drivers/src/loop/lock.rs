//! Locks on the served bytes of an image, of the open file description: they are released
//! with it, so a killed process leaves none behind.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;

use blkq::{Error, ErrorKind};

/// All bytes that a file may ever have.
pub(crate) const WHOLE_FILE: Range<u64> = 0..1 << 62;

/// The access that others keep to the bytes meanwhile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LockKind {
    /// Nothing: a writer's.
    Exclusive,
    /// Lock them in the same way: a reader's, or a writer's that shares.
    Shared,
}

impl LockKind {
    pub fn of(read_only: bool, shared: bool) -> LockKind {
        if read_only || shared { LockKind::Shared } else { LockKind::Exclusive }
    }
}

/// Locks `range` of `file`, or turns the lock it has there into one of `kind`. Returns a
/// warning if the file system has no locks and `shared` allows to do without.
///
/// # Errors
/// [`ErrorKind::Busy`] if another process' lock forbids it, [`ErrorKind::Unsupported`] if the
/// file system has no locks.
pub(crate) fn acquire(
    file: &File,
    path: &Path,
    range: &Range<u64>,
    kind: LockKind,
    shared: bool,
) -> Result<Option<String>, Error> {
    let Err(error) = lock(file, range, kind, shared) else { return Ok(None) };
    let path = path.display();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => {
            let part = match range {
                range if *range == WHOLE_FILE => "it is".to_owned(),
                Range { start, end } => format!("bytes {start} to {end} are"),
            };
            Err(Error::new(ErrorKind::Busy, format!("{path} is in use: {part} locked")))
        }
        _ if shared => Ok(Some(format!(
            "cannot lock {path} ({error}): other processes can write to it at the same time"
        ))),
        _ => {
            let message = format!(
                "cannot lock {path} ({error}), so another process could use it at the same time; if none does, open it shared"
            );
            Err(Error::new(ErrorKind::Unsupported, message))
        }
    }
}

/// The bytes that QEMU locks in an image, each for reading (its file-posix.c): byte 100 + n if it uses permission n, byte
/// 200 + n if it does not share permission n with other processes. 0 is consistent read, 1 is write. A process locks its
/// bytes first and then checks those of others, so that of two processes at least one notices the conflict.
const QEMU_BYTES: Range<u64> = 100..300;
const QEMU_READS: u64 = 100;
const QEMU_WRITES: u64 = 101;
const KEEPS_READERS_OUT: u64 = 200;
const KEEPS_WRITERS_OUT: u64 = 201;

/// The locks for the access `kind` to `range`, in the order in which they must be set.
///
/// Locks of blkq conflict where they overlap. A range that contains QEMU's bytes, as that of a whole image does, has a
/// writer's lock on them, which QEMU cannot share; a reader uses them as QEMU does. A window beyond them keeps QEMU out
/// with the bytes for what is not shared, which windows of other devices lock as well.
///
/// A lock that keeps writers out is never released before another one does.
fn steps(range: &Range<u64>, kind: LockKind, shared: bool) -> Vec<(Range<u64>, libc::c_int)> {
    let has_qemu = range.start <= QEMU_BYTES.start && QEMU_BYTES.end <= range.end;
    let around = |bytes: Range<u64>| match has_qemu {
        true => vec![range.start..bytes.start, bytes.end..range.end],
        false => vec![range.clone()],
    };
    let lock = |ranges: Vec<Range<u64>>, l_type| ranges.into_iter().map(move |range| (range, l_type));
    let byte = |byte: u64| byte..byte + 1;
    if kind == LockKind::Exclusive {
        let unshared = KEEPS_READERS_OUT..KEEPS_WRITERS_OUT + 1;
        let data = around(unshared.clone());
        return lock(vec![unshared], libc::F_RDLCK).chain(lock(data, libc::F_WRLCK)).collect();
    }
    let data = around(QEMU_BYTES);
    if shared {
        return lock(data, libc::F_RDLCK).collect();
    }
    let (mut used, mut unused) = (vec![byte(KEEPS_WRITERS_OUT)], vec![byte(KEEPS_READERS_OUT)]);
    if has_qemu {
        used.push(byte(QEMU_READS));
        unused = vec![QEMU_WRITES..KEEPS_WRITERS_OUT, KEEPS_WRITERS_OUT + 1..QEMU_BYTES.end];
    }
    used.extend(data);
    lock(used, libc::F_RDLCK).chain(lock(unused, libc::F_UNLCK)).collect()
}

fn lock(file: &File, range: &Range<u64>, kind: LockKind, shared: bool) -> io::Result<()> {
    for (bytes, l_type) in steps(range, kind, shared) {
        set(file, &bytes, l_type)?;
    }
    // Bytes before QEMU's are locked by devices of blkq only. Such a device checked for QEMU itself, and what QEMU's bytes
    // have are its locks.
    let is_qemu = |byte| Ok::<_, io::Error>(is_locked(file, byte)? && !is_locked(file, 0)?);
    let in_use = match kind {
        LockKind::Shared if shared => false,
        LockKind::Shared => is_qemu(QEMU_WRITES)?,
        LockKind::Exclusive => is_qemu(QEMU_WRITES)? || is_qemu(QEMU_READS)?,
    };
    if in_use { Err(io::Error::from_raw_os_error(libc::EAGAIN)) } else { Ok(()) }
}

/// Turns a writer's lock on `range` into a reader's. There is nothing to check, because a writer's lock keeps all others
/// out. A part that cannot be changed stays a writer's, which at worst keeps others from reading the image.
pub(crate) fn downgrade(file: &File, range: &Range<u64>) {
    for (bytes, l_type) in steps(range, LockKind::Shared, false) {
        if set(file, &bytes, l_type).is_err() {
            return;
        }
    }
}

/// Whether another open file has any lock on the byte.
fn is_locked(file: &File, byte: u64) -> io::Result<bool> {
    let mut lock = flock(&(byte..byte + 1), libc::F_WRLCK)?;
    // SAFETY: the descriptor is open, the structure lives through the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } {
        0 => Ok(i32::from(lock.l_type) != libc::F_UNLCK),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Releases all locks of the open file.
pub(crate) fn release_all(file: &File) {
    release(file, &WHOLE_FILE);
}

/// Releases the lock on `range`.
pub(crate) fn release(file: &File, range: &Range<u64>) {
    // A locked range can be unlocked; if not, closing the file does it.
    let _ = set(file, range, libc::F_UNLCK);
}

fn set(file: &File, range: &Range<u64>, l_type: libc::c_int) -> io::Result<()> {
    if range.is_empty() {
        // A length of 0 would mean: to the end of all files.
        return Ok(());
    }
    let lock = flock(range, l_type)?;
    // SAFETY: the descriptor is open, the structure lives through the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn flock(range: &Range<u64>, l_type: libc::c_int) -> io::Result<libc::flock> {
    let too_large = |_| io::Error::from_raw_os_error(libc::EOVERFLOW);
    Ok(libc::flock {
        l_type: l_type as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: range.start.try_into().map_err(too_large)?,
        l_len: (range.end - range.start).try_into().map_err(too_large)?,
        l_pid: 0,
    })
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const BEFORE: Range<u64> = 0..MIB;
    const BEHIND: Range<u64> = MIB..2 * MIB;
    const EXCLUSIVE: LockKind = LockKind::Exclusive;
    const SHARED: LockKind = LockKind::Shared;

    /// Open files of one image.
    fn open<const COUNT: usize>() -> [File; COUNT] {
        let file =
            rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC).map(File::from).unwrap();
        std::array::from_fn(|_| super::super::backing::reopen(&file, Path::new("image"), true).unwrap())
    }

    /// QEMU with permission `used`, which shares none that `unshared` has: its locks, then its checks.
    fn qemu(file: &File, used: &[u64], unshared: &[u64]) -> bool {
        let lock = |byte: u64| set(file, &(byte..byte + 1), libc::F_RDLCK).is_ok();
        let locked = used.iter().all(|n| lock(100 + n)) && unshared.iter().all(|n| lock(200 + n));
        let free = |byte: u64| !is_locked(file, byte).unwrap();
        let allowed = locked && used.iter().all(|n| free(200 + n)) && unshared.iter().all(|n| free(100 + n));
        if !allowed {
            release_all(file);
        }
        allowed
    }

    const READS: &[u64] = &[0];
    const WRITES: &[u64] = &[0, 1];

    #[test]
    fn qemu_and_a_device_keep_each_other_out_whichever_comes_first() {
        for range in [BEFORE, BEHIND, WHOLE_FILE] {
            for (kind, used, allowed) in [
                (EXCLUSIVE, READS, false),
                (EXCLUSIVE, WRITES, false),
                (SHARED, READS, true),
                (SHARED, WRITES, false),
            ] {
                let [device, other] = open();
                lock(&device, &range, kind, false).unwrap();
                assert_eq!(qemu(&other, used, &[]), allowed, "{range:?} {kind:?} {used:?}");
                let [device, other] = open();
                assert!(qemu(&other, used, &[]));
                assert_eq!(
                    lock(&device, &range, kind, false).is_ok(),
                    allowed,
                    "{range:?} {kind:?} {used:?}"
                );
                // A device that is shared does not ask.
                let [device, other] = open();
                lock(&device, &range, SHARED, true).unwrap();
                assert!(qemu(&other, used, &[1]));
            }
        }
    }

    #[test]
    fn windows_that_do_not_overlap_have_devices_of_any_kind() {
        for first in [EXCLUSIVE, SHARED] {
            for second in [EXCLUSIVE, SHARED] {
                for (a, b) in [(BEFORE, BEHIND), (BEHIND, BEFORE)] {
                    let [one, two, three] = open();
                    lock(&one, &a, first, false).unwrap();
                    lock(&two, &b, second, false).unwrap();
                    let both_read = first == SHARED && second == SHARED;
                    assert_eq!(lock(&three, &(0..2 * MIB), SHARED, false).is_ok(), both_read);
                    assert!(lock(&three, &(MIB - 512..MIB + 512), EXCLUSIVE, false).is_err());
                    release_all(&three);
                    release_all(&one);
                    release_all(&two);
                    assert!(qemu(&three, WRITES, &[0, 1]), "nothing is left");
                }
            }
        }
    }

    #[test]
    fn a_writer_becomes_a_reader_while_qemu_tries_to_write() {
        let [device, other] = open();
        lock(&device, &BEHIND, EXCLUSIVE, false).unwrap();
        // Before its check, which fails.
        set(&other, &(QEMU_WRITES..QEMU_WRITES + 1), libc::F_RDLCK).unwrap();
        downgrade(&device, &BEHIND);
        release_all(&other);
        assert!(!qemu(&other, WRITES, &[]) && qemu(&other, READS, &[1]));
        lock(&other, &BEHIND, SHARED, false).unwrap();
    }

    #[test]
    fn writers_are_kept_out_in_every_moment_of_a_change() {
        let apply = |bytes: &mut Vec<libc::c_int>, (range, l_type): &(Range<u64>, libc::c_int)| {
            for byte in range.start.min(512)..range.end.min(512) {
                bytes[byte as usize] = *l_type;
            }
        };
        let keeps_out = |bytes: &[libc::c_int]| {
            let at = |byte: u64| bytes[byte as usize];
            at(KEEPS_WRITERS_OUT) != libc::F_UNLCK || at(QEMU_WRITES) == libc::F_WRLCK
        };
        for range in [BEFORE, BEHIND, WHOLE_FILE] {
            for (from, to) in [(EXCLUSIVE, SHARED), (SHARED, EXCLUSIVE), (SHARED, SHARED)] {
                let mut bytes = vec![libc::F_UNLCK; 512];
                steps(&range, from, false).iter().for_each(|step| apply(&mut bytes, step));
                for step in steps(&range, to, false) {
                    assert!(keeps_out(&bytes));
                    apply(&mut bytes, &step);
                }
                let mut fresh = vec![libc::F_UNLCK; 512];
                steps(&range, to, false).iter().for_each(|step| apply(&mut fresh, step));
                assert!(keeps_out(&bytes) && bytes == fresh, "{range:?} {from:?} {to:?}");
            }
        }
    }
}

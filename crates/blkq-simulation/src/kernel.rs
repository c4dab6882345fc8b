//! The simulated kernel. It executes submitted operations one at a time, in random order. Some transfers are short, and
//! some operations are interrupted or fail. File operations use the simulated file; sockets are real and do not block.

use std::collections::BTreeMap;
use std::ops::Range;

use io_uring::{opcode, squeue};

use blkq::random::{Random, mix};

use crate::file::{SECTOR_BYTES, SimulatedFile};

/// The rates of faults: each number is the average number of operations per fault; 0 means never.
#[derive(Clone, Copy, Default, Debug)]
pub struct Faults {
    pub short: u64,
    /// Operations that do nothing and return EINTR or EAGAIN.
    pub again: u64,
    /// Reads that fail with EIO.
    pub read_error: u64,
    /// Writes that fail with EIO or ENOSPC after writing a random part.
    pub write_error: u64,
    /// Syncs that fail with EIO.
    pub sync_error: u64,
    /// Data that a failed sync, or a failed write with RWF_DSYNC, did not make durable stays in the page cache, is
    /// treated as clean, and is never written. Each open file reports the error once. Linux does this with pages that
    /// it could not write (errseq_t).
    pub failed_sync_forgets: bool,
    /// Discards and writes of zeroes that fail with EIO.
    pub allocate_error: u64,
    pub no_holes: bool,
    pub no_zero_range: bool,
}

/// Silent defects of the simulated kernel or its file. A block layer cannot compensate for them, so a test that checks
/// the block layer must report them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Defect {
    /// Syncs succeed without making anything durable.
    LostSync,
    /// Some writes return success without writing.
    LostWrite,
    /// Some writes return success after writing to another place.
    MisplacedWrite,
    /// Some reads return the durable content instead of later writes.
    StaleRead,
    IgnoredDsync,
    /// Syncs do not make a new size durable.
    LostSize,
    /// Some completions are reported twice.
    CompletedTwice,
    /// Some completions are never reported.
    NeverCompleted,
    /// A write through one registered file is visible through another only after a sync.
    PagesApart,
    /// Trigger files appear to exist after they were removed, or if they were never created.
    GhostFile,
}

/// Average number of operations per occurrence of a defect.
const DEFECT_ONE_IN: u64 = 4;

/// struct io_uring_sqe (include/uapi/linux/io_uring.h), without unused unions.
#[repr(C)]
#[derive(Clone, Copy)]
struct Sqe {
    opcode: u8,
    flags: u8,
    ioprio: u16,
    fd: i32,
    off: u64,
    addr: u64,
    len: u32,
    op_flags: u32,
    user_data: u64,
    buf_index: u16,
    rest: [u16; 11],
}

const _: () = assert!(size_of::<Sqe>() == 64 && size_of::<squeue::Entry>() == 64);

const FIXED_FILE: u8 = 1;
/// IORING_POLL_ADD_MULTI, in the field `len` of a poll.
const POLL_MULTI: u32 = 1;
const MORE: u32 = 1 << 1;
const SOCK_NONEMPTY: u32 = 1 << 2;

struct Pending {
    sqe: Sqe,
    /// Index of its registered file; -1 if it uses a file descriptor.
    slot: i32,
    /// Number of writes of the file at submission.
    writes_before: u64,
}

impl Pending {
    /// Whether this is an operation on the image: all of these use a registered file.
    fn is_of_file(&self) -> bool {
        match self.sqe.opcode {
            opcode::PollAdd::CODE
            | opcode::AsyncCancel::CODE
            | opcode::Recv::CODE
            | opcode::RecvMsg::CODE => false,
            opcode::Write::CODE | opcode::Writev::CODE => self.slot >= 0,
            _ => true,
        }
    }
}

/// The result of an attempt to execute an operation.
enum Tried {
    Completed(i32, u32),
    /// The operation must wait, for example for data on a socket.
    Blocked,
}

pub(crate) struct Cqe {
    pub user_data: u64,
    pub result: i32,
    pub flags: u32,
}

pub(crate) struct Kernel {
    pub faults: Faults,
    pub defect: Option<Defect>,
    pub file: SimulatedFile,
    pub completed: Vec<Cqe>,
    pub dead: bool,
    pub faults_seen: u64,
    pub syncs_failed: u64,
    pub executed: u64,
    pub digest: u64,
    pending: Vec<Pending>,
    /// Number of times that pages were dropped (errseq_t).
    dropped: u64,
    /// The value of `dropped` that each open file has reported.
    reported: BTreeMap<i32, u64>,
    /// The number for files that were opened since the process started: earlier errors are not reported to them.
    reported_before: u64,
    /// With [`Defect::PagesApart`]: the registered file that wrote each sector last.
    writers: BTreeMap<usize, i32>,
}

impl Kernel {
    pub fn new(file_bytes: u64, faults: Faults) -> Kernel {
        Kernel {
            faults,
            defect: None,
            file: SimulatedFile::new(file_bytes),
            completed: Vec::new(),
            dead: false,
            faults_seen: 0,
            syncs_failed: 0,
            executed: 0,
            digest: 0,
            pending: Vec::new(),
            dropped: 0,
            reported: BTreeMap::new(),
            reported_before: 0,
            writers: BTreeMap::new(),
        }
    }

    pub fn submit(&mut self, entries: impl Iterator<Item = squeue::Entry>, files: &[i32]) {
        for entry in entries {
            // SAFETY: both are the 64 bytes that the kernel's interface defines.
            let mut sqe: Sqe = unsafe { std::mem::transmute_copy(&entry) };
            let mut slot = -1;
            if sqe.flags & FIXED_FILE != 0 {
                (slot, sqe.fd) = (sqe.fd, files[sqe.fd as usize]);
                assert!(sqe.fd >= 0, "an entry names a file that is not registered");
            }
            if self.dead {
                self.complete(sqe.user_data, -libc::ECANCELED, 0);
            } else {
                let writes_before = self.file.writes();
                self.pending.push(Pending { sqe, slot, writes_before });
            }
        }
    }

    pub fn execute_some(&mut self, chance: &mut Random) {
        for _ in 0..chance.below(8) {
            if self.pending.is_empty() {
                return;
            }
            let index = chance.below(self.pending.len() as u64) as usize;
            self.execute(index, chance);
        }
    }

    fn execute(&mut self, index: usize, chance: &mut Random) {
        let pending = self.pending.swap_remove(index);
        match self.try_one(&pending, chance) {
            Tried::Completed(result, flags) => {
                self.executed += 1;
                let what = u64::from(pending.sqe.opcode) << 32 | u64::from(result as u32);
                self.digest = mix(self.digest.rotate_left(5) ^ what ^ pending.sqe.off);
                let of_file = pending.is_of_file();
                if of_file && self.has_defect(Defect::NeverCompleted, chance) {
                    return;
                }
                self.complete(pending.sqe.user_data, result, flags);
                if flags & MORE != 0 {
                    self.pending.push(pending);
                    return;
                }
                // Not for operations that the block layer continues after EAGAIN, EINTR or a short transfer: the second
                // completion would arrive while the rest of the transfer uses the same memory.
                let whole = !matches!(-result, libc::EAGAIN | libc::EINTR) && self.faults.short == 0;
                if of_file && whole && self.has_defect(Defect::CompletedTwice, chance) {
                    self.complete(pending.sqe.user_data, result, flags);
                }
            }
            Tried::Blocked => self.pending.push(pending),
        }
    }

    /// Whether the kernel has `defect`, and it occurs now.
    fn has_defect(&self, defect: Defect, chance: &mut Random) -> bool {
        self.defect == Some(defect) && chance.one_in(DEFECT_ONE_IN)
    }

    fn complete(&mut self, user_data: u64, result: i32, flags: u32) {
        self.completed.push(Cqe { user_data, result, flags });
    }

    /// Closes the ring: pending operations and completions are dropped.
    pub fn close(&mut self) {
        self.pending.clear();
        self.completed.clear();
    }

    pub fn kill(&mut self, chance: &mut Random) {
        let mut left = std::mem::take(&mut self.pending);
        while !left.is_empty() {
            let pending = left.swap_remove(chance.below(left.len() as u64) as usize);
            let result = match pending.is_of_file() && chance.one_in(2) {
                true => match self.try_one(&pending, chance) {
                    Tried::Completed(result, _) => result,
                    Tried::Blocked => -libc::ECANCELED,
                },
                false => -libc::ECANCELED,
            };
            self.complete(pending.sqe.user_data, result, 0);
        }
        self.dead = true;
    }

    fn fails(&mut self, chance: &mut Random, one_in: u64) -> bool {
        let fails = chance.one_in(one_in);
        self.faults_seen += u64::from(fails);
        fails
    }

    fn try_one(&mut self, pending: &Pending, chance: &mut Random) -> Tried {
        let (sqe, slot) = (pending.sqe, pending.slot);
        if pending.is_of_file() && chance.one_in(self.faults.again) {
            return Tried::Completed(-[libc::EINTR, libc::EAGAIN][chance.below(2) as usize], 0);
        }
        let completed = |result| Tried::Completed(result, 0);
        match sqe.opcode {
            opcode::Read::CODE | opcode::ReadFixed::CODE => {
                let vector = libc::iovec { iov_base: sqe.addr as *mut _, iov_len: sqe.len as usize };
                completed(self.read(slot, sqe.off as usize, &[vector], chance))
            }
            opcode::Readv::CODE | opcode::ReadvFixed::CODE => {
                completed(self.read(slot, sqe.off as usize, vectors(&sqe), chance))
            }
            opcode::Write::CODE if slot < 0 => {
                let vector = libc::iovec { iov_base: sqe.addr as *mut _, iov_len: sqe.len as usize };
                send(sqe.fd, &[vector], chance)
            }
            opcode::Writev::CODE if slot < 0 => send(sqe.fd, vectors(&sqe), chance),
            opcode::Write::CODE | opcode::WriteFixed::CODE => {
                let vector = libc::iovec { iov_base: sqe.addr as *mut _, iov_len: sqe.len as usize };
                completed(self.write(slot, &sqe, &[vector], chance))
            }
            opcode::Writev::CODE | opcode::WritevFixed::CODE => {
                completed(self.write(slot, &sqe, vectors(&sqe), chance))
            }
            opcode::Fsync::CODE => {
                // Writes that were executed after the submission of the sync may be durable or not.
                let upto = if chance.one_in(2) { pending.writes_before } else { self.file.writes() };
                completed(self.sync(sqe.fd, upto, chance))
            }
            opcode::Fallocate::CODE => completed(self.allocate(&sqe, chance)),
            opcode::PollAdd::CODE if sqe.len & POLL_MULTI != 0 => poll_event(sqe.fd),
            opcode::PollAdd::CODE => poll(sqe.fd),
            opcode::AsyncCancel::CODE => completed(self.cancel(sqe.addr)),
            opcode::Recv::CODE => {
                let vector = libc::iovec { iov_base: sqe.addr as *mut _, iov_len: sqe.len as usize };
                receive(sqe.fd, &[vector], chance)
            }
            opcode::RecvMsg::CODE => receive(sqe.fd, message(&sqe), chance),
            other => panic!("the simulated kernel has no operation {other}"),
        }
    }

    /// Cancels the operation with this user data, if it is not executed yet.
    fn cancel(&mut self, user_data: u64) -> i32 {
        let Some(at) = self.pending.iter().position(|pending| pending.sqe.user_data == user_data) else {
            return -libc::ENOENT;
        };
        self.pending.swap_remove(at);
        self.complete(user_data, -libc::ECANCELED, 0);
        0
    }

    /// Syncs the whole file, without the ring.
    pub fn sync_now(&mut self, fd: i32, chance: &mut Random) -> i32 {
        self.sync(fd, self.file.writes(), chance)
    }

    fn sync(&mut self, fd: i32, upto: u64, chance: &mut Random) -> i32 {
        if self.fails(chance, self.faults.sync_error) {
            self.syncs_failed += 1;
            if self.faults.failed_sync_forgets {
                let all = 0..self.file.bytes();
                self.forget(fd, all, chance);
            }
            return -libc::EIO;
        }
        if self.defect != Some(Defect::LostSync) {
            self.file.sync(upto);
            self.sync_size(fd);
        }
        let reported = self.reported.insert(fd, self.dropped).unwrap_or(self.reported_before);
        if reported == self.dropped { 0 } else { -libc::EIO }
    }

    fn sync_size(&mut self, fd: i32) {
        // SAFETY: an all-zero stat is valid.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one structure, which is a local variable.
        let completed = unsafe { libc::fstat(fd, &raw mut stat) };
        if completed == 0 && self.defect != Some(Defect::LostSize) {
            self.file.durable_bytes = stat.st_size as u64;
        }
    }

    /// Drops dirty pages after a write error, and reports that to `fd`.
    fn forget(&mut self, fd: i32, bytes: Range<usize>, chance: &mut Random) {
        self.file.forget(bytes, chance);
        self.dropped += 1;
        self.reported.insert(fd, self.dropped);
    }

    /// Starts a new process, which has no files open.
    pub fn restart(&mut self) {
        self.dead = false;
        self.completed.clear();
        self.reported.clear();
        self.reported_before = self.dropped;
        self.writers.clear();
    }

    /// Chooses how much of `bytes` is transferred.
    fn portion(&mut self, bytes: usize, chance: &mut Random) -> usize {
        if bytes > 1 && chance.one_in(self.faults.short) {
            // Transfers end at a sector boundary, as those of direct I/O, or anywhere.
            let part = 1 + chance.below(bytes as u64 - 1) as usize;
            let whole = part - part % 512;
            return if whole > 0 && !chance.one_in(8) { whole } else { part };
        }
        bytes
    }

    fn read(&mut self, slot: i32, offset: usize, vectors: &[libc::iovec], chance: &mut Random) -> i32 {
        if self.fails(chance, self.faults.read_error) {
            return -libc::EIO;
        }
        let wanted: usize = vectors.iter().map(|vector| vector.iov_len).sum();
        let total = self.portion(wanted.min(self.file.bytes().saturating_sub(offset)), chance);
        let mut bytes = vec![0; total];
        if self.has_defect(Defect::StaleRead, chance) {
            self.file.read_durable(offset, &mut bytes);
        } else {
            self.file.read(offset, &mut bytes);
        }
        for (sector, _) in self.writers.range(sectors(offset, total)).filter(|(_, writer)| **writer != slot) {
            let own = (sector * SECTOR_BYTES).max(offset)..((sector + 1) * SECTOR_BYTES).min(offset + total);
            self.file.read_durable(own.start, &mut bytes[own.start - offset..own.end - offset]);
        }
        let mut left = &bytes[..];
        for vector in vectors {
            let (now, rest) = left.split_at(vector.iov_len.min(left.len()));
            // SAFETY: the submitter keeps the memory of an operation in flight valid.
            unsafe { now.as_ptr().copy_to_nonoverlapping(vector.iov_base.cast(), now.len()) };
            left = rest;
        }
        total as i32
    }

    fn write(&mut self, slot: i32, sqe: &Sqe, vectors: &[libc::iovec], chance: &mut Random) -> i32 {
        let mut bytes = Vec::new();
        for vector in vectors {
            // SAFETY: as in `read`.
            bytes.extend_from_slice(unsafe {
                std::slice::from_raw_parts(vector.iov_base.cast::<u8>(), vector.iov_len)
            });
        }
        let offset = sqe.off as usize;
        assert!(offset + bytes.len() <= self.file.bytes(), "a write beyond the device");
        let durable = sqe.op_flags & libc::RWF_DSYNC as u32 != 0;
        if self.fails(chance, self.faults.write_error) {
            let part = chance.below(bytes.len() as u64 + 1) as usize;
            self.file.write(offset, &bytes[..part]);
            if durable && self.faults.failed_sync_forgets {
                self.syncs_failed += 1;
                self.forget(sqe.fd, offset..offset + bytes.len(), chance);
                return -libc::EIO;
            }
            return -[libc::EIO, libc::ENOSPC][chance.below(2) as usize];
        }
        let total = self.portion(bytes.len(), chance);
        if self.has_defect(Defect::LostWrite, chance) {
            return total as i32;
        }
        let mut offset = offset;
        if self.has_defect(Defect::MisplacedWrite, chance) {
            let places = (self.file.bytes() - total) / SECTOR_BYTES + 1;
            offset = chance.below(places as u64) as usize * SECTOR_BYTES;
        }
        self.file.write(offset, &bytes[..total]);
        if self.defect == Some(Defect::PagesApart) {
            self.writers.extend(sectors(offset, total).map(|sector| (sector, slot)));
        }
        if durable && self.defect != Some(Defect::IgnoredDsync) {
            self.file.sync_range(offset, total);
            self.sync_size(sqe.fd);
        }
        total as i32
    }

    /// Executes fallocate: `len` is the mode, `addr` the length.
    fn allocate(&mut self, sqe: &Sqe, chance: &mut Random) -> i32 {
        let mode = sqe.len as i32;
        let lacking = if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 {
            self.faults.no_holes
        } else {
            assert!(mode & libc::FALLOC_FL_ZERO_RANGE != 0, "fallocate mode {mode}");
            self.faults.no_zero_range
        };
        if lacking {
            return -libc::EOPNOTSUPP;
        }
        let (offset, bytes) = (sqe.off as usize, sqe.addr as usize);
        assert!(offset + bytes <= self.file.bytes(), "fallocate beyond the device");
        if self.fails(chance, self.faults.allocate_error) {
            return -libc::EIO;
        }
        self.file.write(offset, &vec![0; bytes]);
        0
    }
}

fn sectors(offset: usize, bytes: usize) -> Range<usize> {
    offset / SECTOR_BYTES..(offset + bytes).div_ceil(SECTOR_BYTES)
}

fn vectors(sqe: &Sqe) -> &[libc::iovec] {
    // SAFETY: the submitter keeps the arguments of an operation in flight valid.
    unsafe { std::slice::from_raw_parts(sqe.addr as *const libc::iovec, sqe.len as usize) }
}

fn message(sqe: &Sqe) -> &[libc::iovec] {
    // SAFETY: as above.
    unsafe {
        let message = &*(sqe.addr as *const libc::msghdr);
        std::slice::from_raw_parts(message.msg_iov, message.msg_iovlen)
    }
}

fn poll(fd: i32) -> Tried {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: the kernel writes one structure, which is a local variable.
    match unsafe { libc::poll(&raw mut poll, 1, 0) } {
        1 => Tried::Completed(i32::from(poll.revents), 0),
        _ => Tried::Blocked,
    }
}

/// Executes a multishot poll of an eventfd that has no other reader: it completes for each write of the eventfd.
fn poll_event(fd: i32) -> Tried {
    let Tried::Completed(events, _) = poll(fd) else { return Tried::Blocked };
    let mut count = 0_u64;
    // SAFETY: reads eight bytes into a local variable; the poll has returned, so it does not block.
    unsafe { libc::read(fd, (&raw mut count).cast(), size_of::<u64>()) };
    Tried::Completed(events, MORE)
}

/// The part of `vectors` that begins at byte `skip` and is at most `length` long.
fn cut(vectors: &[libc::iovec], mut skip: usize, mut length: usize) -> Vec<libc::iovec> {
    let mut parts = Vec::new();
    for vector in vectors {
        let skipped = skip.min(vector.iov_len);
        let len = (vector.iov_len - skipped).min(length);
        skip -= skipped;
        length -= len;
        if len > 0 {
            let base = vector.iov_base.wrapping_byte_add(skipped);
            parts.push(libc::iovec { iov_base: base, iov_len: len });
        }
    }
    parts
}

fn header(vectors: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: an all-zero msghdr is an empty message.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = vectors.as_mut_ptr();
    header.msg_iovlen = vectors.len();
    header
}

fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

fn receive(fd: i32, vectors: &[libc::iovec], chance: &mut Random) -> Tried {
    let room: usize = vectors.iter().map(|vector| vector.iov_len).sum();
    let most = if chance.one_in(2) { room } else { 1 + chance.below(room as u64) as usize };
    let mut parts = cut(vectors, 0, most);
    let mut header = header(&mut parts);
    // SAFETY: the submitter keeps the memory of an operation in flight valid.
    let received = unsafe { libc::recvmsg(fd, &raw mut header, libc::MSG_DONTWAIT) };
    match (received, last_errno()) {
        (-1, libc::EAGAIN) => Tried::Blocked,
        (-1, errno) => Tried::Completed(-errno, 0),
        (bytes, _) => {
            let more = matches!(poll(fd), Tried::Completed(..));
            Tried::Completed(bytes as i32, if more { SOCK_NONEMPTY } else { 0 })
        }
    }
}

/// Executes a write to a socket, which may be short.
fn send(fd: i32, vectors: &[libc::iovec], chance: &mut Random) -> Tried {
    let total: usize = vectors.iter().map(|vector| vector.iov_len).sum();
    let most = if chance.one_in(2) { total } else { 1 + chance.below(total as u64) as usize };
    let mut parts = cut(vectors, 0, most);
    let header = header(&mut parts);
    // SAFETY: the submitter keeps the memory of an operation in flight valid.
    let now = unsafe { libc::sendmsg(fd, &raw const header, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    match (now, last_errno()) {
        (-1, libc::EAGAIN) => Tried::Blocked,
        (-1, errno) => Tried::Completed(-errno, 0),
        (bytes, _) => Tried::Completed(bytes as i32, 0),
    }
}

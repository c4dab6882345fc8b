//! The ring of the kernel.

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use io_uring::register::Restriction;
use io_uring::{IoUring, Probe, squeue, types};
use rustix::process::{Resource, getrlimit};

use super::policy::policy;
use super::token::{Cqe, FileSlot, RingCounters, Token, new_ring_id};
use crate::buffer::{IoBuffer, MemoryOwner, RegisteredMemory, Segment};
use crate::error::{Error, ErrorKind};
use crate::ring::buffers::BufferTable;

/// Slots of the table of registered files; fewer where not as many files may be open.
const FILE_SLOTS: u32 = 1024;
const FILE_SLOTS_MIN: u32 = 16;
/// Slots of the table of registered buffers that are filled by [`Ring::register_buffer`].
const BUFFER_SLOTS: u16 = 1024;
/// Slots behind them that are kept for the kernel to fill: as many as a ublk queue has tags.
const KERNEL_SLOTS: u16 = 4096;

/// Drivers' submissions that reach the kernel together while early submission is on; neither fewer nor
/// more were faster (docs/internals/decisions.md).
const EARLY_SUBMISSION_BATCH: u32 = 4;

/// How long a new ring waits for memory. The kernel takes a closed ring apart some time later, and
/// until then its memory is counted as locked by the user that made it (Linux 6.14 on).
const MEMORY_WAIT: Duration = Duration::from_secs(2);
const MEMORY_RETRY: Duration = Duration::from_millis(20);

/// The bytes of buffers that one ring registers at most: a 16th of the memory that may be locked
/// (`RLIMIT_MEMLOCK`). It is one account for all processes of a user, rings that others begin
/// included.
static REGISTERED_MAX: LazyLock<usize> =
    LazyLock::new(|| getrlimit(Resource::Memlock).current.map_or(usize::MAX, |limit| limit as usize / 16));

/// The operations by which a ring registers after its set-up (`IORING_UNREGISTER_FILES`,
/// `IORING_REGISTER_FILES_UPDATE`, `IORING_REGISTER_BUFFERS_UPDATE`).
const REGISTER_OPERATIONS: [u8; 3] = [3, 6, 16];

/// One io_uring, used by the thread that made it and by no other
/// (SINGLE_ISSUER, DEFER_TASKRUN: completions run when that thread asks for them).
pub struct Ring {
    uring: IoUring,
    id: u64,
    probe: Probe,
    files: Vec<u32>,
    buffers: BufferTable,
    /// The slots for the kernel to fill that nobody has.
    kernel_buffers: Range<u16>,
    counters: RingCounters,
    /// Submissions of [`Ring::push_early`] since the last call into the kernel.
    unsubmitted_io: u32,
    /// Completions reaped to make room, before they were asked for.
    reaped: Vec<Cqe>,
    /// Dropping it does not wait for what is in flight.
    abandoned: bool,
}

impl Ring {
    /// A ring with room for `entries` submissions (rounded up to a power of two) and
    /// four times as many completions.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] on kernels before 6.1 or where io_uring is forbidden.
    pub fn new(entries: u32) -> Result<Ring, Error> {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(entries.next_power_of_two() * 4).setup_clamp().setup_submit_all();
        builder.setup_single_issuer().setup_defer_taskrun().setup_coop_taskrun().setup_taskrun_flag();
        if policy().is_some() {
            builder.setup_r_disabled();
        }
        // NO_SQARRAY came with Linux 6.6; without it the ring is the same, with one indirection more.
        let mut without_sqarray = builder.clone();
        without_sqarray.setup_no_sqarray();
        let build = || without_sqarray.build(entries).or_else(|_| builder.build(entries));
        let uring = with_patience(build).map_err(|e| {
            let cure = match e.raw_os_error() {
                Some(libc::EPERM) => "io_uring is forbidden here: set kernel.io_uring_disabled=0 or allow it in the seccomp profile",
                Some(libc::ENOSYS) | Some(libc::EINVAL) => "blkq needs Linux 6.1 or newer",
                Some(libc::ENOMEM) => "too little memory may be locked: raise the limit (ulimit -l), or stop others that use io_uring",
                _ => "see io_uring_setup(2)",
            };
            Error::system("cannot set up io_uring", e).with_cure(cure)
        })?;
        let mut probe = Probe::new();
        let submitter = uring.submitter();
        submitter.register_probe(&mut probe).map_err(|e| Error::system("cannot probe io_uring", e))?;
        // The kernel demands that as many files may be open (EMFILE). A confined process may not ask.
        let mut file_slots = FILE_SLOTS;
        while let Err(e) = submitter.register_files_sparse(file_slots) {
            if e.raw_os_error() != Some(libc::EMFILE) || file_slots <= FILE_SLOTS_MIN {
                return Err(Error::system("cannot register the file table of io_uring", e));
            }
            file_slots /= 2;
        }
        // Without room for locked memory the table stays away and buffers are not registered.
        let slots = BUFFER_SLOTS + KERNEL_SLOTS;
        let (buffer_slots, kernel_buffers) = match submitter.register_buffers_sparse(u32::from(slots)) {
            Ok(()) => (BUFFER_SLOTS, BUFFER_SLOTS..slots),
            Err(_) => (0, 0..0),
        };
        let files = (0..file_slots).rev().collect();
        if let Some(policy) = policy() {
            // The kernel rejects a list with numbers that it does not know.
            let known = policy.operations.iter().copied().filter(|code| probe.is_supported(*code));
            restrict(&uring, known)
                .map_err(|e| Error::system("cannot restrict io_uring to what is needed", e))?;
        }
        let id = new_ring_id();
        Ok(Ring {
            uring,
            id,
            probe,
            files,
            buffers: BufferTable::new(id, buffer_slots, *REGISTERED_MAX),
            kernel_buffers,
            counters: RingCounters::default(),
            unsubmitted_io: 0,
            reaped: Vec::new(),
            abandoned: false,
        })
    }

    /// Whether the kernel knows the operation with number `code` (`opcode::X::CODE`).
    pub fn supports(&self, code: u8) -> bool {
        self.probe.is_supported(code)
    }

    /// Checks that the kernel knows every operation of `needed` (name and number).
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`], naming what is missing.
    pub fn require(&self, needed: &[(&str, u8)]) -> Result<(), Error> {
        let missing: Vec<&str> =
            needed.iter().filter(|(_, code)| !self.supports(*code)).map(|(name, _)| *name).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let message =
            format!("this kernel's io_uring lacks {}: blkq needs Linux 6.1 or newer", missing.join(", "));
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// Puts `entry` into the submission queue under `token`. If the queue is full, what
    /// is in it is submitted first.
    ///
    /// # Safety
    /// Memory and descriptors of the entry must stay valid until its completion is reaped.
    #[inline]
    pub unsafe fn push(&mut self, entry: squeue::Entry, token: Token) {
        let entry = entry.user_data(token.0);
        self.counters.submissions += 1;
        // SAFETY: the caller's promise.
        while unsafe { self.uring.submission().push(&entry) }.is_err() {
            self.submit();
            if self.uring.submission().is_full() {
                self.make_room();
            }
        }
    }

    /// As [`Ring::push`]; what was pushed this way before is submitted first if it is a batch of four, so
    /// that the device works on that while the rest is prepared.
    ///
    /// # Safety
    /// As of [`Ring::push`].
    #[inline]
    pub unsafe fn push_early(&mut self, entry: squeue::Entry, token: Token) {
        if self.unsubmitted_io >= EARLY_SUBMISSION_BATCH {
            self.counters.early_submissions += 1;
            self.submit();
        }
        self.unsubmitted_io += 1;
        // SAFETY: the caller's promise.
        unsafe { self.push(entry, token) }
    }

    /// The kernel takes nothing more while its completions are not taken (EBUSY), or while
    /// it has no memory (EAGAIN): takes them, for [`Ring::reap_all`] to give out.
    #[cold]
    fn make_room(&mut self) {
        let mut reaped = std::mem::take(&mut self.reaped);
        self.reap_all(&mut reaped);
        self.reaped = reaped;
    }

    /// Whether there is anything to submit.
    #[inline]
    pub fn has_submissions(&mut self) -> bool {
        !self.uring.submission().is_empty()
    }

    /// Submits what is in the queue, without waiting.
    pub fn submit(&mut self) {
        self.enter(0, None);
    }

    /// Submits what is in the queue and has the kernel enter what has completed, where it does so only when
    /// it is called; waits for nothing.
    #[cfg(fuzzing)]
    pub fn poll(&mut self) {
        let mut queue = self.uring.submission();
        queue.sync();
        let count = queue.len() as u32;
        if count == 0 && !queue.taskrun() {
            return;
        }
        drop(queue);
        (self.counters.enters, self.unsubmitted_io) = (self.counters.enters + 1, 0);
        const IORING_ENTER_GETEVENTS: u32 = 1;
        // SAFETY: no argument is passed, and what is submitted is as for `enter`.
        let entered =
            unsafe { self.uring.submitter().enter::<libc::sigset_t>(count, 0, IORING_ENTER_GETEVENTS, None) };
        assert!(entered.is_ok(), "io_uring_enter: {entered:?}");
    }

    /// Submits what is in the queue and waits for `want` completions or until `timeout`
    /// has passed. Being interrupted, or timed out, is not an error: check for completions.
    pub fn enter(&mut self, want: usize, timeout: Option<Duration>) {
        self.counters.enters += 1;
        self.unsubmitted_io = 0;
        // Completions that were reaped have arrived: there is nothing to wait for.
        let want = if self.reaped.is_empty() { want } else { 0 };
        let submitter = self.uring.submitter();
        let result = match timeout {
            Some(timeout) if want > 0 => {
                let timespec = types::Timespec::from(timeout);
                let args = types::SubmitArgs::new().timespec(&timespec);
                submitter.submit_with_args(want, &args)
            }
            _ => submitter.submit_and_wait(want),
        };
        if let Err(error) = result {
            match error.raw_os_error() {
                // EBUSY: the completion queue is full; the caller reaps next.
                Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN) => {}
                // EBADF, EFAULT, EINVAL, ...: the ring itself is broken, which only a defect of this
                // program can bring about; going on would lose I/O silently.
                _ => panic!("io_uring_enter: {error}"),
            }
        }
    }

    /// Moves every completion that has arrived to the end of `into`.
    pub fn reap_all(&mut self, into: &mut Vec<Cqe>) {
        into.append(&mut self.reaped);
        let before = into.len();
        into.extend(self.uring.completion().map(|cqe| Cqe {
            token: Token(cqe.user_data()),
            result: cqe.result(),
            flags: cqe.flags(),
        }));
        self.counters.completions += (into.len() - before) as u64;
    }

    /// Puts `fd` into the ring's file table.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if the table is full or the kernel refuses.
    pub fn register_file(&mut self, fd: BorrowedFd<'_>) -> Result<FileSlot, Error> {
        let Some(slot) = self.files.pop() else {
            return Err(Error::new(ErrorKind::System, "the ring's file table is full"));
        };
        match self.update_file(slot, fd.as_raw_fd()) {
            Ok(()) => Ok(FileSlot::new(self.id, slot)),
            Err(e) => {
                self.files.push(slot);
                Err(Error::system("cannot register a file with io_uring", e))
            }
        }
    }

    /// A registered file, to be named in an entry.
    ///
    /// # Panics
    /// If it is not registered here.
    #[inline]
    pub fn file(&self, slot: &FileSlot) -> types::Fixed {
        slot.of_ring(self.id)
    }

    /// Takes a file out of the table. Operations in flight keep it open.
    ///
    /// # Panics
    /// If it is not registered here.
    pub fn unregister_file(&mut self, slot: &mut FileSlot) {
        let slot = slot.take(self.id);
        if self.update_file(slot, -1).is_ok() {
            self.files.push(slot);
        }
    }

    fn update_file(&mut self, slot: u32, fd: RawFd) -> std::io::Result<()> {
        self.uring.submitter().register_files_update(slot, &[fd]).map(|_| ())
    }

    /// Registers `buffer` with the ring, so that direct I/O need not pin its pages each
    /// time. Not being able to (locked-memory limit, table full) is no error: the buffer
    /// then stays as it is.
    pub fn register_buffer(&mut self, buffer: &mut IoBuffer) {
        self.register_front(buffer, buffer.len());
    }

    /// [`Ring::register_buffer`] for the first `bytes` of `buffer`.
    pub fn register_front(&mut self, buffer: &mut IoBuffer, bytes: usize) {
        if !self.buffers.has_room(bytes) {
            self.unregister_dropped();
        }
        let Some(place) = self.buffers.insert(buffer, bytes) else { return };
        let iovec = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: bytes };
        // SAFETY: the kernel pins the pages itself; unregistering or closing the ring unpins them.
        // An entry names the place only for memory of the buffer (`Ring::registered_buffer`).
        let done =
            unsafe { self.uring.submitter().register_buffers_update(u32::from(place), &[iovec], None) };
        if done.is_err() {
            self.buffers.remove(place, true);
            buffer.clear_registration();
        }
    }

    /// Undoes [`Ring::register_buffer`] and [`Ring::register_front`].
    pub fn unregister_buffer(&mut self, buffer: &mut IoBuffer) {
        let Some(place) = self.buffers.place(buffer.segment().registered) else { return };
        self.unregister_place(place);
        buffer.clear_registration();
    }

    /// Registers the `bytes` from `start` on: at most [`REGISTERED_MEMORY_MAX_BYTES`]. Memory that was
    /// dropped leaves the table first.
    ///
    /// [`REGISTERED_MEMORY_MAX_BYTES`]: super::REGISTERED_MEMORY_MAX_BYTES
    ///
    /// # Errors
    /// As [`Registrar::register_memory`](super::Registrar::register_memory).
    ///
    /// # Safety
    /// As there.
    pub unsafe fn register_memory(
        &mut self,
        start: NonNull<u8>,
        bytes: usize,
        owner: MemoryOwner,
    ) -> Result<RegisteredMemory, Error> {
        self.unregister_dropped();
        let Some((place, number)) = self.buffers.insert_memory(owner) else {
            let message = "the ring's table of registered buffers is full";
            return Err(Error::new(ErrorKind::System, message));
        };
        let iovec = libc::iovec { iov_base: start.as_ptr().cast(), iov_len: bytes };
        // SAFETY: as in `register_buffer`; the caller promises that the memory is mapped for as long as
        // its owner lives, which the table keeps until the kernel has let go of the pages.
        let done =
            unsafe { self.uring.submitter().register_buffers_update(u32::from(place), &[iovec], None) };
        match done {
            Ok(_) => Ok(RegisteredMemory::new(number)),
            Err(error) => {
                self.buffers.remove(place, true);
                Err(Error::system("cannot register memory with io_uring", error))
            }
        }
    }

    /// The place of the registered buffer that `segment` lies in, to be named in an entry; none if
    /// this ring has none, or not all of the segment is registered.
    #[inline]
    pub fn registered_buffer(&self, segment: &Segment) -> Option<u16> {
        if segment.registered == Segment::UNREGISTERED {
            return None;
        }
        self.buffers.place_of(segment)
    }

    /// Takes buffers and memory out of the table that were dropped while they were registered.
    pub fn unregister_dropped(&mut self) {
        while let Some(place) = self.buffers.next_dropped() {
            self.unregister_place(place);
        }
    }

    fn unregister_place(&mut self, place: u16) {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: an empty entry unpins the pages of the place.
        let done =
            unsafe { self.uring.submitter().register_buffers_update(u32::from(place), &[empty], None) };
        self.buffers.remove(place, done.is_ok());
    }

    /// How many slots [`Ring::keep_kernel_buffers`] can still keep.
    pub fn kernel_buffers_left(&self) -> u16 {
        self.kernel_buffers.len() as u16
    }

    /// Keeps `count` slots of the table of registered buffers for the kernel to fill; the first
    /// of them. They are kept for as long as the ring.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if there are not so many.
    pub fn keep_kernel_buffers(&mut self, count: u16) -> Result<u16, Error> {
        let Range { start, end } = self.kernel_buffers;
        if count > end - start {
            return Err(Error::new(ErrorKind::System, "the ring's table of registered buffers is full"));
        }
        self.kernel_buffers.start += count;
        Ok(start)
    }

    /// Something on registered files that does not complete by itself is in flight when the ring is
    /// dropped: the kernel completes it, and closes the files, some time later.
    pub fn abandon(&mut self) {
        self.abandoned = true;
    }

    /// The counters of the ring.
    pub fn counters(&self) -> RingCounters {
        self.counters
    }
}

/// A thread that is confined may not ask what rings ask once: this asks.
pub(super) fn read_limits() {
    LazyLock::force(&REGISTERED_MAX);
}

/// Calls `build`, and again while there is no memory for it.
fn with_patience(build: impl Fn() -> std::io::Result<IoUring>) -> std::io::Result<IoUring> {
    let begin = Instant::now();
    loop {
        match build() {
            Err(e) if e.raw_os_error() == Some(libc::ENOMEM) && begin.elapsed() < MEMORY_WAIT => {
                thread::sleep(MEMORY_RETRY);
            }
            result => return result,
        }
    }
}

/// Has `uring`, which is not enabled yet, carry out `operations` and nothing else, and enables it.
fn restrict(uring: &IoUring, operations: impl Iterator<Item = u8>) -> std::io::Result<()> {
    let flags = (squeue::Flags::FIXED_FILE | squeue::Flags::ASYNC).bits();
    let mut all = vec![Restriction::sqe_flags_allowed(flags)];
    all.extend(REGISTER_OPERATIONS.map(Restriction::register_op));
    all.extend(operations.map(Restriction::sqe_op));
    uring.submitter().register_restrictions(&mut all)?;
    uring.submitter().register_enable_rings()
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel takes a ring apart some time after it was closed. The files shall be
        // free at once: a user may wait to unmount what they are on. It waits for their use.
        if !self.abandoned {
            let _ = self.uring.submitter().unregister_files();
        }
    }
}

#[cfg(test)]
mod tests;

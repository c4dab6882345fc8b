use std::os::fd::RawFd;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use io_uring::register::Restriction;
use io_uring::{IoUring, Probe, squeue, types};
use rustix::process::{Resource, getrlimit};

use super::interface::{Cqe, RingCounters, Token, policy};
use super::tables::Tables;
use crate::error::Error;

/// The number of slots of the table of registered files. Halved while the process cannot open that many.
const FILE_SLOTS: u32 = 1024;
const FILE_SLOTS_MIN: u32 = 16;
/// The number of slots of the table of registered buffers that [`Registrar`](super::Registrar) fills.
const BUFFER_SLOTS: u16 = 1024;
/// The number of further slots, which only the kernel fills: as many as a ublk queue can have tags.
const KERNEL_SLOTS: u16 = 4096;

/// Drivers' submissions that reach the kernel together while early submission is on; neither fewer nor
/// more were faster (docs/internals/decisions.md).
const EARLY_SUBMISSION_BATCH: u32 = 4;

/// How long setting up a ring is retried if there is no memory for it. The kernel frees a closed ring some
/// time later, and until then charges its memory to the user's locked memory (Linux 6.14 and newer).
const MEMORY_WAIT: Duration = Duration::from_secs(2);
const MEMORY_RETRY: Duration = Duration::from_millis(20);

/// The largest number of bytes of buffers that one ring registers: a sixteenth of the memory that may be
/// locked (`RLIMIT_MEMLOCK`). The limit applies to all processes of a user together, so other rings and
/// processes must be left a share.
static REGISTERED_MAX: LazyLock<usize> =
    LazyLock::new(|| getrlimit(Resource::Memlock).current.map_or(usize::MAX, |limit| limit as usize / 16));

/// The operations of io_uring_register(2) that a ring needs after its set-up (`IORING_UNREGISTER_FILES`,
/// `IORING_REGISTER_FILES_UPDATE`, `IORING_REGISTER_BUFFERS_UPDATE`).
const REGISTER_OPERATIONS: [u8; 3] = [3, 6, 16];

/// One io_uring, which only the thread that set it up may use (SINGLE_ISSUER, DEFER_TASKRUN: the kernel posts
/// completions when that thread enters it).
pub struct Ring {
    uring: IoUring,
    probe: Probe,
    pub(super) tables: Tables,
    pub(super) counters: RingCounters,
    /// The number of submissions through [`Ring::push_early`] since the last call into the kernel.
    unsubmitted_io: u32,
    /// Completions that were reaped before [`Ring::reap_all`] to make room in the completion queue.
    reaped: Vec<Cqe>,
}

impl Ring {
    /// Sets up a ring with room for `entries` submissions, rounded up to a power of two, and four times as
    /// many completions. Fails with [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) on kernels older than 6.1 or where io_uring is
    /// forbidden.
    pub fn new(entries: u32) -> Result<Ring, Error> {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(entries.next_power_of_two() * 4).setup_clamp().setup_submit_all();
        builder.setup_single_issuer().setup_defer_taskrun().setup_coop_taskrun().setup_taskrun_flag();
        if policy().is_some() {
            builder.setup_r_disabled();
        }
        // NO_SQARRAY exists since Linux 6.6. Without it, the ring works the same with one more indirection.
        let mut without_sqarray = builder.clone();
        without_sqarray.setup_no_sqarray();
        let build = || without_sqarray.build(entries).or_else(|_| builder.build(entries));
        let uring = retry_without_memory(build).map_err(|e| {
            let hint = match e.raw_os_error() {
                Some(libc::EPERM) => "io_uring is forbidden here: set kernel.io_uring_disabled=0 or allow it in the seccomp profile",
                Some(libc::ENOSYS) | Some(libc::EINVAL) => "blkq needs Linux 6.1 or newer",
                Some(libc::ENOMEM) => "raise the limit on locked memory (ulimit -l), or stop other programs that use io_uring",
                _ => "see io_uring_setup(2)",
            };
            Error::system("cannot set up io_uring", e).with_hint(hint)
        })?;
        let mut probe = Probe::new();
        let submitter = uring.submitter();
        submitter
            .register_probe(&mut probe)
            .map_err(|e| Error::system("cannot query the operations of io_uring", e))?;
        // The kernel fails with EMFILE if the process may not open that number of files. The limit is not
        // queried, because a confined process may not query it.
        let mut file_slots = FILE_SLOTS;
        while let Err(e) = submitter.register_files_sparse(file_slots) {
            if e.raw_os_error() != Some(libc::EMFILE) || file_slots <= FILE_SLOTS_MIN {
                return Err(Error::system("cannot register the file table of io_uring", e));
            }
            file_slots /= 2;
        }
        // Without enough lockable memory, the ring has no table of buffers, and buffers are not registered.
        let slots = u32::from(BUFFER_SLOTS + KERNEL_SLOTS);
        let has_buffers = submitter.register_buffers_sparse(slots).is_ok();
        let (buffer_slots, kernel_slots) = if has_buffers { (BUFFER_SLOTS, KERNEL_SLOTS) } else { (0, 0) };
        if let Some(policy) = policy() {
            // The kernel rejects a list that contains unknown operations.
            let known = policy.operations.iter().copied().filter(|code| probe.is_supported(*code));
            restrict(&uring, known)
                .map_err(|e| Error::system("cannot restrict io_uring to the operations that blkq uses", e))?;
        }
        Ok(Ring {
            uring,
            probe,
            tables: Tables::new(file_slots, buffer_slots, *REGISTERED_MAX, kernel_slots),
            counters: RingCounters::default(),
            unsubmitted_io: 0,
            reaped: Vec::new(),
        })
    }

    pub fn supports(&self, code: u8) -> bool {
        self.probe.is_supported(code)
    }

    /// Adds `entry` to the submission queue under `token`. A full queue is submitted first.
    ///
    /// # Safety
    /// Memory and descriptors of the entry must stay valid until its completion is reaped.
    #[inline]
    pub unsafe fn push(&mut self, entry: squeue::Entry, token: Token) {
        let entry = entry.user_data(token.0);
        self.counters.submissions += 1;
        // SAFETY: the caller keeps the entry's memory and descriptors valid.
        while unsafe { self.uring.submission().push(&entry) }.is_err() {
            self.enter(0, None);
            if self.uring.submission().is_full() {
                self.make_room();
            }
        }
    }

    /// Adds an entry as [`Ring::push`] does. If a batch of `EARLY_SUBMISSION_BATCH` entries was added this
    /// way, the batch is submitted first, so that the device works on it while the caller prepares the rest.
    ///
    /// # Safety
    /// The requirements of [`Ring::push`] apply.
    #[inline]
    pub unsafe fn push_early(&mut self, entry: squeue::Entry, token: Token) {
        if self.unsubmitted_io >= EARLY_SUBMISSION_BATCH {
            self.counters.early_submissions += 1;
            self.enter(0, None);
        }
        self.unsubmitted_io += 1;
        // SAFETY: the caller keeps the entry's memory and descriptors valid.
        unsafe { self.push(entry, token) }
    }

    /// Reaps completions into `reaped`, for [`Ring::reap_all`]. The kernel accepts no submissions while the
    /// completion queue is full (EBUSY) or it has no memory (EAGAIN).
    #[cold]
    fn make_room(&mut self) {
        let mut reaped = std::mem::take(&mut self.reaped);
        self.reap_all(&mut reaped);
        self.reaped = reaped;
    }

    pub fn has_submissions(&mut self) -> bool {
        !self.uring.submission().is_empty()
    }

    /// Submits the queued entries and lets the kernel post completions, which a DEFER_TASKRUN ring does only
    /// inside a system call. Does not wait.
    #[cfg(fuzz_interface)]
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
        // SAFETY: no argument is passed, and the submitted entries meet the same requirements as in `enter`.
        let entered =
            unsafe { self.uring.submitter().enter::<libc::sigset_t>(count, 0, IORING_ENTER_GETEVENTS, None) };
        assert!(entered.is_ok(), "io_uring_enter: {entered:?}");
    }

    /// Submits the queued entries and waits for `want` completions or until `timeout` has passed. An
    /// interrupted or timed-out wait is not an error: the caller checks for completions.
    pub fn enter(&mut self, want: usize, timeout: Option<Duration>) {
        self.counters.enters += 1;
        self.unsubmitted_io = 0;
        // Reaped completions have already arrived, so there is no need to wait.
        let want = if self.reaped.is_empty() { want } else { 0 };
        let submitter = self.uring.submitter();
        let result = match timeout.map(types::Timespec::from) {
            Some(timespec) if want > 0 => {
                submitter.submit_with_args(want, &types::SubmitArgs::new().timespec(&timespec))
            }
            _ => submitter.submit_and_wait(want),
        };
        // EBUSY: the completion queue is full, and the caller reaps it next. EBADF, EFAULT, EINVAL and others mean
        // that the ring is broken, which only a defect of this program can cause. Continuing would lose I/O
        // silently.
        if let Err(error) = result
            && !matches!(error.raw_os_error(), Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN))
        {
            panic!("io_uring_enter: {error}");
        }
    }

    /// Moves all completions that have arrived to the end of `into`.
    pub fn reap_all(&mut self, into: &mut Vec<Cqe>) {
        into.append(&mut self.reaped);
        into.extend(self.uring.completion().map(|cqe| Cqe {
            token: Token(cqe.user_data()),
            result: cqe.result(),
            flags: cqe.flags(),
        }));
    }

    pub(super) fn update_file(&mut self, slot: u32, fd: RawFd) -> std::io::Result<()> {
        self.uring.submitter().register_files_update(slot, &[fd]).map(|_| ())
    }

    /// Registers `bytes` bytes from `start` on in slot `place` of the kernel's table. No bytes from a null pointer
    /// release what the slot had.
    pub(super) fn update_buffer(&mut self, place: u16, start: *mut u8, bytes: usize) -> std::io::Result<()> {
        let iovec = libc::iovec { iov_base: start.cast(), iov_len: bytes };
        // SAFETY: the kernel pins the pages itself, and unpins them when the slot is released or the ring is closed.
        // An entry names the slot only for memory of its buffer (`Ring::registered_buffer`), or of its owner
        // (`Registrar::register_memory`).
        unsafe { self.uring.submitter().register_buffers_update(u32::from(place), &[iovec], None) }
            .map(|_| ())
    }
}

/// Reads the process limits that new rings use. A confined thread may no longer read them.
pub(super) fn read_limits() {
    LazyLock::force(&REGISTERED_MAX);
}

/// Calls `build` until it does not fail with ENOMEM, for at most [`MEMORY_WAIT`].
fn retry_without_memory(build: impl Fn() -> std::io::Result<IoUring>) -> std::io::Result<IoUring> {
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

/// Restricts `uring`, which must not be enabled yet, to `operations`, and enables it.
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
        // The kernel frees a ring some time after it was closed. Unregistering the files releases them
        // immediately, because a user may wait to unmount their file system. The call waits for operations on
        // the files.
        if !self.tables.abandoned {
            let _ = self.uring.submitter().unregister_files();
        }
    }
}

#[cfg(test)]
mod tests;

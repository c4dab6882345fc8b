//! The memory of a trace: a header, the write position of each queue, and the rings of pages.

use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::limits::QUEUES_MAX;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The number of words of a page. Under the model checkers, a page has only its first word and one record.
pub(super) const PAGE_WORDS: usize = if cfg!(model_check) { 6 } else { 512 };
/// The number of bytes of a page. The ring of a queue is a whole number of pages.
pub const PAGE_BYTES: u64 = PAGE_WORDS as u64 * 8;
/// The minimum size of a queue's ring, in bytes: two pages, one complete while the other is written.
pub const RING_BYTES_MIN: u64 = 2 * PAGE_BYTES;
/// The maximum memory of a trace, in bytes.
pub const MEMORY_MAX_BYTES: u64 = 1 << 30;

/// "blkqtrc" and the version of the memory format.
const MAGIC: u64 = u64::from_be_bytes(*b"blkqtrc\x02");
/// The number of words of the header: magic number, number of queues, pages per ring, and padding.
const HEADER_WORDS: usize = 16;
/// The number of words from one write position to the next. Two positions share no cache line, and no pair of
/// lines that processors fetch together.
const POSITION_WORDS: usize = 16;

/// The location of a queue's ring. Indices count words of the memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingPlace {
    /// The index of the write position, which counts the words since the trace began, unused ends included.
    pub position: usize,
    /// The index of the number of events written.
    pub events: usize,
    first: usize,
    pub pages: u64,
}

impl RingPlace {
    /// The index of the word at `position`.
    pub fn word(&self, position: u64) -> usize {
        self.first + (position % (self.pages * PAGE_WORDS as u64)) as usize
    }
}

/// The mapped memory of a trace: a memory file that no process can truncate, and that only the process that
/// created it can write.
pub struct TraceMemory {
    words: Words,
    queues: usize,
    pages: u64,
    writable: bool,
}

impl TraceMemory {
    /// Creates a memory for `queues` queues, each with a ring of `ring_bytes` bytes: a multiple of
    /// [`PAGE_BYTES`], at least [`RING_BYTES_MIN`].
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if a number is out of range, or the total exceeds [`MEMORY_MAX_BYTES`];
    /// [`ErrorKind::System`] if the kernel cannot provide the memory.
    pub fn new(queues: usize, ring_bytes: u64) -> Result<Arc<TraceMemory>, Error> {
        let pages = ring_bytes / PAGE_BYTES;
        if !ring_bytes.is_multiple_of(PAGE_BYTES) {
            let why = format!("must be a multiple of {PAGE_BYTES} bytes, not {ring_bytes}");
            return Err(Error::new(ErrorKind::Invalid, format!("the trace ring of a queue {why}")));
        }
        let words = Words::new(words_of(queues, pages)?)?;
        for (word, value) in words.all().iter().zip([MAGIC, queues as u64, pages]) {
            word.store(value, Relaxed);
        }
        Ok(Arc::new(TraceMemory { words, queues, pages, writable: true }))
    }

    /// The number of queues for which the memory has rings.
    pub fn queue_count(&self) -> usize {
        self.queues
    }

    /// Whether this process created the memory, and therefore may write it.
    pub(super) fn is_writable(&self) -> bool {
        self.writable
    }

    pub(super) fn place(&self, queue: usize) -> Option<RingPlace> {
        let first = first_page(self.queues) + queue * self.pages as usize * PAGE_WORDS;
        let position = HEADER_WORDS + queue * POSITION_WORDS;
        let place = RingPlace { position, events: position + 1, first, pages: self.pages };
        (queue < self.queues).then_some(place)
    }

    pub(super) fn words(&self) -> &[AtomicU64] {
        self.words.all()
    }
}

/// The index of the first ring's first word.
fn first_page(queues: usize) -> usize {
    HEADER_WORDS + queues * POSITION_WORDS
}

fn words_of(queues: usize, pages: u64) -> Result<usize, Error> {
    let invalid = |why: &str| {
        let message =
            format!("a trace of {queues} queues with {pages} pages of {PAGE_BYTES} bytes each{why}");
        Err(Error::new(ErrorKind::Invalid, message))
    };
    if !(1..=QUEUES_MAX).contains(&queues) || !(2..=MEMORY_MAX_BYTES / PAGE_BYTES).contains(&pages) {
        let pages_max = MEMORY_MAX_BYTES / PAGE_BYTES;
        return invalid(&format!(": it must have 1 to {QUEUES_MAX} queues with 2 to {pages_max} pages"));
    }
    let words = first_page(queues) + queues * pages as usize * PAGE_WORDS;
    if words as u64 > MEMORY_MAX_BYTES / 8 {
        return invalid(&format!(
            " needs {} MiB of memory, more than the maximum of {} MiB",
            words >> 17,
            MEMORY_MAX_BYTES >> 20
        ));
    }
    Ok(words)
}

#[cfg(not(model_check))]
use mapped::Words;
#[cfg(model_check)]
use twin::Words;

#[cfg(not(model_check))]
mod mapped {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

    use rustix::fs::{
        MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
    };
    use rustix::mm::{Advice, ProtFlags, madvise};

    use super::*;
    use crate::words::MappedWords;

    pub(in super::super) struct Words {
        file: OwnedFd,
        mapped: MappedWords,
    }

    fn no_memory() -> Error {
        Error::new(ErrorKind::Invalid, "the descriptor is not the memory of a trace")
    }

    fn failed(what: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
        move |e| Error::new(ErrorKind::System, format!("cannot {what} the trace memory: {e}"))
    }

    impl Words {
        /// Creates a file of `len` words, all 0. Its size is sealed, and no process can map it for writing
        /// from now on.
        pub fn new(len: usize) -> Result<Words, Error> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = memfd_create("blkq-trace", flags).map_err(failed("create"))?;
            ftruncate(&file, len as u64 * 8).map_err(failed("set the size of"))?;
            let words = Words::map(file, len, ProtFlags::READ | ProtFlags::WRITE)?;
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
            fcntl_add_seals(&words.file, seals).map_err(failed("seal"))?;
            // Allocates the pages now, so that no page fault delays I/O later. If the kernel cannot do that, pages
            // are allocated on first use.
            // SAFETY: the mapping was just created, and its content does not change.
            let _ = unsafe {
                madvise(words.all().as_ptr().cast_mut().cast(), len * 8, Advice::LinuxPopulateWrite)
            };
            Ok(words)
        }

        fn map(file: OwnedFd, len: usize, protection: ProtFlags) -> Result<Words, Error> {
            // SAFETY: the file has `len` words, and cannot shrink. Other processes access them only as atomics, and
            // `TraceMemory::is_writable` is false if they are mapped for reading.
            let mapped = unsafe { MappedWords::map(&file, 0, len, protection) }.map_err(failed("map"))?;
            Ok(Words { file, mapped })
        }

        pub fn all(&self) -> &[AtomicU64] {
            self.mapped.all()
        }
    }

    impl TraceMemory {
        /// The memory file, for another process.
        pub fn file(&self) -> BorrowedFd<'_> {
            self.words.file.as_fd()
        }

        /// Maps the memory that another process created, for reading.
        ///
        /// # Errors
        /// [`ErrorKind::Invalid`] if the file is not the memory of a trace or can be truncated;
        /// [`ErrorKind::Unsupported`] if it has another format version; [`ErrorKind::System`] if it cannot be
        /// mapped.
        pub fn open(file: OwnedFd) -> Result<Arc<TraceMemory>, Error> {
            let seals = fcntl_get_seals(&file).map_err(failed("read the seals of"))?;
            let bytes = fstat(&file).map_err(failed("read the size of"))?.st_size;
            let len = usize::try_from(bytes / 8).unwrap_or(0);
            // A file that can be truncated could kill its reader with SIGBUS.
            if len == 0 || !seals.contains(SealFlags::SHRINK) {
                return Err(no_memory());
            }
            let words = Words::map(file, len, ProtFlags::READ)?;
            let [magic, queues, pages, ..] = words.all() else { return Err(no_memory()) };
            // Relaxed: the process that created the memory wrote the header before it sent the file.
            let magic = magic.load(Relaxed);
            if magic >> 8 == MAGIC >> 8 && magic != MAGIC {
                let (other, own) = (magic as u8, MAGIC as u8);
                let message = format!("the trace has format {other}, and this program reads format {own}");
                return Err(Error::new(ErrorKind::Unsupported, message));
            }
            let (queues, pages) = (queues.load(Relaxed), pages.load(Relaxed));
            let queues = usize::try_from(queues).map_err(|_| no_memory())?;
            if magic != MAGIC || words_of(queues, pages)? != words.all().len() {
                return Err(no_memory());
            }
            Ok(Arc::new(TraceMemory { words, queues, pages, writable: false }))
        }
    }
}

/// A replacement for the model checkers, whose atomics are larger than words.
#[cfg(model_check)]
mod twin {
    use super::*;

    pub(in super::super) struct Words(Box<[AtomicU64]>);

    impl Words {
        pub fn new(len: usize) -> Result<Words, Error> {
            Ok(Words((0..len).map(|_| AtomicU64::new(0)).collect()))
        }

        pub fn all(&self) -> &[AtomicU64] {
            &self.0
        }
    }
}

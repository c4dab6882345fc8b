//! The memory of a trace: a header, how much was written of each queue, and the rings of pages.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::limits::QUEUES_MAX;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Words of a page. Under the model checkers it has its first word and one record.
pub(super) const PAGE_WORDS: usize = if cfg!(model_check) { 6 } else { 512 };
/// Bytes of a page: a queue's ring has a whole number of them.
pub const PAGE_BYTES: u64 = PAGE_WORDS as u64 * 8;
/// Least memory of a queue's ring, in bytes: of two pages one is whole.
pub const RING_BYTES_MIN: u64 = 2 * PAGE_BYTES;
/// Most memory of a trace, in bytes.
pub const MEMORY_MAX_BYTES: u64 = 1 << 30;

/// "blkqtrc" and the version of the format.
const MAGIC: u64 = u64::from_be_bytes(*b"blkqtrc\x02");
/// The words of the header: magic, queues, pages of each.
const HEADER_WORDS: usize = 16;
/// Words from one position to the next: no two of them share a cache line, or two that are fetched together.
const POSITION_WORDS: usize = 16;

/// Where the ring of a queue is, in words.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingPlace {
    /// How many words were written since the trace began, the unused rest of pages among them.
    pub position: usize,
    /// How many events they stand for.
    pub events: usize,
    first: usize,
    /// Pages that it consists of.
    pub pages: u64,
}

impl RingPlace {
    /// Where the word at `position` is.
    pub fn word(&self, position: u64) -> usize {
        self.first + (position % (self.pages * PAGE_WORDS as u64)) as usize
    }
}

/// The memory of a trace, mapped: a memory file that nobody truncates, and that nobody but its maker
/// can write.
pub struct TraceMemory {
    words: Words,
    queues: usize,
    pages: u64,
    writable: bool,
}

impl TraceMemory {
    /// Makes a memory for as many `queues`, each with a ring of `ring_bytes`: a multiple of [`PAGE_BYTES`],
    /// at least [`RING_BYTES_MIN`].
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for other numbers, and more than [`MEMORY_MAX_BYTES`]; [`ErrorKind::System`]
    /// if the kernel gives no memory.
    pub fn new(queues: usize, ring_bytes: u64) -> Result<Arc<TraceMemory>, Error> {
        let pages = ring_bytes / PAGE_BYTES;
        if !ring_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(Error::new(ErrorKind::Invalid, format!("a ring of {ring_bytes} bytes")));
        }
        let words = Words::new(words_of(queues, pages)?)?;
        for (word, value) in words.all().iter().zip([MAGIC, queues as u64, pages]) {
            word.store(value, Relaxed);
        }
        Ok(Arc::new(TraceMemory { words, queues, pages, writable: true }))
    }

    /// The memory, for another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.words.file()
    }

    /// Maps the memory that another process made, to read it.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if it is none, or could be truncated; [`ErrorKind::System`] if it cannot be
    /// mapped.
    pub fn open(file: OwnedFd) -> Result<Arc<TraceMemory>, Error> {
        let words = Words::open(file)?;
        let [magic, queues, pages, ..] = words.all() else { return Err(no_memory()) };
        let magic = magic.load(Relaxed);
        if magic >> 8 == MAGIC >> 8 && magic != MAGIC {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("the trace is of format {}, not {}", magic as u8, MAGIC as u8),
            ));
        }
        let (queues, pages) = (queues.load(Relaxed), pages.load(Relaxed));
        let queues = usize::try_from(queues).map_err(|_| no_memory())?;
        if magic != MAGIC || words_of(queues, pages)? != words.all().len() {
            return Err(no_memory());
        }
        Ok(Arc::new(TraceMemory { words, queues, pages, writable: false }))
    }

    /// How many queues it has rings for.
    pub fn queue_count(&self) -> usize {
        self.queues
    }

    /// Whether this process made it.
    pub(super) fn is_writable(&self) -> bool {
        self.writable
    }

    /// Bytes of each queue's ring.
    pub fn ring_bytes(&self) -> u64 {
        self.pages * PAGE_BYTES
    }

    pub(super) fn place(&self, queue: usize) -> Option<RingPlace> {
        let first = first_page(self.queues) + queue * self.pages as usize * PAGE_WORDS;
        let position = HEADER_WORDS + queue * POSITION_WORDS;
        let place = RingPlace { position, events: position + 1, first, pages: self.pages };
        (queue < self.queues).then_some(place)
    }

    #[inline]
    pub(super) fn words(&self) -> &[AtomicU64] {
        self.words.all()
    }
}

fn no_memory() -> Error {
    Error::new(ErrorKind::Invalid, "the descriptor is not the memory of a trace")
}

/// Where the first ring begins.
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
        return invalid("");
    }
    let words = first_page(queues) + queues * pages as usize * PAGE_WORDS;
    if words as u64 > MEMORY_MAX_BYTES / 8 {
        return invalid(&format!(" is {} MiB, and may be {} MiB", words >> 17, MEMORY_MAX_BYTES >> 20));
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
    use std::ptr::NonNull;
    use std::sync::atomic::AtomicU64;

    use rustix::fs::{
        MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
    };
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

    use crate::error::{Error, ErrorKind};

    /// A memory file, mapped.
    pub(in super::super) struct Words {
        file: OwnedFd,
        first: NonNull<AtomicU64>,
        len: usize,
    }

    // SAFETY: it owns its mapping, of which nothing is tied to a thread.
    unsafe impl Send for Words {}
    // SAFETY: all access to it is atomic.
    unsafe impl Sync for Words {}

    fn failed(what: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
        move |e| Error::new(ErrorKind::System, format!("the memory of a trace: {what}: {e}"))
    }

    impl Words {
        /// Makes a file of so many words, all 0: its size stays, and from now on nobody maps it to write.
        pub fn new(len: usize) -> Result<Words, Error> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = memfd_create("blkq-trace", flags).map_err(failed("memfd_create"))?;
            ftruncate(&file, len as u64 * 8).map_err(failed("its size"))?;
            let words = Words::map(file, len, ProtFlags::READ | ProtFlags::WRITE)?;
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
            fcntl_add_seals(&words.file, seals).map_err(failed("sealing it"))?;
            // Better a page fault now than one per page while I/O waits. The kernel may do
            // less, and nothing is lost.
            // SAFETY: the mapping just made; its bytes stay as they are.
            let _ = unsafe { madvise(words.first.as_ptr().cast(), len * 8, Advice::LinuxPopulateWrite) };
            Ok(words)
        }

        /// Maps a file that another process made, to read it.
        pub fn open(file: OwnedFd) -> Result<Words, Error> {
            let seals = fcntl_get_seals(&file).map_err(failed("its seals"))?;
            let bytes = fstat(&file).map_err(failed("its size"))?.st_size;
            let len = usize::try_from(bytes / 8).unwrap_or(0);
            // One that is truncated would kill who reads it.
            if len == 0 || !seals.contains(SealFlags::SHRINK) {
                return Err(super::no_memory());
            }
            Words::map(file, len, ProtFlags::READ)
        }

        fn map(file: OwnedFd, len: usize, protection: ProtFlags) -> Result<Words, Error> {
            let null = std::ptr::null_mut();
            // SAFETY: a new mapping at an address of the kernel's choice touches nothing.
            let base = unsafe { mmap(null, len * 8, protection, MapFlags::SHARED, &file, 0) };
            let base = base.map_err(failed("mapping it"))?;
            let first = NonNull::new(base.cast()).ok_or_else(super::no_memory)?;
            Ok(Words { file, first, len })
        }

        /// All of them. Those of a mapping without the right to write are only to be read.
        #[inline]
        pub fn all(&self) -> &[AtomicU64] {
            // SAFETY: so many words are mapped as long as this lives, and the file does not get shorter;
            // pages are aligned, and other processes change the words as atomics may be changed.
            unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
        }

        pub fn file(&self) -> BorrowedFd<'_> {
            self.file.as_fd()
        }
    }

    impl Drop for Words {
        fn drop(&mut self) {
            // SAFETY: the mapping made by `map`, to which no reference is left.
            let _ = unsafe { munmap(self.first.as_ptr().cast(), self.len * 8) };
        }
    }
}

/// The twin for the model checkers, whose atomics are larger than words.
#[cfg(model_check)]
mod twin {
    use std::os::fd::{BorrowedFd, OwnedFd};

    use crate::error::Error;
    use crate::sync::atomic::AtomicU64;

    pub(in super::super) struct Words(Box<[AtomicU64]>);

    impl Words {
        pub fn new(len: usize) -> Result<Words, Error> {
            Ok(Words((0..len).map(|_| AtomicU64::new(0)).collect()))
        }

        pub fn open(_file: OwnedFd) -> Result<Words, Error> {
            Err(super::no_memory())
        }

        pub fn all(&self) -> &[AtomicU64] {
            &self.0
        }

        pub fn file(&self) -> BorrowedFd<'_> {
            unreachable!("a model has no other process")
        }
    }
}

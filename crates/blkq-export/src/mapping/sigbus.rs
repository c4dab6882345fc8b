//! Memory that shrinks: a front end may truncate the file of its guest's memory while it is mapped
//! here. A thread that touches a page that was truncated gets SIGBUS, which would kill the daemon.
//!
//! So the handler of this module puts memory of this process's own, all zeroes, in the place of the
//! whole region, notes that the region is broken, and lets the thread go on. Rings on such memory are
//! stopped in the next turn. It finds the region in a table that it reads without a lock, and calls
//! nothing but mmap(2). A fault anywhere else goes to the handler that was there before.

use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

use blkq::{Error, ErrorKind};

/// Most regions mapped at a time, of all devices of the process.
const SLOTS: usize = 1024;

/// A mapped range. `version` is odd while the rest changes: the handler then knows that the slot is
/// not that of the faulting thread, whose mapping cannot come or go meanwhile.
struct Slot {
    version: AtomicU64,
    start: AtomicUsize,
    bytes: AtomicUsize,
    page: AtomicUsize,
    taken: AtomicBool,
    broken: AtomicBool,
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        version: AtomicU64::new(0),
        start: AtomicUsize::new(0),
        bytes: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
        taken: AtomicBool::new(false),
        broken: AtomicBool::new(false),
    }
}; SLOTS];

impl Slot {
    fn set(&self, start: usize, bytes: usize, page: usize) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.page.store(page, Ordering::Relaxed);
        self.broken.store(false, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// Start, bytes and page size if `address` is inside.
    fn find(&self, address: usize) -> Option<(usize, usize, usize)> {
        let before = self.version.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        let bytes = self.bytes.load(Ordering::Relaxed);
        let page = self.page.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let stable = before.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == before;
        (stable && address.checked_sub(start).is_some_and(|at| at < bytes)).then_some((start, bytes, page))
    }
}

/// A range that faults may hit; until it is released.
pub struct Guard {
    slot: &'static Slot,
}

impl Guard {
    /// Enters `bytes` from `start` on, mapped with pages of `page` bytes, into the table; the first
    /// one installs the handler.
    ///
    /// # Errors
    /// [`ErrorKind::Resource`] if the table is full; the error of sigaction(2).
    pub fn new(start: usize, bytes: usize, page: usize) -> Result<Guard, Error> {
        install()?;
        let free = |slot: &&Slot| {
            slot.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let Some(slot) = TABLE.iter().find(free) else {
            let message = format!("shared memory: all {SLOTS} regions that can be mapped are in use");
            return Err(Error::new(ErrorKind::Invalid, message));
        };
        slot.set(start, bytes, page);
        Ok(Guard { slot })
    }

    /// Whether a fault hit it.
    #[inline]
    pub fn is_broken(&self) -> bool {
        self.slot.broken.load(Ordering::Relaxed)
    }

    /// Takes it out of the table. Must be called once, before the range is unmapped.
    pub fn release(&self) {
        self.slot.set(0, 0, 0);
        self.slot.taken.store(false, Ordering::Release);
    }
}

/// The former action.
static FORMER: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the handler, once for the process.
fn install() -> Result<(), Error> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let mut former = MaybeUninit::<libc::sigaction>::uninit();
        // SAFETY: asks for the action only, and has room for it.
        if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), former.as_mut_ptr()) } != 0 {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL));
        }
        // SAFETY: the call above wrote it. It is there before the handler, which reads it.
        let _ = FORMER.set(unsafe { former.assume_init() });
        set_handler()
    });
    installed.map_err(|errno| Error::system("cannot handle SIGBUS", std::io::Error::from_raw_os_error(errno)))
}

fn set_handler() -> Result<(), i32> {
    // SAFETY: zeroes are no flags and an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction =
        handle as extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
    // SAFETY: the handler does only what a handler may: loads, stores, mmap(2), sigaction(2), and what
    // the former one does.
    match unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)),
    }
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: errno of this thread; the kernel passes a siginfo_t that is valid during the call.
    let (errno, code, address) =
        unsafe { (*libc::__errno_location(), (*info).si_code, (*info).si_addr().addr()) };
    // A signal that a process sent has no address, and a code of at most 0.
    let is_fault = code > 0;
    if !is_fault || !replace(address) {
        forward(signal, info, context, is_fault);
    }
    // SAFETY: errno of this thread.
    unsafe { *libc::__errno_location() = errno };
}

/// Puts zeroes in the place of the mapping that has `address`; false if none has, or if the kernel
/// has no memory for that.
fn replace(address: usize) -> bool {
    let Some((slot, (start, bytes, page))) =
        TABLE.iter().find_map(|slot| slot.find(address).map(|range| (slot, range)))
    else {
        return false;
    };
    // First: a thread that sees the zeroes must find it broken.
    slot.broken.store(true, Ordering::SeqCst);
    let mapped = |start: usize, bytes: usize| {
        let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let address = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: the range is one whole mapping of guest memory, or a page of it, which stays mapped
        // as long as this thread, which has just accessed it, holds it. Nothing here assumes that
        // its bytes stay what they are.
        let new = unsafe { libc::mmap(address, bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        new != libc::MAP_FAILED
    };
    // All of it, so that no more faults come; or, where that is more memory than may be promised, the
    // page that is gone.
    mapped(start, bytes) || mapped(start + (address - start) / page * page, page)
}

/// Does what was done before this handler was there. For a fault that may be to restore the former
/// action, by which the same fault then kills; for a signal that was sent it must not be, as faults in
/// guest memory could then come.
fn forward(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void, is_fault: bool) {
    let Some(former) = FORMER.get() else { return };
    match former.sa_sigaction {
        libc::SIG_IGN if !is_fault => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: an action that this process had.
            unsafe { libc::sigaction(signal, former, std::ptr::null_mut()) };
            if !is_fault {
                // SAFETY: sends to this thread, which dies of it.
                unsafe { libc::raise(signal) };
            }
        }
        function if former.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: the flag says that this is such a function.
            let function: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(function) };
            function(signal, info, context);
        }
        function => {
            // SAFETY: without the flag it is one of this kind.
            let function: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(function) };
            function(signal);
        }
    }
    // The handler of the standard library removes itself.
    if !is_fault && former.sa_sigaction != libc::SIG_DFL {
        let _ = set_handler();
    }
}

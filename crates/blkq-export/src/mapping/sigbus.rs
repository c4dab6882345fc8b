//! Handles the truncation of mapped files, such as a front end's file of guest memory. A thread that touches
//! a truncated page gets SIGBUS, which would kill the daemon.
//!
//! The signal handler replaces the whole region with zeroed private memory, marks it as broken and returns,
//! so that the thread continues. In the next turn, the engine stops the virtqueues that use broken memory.
//! The handler finds the region in a table without a lock, and its only system call is mmap(2) for a fault in
//! the table. Any other fault goes to the handler that was installed before.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

use blkq::{Error, ErrorKind};

/// Number of regions that can be mapped at the same time, by all devices of the process.
const SLOTS: usize = 1024;

/// A sequence lock: `version` is odd while the other fields change. A handler skips such a slot: the faulting
/// thread holds its own mapping, whose slot does not change meanwhile.
pub struct Slot {
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
    /// Only the owner of the slot calls this, so it can load `version` relaxed. The release fence keeps the
    /// odd version before the fields, and the release store publishes the fields with the even version;
    /// `find` pairs them with acquire.
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

    fn find(&self, address: usize) -> Option<(usize, usize, usize)> {
        let before = self.version.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        let bytes = self.bytes.load(Ordering::Relaxed);
        let page = self.page.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let stable = before.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == before;
        (stable && address.checked_sub(start).is_some_and(|at| at < bytes)).then_some((start, bytes, page))
    }

    /// Adds the range, mapped with pages of `page` bytes, to the table. The first call installs the handler.
    /// Fails with [`ErrorKind::System`] if the table is full, or the error of sigaction(2).
    pub fn take(start: usize, bytes: usize, page: usize) -> Result<&'static Slot, Error> {
        install()?;
        // Acquire pairs with the release in `Slot::release`: the former owner has cleared the slot.
        let free = |slot: &&Slot| {
            slot.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let Some(slot) = TABLE.iter().find(free) else {
            let message = format!("shared memory: all {SLOTS} regions that can be mapped are in use");
            return Err(Error::new(ErrorKind::System, message));
        };
        slot.set(start, bytes, page);
        Ok(slot)
    }

    pub fn is_broken(&self) -> bool {
        // Relaxed: the handler runs on the thread that faults, so that thread sees the flag. Others see it in
        // a later turn.
        self.broken.load(Ordering::Relaxed)
    }

    /// Removes the range from the table. The owner must call this exactly once, before it unmaps the range.
    pub fn release(&self) {
        self.set(0, 0, 0);
        self.taken.store(false, Ordering::Release);
    }
}

/// The action that was installed before this module's handler.
static FORMER: OnceLock<libc::sigaction> = OnceLock::new();

fn install() -> Result<(), Error> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        // SAFETY: all zeroes is a valid sigaction: no flags and an empty mask.
        let mut former: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: a null pointer as the new action only queries the current one, and `former` has room for
        // it.
        checked(unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut former) })?;
        // FORMER is set before the handler that reads it is installed.
        let _ = FORMER.set(former);
        set_handler()
    });
    installed.map_err(|errno| Error::system("cannot handle SIGBUS", std::io::Error::from_raw_os_error(errno)))
}

fn set_handler() -> Result<(), i32> {
    // SAFETY: all zeroes is a valid sigaction: no flags and an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction =
        handle as extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
    // SAFETY: the handler does only what is allowed in a signal handler: loads, stores, mmap(2),
    // sigaction(2), and what the former handler does.
    checked(unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) })
}

/// The errno of a system call that returned `result`, if it failed.
fn checked(result: libc::c_int) -> Result<(), i32> {
    match result {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)),
    }
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: errno is that of this thread, and the kernel passes a siginfo_t that is valid during the call.
    let (errno, code, address) =
        unsafe { (*libc::__errno_location(), (*info).si_code, (*info).si_addr().addr()) };
    // A fault has a code above 0 and an address. A signal that a process sent has a code of at most 0 and no
    // address.
    let is_fault = code > 0;
    if !is_fault || !replace(address) {
        forward(signal, info, context, is_fault);
    }
    // SAFETY: errno is that of this thread.
    unsafe { *libc::__errno_location() = errno };
}

/// Maps zeroes over the range with `address`. Returns false if no range has it, or without memory.
fn replace(address: usize) -> bool {
    let Some((slot, (start, bytes, page))) =
        TABLE.iter().find_map(|slot| slot.find(address).map(|range| (slot, range)))
    else {
        return false;
    };
    // The flag is set before the zeroes are mapped: a thread that reads the zeroes must find the range
    // broken.
    slot.broken.store(true, Ordering::SeqCst);
    let mapped = |start: usize, bytes: usize| {
        let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let address = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: the range is one whole mapping of guest memory, or one page of it. The faulting thread
        // holds the mapping, so it stays mapped. No code assumes that the bytes of guest memory stay
        // unchanged.
        let new = unsafe { libc::mmap(address, bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        new != libc::MAP_FAILED
    };
    // Replaces the whole range, so that no further faults follow. If the kernel does not commit that much
    // memory, only the truncated page is replaced.
    mapped(start, bytes) || mapped(start + (address - start) / page * page, page)
}

/// Passes the signal to the former action. For a fault, this may restore that action: the same access faults
/// again and kills the process. After a signal from a process, this module's handler must stay installed.
fn forward(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void, is_fault: bool) {
    let Some(former) = FORMER.get() else { return };
    match former.sa_sigaction {
        libc::SIG_IGN if !is_fault => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: this action was installed in this process before.
            unsafe { libc::sigaction(signal, former, std::ptr::null_mut()) };
            if !is_fault {
                // SAFETY: raises the signal on this thread, whose default action kills the process.
                unsafe { libc::raise(signal) };
            }
        }
        function if former.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: SA_SIGINFO says that the handler has this signature.
            let function: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(function) };
            function(signal, info, context);
        }
        function => {
            // SAFETY: without SA_SIGINFO, the handler has this signature.
            let function: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(function) };
            function(signal);
        }
    }
    // The SIGBUS handler of Rust's standard library removes itself when it is called, so this module's
    // handler is installed again.
    if !is_fault && former.sa_sigaction != libc::SIG_DFL {
        let _ = set_handler();
    }
}

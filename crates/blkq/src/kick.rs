//! shim
use std::os::fd::*;
use std::sync::atomic::*;
pub(crate) struct Kick {
    fd: OwnedFd,
    state: AtomicU32,
}
impl Kick {
    pub fn new() -> Result<Kick, crate::Error> {
        Ok(Kick {
            fd: rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
                .map_err(|e| crate::Error::system("eventfd", e))?,
            state: AtomicU32::new(0),
        })
    }
    pub fn kick(&self) {
        if self.state.compare_exchange(1, 2, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }
    pub fn prepare_sleep(&self) {
        self.state.store(1, Ordering::SeqCst);
    }
    pub fn woke(&self) {
        self.state.store(0, Ordering::SeqCst);
    }
    pub fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
impl crate::tags::Wake for Kick {
    fn wake(&self) {
        self.kick()
    }
}
pub(crate) struct PendingMap(AtomicU64);
impl PendingMap {
    pub fn new(_n: usize) -> Self {
        PendingMap(AtomicU64::new(0))
    }
    pub fn set(&self, i: usize) -> bool {
        self.0.fetch_or(1 << i, Ordering::SeqCst) & (1 << i) == 0
    }
    pub fn take(&self, i: usize) -> bool {
        self.0.fetch_and(!(1 << i), Ordering::SeqCst) & (1 << i) != 0
    }
    pub fn any(&self) -> bool {
        self.0.load(Ordering::SeqCst) != 0
    }
}

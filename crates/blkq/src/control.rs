//! shim
use std::sync::atomic::*;
use std::time::Duration;
pub(crate) struct DiskControl {
    frozen: AtomicU32,
    generation: AtomicU64,
    active: Vec<AtomicU32>,
}
impl DiskControl {
    pub fn new(n: usize) -> Self {
        DiskControl {
            frozen: AtomicU32::new(0),
            generation: AtomicU64::new(0),
            active: (0..n).map(|_| AtomicU32::new(0)).collect(),
        }
    }
    pub fn enter(&self, q: usize) -> bool {
        self.active[q].swap(1, Ordering::SeqCst);
        if self.is_frozen() {
            self.active[q].store(0, Ordering::SeqCst);
            false
        } else {
            true
        }
    }
    pub fn leave(&self, q: usize) {
        self.active[q].store(0, Ordering::SeqCst);
    }
    pub fn begin_dispatch(&self, _q: usize) -> bool {
        self.active[_q].swap(3, Ordering::SeqCst);
        true
    }
    pub fn end_dispatch(&self, _q: usize) {
        self.active[_q].store(1, Ordering::Release);
    }
    pub fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::SeqCst) > 0
    }
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }
    pub fn freeze_timeout(&self, _t: Duration, mut k: impl FnMut(usize)) -> bool {
        self.frozen.fetch_add(1, Ordering::SeqCst);
        for q in 0..self.active.len() {
            k(q);
            while self.active[q].load(Ordering::SeqCst) != 0 {
                std::thread::yield_now();
            }
        }
        true
    }
    pub fn freeze(&self, k: impl FnMut(usize)) {
        self.freeze_timeout(Duration::MAX, k);
    }
    pub fn unfreeze(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.frozen.fetch_sub(1, Ordering::SeqCst);
    }
    pub fn quiesce(&self) {}
    pub fn unquiesce(&self) {}
}

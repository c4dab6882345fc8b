//! shim
use crate::sync::atomic::AtomicU32;
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum Direction {
    Read,
    Write,
}
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct Batcher;
impl Batcher {
    #[allow(missing_docs)]
    pub fn new() -> Batcher {
        Batcher
    }
}
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct GateCounters;
#[allow(missing_docs)]
pub struct RequestGate {
    _n: AtomicU32,
}
#[allow(missing_docs)]
impl RequestGate {
    pub fn new(_n: u32, _b: bool) -> Self {
        RequestGate { _n: AtomicU32::new(0) }
    }
    pub fn enter(&self, _d: Direction, _b: &mut Batcher, _now: impl Fn() -> u64, _before: impl FnMut()) {}
    pub fn try_enter(&self, _d: Direction, _b: &mut Batcher, _now: impl Fn() -> u64) -> bool {
        true
    }
    pub fn leave(&self, _d: Direction, _n: u32) {}
    pub fn set(&self, _n: u32, _b: bool) {}
    pub fn counters(&self) -> GateCounters {
        GateCounters
    }
}

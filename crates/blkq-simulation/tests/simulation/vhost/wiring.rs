//! The configuration of a machine, and the defects that its device may have.

use blkq::random::Random;

/// Defects of a device, simulated by changes of the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tamper {
    /// After a daemon was killed, the record lacks a request that was in flight.
    ForgetsInFlight,
    /// Some chains are used twice.
    CompletesTwice,
    /// Some reads are used before their data is in memory.
    UsedBeforeData,
    /// Some bytes outside of the buffers change.
    StrayByte,
    /// The device writes the status of a request after its ring was stopped.
    WritesAfterStop,
}

#[derive(Clone, Debug)]
pub struct Wiring {
    pub rings: usize,
    pub size: u16,
    pub packed: bool,
    pub event_idx: bool,
    pub indirect: bool,
    /// Whether the front end keeps a record of requests in flight.
    pub inflight: bool,
    /// Whether the driver negotiates flushes.
    pub flushes: bool,
    /// Whether the driver negotiates switching the write cache.
    pub switches: bool,
}

impl Wiring {
    pub fn new(chance: &mut Random) -> Wiring {
        Wiring {
            rings: 1 + chance.below(3) as usize,
            size: [4, 4, 8, 16, 64][chance.below(5) as usize],
            packed: chance.one_in(2),
            event_idx: chance.one_in(2),
            indirect: chance.one_in(2),
            inflight: !chance.one_in(8),
            flushes: !chance.one_in(8),
            switches: chance.one_in(2),
        }
    }
}

//! How a machine is made, and the defects that its device may have.

use blkq::random::Random;

/// Changes of memory by the world, as a device with a defect would make them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tamper {
    /// After a daemon was killed the record has lost a request that was in flight.
    ForgetsInFlight,
    /// Now and then a chain is used twice.
    CompletesTwice,
    /// Now and then a read is used before its data is there.
    UsedBeforeData,
    /// Now and then a byte beside the buffers changes.
    StrayByte,
    /// A request of a ring that has stopped gets its status.
    WritesAfterStop,
}

/// How the machine is made.
#[derive(Clone, Debug)]
pub struct Wiring {
    pub rings: usize,
    pub size: u16,
    pub packed: bool,
    pub event_idx: bool,
    pub indirect: bool,
    /// The front end keeps a record of requests in flight.
    pub inflight: bool,
    /// The driver knows to flush, and to switch the write cache.
    pub flushes: bool,
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

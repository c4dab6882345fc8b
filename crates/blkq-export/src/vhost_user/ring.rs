//! A ring of either kind, and its chains in flight.

use std::sync::Arc;

use super::chain::{Chain, Head, RingError};
pub use super::descriptor::RingSpec;
use super::inflight::InflightQueue;
use super::memory::GuestMemory;
use super::packed::PackedRing;
use super::split::SplitRing;
use crate::mapping::Mapping;

/// Most descriptors of a ring (virtio 1.2, 2.7 and 2.8).
pub const RING_SIZE_MAX: u16 = 1 << 15;

enum Kind {
    Split(SplitRing),
    Packed(PackedRing),
}

#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod publication_tests;
#[cfg(test)]
mod tests;

/// The device's side of a ring. No two chains in flight have the same head.
pub struct Ring {
    kind: Kind,
    in_flight: Box<[bool]>,
    count: usize,
    memory: Arc<GuestMemory>,
    record: Option<Arc<Mapping>>,
}

macro_rules! either {
    ($kind:expr, $ring:ident => $call:expr) => {
        match $kind {
            Kind::Split($ring) => $call,
            Kind::Packed($ring) => $call,
        }
    };
}

impl Ring {
    /// Opens the ring in `memory`. Chains in flight are recorded in `inflight`. If a killed daemon has left
    /// chains there, [`Ring::pop`] returns these first, in their order, and the record determines where the
    /// ring continues. Fails for an invalid size or base, a part that is not inside one memory region, or a
    /// record that does not fit.
    pub fn new(
        memory: Arc<GuestMemory>,
        spec: &RingSpec,
        inflight: Option<InflightQueue>,
    ) -> Result<Ring, RingError> {
        if spec.size == 0 || spec.size > RING_SIZE_MAX {
            return Err(RingError::Size { size: spec.size.into() });
        }
        let record = inflight.as_ref().map(|queue| Arc::clone(queue.area.mapping()));
        let mut seen = vec![false; usize::from(spec.size)];
        let mut twice = |head: u16| std::mem::replace(&mut seen[usize::from(head)], true);
        let mut kind = match spec.packed {
            true => Kind::Packed(PackedRing::new(&memory, spec)?),
            false => Kind::Split(SplitRing::new(&memory, spec)?),
        };
        if let Some(queue) = inflight {
            either!(&mut kind, ring => ring.record(queue))?;
        }
        if either!(&kind, ring => ring.recovered().any(&mut twice)) {
            return Err(RingError::Inflight { what: "a chain is recorded twice" });
        }
        Ok(Ring { kind, in_flight: vec![false; usize::from(spec.size)].into(), count: 0, memory, record })
    }

    /// Takes the next chain into `chain`, and returns its head; `None` if there is none. The error is the
    /// rule that the driver broke: afterwards, only chains in flight can complete.
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<Option<Head>, RingError> {
        let Some(head) = either!(&mut self.kind, ring => ring.pop(chain))? else { return Ok(None) };
        if std::mem::replace(&mut self.in_flight[usize::from(head.index)], true) {
            return Err(RingError::HeadInFlight { head: head.index });
        }
        self.count += 1;
        Ok(Some(head))
    }

    /// Adds a chain, of which the device has written `written` bytes. The driver sees it after
    /// [`Ring::publish`]. Panics if the chain is not in flight.
    #[inline]
    pub fn push_used(&mut self, head: Head, written: u32) {
        let was = std::mem::replace(&mut self.in_flight[usize::from(head.index)], false);
        assert!(was, "a chain completes only once");
        self.count -= 1;
        either!(&mut self.kind, ring => ring.push_used(head, written));
    }

    #[inline]
    pub fn has_recovered(&self) -> bool {
        either!(&self.kind, ring => ring.recovered().next().is_some())
    }

    /// Publishes the used chains. Returns whether the driver must be called.
    #[inline]
    pub fn publish(&mut self) -> bool {
        either!(&mut self.kind, ring => ring.publish())
    }

    /// Asks for a kick at the next chain. Returns whether a chain is available already: it may cause no kick.
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        either!(&mut self.kind, ring => ring.enable_kicks())
    }

    /// The position at which the ring continues (GET_VRING_BASE). Valid when no chain is in flight.
    pub fn base(&self) -> u32 {
        either!(&self.kind, ring => ring.base())
    }

    /// Whether the file of the ring, of guest memory or of the record was truncated. The ring must then stop.
    #[inline]
    pub fn is_broken(&self) -> bool {
        self.memory.is_broken() || self.record.as_ref().is_some_and(|mapping| mapping.is_broken())
    }

    /// The number of chains that were taken and are not used yet.
    #[cfg(any(test, fuzz_interface))]
    pub fn in_flight(&self) -> usize {
        self.count
    }
}

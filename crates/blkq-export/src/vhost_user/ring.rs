//! A ring of either kind, and its chains in flight.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

pub use super::chain::RingSpec;
use super::chain::{Chain, Head, RingError, RingParts};
use super::inflight::{InflightQueue, Recovered};
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
    /// Chains that were in flight when the previous device was killed. The next one is last.
    recovered: Vec<Recovered>,
    /// The driver was not called yet since the ring was opened. It is called once in any case, because it may
    /// wait for a call that the previous device did not make.
    call_first: bool,
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
        let parts = RingParts::open(&memory, spec)?;
        let mut kind = match spec.packed {
            true => Kind::Packed(PackedRing::new(parts, spec.base)?),
            false => Kind::Split(SplitRing::new(parts, spec.base)?),
        };
        let mut recovered = Vec::new();
        if let Some(queue) = inflight {
            recovered = either!(&mut kind, ring => ring.record(queue))?;
        }
        let mut seen = vec![false; usize::from(spec.size)];
        let is_twice = |chain: &Recovered| std::mem::replace(&mut seen[usize::from(chain.head.index)], true);
        if recovered.iter().any(is_twice) {
            return Err(RingError::Inflight { what: "a chain is recorded twice" });
        }
        let in_flight = vec![false; usize::from(spec.size)].into();
        Ok(Ring { kind, in_flight, recovered, call_first: true, memory, record })
    }

    /// Takes the next chain into `chain`, and returns its head; `None` if there is none. The error is the
    /// rule that the driver broke: afterwards, only chains in flight can complete.
    pub fn pop(&mut self, chain: &mut Chain) -> Result<Option<Head>, RingError> {
        let head = if let Some(recovered) = self.recovered.pop() {
            either!(&mut self.kind, ring => ring.read_recovered(&recovered, chain))?;
            recovered.head
        } else {
            let Some(head) = either!(&mut self.kind, ring => ring.pop(chain))? else { return Ok(None) };
            head
        };
        if std::mem::replace(&mut self.in_flight[usize::from(head.index)], true) {
            return Err(RingError::HeadInFlight { head: head.index });
        }
        Ok(Some(head))
    }

    /// Adds a chain, of which the device has written `written` bytes. The driver sees it after
    /// [`Ring::publish`]. Panics if the chain is not in flight.
    pub fn push_used(&mut self, head: Head, written: u32) {
        let was = std::mem::replace(&mut self.in_flight[usize::from(head.index)], false);
        assert!(was, "a chain completes only once");
        either!(&mut self.kind, ring => ring.push_used(head, written));
    }

    pub fn has_recovered(&self) -> bool {
        !self.recovered.is_empty()
    }

    /// Publishes the used chains. Returns whether the driver must be called.
    pub fn publish(&mut self) -> bool {
        let count = either!(&mut self.kind, ring => ring.publish());
        if count == 0 {
            return false;
        }
        // The store that publishes must precede the load of the driver's event: otherwise the driver could go
        // to sleep in between, and would not be called.
        fence(Ordering::SeqCst);
        std::mem::take(&mut self.call_first) || either!(&self.kind, ring => ring.needs_call(count))
    }

    /// Asks for a kick at the next chain. Returns whether a chain is available already: it may cause no kick.
    pub fn enable_kicks(&mut self) -> bool {
        either!(&mut self.kind, ring => ring.ask_for_kick());
        // Either the driver sees the request for a kick, or this side sees the driver's chain. Without the
        // fence both could miss each other.
        fence(Ordering::SeqCst);
        self.has_recovered() || either!(&mut self.kind, ring => ring.is_available())
    }

    /// The position at which the ring continues (GET_VRING_BASE). Valid when no chain is in flight.
    pub fn base(&self) -> u32 {
        either!(&self.kind, ring => ring.base())
    }

    /// Whether the file of the ring, of guest memory or of the record was truncated. The ring must then stop.
    pub fn is_broken(&self) -> bool {
        self.memory.is_broken() || self.record.as_ref().is_some_and(|mapping| mapping.is_broken())
    }

    /// The number of chains that were taken and are not used yet.
    #[cfg(any(test, fuzz_interface))]
    pub fn in_flight(&self) -> usize {
        self.in_flight.iter().filter(|in_flight| **in_flight).count()
    }
}

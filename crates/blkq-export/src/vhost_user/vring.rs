//! A ring as the control thread sees it: how a front end describes it, and the source that serves it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Acquire;
#[cfg(not(model_check))]
use std::time::Duration;

use blkq::{EngineHandle, SourceId};

use super::abi::feature;
use super::foreign::{Foreign, signal_elsewhere};
use super::inflight::InflightRegion;
use super::memory::GuestMemory;
use super::message::{Refusal, VringAddresses, refuse};
use super::ring::{Ring, RingSpec};
use super::shared::Shared;
use super::source::{SetCall, VringSource, VringStart};
use super::status::{Event, RingStatus};

/// Most rings: ring `i` is served by engine `i` modulo the number of engines.
pub const VRINGS_MAX: usize = 64;
/// Largest ring (virtio 1.2, 2.7 and 2.8).
const SIZE_MAX: u32 = 1 << 15;
#[cfg(not(model_check))]
/// How long a ring may take to drain before it is checked whether its call eventfd blocks its engine.
const BLOCKED_CHECK: Duration = Duration::from_millis(20);

/// The things that rings share, while they are served.
pub struct RingContext {
    /// The guest's memory, as the ring's engine has it.
    pub memory: Arc<GuestMemory>,
    /// Virtio's features, as acknowledged.
    pub features: u64,
    /// Where requests in flight are recorded.
    pub inflight: Option<Arc<InflightRegion>>,
    /// Writes are durable when they complete.
    pub write_through: Arc<AtomicBool>,
}

#[derive(Default)]
enum Kick {
    /// None was set: the ring is stopped.
    #[default]
    Stopped,
    /// There is no eventfd: the ring is polled.
    Polled,
    Event(Arc<OwnedFd>),
}

/// The source that serves a ring.
struct Serving {
    engine: EngineHandle,
    id: SourceId,
    status: Arc<RingStatus>,
    /// Its rejection has been reported.
    reported: bool,
}

/// A ring of a front end.
#[derive(Default)]
pub struct Vring {
    index: u32,
    size: u32,
    addresses: Option<VringAddresses>,
    base: u32,
    kick: Kick,
    call: Option<Arc<OwnedFd>>,
    error: Option<Arc<OwnedFd>>,
    enabled: Option<bool>,
    serving: Option<Serving>,
}

impl Vring {
    /// Ring `index`, of which nothing is known.
    pub fn new(index: usize) -> Vring {
        Vring { index: index as u32, ..Vring::default() }
    }

    /// Whether it is served.
    pub fn is_served(&self) -> bool {
        self.serving.is_some()
    }

    /// Whether it was rejected.
    pub fn is_rejected(&self) -> bool {
        self.serving.as_ref().is_some_and(|serving| serving.status.rejected.get().is_some())
    }

    fn refuse_if_served(&self, what: &str) -> Result<(), Refusal> {
        if self.is_served() {
            return Err(refuse(format!("the {what} of ring {} changes while it is served", self.index)));
        }
        Ok(())
    }

    /// Sets the number of descriptors.
    pub fn set_size(&mut self, size: u32) -> Result<(), Refusal> {
        if size == self.size {
            return Ok(());
        }
        self.refuse_if_served("size")?;
        if !(1..=SIZE_MAX).contains(&size) {
            return Err(refuse(format!("{size} descriptors")));
        }
        self.size = size;
        Ok(())
    }

    /// Sets the addresses of its parts.
    pub fn set_addresses(&mut self, addresses: VringAddresses) -> Result<(), Refusal> {
        let parts = |it: &VringAddresses| (it.descriptors, it.used, it.available);
        if self.addresses.as_ref().map(parts) == Some(parts(&addresses)) {
            return Ok(());
        }
        self.refuse_if_served("place")?;
        self.addresses = Some(addresses);
        Ok(())
    }

    /// Sets where it begins.
    pub fn set_base(&mut self, base: u32) -> Result<(), Refusal> {
        self.refuse_if_served("base")?;
        self.base = base;
        Ok(())
    }

    /// Sets the eventfd that the guest kicks; the ring is started with it.
    pub fn set_kick(&mut self, shared: &Shared, file: Option<Foreign>) -> Result<(), Refusal> {
        let file = file.map(|file| file.into_event()).transpose()?;
        self.stop(shared);
        self.kick = file.map_or(Kick::Polled, |file| Kick::Event(Arc::new(file)));
        Ok(())
    }

    /// Sets the eventfd by which the guest is called.
    pub fn set_call(&mut self, shared: &Shared, file: Option<Foreign>) -> Result<(), Refusal> {
        let file = file.map(|file| file.into_call(shared.address.as_ref())).transpose()?;
        self.call = file.map(Arc::new);
        if let Some(Serving { engine, id, .. }) = &self.serving {
            engine.send(*id, Box::new(SetCall(self.call.clone())));
        }
        Ok(())
    }

    /// Sets the eventfd that is written when the ring is rejected.
    pub fn set_error(&mut self, shared: &Shared, file: Option<Foreign>) -> Result<(), Refusal> {
        let file = file.map(|file| file.into_call(shared.address.as_ref())).transpose()?;
        self.error = file.map(Arc::new);
        Ok(())
    }

    /// Enables or disables it; disabled, it is drained.
    pub fn set_enabled(&mut self, shared: &Shared, enabled: bool) {
        self.enabled = Some(enabled);
        if !enabled {
            self.stop(shared);
        }
    }

    /// Starts to serve it, if all that needs is known and it is enabled (`enabled` if the front end has not set that).
    ///
    /// # Errors
    /// Why it cannot be: that is reported, too.
    pub fn start(
        &mut self,
        shared: &Arc<Shared>,
        context: &RingContext,
        enabled: bool,
        peer: &Arc<str>,
    ) -> Result<(), Refusal> {
        let kick = match &self.kick {
            Kick::Stopped => return Ok(()),
            Kick::Polled => None,
            Kick::Event(kick) => Some(kick.clone()),
        };
        let (true, false, Some(addresses)) =
            (self.enabled.unwrap_or(enabled), self.is_served() || self.size == 0, &self.addresses)
        else {
            return Ok(());
        };
        let has = |feature: u64| context.features & feature != 0;
        let spec = RingSpec {
            size: self.size as u16,
            packed: has(feature::RING_PACKED),
            event_idx: has(feature::RING_EVENT_IDX),
            indirect: has(feature::RING_INDIRECT_DESC),
            descriptors: addresses.descriptors,
            driver_area: addresses.available,
            device_area: addresses.used,
            base: self.base,
        };
        let rejected = |reason: String| {
            shared.registry.report(peer, Event::RingRejected(self.index, reason.clone()));
            refuse(format!("ring {}: {reason}", self.index))
        };
        let record = context.inflight.as_ref().map(|region| {
            let queue = region.queue(self.index as u16, spec.size, spec.packed);
            queue.ok_or_else(|| rejected("the record of requests in flight is not for such a ring".into()))
        });
        let record = record.transpose()?;
        let ring = Ring::new(context.memory.clone(), &spec, record).map_err(|e| rejected(e.to_string()))?;
        let status = Arc::new(RingStatus::new(self.index, spec.size, self.base, self.call.clone()));
        let start = VringStart {
            ring,
            memory: context.memory.clone(),
            kick,
            call: self.call.clone(),
            status: status.clone(),
            write_through: context.write_through.clone(),
            serial: shared.serial.clone(),
            wake: shared.wake.clone(),
            peer: peer.clone(),
        };
        let engine = shared.engines[shared.engine_of(self.index)].clone();
        shared.registry.add_ring(&status);
        let added = engine.add_source(move || Box::new(VringSource::new(start)));
        let id = added.map_err(|e| rejected(e.to_string()))?;
        self.serving = Some(Serving { engine, id, status, reported: false });
        Ok(())
    }

    /// Stops to serve it, when nothing of it is in flight any more. It may be started again, where it
    /// was.
    pub fn stop(&mut self, shared: &Shared) {
        let Some(Serving { engine, id, status, .. }) = self.serving.take() else { return };
        let stopped = engine.begin_stop_source(id, true);
        // The checkers know no time.
        #[cfg(model_check)]
        let _ = (shared, stopped.wait());
        #[cfg(not(model_check))]
        while !stopped.wait_timeout(BLOCKED_CHECK) {
            shared.registry.release_blocked_calls();
        }
        self.base = status.base.load(Acquire);
    }

    /// Stops it until there is another kick eventfd. Returns where it goes on.
    pub fn stop_for_base(&mut self, shared: &Shared) -> u32 {
        self.stop(shared);
        self.kick = Kick::Stopped;
        self.base
    }

    /// Stops it, and forgets how it was described, but for how the front end is notified.
    pub fn reset(&mut self, shared: &Shared) {
        self.stop(shared);
        let (call, error) = (self.call.take(), self.error.take());
        *self = Vring { index: self.index, call, error, ..Vring::default() };
    }

    /// If it was rejected meanwhile: why, once. The front end is notified.
    pub fn take_rejection(&mut self) -> Option<String> {
        let serving = self.serving.as_mut().filter(|serving| !serving.reported)?;
        let reason = serving.status.rejected.get()?.clone();
        serving.reported = true;
        if let Some(error) = &self.error {
            signal_elsewhere(error.clone());
        }
        Some(reason)
    }

    /// Its number.
    pub fn index(&self) -> u32 {
        self.index
    }
}

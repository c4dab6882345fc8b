//! A ring as the control thread sees it: how a front end describes it, and the source that serves it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Acquire;

use blkq::{Disk, EngineHandle, SourceId, StoppingSource};

use super::abi::feature;
use super::foreign::{CallFile, Foreign};
use super::inflight::InflightRegion;
use super::memory::GuestMemory;
use super::message::{Refusal, VringAddresses, refuse};
use super::ring::{Ring, RingSpec};
use super::shared::Shared;
use super::source::{CallChanged, VringSource, VringStart};
use super::status::{Event, RingStatus};

/// Largest ring (virtio 1.2, 2.7 and 2.8).
const SIZE_MAX: u32 = 1 << 15;

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
    disk: Arc<Disk>,
    engine: EngineHandle,
    id: SourceId,
    status: Arc<RingStatus>,
    /// Its rejection has been reported.
    reported: bool,
}

impl Serving {
    /// Why it was rejected, once.
    fn take_rejection(&mut self) -> Option<String> {
        let reason = self.status.rejected.get().filter(|_| !self.reported)?;
        self.reported = true;
        Some(reason.clone())
    }
}

/// A ring of a front end.
#[derive(Default)]
pub struct Vring {
    index: u32,
    size: u32,
    addresses: Option<VringAddresses>,
    base: u32,
    kick: Kick,
    error: Option<CallFile>,
    enabled: Option<bool>,
    serving: Option<Serving>,
    /// Why it was rejected, each time that has yet to be reported.
    rejections: Vec<String>,
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
    pub fn set_kick(&mut self, file: Option<Foreign>) -> Result<(), Refusal> {
        let file = file.map(|file| file.into_event()).transpose()?;
        self.stop();
        self.kick = file.map_or(Kick::Polled, |file| Kick::Event(Arc::new(file)));
        Ok(())
    }

    /// Sets the eventfd by which the guest is called.
    pub fn set_call(&mut self, shared: &Shared, file: Option<Foreign>) -> Result<(), Refusal> {
        let file = file.map(|file| file.into_call(shared.address.as_ref())).transpose()?;
        shared.calls[self.index as usize].set(file)?;
        if let Some(Serving { engine, id, .. }) = &self.serving {
            engine.send(*id, Box::new(CallChanged));
        }
        Ok(())
    }

    /// Sets the eventfd that is written when the ring is rejected.
    pub fn set_error(&mut self, shared: &Shared, file: Option<Foreign>) -> Result<(), Refusal> {
        self.error = file.map(|file| file.into_call(shared.address.as_ref())).transpose()?;
        Ok(())
    }

    /// Enables or disables it; disabled, it is drained.
    pub fn set_enabled(&mut self, enabled: bool) {
        self.enabled = Some(enabled);
        if !enabled {
            self.stop();
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
        let status = Arc::new(RingStatus::new(self.index, spec.size, self.base));
        let start = VringStart {
            ring,
            memory: context.memory.clone(),
            kick,
            call: shared.calls[self.index as usize].clone(),
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
        self.serving = Some(Serving { disk: shared.disk.clone(), engine, id, status, reported: false });
        Ok(())
    }

    /// Stops to serve it, when nothing of it is in flight any more. It may be started again, where it
    /// was.
    pub fn stop(&mut self) {
        stop_all(std::slice::from_mut(self));
    }

    /// Stops it until there is another kick eventfd. Returns where it goes on.
    pub fn stop_for_base(&mut self) -> u32 {
        self.stop();
        self.kick = Kick::Stopped;
        self.base
    }

    /// Stops it, and forgets how it was described, but for how the front end is notified.
    pub fn reset(&mut self) {
        self.stop();
        let (error, rejections) = (self.error.take(), std::mem::take(&mut self.rejections));
        *self = Vring { index: self.index, error, rejections, ..Vring::default() };
    }

    /// Why it was rejected since this was last asked, each time: it may have been started again. The front
    /// end is notified as often.
    pub fn take_rejections(&mut self, shared: &Shared) -> Vec<String> {
        self.rejections.extend(self.serving.as_mut().and_then(Serving::take_rejection));
        for error in self.error.iter().cycle().take(self.rejections.len()) {
            // Without memory for that, only the log has the reason.
            let _ = shared.errors.notify_once(error);
        }
        std::mem::take(&mut self.rejections)
    }

    /// Its number.
    pub fn index(&self) -> u32 {
        self.index
    }
}

/// Stops to serve `vrings`. All begin to stop before the first is waited for: none serves its guest meanwhile.
pub fn stop_all(vrings: &mut [Vring]) {
    let served = vrings.iter_mut().filter_map(|vring| vring.serving.take().map(|serving| (vring, serving)));
    let served: Vec<(&mut Vring, Serving)> = served.collect();
    // A flush of a ring may wait for a write of another one that is held after an error, or a request
    // for its tag: the front end waits for the one ring before it stops the other.
    let _reporting = served.first().map(|(_, serving)| serving.disk.report_errors());
    let begin = |(vring, serving): (_, Serving)| {
        let stopping = serving.engine.begin_stop(serving.id, true);
        (vring, serving, stopping)
    };
    let stopping: Vec<(&mut Vring, Serving, StoppingSource)> = served.into_iter().map(begin).collect();
    for (vring, mut serving, stopping) in stopping {
        stopping.wait();
        vring.base = serving.status.base.load(Acquire);
        vring.rejections.extend(serving.take_rejection());
    }
}

#[cfg(all(test, not(model_check)))]
mod tests;

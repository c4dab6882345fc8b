//! A ring as the control thread sees it: how the front end has described it, and the source that serves it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;

use blkq::{EngineHandle, Error, SourceId, StoppingSource};

use super::config::feature;
use super::inflight::InflightRegion;
use super::message::{F_PROTOCOL_FEATURES, VringAddresses, refuse};
use super::ring::{RING_SIZE_MAX, Ring, RingSpec};
use super::source::{CallChanged, RingContext, VringSource, VringStart};
use super::status::{RingStatus, Shared};
use super::untrusted_fd::{CallFile, UntrustedFd};

struct Serving {
    shared: Arc<Shared>,
    engine: EngineHandle,
    id: SourceId,
    status: Arc<RingStatus>,
    /// Whether its rejection has been reported.
    reported: bool,
}

impl Serving {
    fn take_rejection(&mut self) -> Option<String> {
        let reason = self.status.rejected.get().filter(|_| !self.reported)?;
        self.reported = true;
        Some(reason.clone())
    }
}

#[derive(Default)]
pub struct Vring {
    index: u32,
    /// The features are known only when the ring starts.
    spec: RingSpec,
    has_addresses: bool,
    /// The front end has sent SET_VRING_KICK since the ring was stopped.
    started: bool,
    /// Without a kick eventfd, the ring is polled.
    kick: Option<Arc<OwnedFd>>,
    error: Option<CallFile>,
    enabled: Option<bool>,
    serving: Option<Serving>,
    rejections: Vec<String>,
}

impl Vring {
    pub fn new(index: usize) -> Vring {
        Vring { index: index as u32, ..Vring::default() }
    }

    pub fn is_served(&self) -> bool {
        self.serving.is_some()
    }

    pub fn is_rejected(&self) -> bool {
        self.serving.as_ref().is_some_and(|serving| serving.status.rejected.get().is_some())
    }

    fn refuse_if_served(&self, what: &str) -> Result<(), Error> {
        let index = self.index;
        if self.is_served() {
            return Err(refuse(format!("the {what} of ring {index} cannot change while it is served")));
        }
        Ok(())
    }

    pub fn set_size(&mut self, size: u32) -> Result<(), Error> {
        if size == u32::from(self.spec.size) {
            return Ok(());
        }
        self.refuse_if_served("size")?;
        if !(1..=u32::from(RING_SIZE_MAX)).contains(&size) {
            return Err(refuse(format!("a ring cannot have {size} descriptors")));
        }
        self.spec.size = size as u16;
        Ok(())
    }

    pub fn set_addresses(&mut self, addresses: VringAddresses) -> Result<(), Error> {
        let VringAddresses { descriptors, available: driver_area, used: device_area, .. } = addresses;
        let spec = RingSpec { descriptors, driver_area, device_area, ..self.spec };
        if spec != self.spec {
            self.refuse_if_served("address")?;
        }
        (self.spec, self.has_addresses) = (spec, true);
        Ok(())
    }

    pub fn set_base(&mut self, base: u32) -> Result<(), Error> {
        self.refuse_if_served("base")?;
        self.spec.base = base;
        Ok(())
    }

    /// Sets the kick eventfd. The ring is stopped, and can be started again with the new eventfd.
    pub fn set_kick(&mut self, file: Option<UntrustedFd>) -> Result<(), Error> {
        let file = file.map(|file| file.into_event()).transpose()?;
        self.stop();
        (self.started, self.kick) = (true, file.map(Arc::new));
        Ok(())
    }

    pub fn set_call(&mut self, shared: &Shared, file: Option<UntrustedFd>) -> Result<(), Error> {
        let file = file.map(|file| file.into_call(shared.address.as_ref())).transpose()?;
        shared.calls[self.index as usize].set(file)?;
        if let Some(Serving { engine, id, .. }) = &self.serving {
            engine.send(*id, Box::new(CallChanged));
        }
        Ok(())
    }

    pub fn set_error(&mut self, shared: &Shared, file: Option<UntrustedFd>) -> Result<(), Error> {
        self.error = file.map(|file| file.into_call(shared.address.as_ref())).transpose()?;
        Ok(())
    }

    pub fn set_enabled(&mut self, state: u32) -> Result<(), Error> {
        if state > 1 {
            return Err(refuse(format!("a ring cannot have the state {state}")));
        }
        self.enabled = Some(state == 1);
        if state == 0 {
            self.stop();
        }
        Ok(())
    }

    /// Starts serving the ring if it is described completely and enabled. The error is why the ring is rejected.
    pub fn start(&mut self, shared: &Arc<Shared>, context: RingContext) -> Result<(), String> {
        let has = |feature: u64| context.features & feature != 0;
        // Without protocol features, a front end cannot enable rings.
        let enabled = self.enabled.unwrap_or(!has(F_PROTOCOL_FEATURES));
        let is_described = self.spec.size > 0 && self.has_addresses;
        if !self.started || !enabled || !is_described || self.is_served() {
            return Ok(());
        }
        let spec = RingSpec {
            packed: has(feature::RING_PACKED),
            event_idx: has(feature::RING_EVENT_IDX),
            indirect: has(feature::RING_INDIRECT_DESC),
            ..self.spec
        };
        let queue = |region: &Arc<InflightRegion>| {
            let queue = region.queue(self.index as u16, spec.size, spec.packed);
            queue.ok_or("the in-flight table does not fit the ring")
        };
        let record = context.inflight.as_ref().map(queue).transpose()?;
        let ring = Ring::new(context.memory.clone(), &spec, record).map_err(|e| e.to_string())?;
        let status = Arc::new(RingStatus::new(self.index, spec.base));
        let (kick, shared) = (self.kick.clone(), shared.clone());
        let start = VringStart { ring, kick, shared: shared.clone(), status: status.clone(), context };
        let engine = shared.engines[shared.engine_of(self.index)].clone();
        shared.registry.add_ring(&status);
        let added = engine.add_source(move || Box::new(VringSource::new(start)));
        let id = added.map_err(|e| e.to_string())?;
        self.serving = Some(Serving { shared, engine, id, status, reported: false });
        Ok(())
    }

    pub fn stop(&mut self) {
        stop_all(std::slice::from_mut(self));
    }

    /// Stops the ring until another kick eventfd is set. Returns the position at which it continues.
    pub fn stop_for_base(&mut self) -> u32 {
        self.stop();
        (self.started, self.kick) = (false, None);
        self.spec.base
    }

    /// Stops the ring and resets its description, but keeps the descriptor for errors.
    pub fn reset(&mut self) {
        self.stop();
        let (error, rejections) = (self.error.take(), std::mem::take(&mut self.rejections));
        *self = Vring { index: self.index, error, rejections, ..Vring::default() };
    }

    /// The reasons of all rejections since the last call. The ring may have been started again after each.
    /// The front end is signaled once for each.
    pub fn take_rejections(&mut self, shared: &Shared) -> Vec<String> {
        self.rejections.extend(self.serving.as_mut().and_then(Serving::take_rejection));
        for error in self.error.iter().cycle().take(self.rejections.len()) {
            // If this fails for lack of memory, the rejection is only in the log.
            let _ = shared.errors.notify_once(error);
        }
        std::mem::take(&mut self.rejections)
    }

    pub fn index(&self) -> u32 {
        self.index
    }
}

/// All rings begin to stop before the first is waited for, so that none serves its guest longer.
pub fn stop_all(vrings: &mut [Vring]) {
    let served = vrings.iter_mut().filter_map(|vring| vring.serving.take().map(|serving| (vring, serving)));
    let served: Vec<(&mut Vring, Serving)> = served.collect();
    // Requests of these rings may wait for another ring: a flush for a write that is held after an error, or
    // any request for a tag. A front end may stop its rings one at a time and wait for each, so requests that
    // are held must fail while this runs.
    let _reporting = served.first().map(|(_, serving)| serving.shared.disk.report_errors());
    let begin = |(vring, serving): (_, Serving)| {
        let stopping = serving.engine.begin_stop(serving.id, true);
        (vring, serving, stopping)
    };
    let stopping: Vec<(&mut Vring, Serving, StoppingSource)> = served.into_iter().map(begin).collect();
    for (vring, mut serving, stopping) in stopping {
        stopping.wait();
        // Acquire: pairs with the store of the source.
        vring.spec.base = serving.status.base.load(Acquire);
        vring.rejections.extend(serving.take_rejection());
    }
}

#[cfg(all(test, not(model_check)))]
mod tests;

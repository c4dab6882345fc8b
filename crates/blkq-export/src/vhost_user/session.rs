//! A front end that is connected: it negotiates, and its requests change the table of memory and the
//! rings. This runs on the control thread, which may wait for engines; they never wait for it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::abi::feature;
use super::channel::{Incoming, send_some};
use super::config::{FEATURES_OF_LIMITS, WRITEBACK_AT, config, features};
use super::foreign::Foreign;
use super::inflight::{InflightRegion, recorded_size};
use super::memory::{GuestMemory, REGIONS_MAX, RegionSpec};
use super::message::{
    ConfigRange, F_PROTOCOL_FEATURES, InflightArea, Refusal, Region, Reply, Request, VringState, code,
    config_change, name, protocol, refuse,
};
use super::registration::RegisteredTables;
use super::shared::{Shared, VRINGS_MAX};
use super::status::Event;
use super::vring::{RingContext, Vring, stop_all};
use crate::sync::atomic::Ordering::SeqCst;

/// In the status of a virtio device: it must be reset (virtio 1.2, 2.1).
const DEVICE_NEEDS_RESET: u64 = 0x40;

/// A front end that is connected.
pub struct Session {
    shared: Arc<Shared>,
    peer: Arc<str>,
    protocol: u64,
    features: u64,
    status: u64,
    memory: Arc<GuestMemory>,
    /// The same as engines have it registered, if that is asked for.
    registered: Option<RegisteredTables>,
    vrings: Vec<Vring>,
    /// Requests in flight are recorded there.
    inflight: Option<Arc<InflightRegion>>,
    /// A ring was served: what is recorded as in flight is this session's.
    has_served: bool,
    /// Where requests of this side go.
    request_socket: Option<Foreign>,
    /// The write cache, as the driver switched it.
    writeback: bool,
    /// Writes are durable when they complete.
    write_through: Arc<AtomicBool>,
    /// Why a ring could not be started, by the request that is handled.
    not_started: Option<Refusal>,
}

impl Session {
    /// The session of front end `peer`, which has been let in.
    ///
    /// # Errors
    /// An empty table of memory that cannot be made.
    pub fn new(shared: Arc<Shared>, peer: &str) -> Result<Session, blkq::Error> {
        let registered =
            shared.register_memory.map(|limits| RegisteredTables::new(shared.engines.clone(), limits));
        Ok(Session {
            shared,
            registered,
            peer: peer.into(),
            protocol: 0,
            features: 0,
            status: 0,
            memory: Arc::new(GuestMemory::map(Vec::new())?),
            vrings: (0..VRINGS_MAX).map(Vring::new).collect(),
            inflight: None,
            has_served: false,
            request_socket: None,
            writeback: true,
            // Until the driver shows that it can flush.
            write_through: Arc::new(AtomicBool::new(true)),
            not_started: None,
        })
    }

    /// Does what a message asks for. Returns the reply, if it has one.
    ///
    /// # Errors
    /// That the message breaks the protocol, and cannot be refused otherwise than by closing the
    /// connection.
    pub fn handle(&mut self, incoming: Incoming) -> Result<Option<Reply>, Refusal> {
        let Incoming { header, payload, files } = incoming;
        self.not_started = None;
        let done = Request::parse(&header, &payload, files)
            .and_then(|request| self.execute(request, header.size as usize));
        // User-mode Linux waits for the acknowledgement of the very message that negotiates them.
        let acknowledged = header.needs_reply() && self.protocol & protocol::REPLY_ACK != 0;
        match done {
            Ok(Some(reply)) => Ok(Some(reply)),
            Ok(None) => {
                let failed = self.not_started.take().is_some();
                Ok(acknowledged.then(|| Reply::number(header.code, failed.into())))
            }
            Err(Refusal(reason)) => {
                let reason = format!("{}: {reason}", name(header.code));
                if !acknowledged || has_reply(header.code) {
                    return Err(Refusal(reason));
                }
                self.shared.registry.report(&self.peer, Event::Refused(reason));
                Ok(Some(Reply::number(header.code, 1)))
            }
        }
    }

    fn execute(&mut self, request: Request, payload_bytes: usize) -> Result<Option<Reply>, Refusal> {
        let number = |code: u32, value: u64| Ok(Some(Reply::number(code, value)));
        match request {
            Request::GetFeatures => return number(code::GET_FEATURES, self.offered()),
            Request::SetFeatures(features) => self.set_features(features)?,
            Request::SetOwner => self.begin()?,
            Request::ResetOwner => self.stop_rings(),
            Request::SetMemTable(regions) => {
                let specs: Result<_, _> =
                    regions.into_iter().map(|(region, file)| spec(region, file)).collect();
                self.set_memory(GuestMemory::map(specs?)?);
            }
            Request::SetVringNum(VringState { index, number }) => self.vring(index)?.set_size(number)?,
            Request::SetVringAddr(addresses) => self.vring(addresses.index)?.set_addresses(addresses)?,
            Request::SetVringBase(VringState { index, number }) => self.vring(index)?.set_base(number)?,
            Request::GetVringBase(VringState { index, .. }) => {
                let base = self.vring(index)?.stop_for_base();
                let state = VringState { index, number: base };
                return Ok(Some(Reply::new(code::GET_VRING_BASE, zerocopy::IntoBytes::as_bytes(&state))));
            }
            Request::SetVringKick(index, file) => {
                self.vring(index)?.set_kick(file)?;
                self.start_ring(index);
            }
            Request::SetVringCall(index, file) => {
                let shared = self.shared.clone();
                self.vring(index)?.set_call(&shared, file)?;
            }
            Request::SetVringErr(index, file) => {
                let shared = self.shared.clone();
                self.vring(index)?.set_error(&shared, file)?;
            }
            Request::GetProtocolFeatures => return number(code::GET_PROTOCOL_FEATURES, protocol::OFFERED),
            Request::SetProtocolFeatures(features) => {
                if features & !protocol::OFFERED != 0 {
                    return Err(refuse(format!("{:#x} was not offered", features & !protocol::OFFERED)));
                }
                self.protocol = features;
            }
            Request::GetQueueNum => {
                self.need(protocol::MQ, "MQ")?;
                return number(code::GET_QUEUE_NUM, VRINGS_MAX as u64);
            }
            Request::SetVringEnable(VringState { index, number }) => {
                if number > 1 {
                    return Err(refuse(format!("state {number}")));
                }
                self.vring(index)?.set_enabled(number == 1);
                self.start_ring(index);
            }
            Request::SetBackendReqFd(socket) => {
                self.need(protocol::BACKEND_REQ, "BACKEND_REQ")?;
                socket.check_socket(self.shared.address.as_ref())?;
                self.request_socket = Some(socket);
            }
            Request::GetConfig(range) => return Ok(Some(self.config(range))),
            Request::SetConfig(range, bytes) => self.set_config(range, &bytes)?,
            Request::GetInflightFd(area) => return self.new_inflight(area, payload_bytes).map(Some),
            Request::SetInflightFd(area, file) => self.set_inflight(area, file)?,
            Request::ResetDevice => {
                self.need(protocol::RESET_DEVICE, "RESET_DEVICE")?;
                self.reset();
            }
            Request::GetMaxMemSlots => {
                self.need(protocol::CONFIGURE_MEM_SLOTS, "CONFIGURE_MEM_SLOTS")?;
                return number(code::GET_MAX_MEM_SLOTS, REGIONS_MAX as u64);
            }
            Request::AddMemReg(region, file) => {
                self.need(protocol::CONFIGURE_MEM_SLOTS, "CONFIGURE_MEM_SLOTS")?;
                self.set_memory(self.memory.with_region(spec(region, file)?)?);
            }
            Request::RemMemReg(region) => {
                self.need(protocol::CONFIGURE_MEM_SLOTS, "CONFIGURE_MEM_SLOTS")?;
                self.set_memory(self.memory.without_region(region.guest, region.user, region.size)?);
            }
            Request::SetStatus(status) => {
                self.need(protocol::STATUS, "STATUS")?;
                if status > 0xff {
                    return Err(refuse(format!("status {status:#x}")));
                }
                self.status = status;
                if status == 0 {
                    self.stop_rings();
                    self.forget_in_flight();
                }
            }
            Request::GetStatus => {
                self.need(protocol::STATUS, "STATUS")?;
                let rejected = self.vrings.iter().any(Vring::is_rejected);
                let status = self.status | if rejected { DEVICE_NEEDS_RESET } else { 0 };
                return number(code::GET_STATUS, status);
            }
        }
        Ok(None)
    }

    /// A front end that owns the connection already begins anew: so does QEMU for a disk that was unplugged
    /// and is plugged in again, and hands all of its memory over once more.
    fn begin(&mut self) -> Result<(), Refusal> {
        if !self.vrings.iter().any(Vring::is_served) {
            self.set_memory(GuestMemory::map(Vec::new())?);
            self.inflight = None;
            self.shared.registry.set_recorded(false);
        }
        Ok(())
    }

    fn offered(&self) -> u64 {
        features(&self.shared.disk.limits()) | F_PROTOCOL_FEATURES
    }

    fn need(&self, feature: u64, name: &str) -> Result<(), Refusal> {
        if self.protocol & feature == 0 {
            return Err(refuse(format!("the protocol feature {name} was not negotiated")));
        }
        Ok(())
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring, Refusal> {
        self.vrings.get_mut(index as usize).ok_or_else(|| refuse(format!("ring {index} of {VRINGS_MAX}")))
    }

    fn set_features(&mut self, features: u64) -> Result<(), Refusal> {
        let strange = features & !self.offered() & !FEATURES_OF_LIMITS;
        if strange != 0 {
            return Err(refuse(format!("{strange:#x} was not offered")));
        }
        let of_rings = |features: u64| features & !F_PROTOCOL_FEATURES;
        if of_rings(features) != of_rings(self.features) && self.vrings.iter().any(Vring::is_served) {
            return Err(refuse("the features change while rings are served"));
        }
        self.features = features;
        self.switch_cache();
        (0..VRINGS_MAX as u32).for_each(|index| self.start_ring(index));
        Ok(())
    }

    /// Virtio 1.2, 5.2.5.2 and 5.2.6.2: the write cache is what the driver switched, if it can; one that
    /// it does not know to flush is not there.
    fn switch_cache(&self) {
        let has = |feature: u64| self.features & feature != 0;
        let writeback = has(feature::FLUSH) && (self.writeback || !has(feature::CONFIG_WCE));
        self.write_through.store(!writeback, Relaxed);
    }

    /// The write cache as the driver reads it; before it has acknowledged features, what it may have.
    fn shown_cache(&self) -> bool {
        self.writeback && (self.features == 0 || self.features & feature::FLUSH != 0)
    }

    fn note_cache(&self) {
        if let Some(region) = &self.inflight {
            region.set_write_cache(self.writeback);
        }
    }

    fn context(&self, index: u32) -> RingContext {
        let registered = self.registered.as_ref();
        let memory = registered.and_then(|tables| tables.table(self.shared.engine_of(index)));
        RingContext {
            memory: memory.unwrap_or(&self.memory).clone(),
            features: self.features,
            inflight: self.inflight.clone(),
            write_through: self.write_through.clone(),
        }
    }

    /// Starts ring `index`, if it can be started.
    fn start_ring(&mut self, index: u32) {
        let (context, enabled) = (self.context(index), self.features & F_PROTOCOL_FEATURES == 0);
        let Some(vring) = self.vrings.get_mut(index as usize) else { return };
        match vring.start(&self.shared, &context, enabled, &self.peer) {
            Ok(()) => self.has_served |= vring.is_served(),
            Err(refusal) => self.not_started = Some(refusal),
        }
    }

    /// Replaces the table of memory. Rings are drained before, and go on after that: nothing is in
    /// flight in memory that is no more in the table.
    fn set_memory(&mut self, memory: GuestMemory) {
        let served: Vec<u32> =
            self.vrings.iter().filter(|vring| vring.is_served()).map(Vring::index).collect();
        stop_all(&mut self.vrings);
        self.memory = Arc::new(memory);
        self.register_memory();
        served.into_iter().for_each(|index| self.start_ring(index));
    }

    /// Registers the memory, if that is asked for. Memory that does not fit is served unregistered.
    fn register_memory(&mut self) {
        let Some(tables) = &mut self.registered else { return };
        let registered = match tables.replace(&self.memory) {
            Ok(()) => Some(Ok(self.memory.bytes())).filter(|_| self.memory.region_count() > 0),
            Err(error) => {
                let reason = error.to_string();
                self.shared.registry.report(&self.peer, Event::MemoryUnregistered(reason.clone()));
                Some(Err(reason))
            }
        };
        self.shared.registry.set_registered_memory(registered);
    }

    fn stop_rings(&mut self) {
        stop_all(&mut self.vrings);
        for vring in self.vrings.iter_mut() {
            vring.stop_for_base();
        }
    }

    /// As it was, but for what the front end thinks that this side keeps: the protocol features, the
    /// memory, and the write cache (virtio 1.2, 5.2.5: after a reset it may be on or off). QEMU goes on to
    /// show drivers what was last written there, and writes no more than changes.
    fn reset(&mut self) {
        stop_all(&mut self.vrings);
        self.vrings.iter_mut().for_each(|vring| vring.reset());
        self.forget_in_flight();
        (self.features, self.status) = (0, 0);
        self.switch_cache();
    }

    /// The device was reset, and its rings are drained: what a rejected ring left in flight belongs to
    /// a driver that begins anew.
    fn forget_in_flight(&self) {
        if let Some(region) = self.inflight.as_ref().filter(|_| self.has_served) {
            region.clear();
        }
    }

    fn config(&self, range: ConfigRange) -> Reply {
        let mut bytes = zerocopy::IntoBytes::as_bytes(&range).to_vec();
        let config = config(&self.shared.disk.limits(), self.shared.queues(), self.shown_cache());
        // Fields that the device does not have are zero.
        let at = |at: u32| config.get(at as usize).copied().unwrap_or(0);
        bytes.extend((range.offset..range.offset + range.size).map(at));
        Reply::new(code::GET_CONFIG, &bytes)
    }

    fn set_config(&mut self, range: ConfigRange, bytes: &[u8]) -> Result<(), Refusal> {
        self.need(protocol::CONFIG, "CONFIG")?;
        let ConfigRange { offset, size, flags } = range;
        match (bytes, flags) {
            (&[value @ 0..=1], 0 | 1) if offset as usize == WRITEBACK_AT => {
                self.writeback = value == 1;
                self.note_cache();
                self.switch_cache();
                Ok(())
            }
            _ => Err(refuse(format!("{size} bytes at {offset} cannot be written"))),
        }
    }

    fn new_inflight(&mut self, area: InflightArea, payload_bytes: usize) -> Result<Reply, Refusal> {
        self.need(protocol::INFLIGHT_SHMFD, "INFLIGHT_SHMFD")?;
        check_inflight(&area)?;
        let packed = self.features & feature::RING_PACKED != 0;
        let queue_size = recorded_size(area.queue_size);
        let (inflight, file) = InflightRegion::create(area.queues, queue_size, packed)?;
        let area = InflightArea { size: inflight.bytes(), offset: 0, ..area };
        // As long as the request: some front ends have padding.
        let payload = &zerocopy::IntoBytes::as_bytes(&area)[..payload_bytes];
        Ok(Reply { file: Some(file), ..Reply::new(code::GET_INFLIGHT_FD, payload) })
    }

    fn set_inflight(&mut self, area: InflightArea, file: Foreign) -> Result<(), Refusal> {
        self.need(protocol::INFLIGHT_SHMFD, "INFLIGHT_SHMFD")?;
        check_inflight(&area)?;
        if self.vrings.iter().any(Vring::is_served) {
            return Err(refuse("rings are served"));
        }
        let packed = self.features & feature::RING_PACKED != 0;
        let InflightArea { size, offset, queues, queue_size, .. } = area;
        let queue_size = InflightRegion::kept_size(size, queues, queue_size, packed);
        let file = file.into_memory()?;
        self.inflight = Some(Arc::new(InflightRegion::open(file, offset, size, queues, queue_size, packed)?));
        self.shared.registry.set_recorded(true);
        // An earlier daemon of this front end knew how the driver had switched the cache, and the front
        // end does not say it again.
        match self.inflight.as_ref().and_then(|region| region.write_cache()) {
            Some(writeback) => self.writeback = writeback,
            None => self.note_cache(),
        }
        self.switch_cache();
        Ok(())
    }

    /// Something woke the control thread: a new configuration, or a ring that was rejected.
    pub fn woken(&mut self) {
        if self.shared.config_changed.swap(false, SeqCst) {
            self.config_changed();
        }
        self.report_rejections();
    }

    /// The configuration has changed: the front end is notified, if it can be.
    fn config_changed(&mut self) {
        let Some(socket) = &self.request_socket else { return };
        let message = config_change();
        match send_some(socket.as_fd(), &message, None) {
            Ok(bytes) if bytes == message.len() => {}
            // Such messages wait there already: it has yet to read the configuration.
            Err(Errno::AGAIN) => {}
            Ok(_) => self.give_up_requests("a part of a message left"),
            Err(errno) => self.give_up_requests(&errno.to_string()),
        }
    }

    /// Where requests of this side go: to be polled, for input that does not come.
    pub fn request_socket(&self) -> Option<BorrowedFd<'_>> {
        self.request_socket.as_ref().map(AsFd::as_fd)
    }

    /// Closes that socket, of which poll(2) returned `events`. In its queue could be a descriptor of the
    /// front end's own connection, which then would not close.
    pub fn close_request_socket(&mut self, events: PollFlags) {
        if events.contains(PollFlags::HUP) {
            self.request_socket = None;
        } else {
            self.give_up_requests("it sends what is no reply, as none is asked for");
        }
    }

    fn give_up_requests(&mut self, why: &str) {
        self.request_socket = None;
        let reason = format!("it is not notified of the device's new size: {why}");
        self.shared.registry.report(&self.peer, Event::Refused(reason));
    }

    /// Reports the rings that were rejected meanwhile.
    fn report_rejections(&mut self) {
        for vring in &mut self.vrings {
            for reason in vring.take_rejections(&self.shared) {
                self.shared.registry.report(&self.peer, Event::RingRejected(vring.index(), reason));
            }
        }
    }

    /// The front end, for people.
    pub fn peer(&self) -> &str {
        &self.peer
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop_rings();
        self.report_rejections();
        for call in &self.shared.calls {
            let _ = call.set(None);
        }
    }
}

/// Whether a request has a reply of its own, which reports no errors.
fn has_reply(code: u32) -> bool {
    matches!(
        code,
        code::GET_FEATURES
            | code::GET_PROTOCOL_FEATURES
            | code::GET_VRING_BASE
            | code::GET_QUEUE_NUM
            | code::GET_CONFIG
            | code::GET_INFLIGHT_FD
            | code::GET_MAX_MEM_SLOTS
            | code::GET_STATUS
    )
}

fn check_inflight(area: &InflightArea) -> Result<(), Refusal> {
    let InflightArea { queues, queue_size, .. } = *area;
    if queues == 0 || usize::from(queues) > VRINGS_MAX || queue_size == 0 {
        return Err(refuse(format!("{queues} rings of {queue_size} descriptors")));
    }
    Ok(())
}

fn spec(region: Region, file: Foreign) -> Result<RegionSpec, Refusal> {
    let Region { guest, size, user, offset } = region;
    let file = file.into_memory()?;
    Ok(RegionSpec { guest_start: guest, user_start: user, length: size, file, file_offset: offset })
}

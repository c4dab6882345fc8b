//! The session of a front end: it negotiates features, and its requests change the table of memory and the
//! rings, on the control thread, which may wait for engines; engines never wait for it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use blkq::Error;
use rustix::event::PollFlags;
use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::channel::{Incoming, send_some};
use super::config::{FEATURES_OF_LIMITS, WRITEBACK_AT, config, feature, features};
use super::inflight::{InflightRegion, recorded_size};
use super::memory::{GuestMemory, REGIONS_MAX, RegionSpec};
use super::message::{
    ConfigRange, F_PROTOCOL_FEATURES, Header, InflightArea, Region, Reply, RequestKind, VringAddresses,
    VringState, code, config_change, config_range, inflight, mem_table, needed, protocol, refuse, ring_file,
    single_region, whole, wrong_size,
};
use super::registration::RegisteredTables;
use super::source::RingContext;
use super::status::{Event, Shared, VRINGS_MAX};
use super::untrusted_fd::UntrustedFd;
use super::vring::{Vring, stop_all};
use crate::sync::atomic::Ordering::SeqCst;

/// A bit in the status of a virtio device: the driver must reset the device (virtio 1.2, 2.1).
const DEVICE_NEEDS_RESET: u64 = 0x40;

pub struct Session {
    shared: Arc<Shared>,
    peer: Arc<str>,
    protocol: u64,
    features: u64,
    status: u64,
    memory: Arc<GuestMemory>,
    /// The tables of `memory` with its registrations, if memory is to be registered.
    registered: Option<RegisteredTables>,
    vrings: Vec<Vring>,
    inflight: Option<Arc<InflightRegion>>,
    has_served: bool,
    request_socket: Option<UntrustedFd>,
    /// The write cache setting of the driver.
    writeback: bool,
    /// Writes must be durable when they complete.
    write_through: Arc<AtomicBool>,
    /// The request that is being executed could not start a ring.
    not_started: bool,
}

impl Session {
    /// `peer` must have been admitted.
    pub fn new(shared: Arc<Shared>, peer: &str) -> Session {
        let registered =
            shared.register_memory.map(|limits| RegisteredTables::new(shared.engines.clone(), limits));
        Session {
            shared,
            registered,
            peer: peer.into(),
            protocol: 0,
            features: 0,
            status: 0,
            memory: Arc::default(),
            vrings: (0..VRINGS_MAX).map(Vring::new).collect(),
            inflight: None,
            has_served: false,
            request_socket: None,
            writeback: true,
            // Write-through until the driver shows that it can flush.
            write_through: Arc::new(AtomicBool::new(true)),
            not_started: false,
        }
    }

    /// Executes a message, and returns its reply. The error is a violation of the protocol that can be
    /// answered only by closing the connection.
    pub fn handle(&mut self, incoming: Incoming) -> Result<Option<Reply>, Error> {
        let header = incoming.header;
        self.not_started = false;
        let kind = RequestKind::of(header.code);
        let known = kind.ok_or_else(|| refuse("unknown request"));
        let done = known.and_then(|kind| self.execute(incoming, kind));
        // Taken after the request is executed, because user-mode Linux expects the acknowledgement of the
        // very message that negotiates acknowledgements.
        let acknowledged = header.needs_reply() && self.protocol & protocol::REPLY_ACK != 0;
        match done {
            Ok(Some(reply)) => Ok(Some(reply)),
            Ok(None) => Ok(acknowledged.then(|| Reply::number(header.code, self.not_started.into()))),
            Err(error) => {
                let name = kind.map_or_else(|| format!("request {}", header.code), |kind| kind.name.into());
                let reason = format!("{name}: {error}");
                // A request that gets something has its own reply, which cannot report an error.
                if !acknowledged || name.starts_with("GET_") {
                    return Err(refuse(reason));
                }
                self.shared.registry.report(&self.peer, Event::Refused(reason));
                Ok(Some(Reply::number(header.code, 1)))
            }
        }
    }

    fn execute(&mut self, incoming: Incoming, kind: RequestKind) -> Result<Option<Reply>, Error> {
        let Incoming { header: Header { code, .. }, ref payload, mut files } = incoming;
        if let Some((_, name)) = kind.feature.filter(|(feature, _)| self.protocol & feature == 0) {
            return Err(refuse(format!("the protocol feature {name} was not negotiated")));
        }
        if files.len() > kind.files_max {
            let more = files.len() - kind.files_max;
            return Err(refuse(format!("the message has {more} file descriptors too many")));
        }
        let number = |value: u64| Ok(Some(Reply::number(code, value)));
        let shared = self.shared.clone();
        match (code, payload.as_slice()) {
            (code::GET_FEATURES, []) => return number(self.offered()),
            (code::SET_FEATURES, _) => self.set_features(whole(payload)?)?,
            (code::SET_OWNER, []) => self.set_owner(),
            (code::RESET_OWNER, []) => self.stop_rings(),
            (code::SET_MEM_TABLE, _) => {
                let specs: Result<_, _> = mem_table(payload, files)?.into_iter().map(spec).collect();
                self.set_memory(GuestMemory::map(specs?)?);
            }
            (code::SET_VRING_NUM, _) => {
                let [index, size]: VringState = whole(payload)?;
                self.vring(index)?.set_size(size)?;
            }
            (code::SET_VRING_BASE, _) => {
                let [index, base]: VringState = whole(payload)?;
                self.vring(index)?.set_base(base)?;
            }
            (code::GET_VRING_BASE, _) => {
                let [index, _]: VringState = whole(payload)?;
                let base = self.vring(index)?.stop_for_base();
                return Ok(Some(Reply::new(code, [index, base].as_bytes())));
            }
            (code::SET_VRING_ENABLE, _) => {
                let [index, state]: VringState = whole(payload)?;
                self.vring(index)?.set_enabled(state)?;
                self.start_ring(index);
            }
            (code::SET_VRING_ADDR, _) => {
                let addresses: VringAddresses = whole(payload)?;
                self.vring(addresses.index)?.set_addresses(addresses)?;
            }
            (code::SET_VRING_KICK | code::SET_VRING_CALL | code::SET_VRING_ERR, _) => {
                let (index, file) = ring_file(payload, files.pop())?;
                let vring = self.vring(index)?;
                match code {
                    code::SET_VRING_CALL => vring.set_call(&shared, file)?,
                    code::SET_VRING_ERR => vring.set_error(&shared, file)?,
                    code::SET_VRING_KICK => {
                        vring.set_kick(file)?;
                        self.start_ring(index);
                    }
                    _ => unreachable!("the codes of the outer pattern"),
                }
            }
            (code::GET_PROTOCOL_FEATURES, []) => return number(protocol::OFFERED),
            (code::SET_PROTOCOL_FEATURES, _) => {
                let features: u64 = whole(payload)?;
                refuse_unoffered(features & !protocol::OFFERED)?;
                self.protocol = features;
            }
            (code::GET_QUEUE_NUM, []) => return number(VRINGS_MAX as u64),
            (code::SET_BACKEND_REQ_FD, []) => {
                let socket = needed(files.pop())?;
                socket.check_socket(self.shared.address.as_ref())?;
                self.request_socket = Some(socket);
            }
            (code::GET_CONFIG, _) => return Ok(Some(self.config(config_range(payload)?.0))),
            (code::SET_CONFIG, _) => self.set_config(config_range(payload)?)?,
            (code::GET_INFLIGHT_FD, _) => {
                return self.new_inflight(inflight(payload)?, payload.len()).map(Some);
            }
            (code::SET_INFLIGHT_FD, _) => self.set_inflight(inflight(payload)?, needed(files.pop())?)?,
            (code::RESET_DEVICE, []) => self.reset(),
            (code::GET_MAX_MEM_SLOTS, []) => return number(REGIONS_MAX as u64),
            (code::ADD_MEM_REG, _) => {
                let spec = spec((single_region(payload)?, needed(files.pop())?))?;
                self.set_memory(self.memory.with_region(spec)?);
            }
            (code::REM_MEM_REG, _) => {
                let [guest, size, user, _] = single_region(payload)?;
                self.set_memory(self.memory.without_region((guest, user, size))?);
            }
            (code::SET_STATUS, _) => {
                let status: u64 = whole(payload)?;
                if status > 0xff {
                    return Err(refuse(format!("invalid status {status:#x}")));
                }
                self.status = status;
                if status == 0 {
                    self.stop_rings();
                    self.discard_in_flight();
                }
            }
            (code::GET_STATUS, []) => {
                let rejected = self.vrings.iter().any(Vring::is_rejected);
                return number(self.status | if rejected { DEVICE_NEEDS_RESET } else { 0 });
            }
            _ => return Err(wrong_size(payload)),
        }
        Ok(None)
    }

    /// Executes SET_OWNER. A front end that owns the connection already starts from the beginning: QEMU does
    /// so when a disk is unplugged and plugged in again, and then passes all of its memory once more.
    fn set_owner(&mut self) {
        if !self.vrings.iter().any(Vring::is_served) {
            self.set_memory(GuestMemory::default());
            self.inflight = None;
            self.shared.registry.update(|front_end| front_end.recorded = false);
        }
    }

    fn offered(&self) -> u64 {
        features(&self.shared.disk.limits()) | F_PROTOCOL_FEATURES
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring, Error> {
        let missing = || refuse(format!("there is no ring {index}, only {VRINGS_MAX}"));
        self.vrings.get_mut(index as usize).ok_or_else(missing)
    }

    fn set_features(&mut self, features: u64) -> Result<(), Error> {
        refuse_unoffered(features & !self.offered() & !FEATURES_OF_LIMITS)?;
        let of_rings = |features: u64| features & !F_PROTOCOL_FEATURES;
        if of_rings(features) != of_rings(self.features) && self.vrings.iter().any(Vring::is_served) {
            return Err(refuse("features cannot change while rings are served"));
        }
        self.features = features;
        self.update_write_through();
        (0..VRINGS_MAX as u32).for_each(|index| self.start_ring(index));
        Ok(())
    }

    /// Applies the setting of the write cache (virtio 1.2, 5.2.5.2 and 5.2.6.2). The driver's setting counts
    /// if the driver can switch the cache. A driver that does not flush has no write cache.
    fn update_write_through(&self) {
        let has = |feature: u64| self.features & feature != 0;
        let writeback = has(feature::FLUSH) && (self.writeback || !has(feature::CONFIG_WCE));
        // Relaxed: the flag protects no other data. A request that the driver adds after the reply reaches
        // the engine through the ring, whose indexes are read with acquire ordering.
        self.write_through.store(!writeback, Relaxed);
    }

    /// The write cache that the driver reads in the configuration. Before features are negotiated, it is the
    /// driver's setting.
    fn visible_write_cache(&self) -> bool {
        self.writeback && (self.features == 0 || self.features & feature::FLUSH != 0)
    }

    /// Sets and records the driver's setting of the write cache.
    fn set_writeback(&mut self, writeback: bool) {
        self.writeback = writeback;
        if let Some(region) = &self.inflight {
            region.set_write_cache(writeback);
        }
        self.update_write_through();
    }

    fn start_ring(&mut self, index: u32) {
        let registered = self.registered.as_ref();
        let memory = registered.and_then(|tables| tables.table(self.shared.engine_of(index)));
        let context = RingContext {
            memory: memory.unwrap_or(&self.memory).clone(),
            features: self.features,
            inflight: self.inflight.clone(),
            write_through: self.write_through.clone(),
            peer: self.peer.clone(),
        };
        let Some(vring) = self.vrings.get_mut(index as usize) else { return };
        match vring.start(&self.shared, context) {
            Ok(()) => self.has_served |= vring.is_served(),
            Err(reason) => {
                self.not_started = true;
                self.shared.registry.report(&self.peer, Event::RingRejected(index, reason));
            }
        }
    }

    /// Rings are drained before and continue afterwards, so that no request uses memory that was removed.
    fn set_memory(&mut self, memory: GuestMemory) {
        let served: Vec<u32> =
            self.vrings.iter().filter(|vring| vring.is_served()).map(Vring::index).collect();
        stop_all(&mut self.vrings);
        self.memory = Arc::new(memory);
        self.register_memory();
        served.into_iter().for_each(|index| self.start_ring(index));
    }

    /// Registers the memory, if this is enabled. Memory that does not fit the limits is served unregistered.
    fn register_memory(&mut self) {
        let Some(tables) = &mut self.registered else { return };
        let registered = tables.replace(&self.memory).map_err(|e| e.to_string());
        if let Err(reason) = &registered {
            self.shared.registry.report(&self.peer, Event::MemoryUnregistered(reason.clone()));
        }
        let registered = registered.map(|()| self.memory.bytes());
        self.shared.registry.update(|front_end| {
            front_end.registered_memory = Some(registered).filter(|registered| *registered != Ok(0));
        });
    }

    fn stop_rings(&mut self) {
        stop_all(&mut self.vrings);
        self.vrings.iter_mut().for_each(|vring| _ = vring.stop_for_base());
    }

    /// Resets the device, except for what the front end expects to stay: protocol features, memory, and the
    /// write cache setting (virtio 1.2, 5.2.5 allows both values), of which QEMU sends only changes.
    fn reset(&mut self) {
        stop_all(&mut self.vrings);
        self.vrings.iter_mut().for_each(|vring| vring.reset());
        self.discard_in_flight();
        (self.features, self.status) = (0, 0);
        self.update_write_through();
    }

    /// The rings are drained, so these are requests of a rejected ring, for which the driver no longer waits.
    fn discard_in_flight(&self) {
        if let Some(region) = self.inflight.as_ref().filter(|_| self.has_served) {
            region.clear();
        }
    }

    fn config(&self, range: ConfigRange) -> Reply {
        let [offset, size, _] = range;
        let mut bytes = range.as_bytes().to_vec();
        let config =
            config(&self.shared.disk.limits(), self.shared.engines.len() as u16, self.visible_write_cache());
        // Fields that the device does not have read as zeroes.
        let at = |at: u32| config.get(at as usize).copied().unwrap_or(0);
        bytes.extend((offset..offset + size).map(at));
        Reply::new(code::GET_CONFIG, &bytes)
    }

    fn set_config(&mut self, ([offset, size, flags], bytes): (ConfigRange, &[u8])) -> Result<(), Error> {
        if let (&[value @ 0..=1], 0 | 1, WRITEBACK_AT) = (bytes, flags, offset as usize) {
            self.set_writeback(value == 1);
            return Ok(());
        }
        Err(refuse(format!("the {size} bytes at offset {offset} of the configuration are read-only")))
    }

    fn new_inflight(&mut self, area: InflightArea, payload_bytes: usize) -> Result<Reply, Error> {
        check_inflight(&area)?;
        let packed = self.features & feature::RING_PACKED != 0;
        let queue_size = recorded_size(area.queue_size);
        let (inflight, file) = InflightRegion::create(area.queues, queue_size, packed)?;
        let area = InflightArea { size: inflight.bytes(), offset: 0, ..area };
        // As long as the payload of the request, with or without padding.
        let payload = &area.as_bytes()[..payload_bytes];
        Ok(Reply { file: Some(file), ..Reply::new(code::GET_INFLIGHT_FD, payload) })
    }

    fn set_inflight(&mut self, area: InflightArea, file: UntrustedFd) -> Result<(), Error> {
        check_inflight(&area)?;
        if self.vrings.iter().any(Vring::is_served) {
            return Err(refuse("the in-flight table cannot change while rings are served"));
        }
        let packed = self.features & feature::RING_PACKED != 0;
        let InflightArea { size, offset, queues, queue_size, .. } = area;
        let queue_size = InflightRegion::stored_size(size, queues, queue_size, packed);
        let file = file.into_memory()?;
        let region = InflightRegion::open(file, offset, size, queues, queue_size, packed)?;
        // An earlier daemon of this front end may have recorded the driver's setting of the write cache. The
        // front end does not send it again.
        let writeback = region.write_cache().unwrap_or(self.writeback);
        self.inflight = Some(Arc::new(region));
        self.shared.registry.update(|front_end| front_end.recorded = true);
        self.set_writeback(writeback);
        Ok(())
    }

    pub fn handle_wakeup(&mut self) {
        if self.shared.config_changed.swap(false, SeqCst) {
            self.notify_config_change();
        }
        self.report_rejections();
    }

    fn notify_config_change(&mut self) {
        let Some(socket) = &self.request_socket else { return };
        let message = config_change();
        match send_some(socket.as_fd(), &message, None) {
            Ok(bytes) if bytes == message.len() => {}
            // The queue of the socket is full of such messages, so the front end has yet to read the
            // configuration.
            Err(Errno::AGAIN) => {}
            Ok(_) => self.close_backend_channel("the socket took only a part of a message"),
            Err(errno) => self.close_backend_channel(&errno.to_string()),
        }
    }

    /// The socket for requests of the back end, polled to detect that the front end closes it or sends data.
    pub fn request_socket(&self) -> Option<BorrowedFd<'_>> {
        self.request_socket.as_ref().map(AsFd::as_fd)
    }

    /// Closes [`Session::request_socket`], for which poll(2) returned `events`. Received data is never read,
    /// but its descriptors could keep sockets open, even the connection of the front end itself.
    pub fn close_request_socket(&mut self, events: PollFlags) {
        if events.contains(PollFlags::HUP) {
            self.request_socket = None;
        } else {
            self.close_backend_channel("the front end sent data, but no replies are expected");
        }
    }

    fn close_backend_channel(&mut self, why: &str) {
        self.request_socket = None;
        let reason = format!("the front end will not be notified of a new size: {why}");
        self.shared.registry.report(&self.peer, Event::Refused(reason));
    }

    fn report_rejections(&mut self) {
        for vring in &mut self.vrings {
            for reason in vring.take_rejections(&self.shared) {
                self.shared.registry.report(&self.peer, Event::RingRejected(vring.index(), reason));
            }
        }
    }

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

fn refuse_unoffered(features: u64) -> Result<(), Error> {
    if features != 0 {
        return Err(refuse(format!("features {features:#x} were not offered")));
    }
    Ok(())
}

fn check_inflight(area: &InflightArea) -> Result<(), Error> {
    let InflightArea { queues, queue_size, .. } = *area;
    if queues == 0 || usize::from(queues) > VRINGS_MAX || queue_size == 0 {
        return Err(refuse(format!("invalid number of rings ({queues}) or descriptors ({queue_size})")));
    }
    Ok(())
}

fn spec((region, file): (Region, UntrustedFd)) -> Result<RegionSpec, Error> {
    let [guest_start, length, user_start, file_offset] = region;
    Ok(RegionSpec { guest_start, user_start, length, file: file.into_memory()?, file_offset })
}

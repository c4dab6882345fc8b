//! The front end: the messages that it sends for its machine, and what it keeps when a daemon is killed.

use std::cell::RefCell;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

use blkq_export::vhost_user::simulated::{BACKEND_CONFIG_CHANGE, Device, Reply, USER_OFFSET, code, feature};
use blkq_simulation as simulation;

use super::super::life::World;
use super::machine::Machine;
use super::wiring::Tamper;

const NEED_REPLY: u32 = 1 << 3;
/// Offset of the write cache mode in the configuration.
const WRITEBACK_AT: u32 = 32;
/// Bit of the device status: a ring was rejected.
const NEEDS_RESET: u64 = 0x40;
/// Time within which the descriptors of a closed device must be closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of turns in which a stopped device must do nothing.
const QUIET_TURNS: u64 = 20;

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn longs(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn number(payload: &[u8]) -> u64 {
    u64::from_ne_bytes(payload[..8].try_into().unwrap())
}

/// The front end's record of requests in flight.
struct Record {
    /// The payload of the message that created the record.
    area: Vec<u8>,
    file: OwnedFd,
}

#[derive(Default)]
pub struct FrontEnd {
    device: Option<Device>,
    /// The features that the driver acknowledged; 0 before it has done so.
    features: u64,
    record: Option<Record>,
    backend: Option<UnixStream>,
    /// The write cache mode that the driver set last; `None` for the default.
    switched: Option<bool>,
    pub stops: u64,
    pub resets: u64,
    pub switches: u64,
    pub bounced: u64,
}

/// The machine's world. It must not be borrowed while the device handles a message, because the world runs meanwhile.
type Shared = Rc<RefCell<World>>;

fn with<R>(world: &Shared, f: impl FnOnce(&mut Machine) -> R) -> R {
    f(world.borrow_mut().machine.as_mut().unwrap())
}

fn one_in(world: &Shared, count: u64) -> bool {
    world.borrow_mut().chance.one_in(count)
}

impl FrontEnd {
    fn ask(&mut self, code: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> Option<Reply> {
        let message = [words(&[code, 1 | NEED_REPLY, payload.len() as u32]), payload.to_vec()].concat();
        let files = files.iter().map(|file| file.try_clone_to_owned().unwrap()).collect();
        let reply = self.device.as_mut().unwrap().handle(&message, files);
        let reply = reply.unwrap_or_else(|refusal| panic!("request {code} is refused: {refusal}"));
        reply.map(|(bytes, file)| (bytes[12..].to_vec(), file))
    }

    /// Sends a message whose reply is at most an acknowledgement.
    fn send(&mut self, code: u32, payload: &[u8], files: &[BorrowedFd<'_>]) {
        let reply = self.ask(code, payload, files);
        assert!(reply.is_none_or(|(payload, _)| number(&payload) == 0), "request {code} is not done");
    }

    fn get(&mut self, code: u32, payload: &[u8]) -> Vec<u8> {
        self.ask(code, payload, &[]).unwrap().0
    }

    /// Connects to a new daemon, and starts the machine's rings.
    pub fn connect(&mut self, world: &Shared) {
        {
            let World { server, machine, common, .. } = &mut *world.borrow_mut();
            let (server, machine) = (server.as_ref().unwrap(), machine.as_mut().unwrap());
            machine.daemon_began = common.tick();
            let device = Device::connect(&server.disk, server.engine.handle(), machine.wiring.rings);
            self.device = Some(device.unwrap());
        }
        self.send(code::SET_OWNER, &[], &[]);
        let protocol = number(&self.get(code::GET_PROTOCOL_FEATURES, &[]));
        self.send(code::SET_PROTOCOL_FEATURES, &longs(&[protocol]), &[]);
        let (front, back) = UnixStream::pair().unwrap();
        front.set_nonblocking(true).unwrap();
        self.send(code::SET_BACKEND_REQ_FD, &[], &[back.as_fd()]);
        self.backend = Some(front);
        self.negotiate(world);
        self.share_record(world);
        self.share_memory(world);
        self.read_config(world);
        self.start_all(world);
    }

    fn negotiate(&mut self, world: &Shared) {
        let offered = number(&self.get(code::GET_FEATURES, &[]));
        if self.features == 0 {
            let lacking = with(world, |machine| {
                let wiring = &machine.wiring;
                let bits = [
                    (wiring.packed, feature::RING_PACKED),
                    (wiring.event_idx, feature::RING_EVENT_IDX),
                    (wiring.indirect, feature::RING_INDIRECT_DESC),
                    (wiring.flushes, feature::FLUSH),
                    (wiring.switches, feature::CONFIG_WCE),
                ];
                bits.iter().filter(|(has, _)| !has).fold(0, |all, (_, bit)| all | bit)
            });
            self.features = offered & !lacking;
        }
        self.send(code::SET_FEATURES, &longs(&[self.features]), &[]);
    }

    fn share_record(&mut self, world: &Shared) {
        let (has, rings, size) = with(world, |machine| {
            (machine.wiring.inflight, machine.wiring.rings as u32, u32::from(machine.wiring.size))
        });
        if !has {
            return;
        }
        let Record { area, file } = match self.record.take() {
            Some(record) => record,
            None => {
                let area = [longs(&[0, 0]), words(&[rings | size << 16])].concat();
                let (area, file) = self.ask(code::GET_INFLIGHT_FD, &area, &[]).unwrap();
                Record { area, file: file.unwrap() }
            }
        };
        // The record is stored before it is used, because the daemon may be killed while it processes the message.
        let copy = file.try_clone().unwrap();
        self.record = Some(Record { area: area.clone(), file });
        self.send(code::SET_INFLIGHT_FD, &area, &[copy.as_fd()]);
    }

    fn share_memory(&mut self, world: &Shared) {
        let (file, places) =
            with(world, |machine| (machine.guest.file.try_clone().unwrap(), machine.guest.places().to_vec()));
        let mut table = words(&[places.len() as u32, 0]);
        for (address, at, length) in &places {
            table.extend(longs(&[*address, *length, address + USER_OFFSET, *at]));
        }
        self.send(code::SET_MEM_TABLE, &table, &vec![file.as_fd(); places.len()]);
    }

    /// Reads the configuration, and compares it with the disk.
    fn read_config(&mut self, world: &Shared) {
        let range = |offset: u32, size: u32| [words(&[offset, size, 0]), vec![0; size as usize]].concat();
        let capacity = self.get(code::GET_CONFIG, &range(0, 8));
        let cache = self.get(code::GET_CONFIG, &range(WRITEBACK_AT, 1))[12] == 1;
        let world = &mut *world.borrow_mut();
        let machine = world.machine.as_mut().unwrap();
        machine.sectors = number(&capacity[12..]);
        assert_eq!(machine.sectors << 9, world.server.as_ref().unwrap().disk.limits().whole_bytes());
        machine.discards = self.features & feature::DISCARD != 0;
        let Some(switched) = self.switched else { return };
        if machine.wiring.inflight {
            let expected = switched && machine.wiring.flushes;
            assert_eq!(cache, expected, "the write cache is not as the driver switched it");
        } else {
            // Without a record, a new daemon does not know the previous mode.
            self.switched = None;
            machine.cache.settle(world.common.tick(), machine.wiring.flushes);
        }
    }

    fn start_all(&mut self, world: &Shared) {
        let rings = with(world, |machine| machine.rings.len());
        (0..rings).for_each(|index| self.start(world, index));
    }

    fn start(&mut self, world: &Shared, index: usize) {
        let ring = index as u32;
        let (spec, base, kick, call) = with(world, |machine| {
            let ring = &mut machine.rings[index];
            ring.served = true;
            let base = ring.base.take().unwrap_or_else(|| ring.driver.used_position());
            (ring.driver.spec, base, ring.kick.try_clone().unwrap(), ring.call.try_clone().unwrap())
        });
        self.send(code::SET_VRING_NUM, &words(&[ring, spec.size.into()]), &[]);
        self.send(code::SET_VRING_BASE, &words(&[ring, base]), &[]);
        let places = longs(&[spec.descriptors, spec.device_area, spec.driver_area, 0]);
        self.send(code::SET_VRING_ADDR, &[words(&[ring, 0]), places].concat(), &[]);
        let call = |this: &mut FrontEnd| {
            this.send(code::SET_VRING_CALL, &longs(&[ring.into()]), &[call.as_fd()]);
        };
        let before = one_in(world, 2);
        if before {
            call(self);
        }
        self.send(code::SET_VRING_KICK, &longs(&[ring.into()]), &[kick.as_fd()]);
        self.send(code::SET_VRING_ENABLE, &words(&[ring, 1]), &[]);
        if !before {
            call(self);
        }
    }

    /// Stops a ring: all requests that the device took have completed, and no other will.
    fn stop(&mut self, world: &Shared, index: usize) {
        let reply = self.get(code::GET_VRING_BASE, &words(&[index as u32, 0]));
        let base = u32::from_ne_bytes(reply[4..8].try_into().unwrap());
        let World { machine, common, chance, .. } = &mut *world.borrow_mut();
        machine.as_mut().unwrap().stopped(index, base, common, chance);
        self.stops += 1;
    }

    pub fn stop_all(&mut self, world: &Shared) {
        let rings = with(world, |machine| machine.rings.len());
        (0..rings).for_each(|index| self.stop(world, index));
    }

    /// Stops all rings for a while, and checks that neither the image nor the memory is written.
    fn pause(&mut self, world: &Shared) {
        self.stop_all(world);
        let writes = || simulation::with_file(|file| file.writes());
        let before = writes();
        for _ in 0..QUIET_TURNS {
            world.borrow_mut().step();
        }
        assert_eq!(writes(), before, "the image is written though all rings are stopped");
        with(world, |machine| machine.check());
        self.start_all(world);
    }

    /// Does one of the things that front ends do while a machine runs.
    pub fn act(&mut self, world: &Shared) {
        let (pick, index) = {
            let World { chance, machine, .. } = &mut *world.borrow_mut();
            let rings = machine.as_ref().unwrap().rings.len() as u64;
            (chance.below(9), chance.below(rings) as usize)
        };
        match pick {
            0 | 1 => {
                self.stop(world, index);
                world.borrow_mut().step();
                self.start(world, index);
            }
            2 => self.pause(world),
            3 => {
                // Disables the ring, and enables it again.
                self.send(code::SET_VRING_ENABLE, &words(&[index as u32, 0]), &[]);
                world.borrow_mut().step();
                self.send(code::SET_VRING_ENABLE, &words(&[index as u32, 1]), &[]);
            }
            4 => self.share_memory(world),
            5 => {
                let call = with(world, |machine| machine.rings[index].call.try_clone().unwrap());
                self.send(code::SET_VRING_CALL, &longs(&[index as u64]), &[call.as_fd()]);
            }
            6 | 7 if with(world, |machine| machine.wiring.switches) => {
                let on = one_in(world, 2);
                self.switch(world, on);
            }
            8 if one_in(world, 3) => self.reset(world),
            _ => {}
        }
        let status = number(&self.get(code::GET_STATUS, &[]));
        assert_eq!(self.device.as_ref().unwrap().rejection(), None, "a ring was rejected");
        assert_eq!(status & NEEDS_RESET, 0, "a ring was rejected");
    }

    /// The driver switches the write cache.
    fn switch(&mut self, world: &Shared, on: bool) {
        let change = |settles: bool| {
            let World { machine, common, .. } = &mut *world.borrow_mut();
            let machine = machine.as_mut().unwrap();
            let cached = on && machine.wiring.flushes;
            match settles {
                false => machine.cache.begin(common.tick(), cached),
                true => machine.cache.settle(common.tick(), cached),
            }
        };
        // The mode is unknown if the daemon is killed while it processes the message.
        self.switched = None;
        change(false);
        self.send(code::SET_CONFIG, &[words(&[WRITEBACK_AT, 1, 0]), vec![on.into()]].concat(), &[]);
        change(true);
        self.switched = Some(on);
        self.switches += 1;
    }

    /// Resets the device in one of three ways; the driver starts again.
    fn reset(&mut self, world: &Shared) {
        let how = world.borrow_mut().chance.below(3);
        match how {
            0 => self.send(code::RESET_DEVICE, &[], &[]),
            1 => self.send(code::SET_STATUS, &longs(&[0]), &[]),
            _ => self.stop_all(world),
        }
        self.resets += 1;
        {
            let World { machine, common, chance, .. } = &mut *world.borrow_mut();
            let machine = machine.as_mut().unwrap();
            machine.reset(chance, common);
            if how == 0 {
                machine.cache.settle(common.tick(), machine.wiring.flushes);
            }
        }
        match how {
            0 => {
                (self.features, self.switched) = (0, None);
                self.negotiate(world);
                self.read_config(world);
            }
            1 => {}
            // The device was not informed about the reset: its record belongs to the previous driver state.
            _ => {
                self.record = None;
                self.share_record(world);
            }
        }
        self.start_all(world);
    }

    /// The device may have another size: checks that the front end is notified, and reads the configuration.
    pub fn changed(&mut self, world: &Shared) {
        self.device.as_mut().unwrap().resized();
        let mut message = [0; 12];
        self.backend.as_mut().unwrap().read_exact(&mut message).unwrap();
        assert_eq!(message[..4], BACKEND_CONFIG_CHANGE.to_ne_bytes());
        self.read_config(world);
    }

    pub fn disconnect(&mut self) {
        if let Some(device) = self.device.take() {
            assert_eq!(device.rejection(), None, "a ring was rejected");
            self.bounced += device.counters().bounced;
        }
        if let Some(mut backend) = self.backend.take() {
            // Another thread closes the device's end, in real time: see `UntrustedFd`.
            backend.set_nonblocking(false).unwrap();
            backend.set_read_timeout(Some(CLOSE_TIMEOUT)).unwrap();
            let read = backend.read(&mut [0; 12]).expect("the device's own socket is not closed");
            assert_eq!(read, 0, "an unrequested message");
        }
    }

    /// The machine was killed, and its driver's knowledge of the device is lost.
    pub fn forget(&mut self) {
        (self.features, self.switched, self.record) = (0, None, None);
    }

    /// The daemon was killed: the machine processes what was used.
    pub fn killed(&mut self, world: &Shared) {
        let World { machine, common, chance, .. } = &mut *world.borrow_mut();
        let machine = machine.as_mut().unwrap();
        let heads: Vec<Vec<u16>> =
            (0..machine.rings.len()).map(|index| self.in_flight(index, machine)).collect();
        machine.killed(common, |index, head| heads[index].contains(&head));
        if machine.tamper == Some(Tamper::ForgetsInFlight) && !machine.wiring.packed {
            let index = chance.below(heads.len() as u64) as usize;
            if let (Some(head), Some(Record { file, .. })) = (machine.heads(index).next(), &self.record) {
                let at = Self::region(index, machine) + 16 + 16 * u64::from(head);
                std::fs::File::from(file.try_clone().unwrap()).write_all_at(&[0], at).unwrap();
            }
        }
    }

    /// Offset of ring `index` in the record.
    fn region(index: usize, machine: &Machine) -> u64 {
        let unit = if machine.wiring.packed { 32 } else { 16 };
        index as u64 * (unit + unit * u64::from(machine.wiring.size)).next_multiple_of(64)
    }

    /// The heads that the record of ring `index` contains as in flight.
    fn in_flight(&self, index: usize, machine: &Machine) -> Vec<u16> {
        let Some(Record { file, .. }) = &self.record else { return Vec::new() };
        let file = std::fs::File::from(file.try_clone().unwrap());
        let (unit, id) = if machine.wiring.packed { (32, Some(16)) } else { (16, None) };
        let entry = |entry: u16| {
            let mut bytes = [0; 32];
            let at = Self::region(index, machine) + unit + unit * u64::from(entry);
            file.read_exact_at(&mut bytes[..unit as usize], at).unwrap();
            let head = id.map_or(entry, |at| u16::from_le_bytes([bytes[at], bytes[at + 1]]));
            (bytes[0] != 0).then_some(head)
        };
        (0..machine.wiring.size).filter_map(entry).collect()
    }
}

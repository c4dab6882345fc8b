//! A front end without a socket: it sends the messages, and acts as a guest with one ring, which is polled.

use std::os::fd::{AsFd, OwnedFd};

use blkq::drivers::null::{Null, NullOptions};
use blkq::{Disk, EngineThread};
use rustix::event::{EventfdFlags, eventfd};

use super::super::config::feature;
use super::super::device_harness::Device;
use super::super::harness::{Driver, Guest, USER_OFFSET};
use super::super::message::{code, protocol};

const RING: u64 = 0x10000;
const DRIVER_AREA: u64 = RING + 0x4000;
const HEADERS: u64 = 0x100000;
const SIZE: u16 = 16;
/// Payload of SET_VRING_KICK without an eventfd.
const POLLED: u64 = 1 << 8;

/// A front end and its guest. The engine is dropped after the device.
pub struct FrontEnd {
    pub device: Device,
    pub guest: Guest,
    pub driver: Driver,
    pub engine: EngineThread,
    /// Signaled when the ring is rejected.
    error: OwnedFd,
}

impl FrontEnd {
    /// A front end that negotiated features, shared memory and record, and described its ring.
    pub fn connect() -> FrontEnd {
        let disk = Disk::builder(Box::new(Null::new(NullOptions::new(1 << 20)).unwrap())).build().unwrap();
        let engine = EngineThread::spawn("model", vec![(disk.clone(), 0)]).unwrap();
        let device = Device::connect(&disk, engine.handle(), 1).unwrap();
        let guest = Guest::new(&[(RING, Driver::BYTES), (HEADERS, 0x1000)]);
        let driver = Driver::new(&guest, RING, SIZE, false, false);
        let error = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let mut this = FrontEnd { device, guest, driver, engine, error };
        let protocols = protocol::BACKEND_REQ | protocol::INFLIGHT_SHMFD | protocol::RESET_DEVICE;
        this.send(code::SET_PROTOCOL_FEATURES, &[protocols], &[]);
        this.send(code::SET_FEATURES, &[feature::VERSION_1], &[]);
        let places = this.guest.places().to_vec();
        let mut table = vec![places.len() as u64];
        for (address, at, length) in &places {
            table.extend([*address, *length, address + USER_OFFSET, *at]);
        }
        let memory = this.guest.file.try_clone().unwrap();
        this.send(code::SET_MEM_TABLE, &table, &vec![memory.as_fd(); places.len()]);
        let area = [0, 0, u64::from(SIZE) << 16 | 1];
        let (reply, file) = this.send(code::GET_INFLIGHT_FD, &area, &[]).unwrap();
        let bytes = u64::from_ne_bytes(reply[12..20].try_into().unwrap());
        this.send(code::SET_INFLIGHT_FD, &[bytes, 0, area[2]], &[file.unwrap().as_fd()]);
        this.send(code::SET_VRING_NUM, &[u64::from(SIZE) << 32], &[]);
        let spec = this.driver.spec;
        this.send(code::SET_VRING_ADDR, &[0, spec.descriptors, spec.device_area, spec.driver_area, 0], &[]);
        let error = this.error.try_clone().unwrap();
        this.send(code::SET_VRING_ERR, &[0], &[error.as_fd()]);
        this
    }

    fn send(
        &mut self,
        code: u32,
        words: &[u64],
        files: &[std::os::fd::BorrowedFd<'_>],
    ) -> Option<(Vec<u8>, Option<OwnedFd>)> {
        let mut message: Vec<u8> =
            [code, 1, words.len() as u32 * 8].iter().flat_map(|word| word.to_ne_bytes()).collect();
        words.iter().for_each(|word| message.extend(word.to_ne_bytes()));
        let files = files.iter().map(|file| file.try_clone_to_owned().unwrap()).collect();
        self.device.handle(&message, files).unwrap()
    }

    pub fn start(&mut self) {
        self.send(code::SET_VRING_KICK, &[POLLED], &[]);
    }

    pub fn stop(&mut self) -> u64 {
        let (reply, _) = self.send(code::GET_VRING_BASE, &[0], &[]).unwrap();
        u64::from_ne_bytes(reply[12..20].try_into().unwrap()) >> 32
    }

    pub fn reset(&mut self) {
        self.send(code::RESET_DEVICE, &[], &[]);
    }

    pub fn take_requests_on(&mut self, socket: OwnedFd) {
        self.send(code::SET_BACKEND_REQ_FD, &[], &[socket.as_fd()]);
    }

    /// Makes a request available that reads one sector. `number` selects its place in memory.
    pub fn add(&mut self, number: u64) {
        let at = HEADERS + number * 0x400;
        self.guest.write(at, &[0; 16]);
        self.driver.add(&self.guest, &[(at, 16, false), (at + 0x200, 512, true), (at + 16, 1, true)], false);
    }

    /// Makes a descriptor available that does not exist, after `count` requests.
    pub fn spoil(&self, count: u16) {
        self.guest.put16(DRIVER_AREA + 4 + u64::from(count) * 2, SIZE);
        self.guest.put16(DRIVER_AREA + 2, count + 1);
    }

    pub fn repair(&self, count: u16) {
        self.guest.put16(DRIVER_AREA + 2, count);
    }

    pub fn errors(error: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(error, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    }

    pub fn error(&self) -> OwnedFd {
        self.error.try_clone().unwrap()
    }
}

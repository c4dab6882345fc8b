//! The session of a vhost-user-blk device, on one thread that also runs its engine, with an arbitrary front end: messages in
//! any order, with any numbers and descriptors, or only bytes. The guest writes arbitrary data to its memory, kicks at any
//! time, and truncates the memory. The device must not panic, hang or leak descriptors, and must serve the next front end.
//!
//! Input: as for `vhost_device`, which runs the same steps on a device with a socket and threads.
// Contract: bounded-input

use std::cell::RefCell;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::vhost::{Input, Link, check_descriptors, run};
use blkq::Disk;
use blkq::drivers::ram::Ram;
use blkq::engine::SimulatedEngine;
use blkq::io_uring::squeue;
use blkq::simulation::{World, install};
use blkq_export::vhost_user::fuzzing::{HEADER_BYTES, PAYLOAD_MAX_BYTES};
use blkq_export::vhost_user::simulated::Device;

const QUEUES: usize = 2;
const SIZE: u64 = 16 << 20;

thread_local! {
    static DISK: Arc<Disk> =
        Disk::builder(Box::new(Ram::new(SIZE, 512, false).expect("memory"))).build().expect("a disk");
    static ENGINE: RefCell<SimulatedEngine> = {
        install(&OneThread);
        RefCell::new(SimulatedEngine::new(vec![(DISK.with(Arc::clone), 0)]).expect("an engine"))
    };
}

struct Direct {
    /// `None` after the device has closed the connection.
    device: Option<Device>,
    /// The bytes and descriptors of the next message that have arrived.
    bytes: Vec<u8>,
    files: Vec<OwnedFd>,
    reply: Option<Vec<u8>>,
    /// Our ends of the sockets that were passed to the device.
    ends: Vec<UnixStream>,
}

impl Direct {
    fn connect() -> Direct {
        let handle = ENGINE.with_borrow(|engine| engine.handle().clone());
        let device = DISK.with(|disk| Device::connect(disk, &handle, QUEUES)).expect("a session");
        Direct { device: Some(device), bytes: vec![], files: vec![], reply: None, ends: vec![] }
    }

    /// The bytes of the next message if it is complete, or the header of a message that is too long.
    fn message(&mut self) -> Option<Vec<u8>> {
        let payload_bytes = u32::from_le_bytes(self.bytes.get(8..HEADER_BYTES)?.try_into().ok()?) as usize;
        let payload_bytes = if payload_bytes > PAYLOAD_MAX_BYTES { 0 } else { payload_bytes };
        let bytes = HEADER_BYTES + payload_bytes;
        (self.bytes.len() >= bytes).then(|| self.bytes.drain(..bytes).collect())
    }
}

impl Link for Direct {
    fn send(&mut self, bytes: &[u8], files: &[BorrowedFd<'_>]) {
        self.bytes.extend(bytes);
        self.files.extend(files.iter().map(|file| file.try_clone_to_owned().expect("one more descriptor")));
        while let Some(message) = self.message() {
            let Some(device) = &mut self.device else { return };
            match device.handle(&message, std::mem::take(&mut self.files)) {
                Ok(reply) => self.reply = reply.map(|(bytes, _)| bytes),
                Err(_) => self.device = None,
            }
        }
    }

    fn reply(&mut self) -> Vec<u8> {
        self.reply.take().expect("a reply")
    }

    fn skip_replies(&mut self) {
        self.reply = None;
    }

    fn turn(&mut self) {
        ENGINE.with_borrow_mut(SimulatedEngine::poll);
        if let Some(device) = &mut self.device {
            device.turn();
        }
    }

    fn socket(&mut self) -> OwnedFd {
        let (one, other) = UnixStream::pair().expect("sockets");
        self.ends.push(other);
        one.into()
    }
}

/// The simulated part of the world: this thread runs the engine while it waits for the engine.
struct OneThread;

impl World for OneThread {
    fn step(&self) {
        ENGINE.with_borrow_mut(SimulatedEngine::poll);
    }

    fn instant(&self) {
        unreachable!("it has none");
    }

    fn now_ns(&self) -> u64 {
        unreachable!("the clock is real");
    }

    fn enter(&self, _: &mut Vec<squeue::Entry>, _: &[i32], _: usize, _: Option<Duration>) {
        unreachable!("the ring is real");
    }

    fn reap(&self, _: &mut dyn FnMut(u64, i32, u32)) {
        unreachable!("the ring is real");
    }

    fn close_ring(&self) {
        unreachable!("the ring is real");
    }

    fn sync(&self, _: i32) -> std::io::Result<()> {
        unreachable!("the disk has no file");
    }

    fn exists(&self, _: &Path) -> bool {
        unreachable!("there are no trigger files");
    }

    fn admitted(&self, _: u8, _: u64) {
        unreachable!("the disk reports to no world");
    }

    fn write_held(&self, _: usize, _: u16) {
        unreachable!("the disk reports to no world");
    }

    fn request_completed(&self, _: usize, _: u16) {
        unreachable!("the disk reports to no world");
    }
}

/// Checks one input.
pub fn check(data: &[u8]) {
    let Some(input) = Input::parse(data) else { return };
    run(&input, &mut Direct::connect());
    check_descriptors();
}

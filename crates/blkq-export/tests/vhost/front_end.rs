//! A front end that sends exactly the messages that a test chooses.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(dead_code, reason = "each test file uses a part of this module")]

mod ring;

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, OFlags, fcntl_setfl};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use ring::Buffer;
pub use ring::Ring;

pub const GET_FEATURES: u32 = 1;
pub const SET_FEATURES: u32 = 2;
pub const SET_OWNER: u32 = 3;
pub const SET_MEM_TABLE: u32 = 5;
pub const SET_VRING_NUM: u32 = 8;
pub const SET_VRING_ADDR: u32 = 9;
pub const SET_VRING_BASE: u32 = 10;
pub const GET_VRING_BASE: u32 = 11;
pub const SET_VRING_KICK: u32 = 12;
pub const SET_VRING_CALL: u32 = 13;
pub const SET_VRING_ERR: u32 = 14;
pub const GET_PROTOCOL_FEATURES: u32 = 15;
pub const SET_PROTOCOL_FEATURES: u32 = 16;
pub const GET_QUEUE_NUM: u32 = 17;
pub const SET_VRING_ENABLE: u32 = 18;
pub const SET_BACKEND_REQ_FD: u32 = 21;
pub const GET_CONFIG: u32 = 24;
pub const SET_CONFIG: u32 = 25;
pub const GET_INFLIGHT_FD: u32 = 31;
pub const SET_INFLIGHT_FD: u32 = 32;
pub const RESET_DEVICE: u32 = 34;
pub const ADD_MEM_REG: u32 = 37;
pub const REM_MEM_REG: u32 = 38;
pub const SET_STATUS: u32 = 39;
pub const GET_STATUS: u32 = 40;

pub const NEED_REPLY: u32 = 8;
/// All protocol features that the device offers.
pub const PROTOCOL: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15 | 1 << 16;
pub const F_FLUSH: u64 = 1 << 9;
pub const F_CONFIG_WCE: u64 = 1 << 11;
pub const F_DISCARD: u64 = 1 << 13;
pub const F_WRITE_ZEROES: u64 = 1 << 14;
pub const F_INDIRECT: u64 = 1 << 28;
pub const F_EVENT_IDX: u64 = 1 << 29;
pub const F_PROTOCOL: u64 = 1 << 30;
pub const F_VERSION_1: u64 = 1 << 32;
pub const F_PACKED: u64 = 1 << 34;
pub const FEATURES: u64 = F_FLUSH | F_CONFIG_WCE | F_DISCARD | F_WRITE_ZEROES | F_PROTOCOL | F_VERSION_1;

/// Guest address of the guest's memory, which differs from its address in this process.
pub const GUEST: u64 = 1 << 20;
/// Size of the shared memory, and below that of the part for one ring.
pub const MEMORY: usize = 8 << 20;
const RING: usize = 64 << 10;
/// Difference between the front end's address and the guest address of additional regions.
const USER: u64 = 1 << 45;
/// Offset of the data in the memory.
pub const DATA: usize = 1 << 20;
pub const SIZE: u16 = 64;

/// The memory of the guest, which is never unmapped.
pub struct Memory {
    pub file: OwnedFd,
    pub start: *mut u8,
}

// SAFETY: the memory is only accessed by raw pointers, and stays mapped.
unsafe impl Send for Memory {}

impl Memory {
    pub fn new() -> Memory {
        let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, MEMORY as u64).unwrap();
        let (protection, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        // SAFETY: the kernel chooses the address of the new mapping.
        let start = unsafe { mmap(null, MEMORY, protection, MapFlags::SHARED, &file, 0) };
        Memory { file, start: start.unwrap().cast() }
    }

    fn at<T>(&self, at: usize) -> &T {
        assert!(at + size_of::<T>() <= MEMORY && at.is_multiple_of(align_of::<T>()));
        // SAFETY: the value is inside the mapping, aligned, and either atomic or not used by the device now.
        unsafe { &*self.start.add(at).cast() }
    }

    #[allow(
        clippy::mut_from_ref,
        reason = "a test accesses memory that the device does not use at that time"
    )]
    pub fn bytes(&self, at: usize, bytes: usize) -> &mut [u8] {
        assert!(at + bytes <= MEMORY);
        // SAFETY: the bytes are inside the mapping.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), bytes) }
    }

    pub fn user(&self) -> u64 {
        self.start.addr() as u64
    }
}

pub struct Reply {
    pub code: u32,
    pub payload: Vec<u8>,
    pub file: Option<OwnedFd>,
}

impl Reply {
    pub fn number(&self) -> u64 {
        u64::from_ne_bytes(self.payload[..8].try_into().unwrap())
    }
}

pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub fn longs(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub struct Connection(pub UnixStream);

impl Connection {
    pub fn new(path: &Path) -> Connection {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Connection(stream)
    }

    pub fn raw(&self, header: [u32; 3], payload: &[u8], files: &[BorrowedFd<'_>]) {
        self.bytes(&[words(&header), payload.to_vec()].concat(), files);
    }

    /// Sends bytes, and descriptors with the first of them.
    pub fn bytes(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(files)));
        }
        // The device may have closed the connection. Then there is no reply, and the test notices that.
        let _ = sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    }

    pub fn send(&self, code: u32, payload: &[u8], files: &[BorrowedFd<'_>]) {
        self.raw([code, 1, payload.len() as u32], payload, files);
    }

    pub fn reply(&mut self) -> Option<Reply> {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [std::io::IoSliceMut::new(&mut header)];
        let received = recvmsg(&self.0, &mut into, &mut control, RecvFlags::WAITALL).ok()?;
        if received.bytes == 0 {
            return None;
        }
        assert_eq!(received.bytes, 12);
        let mut file = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(mut files) = message {
                file = files.next();
            }
        }
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!(word(4), 1 | 4, "a reply of version 1");
        let mut payload = vec![0; word(8) as usize];
        self.0.read_exact(&mut payload).unwrap();
        Some(Reply { code: word(0), payload, file })
    }

    pub fn ask(&mut self, code: u32, payload: &[u8]) -> Reply {
        self.send(code, payload, &[]);
        let reply = self.reply().unwrap();
        assert_eq!(reply.code, code);
        reply
    }

    /// Sends a message that asks for an acknowledgement, and returns it: 0 if the message succeeded.
    pub fn acknowledged(&mut self, code: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> u64 {
        self.raw([code, 1 | NEED_REPLY, payload.len() as u32], payload, files);
        let reply = self.reply().unwrap_or_else(|| panic!("closed by {code}"));
        assert_eq!(reply.code, code);
        reply.number()
    }

    pub fn done(&mut self, code: u32, payload: &[u8], files: &[BorrowedFd<'_>]) {
        assert_eq!(self.acknowledged(code, payload, files), 0, "request {code}");
    }

    pub fn is_closed(&mut self) -> bool {
        self.reply().is_none()
    }

    pub fn negotiate(&mut self, features: u64) {
        self.send(SET_OWNER, &[], &[]);
        let offered = self.ask(GET_FEATURES, &[]).number();
        assert_eq!(features & !offered, 0, "{offered:#x}");
        let protocol = self.ask(GET_PROTOCOL_FEATURES, &[]).number();
        assert_eq!(protocol, PROTOCOL);
        self.send(SET_PROTOCOL_FEATURES, &protocol.to_ne_bytes(), &[]);
        self.done(SET_FEATURES, &features.to_ne_bytes(), &[]);
    }
}

pub struct FrontEnd {
    pub connection: Connection,
    pub memory: Memory,
    /// Number of bytes of the memory that the front end shares.
    pub shared: usize,
    pub rings: Vec<Ring>,
}

impl FrontEnd {
    /// A front end that has negotiated `features` and shared its memory. No ring is started.
    pub fn new(path: &Path, features: u64, rings: u32) -> FrontEnd {
        FrontEnd::sharing(path, features, rings, MEMORY)
    }

    /// As [`FrontEnd::new`], but shares only the first `shared` bytes of its memory.
    pub fn sharing(path: &Path, features: u64, rings: u32, shared: usize) -> FrontEnd {
        let rings = (0..rings).map(|index| Ring::new(index, features)).collect();
        let mut front = FrontEnd { connection: Connection::new(path), memory: Memory::new(), shared, rings };
        front.begin(features);
        front
    }

    pub fn started(path: &Path, features: u64, rings: u32) -> FrontEnd {
        let mut front = FrontEnd::new(path, features, rings);
        (0..rings).for_each(|ring| front.start(ring, 0));
        front
    }

    pub fn begin(&mut self, features: u64) {
        self.connection.negotiate(features);
        let region = longs(&[GUEST, self.shared as u64, self.memory.user(), 0]);
        let table = [words(&[1, 0]), region].concat();
        self.connection.done(SET_MEM_TABLE, &table, &[self.memory.file.as_fd()]);
    }

    /// `base` counts the chains of a split ring or the descriptors of a packed one.
    pub fn start(&mut self, ring: u32, base: u16) {
        self.prepare(ring, base);
        self.connection.done(SET_VRING_ENABLE, &words(&[ring, 1]), &[]);
    }

    /// Describes ring `ring`, which starts at the position `base` when it is enabled.
    pub fn prepare(&mut self, ring: u32, base: u16) {
        self.describe(ring, base, Connection::done);
    }

    /// As [`FrontEnd::prepare`], but `send` sends the messages.
    pub fn describe(
        &mut self,
        ring: u32,
        base: u16,
        send: impl Fn(&mut Connection, u32, &[u8], &[BorrowedFd<'_>]),
    ) {
        let it = &self.rings[ring as usize];
        let user = self.memory.user();
        let places = [it.base(), it.used_at(), it.available_at()].map(|at| user + at as u64);
        let address = [words(&[ring, 0]), longs(&[places[0], places[1], places[2], 0])].concat();
        let connection = &mut self.connection;
        send(connection, SET_VRING_NUM, &words(&[ring, SIZE.into()]), &[]);
        send(connection, SET_VRING_BASE, &words(&[ring, it.vring_base(base)]), &[]);
        send(connection, SET_VRING_ADDR, &address, &[]);
        send(connection, SET_VRING_CALL, &longs(&[ring.into()]), &[it.call.as_fd()]);
        send(connection, SET_VRING_KICK, &longs(&[ring.into()]), &[it.kick.as_fd()]);
    }

    /// Stops a ring, and returns the position up to which the device has used it.
    pub fn stop(&mut self, ring: u32) -> u16 {
        let reply = self.connection.ask(GET_VRING_BASE, &words(&[ring, 0]));
        let base = u32::from_ne_bytes(reply.payload[4..8].try_into().unwrap());
        self.rings[ring as usize].count(base)
    }

    pub fn descriptor(&self, ring: usize, index: u16, at: u64, bytes: u32, flags: u16, next: u16) {
        self.rings[ring].descriptor(&self.memory, index, (at, bytes, false), flags, next);
    }

    pub fn guest(at: usize) -> u64 {
        GUEST + at as u64
    }

    /// Shares another region: `bytes` bytes of `file`, at guest address `guest`. Returns the acknowledgement.
    pub fn add_region(&mut self, guest: u64, bytes: u64, file: BorrowedFd<'_>) -> u64 {
        self.connection.acknowledged(ADD_MEM_REG, &longs(&[0, guest, bytes, guest | USER, 0]), &[file])
    }

    pub fn remove_region(&mut self, guest: u64, bytes: u64) {
        self.connection.done(REM_MEM_REG, &longs(&[0, guest, bytes, guest | USER, 0]), &[]);
    }

    /// Makes a request available without a kick, and returns its head. `data` has the guest addresses and
    /// lengths of its data: at most two parts, or six in an indirect table.
    pub fn submit_pieces(&mut self, ring: usize, kind: u32, sector: u64, data: &[(u64, u32)]) -> u16 {
        let it = &mut self.rings[ring];
        let head = it.free.pop().expect("a free descriptor");
        let header = it.header(head);
        self.memory.bytes(header, 16).copy_from_slice(&[words(&[kind, 0]), longs(&[sector])].concat());
        self.memory.bytes(header + 16, 1)[0] = 0xff;
        let write = matches!(kind, 0 | 8);
        let mut buffers: Vec<Buffer> = vec![(Self::guest(header), 16, false)];
        buffers.extend(data.iter().map(|(at, bytes)| (*at, *bytes, write)));
        buffers.push((Self::guest(header + 16), 1, true));
        it.add(&self.memory, head, &buffers);
        head
    }

    /// Runs one such request, and returns its status.
    pub fn run_pieces(&mut self, ring: usize, kind: u32, sector: u64, data: &[(u64, u32)]) -> u8 {
        let head = self.submit_pieces(ring, kind, sector, data);
        self.kick(ring);
        let all = self.wait(ring, 1);
        assert_eq!((all.len(), all[0].0), (1, head));
        all[0].1
    }

    /// As [`FrontEnd::submit_pieces`], with `bytes` bytes of data at offset `at` of the memory.
    pub fn submit(&mut self, ring: usize, kind: u32, sector: u64, at: usize, bytes: u32) -> u16 {
        let data = [(Self::guest(at), bytes)];
        self.submit_pieces(ring, kind, sector, if bytes > 0 { &data } else { &[] })
    }

    pub fn make_available(&mut self, ring: usize, head: u16) {
        self.rings[ring].make_available(&self.memory, head);
    }

    pub fn kick(&self, ring: usize) {
        rustix::io::write(&self.rings[ring].kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// The requests that completed since the last call: head, status and number of bytes written.
    pub fn completed(&mut self, ring: usize) -> Vec<(u16, u8, u32)> {
        let it = &mut self.rings[ring];
        let mut all = Vec::new();
        while let Some((head, length)) = it.take_used(&self.memory) {
            all.push((head, self.memory.bytes(it.header(head) + 16, 1)[0], length));
        }
        all
    }

    /// The position of the published used chains: chains of a split ring, descriptors of a packed one.
    pub fn used_index(&self, ring: usize) -> u16 {
        self.rings[ring].published(&self.memory)
    }

    /// Waits for calls until `count` requests have completed.
    pub fn wait(&mut self, ring: usize, count: usize) -> Vec<(u16, u8, u32)> {
        let mut all = self.completed(ring);
        while all.len() < count {
            self.rings[ring].want_call(&self.memory);
            let before = all.len();
            all.extend(self.completed(ring));
            if all.len() == before {
                assert!(self.is_called(ring, 60), "no call; {} of {count} completed", all.len());
            }
        }
        all
    }

    /// Waits for a call for at most `seconds` seconds, and returns whether one arrived.
    pub fn is_called(&self, ring: usize, seconds: i64) -> bool {
        let call = &self.rings[ring].call;
        let mut polls = [PollFd::new(call, PollFlags::IN)];
        let timeout = Timespec { tv_sec: seconds, tv_nsec: 0 };
        let ready = poll(&mut polls, Some(&timeout)).unwrap() == 1;
        ready && rustix::io::read(call, &mut [0; 8]).unwrap() == 8
    }

    pub fn run(&mut self, ring: usize, kind: u32, sector: u64, at: usize, bytes: u32) -> u8 {
        let head = self.submit(ring, kind, sector, at, bytes);
        self.kick(ring);
        let all = self.wait(ring, 1);
        assert_eq!((all.len(), all[0].0), (1, head));
        all[0].1
    }

    /// Asks the device for a record of requests in flight, and passes it back for use.
    pub fn keep_record(&mut self) -> Reply {
        self.keep_record_of(SIZE)
    }

    /// As [`FrontEnd::keep_record`], for rings of `size` descriptors.
    pub fn keep_record_of(&mut self, size: u16) -> Reply {
        let sizes = [self.rings.len() as u16, size].map(u16::to_ne_bytes).concat();
        let record = self.connection.ask(GET_INFLIGHT_FD, &[longs(&[0, 0]), sizes, vec![0; 4]].concat());
        let file = record.file.as_ref().unwrap().as_fd();
        self.connection.done(SET_INFLIGHT_FD, &record.payload, &[file]);
        record
    }

    /// Connects to the next device, and passes it the record of requests in flight.
    pub fn reconnect(&mut self, path: &Path, features: u64, inflight: &Reply) {
        self.connection = Connection::new(path);
        self.begin(features);
        let file = inflight.file.as_ref().unwrap().as_fd();
        self.connection.done(SET_INFLIGHT_FD, &inflight.payload, &[file]);
        self.start_all();
    }

    pub fn start_all(&mut self) {
        for ring in 0..self.rings.len() {
            let base = self.used_index(ring);
            self.start(ring as u32, base);
        }
    }
}

/// Fills `event` and makes it blocking, again and again, until `stop`: a write of an engine would block.
/// Returns false, with a full eventfd, if `progress` does not change for 20 s.
fn refill(event: &OwnedFd, progress: &AtomicU64, stop: &AtomicBool) -> bool {
    let full = (u64::MAX - 1).to_ne_bytes();
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..200 {
            fcntl_setfl(event, OFlags::NONBLOCK).unwrap();
            let _ = rustix::io::read(event, &mut [0; 8]);
            // An engine that polls the eventfd finds room now.
            let _ = rustix::io::write(event, &full);
            fcntl_setfl(event, OFlags::empty()).unwrap();
        }
        let (begin, before) = (Instant::now(), progress.load(Ordering::Relaxed));
        while progress.load(Ordering::Relaxed) < before + 2 && !stop.load(Ordering::Relaxed) {
            if begin.elapsed() > Duration::from_secs(20) {
                return false;
            }
            std::thread::yield_now();
        }
    }
    true
}

/// Refills the call eventfd of ring 0 for 3 s. Reads on rings 0 and 1, and `besides`, must continue
/// meanwhile; then `stop`, which must not take long.
pub fn withstand_refills(front: &mut FrontEnd, at: usize, mut besides: impl FnMut(), stop: impl FnOnce()) {
    let event = front.rings[0].call.try_clone().unwrap();
    let (progress, stopped) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let refills = scope.spawn(|| refill(&event, &progress, &stopped));
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(3) && !refills.is_finished() {
            for ring in [0, 0, 0, 0, 1] {
                front.submit(ring, 0, 0, at, 512);
                front.kick(ring);
                while !refills.is_finished() && front.completed(ring).is_empty() {}
            }
            besides();
            progress.fetch_add(1, Ordering::Relaxed);
        }
        let begin = Instant::now();
        // The eventfd is still being refilled.
        stop();
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
        stopped.store(true, Ordering::Relaxed);
        assert!(refills.join().unwrap(), "the engine is blocked");
    });
}

pub fn write_all(connection: &mut Connection, bytes: &[u8]) {
    let _ = connection.0.write_all(bytes);
}

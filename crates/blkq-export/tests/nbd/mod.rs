//! A server to test, and a small client that sends exactly the bytes that a test needs.
#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]
#![allow(dead_code, reason = "every test file uses a part of it")]

pub mod pki;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blkq::drivers::ram::Ram;
use blkq::{Disk, Driver, DriverQueue, EngineThread, Error, Extent, OpenContext, QueueLimits};
use blkq_drivers::model::{Model, ModelCompletion, ModelOptions};
use blkq_export::Listen;
use blkq_export::nbd::reply::ReplyStyle;
use blkq_export::nbd::{NbdExport, NbdOptions, NbdServer};

pub const SIZE: u64 = 256 << 20;

pub fn ram() -> Box<dyn Driver> {
    Box::new(Ram::new(SIZE, 512, false).unwrap())
}

/// A device whose requests take a random time in `range_ns`, in nanoseconds, and so complete out of order.
pub fn slow(range_ns: std::ops::RangeInclusive<u64>) -> Box<dyn Driver> {
    let completion = ModelCompletion::Random(range_ns, 1);
    Box::new(Model::new(ModelOptions { completion, ..ModelOptions::new(SIZE) }).unwrap())
}

/// A device whose queries of extents each wait for a message.
pub struct SlowExtents {
    disk: Box<dyn Driver>,
    let_go: Mutex<Receiver<()>>,
    begun: Arc<AtomicU32>,
}

impl SlowExtents {
    /// Returns the device, the channel of its queries, and the number of queries that have begun.
    pub fn driver() -> (Box<dyn Driver>, Sender<()>, Arc<AtomicU32>) {
        let ((let_go, receiver), begun) = (channel(), Arc::new(AtomicU32::new(0)));
        let driver = SlowExtents { disk: ram(), let_go: Mutex::new(receiver), begun: begun.clone() };
        (Box::new(driver), let_go, begun)
    }
}

impl Driver for SlowExtents {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn limits(&self) -> QueueLimits {
        self.disk.limits()
    }

    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        self.disk.open_queue(cx)
    }

    fn extents(&self, range: Range<u64>, max: usize) -> Result<Vec<Extent>, Error> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.let_go.lock().unwrap().recv().unwrap();
        self.disk.extents(range, max)
    }
}

/// A unique path that contains characters which a URI must escape.
pub fn socket_path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("blkq nbd+{}-{number}", std::process::id()))
}

pub struct Served {
    pub server: NbdServer,
    pub path: PathBuf,
    pub disk: Arc<Disk>,
    _engines: Vec<EngineThread>,
}

pub fn engines(disk: &Arc<Disk>) -> Vec<EngineThread> {
    (0..disk.queue_count())
        .map(|i| EngineThread::spawn("nbd-test", vec![(disk.clone(), i)]).unwrap())
        .collect()
}

pub fn options() -> NbdOptions {
    let export = NbdExport { name: "disk".into(), description: "for a test".into(), queue: 0 };
    NbdOptions { exports: vec![export], ..NbdOptions::default() }
}

pub fn serve(driver: Box<dyn Driver>, queues: usize, options: NbdOptions) -> Served {
    serve_disk(Disk::builder(driver).queues(queues).build().unwrap(), options)
}

pub fn serve_disk(disk: Arc<Disk>, options: NbdOptions) -> Served {
    let path = socket_path();
    let engines = engines(&disk);
    let handles: Vec<_> = engines.iter().map(|engine| engine.handle().clone()).collect();
    let server = NbdServer::start(Listen::Unix(path.clone()), options, &handles).unwrap();
    Served { server, path, disk, _engines: engines }
}

impl Served {
    pub fn raw(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    pub fn client(&self, style: ReplyStyle) -> Client<UnixStream> {
        Client::begin(self.raw(), style)
    }

    pub fn uri(&self) -> &str {
        self.server.uri()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.server.stop(true).unwrap();
        assert_eq!(self.server.connection_count(), 0);
        assert!(!self.path.exists());
        if !std::thread::panicking() {
            assert_eq!(self.disk.stats().in_flight, [0, 0]);
        }
    }
}

pub fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// The reply to a request: the error (0: none), and the data of a read or the payload of the last chunk.
#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    pub cookie: u64,
    pub error: u32,
    pub payload: Vec<u8>,
}

pub struct Client<S> {
    pub stream: S,
    pub style: ReplyStyle,
    pub flags: u16,
    /// Size in bytes, as the server announced it.
    pub size: u64,
    /// Parts of incomplete reads, by cookie and offset.
    parts: BTreeMap<(u64, u64), Vec<u8>>,
}

impl<S: Read + Write> Client<S> {
    /// A client that has not begun the handshake.
    pub fn new(stream: S, style: ReplyStyle) -> Client<S> {
        Client { stream, style, flags: 0, size: 0, parts: BTreeMap::new() }
    }

    pub fn begin(stream: S, style: ReplyStyle) -> Client<S> {
        let mut client = Client::new(stream, style);
        assert_eq!(client.take(18), b"NBDMAGICIHAVEOPT\0\x03");
        client.stream.write_all(&3u32.to_be_bytes()).unwrap();
        match style {
            ReplyStyle::Simple => {}
            ReplyStyle::Structured => client.option(8, &[]),
            ReplyStyle::Extended => client.option(11, &[]),
        }
        if style != ReplyStyle::Simple {
            client.option(10, b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation");
        }
        client.option(7, b"\0\0\0\0\0\x01\0\x03"); // GO with NBD_INFO_BLOCK_SIZE
        client
    }

    pub fn take(&mut self, bytes: usize) -> Vec<u8> {
        let mut taken = vec![0; bytes];
        self.stream.read_exact(&mut taken).unwrap();
        taken
    }

    fn option(&mut self, option: u32, data: &[u8]) {
        self.stream.write_all(&option_bytes(option, data)).unwrap();
        loop {
            let header = self.take(20);
            let payload = self.take(u32::from_be_bytes(header[16..20].try_into().unwrap()) as usize);
            match u32::from_be_bytes(header[12..16].try_into().unwrap()) {
                1 => return,
                3 if payload[1] == 3 => {}
                3 => {
                    // NBD_INFO_EXPORT: the size and the flags.
                    self.size = u64::from_be_bytes(payload[2..10].try_into().unwrap());
                    self.flags = u16::from_be_bytes(payload[10..12].try_into().unwrap());
                }
                4 => {}
                error => panic!("option {option}: {error:#x} {}", String::from_utf8_lossy(&payload)),
            }
        }
    }

    pub fn bytes(
        &self,
        command: u16,
        flags: u16,
        cookie: u64,
        offset: u64,
        length: u64,
        data: &[u8],
    ) -> Vec<u8> {
        let extended = self.style == ReplyStyle::Extended;
        let mut bytes = if extended { 0x21e4_1c71u32 } else { 0x2560_9513 }.to_be_bytes().to_vec();
        let payload = if extended && !data.is_empty() { 0x20 } else { 0 };
        bytes.extend((flags | payload).to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        if extended {
            bytes.extend(length.to_be_bytes());
        } else {
            bytes.extend((length as u32).to_be_bytes());
        }
        bytes.extend(data);
        bytes
    }

    pub fn send(&mut self, command: u16, flags: u16, cookie: u64, offset: u64, length: u64, data: &[u8]) {
        let bytes = self.bytes(command, flags, cookie, offset, length, data);
        self.stream.write_all(&bytes).unwrap();
    }

    /// Receives a chunk of a structured or extended reply: flags, type, cookie and payload.
    pub fn chunk(&mut self) -> (u16, u16, u64, Vec<u8>) {
        let word = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().unwrap());
        let extended = self.style == ReplyStyle::Extended;
        let header = self.take(if extended { 32 } else { 20 });
        let magic = if extended { [0x6e, 0x8a, 0x27, 0x8c] } else { [0x66, 0x8e, 0x33, 0xef] };
        assert_eq!(header[..4], magic);
        let length = if extended { word(&header[24..]) } else { word(&[&[0; 4], &header[16..]].concat()) };
        let short = |at: usize| u16::from_be_bytes(header[at..at + 2].try_into().unwrap());
        (short(4), short(6), word(&header[8..16]), self.take(length as usize))
    }

    /// Receives a whole reply. `read_bytes` returns the length of the data in a simple reply.
    pub fn reply(&mut self, read_bytes: impl FnOnce(u64) -> usize) -> Reply {
        let word = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().unwrap());
        if self.style == ReplyStyle::Simple {
            let header = self.take(16);
            assert_eq!(header[..4], [0x67, 0x44, 0x66, 0x98]);
            let error = u32::from_be_bytes(header[4..8].try_into().unwrap());
            let cookie = word(&header[8..16]);
            let payload = if error == 0 { self.take(read_bytes(cookie)) } else { Vec::new() };
            return Reply { cookie, error, payload };
        }
        // Reads are answered in parts, which arrive in any order and mixed with those of other reads.
        let mut parts = std::mem::take(&mut self.parts);
        loop {
            let (flags, kind, cookie, mut payload) = self.chunk();
            let mut error = 0;
            match kind {
                0 | 5 | 6 => {}
                1 => {
                    let content = payload.split_off(8);
                    let part = parts.insert((cookie, word(&payload)), content);
                    assert_eq!(part, None, "a part was sent twice");
                    payload.clear();
                }
                0x8001 => error = u32::from_be_bytes(payload[..4].try_into().unwrap()),
                kind => panic!("chunk of type {kind:#x}"),
            }
            if flags == 0 {
                assert_eq!(kind, 1);
                continue;
            }
            assert_eq!(flags, 1);
            let mut next = None;
            for ((_, offset), part) in parts.extract_if((cookie, 0)..=(cookie, u64::MAX), |_, _| error == 0) {
                assert!(next.is_none_or(|next| next == offset), "there is a gap between parts");
                next = Some(offset + part.len() as u64);
                payload.extend(part);
            }
            self.parts = parts;
            return Reply { cookie, error, payload };
        }
    }

    pub fn call(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u64,
        data: &[u8],
    ) -> (u32, Vec<u8>) {
        let cookie = offset ^ length << 32 ^ u64::from(command);
        self.send(command, flags, cookie, offset, length, data);
        let reply = self.reply(|_| if command == 0 { length as usize } else { 0 });
        assert_eq!(reply.cookie, cookie);
        (reply.error, reply.payload)
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> u32 {
        self.call(1, 0, offset, data.len() as u64, data).0
    }

    pub fn read(&mut self, offset: u64, length: usize) -> Vec<u8> {
        let (error, data) = self.call(0, 0, offset, length as u64, &[]);
        assert_eq!(error, 0);
        data
    }

    /// Expects that the server closes the connection without sending more.
    pub fn expect_close(&mut self) {
        let mut rest = Vec::new();
        // The kernel resets the connection if the server closed it before it had read everything.
        if let Err(error) = self.stream.read_to_end(&mut rest) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        }
        assert_eq!(rest, b"");
    }
}

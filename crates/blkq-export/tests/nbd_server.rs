//! The NBD server over real sockets, with well-behaved clients.

use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::nbd::*;
use blkq::drivers::ram::Ram;
use blkq::random::Random;
use blkq::testing::wait_until;
use blkq::{
    Disk, Driver, DriverContext, DriverQueue, Error, ErrorKind, OpenContext, Operation, QueueLimits, Status,
    Tag, Taken,
};
use blkq_drivers::r#loop::{DirectIo, DriverOptions, LoopDevice};
use blkq_export::Listen;
use blkq_export::nbd::reply::ReplyStyle;
use blkq_export::nbd::{NbdOptions, NbdServer};
use rustix::net::{AddressFamily, SocketType};

const STYLES: [ReplyStyle; 3] = [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended];

fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut pattern = vec![0; bytes];
    Random::new(seed).fill(&mut pattern);
    pattern
}

#[test]
fn every_command_works_in_every_reply_format() {
    let served = serve(ram(), 1, options());
    for (style, base) in STYLES.into_iter().zip([0, 64 << 20, 128 << 20]) {
        let mut client = served.client(style);
        // The server announces flush, FUA, trim, write zeroes, multi-conn, cache and fast zero.
        assert_eq!(client.flags & !0x80, 0b1101_0110_1101, "{style:?}");
        for (at, length) in [(0, 512), (512, 4096), (1 << 20, 300 << 10), (4 << 20, 32 << 20)] {
            let data = pattern(base + at, length);
            assert_eq!(client.write(base + at, &data), 0);
            assert_eq!(client.read(base + at, length), data, "{style:?} {length} at {at}");
        }
        let data = pattern(7, 8192);
        assert_eq!(client.call(1, 1, base, 8192, &data), (0, vec![]), "write with FUA");
        assert_eq!(client.call(3, 0, 0, 0, &[]), (0, vec![]), "flush");
        assert_eq!(client.call(5, 0, base, 64 << 20, &[]), (0, vec![]), "cache");
        assert_eq!(client.read(base, 8192), data);
        assert_eq!(client.call(6, 0b10, base, 4096, &[]), (0, vec![]), "zeroes, no hole");
        assert_eq!(client.read(base, 8192), [vec![0; 4096], data[4096..].to_vec()].concat());
        assert_eq!(client.call(6, 0b1_0000, base, 8192, &[]), (0, vec![]), "zeroes, fast");
        assert_eq!(client.read(base, 8192), vec![0; 8192]);
        assert_eq!(client.call(4, 1, base + (4 << 20), 32 << 20, &[]), (0, vec![]), "trim with FUA");
        assert_eq!(client.read(base + (5 << 20), 4096), vec![0; 4096]);
        client.send(2, 0, 0, 0, 0, &[]);
        client.expect_close();
    }
}

#[test]
fn block_status_reports_data_and_holes() {
    let served = serve(ram(), 1, options());
    for style in [ReplyStyle::Structured, ReplyStyle::Extended] {
        let mut client = served.client(style);
        assert_eq!(client.write(1 << 20, &[7; 65536]), 0);
        let (error, status) = client.call(7, 0, 0, 2 << 20, &[]);
        assert_eq!((error, &status[..4]), (0, &[0, 0, 0, 1][..]));
        let (head, width) = if style == ReplyStyle::Extended { (8, 8) } else { (4, 4) };
        let extents: Vec<(u64, u64)> = status[head..]
            .chunks(2 * width)
            .map(|e| {
                let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
                (number(&e[..width]), number(&e[width..]))
            })
            .collect();
        assert_eq!(extents, [(1 << 20, 3), (65536, 0), ((1 << 20) - 65536, 3)], "{style:?}");
        let (error, one) = client.call(7, 8, 0, 2 << 20, &[]);
        assert_eq!((error, one.len()), (0, head + 2 * width));
        assert_eq!(client.call(6, 0, 1 << 20, 65536, &[]).0, 0);
    }
    let mut client = served.client(ReplyStyle::Simple);
    assert_eq!(client.call(7, 0, 0, 4096, &[]).0, 22, "block status was not negotiated");
}

#[test]
fn a_server_waits_for_a_socket_of_an_exited_process_only() {
    let path = socket_path();
    let start = |wait| {
        let engine = engines(&Disk::builder(ram()).build().unwrap());
        let options = NbdOptions { address_wait: wait, ..options() };
        NbdServer::start(Listen::Unix(path.clone()), options, &[engine[0].handle().clone()]).map(|_| ())
    };
    let is_refused = |wait| {
        let begin = Instant::now();
        assert_eq!(start(wait).unwrap_err().kind(), ErrorKind::Busy);
        begin.elapsed() < Duration::from_secs(60)
    };
    std::fs::write(&path, "").unwrap();
    assert!(is_refused(Duration::from_secs(600)));
    std::fs::remove_file(&path).unwrap();
    let running = UnixListener::bind(&path).unwrap();
    assert!(is_refused(Duration::from_secs(600)));
    running.accept().unwrap();
    running.set_nonblocking(true).unwrap();
    assert!(running.accept().is_err(), "one connection shows that the server is running");
    // The process that called listen last is the one at the other end.
    let script = "import socket; socket.socket(fileno=0).listen()";
    let socket = running.as_fd().try_clone_to_owned().unwrap();
    let listening = Command::new("python3").args(["-c", script]).stdin(socket).status().unwrap();
    assert!(listening.success() && is_refused(Duration::ZERO));
    running.accept().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || wait_until("the server waits", || running.accept().is_ok()));
        start(Duration::from_secs(600)).unwrap();
    });
}

// Contract: errors
#[test]
fn a_rejected_request_keeps_the_connection_open() {
    let read_only = Disk::builder(ram()).read_only(true).build().unwrap();
    let path = socket_path();
    let engine = engines(&read_only);
    let handle = engine[0].handle().clone();
    let server = NbdServer::start(Listen::Unix(path.clone()), options(), &[handle]).unwrap();
    let mut client = Client::begin(UnixStream::connect(&path).unwrap(), ReplyStyle::Structured);
    assert_eq!(client.flags & 0b10, 0b10);
    for (command, data) in [(1, &[0; 512][..]), (4, &[]), (6, &[])] {
        assert_eq!(client.call(command, 0, 0, 512, data).0, 1, "{command}");
    }
    assert_eq!(client.read(0, 512), [0; 512]);
    server.stop(true).unwrap();

    let served = serve(ram(), 1, options());
    let mut client = served.client(ReplyStyle::Simple);
    assert_eq!(client.write(SIZE, &[0; 4096]), 28);
    assert_eq!(client.write(100, &[0; 4096]), 22);
    assert_eq!(client.call(0, 0, SIZE - 512, 1024, &[]).0, 22);
    assert_eq!(client.call(4, 0, SIZE - 512, 1024, &[]).0, 22);
    assert_eq!(client.call(99, 0, 0, 512, &[]).0, 22);
    assert_eq!(client.read(0, 512), [0; 512]);
    let info = &served.server.connections()[0];
    let own = &info.counters;
    assert_eq!((own.requests, own.errors, own.read_bytes, own.written_bytes), (6, 5, 512, 0));
    let counters = served.server.counters();
    assert_eq!((counters.requests, counters.errors, counters.refused_requests), (6, 5, 5));
    assert_eq!(info.export.as_deref(), Some("disk"));
    assert!(info.peer.contains(&format!("pid {}", std::process::id())), "{}", info.peer);
}

/// Each client has many requests of different sizes in flight, whose replies come in any order.
#[test]
fn many_concurrent_clients_read_their_own_data() {
    let served = serve(ram(), 2, options());
    let share = SIZE / 6;
    std::thread::scope(|scope| {
        for number in 0..6u64 {
            let served = &served;
            scope.spawn(move || {
                let mut client = served.client(STYLES[number as usize % 3]);
                let base = (number * share).next_multiple_of(4096);
                let sizes = [512, 4096, 4096, 65536, 1024, 200 << 10, 4096, 1 << 20];
                let mut wanted: HashMap<u64, Vec<u8>> = HashMap::new();
                for round in 0..3 {
                    let mut at = base;
                    let mut stream = Vec::new();
                    for (index, size) in sizes.iter().cycle().take(40).enumerate() {
                        let data = pattern(round << 32 | number << 16 | index as u64, *size);
                        stream.extend(client.bytes(1, 0, at, at, *size as u64, &data));
                        wanted.insert(at, data);
                        at += *size as u64;
                    }
                    std::io::Write::write_all(&mut client.stream, &stream).unwrap();
                    for _ in 0..40 {
                        let reply = client.reply(|_| 0);
                        assert!(reply.error == 0 && wanted.contains_key(&reply.cookie));
                    }
                    // The client requests more data than the buffers may hold, and the replies wait for it.
                    let mut stream = Vec::new();
                    for (at, data) in &wanted {
                        stream.extend(client.bytes(0, 0, *at, *at, data.len() as u64, &[]));
                    }
                    std::io::Write::write_all(&mut client.stream, &stream).unwrap();
                    for _ in 0..wanted.len() {
                        let reply = client.reply(|cookie| wanted[&cookie].len());
                        assert_eq!(reply.error, 0);
                        assert!(reply.payload == wanted[&reply.cookie], "at {}", reply.cookie);
                    }
                }
            });
        }
    });
    wait_until("all connections closed", || served.server.connection_count() == 0);
}

#[test]
fn replies_may_be_reordered_and_disconnect_waits_for_all() {
    let served = serve(slow(10_000..=3_000_000), 1, options());
    let mut client = served.client(ReplyStyle::Structured);
    for cookie in 0..200 {
        client.send(0, 0, cookie, cookie * 8192, 4096, &[]);
    }
    client.send(2, 0, 0, 0, 0, &[]);
    let mut order: Vec<u64> = (0..200).map(|_| client.reply(|_| 4096).cookie).collect();
    client.expect_close();
    assert!(!order.is_sorted());
    order.sort();
    assert!(order.into_iter().eq(0..200));
}

#[test]
fn requests_that_complete_together_are_all_answered() {
    const DEPTH: u64 = 64;
    let served = serve(slow(1_000_000..=1_000_000), 1, options());
    let mut client = served.client(ReplyStyle::Simple);
    let ask = |client: &mut Client<UnixStream>, round: u64| {
        let requests = (0..DEPTH).map(|i| client.bytes(0, 0, round * DEPTH + i, i << 12, 4096, &[]));
        let requests: Vec<u8> = requests.flatten().collect();
        std::io::Write::write_all(&mut client.stream, &requests).unwrap();
    };
    for round in 0..30 {
        ask(&mut client, round);
        let mut cookies: Vec<u64> = (0..DEPTH).map(|_| client.reply(|_| 4096).cookie).collect();
        cookies.sort_unstable();
        assert_eq!(cookies, (round * DEPTH..(round + 1) * DEPTH).collect::<Vec<_>>());
    }
    // A client may disconnect with requests in flight, and nothing of it must be left.
    ask(&mut client, 30);
    drop(client);
    wait_until("the connection closes", || served.server.connection_count() == 0);
    assert!(served.server.connections().is_empty());
}

#[test]
fn a_half_closed_connection_is_answered() {
    let served = serve(slow(1_000_000..=2_000_000), 1, options());
    let mut client = served.client(ReplyStyle::Simple);
    client.send(0, 0, 5, 0, 4096, &[]);
    client.stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(client.reply(|_| 4096), Reply { cookie: 5, error: 0, payload: vec![0; 4096] });
    client.expect_close();
}

#[test]
fn a_single_large_request_fits_below_any_buffer_limit() {
    let limits = blkq_export::nbd::NbdOptions { buffered_bytes_max: 4096, requests_max: 2, ..options() };
    let served = serve(ram(), 1, limits);
    let mut client = served.client(ReplyStyle::Simple);
    let data = pattern(3, 32 << 20);
    assert_eq!(client.write(0, &data), 0);
    assert!(client.read(0, 32 << 20) == data);
    // Requests beyond the limits wait.
    let mut stream = Vec::new();
    for cookie in 0..50u64 {
        stream.extend(client.bytes(1, 0, cookie, cookie << 16, 65536, &pattern(cookie, 65536)));
    }
    let mut writer = client.stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || std::io::Write::write_all(&mut writer, &stream).unwrap());
        for _ in 0..50 {
            assert_eq!(client.reply(|_| 0).error, 0);
        }
    });
    for cookie in 0..50u64 {
        assert!(client.read(cookie << 16, 65536) == pattern(cookie, 65536));
    }
}

#[test]
fn only_the_owner_can_connect_and_stop_removes_the_socket() {
    let served = serve(ram(), 1, options());
    let mode = std::fs::metadata(&served.path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // A server is listening on the socket.
    let start = |path: &std::path::Path| {
        let disk = Disk::builder(ram()).build().unwrap();
        let engine = engines(&disk).remove(0);
        let server = NbdServer::start(Listen::Unix(path.into()), options(), &[engine.handle().clone()]);
        server.map(|server| (engine, server))
    };
    let busy = start(&served.path).err().unwrap();
    assert_eq!(busy.kind(), ErrorKind::Busy, "{busy}");
    // A file that is not a socket is not replaced.
    let file = socket_path();
    std::fs::write(&file, "precious").unwrap();
    assert_eq!(start(&file).err().unwrap().kind(), ErrorKind::Busy);
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    std::fs::remove_file(&file).unwrap();
    // The stale socket of a killed server is replaced.
    let stale = socket_path();
    drop(UnixListener::bind(&stale).unwrap());
    let (_engine, server) = start(&stale).unwrap();
    let mut client = Client::begin(UnixStream::connect(&stale).unwrap(), ReplyStyle::Simple);
    assert_eq!(client.read(0, 512), [0; 512]);
    // While a client is connected, the server only stops with force. Without clients it stops.
    let refused = server.stop(false).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy);
    assert_eq!(client.read(0, 512), [0; 512]);
    drop(Client::begin(UnixStream::connect(&stale).unwrap(), ReplyStyle::Simple));
    drop(client);
    wait_until("the clients have disconnected", || server.connection_count() == 0);
    server.stop(false).unwrap();
    assert!(!stale.exists());
}

#[test]
fn a_forced_stop_answers_requests_in_flight_then_disconnects() {
    let served = serve(slow(500_000_000..=600_000_000), 1, options());
    let mut client = served.client(ReplyStyle::Simple);
    for cookie in 0..20 {
        client.send(0, 0, cookie, 0, 4096, &[]);
    }
    wait_until("all requests have arrived", || served.server.connections()[0].in_flight == 20);
    served.server.stop(true).unwrap();
    assert_eq!(served.server.connection_count(), 0);
    for _ in 0..20 {
        assert_eq!(client.reply(|_| 4096).error, 0);
    }
    client.expect_close();
    assert!(UnixStream::connect(&served.path).is_err());
}

#[test]
fn tcp_and_inherited_sockets_can_be_served() {
    let disk = Disk::builder(ram()).queues(1).build().unwrap();
    let engine = engines(&disk);
    let handles = [engine[0].handle().clone()];
    let start = |listen| NbdServer::start(listen, options(), &handles).unwrap();

    let tcp = start(Listen::Tcp("127.0.0.1".into(), 0));
    let address = tcp.uri().strip_prefix("nbd://").unwrap().to_string();
    let mut client = Client::begin(TcpStream::connect(&address).unwrap(), ReplyStyle::Structured);
    let data = pattern(1, 1 << 20);
    assert_eq!(client.write(0, &data), 0);
    assert!(client.read(0, 1 << 20) == data);
    assert!(tcp.connections()[0].peer.starts_with("127.0.0.1:"));
    let port = address.rsplit(':').next().unwrap().parse().unwrap();
    let busy = NbdServer::start(Listen::Tcp("127.0.0.1".into(), port), options(), &handles);
    assert_eq!(busy.err().unwrap().kind(), ErrorKind::Busy);
    tcp.stop(true).unwrap();
    client.expect_close();

    let path = socket_path();
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let inherited = start(Listen::Inherited(listener.into()));
    let mut client = Client::begin(UnixStream::connect(&path).unwrap(), ReplyStyle::Simple);
    assert!(client.read(0, 1 << 20) == data);
    inherited.stop(true).unwrap();
    std::fs::remove_file(&path).unwrap();

    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let one = start(Listen::Inherited(theirs.into()));
    let mut client = Client::begin(ours, ReplyStyle::Extended);
    assert!(client.read(0, 1 << 20) == data);
    drop(client);
    wait_until("the client has disconnected", || one.connection_count() == 0);
    one.stop(false).unwrap();

    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(NbdServer::start(Listen::Inherited(file.into()), options(), &handles).is_err());
}

/// Virtual machines, for example, may connect to such a socket, which the server cannot find out.
// Contract: bounded-input
#[test]
fn an_inherited_socket_must_be_a_unix_or_tcp_socket() {
    let socket = match rustix::net::socket(AddressFamily::VSOCK, SocketType::STREAM, None) {
        Err(rustix::io::Errno::AFNOSUPPORT) => return eprintln!("left out: no AF_VSOCK here"),
        socket => socket.unwrap(),
    };
    let engine = engines(&Disk::builder(ram()).queues(1).build().unwrap());
    let start = |listen, options| NbdServer::start(listen, options, &[engine[0].handle().clone()]);
    // SAFETY: the address is initialized, and the kernel only reads it.
    let bound = unsafe {
        let mut address: libc::sockaddr_vm = std::mem::zeroed();
        address.svm_family = libc::AF_VSOCK as _;
        (address.svm_cid, address.svm_port) = (libc::VMADDR_CID_ANY, libc::VMADDR_PORT_ANY);
        let length = size_of_val(&address) as _;
        libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length)
    };
    assert_eq!(bound, 0);
    rustix::net::listen(&socket, 1).unwrap();
    let error = start(Listen::Inherited(socket), NbdOptions { insecure: true, ..options() }).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(
        error.to_string().ends_with("is a socket of address family 40; pass a unix or TCP socket"),
        "{error}"
    );
}

/// Beyond loopback, TCP requires TLS or `insecure`. A unix socket that every user can connect to is reported.
#[test]
fn open_access_to_inherited_sockets_is_refused_or_reported() {
    let engine = engines(&Disk::builder(ram()).queues(1).build().unwrap());
    let start = |listen, options| NbdServer::start(listen, options, &[engine[0].handle().clone()]);
    let tcp = |address| Listen::Inherited(TcpListener::bind(address).unwrap().into());
    assert_eq!(start(tcp("0.0.0.0:0"), options()).err().unwrap().kind(), ErrorKind::Exposed);
    start(tcp("0.0.0.0:0"), NbdOptions { insecure: true, ..options() }).unwrap().stop(true).unwrap();
    start(tcp("127.0.0.1:0"), options()).unwrap().stop(true).unwrap();
    let path = socket_path();
    for (mode, open) in [(0o600, false), (0o660, false), (0o666, true)] {
        let _ = std::fs::remove_file(&path);
        let socket = UnixListener::bind(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let server = start(Listen::Inherited(socket.into()), options()).unwrap();
        assert_eq!(server.open_to_all_users(), open.then(|| path.display().to_string()));
        server.stop(true).unwrap();
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_block_size_of_4096_is_announced_and_enforced() {
    let served = serve(Box::new(Ram::new(SIZE, 4096, false).unwrap()), 1, options());
    let mut client = served.client(ReplyStyle::Simple);
    assert_eq!(client.write(512, &[0; 4096]), 22);
    assert_eq!(client.write(4096, &[1; 4096]), 0);
    let output = run("nbdinfo", &[served.uri()]);
    assert!(output.contains("block_size_minimum: 4096"), "{output}");
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().expect("libnbd-bin is installed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// libnbd, another implementation, copies an image in and out over several connections.
#[test]
fn libnbd_copies_an_image_in_and_out() {
    let served = serve(ram(), 2, options());
    let output = run("nbdinfo", &["--list", served.uri()]);
    assert!(output.contains("export=\"disk\"") && output.contains("description: for a test"), "{output}");
    let (image, copy) = (socket_path(), socket_path());
    let mut content = vec![0; SIZE as usize];
    for (at, length) in [(0, 1 << 20), (10 << 20, 12345), (100 << 20, 40 << 20)] {
        content[at..at + length].copy_from_slice(&pattern(at as u64, length));
    }
    std::fs::write(&image, &content).unwrap();
    let (image_name, copy_name) = (image.to_str().unwrap(), copy.to_str().unwrap());
    run("nbdcopy", &["--connections=4", image_name, served.uri()]);
    run("nbdcopy", &["--connections=4", "--flush", served.uri(), copy_name]);
    assert!(std::fs::read(&copy).unwrap() == content);
    let map = run("nbdinfo", &["--map", served.uri()]);
    assert!(map.contains("hole,zero") && map.lines().count() >= 5, "{map}");
    let script = "h.zero(4096, 0, nbd.CMD_FLAG_FAST_ZERO); h.trim(4096, 8192); h.flush(); h.cache(65536, 0)\n\
                  h.pwrite(b'x' * 512, 512, nbd.CMD_FLAG_FUA); assert h.pread(512, 512) == b'x' * 512\n\
                  assert h.pread(4096, 0)[:512] == bytes(512); h.shutdown()";
    run("/usr/bin/python3", &["-m", "nbd", "-u", served.uri(), "-c", script]);
    std::fs::remove_file(image).unwrap();
    std::fs::remove_file(copy).unwrap();
}

/// A device that finds out while it is in use that it does not support discard.
struct NoDiscard(Arc<AtomicBool>);

impl Driver for NoDiscard {
    fn name(&self) -> &'static str {
        "no-discard"
    }

    fn limits(&self) -> QueueLimits {
        let max_discard_bytes = if self.0.load(Ordering::SeqCst) { 1 << 20 } else { 0 };
        QueueLimits {
            capacity_bytes: SIZE,
            max_discard_bytes,
            discard_granularity: 512,
            ..Default::default()
        }
    }

    fn open_queue(&self, _cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(NoDiscard(self.0.clone())))
    }
}

// SAFETY: requests complete in `queue_requests`, and nothing accesses their memory later.
unsafe impl DriverQueue for NoDiscard {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        for &tag in tags {
            let discard = cx.request(tag).operation() == Operation::Discard;
            if discard {
                self.0.store(false, Ordering::SeqCst);
                cx.limits_changed();
            }
            cx.complete(tag, if discard { Err(Status::NotSupported) } else { Ok(()) });
        }
        Taken::All
    }
}

#[test]
fn a_trim_that_the_device_does_not_support_succeeds() {
    const SEND_TRIM: u16 = 1 << 5;
    let served = serve(Box::new(NoDiscard(Arc::new(AtomicBool::new(true)))), 1, options());
    let mut client = served.client(ReplyStyle::Structured);
    assert_ne!(client.flags & SEND_TRIM, 0);
    // A trim is a hint. The first one reaches the driver; the block layer rejects the others.
    for flags in [0, 0, 1] {
        assert_eq!(client.call(4, flags, 0, 8 << 20, &[]), (0, vec![]));
    }
    let mut later = served.client(ReplyStyle::Structured);
    assert_eq!(later.flags & SEND_TRIM, 0, "trim is no longer announced");
    assert_eq!(later.call(4, 0, 0, 512, &[]).0, 22, "trim was not announced");
}

#[test]
fn cache_requests_read_only_if_there_is_a_page_cache() {
    let path = std::env::temp_dir().join(format!("blkq-nbd-cache-{}", std::process::id()));
    std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    let open = |direct_io| {
        let options = DriverOptions { direct_io, shared: true, ..DriverOptions::new(&path) };
        Box::new(LoopDevice::open(&options).unwrap()) as Box<dyn Driver>
    };
    for (driver, reads) in [(ram(), 0), (open(DirectIo::On), 0), (open(DirectIo::Off), 1)] {
        let name = driver.name();
        let served = serve(driver, 1, options());
        let mut client = served.client(ReplyStyle::Structured);
        assert_eq!(client.call(5, 0, 4096, 65536, &[]), (0, vec![]));
        assert_eq!(served.disk.stats()[blkq::StatGroup::Read].ios, reads, "{name}");
        assert_eq!(client.call(5, 0, SIZE, 4096, &[]).0, 22);
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_silent_tcp_client_is_probed_within_half_a_minute() {
    let disk = Disk::builder(ram()).queues(1).build().unwrap();
    let engine = engines(&disk);
    let handles = [engine[0].handle().clone()];
    let server = NbdServer::start(Listen::Tcp("127.0.0.1".into(), 0), options(), &handles).unwrap();
    let stream = TcpStream::connect(server.uri().strip_prefix("nbd://").unwrap()).unwrap();
    let (ours, theirs) = (stream.local_addr().unwrap().port(), stream.peer_addr().unwrap().port());
    let _client = Client::begin(stream, ReplyStyle::Simple);
    // The server's side in /proc/net/tcp: "sl local remote st queues tr:when ...". Timer 2 is the keepalive
    // timer.
    let sides = [format!("0100007F:{theirs:04X}"), format!("0100007F:{ours:04X}")];
    let timer = || {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let line = table.lines().find(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words[1] == sides[0] && words[2] == sides[1]
        });
        line.unwrap().split_whitespace().nth(5).unwrap().to_owned()
    };
    wait_until("nothing is unacknowledged", || timer().starts_with("02:"));
    let ticks = u64::from_str_radix(&timer()[3..], 16).unwrap();
    assert!(ticks <= 30 * 100, "{ticks} hundredths of a second");
    server.stop(true).unwrap();
}

#[test]
fn receives_and_sends_of_all_connections_are_counted() {
    let served = serve(ram(), 1, options());
    let counters = || served.server.counters();
    let one_after_the_other = || {
        let mut client = served.client(ReplyStyle::Simple);
        for cookie in 0..20 {
            client.send(0, 0, cookie, 0, 512, &[]);
            assert_eq!(client.reply(|_| 512).error, 0);
        }
    };
    one_after_the_other();
    wait_until("the connection has closed", || served.server.connections().is_empty());
    let first = counters();
    // Each request is received and answered separately, and one more receive finds the end of the stream.
    assert!(first.receives >= 20 && (20..=21).contains(&first.sends), "{first:?}");
    one_after_the_other();
    wait_until("the connection has closed", || served.server.connections().is_empty());
    assert!(counters().sends >= first.sends + 20 && counters().receives >= first.receives + 20);
}

#[test]
fn receive_back_off_is_counted_and_can_be_turned_off() {
    let options = options();
    let switches = options.switches.clone();
    let served = serve(ram(), 1, options);
    for on in [false, true] {
        switches.receive_backoff.store(on, Ordering::Relaxed);
        let mut client = served.client(ReplyStyle::Simple);
        let mut replies = 0;
        // Replies that the client does not read pile up, while its requests arrive one by one.
        for cookie in 0..30 {
            client.send(0, 0, cookie, 0, 4096, &[]);
            replies += 1;
            let requests = || served.server.connections().last().unwrap().counters.requests;
            wait_until("the request has arrived", || requests() == replies);
        }
        let counted = || served.server.counters().receive_backoffs;
        match on {
            true => wait_until("a back-off is counted", || counted() > 0),
            false => assert_eq!(counted(), 0),
        }
        (0..replies).for_each(|_| assert_eq!(client.reply(|_| 4096).error, 0));
    }
}

//! An engine spends no more than its budget per turn on each source, whatever the clients send.
// Contract: bounded-input

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::channel;

use crate::front_end::{DATA, F_INDIRECT, FEATURES, FrontEnd, SIZE};
use crate::nbd;
use crate::vhost;
use blkq::testing::wait_until;
use blkq::{Completion, Cqe, Disk, EngineHandle, Error, Source, SourceContext, TURN_BUDGET};
use blkq_export::Listen;
use blkq_export::nbd::NbdServer;
use blkq_export::nbd::reply::ReplyStyle;
use blkq_export::vhost_user::{VhostUserDevice, VhostUserOptions};

/// Records the largest growth of a counter in one turn of an engine.
struct Probe<F> {
    count: F,
    turn: u64,
    before: u64,
    last: u64,
    most: Arc<AtomicU64>,
}

// SAFETY: the source pushes no operation and submits no bio.
unsafe impl<F: Fn() -> u64> Source for Probe<F> {
    fn start(&mut self, _: &mut SourceContext<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn on_cqe(&mut self, _: &mut SourceContext<'_>, _: Cqe) {}

    fn on_bio(&mut self, _: &mut SourceContext<'_>, _: Completion) {}

    fn on_turn(&mut self, cx: &mut SourceContext<'_>) {
        if self.turn != cx.turn() {
            (self.turn, self.before) = (cx.turn(), self.last);
        }
        self.last = (self.count)();
        self.most.fetch_max(self.last - self.before, SeqCst);
    }

    fn stop(&mut self, _: &mut SourceContext<'_>, _force: bool) {}

    fn is_stopped(&self) -> bool {
        true
    }
}

fn probe(engine: &EngineHandle, count: impl Fn() -> u64 + Send + 'static) -> Arc<AtomicU64> {
    let most = Arc::new(AtomicU64::new(0));
    let noted = most.clone();
    let make = move || {
        let before = count();
        Box::new(Probe { turn: 0, before, last: before, count, most: noted }) as _
    };
    engine.add_source(make).unwrap();
    most
}

#[test]
fn a_turn_reads_no_more_descriptors_than_its_budget() {
    let disk = Disk::builder(vhost::ram()).build().unwrap();
    let engines = nbd::engines(&disk);
    let engine = engines[0].handle();
    let path = vhost::unique("sock");
    let (listen, options) = (Listen::Unix(path.clone()), VhostUserOptions::default());
    let device = VhostUserDevice::listen(listen, options, &disk, std::slice::from_ref(engine)).unwrap();
    device.serve().unwrap();
    let device = Arc::new(device);
    let mut front = FrontEnd::started(&path, FEATURES | F_INDIRECT, 1);
    let counted = device.clone();
    let most = probe(engine, move || counted.counters().requests);
    // All descriptor heads use the same table, which has the maximum length. The type of the request is
    // unknown, so the request completes immediately.
    let entries: u16 = 1024;
    let (table, header, data) = (DATA, DATA + (64 << 10), DATA + (65 << 10));
    front.memory.bytes(header, 16).fill(0x77);
    for index in 0..entries {
        let (at, bytes, flags) = if index == 0 { (header, 16u32, 0u16) } else { (data, 1, 2) };
        let next = if index + 1 < entries { 1 } else { 0 };
        let entry = [
            &FrontEnd::guest(at).to_le_bytes()[..],
            &bytes.to_le_bytes(),
            &(flags | next).to_le_bytes(),
            &(index + 1).to_le_bytes(),
        ];
        front.memory.bytes(table + usize::from(index) * 16, 16).copy_from_slice(&entry.concat());
    }
    let before = device.counters().requests;
    for head in 0..SIZE {
        front.descriptor(0, head, FrontEnd::guest(table), u32::from(entries) * 16, 4, 0);
        front.rings[0].make_available(&front.memory, head);
    }
    rustix::io::write(&front.rings[0].kick, &1u64.to_ne_bytes()).unwrap();
    wait_until("all requests have completed", || device.counters().requests - before == u64::from(SIZE));
    assert_eq!(most.load(SeqCst), 1, "each request exceeds the budget");
    drop(front);
    device.stop(true).unwrap();
}

#[test]
fn a_turn_begins_no_more_nbd_requests_than_its_budget() {
    let disk = Disk::builder(nbd::ram()).build().unwrap();
    let engines = nbd::engines(&disk);
    let engine = engines[0].handle();
    let path = nbd::socket_path();
    let handles = [engine.clone()];
    let server = Arc::new(NbdServer::start(Listen::Unix(path.clone()), nbd::options(), &handles).unwrap());
    let connect = || nbd::Client::begin(UnixStream::connect(&path).unwrap(), ReplyStyle::Simple);
    let mut clients: Vec<_> = (0..8).map(|_| connect()).collect();
    let counted = server.clone();
    let most = probe(engine, move || counted.counters().requests);
    // All requests arrive while the engine is held.
    let ((begun, begins), (release, released)) = (channel(), channel::<()>());
    std::thread::scope(|scope| {
        let hold = move |_: blkq::Registrar<'_>| {
            begun.send(()).unwrap();
            let _ = released.recv();
        };
        let held = scope.spawn(|| engine.with_registrar(hold));
        begins.recv().unwrap();
        for client in &mut clients {
            let requests: Vec<u8> =
                (0..256).flat_map(|cookie| client.bytes(0, 0, cookie, 0, 512, &[])).collect();
            client.stream.write_all(&requests).unwrap();
        }
        drop(release);
        held.join().unwrap().unwrap();
    });
    for client in &mut clients {
        (0..256).for_each(|_| assert_eq!(client.reply(|_| 512).error, 0));
    }
    let most = most.load(SeqCst);
    assert!(0 < most && most <= TURN_BUDGET.items as u64, "{most}");
    drop(clients);
    server.stop(true).unwrap();
}

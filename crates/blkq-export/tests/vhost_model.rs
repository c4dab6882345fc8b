//! vhost-user-blk compared with a model of each byte, while rings stop, drivers start from the beginning,
//! front ends disconnect, and daemons stop or are killed. Each request must complete once.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::front_end::*;
use crate::vhost;
use blkq::Disk;
use blkq_drivers::fault::{Fault, FaultSpec};
use blkq_drivers::r#loop::DirectIo;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

const DAEMON: &str = "BLKQ_TEST_DAEMON";
/// Number of blocks of the image that requests use.
const BLOCKS: u64 = 256;
const BLOCKS_MAX: u64 = 16;
/// Size of the memory for the data of a request.
const SLOT: usize = 80 << 10;
const CANARY: u8 = 0xc5;

/// How a daemon serves the image.
#[derive(Clone, Copy, Debug)]
struct Serving {
    queues: u32,
    block: u32,
    direct: bool,
    slow: bool,
}

/// The process that serves the image, and executes the commands that it reads from standard input.
#[test]
#[ignore = "run by the test below, in a process of its own"]
fn a_daemon_of_this_test() {
    let Ok(options) = std::env::var(DAEMON) else { return };
    let words: Vec<&str> = options.split(' ').collect();
    let direct = if words[4] == "true" { DirectIo::Auto } else { DirectIo::Off };
    let image = vhost::open_image(words[0].as_ref(), direct, Some(words[3].parse().unwrap()));
    // This delay has no effect.
    let delay = if words[5] == "true" { "delay=1ms,p99=8ms,rate=40%;seed=1" } else { "delay=1us,count=1" };
    let fault = Fault::new(image.into(), delay.parse::<FaultSpec>().unwrap()).unwrap();
    let disk = Disk::builder(Box::new(fault)).queues(words[2].parse().unwrap()).build().unwrap();
    let served = vhost::serve_disk(disk, words[1].into());
    println!("\nserves");
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "idle" => served.until_idle(),
            "stop" => served.device.stop_for_next().unwrap(),
            word => panic!("{word}"),
        }
        let (counters, stats) = (served.device.counters(), served.disk.stats().fields());
        println!("done {} {} {}", counters.errors, counters.bounced, stats[1] + stats[5]);
    }
}

struct Daemon {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Daemon {
    fn start(place: &Place, serving: Serving) -> Daemon {
        let Serving { queues, block, direct, slow } = serving;
        let (image, socket) = (place.image.display(), place.socket.display());
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "vhost_model::a_daemon_of_this_test", "--ignored", "--nocapture"])
            .env(DAEMON, format!("{image} {socket} {queues} {block} {direct} {slow}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut daemon = Daemon { input: process.stdin.take().unwrap(), output, process };
        daemon.line("serves");
        daemon
    }

    fn line(&mut self, word: &str) -> Vec<u64> {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the daemon has exited");
            if let Some(rest) = line.strip_prefix(word) {
                return rest.split_whitespace().map(|number| number.parse().unwrap()).collect();
            }
        }
    }

    /// Executes a command. Returns the numbers of errors, of copied requests, and of merged requests.
    fn obey(&mut self, word: &str) -> Vec<u64> {
        writeln!(self.input, "{word}").unwrap();
        self.line("done")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct Place {
    image: PathBuf,
    socket: PathBuf,
}

impl Place {
    fn new() -> Place {
        let image =
            PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(vhost::unique("img").file_name().unwrap());
        std::fs::File::create(&image).unwrap().set_len(vhost::SIZE).unwrap();
        Place { image, socket: vhost::unique("sock") }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = (std::fs::remove_file(&self.image), std::fs::remove_file(&self.socket));
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Read = 0,
    Write = 1,
    Flush = 4,
    Discard = 11,
    WriteZeroes = 13,
}

/// A request for `count` blocks from block `from` on. Its data begins at `offset` of a page and is split
/// after `cuts` bytes.
#[derive(Clone, Debug)]
struct Request {
    kind: Kind,
    from: u64,
    count: u64,
    offset: usize,
    cuts: Vec<usize>,
}

#[derive(Clone, Debug)]
enum Step {
    /// Submits a request to a ring, with or without a kick.
    Submit(usize, Request, bool),
    /// Submits this number of requests of one block each, for consecutive blocks, with one kick.
    Row(usize, Kind, u64, u64),
    Collect,
    Wait,
    /// Stops a ring, and starts it again at the same position.
    Restart(usize),
    /// Resets the device, and starts from the beginning.
    Reset(Reset),
    /// Disconnects the front end, and connects again with the same memory and record.
    Reconnect,
    Replace {
        killed: bool,
    },
}

#[derive(Clone, Copy, Debug)]
enum Reset {
    Device,
    Status,
    /// As QEMU does: stop the rings, and use a new record.
    Rings,
}

struct Pending {
    request: Request,
    /// The content that the request leaves in its blocks.
    content: Option<u32>,
    /// The parts of its data: offset in the memory, and length.
    data: Vec<(usize, usize)>,
    /// For each block: the contents that a read may return, or that may be there after another request.
    seen: Vec<Vec<u32>>,
}

impl Pending {
    fn range(&self) -> Range<usize> {
        range(&self.request)
    }
}

fn range(request: &Request) -> Range<usize> {
    request.from as usize..(request.from + request.count) as usize
}

#[derive(Default, Debug)]
struct Totals {
    kills_in_flight: usize,
    resets_in_flight: usize,
    restarts_in_flight: usize,
    reconnects_in_flight: usize,
    bounced: u64,
    merged: u64,
}

/// Byte `at` of content number `content`. Content 0 is zeroes.
fn byte(content: u32, at: usize) -> u8 {
    if content == 0 {
        return 0;
    }
    let word = (at as u32 / 8).wrapping_add(content.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b);
    (word >> 11) as u8 ^ at as u8 | 1
}

struct World<'a> {
    place: Place,
    serving: Serving,
    features: u64,
    daemon: Daemon,
    front: FrontEnd,
    record: Reply,
    /// For each block: its possible contents.
    possible: Vec<Vec<u32>>,
    contents: u32,
    pending: BTreeMap<(usize, u16), Pending>,
    totals: &'a mut Totals,
}

impl World<'_> {
    fn new(serving: Serving, features: u64, totals: &mut Totals) -> World<'_> {
        let place = Place::new();
        let daemon = Daemon::start(&place, serving);
        let mut front = FrontEnd::new(&place.socket, features, serving.queues);
        front.memory.bytes(DATA, MEMORY - DATA).fill(CANARY);
        let record = front.keep_record();
        front.start_all();
        let (possible, pending) = (vec![vec![0]; BLOCKS as usize], BTreeMap::new());
        World { place, serving, features, daemon, front, record, possible, contents: 0, pending, totals }
    }

    fn ring(&self, number: usize) -> usize {
        number % self.front.rings.len()
    }

    fn block(&self) -> usize {
        self.serving.block as usize
    }

    fn slot(ring: usize, head: u16) -> usize {
        DATA + (ring * usize::from(SIZE / 4) + usize::from(head / 4)) * SLOT
    }

    fn submit(&mut self, ring: usize, request: Request) {
        let (block, range) = (self.block(), range(&request));
        let head = *self.front.rings[ring].free.last().unwrap();
        let slot = Self::slot(ring, head);
        self.assert_unused(slot);
        let content = match request.kind {
            Kind::Write => {
                self.contents += 1;
                Some(self.contents)
            }
            Kind::Discard | Kind::WriteZeroes => Some(0),
            Kind::Read | Kind::Flush => None,
        };
        let bytes = match request.kind {
            Kind::Read | Kind::Write => range.len() * block,
            Kind::Flush => 0,
            // The request has up to two ranges.
            Kind::Discard | Kind::WriteZeroes => 16 * range.len().min(2),
        };
        let cuts = if self.features & F_INDIRECT == 0 { 1 } else { 3 };
        let data = pieces(slot + request.offset, bytes, &request.cuts[..cuts.min(request.cuts.len())]);
        match request.kind {
            Kind::Write => {
                self.for_each(&data, |at, place| *place = byte(content.unwrap(), range.start * block + at))
            }
            Kind::Discard | Kind::WriteZeroes => {
                let half = range.start + range.len() / 2;
                let ranges = [range.start..half, half..range.end].into_iter().filter(|it| !it.is_empty());
                let sectors = block as u64 / 512;
                let list: Vec<u8> = ranges
                    .flat_map(|it| {
                        [longs(&[it.start as u64 * sectors]), words(&[it.len() as u32 * sectors as u32, 0])]
                    })
                    .flatten()
                    .collect();
                self.for_each(&data, |at, place| *place = list[at]);
            }
            Kind::Read | Kind::Flush => {}
        }
        let mut seen: Vec<Vec<u32>> = match content {
            Some(content) => vec![vec![content]; range.len()],
            None => self.possible[range.clone()].to_vec(),
        };
        // Requests in flight at the same time may be executed in any order.
        for other in self.pending.values_mut() {
            let others = other.range();
            for at in range.start.max(others.start)..range.end.min(others.end) {
                other.seen[at - others.start].extend(content);
                seen[at - range.start].extend(other.content);
            }
        }
        if let Some(content) = content {
            self.possible[range.clone()].iter_mut().for_each(|possible| possible.push(content));
        }
        let sector = request.from * block as u64 / 512;
        let kind = request.kind as u32;
        let guest: Vec<(u64, u32)> =
            data.iter().map(|(at, bytes)| (FrontEnd::guest(*at), *bytes as u32)).collect();
        let sector = if matches!(request.kind, Kind::Read | Kind::Write) { sector } else { 0 };
        assert_eq!(self.front.submit_pieces(ring, kind, sector, &guest), head);
        let pending = Pending { request, content, data, seen };
        assert!(self.pending.insert((ring, head), pending).is_none());
    }

    fn for_each(&self, data: &[(usize, usize)], mut call: impl FnMut(usize, &mut u8)) {
        let places = data.iter().flat_map(|(at, bytes)| self.front.memory.bytes(*at, *bytes));
        places.enumerate().for_each(|(at, place)| call(at, place));
    }

    fn assert_unused(&self, slot: usize) {
        assert!(
            *self.front.memory.bytes(slot, SLOT) == [CANARY; SLOT],
            "memory was written after a completion"
        );
    }

    fn complete(&mut self, ring: usize, (head, status, written): (u16, u8, u32)) {
        let pending = self.pending.remove(&(ring, head)).expect("each request completes once");
        let Pending { request, data, seen, .. } = &pending;
        assert_eq!(status, 0, "{request:?}");
        let (block, start) = (self.block(), range(request).start);
        match request.kind {
            Kind::Read => {
                assert_eq!(written as usize, range(request).len() * block + 1);
                self.for_each(data, |at, read| {
                    let is_it = |content: &u32| byte(*content, start * block + at) == *read;
                    let seen = &seen[at / block];
                    assert!(
                        seen.iter().any(is_it),
                        "{request:?}: byte {at} is {read}, which is in no content of {seen:?}"
                    );
                });
            }
            Kind::Write | Kind::WriteZeroes => {
                for (index, seen) in seen.iter().enumerate() {
                    self.possible[start + index].retain(|content| seen.contains(content));
                }
            }
            // A discard may leave the old content.
            Kind::Discard | Kind::Flush => {}
        }
        self.for_each(data, |_, place| *place = CANARY);
        self.assert_unused(Self::slot(ring, head));
    }

    fn collect(&mut self) {
        for ring in 0..self.front.rings.len() {
            let completed = self.front.completed(ring);
            completed.into_iter().for_each(|it| self.complete(ring, it));
        }
    }

    fn in_flight(&self, ring: usize) -> usize {
        self.pending.range((ring, 0)..(ring + 1, 0)).count()
    }

    fn wait(&mut self, ring: usize, left: usize) {
        let in_flight = self.in_flight(ring);
        if in_flight > left {
            self.front.kick(ring);
            let completed = self.front.wait(ring, in_flight - left);
            completed.into_iter().for_each(|it| self.complete(ring, it));
        }
    }

    fn wait_for_all(&mut self) {
        (0..self.front.rings.len()).for_each(|ring| self.wait(ring, 0));
        self.collect();
    }

    fn make_room(&mut self, ring: usize, count: usize) {
        self.wait(ring, usize::from(SIZE / 4) - count);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Submit(ring, request, kicks) => {
                let ring = self.ring(ring);
                self.make_room(ring, 1);
                self.submit(ring, request);
                if kicks {
                    self.front.kick(ring);
                }
            }
            Step::Row(ring, kind, from, count) => {
                let ring = self.ring(ring);
                self.make_room(ring, count as usize);
                for from in from..from + count {
                    self.submit(ring, Request { kind, from, count: 1, offset: 0, cuts: Vec::new() });
                }
                self.front.kick(ring);
            }
            Step::Collect => self.collect(),
            Step::Wait => self.wait_for_all(),
            Step::Restart(ring) => {
                let ring = self.ring(ring);
                self.totals.restarts_in_flight += usize::from(self.in_flight(ring) > 0);
                let used = self.front.stop(ring as u32);
                assert_eq!(self.front.used_index(ring), used, "all requests that were taken have completed");
                self.front.start(ring as u32, used);
            }
            Step::Reset(reset) => self.reset(reset),
            Step::Reconnect => {
                self.totals.reconnects_in_flight += usize::from(!self.pending.is_empty());
                let _ = self.front.connection.0.shutdown(std::net::Shutdown::Both);
                self.obey("idle");
                self.connect();
            }
            Step::Replace { killed } => {
                if !killed {
                    self.obey("stop");
                }
                self.daemon.process.kill().unwrap();
                self.daemon.process.wait().unwrap();
                self.collect();
                self.totals.kills_in_flight += usize::from(killed && !self.pending.is_empty());
                self.daemon = Daemon::start(&self.place, self.serving);
                self.connect();
            }
        }
    }

    fn obey(&mut self, word: &str) {
        let counted = self.daemon.obey(word);
        assert_eq!(counted[0], 0, "errors");
        self.totals.bounced += counted[1];
        self.totals.merged += counted[2];
    }

    fn connect(&mut self) {
        self.front.reconnect(&self.place.socket, self.features, &self.record);
    }

    fn reset(&mut self, reset: Reset) {
        self.totals.resets_in_flight += usize::from(!self.pending.is_empty());
        let rings = self.front.rings.len() as u32;
        let connection = &mut self.front.connection;
        match reset {
            Reset::Device => connection.done(RESET_DEVICE, &[], &[]),
            Reset::Status => connection.done(SET_STATUS, &longs(&[0]), &[]),
            Reset::Rings => (0..rings).for_each(|ring| _ = self.front.stop(ring)),
        }
        // Completions count. Each of the other requests may have been executed or not.
        self.collect();
        for (at, bytes) in std::mem::take(&mut self.pending).into_values().flat_map(|it| it.data) {
            self.front.memory.bytes(at, bytes).fill(CANARY);
        }
        self.front.rings.iter_mut().for_each(|ring| ring.clear(&self.front.memory));
        match reset {
            Reset::Rings => self.record = self.front.keep_record(),
            _ => self.front.connection.done(SET_FEATURES, &self.features.to_ne_bytes(), &[]),
        }
        self.front.start_all();
    }

    /// Waits for all requests, and checks the device. Nothing may be written after the completions.
    fn finish(mut self) {
        self.wait_for_all();
        for from in (0..BLOCKS).step_by(BLOCKS_MAX as usize) {
            let request = Request { kind: Kind::Read, from, count: BLOCKS_MAX, offset: 0, cuts: Vec::new() };
            self.step(Step::Submit(from as usize, request, true));
        }
        self.wait_for_all();
        self.obey("stop");
        assert_eq!(self.front.memory.bytes(DATA, MEMORY - DATA).iter().position(|it| *it != CANARY), None);
        assert!((0..self.front.rings.len()).all(|ring| self.front.completed(ring).is_empty()));
    }
}

/// Splits `bytes` bytes from `at` on after each of `cuts`, and leaves gaps of 512 bytes.
fn pieces(mut at: usize, bytes: usize, cuts: &[usize]) -> Vec<(usize, usize)> {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % bytes.max(1)).chain([0, bytes]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2)
        .map(|cut| {
            let piece = (at, cut[1] - cut[0]);
            at += piece.1 + 512;
            piece
        })
        .collect()
}

fn request() -> impl Strategy<Value = Request> {
    let kind = prop_oneof![
        4 => Just(Kind::Read),
        5 => Just(Kind::Write),
        1 => Just(Kind::Flush),
        1 => Just(Kind::Discard),
        1 => Just(Kind::WriteZeroes),
    ];
    let offset = prop_oneof![4 => Just(0), 1 => Just(512), 1 => Just(8), 1 => Just(1001)];
    let cuts = proptest::collection::vec(0..BLOCKS_MAX as usize * 4096, 0..4);
    (kind, 0..BLOCKS, 1..=BLOCKS_MAX, offset, cuts).prop_map(|(kind, from, count, offset, cuts)| {
        let count = count.min(BLOCKS - from);
        Request { kind, from, count, offset, cuts }
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let ring = 0..3usize;
    let row = prop_oneof![Just(Kind::Read), Just(Kind::Write), Just(Kind::Discard), Just(Kind::WriteZeroes)];
    let reset = prop_oneof![Just(Reset::Device), Just(Reset::Status), Just(Reset::Rings)];
    let step = prop_oneof![
        14 => (ring.clone(), request(), any::<bool>()).prop_map(|(ring, request, kicks)| Step::Submit(ring, request, kicks)),
        4 => (ring.clone(), row, 0..BLOCKS - 12, 2..=12u64).prop_map(|(ring, kind, from, count)| Step::Row(ring, kind, from, count)),
        3 => Just(Step::Collect),
        1 => Just(Step::Wait),
        2 => ring.prop_map(Step::Restart),
        1 => reset.prop_map(Step::Reset),
        1 => Just(Step::Reconnect),
        2 => any::<bool>().prop_map(|killed| Step::Replace { killed }),
    ];
    proptest::collection::vec(step, 1..80)
}

fn cases() -> impl Strategy<Value = (Serving, u64, Vec<Step>)> {
    let features = proptest::bits::u64::masked(F_PACKED | F_EVENT_IDX | F_INDIRECT);
    let block = prop_oneof![Just(512), Just(4096)];
    let serving = (1..=3u32, block, any::<bool>(), any::<bool>())
        .prop_map(|(queues, block, direct, slow)| Serving { queues, block, direct, slow });
    (serving, features.prop_map(|features| features | FEATURES), steps())
}

// Contract: accepted-once
#[test]
fn requests_complete_once_whatever_interrupts_them() {
    let config = ProptestConfig {
        source_file: Some(file!()),
        max_shrink_iters: 200,
        ..ProptestConfig::with_cases(24)
    };
    let totals = RefCell::new(Totals::default());
    let run = TestRunner::new(config).run(&cases(), |(serving, features, steps)| {
        let mut totals = totals.borrow_mut();
        let mut world = World::new(serving, features, &mut totals);
        steps.into_iter().for_each(|step| world.step(step));
        world.finish();
        Ok(())
    });
    run.unwrap_or_else(|failure| panic!("{failure}"));
    let totals = totals.into_inner();
    println!("{totals:?}");
    let Totals {
        kills_in_flight,
        resets_in_flight,
        restarts_in_flight,
        reconnects_in_flight,
        bounced,
        merged,
    } = totals;
    let interrupted = [kills_in_flight, resets_in_flight, restarts_in_flight, reconnects_in_flight];
    assert!(interrupted.iter().all(|count| *count > 0), "{interrupted:?}");
    assert!(bounced > 0 && merged > 0, "{bounced} copied, {merged} merged");
}

//! A minimal block layer for the tests of drivers. It builds requests, offers them to one queue, and runs the
//! turns of its ring.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::bio::Outline;
use crate::bio::{BioFlags, Operation};
use crate::buffer::{Data, IoBuffer};
use crate::clock::{Clock, ClockMode};
use crate::driver::{Driver, DriverContext, DriverQueue, OpenContext, Taken};
use crate::error::{Error, IoResult};
use crate::kick::Wake;
use crate::random::Random;
use crate::request::NIL;
use crate::request::{Request, RequestState};
use crate::ring::{Cqe, Registrar, Ring, Token};
use crate::sector::Sector;
use crate::slab::{InFlight, NewBio};
use crate::tags::Tag;
use crate::testing::wait_until;

/// The maximum number of requests of a queue.
pub const TAGS: usize = 64;
const OWNER: u16 = 7;

/// One queue of a driver.
pub struct Harness {
    in_flight: InFlight,
    completed: Vec<(Tag, IoResult)>,
    clock: Clock,
    /// The ring of the queue, if the driver uses one.
    pub ring: Option<Ring>,
    queue: Option<Box<dyn DriverQueue>>,
    /// Whether the driver has called [`DriverContext::limits_changed`].
    pub limits_changed: bool,
    /// The number of completions of the ring that will be dropped.
    pub swallow: usize,
    /// The results by tag of completed requests for which no test has waited yet.
    results: Vec<Option<IoResult>>,
}

/// Counts how often a queue was woken. The harness polls every millisecond instead.
#[derive(Default)]
pub struct CountWakes(pub AtomicU32);

impl Wake for CountWakes {
    fn wake(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Harness {
    /// Opens queue 0, or returns the error of the driver.
    pub fn open(driver: &dyn Driver) -> Result<Harness, Error> {
        Harness::open_index(driver, 0)
    }

    /// Opens queue `index`, or returns the error of the driver.
    pub fn open_index(driver: &dyn Driver, index: u16) -> Result<Harness, Error> {
        Harness::open_waking(driver, index, Arc::new(CountWakes::default()))
    }

    /// Opens a queue that is woken through `wake`, or returns the error of the driver.
    pub fn open_waking(driver: &dyn Driver, index: u16, wake: Arc<dyn Wake>) -> Result<Harness, Error> {
        driver.limits().validate()?;
        let mut ring = if driver.uses_ring() { Some(Ring::new(64)?) } else { None };
        let cx = OpenContext { index, tags: TAGS, ring: ring.as_mut().map(Registrar::new), wake };
        let queue = driver.open_queue(cx)?;
        let mut in_flight = InFlight::new(TAGS, 256, IoBuffer::zeroed(4096));
        (0..TAGS).for_each(|index| in_flight[Tag(index as u16)] = Request::idle());
        Ok(Harness {
            in_flight,
            completed: Vec::new(),
            clock: Clock::new(ClockMode::Precise),
            ring,
            queue: Some(queue),
            limits_changed: false,
            swallow: 0,
            results: vec![None; TAGS],
        })
    }

    /// Registers buffers and files with the ring, if the driver uses one.
    pub fn registrar(&mut self) -> Option<Registrar<'_>> {
        self.ring.as_mut().map(Registrar::new)
    }

    fn with<R>(&mut self, f: impl FnOnce(&mut dyn DriverQueue, &mut DriverContext<'_>) -> R) -> R {
        let mut cx = DriverContext {
            in_flight: &mut self.in_flight,
            completed: &mut self.completed,
            clock: &mut self.clock,
            ring: self.ring.as_mut(),
            owner: OWNER,
            early_submission: true,
            limits_changed: &mut self.limits_changed,
        };
        let result = f(self.queue.as_mut().unwrap().as_mut(), &mut cx);
        for (tag, result) in self.completed.drain(..) {
            let request = &mut self.in_flight[tag];
            assert_eq!(request.state, RequestState::Busy, "{tag:?} completed twice");
            request.state = RequestState::Idle;
            self.results[tag.index()] = Some(result);
        }
        result
    }

    /// Builds a request with one bio per buffer, or with one bio of `bytes` bytes without memory.
    pub fn build(
        &mut self,
        operation: Operation,
        flags: BioFlags,
        offset: u64,
        bytes: u64,
        buffers: Vec<IoBuffer>,
    ) -> Tag {
        let free = |(index, request): (usize, &Request)| {
            request.state == RequestState::Idle && request.first_bio == NIL && self.results[index].is_none()
        };
        let index = self.in_flight.requests().iter().enumerate().position(free).expect("a free tag");
        let sector = Sector::from_bytes(offset).unwrap();
        let mut request = Request::idle();
        (request.operation, request.flags, request.sector) = (operation, flags, sector);
        request.state = RequestState::Busy;
        let count = buffers.len() as u16;
        let parts: Vec<(u64, Data)> = if buffers.is_empty() {
            vec![(bytes, Data::None)]
        } else {
            buffers.into_iter().map(|b| (b.len() as u64, Data::Buffer(b))).collect()
        };
        for (length, data) in parts {
            let sectors = length >> 9;
            let outline = Outline { operation, flags, sector: request.end(), sectors, start_ns: 0 };
            let slot = self.in_flight.insert(NewBio::without_completer(outline, data));
            if request.first_bio == NIL {
                request.first_bio = slot;
            } else {
                self.in_flight[request.last_bio].next = slot;
            }
            request.last_bio = slot;
            request.sectors += sectors;
        }
        request.segments = count;
        let tag = Tag(index as u16);
        self.in_flight[tag] = request;
        tag
    }

    /// Builds a write of `buffers`, one bio for each.
    pub fn write(&mut self, offset: u64, buffers: Vec<IoBuffer>) -> Tag {
        self.build(Operation::Write, BioFlags::empty(), offset, 0, buffers)
    }

    /// Builds a read into buffers of these lengths.
    pub fn read(&mut self, offset: u64, lengths: &[usize]) -> Tag {
        let dirty = |length: &usize| filled(*length, 0xEE);
        let buffers = lengths.iter().map(dirty).collect();
        self.build(Operation::Read, BioFlags::empty(), offset, 0, buffers)
    }

    /// Builds a request without memory.
    pub fn bare(&mut self, operation: Operation, flags: BioFlags, offset: u64, bytes: u64) -> Tag {
        self.build(operation, flags, offset, bytes, Vec::new())
    }

    /// Sets the initial value of the words that a request reserves for the driver.
    pub fn set_pdu(&mut self, tag: Tag, words: [u64; 2]) {
        self.in_flight[tag].pdu = words;
    }

    /// Offers requests without ending the batch.
    pub fn queue(&mut self, tags: &[Tag]) -> Taken {
        self.with(|queue, cx| queue.queue_requests(cx, tags))
    }

    /// Offers requests as one batch.
    pub fn start(&mut self, tags: &[Tag]) {
        assert_eq!(self.queue(tags), Taken::All);
        self.commit();
    }

    /// Ends the batch, as a queue does after its last request.
    pub fn commit(&mut self) {
        self.with(|queue, cx| queue.commit(cx));
    }

    /// Notifies the queue that the device has changed.
    pub fn reload(&mut self) {
        self.with(|queue, cx| queue.reload(cx));
    }

    /// Runs one turn, which waits for the ring for at most a millisecond.
    pub fn turn(&mut self) {
        let mut cqes = Vec::new();
        if let Some(ring) = &mut self.ring {
            ring.enter(1, Some(Duration::from_millis(1)));
            ring.reap_all(&mut cqes);
            let dropped = self.swallow.min(cqes.len());
            self.swallow -= dropped;
            cqes.drain(..dropped);
        }
        self.with(|queue, cx| {
            for cqe in cqes {
                assert_eq!(cqe.token.owner(), OWNER);
                queue.complete_cqe(cx, cqe);
            }
            queue.poll(cx);
        });
    }

    /// Passes a completion to the queue that the kernel did not send.
    pub fn inject(&mut self, payload: u64, result: i32) {
        let cqe = Cqe { token: Token::new(OWNER, payload), result, flags: 0 };
        self.with(|queue, cx| queue.complete_cqe(cx, cqe));
    }

    /// The deadline that the queue reports ([`DriverQueue::deadline_ns`]).
    pub fn deadline_ns(&self) -> Option<u64> {
        self.queue.as_ref().unwrap().deadline_ns()
    }

    /// The state that the queue reports of a request.
    pub fn state(&self, tag: Tag) -> String {
        self.queue.as_ref().unwrap().state(tag, &self.in_flight[tag]).into_owned()
    }

    /// Whether the request has completed, and no test has waited for it yet.
    pub fn has_completed(&self, tag: Tag) -> bool {
        self.results[tag.index()].is_some()
    }

    /// Runs turns until `tag` has completed. Returns its result, and its memory in order.
    pub fn wait(&mut self, tag: Tag) -> (IoResult, Vec<u8>) {
        let begin = Instant::now();
        while !self.has_completed(tag) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{tag:?} never completed");
            self.turn();
        }
        let result = self.results[tag.index()].take().unwrap();
        (result, self.take_memory(tag))
    }

    fn take_memory(&mut self, tag: Tag) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut bio = self.in_flight[tag].first_bio;
        while bio != NIL {
            let next = self.in_flight[bio].next;
            if let Some(buffer) = self.in_flight[bio].take_data().into_buffer() {
                bytes.extend_from_slice(&buffer);
            }
            self.in_flight.remove(bio);
            bio = next;
        }
        self.in_flight[tag] = Request::idle();
        bytes
    }

    /// Starts the request and waits for it.
    pub fn run(&mut self, tag: Tag) -> (IoResult, Vec<u8>) {
        self.start(&[tag]);
        self.wait(tag)
    }

    /// Reads `length` bytes at `offset`.
    pub fn read_back(&mut self, offset: u64, length: usize) -> Vec<u8> {
        let tag = self.read(offset, &[length]);
        let (result, bytes) = self.run(tag);
        assert_eq!(result, Ok(()));
        bytes
    }

    /// Closes the queue. Returns its ring, which stays open.
    pub fn close(mut self) -> Option<Ring> {
        self.close_queue();
        self.ring.take()
    }

    fn close_queue(&mut self) {
        if self.queue.is_some() {
            self.with(|queue, cx| queue.close(cx));
            self.queue = None;
        }
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.close_queue();
            for index in 0..TAGS {
                if self.results[index].is_some() {
                    self.take_memory(Tag(index as u16));
                }
            }
        }
    }
}

/// A buffer in which each byte is `value`.
pub fn filled(length: usize, value: u8) -> IoBuffer {
    let mut buffer = IoBuffer::zeroed(length);
    buffer.fill(value);
    buffer
}

/// A buffer of random bytes, which depend on `seed`.
pub fn pattern(length: usize, seed: u64) -> IoBuffer {
    let mut buffer = IoBuffer::zeroed(length);
    Random::new(seed).fill(&mut buffer);
    buffer
}

/// Unmounts the file system at `point`, as soon as it is no longer in use: the kernel releases the files of a
/// ring, and of a loop device, some time after they were closed.
pub fn unmount(point: &Path) {
    if std::thread::panicking() {
        let _ = Command::new("umount").arg("--lazy").arg(point).status();
        return;
    }
    wait_until(&format!("nothing uses {}", point.display()), || {
        let output = Command::new("umount").arg(point).output().unwrap();
        let line = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() || line.contains("busy"), "{line}");
        output.status.success()
    });
}

/// Runs a program that must succeed, and returns its output.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

//! A device for tests. It checks each request against its declared limits, completes requests when and in the
//! order that the test chooses, is busy or fails on request, and has a volatile cache, so that a power loss
//! can be simulated.
#![allow(dead_code, clippy::unwrap_used, reason = "shared by tests of which none uses all of it")]

mod behaviour;
mod scattered;

use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use blkq::clock::monotonic_ns;
use blkq::random::{Random, mix};
use blkq::{
    BioFlags, Busy, Change, Disk, Driver, DriverContext, DriverQueue, DriverSetting, Error, ErrorKind,
    IoBuffer, IoResult, KernelPages, LocalQueue, OpenContext, Operation, QueueLimits, Status, Tag, Taken,
};

#[allow(unused_imports, reason = "not every test file sets the device")]
pub use behaviour::{Behaviour, DeviceSetting, Finish};
#[allow(unused_imports, reason = "not every test file scatters")]
pub use scattered::{Scattered, bytes_of};

/// A request as the device received it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub operation: Operation,
    pub flags: BioFlags,
    pub sector: u64,
    pub sectors: u64,
    pub segments: usize,
    pub pages: Option<KernelPages>,
    pub result: Option<IoResult>,
}

impl Seen {
    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        self.sector < range.end && range.start < self.sector + self.sectors
    }
}

pub struct State {
    pub limits: QueueLimits,
    pub behaviour: Behaviour,
    /// The bytes that reads return, and those that remain after a power loss. Each has the number of the last
    /// change per sector.
    pub current: Vec<u8>,
    pub durable: Vec<u8>,
    current_change: Vec<u64>,
    durable_change: Vec<u64>,
    changes: u64,
    /// Replacements for registered buffers of the kernel, by index.
    pub kernel_buffers: Vec<Vec<u8>>,
    /// Sectors for which requests fail.
    pub bad: Vec<(Range<u64>, Status)>,
    pub flush_result: IoResult,
    pub log: Vec<Seen>,
    pub batches: Vec<usize>,
    pub commits: usize,
    /// The number of requests that the device has, and its maximum.
    pub held: usize,
    pub held_max: usize,
    /// The number of held requests that may complete.
    pub released: usize,
    /// No request may arrive now.
    pub closed: bool,
    pub reloads: usize,
    pub busy_count: u64,
    pub deallocated: Vec<Range<u64>>,
    tags: HashSet<u16>,
    shared_tags: bool,
    revocable: u32,
    pub prepared: Vec<&'static str>,
    /// The number of queues for which the device was prepared.
    prepared_queues: usize,
    /// The device refuses to change read-only.
    pub read_only_refused: bool,
    /// Called once, when the next queue is opened.
    pub on_open: Option<Box<dyn FnOnce() + Send>>,
    pub violations: Vec<String>,
}

/// The device; the tests keep a clone to inspect it.
#[derive(Clone)]
pub struct Device(Arc<Mutex<State>>);

impl Device {
    pub fn new(limits: QueueLimits, behaviour: Behaviour) -> Device {
        let bytes = limits.capacity_bytes as usize;
        Device(Arc::new(Mutex::new(State {
            limits,
            behaviour,
            current: vec![0; bytes],
            durable: vec![0; bytes],
            current_change: vec![0; bytes >> 9],
            durable_change: vec![0; bytes >> 9],
            changes: 0,
            kernel_buffers: Vec::new(),
            bad: Vec::new(),
            flush_result: Ok(()),
            log: Vec::new(),
            batches: Vec::new(),
            commits: 0,
            held: 0,
            held_max: 0,
            released: 0,
            closed: false,
            reloads: 0,
            busy_count: 0,
            deallocated: Vec::new(),
            tags: HashSet::new(),
            shared_tags: false,
            revocable: 0,
            prepared: Vec::new(),
            prepared_queues: 0,
            read_only_refused: false,
            on_open: None,
            violations: Vec::new(),
        })))
    }

    pub fn plain(behaviour: Behaviour) -> Device {
        Device::new(plain_limits(), behaviour)
    }

    pub fn held() -> Device {
        Device::plain(Behaviour { finish: Finish::Held, ..Behaviour::default() })
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub fn with_shared_tags(self) -> Device {
        self.state().shared_tags = true;
        self
    }

    pub fn builder(&self) -> blkq::DiskBuilder {
        Disk::builder(Box::new(self.clone()))
    }

    pub fn open(&self) -> (Arc<Disk>, LocalQueue) {
        let disk = self.builder().build().unwrap();
        let queue = disk.open_queue(0).unwrap();
        (disk, queue)
    }

    pub fn release(&self, count: usize) {
        self.state().released += count;
    }

    pub fn release_all(&self) {
        self.state().behaviour.finish = Finish::Random;
    }

    pub fn log(&self) -> Vec<Seen> {
        self.state().log.clone()
    }

    pub fn count(&self, operation: Operation) -> usize {
        self.state().log.iter().filter(|seen| seen.operation == operation).count()
    }

    #[track_caller]
    pub fn assert_legal(&self) {
        let state = self.state();
        assert!(state.violations.is_empty(), "{:#?}", &state.violations[..state.violations.len().min(5)]);
    }
}

pub fn plain_limits() -> QueueLimits {
    QueueLimits {
        capacity_bytes: 1 << 20,
        max_discard_bytes: 1 << 20,
        discard_granularity: 512,
        max_write_zeroes_bytes: 1 << 20,
        max_write_zeroes_no_unmap_bytes: 1 << 20,
        ..QueueLimits::default()
    }
}

impl Driver for Device {
    fn name(&self) -> &'static str {
        "test"
    }

    fn limits(&self) -> QueueLimits {
        self.state().limits.clone()
    }

    fn prepare_queues(&self, queues: usize) -> Result<(), Error> {
        self.state().prepared_queues = queues;
        Ok(())
    }

    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        let is_prepared = |state: &State| usize::from(cx.index) < state.prepared_queues;
        self.state().expect(is_prepared, "a queue was opened for which the device was not prepared");
        let random = Random::new(mix(self.state().behaviour.seed) ^ u64::from(cx.index));
        let device = self.clone();
        let on_open = self.state().on_open.take();
        if let Some(on_open) = on_open {
            on_open();
        }
        Ok(Box::new(DeviceQueue { device, random, own_flush: Tag(cx.tags as u16 - 1), pending: Vec::new() }))
    }

    fn prepare_set(&self, setting: &dyn DriverSetting) -> Result<Change, Error> {
        self.state().prepared.push(setting.name());
        let own = setting.downcast_ref::<DeviceSetting>();
        own.map(|_| Change::Frozen).ok_or_else(|| setting.unknown_to("test"))
    }

    fn set(&self, setting: &dyn DriverSetting) -> Result<(), Error> {
        let mut state = self.state();
        state.expect(state_is_idle, "set under I/O");
        match *setting.downcast_ref().expect("it was prepared") {
            DeviceSetting::Panic => {
                drop(state);
                panic!("a panic for the test");
            }
            DeviceSetting::MemoryAlign(bytes) => state.limits.memory_align = bytes,
            DeviceSetting::MaxSegments(count) => state.limits.max_segments = count,
            DeviceSetting::MaxRequest(bytes) => state.limits.max_request_bytes = bytes,
        }
        Ok(())
    }

    fn prepare_read_only(&self, _: bool) -> Result<(), Error> {
        let mut state = self.state();
        state.prepared.push("read-only");
        match state.read_only_refused {
            true => Err(Error::new(ErrorKind::Unsupported, "refused for the test")),
            false => Ok(()),
        }
    }

    fn set_read_only(&self, read_only: bool) -> Result<(), Error> {
        let mut state = self.state();
        state.expect(state_is_idle, "set under I/O");
        state.limits.read_only = read_only;
        Ok(())
    }

    fn owner(&self) -> Option<String> {
        Some("the test".to_owned())
    }

    unsafe fn release(&self) -> Result<(), Error> {
        let mut state = self.state();
        state.expect(state_is_idle, "released under I/O");
        state.closed = true;
        Ok(())
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), Error> {
        let mut state = self.state();
        state.expect(state_is_idle, "resized under I/O");
        state.limits.capacity_bytes = bytes.unwrap().min(state.current.len() as u64);
        Ok(())
    }
}

fn state_is_idle(state: &State) -> bool {
    state.held == 0
}

impl State {
    fn expect(&mut self, holds: impl Fn(&State) -> bool, what: impl Into<String>) {
        if !holds(self) {
            self.violations.push(what.into());
        }
    }

    pub fn lose_power(&mut self) {
        self.current.copy_from_slice(&self.durable);
    }
}

/// A flush covers the writes that had completed when it started.
type Snapshot = (Vec<u8>, Vec<u64>);

struct Pending {
    tag: Tag,
    log: usize,
    covers: Option<Snapshot>,
}

struct DeviceQueue {
    device: Device,
    random: Random,
    own_flush: Tag,
    pending: Vec<Pending>,
}

impl DeviceQueue {
    fn random(&mut self, below: u64) -> u64 {
        self.random.below(below)
    }

    /// The rules of contract `declared`, and other rules that each request must obey.
    fn check(&self, state: &mut State, cx: &DriverContext<'_>, tag: Tag) {
        let (request, limits) = (cx.request(tag), state.limits.clone());
        let (operation, flags) = (request.operation(), request.flags());
        let what = format!("{request:?} breaks ");
        let state_revoked = state.behaviour.revoke_after.is_some_and(|after| state.revocable > after);
        let state_has_lost_fua = state.behaviour.revoke_fua;
        let mut rule = |holds: bool, name: &str| {
            if !holds {
                state.violations.push(format!("{what}{name}"));
            }
        };
        let (offset, bytes) = (request.offset(), request.bytes());
        let mut sum = 0u64;
        let (mut count, mut aligned, mut longest) = (0, true, 0);
        let mask = limits.memory_align as usize - 1;
        cx.for_each_segment(tag, |segment| {
            sum += u64::from(segment.len);
            count += 1;
            longest = longest.max(segment.len);
            aligned &= (segment.ptr.addr() | segment.len as usize) & mask == 0 && segment.len > 0;
        });
        if let Some(pages) = cx.kernel_pages(tag) {
            rule(limits.kernel_pages && count == 0, "kernel pages");
            (sum, count, longest) = (u64::from(pages.len()), 1, pages.len());
        }
        if operation == Operation::Flush {
            rule(limits.write_cache && tag == self.own_flush && flags.is_empty() && bytes == 0, "flush");
        } else {
            rule(bytes > 0 && limits.check_range(offset, bytes).is_ok(), "range");
            let no_unmap = flags.contains(BioFlags::NO_UNMAP);
            // Requests that were in flight when the device found that it lacks support are permitted.
            let revoked = matches!(operation, Operation::Discard | Operation::WriteZeroes) && state_revoked;
            let fits = bytes <= limits.max_bytes_at(operation, no_unmap, offset);
            rule(fits || revoked, "size, chunk or support");
            rule(tag != self.own_flush, "the tag of the flush");
        }
        if operation.has_data() {
            rule(sum == bytes && count == request.segment_count(), "memory");
            rule(count <= usize::from(limits.max_segments), "number of segments");
            rule(longest <= limits.max_segment_bytes, "length of segments");
            rule(aligned, "alignment of memory");
        } else {
            rule(count == 0 && request.segment_count() == 0, "no memory");
        }
        rule(!flags.contains(BioFlags::PREFLUSH), "preflush");
        // Such requests are also permitted after the device lost FUA.
        let has_fua = limits.fua || state_has_lost_fua;
        rule(!flags.contains(BioFlags::FUA) || has_fua && operation == Operation::Write, "fua");
        rule(!flags.contains(BioFlags::NO_UNMAP) || operation == Operation::WriteZeroes, "no-unmap");
        rule(!(operation.is_write() && limits.read_only), "read-only");
        rule(!state.closed, "freeze or quiesce");
        if state.shared_tags && tag != self.own_flush && !state.tags.insert(tag.0) {
            state.violations.push(format!("{tag:?} is in use by another queue"));
        }
        if self.pending.iter().any(|pending| pending.tag == tag) {
            state.violations.push(format!("{tag:?} is in use"));
        }
    }

    fn take(&mut self, cx: &mut DriverContext<'_>, tag: Tag) {
        let device = self.device.clone();
        let mut state = device.state();
        self.check(&mut state, cx, tag);
        let request = cx.request(tag);
        let log = state.log.len();
        state.log.push(Seen {
            operation: request.operation(),
            flags: request.flags(),
            sector: request.sector().0,
            sectors: request.bytes() >> 9,
            segments: request.segment_count(),
            pages: cx.kernel_pages(tag),
            result: None,
        });
        let is_flush = request.operation() == Operation::Flush;
        let covers = is_flush.then(|| (state.current.clone(), state.current_change.clone()));
        state.held += 1;
        state.held_max = state.held_max.max(state.held);
        self.pending.push(Pending { tag, log, covers });
    }

    fn finish(&mut self, state: &mut State, cx: &mut DriverContext<'_>, index: usize) {
        let Pending { tag, log, covers } = self.pending.swap_remove(index);
        let result = self.effect(state, cx, tag, covers);
        state.log[log].result = Some(result);
        state.held -= 1;
        state.tags.remove(&tag.0);
        cx.complete(tag, result);
    }

    fn effect(
        &self,
        state: &mut State,
        cx: &mut DriverContext<'_>,
        tag: Tag,
        covers: Option<Snapshot>,
    ) -> IoResult {
        let request = cx.request(tag);
        let (operation, flags) = (request.operation(), request.flags());
        let start = request.offset() as usize;
        let bytes = start..start + request.bytes() as usize;
        let sectors = start as u64 >> 9..bytes.end as u64 >> 9;
        let hit = state.bad.iter().find(|(bad, _)| bad.start < sectors.end && sectors.start < bad.end);
        if let Some((_, status)) = hit {
            return Err(*status);
        }
        if matches!(operation, Operation::WriteZeroes | Operation::Discard) {
            state.revocable += 1;
            if state.behaviour.revoke_after.is_some_and(|after| state.revocable > after) {
                let limits = &mut state.limits;
                limits.max_discard_bytes = 0;
                limits.discard_granularity = 0;
                limits.max_write_zeroes_bytes = 0;
                limits.max_write_zeroes_no_unmap_bytes = 0;
                cx.limits_changed();
                return Err(Status::NotSupported);
            }
        }
        if let Some(pages) = cx.kernel_pages(tag) {
            let State { kernel_buffers, current, .. } = &mut *state;
            let from = pages.offset() as usize;
            let memory = &mut kernel_buffers[usize::from(pages.index())][from..from + pages.len() as usize];
            match operation {
                Operation::Read => memory.copy_from_slice(&current[bytes.clone()]),
                _ => current[bytes.clone()].copy_from_slice(memory),
            }
        }
        let mut place = start;
        match operation {
            Operation::Read => cx.for_each_segment(tag, |segment| {
                let source = &state.current[place..place + segment.len as usize];
                // SAFETY: the memory of a read in flight is valid, and the device may fill it.
                unsafe { segment.ptr.copy_from_nonoverlapping(source.as_ptr(), source.len()) }
                place += segment.len as usize;
            }),
            Operation::Write => cx.for_each_segment(tag, |segment| {
                let target = &mut state.current[place..place + segment.len as usize];
                // SAFETY: the memory of a write in flight is valid.
                unsafe { segment.ptr.copy_to_nonoverlapping(target.as_mut_ptr(), target.len()) }
                place += segment.len as usize;
            }),
            Operation::Discard | Operation::WriteZeroes => {
                state.current[bytes.clone()].fill(0);
                if !flags.contains(BioFlags::NO_UNMAP) {
                    state.deallocated.push(sectors.clone());
                }
            }
            Operation::Flush => {}
        }
        if operation.is_write() {
            if state.behaviour.revoke_fua && flags.contains(BioFlags::FUA) {
                state.limits.fua = false;
                cx.limits_changed();
            }
            state.changes += 1;
            let does_fua = state.limits.fua && flags.contains(BioFlags::FUA);
            let (change, durable) = (state.changes, does_fua || !state.limits.write_cache);
            for sector in sectors {
                let sector = sector as usize;
                state.current_change[sector] = change;
                if durable {
                    state.durable_change[sector] = change;
                }
            }
            if durable {
                let State { durable, current, .. } = state;
                durable[bytes.clone()].copy_from_slice(&current[bytes]);
            }
        }
        if operation == Operation::Flush {
            state.flush_result?;
        }
        if let Some((bytes, changes)) = covers {
            for (sector, change) in changes.into_iter().enumerate() {
                if change > state.durable_change[sector] {
                    state.durable_change[sector] = change;
                    let place = sector << 9..(sector + 1) << 9;
                    state.durable[place.clone()].copy_from_slice(&bytes[place]);
                }
            }
        }
        Ok(())
    }
}

// SAFETY: only this thread uses the memory of a request, and only before the request completes.
unsafe impl DriverQueue for DeviceQueue {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        let device = self.device.clone();
        let behaviour = device.state().behaviour.clone();
        device.state().batches.push(tags.len());
        for (index, &tag) in tags.iter().enumerate() {
            if behaviour.busy_every > 0 && self.random(behaviour.busy_every) == 0 {
                device.state().busy_count += 1;
                let until_completion = !self.pending.is_empty() && self.random(4) > 0;
                return Taken::First(
                    index,
                    if until_completion { Busy::UntilCompletion } else { Busy::Resource },
                );
            }
            self.take(cx, tag);
            if behaviour.finish == Finish::AtOnce {
                let last = self.pending.len() - 1;
                self.finish(&mut device.state(), cx, last);
            }
        }
        Taken::All
    }

    fn commit(&mut self, _: &mut DriverContext<'_>) {
        self.device.state().commits += 1;
    }

    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        let device = self.device.clone();
        let mut state = device.state();
        let count = match state.behaviour.finish {
            Finish::Held => {
                let count = state.released.min(self.pending.len());
                state.released -= count;
                count
            }
            _ => (self.random(4) as usize).min(self.pending.len()),
        };
        for _ in 0..count {
            let index = self.random(self.pending.len() as u64) as usize;
            self.finish(&mut state, cx, index);
        }
    }

    fn deadline_ns(&self) -> Option<u64> {
        // The queue is polled continuously, so that released requests complete soon.
        (!self.pending.is_empty()).then(|| monotonic_ns() + 20_000)
    }

    fn reload(&mut self, _: &mut DriverContext<'_>) {
        self.device.state().reloads += 1;
    }
}

pub fn filled(length: usize, value: u8) -> IoBuffer {
    let mut buffer = IoBuffer::zeroed(length);
    buffer.fill(value);
    buffer
}

/// The bytes of sector `sector` in version `version`. Version 0 is zeroes.
pub fn content(sector: u64, version: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    if version > 0 {
        for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
            let value = mix(sector << 40 ^ version << 8 ^ index as u64);
            word.copy_from_slice(&(value | 1).to_ne_bytes());
        }
    }
    bytes
}

pub fn drain(queue: &mut LocalQueue) -> Vec<blkq::Completion> {
    let begin = std::time::Instant::now();
    let mut all = Vec::new();
    loop {
        all.extend(queue.completions());
        if queue.in_flight() == 0 {
            return all;
        }
        assert!(begin.elapsed().as_secs() < 60, "{} bios never complete", queue.in_flight());
        queue.wait(1);
    }
}

pub fn run(queue: &mut LocalQueue, bio: blkq::Bio) -> blkq::Completion {
    queue.submit(bio).unwrap();
    drain(queue).pop().unwrap()
}

//! The events of a trace: what each step of an I/O records, in order.

use std::any::Any;
use std::sync::Arc;

use crate::common::{Behaviour, Device, drain, filled, plain_limits};
use blkq::drivers::null::{Null, NullOptions};
use blkq::ring::Cqe;
use blkq::trace::{EventKind, NO_BIO, RING_BYTES_MIN, TraceClient, TraceEvent, TraceMemory, TraceReader};
use blkq::{
    Bio, BioFlags, ClockMode, Completion, Disk, EngineThread, Error, LocalQueue, Operation, QueueLimits,
    SchedulerKind, Sector, Source, SourceContext, StatGroup, Status,
};
use blkq_drivers::{DriverOptions, DriverSpec, open};

struct Traced {
    queue: LocalQueue,
    reader: TraceReader,
    _disk: Arc<Disk>,
}

fn traced(disk: Arc<Disk>) -> Traced {
    let mut queue = disk.open_queue(0).unwrap();
    let memory = TraceMemory::new(1, 1 << 18).unwrap();
    queue.trace(Some(&memory));
    Traced { queue, reader: TraceReader::new(&memory, 0).unwrap(), _disk: disk }
}

/// Reads all events. Returns the number of missed events.
fn read_all(reader: &mut TraceReader, events: &mut Vec<TraceEvent>) -> u64 {
    let mut lost = 0;
    loop {
        let page = reader.read(events);
        lost += page.lost;
        if !page.more {
            return lost;
        }
    }
}

impl Traced {
    fn submit(&mut self, bio: Bio) {
        self.queue.submit(bio).unwrap();
    }

    fn events(&mut self) -> Vec<TraceEvent> {
        let mut events = Vec::new();
        assert_eq!(read_all(&mut self.reader, &mut events), 0);
        assert!(events.windows(2).all(|pair| pair[0].time_ns <= pair[1].time_ns), "{events:?}");
        events
    }

    /// The letters of the events until all bios have completed.
    fn letters(&mut self) -> String {
        drain(&mut self.queue);
        letters(&self.events())
    }
}

fn letters(events: &[TraceEvent]) -> String {
    events.iter().map(|event| event.kind.letter()).collect()
}

fn read(sector: u64, bytes: usize) -> Bio {
    Bio::read(Sector(sector), filled(bytes, 0), sector)
}

fn write(sector: u64, bytes: usize) -> Bio {
    Bio::write(Sector(sector), filled(bytes, 1), sector)
}

fn plain() -> Arc<Disk> {
    Device::plain(Behaviour::default()).builder().build().unwrap()
}

#[test]
fn the_life_of_a_request_is_traced_in_order() {
    let mut traced = traced(plain());
    traced.submit(read(8, 4096));
    drain(&mut traced.queue);
    let events = traced.events();
    assert_eq!(letters(&events), "QGPUDC");
    for event in events.iter().filter(|event| !matches!(event.kind, EventKind::Plug | EventKind::Unplug)) {
        assert_eq!((event.sector, event.bytes, event.operation), (Sector(8), 4096, Operation::Read));
        assert_eq!(event.tag.is_some(), event.kind != EventKind::Queue);
        assert_eq!((event.bio, event.status), (events[0].bio, None));
    }
    assert_eq!((events[3].other, events[3].bio), (1, NO_BIO));
}

#[test]
fn neighbours_are_traced_as_merges_on_their_side() {
    let mut traced = traced(plain());
    [16, 24, 8].into_iter().for_each(|sector| traced.submit(write(sector, 4096)));
    drain(&mut traced.queue);
    let events = traced.events();
    assert_eq!(letters(&events), "QGPQMQFUDC");
    let completion = events.last().unwrap();
    assert_eq!((completion.sector, completion.bytes), (Sector(8), 3 * 4096));
    assert_eq!((events[4].sector, events[4].tag), (Sector(24), completion.tag));
}

#[test]
fn a_scheduler_is_seen_by_its_inserts_and_joins() {
    let device = Device::plain(Behaviour::default());
    let disk = device.builder().scheduler(SchedulerKind::MqDeadline).build().unwrap();
    let mut traced = traced(disk);
    traced.submit(read(8, 4096));
    assert_eq!(traced.letters(), "QGPUIDC");
}

#[test]
fn parts_of_a_large_bio_are_traced_as_splits() {
    let limits = QueueLimits { max_request_bytes: 4096, ..plain_limits() };
    let device = Device::new(limits, Behaviour::default());
    let mut traced = traced(device.builder().merge(false).build().unwrap());
    traced.submit(write(0, 3 * 4096));
    drain(&mut traced.queue);
    let events = traced.events();
    assert_eq!(letters(&events), "QXXXGPGGUDDDCCC");
    for (number, part) in events[1..4].iter().enumerate() {
        assert_eq!((part.sector, part.bytes), (Sector(number as u64 * 8), 4096));
        assert_eq!(part.other, events[0].bio);
    }
}

#[test]
fn a_flush_serves_the_bios_that_wait_for_it() {
    let limits = QueueLimits { write_cache: true, ..plain_limits() };
    let device = Device::new(limits, Behaviour::default());
    let mut traced = traced(device.builder().build().unwrap());
    traced.submit(Bio::flush(1));
    traced.submit(Bio::flush(2));
    drain(&mut traced.queue);
    let events = traced.events();
    assert_eq!(letters(&events), "QQGDC");
    assert_eq!((events[2].other, events[2].operation), (2, Operation::Flush));
    traced.submit(write(8, 512).with_flags(BioFlags::FUA));
    assert_eq!(traced.letters(), "QGPUDCGDC", "the write, and a flush after it");
}

#[test]
fn errors_are_traced_with_their_status_and_without_a_tag() {
    let mut traced = traced(plain());
    traced.submit(read(1 << 40, 512));
    drain(&mut traced.queue);
    let events = traced.events();
    assert_eq!(letters(&events), "QC");
    assert_eq!((events[1].status, events[1].tag), (Some(Status::Invalid), None));
}

#[test]
fn a_busy_driver_is_traced_as_a_requeue() {
    let behaviour = Behaviour { busy_every: 2, ..Behaviour::default() };
    let device = Device::plain(behaviour);
    let mut traced = traced(device.builder().build().unwrap());
    (0..32).for_each(|number| traced.submit(read(number * 16, 4096)));
    let letters = traced.letters();
    let count = |letter| letters.chars().filter(|of| *of == letter).count();
    assert!(count('R') > 0 && count('D') == 32 + count('R'), "{letters}");
    assert_eq!((count('Q'), count('C')), (32, 32));
}

#[test]
fn each_bio_behind_a_limit_merges_or_gets_a_request() {
    for scheduler in [SchedulerKind::None, SchedulerKind::MqDeadline] {
        let device = Device::plain(Behaviour::default());
        let limits = "write-iops=1".parse().unwrap();
        let disk = device.builder().scheduler(scheduler).rate_limits(limits).build().unwrap();
        let mut traced = traced(disk.clone());
        // The last waiting request grows at its end, then at its beginning, while the plug is empty.
        for sector in [1000, 2000, 64, 72, 80, 56, 48] {
            traced.submit(write(sector, 4096));
            traced.queue.poll();
        }
        disk.set_rate_limits(&"none".parse().unwrap());
        let letters = traced.letters();
        let count = |of: &str| letters.chars().filter(|letter| of.contains(*letter)).count();
        assert_eq!((count("Q"), count("MFG")), (7, 7), "{scheduler}: {letters}");
        assert!(count("M") > 0 && count("F") > 0, "{scheduler}: {letters}");
        assert_eq!(count("MF") as u64, disk.stats()[StatGroup::Write].merges, "{scheduler}: {letters}");
    }
}

#[test]
fn a_trace_begins_and_stops_under_requests() {
    let device = Device::held();
    let disk = device.builder().build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    let memory = TraceMemory::new(1, RING_BYTES_MIN).unwrap();
    let mut reader = TraceReader::new(&memory, 0).unwrap();
    queue.submit(read(8, 4096)).unwrap();
    queue.poll();
    // The bios are in the plug, on the fast path.
    queue.submit(read(64, 4096)).unwrap();
    queue.trace(Some(&memory));
    queue.submit(read(128, 4096)).unwrap();
    queue.poll();
    queue.submit(read(256, 4096)).unwrap();
    device.release_all();
    queue.trace(None);
    queue.submit(read(512, 4096)).unwrap();
    assert_eq!(drain(&mut queue).len(), 5);
    let mut events = Vec::new();
    assert_eq!(read_all(&mut reader, &mut events), 0);
    let sectors = |kind| -> Vec<u64> {
        events.iter().filter(|event| event.kind == kind).map(|event| event.sector.0).collect()
    };
    assert_eq!((sectors(EventKind::Queue), sectors(EventKind::Issue)), (vec![128, 256], vec![64, 128]));
    assert!(sectors(EventKind::Complete).is_empty());
}

#[test]
fn a_plug_is_traced_in_order_whichever_way_its_bios_took() {
    let limits = QueueLimits { max_discard_bytes: 1 << 20, ..plain_limits() };
    let discard = || Bio::discard(Sector(1024), 8, 0);
    for (clock, iostats) in
        [(ClockMode::Cached, true), (ClockMode::Precise, true), (ClockMode::Cached, false)]
    {
        let device = Device::new(limits.clone(), Behaviour::default());
        let mut traced = traced(device.builder().clock(clock).iostats(iostats).build().unwrap());
        for round in 0..3 {
            [read(8, 4096), write(64, 512), read(128, 8192)].into_iter().for_each(|bio| traced.submit(bio));
            drain(&mut traced.queue);
            let events = traced.events();
            assert_eq!(letters(&events), "QGPQGQGUDDDCCC", "{clock}, round {round}");
            let places: Vec<_> = events.iter().filter(|event| event.kind == EventKind::Complete).collect();
            let of = |event: &TraceEvent| (event.sector.0, event.bytes, event.operation);
            let expected =
                [(8, 4096, Operation::Read), (64, 512, Operation::Write), (128, 8192, Operation::Read)];
            assert!(places.iter().map(|event| of(event)).eq(expected), "{places:?}");
            let times = events.iter().map(|event| event.time_ns).collect::<std::collections::BTreeSet<_>>();
            assert_eq!(times.len() > 3, clock == ClockMode::Precise, "{clock}: {times:?}");
        }
        [read(8, 4096), discard(), read(64, 512), read(65, 512)]
            .into_iter()
            .for_each(|bio| traced.submit(bio));
        assert_eq!(traced.letters(), "QGPQGQGQMUDDDCCC", "{clock}");
    }
}

#[test]
fn a_device_too_large_for_short_records_is_traced_all_the_same() {
    let driver = Null::new(NullOptions::new(1 << 50)).unwrap();
    let mut traced = traced(Disk::builder(Box::new(driver)).build().unwrap());
    let far = (1 << 41) - 8;
    traced.submit(read(far, 4096));
    drain(&mut traced.queue);
    let events = traced.events();
    assert_eq!((letters(&events).as_str(), events[0].sector.0), ("QGPUDC", far));
}

#[test]
fn requests_in_flight_before_a_trace_complete_in_it() {
    let device = Device::held();
    let mut queue = device.builder().build().unwrap().open_queue(0).unwrap();
    queue.submit(read(8, 4096)).unwrap();
    queue.poll();
    let memory = TraceMemory::new(1, RING_BYTES_MIN).unwrap();
    queue.trace(Some(&memory));
    queue.submit(read(64, 512)).unwrap();
    queue.poll();
    device.release_all();
    drain(&mut queue);
    let (mut reader, mut events) = (TraceReader::new(&memory, 0).unwrap(), Vec::new());
    assert_eq!((read_all(&mut reader, &mut events), letters(&events).as_str()), (0, "QGPUDCC"));
    let completed: Vec<_> = events[5..].iter().map(|event| (event.sector.0, event.bytes)).collect();
    assert_eq!(completed, [(8, 4096), (64, 512)]);
}

#[test]
fn a_quiesced_disk_traces_the_issue_after_it_continues() {
    let disk = plain();
    let mut traced = traced(disk.clone());
    // A first read makes the queue enter the disk.
    traced.submit(read(8, 4096));
    assert_eq!(traced.letters(), "QGPUDC");
    let quiesced = disk.quiesce();
    traced.submit(read(64, 4096));
    traced.queue.poll();
    assert_eq!(letters(&traced.events()), "QGPU");
    drop(quiesced);
    assert_eq!(traced.letters(), "DC");
}

#[test]
fn each_failed_completion_of_a_batch_has_its_status() {
    let options = DriverOptions { fault: Some("error=EIO".parse().unwrap()), ..DriverOptions::default() };
    let driver = open(&DriverSpec::Ram(8 << 20), &options).unwrap().driver;
    let mut traced = traced(Disk::builder_shared(driver).build().unwrap());
    [8, 64].into_iter().for_each(|sector| traced.submit(read(sector, 512)));
    drain(&mut traced.queue);
    let events = traced.events();
    assert_eq!(letters(&events), "QGPQGUDDCC");
    assert!(events.iter().all(|event| event.status.is_some() == (event.kind == EventKind::Complete)));
}

/// Submits bios with a client for each: bios of one plug, one that merges, and one whose operation is not
/// handled by the fast path.
struct Clients {
    in_flight: usize,
}

// SAFETY: the source reports that it is stopped only when no bio is in flight.
unsafe impl Source for Clients {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        for (number, bio) in
            [read(8, 512), read(64, 512), read(65, 512), Bio::discard(Sector(128), 8, 0), read(256, 512)]
                .into_iter()
                .enumerate()
        {
            cx.set_trace_client(0, || TraceClient::new(1, number as u32));
            cx.submit(0, bio).unwrap();
            self.in_flight += 1;
        }
        // No client is named for this bio.
        cx.submit(0, read(512, 512)).unwrap();
        self.in_flight += 1;
        Ok(())
    }

    fn on_cqe(&mut self, _: &mut SourceContext<'_>, _: Cqe) {}

    fn on_bio(&mut self, _: &mut SourceContext<'_>, _: Completion) {
        self.in_flight -= 1;
    }

    fn on_message(&mut self, _: &mut SourceContext<'_>, _: Box<dyn Any + Send>) {}

    fn on_turn(&mut self, _: &mut SourceContext<'_>) {}

    fn stop(&mut self, _: &mut SourceContext<'_>, _: bool) {}

    fn is_stopped(&self) -> bool {
        self.in_flight == 0
    }
}

#[test]
fn each_bio_of_a_plug_is_traced_with_its_client() {
    let limits = QueueLimits { max_discard_bytes: 1 << 20, ..plain_limits() };
    let disk = Device::new(limits, Behaviour::default()).builder().build().unwrap();
    let engine = EngineThread::spawn("engine", vec![(disk.clone(), 0)]).unwrap();
    let memory = TraceMemory::new(1, 1 << 18).unwrap();
    engine.handle().trace(&disk, Some(memory.clone()));
    engine.handle().add_source(|| Box::new(Clients { in_flight: 0 })).unwrap();
    engine.handle().scan_for_hangs(0, 0).recv().unwrap();
    drop(engine);
    let (mut reader, mut events) = (TraceReader::new(&memory, 0).unwrap(), Vec::new());
    assert_eq!(read_all(&mut reader, &mut events), 0);
    let clients = |kind| -> Vec<_> {
        let of_kind = events.iter().filter(|event| event.kind == kind);
        of_kind.map(|event| (event.sector.0, event.client.kind(), event.client.number())).collect()
    };
    let requests = [(8, 1, 0), (64, 1, 1), (128, 1, 3), (256, 1, 4), (512, 0, 0)];
    for kind in [EventKind::GetRequest, EventKind::Issue, EventKind::Complete] {
        assert_eq!(clients(kind), requests, "{kind:?}");
    }
    assert_eq!(clients(EventKind::BackMerge), [(65, 1, 2)]);
}

#[test]
fn a_queue_writes_events_without_a_reader() {
    let disk = plain();
    let mut queue = disk.open_queue(0).unwrap();
    let memory = TraceMemory::new(1, RING_BYTES_MIN).unwrap();
    queue.trace(Some(&memory));
    for number in 0..1000 {
        queue.submit(read(number, 512)).unwrap();
        assert_eq!(drain(&mut queue).len(), 1);
    }
    let (mut reader, mut events) = (TraceReader::new(&memory, 0).unwrap(), Vec::new());
    let lost = read_all(&mut reader, &mut events);
    assert_eq!(lost + events.len() as u64, 6000);
}

#[test]
fn engines_trace_their_queues_from_other_threads() {
    let disk = Device::plain(Behaviour::default()).builder().queues(2).build().unwrap();
    let memory = TraceMemory::new(2, 1 << 18).unwrap();
    let spawn = |queue| EngineThread::spawn("engine", vec![(disk.clone(), queue)]).unwrap();
    let engines = [spawn(0), spawn(1)];
    let trace = |memory: Option<&Arc<TraceMemory>>| {
        engines.iter().for_each(|engine| engine.handle().trace(&disk, memory.cloned()));
        // Messages are handled in order, so the trace has been started or stopped once the scan is answered.
        engines.iter().for_each(|engine| drop(engine.handle().scan_for_hangs(0, 0).recv().unwrap()));
    };
    trace(Some(&memory));
    let write = || {
        for _ in 0..2 {
            disk.submitter().write_at(&[1; 4096], 0).unwrap();
        }
    };
    write();
    trace(None);
    write();
    for queue in 0..2 {
        let mut events = Vec::new();
        read_all(&mut TraceReader::new(&memory, queue).unwrap(), &mut events);
        assert_eq!(letters(&events), "QGPUDC", "queue {queue}");
    }
}

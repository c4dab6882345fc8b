use crate::bio::{Operation, Outline};
use crate::clock::{Clock, ClockMode};
use crate::error::IoResult;
use crate::limits::QueueLimits;
use crate::request::Request;
use crate::sector::SECTOR_BYTES;
use crate::slab::BioSlot;
use crate::tags::Tag;
use crate::trace::{
    EventKind, PlugRecord, Probes, RECORD_CAPACITY_SECTORS, RECORD_REQUESTS_MAX, TraceClient, TraceEvent,
    TraceWriter,
};

use super::plug::PLUG_REQUESTS_SEVERAL_QUEUES;

/// The requests of one plug must fit into one record.
const _: () = assert!(PLUG_REQUESTS_SEVERAL_QUEUES <= RECORD_REQUESTS_MAX);

/// The length in an event of a bio that is longer: whole sectors.
const BYTES_MAX: u32 = !(SECTOR_BYTES as u32 - 1);

/// Writes the events of a queue to the trace, and fires USDT probes for them. Bios on the plug's fast path
/// are not recorded one by one. Their first events are in one record per plug, which is written when the plug
/// is flushed, or before another event is written.
#[derive(Default)]
pub(super) struct Tracer {
    writer: Option<TraceWriter>,
    pub probes: Option<Probes>,
    /// The requests of a plug fit into one record: the clock is cached, so they share a time stamp, and the
    /// device is small enough for the sector numbers of a record.
    has_records: bool,
    /// How many requests of the plug were recorded, or began before the trace.
    plugged: usize,
    /// The client of each bio that took the fast path into the plug, and at `next_bio` that of the next bio.
    /// Empty until a bio has a client.
    plug_clients: Vec<TraceClient>,
    next_bio: usize,
    /// A bio had a client, so records must contain clients.
    has_clients: bool,
    /// The client of each bio in flight, by the number of the bio.
    clients: Vec<TraceClient>,
    /// Requests in flight that began before the trace. A reader does not know their tags, so their
    /// completions need single events with all fields.
    unknown: Vec<Tag>,
}

impl Tracer {
    /// Starts or stops to write the events with `writer`. The requests of `in_flight` have begun before.
    pub fn set_writer(&mut self, writer: Option<TraceWriter>, in_flight: Vec<Tag>) {
        self.writer = writer;
        self.plug_clients.fill(TraceClient::NONE);
        self.unknown = in_flight;
    }

    /// Must be called after each change of the writer, the probes, the clock or the limits. `plugged` requests are in
    /// the plug, and those of a queue that was traced before have been recorded.
    pub fn reload(&mut self, clock: ClockMode, limits: &QueueLimits, plugged: usize) {
        self.plugged = plugged;
        self.has_records =
            clock == ClockMode::Cached && limits.capacity_bytes / SECTOR_BYTES <= RECORD_CAPACITY_SECTORS;
    }

    /// Whether bios may take the plug's fast path, because no bio needs an event of its own immediately.
    pub fn allows_fast_path(&self) -> bool {
        self.has_records && self.probes.is_none()
    }

    pub fn is_on(&self) -> bool {
        self.writer.is_some() || self.probes.is_some()
    }

    fn push(&mut self, event: TraceEvent) {
        if let Some(writer) = &mut self.writer {
            writer.push(event);
        }
    }

    /// Writes the event, and fires its probe. A bio or request that began at `start_ns` completed with
    /// `result`, or has not completed.
    fn record(&mut self, event: TraceEvent, result: IoResult, start_ns: u64) {
        let event = TraceEvent { status: result.err(), ..event };
        self.push(event);
        if self.probes.is_some() {
            self.fire(event, start_ns);
        }
    }

    /// Out of line, and with a copy of the event, so that the events of the trace stay in registers.
    #[cold]
    #[inline(never)]
    fn fire(&self, event: TraceEvent, start_ns: u64) {
        if let Some(probes) = &self.probes {
            probes.fire(&event, start_ns);
        }
    }

    /// Sets the client of the next bio. `plugged` requests are in the plug.
    pub fn set_client(&mut self, client: TraceClient, plugged: usize) {
        self.has_clients |= client != TraceClient::NONE;
        self.next_bio = plugged % PLUG_REQUESTS_SEVERAL_QUEUES;
        self.plug_clients.resize(PLUG_REQUESTS_SEVERAL_QUEUES, TraceClient::NONE);
        self.plug_clients[self.next_bio] = client;
    }

    fn set_client_of(&mut self, bio: u32, client: TraceClient) {
        let index = bio as usize;
        if self.clients.len() <= index {
            self.clients.resize((index + 1).next_power_of_two(), TraceClient::NONE);
        }
        self.clients[index] = client;
    }

    fn client_of(&self, bio: u32) -> TraceClient {
        self.clients.get(bio as usize).copied().unwrap_or_default()
    }

    fn event(&self, kind: EventKind, bio: u32, tag: Option<Tag>, of: &Outline, time_ns: u64) -> TraceEvent {
        TraceEvent {
            time_ns,
            kind,
            operation: of.operation,
            flags: of.flags,
            sector: of.sector,
            bytes: u32::try_from(of.sectors.saturating_mul(SECTOR_BYTES)).unwrap_or(BYTES_MAX),
            bio,
            tag,
            client: self.client_of(bio),
            status: None,
            other: 0,
        }
    }

    /// An event of the request that has `tag`, or that is about to be merged into the one with that tag.
    fn request(&self, kind: EventKind, tag: Tag, request: &Request, time_ns: u64) -> TraceEvent {
        self.event(kind, request.first_bio, Some(tag), &request.outline(), time_ns)
    }

    pub fn queued(&mut self, bio: u32, slot: &BioSlot, clock: &mut Clock) {
        let client = self.plug_clients.get_mut(self.next_bio).map(std::mem::take).unwrap_or_default();
        self.set_client_of(bio, client);
        self.bio(EventKind::Queue, bio, None, slot, Ok(()), clock);
    }

    /// Records an event of a bio that has no request, or is merged into request `tag`. A bio that completes here never
    /// became a request.
    pub fn bio(
        &mut self,
        kind: EventKind,
        bio: u32,
        tag: Option<Tag>,
        slot: &BioSlot,
        result: IoResult,
        clock: &mut Clock,
    ) {
        let event = self.event(kind, bio, tag, &slot.outline(), clock.now_ns());
        self.record(event, result, slot.start_ns);
    }

    pub fn split(&mut self, parent: u32, part: u32, slot: &BioSlot, clock: &mut Clock) {
        self.set_client_of(part, self.client_of(parent));
        let event = self.event(EventKind::Split, part, None, &slot.outline(), clock.now_ns());
        self.push(TraceEvent { other: parent, ..event });
    }

    /// Records that the request of `second`, which still exists, is about to be merged into request `first`.
    pub fn joined(&mut self, first: Tag, second: Tag, requests: &[Request], clock: &mut Clock) {
        let second = &requests[second.index()];
        let event = self.request(EventKind::BackMerge, first, second, clock.now_ns());
        self.record(event, Ok(()), second.start_ns);
    }

    /// Records that a bio became request `tag`, which is about to be plugged.
    pub fn begun(&mut self, tag: Tag, request: &Request, clock: &mut Clock) {
        let now_ns = clock.now_ns();
        let event = self.request(EventKind::GetRequest, tag, request, now_ns);
        self.push(event);
        if self.plugged == 0 {
            self.push(TraceEvent::of_plug(EventKind::Plug, 0, now_ns));
        }
        self.plugged += 1;
    }

    /// Records the requests of `plug` that took the fast path and have no event yet. Must be called before
    /// any other event of the queue.
    pub fn record_fast_path(&mut self, plug: &[Tag], requests: &[Request], clock: &mut Clock) {
        if self.plugged < plug.len() {
            self.write_fast_path(plug, requests, clock);
        }
    }

    #[inline(never)]
    fn write_fast_path(&mut self, plug: &[Tag], requests: &[Request], clock: &mut Clock) {
        while let [first, rest @ ..] = &plug[self.plugged..] {
            let start_ns = requests[first.index()].start_ns;
            let alike = rest.iter().take_while(|tag| requests[tag.index()].start_ns == start_ns).count();
            self.write_plug(&plug[..self.plugged + 1 + alike], requests, false, clock);
        }
    }

    /// Writes the first events of those requests of `plug` that have none. They must have the same start
    /// time. If `issued`, the events of the plug's flush are included.
    fn write_plug(&mut self, plug: &[Tag], requests: &[Request], issued: bool, clock: &mut Clock) {
        let tags = &plug[self.plugged..];
        let start_ns = requests[tags[0].index()].start_ns;
        // Without iostats requests carry no start time.
        let queued_ns = if start_ns == 0 { clock.now_ns() } else { start_ns };
        // An attachment plugs requests while it reads its sockets. That time must not count as the
        // driver's.
        let issued_ns = issued.then(|| if self.has_clients { clock.now_ns() } else { queued_ns });
        let clients = if self.has_clients { self.plugged..plug.len() } else { 0..0 };
        let record = PlugRecord { queued_ns, begins: self.plugged == 0, issued_ns };
        if let Some(writer) = &mut self.writer {
            writer.push_plug(&record, tags, requests, &self.plug_clients[clients.clone()]);
        }
        for index in clients {
            let client = std::mem::take(&mut self.plug_clients[index]);
            // A plain bio has the number of its tag.
            self.set_client_of(plug[index].0.into(), client);
        }
        self.plugged = plug.len();
    }

    /// Records that a flush became request `tag`, and how many bios it serves.
    pub fn flush_begun(&mut self, tag: Tag, served: usize, clock: &mut Clock) {
        if let Some(probes) = &self.probes {
            probes.flush(Some((tag, served)));
        }
        self.push(TraceEvent {
            operation: Operation::Flush,
            tag: Some(tag),
            ..TraceEvent::of_plug(EventKind::GetRequest, served as u32, clock.now_ns())
        });
    }

    pub fn unplugged(&mut self, plug: &[Tag], requests: &[Request], clock: &mut Clock) {
        self.record_fast_path(plug, requests, clock);
        self.plugged = 0;
        self.push(TraceEvent::of_plug(EventKind::Unplug, plug.len() as u32, clock.now_ns()));
    }

    /// Records that the plug is flushed and all of its requests are issued directly.
    pub fn issued(&mut self, plug: &[Tag], requests: &[Request], clock: &mut Clock) {
        let times = [plug.first(), plug.last()].map(|tag| tag.map(|tag| requests[tag.index()].start_ns));
        if self.plugged == 0 && times[0] == times[1] {
            self.write_plug(plug, requests, true, clock);
            self.plugged = 0;
        } else {
            self.unplugged(plug, requests, clock);
            self.requests(EventKind::Issue, plug, requests, clock);
        }
    }

    /// Records one event for each of these requests: they are inserted, issued or requeued.
    pub fn requests(&mut self, kind: EventKind, tags: &[Tag], requests: &[Request], clock: &mut Clock) {
        for &tag in tags {
            let request = &requests[tag.index()];
            self.record(self.request(kind, tag, request, clock.now_ns()), Ok(()), request.start_ns);
        }
    }

    /// Records that these requests complete. Their slots must be unchanged.
    pub fn completed(&mut self, completed: &[(Tag, IoResult)], requests: &[Request], clock: &mut Clock) {
        if self.allows_fast_path() && self.unknown.is_empty() {
            for batch in completed.chunks(RECORD_REQUESTS_MAX) {
                let now_ns = clock.now_ns();
                let written =
                    self.writer.as_mut().is_none_or(|writer| writer.push_completions(now_ns, batch));
                if !written {
                    self.completed_singly(batch, requests, clock);
                }
            }
        } else {
            self.completed_singly(completed, requests, clock);
        }
    }

    fn completed_singly(&mut self, completed: &[(Tag, IoResult)], requests: &[Request], clock: &mut Clock) {
        for &(tag, result) in completed {
            let request = &requests[tag.index()];
            let event = self.request(EventKind::Complete, tag, request, clock.now_ns());
            self.record(event, result, request.start_ns);
        }
        if !self.unknown.is_empty() {
            self.unknown.retain(|tag| completed.iter().all(|(completed, _)| completed != tag));
        }
    }
}

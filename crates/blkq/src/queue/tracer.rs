//! The events of a queue's I/O, while it is traced.

use crate::bio::{BioFlags, Operation};
use crate::clock::Clock;
use crate::error::IoResult;
use crate::limits::MergeSide;
use crate::request::{NIL, Request};
use crate::sector::{SECTOR_BYTES, Sector};
use crate::slab::BioSlot;
use crate::tags::Tag;
use crate::trace::{EventKind, Probes, TraceClient, TraceEvent, TraceWriter};

/// Writes the events of a queue, and fires the probes for them.
#[derive(Default)]
pub(super) struct Tracer {
    writer: Option<TraceWriter>,
    probes: Option<Probes>,
    /// The client that submits the next bio, if that is known.
    next_client: TraceClient,
    /// The client of each bio in flight.
    clients: Vec<TraceClient>,
}

impl Tracer {
    /// Writes the events with `writer` from now on, or no longer.
    pub fn set_writer(&mut self, writer: Option<TraceWriter>) {
        self.writer = writer;
    }

    /// Fires `probes` from now on, or no longer.
    pub fn set_probes(&mut self, probes: Option<Probes>) {
        self.probes = probes;
    }

    /// Whether it fires probes.
    pub fn has_probes(&self) -> bool {
        self.probes.is_some()
    }

    /// Whether there is anything to write or to fire.
    pub fn is_on(&self) -> bool {
        self.writer.is_some() || self.probes.is_some()
    }

    #[inline]
    fn push(&mut self, event: TraceEvent) {
        if let Some(writer) = &mut self.writer {
            writer.push(event);
        }
    }

    // Probes are fired out of line, from events of their own: those of the ring stay in registers.

    /// Fires the probe of a bio, or of its merge into request `tag`.
    #[cold]
    #[inline(never)]
    fn fire_bio(
        &self,
        kind: EventKind,
        bio: u32,
        slot: &BioSlot,
        tag: Option<Tag>,
        result: IoResult,
        time_ns: u64,
    ) {
        if let Some(probes) = &self.probes {
            let event = self.bio(kind, bio, slot, time_ns);
            probes.fire(&TraceEvent { tag, status: result.err(), ..event }, slot.start_ns);
        }
    }

    /// Fires the probe of a request.
    #[cold]
    #[inline(never)]
    fn fire(&self, kind: EventKind, tag: Tag, request: &Request, result: IoResult, time_ns: u64) {
        if let Some(probes) = &self.probes {
            let event = self.request(kind, tag, request, time_ns);
            probes.fire(&TraceEvent { status: result.err(), ..event }, request.start_ns);
        }
    }

    /// `client` submits the next bio.
    pub fn set_client(&mut self, client: TraceClient) {
        self.next_client = client;
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

    fn bio(&self, kind: EventKind, bio: u32, slot: &BioSlot, time_ns: u64) -> TraceEvent {
        TraceEvent {
            time_ns,
            kind,
            operation: slot.operation,
            flags: slot.flags,
            sector: slot.sector,
            bytes: bytes_of(slot.sectors),
            bio,
            tag: None,
            client: self.client_of(bio),
            status: None,
            other: 0,
        }
    }

    fn request(&self, kind: EventKind, tag: Tag, request: &Request, time_ns: u64) -> TraceEvent {
        TraceEvent {
            time_ns,
            kind,
            operation: request.operation,
            flags: request.flags,
            sector: request.sector,
            bytes: bytes_of(request.sectors),
            bio: request.first_bio,
            tag: Some(tag),
            client: self.client_of(request.first_bio),
            status: None,
            other: 0,
        }
    }

    /// A bio was submitted, and is in its slot.
    pub fn queued(&mut self, bio: u32, slot: &BioSlot, clock: &mut Clock) {
        let client = std::mem::take(&mut self.next_client);
        self.set_client_of(bio, client);
        let now_ns = clock.now_ns();
        self.push(self.bio(EventKind::Queue, bio, slot, now_ns));
        if self.has_probes() {
            self.fire_bio(EventKind::Queue, bio, slot, None, Ok(()), now_ns);
        }
    }

    /// Bio `part` of `parent` was made.
    pub fn split(&mut self, parent: u32, part: u32, slot: &BioSlot, clock: &mut Clock) {
        self.set_client_of(part, self.client_of(parent));
        let event = self.bio(EventKind::Split, part, slot, clock.now_ns());
        self.push(TraceEvent { other: parent, ..event });
    }

    /// A bio completes that never became a request.
    pub fn completed_bio(&mut self, bio: u32, slot: &BioSlot, result: IoResult, clock: &mut Clock) {
        let now_ns = clock.now_ns();
        let event = self.bio(EventKind::Complete, bio, slot, now_ns);
        self.push(TraceEvent { status: result.err(), ..event });
        if self.has_probes() {
            self.fire_bio(EventKind::Complete, bio, slot, None, result, now_ns);
        }
    }

    /// A bio, or the request that begins with it, becomes part of request `tag`.
    pub fn merged(&mut self, tag: Tag, bio: u32, slot: &BioSlot, side: MergeSide, clock: &mut Clock) {
        let kind = if side == MergeSide::Back { EventKind::BackMerge } else { EventKind::FrontMerge };
        let now_ns = clock.now_ns();
        let event = self.bio(kind, bio, slot, now_ns);
        self.push(TraceEvent { tag: Some(tag), ..event });
        if self.has_probes() {
            self.fire_bio(kind, bio, slot, Some(tag), Ok(()), now_ns);
        }
    }

    /// The request of `second`, which is still there, becomes part of request `first`.
    pub fn joined(&mut self, first: Tag, second: Tag, requests: &[Request], clock: &mut Clock) {
        let (second, now_ns) = (&requests[second.index()], clock.now_ns());
        self.push(self.request(EventKind::BackMerge, first, second, now_ns));
        if self.has_probes() {
            self.fire(EventKind::BackMerge, first, second, Ok(()), now_ns);
        }
    }

    /// A bio became request `tag`, the first of the plug or not.
    pub fn begun(&mut self, tag: Tag, request: &Request, is_first: bool, clock: &mut Clock) {
        let now_ns = clock.now_ns();
        let event = self.request(EventKind::GetRequest, tag, request, now_ns);
        self.push(event);
        if is_first {
            self.plug_event(EventKind::Plug, 0, now_ns);
        }
    }

    /// The driver's flush became request `tag`, and serves so many bios.
    pub fn flush_begun(&mut self, tag: Tag, served: usize, clock: &mut Clock) {
        if let Some(probes) = &self.probes {
            probes.flush(Some((tag, served)));
        }
        self.push(TraceEvent {
            kind: EventKind::GetRequest,
            operation: Operation::Flush,
            tag: Some(tag),
            ..bare(clock.now_ns(), served as u32)
        });
    }

    /// The plug is flushed, with so many requests.
    pub fn unplugged(&mut self, requests: usize, clock: &mut Clock) {
        self.plug_event(EventKind::Unplug, requests as u32, clock.now_ns());
    }

    fn plug_event(&mut self, kind: EventKind, other: u32, time_ns: u64) {
        self.push(TraceEvent { kind, ..bare(time_ns, other) });
    }

    /// Something happens to each of these requests at the same time: they are inserted, issued, requeued.
    pub fn requests(&mut self, kind: EventKind, tags: &[Tag], requests: &[Request], clock: &mut Clock) {
        for &tag in tags {
            let event = self.request(kind, tag, &requests[tag.index()], clock.now_ns());
            self.push(event);
        }
        if self.has_probes() {
            let fire = |tag: &Tag| self.fire(kind, *tag, &requests[tag.index()], Ok(()), clock.now_ns());
            tags.iter().for_each(fire);
        }
    }

    /// These requests complete, and are still what they were.
    pub fn completed(&mut self, completed: &[(Tag, IoResult)], requests: &[Request], clock: &mut Clock) {
        for &(tag, result) in completed {
            let event = self.request(EventKind::Complete, tag, &requests[tag.index()], clock.now_ns());
            self.push(TraceEvent { status: result.err(), ..event });
        }
        if self.has_probes() {
            for &(tag, result) in completed {
                self.fire(EventKind::Complete, tag, &requests[tag.index()], result, clock.now_ns());
            }
        }
    }
}

/// An event of no bio.
fn bare(time_ns: u64, other: u32) -> TraceEvent {
    TraceEvent {
        time_ns,
        kind: EventKind::Plug,
        operation: Operation::Read,
        flags: BioFlags::empty(),
        sector: Sector(0),
        bytes: 0,
        bio: NIL,
        tag: None,
        client: TraceClient::NONE,
        status: None,
        other,
    }
}

fn bytes_of(sectors: u64) -> u32 {
    u32::try_from(sectors.saturating_mul(SECTOR_BYTES)).unwrap_or(!(SECTOR_BYTES as u32 - 1))
}

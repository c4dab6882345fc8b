//! Records of several events: one for a flushed plug with requests of the fast path, and one for a batch of
//! completions. A reader expands a record into its events.

use crate::bio::{BioFlags, Operation};
use crate::error::IoResult;
use crate::request::Request;
use crate::sector::{SECTOR_BYTES, Sector};
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use crate::tags::Tag;

use super::event::{EVENT_WORDS, EventKind, TraceClient, TraceEvent};

/// The maximum number of requests of a record.
pub(crate) const RECORD_REQUESTS_MAX: usize = 64;

// The first byte of a record is the number of an `EventKind` or one of these values. They are part of the
// memory format.
/// Marks the unused end of a page.
pub(super) const PAGE_END: u64 = 0;
const PLUG: u64 = 64;
const COMPLETIONS: u64 = 65;

const PLUG_HEAD_WORDS: usize = 3;
const COMPLETIONS_HEAD_WORDS: usize = 2;
const TAGS_OF_WORD: usize = 4;
const CLIENTS_OF_WORD: usize = 2;

// The first word of a plug's record contains these values from this bit on:
const COUNT_SHIFT: u32 = 8;
const BEGINS: u64 = 1 << 16;
const ISSUED: u64 = 1 << 17;
const HAS_CLIENTS: u64 = 1 << 18;
// A request's word contains its sector, and from these bits on its length in sectors, operation and flags.
const SECTORS_SHIFT: u32 = 40;
const OPERATION_SHIFT: u32 = 48;

/// The largest device whose plugs have records: 512 TiB, in sectors.
pub(crate) const RECORD_CAPACITY_SECTORS: u64 = 1 << SECTORS_SHIFT;
/// The largest plain bio of the fast path: see `PLUG_FLUSH_BYTES`.
const PLAIN_SECTORS_MAX: u64 = (1 << (OPERATION_SHIFT - SECTORS_SHIFT)) - 1;

/// Requests that the fast path accepted together. Each has the events `Q` and `G`, oldest first.
pub(crate) struct PlugRecord {
    /// The time at which the bios were submitted.
    pub queued_ns: u64,
    /// The requests are the first of a plug: a `P` follows the first `G`.
    pub begins: bool,
    /// The requests are a whole plug, flushed and issued at this time: a `U`, and a `D` for each request.
    pub issued_ns: Option<u64>,
}

impl PlugRecord {
    pub(super) fn words(count: usize, has_clients: bool) -> usize {
        let clients = if has_clients { count.div_ceil(CLIENTS_OF_WORD) } else { 0 };
        PLUG_HEAD_WORDS + count + count.div_ceil(TAGS_OF_WORD) + clients
    }

    pub(super) fn events(&self, count: usize) -> u64 {
        let each = if self.issued_ns.is_some() { 3 } else { 2 };
        (each * count) as u64 + u64::from(self.begins) + u64::from(self.issued_ns.is_some())
    }

    /// Writes the record of `tags`, at most [`RECORD_REQUESTS_MAX`], to `words`, which must have the record's
    /// length. Includes the client of each request unless `clients` is empty.
    #[inline]
    pub(super) fn write(
        &self,
        words: &[AtomicU64],
        tags: &[Tag],
        requests: &[Request],
        clients: &[TraceClient],
    ) {
        let (head, words) = words.split_at(PLUG_HEAD_WORDS);
        let (items, words) = words.split_at(tags.len());
        for (tag, item) in tags.iter().zip(items) {
            let &Request { sector: Sector(sector), sectors, operation, flags, .. } = &requests[tag.index()];
            debug_assert!(sector < RECORD_CAPACITY_SECTORS && sectors <= PLAIN_SECTORS_MAX);
            let how = u64::from(operation as u8) | u64::from(flags.bits()) << 8;
            item.store(sector | sectors << SECTORS_SHIFT | how << OPERATION_SHIFT, Relaxed);
        }
        let (tag_words, client_words) = words.split_at(tags.len().div_ceil(TAGS_OF_WORD));
        write_tags(tag_words, tags, |tag| tag.0);
        let pairs = clients.chunks(CLIENTS_OF_WORD).zip(client_words);
        pairs.for_each(|(pair, word)| word.store(pack(pair, |client| u64::from(client.0), 32), Relaxed));
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        let first = PLUG
            | (tags.len() as u64) << COUNT_SHIFT
            | flag(self.begins, BEGINS)
            | flag(self.issued_ns.is_some(), ISSUED)
            | flag(!clients.is_empty(), HAS_CLIENTS);
        let head_words = [first, self.queued_ns, self.issued_ns.unwrap_or(0)];
        head.iter().zip(head_words).for_each(|(word, value)| word.store(value, Relaxed));
    }
}

pub(super) fn completions_words(count: usize) -> usize {
    COMPLETIONS_HEAD_WORDS + count.div_ceil(TAGS_OF_WORD)
}

/// Writes the record of requests that completed at `time_ns`, at most [`RECORD_REQUESTS_MAX`], to `words`,
/// which must have the record's length. It has a `C` for each request. Returns false if a request failed.
#[inline]
pub(super) fn write_completions(words: &[AtomicU64], time_ns: u64, completed: &[(Tag, IoResult)]) -> bool {
    let (head, tag_words) = words.split_at(COMPLETIONS_HEAD_WORDS);
    let mut all_well = true;
    write_tags(tag_words, completed, |&(tag, result)| {
        all_well &= result.is_ok();
        tag.0
    });
    head[0].store(COMPLETIONS | (completed.len() as u64) << COUNT_SHIFT, Relaxed);
    head[1].store(time_ns, Relaxed);
    all_well
}

#[inline]
fn write_tags<T>(words: &[AtomicU64], of: &[T], mut tag: impl FnMut(&T) -> u16) {
    let mut fours = of.chunks_exact(TAGS_OF_WORD);
    let mut words = words.iter();
    // Groups of four are taken before words, because `zip` would otherwise take a word without a group.
    for (four, word) in fours.by_ref().zip(words.by_ref()) {
        word.store(pack(four, |one| u64::from(tag(one)), 16), Relaxed);
    }
    if let (rest @ [_, ..], Some(word)) = (fours.remainder(), words.next()) {
        word.store(pack(rest, |one| u64::from(tag(one)), 16), Relaxed);
    }
}

/// Packs `parts`, of `bits` bits each, into one word.
fn pack<T>(parts: &[T], mut value: impl FnMut(&T) -> u64, bits: u32) -> u64 {
    parts.iter().rev().fold(0, |word, part| word << bits | value(part))
}

/// The requests in flight, as a reader knows them from their events. Completion records contain only tags.
#[derive(Default)]
pub(super) struct TracedRequests(Vec<Option<TraceEvent>>);

impl TracedRequests {
    /// Forgets all requests, because events were missed.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    fn note(&mut self, event: &TraceEvent) {
        let Some(tag) = event.tag else { return };
        if event.kind == EventKind::GetRequest && self.0.len() <= tag.index() {
            self.0.resize(tag.index() + 1, None);
        }
        let Some(request) = self.0.get_mut(tag.index()) else { return };
        match (event.kind, &mut *request) {
            (EventKind::GetRequest, _) => *request = Some(*event),
            (EventKind::Complete, _) => *request = None,
            (EventKind::BackMerge, Some(request)) => {
                request.bytes = request.bytes.saturating_add(event.bytes);
            }
            (EventKind::FrontMerge, Some(request)) => {
                request.bytes = request.bytes.saturating_add(event.bytes);
                (request.sector, request.bio, request.client) = (event.sector, event.bio, event.client);
            }
            _ => {}
        }
    }

    fn complete(&mut self, tag: Tag, time_ns: u64) -> Option<TraceEvent> {
        let request = self.0.get_mut(tag.index())?.take()?;
        Some(TraceEvent { time_ns, kind: EventKind::Complete, other: 0, ..request })
    }
}

/// Appends the events of the record at the beginning of `words` to `events`. Returns the record's number of
/// words, and the number of events that were written; a completion is not appended if its request is unknown.
/// `None` if there is no known record, or only the unused end of a page.
pub(super) fn expand(
    words: &[u64],
    requests: &mut TracedRequests,
    events: &mut Vec<TraceEvent>,
) -> Option<(usize, u64)> {
    let first = *words.first()?;
    let count = usize::from((first >> COUNT_SHIFT) as u8);
    match first & 0xff {
        PLUG => {
            let length = PlugRecord::words(count, first & HAS_CLIENTS != 0);
            let written = expand_plug(words.get(..length)?, first, count, requests, events)?;
            Some((length, written))
        }
        COMPLETIONS => {
            let length = completions_words(count);
            let (head, tags) = words.get(..length)?.split_at(COMPLETIONS_HEAD_WORDS);
            let completed = (0..count).filter_map(|index| requests.complete(tag_of(tags, index), head[1]));
            events.extend(completed);
            Some((length, count as u64))
        }
        _ => {
            let event = TraceEvent::from_words(*words.first_chunk::<EVENT_WORDS>()?)?;
            requests.note(&event);
            events.push(event);
            Some((EVENT_WORDS, 1))
        }
    }
}

fn tag_of(words: &[u64], index: usize) -> Tag {
    Tag((words[index / TAGS_OF_WORD] >> (index % TAGS_OF_WORD * 16)) as u16)
}

/// Expands a plug's record in the order in which a queue would write the events one by one.
fn expand_plug(
    words: &[u64],
    first: u64,
    count: usize,
    requests: &mut TracedRequests,
    events: &mut Vec<TraceEvent>,
) -> Option<u64> {
    let (head, words) = words.split_at(PLUG_HEAD_WORDS);
    let (items, words) = words.split_at(count);
    let (tags, clients) = words.split_at(count.div_ceil(TAGS_OF_WORD));
    let begun = |index: usize| -> Option<TraceEvent> {
        let (item, tag) = (items[index], tag_of(tags, index));
        let client =
            clients.get(index / CLIENTS_OF_WORD).map_or(0, |pair| pair >> (index % CLIENTS_OF_WORD * 32));
        let how = item >> OPERATION_SHIFT;
        Some(TraceEvent {
            time_ns: head[1],
            kind: EventKind::GetRequest,
            operation: *Operation::ALL.get(usize::from(how as u8))?,
            flags: BioFlags::from_bits_truncate((how >> 8) as u8),
            sector: Sector(item & ((1 << SECTORS_SHIFT) - 1)),
            bytes: u32::from((item >> SECTORS_SHIFT) as u8) * SECTOR_BYTES as u32,
            // The number of a plain bio is its tag.
            bio: u32::from(tag.0),
            tag: Some(tag),
            client: TraceClient(client as u32),
            status: None,
            other: 0,
        })
    };
    let requests_of = (0..count).map(begun).collect::<Option<Vec<_>>>()?;
    for (index, request) in requests_of.iter().enumerate() {
        events.extend([TraceEvent { kind: EventKind::Queue, tag: None, ..*request }, *request]);
        if index == 0 && first & BEGINS != 0 {
            events.push(TraceEvent::of_plug(EventKind::Plug, 0, head[1]));
        }
        requests.note(request);
    }
    let record = PlugRecord {
        queued_ns: head[1],
        begins: first & BEGINS != 0,
        issued_ns: (first & ISSUED != 0).then_some(head[2]),
    };
    if let Some(time_ns) = record.issued_ns {
        events.push(TraceEvent::of_plug(EventKind::Unplug, count as u32, time_ns));
        let issue = |request: &TraceEvent| TraceEvent { time_ns, kind: EventKind::Issue, ..*request };
        events.extend(requests_of.iter().map(issue));
    }
    Some(record.events(count))
}

//! The ring of one queue, in pages (kernel/trace/ring_buffer.c). One thread writes, any number of readers
//! read, and none of them waits for another. A record never crosses a page boundary, and each page begins
//! with the count of earlier events. So a reader that was overtaken can continue at any page, and knows how
//! many events it missed.
//!
//! A reader may copy a page while the writer overwrites it. The writer publishes its position before it
//! starts the next page. So a reader that has seen any word of that page also sees the new position, and
//! discards its copy. This is a seqlock (include/linux/seqlock.h) for a ring.

use std::sync::Arc;

use crate::error::IoResult;
use crate::request::Request;
use crate::sync::atomic::{
    Ordering::{Acquire, Relaxed, Release},
    fence,
};
use crate::tags::Tag;

use super::event::{EVENT_WORDS, TraceClient, TraceEvent};
use super::memory::{PAGE_WORDS, RingPlace, TraceMemory};
use super::record::{
    PAGE_END, PlugRecord, RECORD_REQUESTS_MAX, TracedRequests, completions_words, expand, write_completions,
};

/// The number of words of a page, as a position.
const PAGE: u64 = PAGE_WORDS as u64;

/// A page has room for its first word and the longest record.
const _: () = assert!(cfg!(model_check) || RECORD_REQUESTS_MAX * 2 < PAGE_WORDS);

/// The most events that one [`TraceReader::read`] appends. A record has at most four events per word.
pub const PAGE_EVENTS_MAX: usize = 4 * PAGE_WORDS;

pub(crate) struct TraceWriter {
    memory: Arc<TraceMemory>,
    place: RingPlace,
    position: u64,
    /// The word index of the next record, and that of the end of its page.
    next: usize,
    page_end: usize,
    events: u64,
}

impl TraceWriter {
    /// A writer for queue `index`. There must be only one at a time. `None` if the memory has no such queue,
    /// or was created by another process.
    pub fn new(memory: &Arc<TraceMemory>, index: usize) -> Option<TraceWriter> {
        let place = memory.place(index).filter(|_| memory.is_writable())?;
        let [position, events] = [place.position, place.events].map(|at| memory.words()[at].load(Relaxed));
        let next = place.word(position);
        // If the last page is full, the next record starts a new page.
        let page_end = next + (position.next_multiple_of(PAGE) - position) as usize;
        Some(TraceWriter { memory: memory.clone(), place, position, next, page_end, events })
    }

    /// Writes an event, which may overwrite the oldest page.
    #[inline]
    pub fn push(&mut self, event: TraceEvent) {
        self.make_room(EVENT_WORDS);
        let words = &self.memory.words()[self.next..];
        words.iter().zip(event.to_words()).for_each(|(word, value)| word.store(value, Relaxed));
        self.publish(EVENT_WORDS, 1);
    }

    /// Writes the events of requests, at most [`RECORD_REQUESTS_MAX`], with the client of each request unless
    /// `clients` is empty. No request may be beyond
    /// [`RECORD_CAPACITY_SECTORS`](super::RECORD_CAPACITY_SECTORS).
    #[inline]
    pub fn push_plug(
        &mut self,
        record: &PlugRecord,
        tags: &[Tag],
        requests: &[Request],
        clients: &[TraceClient],
    ) {
        let length = PlugRecord::words(tags.len(), !clients.is_empty());
        self.make_room(length);
        let words = &self.memory.words()[self.next..self.next + length];
        record.write(words, tags, requests, clients);
        self.publish(length, record.events(tags.len()));
    }

    /// Writes the completions of requests, at most [`RECORD_REQUESTS_MAX`]. Returns false, and writes
    /// nothing, if a request failed.
    #[inline]
    pub fn push_completions(&mut self, time_ns: u64, completed: &[(Tag, IoResult)]) -> bool {
        let length = completions_words(completed.len());
        self.make_room(length);
        let words = &self.memory.words()[self.next..self.next + length];
        let all_well = write_completions(words, time_ns, completed);
        if all_well {
            self.publish(length, completed.len() as u64);
        }
        all_well
    }

    fn make_room(&mut self, words: usize) {
        if self.page_end - self.next < words {
            self.begin_page();
        }
    }

    #[cold]
    #[inline(never)]
    fn begin_page(&mut self) {
        let words = self.memory.words();
        if self.next < self.page_end {
            // Relaxed: the position below, or the next position, publishes this word.
            words[self.next].store(PAGE_END, Relaxed);
            self.position += (self.page_end - self.next) as u64;
            // Release: a reader that sees the position also sees the words before it.
            words[self.place.position].store(self.position, Release);
        }
        // Pairs with the acquire fence in [`TraceReader::read`]: a reader that sees a word of the new page
        // also sees the position that was stored before.
        fence(Release);
        let first = self.place.word(self.position);
        words[first].store(self.events, Relaxed);
        (self.next, self.page_end) = (first + 1, first + PAGE_WORDS);
        self.position += 1;
    }

    #[inline]
    fn publish(&mut self, words: usize, events: u64) {
        self.next += words;
        self.position += words as u64;
        self.events += events;
        let memory = self.memory.words();
        // Release: a reader that sees the position also sees the record's words and the count of events.
        memory[self.place.events].store(self.events, Relaxed);
        memory[self.place.position].store(self.position, Release);
    }
}

/// The result of one [`TraceReader::read`], in addition to the events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TracePage {
    /// The number of missing events: those that were overwritten before they were read, completions of
    /// requests whose start was missed, and events of unknown kinds.
    pub lost: u64,
    /// The writer has written more than was read.
    pub more: bool,
}

/// Reads the events of a queue, page by page.
pub struct TraceReader {
    memory: Arc<TraceMemory>,
    place: RingPlace,
    /// The position of the next record to read.
    next: u64,
    /// The number of events before that record.
    events: u64,
    requests: TracedRequests,
}

impl TraceReader {
    /// A reader of queue `index`, starting with the first event. `None` if the memory has no such queue.
    pub fn new(memory: &Arc<TraceMemory>, index: usize) -> Option<TraceReader> {
        let place = memory.place(index)?;
        Some(TraceReader {
            memory: memory.clone(),
            place,
            next: 0,
            events: 0,
            requests: TracedRequests::default(),
        })
    }

    /// Appends the events of the next page, or of the new part of the current page, to `events`; at most
    /// [`PAGE_EVENTS_MAX`].
    pub fn read(&mut self, events: &mut Vec<TraceEvent>) -> TracePage {
        // Acquire: pairs with the writer's release store of the position, so that all words before the
        // position are visible.
        let until = self.position(Acquire);
        if self.is_overwritten(until) {
            // Continues half a ring before the writer's position. If it were closer to the oldest page, the
            // reader would soon be overtaken again.
            self.next = (until / PAGE - self.place.pages / 2) * PAGE;
            self.requests.clear();
        }
        if self.next >= until {
            return TracePage { lost: 0, more: false };
        }
        let end = until.min((self.next - self.next % PAGE).saturating_add(PAGE));
        let mut copy = [0; PAGE_WORDS];
        let copy = &mut copy[..(end - self.next) as usize];
        let words = &self.memory.words()[self.place.word(self.next)..];
        copy.iter_mut().zip(words).for_each(|(copy, word)| *copy = word.load(Relaxed));
        // Orders the loads of the words before the load of the position. Pairs with the release fence in
        // `TraceWriter::begin_page`.
        fence(Acquire);
        if self.is_overwritten(self.position(Relaxed)) {
            // The next call counts the missed events.
            return TracePage { lost: 0, more: true };
        }
        let lost = self.expand_page(copy, events);
        self.next = end;
        TracePage { lost, more: end < until }
    }

    /// Whether a writer at `position` has started to overwrite the page of the next record.
    fn is_overwritten(&self, position: u64) -> bool {
        self.next / PAGE + self.place.pages <= position / PAGE
    }

    /// Expands the records of a page, or of the rest of a page. Returns the number of events that are missing
    /// before or between them.
    fn expand_page(&mut self, mut words: &[u64], events: &mut Vec<TraceEvent>) -> u64 {
        let mut lost = 0;
        if let ([before, records @ ..], true) = (words, self.next.is_multiple_of(PAGE)) {
            lost += before.saturating_sub(self.events);
            (self.events, words) = (*before, records);
        }
        let (first, before) = (events.len(), self.events);
        while let Some((length, written)) = expand(words, &mut self.requests, events) {
            words = &words[length..];
            self.events = self.events.wrapping_add(written);
        }
        lost + self.events.wrapping_sub(before).saturating_sub((events.len() - first) as u64)
    }

    fn position(&self, ordering: crate::sync::atomic::Ordering) -> u64 {
        self.memory.words()[self.place.position].load(ordering)
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use std::os::fd::OwnedFd;

    use proptest::prelude::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap};

    use super::*;
    use crate::bio::{BioFlags, Operation, Outline};
    use crate::error::Status;
    use crate::sector::Sector;
    use crate::trace::{EventKind, MEMORY_MAX_BYTES, NO_BIO, PAGE_BYTES, RING_BYTES_MIN};

    fn event(number: u64) -> TraceEvent {
        TraceEvent {
            time_ns: number,
            kind: EventKind::Issue,
            operation: Operation::Read,
            flags: BioFlags::empty(),
            sector: Sector(number),
            bytes: 512,
            bio: NO_BIO,
            tag: None,
            client: TraceClient::NONE,
            status: None,
            other: 0,
        }
    }

    /// The memory for two queues, as its writer and as its reader map it.
    fn memory() -> (Arc<TraceMemory>, Arc<TraceMemory>) {
        let memory = TraceMemory::new(2, RING_BYTES_MIN).expect("memory");
        let file: OwnedFd = memory.file().try_clone_to_owned().expect("a descriptor");
        let read = TraceMemory::open(file).expect("its memory");
        assert_eq!(
            (read.queue_count(), read.place(1).expect("a queue").pages * PAGE_BYTES),
            (2, RING_BYTES_MIN)
        );
        (memory, read)
    }

    fn ends(memory: &Arc<TraceMemory>, read: &Arc<TraceMemory>) -> (TraceWriter, TraceReader) {
        let writer = TraceWriter::new(memory, 0).expect("a queue");
        (writer, TraceReader::new(read, 0).expect("a queue"))
    }

    /// Reads all events. Returns the number of missed events.
    fn read_all(reader: &mut TraceReader, events: &mut Vec<TraceEvent>) -> u64 {
        let mut lost = 0;
        loop {
            let before = events.len();
            let page = reader.read(events);
            assert!(events.len() - before <= PAGE_EVENTS_MAX);
            lost += page.lost;
            if !page.more {
                return lost;
            }
        }
    }

    fn numbers(reader: &mut TraceReader) -> (u64, Vec<u64>) {
        let mut events = Vec::new();
        let lost = read_all(reader, &mut events);
        (lost, events.iter().map(|event| event.time_ns).collect())
    }

    fn tags(count: u16) -> Vec<Tag> {
        (0..count).map(Tag).collect()
    }

    /// Requests of plain bios with tags from 0 on, alternately reads and writes.
    fn requests(count: u16) -> Vec<Request> {
        let begun = |tag: u16| {
            let mut request = Request::of_tag(tag);
            request.begin_plain(&Outline {
                operation: if tag.is_multiple_of(2) { Operation::Read } else { Operation::Write },
                flags: if tag.is_multiple_of(3) { BioFlags::NO_MERGE } else { BioFlags::empty() },
                sector: Sector((1 << 39) + u64::from(tag) * 256),
                sectors: u64::from(tag % 255) + 1,
                start_ns: 10,
            });
            request
        };
        (0..count).map(begun).collect()
    }

    /// The separate events of a whole plug of `requests`.
    fn events_of_plug(requests: &[Request], clients: &[TraceClient]) -> Vec<TraceEvent> {
        let of = |kind, tag: usize, time_ns| {
            let request = &requests[tag];
            TraceEvent {
                time_ns,
                kind,
                operation: request.operation,
                flags: request.flags,
                sector: request.sector,
                bytes: request.sectors as u32 * 512,
                bio: tag as u32,
                tag: (kind != EventKind::Queue).then_some(Tag(tag as u16)),
                client: clients.get(tag).copied().unwrap_or_default(),
                status: None,
                other: 0,
            }
        };
        let begun = |tag| [of(EventKind::Queue, tag, 10), of(EventKind::GetRequest, tag, 10)];
        let mut events: Vec<_> = (0..requests.len()).flat_map(begun).collect();
        events.insert(2, TraceEvent::of_plug(EventKind::Plug, 0, 10));
        events.push(TraceEvent::of_plug(EventKind::Unplug, requests.len() as u32, 20));
        events.extend((0..requests.len()).map(|tag| of(EventKind::Issue, tag, 20)));
        events.extend((0..requests.len()).map(|tag| of(EventKind::Complete, tag, 30)));
        events
    }

    const WHOLE_PLUG: PlugRecord = PlugRecord { queued_ns: 10, begins: true, issued_ns: Some(20) };

    #[test]
    fn each_queue_has_its_events_in_order() {
        let (memory, read) = memory();
        for index in 0..2 {
            let mut writer = TraceWriter::new(&memory, index).unwrap();
            let mut reader = TraceReader::new(&read, index).unwrap();
            assert_eq!(numbers(&mut reader), (0, vec![]));
            (1..=3).for_each(|number| writer.push(event(number)));
            assert_eq!(numbers(&mut reader), (0, vec![1, 2, 3]));
            writer.push(event(4));
            assert_eq!(numbers(&mut reader), (0, vec![4]));
        }
        assert!(TraceWriter::new(&memory, 2).is_none() && TraceReader::new(&read, 2).is_none());
        assert!(TraceWriter::new(&read, 0).is_none(), "the memory is mapped read-only");
    }

    #[test]
    fn a_plug_and_its_completions_are_read_as_their_events() {
        for count in 1..=RECORD_REQUESTS_MAX as u16 {
            let (memory, read) = memory();
            let (mut writer, mut reader) = ends(&memory, &read);
            let (tags, requests) = (tags(count), requests(count));
            let clients: Vec<_> = tags.iter().map(|tag| TraceClient::new(1, tag.0.into())).collect();
            let completed: Vec<_> = tags.iter().map(|&tag| (tag, Ok(()))).collect();
            for clients in [&[][..], &clients] {
                writer.push_plug(&WHOLE_PLUG, &tags, &requests, clients);
                assert!(writer.push_completions(30, &completed));
                let mut events = Vec::new();
                assert_eq!(read_all(&mut reader, &mut events), 0);
                assert_eq!(events, events_of_plug(&requests, clients), "{count}");
            }
            let failed = [&completed[1..], &[(Tag(0), Err(Status::Io))]].concat();
            assert!(!writer.push_completions(40, &failed));
            assert_eq!(
                numbers(&mut reader),
                (0, vec![]),
                "a batch with a failed request is not written as a record"
            );
        }
    }

    #[test]
    fn a_merged_request_completes_with_its_merged_extent() {
        let (memory, _) = memory();
        let (mut writer, mut reader) = ends(&memory, &memory);
        let plug = PlugRecord { issued_ns: None, ..WHOLE_PLUG };
        writer.push_plug(&plug, &tags(1), &requests(1), &[]);
        let client = TraceClient::new(2, 3);
        let merged = |kind, sector| TraceEvent { kind, tag: Some(Tag(0)), bio: 70, client, ..event(sector) };
        writer.push(merged(EventKind::BackMerge, (1 << 39) + 1));
        writer.push(merged(EventKind::FrontMerge, (1 << 39) - 1));
        assert!(writer.push_completions(30, &[(Tag(0), Ok(()))]));
        let mut events = Vec::new();
        assert_eq!(read_all(&mut reader, &mut events), 0);
        let completed = events.last().unwrap();
        assert_eq!((completed.kind, completed.time_ns), (EventKind::Complete, 30));
        assert_eq!((completed.sector, completed.bytes), (Sector((1 << 39) - 1), 3 * 512));
        assert_eq!((completed.bio, completed.client), (70, client));
    }

    #[test]
    fn a_ring_that_was_overwritten_has_its_newest_events() {
        let (memory, read) = memory();
        let (mut writer, mut reader) = ends(&memory, &read);
        let of_page = (PAGE_WORDS - 1) as u64 / EVENT_WORDS as u64;
        (0..2 * of_page).for_each(|number| writer.push(event(number)));
        assert_eq!(numbers(&mut reader), (0, (0..2 * of_page).collect()), "both pages are full");
        (0..1000).for_each(|number| writer.push(event(number)));
        let (lost, found) = numbers(&mut reader);
        assert_eq!(lost + found.len() as u64, 1000);
        assert_eq!(found, (lost..1000).collect::<Vec<_>>());
        assert!(found.len() as u64 >= of_page, "one page is whole");
        // A new writer continues where the last one was.
        TraceWriter::new(&memory, 0).unwrap().push(event(7));
        assert_eq!(numbers(&mut reader), (0, vec![7]));
    }

    #[test]
    fn completions_of_requests_that_were_overwritten_are_lost() {
        let (memory, _) = memory();
        let (mut writer, mut reader) = ends(&memory, &memory);
        writer.push_plug(&WHOLE_PLUG, &tags(2), &requests(2), &[]);
        (0..400).for_each(|number| writer.push(event(number)));
        assert!(writer.push_completions(30, &[(Tag(0), Ok(())), (Tag(1), Ok(()))]));
        writer.push(event(8));
        let (lost, found) = numbers(&mut reader);
        assert_eq!(lost + found.len() as u64, 8 + 400 + 2 + 1);
        assert_eq!(found.last(), Some(&8));
        assert!(!found.contains(&30), "a completion is lost if its request was");
    }

    proptest! {
        /// The reader must cope with any content, because the process that writes may be compromised.
        #[test]
        fn a_ring_of_anything_is_read(
            words in prop::collection::vec(prop_oneof![0..70_u64, any::<u64>()], 2 * PAGE_WORDS),
            positions in prop::collection::vec(prop_oneof![0..5000_u64, any::<u64>()], 4),
        ) {
            let memory = TraceMemory::new(1, RING_BYTES_MIN).unwrap();
            let place = memory.place(0).unwrap();
            for (number, value) in words.iter().enumerate() {
                memory.words()[place.word(number as u64)].store(*value, Relaxed);
            }
            let mut reader = TraceReader::new(&memory, 0).unwrap();
            for position in positions {
                memory.words()[place.position].store(position, Relaxed);
                let mut pages = 0;
                loop {
                    let mut events = Vec::new();
                    let page = reader.read(&mut events);
                    prop_assert!(events.len() <= PAGE_EVENTS_MAX);
                    if !page.more {
                        break;
                    }
                    pages += 1;
                    prop_assert!(pages <= place.pages, "a page was read twice");
                }
            }
        }
    }

    #[test]
    fn a_reader_can_neither_write_nor_truncate() {
        let (memory, _) = memory();
        let file = memory.file();
        for protection in [ProtFlags::WRITE, ProtFlags::READ | ProtFlags::WRITE] {
            // SAFETY: a new mapping affects no existing memory, and this one must fail.
            let mapped = unsafe { mmap(std::ptr::null_mut(), 4096, protection, MapFlags::SHARED, file, 0) };
            assert!(mapped.is_err());
        }
        assert!(rustix::fs::ftruncate(file, 0).is_err());
        assert!(rustix::io::pwrite(file, &[0], 0).is_err());
    }

    #[test]
    fn a_descriptor_of_anything_else_is_rejected() {
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(TraceMemory::open(file.into()).is_err());
        let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
        let made = |bytes: u64, words: &[u64]| {
            let file = rustix::fs::memfd_create("other", flags).unwrap();
            rustix::fs::ftruncate(&file, bytes).unwrap();
            let start: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            rustix::io::pwrite(&file, &start, 0).unwrap();
            rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
            TraceMemory::open(file).err().expect("an error").to_string()
        };
        for bytes in [0, 24, 1 << 16] {
            made(bytes, &[]);
        }
        let old = made(1 << 16, &[u64::from_be_bytes(*b"blkqtrc\x01")]);
        assert!(old.contains("format 1, and this program reads format 2"), "{old}");
        assert!(TraceMemory::new(0, RING_BYTES_MIN).is_err() && TraceMemory::new(1, PAGE_BYTES).is_err());
        assert!(TraceMemory::new(1, RING_BYTES_MIN + 8).is_err());
        let error = TraceMemory::new(64, MEMORY_MAX_BYTES).err().unwrap().to_string();
        assert!(error.contains("64 queues"), "{error}");
    }
}

//! The ring buffer of one queue: one thread writes, any number read, and none waits for another.
//!
//! A reader may see an event half overwritten. The writer publishes its position before it begins
//! with the next event, so that a reader who has seen a part of that sees the position too, and drops
//! what it has read: what a seqlock does for one value (include/linux/seqlock.h).

use crate::sync::atomic::{
    Ordering::{Acquire, Relaxed, Release},
    fence,
};
use std::sync::Arc;

use super::event::{EVENT_WORDS, TraceEvent};
use super::memory::{RingPlace, TraceMemory};

/// Events that a reader copies before it checks that they are whole.
const READ_AT_ONCE: usize = if cfg!(loom) { 2 } else { 256 };

/// The writer of a queue's events.
pub(crate) struct TraceWriter {
    memory: Arc<TraceMemory>,
    place: RingPlace,
    /// How many events were written.
    count: u64,
}

impl TraceWriter {
    /// The writer of queue `index`, of which there is one at a time; none if the memory has no such queue, or
    /// is another process's.
    pub fn new(memory: &Arc<TraceMemory>, index: usize) -> Option<TraceWriter> {
        let place = memory.place(index).filter(|_| memory.is_writable())?;
        let count = memory.words()[place.count].load(Relaxed);
        Some(TraceWriter { memory: memory.clone(), place, count })
    }

    /// Writes an event over the oldest.
    #[inline]
    pub fn push(&mut self, event: TraceEvent) {
        let words = self.memory.words();
        // A reader that sees a word of this event then sees the count that was stored before.
        fence(Release);
        let at = self.place.event(self.count);
        for (word, value) in words[at..at + EVENT_WORDS].iter().zip(event.to_words()) {
            word.store(value, Relaxed);
        }
        self.count += 1;
        words[self.place.count].store(self.count, Release);
    }
}

/// A reader of a queue's events.
pub struct TraceReader {
    memory: Arc<TraceMemory>,
    place: RingPlace,
    /// The number of the next event to read.
    next: u64,
}

impl TraceReader {
    /// A reader of queue `index`, from its first event on; none if the memory has no such queue.
    pub fn new(memory: &Arc<TraceMemory>, index: usize) -> Option<TraceReader> {
        Some(TraceReader { memory: memory.clone(), place: memory.place(index)?, next: 0 })
    }

    /// Appends the events that were written since the last time to `events`, as far as they still are
    /// there: they follow each other. Returns how many before them are not, or are of no known kind.
    pub fn read(&mut self, events: &mut Vec<TraceEvent>) -> u64 {
        let (until, capacity) = (self.count(Acquire), self.place.events);
        let mut lost = 0;
        if self.next < until.saturating_sub(capacity) {
            // With less than half a ring of distance it would be overtaken again.
            let from = until - capacity / 2;
            lost = from - self.next;
            self.next = from;
        }
        let begin = events.len();
        while self.next < until {
            let end = until.min(self.next.saturating_add(READ_AT_ONCE as u64));
            let mut copies = [[0; EVENT_WORDS]; READ_AT_ONCE];
            let words = self.memory.words();
            for (number, copy) in (self.next..end).zip(&mut copies) {
                let at = self.place.event(number);
                for (value, word) in copy.iter_mut().zip(&words[at..at + EVENT_WORDS]) {
                    *value = word.load(Relaxed);
                }
            }
            // Reads the count after the words: see the writer.
            fence(Acquire);
            // The event at the count may be in the making, over that of a ring before.
            let oldest = (self.count(Relaxed).saturating_add(1)).saturating_sub(capacity);
            let torn = (oldest.clamp(self.next, end) - self.next) as usize;
            if torn > 0 && events.len() > begin {
                // The next call counts them.
                break;
            }
            let whole = &copies[torn..(end - self.next) as usize];
            let before = events.len();
            events.extend(whole.iter().filter_map(|words| TraceEvent::from_words(*words)));
            lost += end - self.next - (events.len() - before) as u64;
            self.next = end;
        }
        lost
    }

    fn count(&self, ordering: crate::sync::atomic::Ordering) -> u64 {
        self.memory.words()[self.place.count].load(ordering)
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::mm::{MapFlags, ProtFlags, mmap};

    use super::*;
    use crate::bio::{BioFlags, Operation};
    use crate::sector::Sector;
    use crate::trace::{EVENTS_MAX, EVENTS_MIN, EventKind, NO_BIO, TraceClient};

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

    /// Memory with two queues, as its reader maps it too.
    fn memory() -> (Arc<TraceMemory>, Arc<TraceMemory>) {
        let memory = TraceMemory::new(2, EVENTS_MIN).expect("memory");
        let file: OwnedFd = memory.file().try_clone_to_owned().expect("a descriptor");
        let read = TraceMemory::open(file).expect("its memory");
        assert_eq!((read.queue_count(), read.events()), (2, EVENTS_MIN));
        (memory, read)
    }

    fn numbers(reader: &mut TraceReader) -> (u64, Vec<u64>) {
        let mut events = Vec::new();
        let lost = reader.read(&mut events);
        (lost, events.iter().map(|event| event.time_ns).collect())
    }

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
        assert!(TraceWriter::new(&read, 0).is_none(), "it could not write there");
    }

    #[test]
    fn a_ring_that_was_overwritten_has_its_newest_events() {
        let (memory, read) = memory();
        let (mut writer, mut reader) =
            (TraceWriter::new(&memory, 0).unwrap(), TraceReader::new(&read, 0).unwrap());
        (0..EVENTS_MIN).for_each(|number| writer.push(event(number)));
        // Of a full ring the oldest may be in the making.
        let (lost, found) = numbers(&mut reader);
        assert_eq!((lost, found), (1, (1..EVENTS_MIN).collect()));
        (0..1000).for_each(|number| writer.push(event(number)));
        let (lost, found) = numbers(&mut reader);
        assert_eq!(lost + found.len() as u64, 1000);
        assert_eq!(found, (1000 - EVENTS_MIN / 2..1000).collect::<Vec<_>>());
        // A new writer continues where the last one was.
        TraceWriter::new(&memory, 0).unwrap().push(event(7));
        assert_eq!(numbers(&mut reader), (0, vec![7]));
    }

    #[test]
    fn a_reader_can_neither_write_nor_truncate() {
        let (memory, _) = memory();
        let file = memory.file();
        for protection in [ProtFlags::WRITE, ProtFlags::READ | ProtFlags::WRITE] {
            // SAFETY: a new mapping touches nothing; it is to fail.
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
        for bytes in [0, 24, 1 << 16] {
            let file = rustix::fs::memfd_create("other", flags).unwrap();
            rustix::fs::ftruncate(&file, bytes).unwrap();
            rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
            assert!(TraceMemory::open(file).is_err(), "{bytes} bytes");
        }
        assert!(TraceMemory::new(0, 64).is_err() && TraceMemory::new(1, 100).is_err());
        let error = TraceMemory::new(64, EVENTS_MAX).err().unwrap().to_string();
        assert!(error.contains("64 queues"), "{error}");
    }
}

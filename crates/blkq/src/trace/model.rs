//! The properties of the ring that the model checkers prove: a reader gets whole events in order, and counts
//! the events that it missed.

use crate::bio::{BioFlags, Operation, Outline};
use crate::request::Request;
use crate::sector::Sector;
use crate::sync::{model, thread};
use crate::tags::Tag;

use super::{
    EventKind, NO_BIO, PAGE_BYTES, PlugRecord, TraceClient, TraceEvent, TraceMemory, TraceReader, TraceWriter,
};

/// An event in which all words depend on `number`.
fn event(number: u64) -> TraceEvent {
    TraceEvent {
        time_ns: number,
        kind: EventKind::Queue,
        operation: Operation::Write,
        flags: BioFlags::empty(),
        sector: Sector(number),
        bytes: number as u32,
        bio: NO_BIO,
        tag: None,
        client: TraceClient::new(1, number as u32),
        status: None,
        other: number as u32,
    }
}

/// Writes a plug of one request and its completion, or a single event. All words depend on `number`.
fn write(writer: &mut TraceWriter, number: u64) {
    match number % 3 {
        0 => writer.push(event(number)),
        1 => {
            let mut request = Request::of_tag(0);
            let (operation, flags) = (Operation::Write, BioFlags::empty());
            let sector = Sector(number);
            request.begin_plain(&Outline { operation, flags, sector, sectors: number, start_ns: number });
            let record = PlugRecord { queued_ns: number, begins: false, issued_ns: None };
            writer.push_plug(&record, &[Tag(0)], &[request], &[]);
        }
        _ => assert!(writer.push_completions(number, &[(Tag(0), Ok(()))])),
    }
}

fn events_of(number: u64) -> Vec<TraceEvent> {
    let of_request = |kind, time_ns, begun| TraceEvent {
        time_ns,
        kind,
        bytes: begun as u32 * 512,
        bio: 0,
        tag: (kind != EventKind::Queue).then_some(Tag(0)),
        client: TraceClient::NONE,
        other: 0,
        ..event(begun)
    };
    match number % 3 {
        0 => vec![event(number)],
        1 => [EventKind::Queue, EventKind::GetRequest].map(|kind| of_request(kind, number, number)).into(),
        _ => vec![of_request(EventKind::Complete, number, number - 1)],
    }
}

fn read_while_written(pages: u64, numbers: std::ops::Range<u64>, reads: usize) {
    let memory = TraceMemory::new(1, pages * PAGE_BYTES).expect("memory");
    let mut writer = TraceWriter::new(&memory, 0).expect("a queue");
    let mut reader = TraceReader::new(&memory, 0).expect("a queue");
    let written: Vec<TraceEvent> = numbers.clone().flat_map(events_of).collect();
    let writing = thread::spawn(move || numbers.for_each(|number| write(&mut writer, number)));
    let (mut read, mut count, mut lost) = (Vec::new(), 0, 0);
    let mut rest = written.iter();
    let mut check = |reader: &mut TraceReader| {
        let page = reader.read(&mut read);
        lost += page.lost;
        count += read.len() as u64;
        for found in read.drain(..) {
            assert!(
                rest.any(|event| *event == found),
                "mixed words of several events, or out of order: {found:?}"
            );
        }
        (count + lost, page.more)
    };
    for _ in 0..reads {
        assert!(check(&mut reader).0 <= written.len() as u64);
    }
    writing.join().expect("the writer");
    let all = loop {
        if let (all, false) = check(&mut reader) {
            break all;
        }
    };
    assert_eq!(all, written.len() as u64, "each event is read or counted as lost");
}

#[cfg(loom)]
#[test]
fn loom_a_reader_gets_whole_events_or_counts_them() {
    // In a ring of two pages, one page is complete while the other is written.
    model("trace ring", 0, || read_while_written(2, 1..4, 1));
}

#[cfg(shuttle)]
#[test]
fn shuttle_a_reader_gets_whole_events_or_counts_them() {
    model("trace ring", 10_000, || read_while_written(4, 1..13, 3));
}

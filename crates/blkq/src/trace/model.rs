//! The ring under the model checkers: a reader gets whole events, in order, and counts the others.

use crate::bio::{BioFlags, Operation};
use crate::sector::Sector;
use crate::sync::{model, thread};

use super::{EventKind, NO_BIO, TraceClient, TraceEvent, TraceMemory, TraceReader, TraceWriter};

/// An event all of whose words are of its number.
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

fn read_while_written(events: u64, written: u64, reads: usize) {
    let memory = TraceMemory::new(1, events).expect("memory");
    let mut writer = TraceWriter::new(&memory, 0).expect("a queue");
    let mut reader = TraceReader::new(&memory, 0).expect("a queue");
    let writing = thread::spawn(move || (1..=written).for_each(|number| writer.push(event(number))));
    let (mut read, mut lost, mut expected) = (Vec::new(), 0, 1);
    let mut check = |reader: &mut TraceReader| {
        expected += reader.read(&mut read);
        for found in read.drain(..) {
            // Those that are lost come before those that are read.
            assert_eq!(found, event(expected), "torn, or out of order");
            expected += 1;
        }
        expected
    };
    (0..reads).for_each(|_| _ = check(&mut reader));
    writing.join().expect("the writer");
    lost += check(&mut reader);
    assert_eq!(lost, written + 1, "each event is read or counted as lost");
}

#[cfg(loom)]
#[test]
fn loom_a_reader_gets_whole_events_or_counts_them() {
    // Of a ring of two one event is whole while the next is written.
    model("trace ring", 0, || read_while_written(2, 3, 1));
}

#[cfg(shuttle)]
#[test]
fn shuttle_a_reader_gets_whole_events_or_counts_them() {
    model("trace ring", 10_000, || read_while_written(4, 12, 3));
}

//! The items of a trace: events, and gaps between events. Describes them for people, similar to blkparse(1).

use std::io::Write;

use blkq::trace::{EventKind, TraceClient, TraceEvent};
use blkq::{BioFlags, Operation};
use blkq_export::client_kind::{NBD, UBLK, VRING};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Item {
    pub queue: usize,
    /// The time of the event in nanoseconds. For a gap, the time of the event that follows it.
    pub time_ns: u64,
    pub kind: ItemKind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ItemKind {
    Event(TraceEvent),
    /// Number of events that were overwritten before they were read.
    Lost(u64),
}

/// Operation and flags as letters, as blkparse(1) prints them, and `WZ` for write zeroes. `N` for events of
/// the plug.
pub fn rwbs(event: &TraceEvent) -> String {
    if matches!(event.kind, EventKind::Plug | EventKind::Unplug) {
        return "N".to_owned();
    }
    let operation = match event.operation {
        Operation::Read => "R",
        Operation::Write => "W",
        Operation::Discard => "D",
        Operation::WriteZeroes => "WZ",
        Operation::Flush => "F",
    };
    let mark = |flag| if event.flags.contains(flag) { "F" } else { "" };
    format!("{}{operation}{}", mark(BioFlags::PREFLUSH), mark(BioFlags::FUA))
}

/// The name of the process that represents a client.
pub fn client_name(client: TraceClient) -> String {
    let number = client.number();
    match client.kind() {
        0 => "blkq".to_owned(),
        NBD => format!("nbd {number}"),
        VRING => format!("vring {number}"),
        UBLK => format!("ublk {number}"),
        kind => format!("client {kind}.{number}"),
    }
}

/// Appends the line of `item`: queue, seconds since `since_ns`, client, event, operation, position and length
/// in sectors, error.
pub fn line(item: &Item, since_ns: u64, out: &mut Vec<u8>) {
    let ns = item.time_ns.saturating_sub(since_ns);
    let (seconds, ns) = (ns / 1_000_000_000, ns % 1_000_000_000);
    let queue = item.queue;
    // Writing to memory does not fail.
    let _ = match &item.kind {
        ItemKind::Lost(events) => writeln!(out, "{queue:>3} {events} events lost"),
        ItemKind::Event(event) => {
            let (letter, client) = (event.kind.letter(), client_name(event.client));
            let _ = write!(out, "{queue:>3} {seconds:>5}.{ns:09} {client:<9} {letter} {:<3} ", rwbs(event));
            let place = format_args!("{} + {}", event.sector.0, event.bytes >> 9);
            match (event.kind, event.status) {
                (EventKind::Plug, _) => writeln!(out),
                (EventKind::Unplug, _) => writeln!(out, "{}", event.other),
                (_, Some(status)) => writeln!(out, "{place} [{status}]"),
                (EventKind::Throttle, None) => writeln!(out, "{place} throttled"),
                (_, None) => writeln!(out, "{place}"),
            }
        }
    };
}

#[cfg(test)]
pub(super) mod tests {
    use blkq::Tag;

    use super::*;

    impl Item {
        pub fn event(&self) -> Option<&TraceEvent> {
            match &self.kind {
                ItemKind::Event(event) => Some(event),
                ItemKind::Lost(_) => None,
            }
        }
    }

    /// An event of a read, without bio and tag.
    pub fn event(kind: EventKind, time_ns: u64) -> TraceEvent {
        TraceEvent::of_plug(kind, 0, time_ns)
    }

    pub fn item(queue: usize, event: TraceEvent) -> Item {
        Item { queue, time_ns: event.time_ns, kind: ItemKind::Event(event) }
    }

    /// An event of a bio at `us` microseconds, and of a request if there is a `tag`.
    pub fn step(kind: EventKind, us: u64, bio: u32, tag: Option<u16>) -> Item {
        item(0, TraceEvent { bio, tag: tag.map(Tag), bytes: 4096, ..event(kind, us * 1000) })
    }

    #[test]
    fn operations_have_the_letters_of_blkparse() {
        let letters = |operation, flags| rwbs(&TraceEvent { operation, flags, ..event(EventKind::Queue, 0) });
        assert_eq!(letters(Operation::Write, BioFlags::FUA), "WF");
        assert_eq!(letters(Operation::Write, BioFlags::PREFLUSH | BioFlags::FUA), "FWF");
        assert_eq!(
            Operation::ALL.map(|operation| letters(operation, BioFlags::empty())),
            ["R", "W", "D", "WZ", "F"]
        );
    }
}

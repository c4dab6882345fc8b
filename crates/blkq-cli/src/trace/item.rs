//! The items of a trace: events, and gaps between events.

use blkq::trace::{EventKind, TraceEvent};
use blkq::{BioFlags, Operation};

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

impl Item {
    pub fn event(&self) -> Option<&TraceEvent> {
        match &self.kind {
            ItemKind::Event(event) => Some(event),
            ItemKind::Lost(_) => None,
        }
    }
}

/// Operation and flags as letters, as blkparse(1) prints them, and `WZ` for write zeroes. `N` for events of
/// the plug.
pub fn rwbs(event: &TraceEvent) -> String {
    if matches!(event.kind, EventKind::Plug | EventKind::Unplug) {
        return "N".to_owned();
    }
    let mut text = String::new();
    if event.flags.contains(BioFlags::PREFLUSH) {
        text.push('F');
    }
    text.push_str(match event.operation {
        Operation::Read => "R",
        Operation::Write => "W",
        Operation::Discard => "D",
        Operation::WriteZeroes => "WZ",
        Operation::Flush => "F",
    });
    if event.flags.contains(BioFlags::FUA) {
        text.push('F');
    }
    text
}

#[cfg(test)]
pub(super) mod tests {
    use blkq::Tag;

    use super::*;

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

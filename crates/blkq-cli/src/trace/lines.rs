//! Formats events as lines for people, similar to those of blkparse(1).

use std::fmt::Write;

use blkq::trace::EventKind;

use super::client;
use super::item::{Item, ItemKind, rwbs};

/// Appends the line of `item`: queue, seconds since `since_ns`, client, event, operation, position and length
/// in sectors, error.
pub fn line(item: &Item, since_ns: u64, out: &mut String) {
    let ns = item.time_ns.saturating_sub(since_ns);
    let queue = item.queue;
    // Writing to a string does not fail.
    let _ = match &item.kind {
        ItemKind::Lost(events) => writeln!(out, "{queue:>3} {events} events lost"),
        ItemKind::Event(event) => {
            let (seconds, ns) = (ns / 1_000_000_000, ns % 1_000_000_000);
            let (letter, client) = (event.kind.letter(), client::name(event.client));
            let _ = write!(out, "{queue:>3} {seconds:>5}.{ns:09} {client:<9} {letter} {:<3} ", rwbs(event));
            match event.kind {
                EventKind::Plug => writeln!(out),
                EventKind::Unplug => writeln!(out, "{}", event.other),
                _ => {
                    let _ = write!(out, "{} + {}", event.sector.0, event.bytes >> 9);
                    match event.status {
                        Some(status) => writeln!(out, " [{status}]"),
                        None if event.kind == EventKind::Throttle => writeln!(out, " throttled"),
                        None => writeln!(out),
                    }
                }
            }
        }
    };
}

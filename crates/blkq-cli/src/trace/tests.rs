//! Tests with arbitrary events, as a compromised daemon could write them.

use blkq::trace::{EventKind, NO_BIO, TraceClient, TraceEvent};
use blkq::{BioFlags, Operation, Sector, Tag};
use proptest::prelude::*;
use proptest::sample::select;

use super::blktrace::Encoder;
use super::filter::{Filter, Filtered};
use super::io_tracker::IoTracker;
use super::item::{Item, ItemKind, line};
use super::output::ChromeWriter;

/// Uses few bios and tags, so that events meet, and numbers at the ends of their ranges.
fn event() -> impl Strategy<Value = TraceEvent> {
    let number = || prop_oneof![0..4_u32, Just(NO_BIO), Just(u32::MAX - 1)];
    let place = (select(&[0, 8, u64::MAX][..]), select(&[0, 512, u32::MAX][..]), any::<u8>());
    let ids = (number(), prop::option::of(0..3_u16), number());
    let kinds = (select(&EventKind::ALL[..]), select(&Operation::ALL[..]), any::<u8>());
    (prop_oneof![0..9_u64, any::<u64>()], kinds, place, ids).prop_map(
        |(time_ns, (kind, operation, flags), (sector, bytes, client), (bio, tag, other))| TraceEvent {
            time_ns,
            kind,
            operation,
            flags: BioFlags::from_bits_truncate(flags),
            sector: Sector(sector),
            bytes,
            bio,
            tag: tag.map(Tag),
            client: TraceClient::new(client, other),
            status: None,
            other,
        },
    )
}

fn item() -> impl Strategy<Value = Item> {
    let kind =
        prop_oneof![30 => event().prop_map(ItemKind::Event), 1 => any::<u64>().prop_map(ItemKind::Lost)];
    (kind, 0..2_usize).prop_map(|(kind, queue)| {
        let time_ns = if let ItemKind::Event(event) = &kind { event.time_ns } else { 5 };
        Item { queue, time_ns, kind }
    })
}

proptest! {
    // Contract: bounded-input
    #[test]
    fn arbitrary_sequences_of_events_are_written(items in prop::collection::vec(item(), 1..200)) {
        let (mut trackers, mut filtered) = (<[IoTracker; 2]>::default(), Filtered::new(Filter::default()));
        let (mut encoder, mut bytes, mut text) = (Encoder::new(2), Vec::new(), Vec::new());
        let mut chrome = ChromeWriter::new(Vec::new(), "d", 2, 7).unwrap();
        for item in &items {
            encoder.encode(item, &mut bytes);
            line(item, 7, &mut text);
            let effects = trackers[item.queue].observe(item);
            filtered.push(*item, effects);
            for (queue, request) in filtered.take_requests() {
                chrome.request(queue, &request).unwrap();
            }
            filtered.take();
        }
        trackers.iter_mut().for_each(IoTracker::forget);
        filtered.take();
        prop_assert!(filtered.take_requests().is_empty(), "open I/Os are left out");
        chrome.finish().unwrap();
        prop_assert_eq!(String::from_utf8(text).unwrap().lines().count(), items.len());
    }
}

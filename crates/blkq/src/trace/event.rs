//! An event of a trace, and its words in memory.

use crate::bio::{BioFlags, Operation};
use crate::error::Status;
use crate::request::NIL;
use crate::sector::Sector;
use crate::tags::Tag;

/// Words of an event that has a record of its own.
pub(super) const EVENT_WORDS: usize = 5;
/// The number of no bio.
pub const NO_BIO: u32 = NIL;
/// The number of no tag.
const NO_TAG: u16 = u16::MAX;

/// The step that an event is of. The letters are those of blkparse(1). Numbers are part of the format of the memory:
/// new kinds are added behind the others.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
#[non_exhaustive]
pub enum EventKind {
    /// `Q`: a bio was submitted.
    Queue = 1,
    /// `G`: a bio got a tag, and is a request; a driver's flush got its own, and serves `other` bios.
    GetRequest,
    /// `M`: a bio, or the request that begins with it, was merged to the back of the request.
    BackMerge,
    /// `F`: the same to its front.
    FrontMerge,
    /// `P`: the plug has a first request.
    Plug,
    /// `U`: the plug is flushed, with `other` requests.
    Unplug,
    /// `I`: a request was inserted into the scheduler.
    Insert,
    /// `D`: the driver is given a request.
    Issue,
    /// `R`: the driver was busy, and the request is requeued.
    Requeue,
    /// `C`: a request completed; or a bio that never became one, without a tag.
    Complete,
    /// `X`: bio `other` is split, and this bio is a part of it.
    Split,
    /// `m`, a message there: a request has to wait for a limit.
    Throttle,
}

impl EventKind {
    /// Every kind, in the order of its number.
    pub const ALL: [EventKind; 12] = [
        EventKind::Queue,
        EventKind::GetRequest,
        EventKind::BackMerge,
        EventKind::FrontMerge,
        EventKind::Plug,
        EventKind::Unplug,
        EventKind::Insert,
        EventKind::Issue,
        EventKind::Requeue,
        EventKind::Complete,
        EventKind::Split,
        EventKind::Throttle,
    ];

    /// Its letter in the output of blkparse(1).
    pub const fn letter(self) -> char {
        match self {
            EventKind::Queue => 'Q',
            EventKind::GetRequest => 'G',
            EventKind::BackMerge => 'M',
            EventKind::FrontMerge => 'F',
            EventKind::Plug => 'P',
            EventKind::Unplug => 'U',
            EventKind::Insert => 'I',
            EventKind::Issue => 'D',
            EventKind::Requeue => 'R',
            EventKind::Complete => 'C',
            EventKind::Split => 'X',
            EventKind::Throttle => 'm',
        }
    }
}

/// The client of a bio.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
#[repr(transparent)]
pub struct TraceClient(u32);

impl TraceClient {
    /// None that is known: a thread of the process.
    pub const NONE: TraceClient = TraceClient(0);
    const NUMBER: u32 = (1 << 28) - 1;

    /// Client `number` of an attachment; numbers wrap around at 2^28. Attachments of one process have
    /// different `kind`s, from 1 to 15.
    pub const fn new(kind: u8, number: u32) -> TraceClient {
        TraceClient((kind as u32) << 28 | number & Self::NUMBER)
    }

    /// The kind of the attachment; 0 for [`TraceClient::NONE`].
    pub const fn kind(self) -> u8 {
        (self.0 >> 28) as u8
    }

    /// Its number there.
    pub const fn number(self) -> u32 {
        self.0 & Self::NUMBER
    }

    pub(super) const fn bits(self) -> u32 {
        self.0
    }

    pub(super) const fn from_bits(bits: u32) -> TraceClient {
        TraceClient(bits)
    }
}

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceEvent {
    /// When, in nanoseconds of CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// Which step.
    pub kind: EventKind,
    /// Of which operation.
    pub operation: Operation,
    /// Flags of the bio, or of the request.
    pub flags: BioFlags,
    /// Where on the device.
    pub sector: Sector,
    /// How long; what is longer has `u32::MAX` rounded down to sectors.
    pub bytes: u32,
    /// The bio, by its number in the queue, which is another's when it has completed; of a request
    /// its first; or [`NO_BIO`].
    pub bio: u32,
    /// The request, if it is of one.
    pub tag: Option<Tag>,
    /// The client that submitted it.
    pub client: TraceClient,
    /// Why it failed, of a completion.
    pub status: Option<Status>,
    /// A number whose meaning the kind has: a count, or a bio.
    pub other: u32,
}

impl TraceEvent {
    /// One of no bio; `other` is as in [`TraceEvent::other`].
    pub const fn of_plug(kind: EventKind, other: u32, time_ns: u64) -> TraceEvent {
        TraceEvent {
            time_ns,
            kind,
            operation: Operation::Read,
            flags: BioFlags::empty(),
            sector: Sector(0),
            bytes: 0,
            bio: NO_BIO,
            tag: None,
            client: TraceClient::NONE,
            status: None,
            other,
        }
    }

    /// Its words in memory: the first has the kind in its lowest byte.
    #[inline]
    pub(super) fn to_words(self) -> [u64; EVENT_WORDS] {
        let tag = self.tag.map_or(NO_TAG, |tag| tag.0);
        [
            u64::from(self.kind as u8)
                | u64::from(self.operation as u8) << 8
                | u64::from(self.flags.bits()) << 16
                | u64::from(self.status.map_or(0, |status| status as u8)) << 24
                | u64::from(tag) << 32,
            self.time_ns,
            self.sector.0,
            u64::from(self.bytes) | u64::from(self.bio) << 32,
            u64::from(self.client.0) | u64::from(self.other) << 32,
        ]
    }

    /// The event of these words; `None` if they are of a kind that is not known here.
    pub(super) fn from_words(words: [u64; EVENT_WORDS]) -> Option<TraceEvent> {
        let [what, time_ns, sector, place, client] = words;
        let byte = |shift: u32| (what >> shift) as u8;
        let (status, tag) = (byte(24), (what >> 32) as u16);
        Some(TraceEvent {
            time_ns,
            kind: *EventKind::ALL.get(usize::from(byte(0)).checked_sub(1)?)?,
            operation: *Operation::ALL.get(usize::from(byte(8)))?,
            flags: BioFlags::from_bits_truncate(byte(16)),
            sector: Sector(sector),
            bytes: place as u32,
            bio: (place >> 32) as u32,
            tag: (tag != NO_TAG).then_some(Tag(tag)),
            client: TraceClient(client as u32),
            status: usize::from(status)
                .checked_sub(1)
                .map(|index| Status::ALL.get(index).copied().unwrap_or(Status::Io)),
            other: (client >> 32) as u32,
        })
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    prop_compose! {
        fn any_event()(
            time_ns: u64, sector: u64, bytes: u32, bio: u32, client: u32, other: u32,
            kind in 0..EventKind::ALL.len(), operation in 0..Operation::COUNT, flags: u8,
            status in 0..=Status::ALL.len(), tag: u16,
        ) -> TraceEvent {
            TraceEvent {
                time_ns,
                kind: EventKind::ALL[kind],
                operation: Operation::ALL[operation],
                flags: BioFlags::from_bits_truncate(flags),
                sector: Sector(sector),
                bytes,
                bio,
                tag: (tag != NO_TAG).then_some(Tag(tag)),
                client: TraceClient(client),
                status: status.checked_sub(1).map(|index| Status::ALL[index]),
                other,
            }
        }
    }

    proptest! {
        #[test]
        fn events_survive_the_way_through_memory(event in any_event()) {
            prop_assert_eq!(TraceEvent::from_words(event.to_words()), Some(event));
        }

        #[test]
        fn words_of_anything_are_an_event_or_none(words: [u64; EVENT_WORDS]) {
            if let Some(event) = TraceEvent::from_words(words) {
                prop_assert_eq!(TraceEvent::from_words(event.to_words()), Some(event));
            }
        }
    }

    #[test]
    fn the_numbers_of_kinds_are_their_order() {
        for (index, kind) in EventKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, index + 1);
        }
        let client = TraceClient::new(15, u32::MAX);
        assert_eq!((client.kind(), client.number()), (15, (1 << 28) - 1));
    }
}

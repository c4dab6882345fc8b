use crate::bio::{BioFlags, Operation};
use crate::enumeration::enumeration;
use crate::error::Status;
use crate::request::NIL;
use crate::sector::Sector;
use crate::tags::Tag;

/// The number of words of an event that has its own record.
pub(super) const EVENT_WORDS: usize = 5;
/// The value of [`TraceEvent::bio`] if there is no bio.
pub const NO_BIO: u32 = NIL;
/// The tag number in memory and of a probe if there is no tag.
pub(super) const NO_TAG: u16 = u16::MAX;

enumeration! {
    /// The step of an I/O that an event records. The letters are those of blkparse(1). The numbers are part of
    /// the memory format, so new kinds must be added at the end.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    #[repr(u8)]
    #[non_exhaustive]
    pub enum EventKind {
        /// `Q`: a bio was submitted.
        Queue = 1 => 'Q',
        /// `G`: a bio got a tag and became a request; or a flush for `other` bios got its tag.
        GetRequest => 'G',
        /// `M`: a bio, or the request that begins with it, was merged to the back of a request.
        BackMerge => 'M',
        /// `F`: a bio, or the request that begins with it, was merged to the front of a request.
        FrontMerge => 'F',
        /// `P`: the first request was added to the plug.
        Plug => 'P',
        /// `U`: the plug was flushed, with `other` requests.
        Unplug => 'U',
        /// `I`: a request was inserted into the scheduler.
        Insert => 'I',
        /// `D`: a request was handed to the driver.
        Issue => 'D',
        /// `R`: the driver was busy, and the request was requeued.
        Requeue => 'R',
        /// `C`: a request completed; without a tag, a bio completed that never became a request.
        Complete => 'C',
        /// `X`: bio `other` was split, and this bio is a part of it.
        Split => 'X',
        /// `m`, which is a message in blkparse(1): a request has to wait for a limit.
        Throttle => 'm',
    }

    /// The letter of the kind in the output of blkparse(1).
    pub const fn letter(self) -> char;
}

/// The client that submitted a bio.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
#[repr(transparent)]
pub struct TraceClient(pub(super) u32);

impl TraceClient {
    /// No known client, such as a thread of this process.
    pub const NONE: TraceClient = TraceClient(0);
    const NUMBER: u32 = (1 << 28) - 1;

    /// Client `number` of the attachment of that `kind`. Numbers wrap around at 2^28. The attachments of one
    /// process must have different kinds, from 1 to 15.
    pub const fn new(kind: u8, number: u32) -> TraceClient {
        TraceClient((kind as u32) << 28 | number & Self::NUMBER)
    }

    /// The kind of the attachment; 0 for [`TraceClient::NONE`].
    pub const fn kind(self) -> u8 {
        (self.0 >> 28) as u8
    }

    /// The number of the client within its attachment.
    pub const fn number(self) -> u32 {
        self.0 & Self::NUMBER
    }
}

/// An event of a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceEvent {
    /// The time in nanoseconds of CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// The step that the event records.
    pub kind: EventKind,
    /// The operation of the bio or request.
    pub operation: Operation,
    /// The flags of the bio or request.
    pub flags: BioFlags,
    /// The position on the device.
    pub sector: Sector,
    /// The length in bytes; `u32::MAX` rounded down to sectors if the length is larger.
    pub bytes: u32,
    /// The number of the bio within its queue, or of the first bio of the request; [`NO_BIO`] if there is
    /// none. The number is reused after the bio has completed.
    pub bio: u32,
    /// The tag of the request, if the event belongs to one.
    pub tag: Option<Tag>,
    /// The client that submitted the bio.
    pub client: TraceClient,
    /// The error, if the event is a failed completion.
    pub status: Option<Status>,
    /// A number whose meaning depends on the kind: a count, or the number of a bio.
    pub other: u32,
}

impl TraceEvent {
    /// An event without a bio; for `other` see [`TraceEvent::other`].
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

    /// The event as words of memory. The lowest byte of the first word is the kind.
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

    /// The event of these words; `None` if their kind is not known.
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

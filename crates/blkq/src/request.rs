//! A [`Request`] is what a driver gets (`struct request`): one slot of the tag set with one or more merged
//! bios. Requests are allocated with the queue, and each takes one cache line.

use crate::bio::{BioFlags, Operation, Outline};
use crate::sector::{SECTOR_SHIFT, Sector};
use crate::tags::Tag;

/// The end of a list of bios.
pub(crate) const NIL: u32 = u32::MAX;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum RequestState {
    Idle,
    /// The request was built and has not completed.
    Busy,
    /// As `Busy`, with a single plain bio (`SlotFlags::PLAIN`) that reads. The bio is in the slot whose number
    /// is the tag.
    /// Position, length and start time are stored only in the request until `InFlight::fill_plain`.
    PlainRead,
    /// As `PlainRead`, with a bio that writes.
    PlainWrite,
    /// As `Busy`, with a plain bio and others that were merged with it.
    PlainMerged,
}

impl RequestState {
    /// The state of a request with a single plain bio of `operation`; `None` if such a bio cannot be plain.
    #[inline(always)]
    pub(crate) const fn of_plain(operation: Operation) -> Option<RequestState> {
        match operation {
            Operation::Read => Some(RequestState::PlainRead),
            Operation::Write => Some(RequestState::PlainWrite),
            Operation::Discard | Operation::WriteZeroes | Operation::Flush => None,
        }
    }
}

/// One slot of the tag set. Drivers read it through its methods, and keep two words of their own in `pdu`.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Request {
    pub(crate) sector: Sector,
    pub(crate) sectors: u64,
    pub(crate) first_bio: u32,
    pub(crate) last_bio: u32,
    /// The time at which the first of its bios was accepted, in nanoseconds of the queue's clock.
    pub(crate) start_ns: u64,
    pub(crate) operation: Operation,
    pub(crate) flags: BioFlags,
    pub(crate) state: RequestState,
    pub(crate) segments: u16,
    /// Words for the driver's own use, zeroed when the request starts.
    pub pdu: [u64; 2],
}

const _: () = assert!(size_of::<Request>() == 64 && align_of::<Request>() == 64);

impl Request {
    pub(crate) const fn idle() -> Request {
        Request {
            sector: Sector(0),
            sectors: 0,
            first_bio: NIL,
            last_bio: NIL,
            start_ns: 0,
            operation: Operation::Read,
            flags: BioFlags::empty(),
            state: RequestState::Idle,
            segments: 0,
            pdu: [0; 2],
        }
    }

    pub(crate) fn begin(&mut self, bio: u32, outline: &Outline, segments: u16) {
        debug_assert!(self.state == RequestState::Idle);
        self.first_bio = bio;
        self.last_bio = bio;
        self.segments = segments;
        self.set(outline, RequestState::Busy);
    }

    #[inline(always)]
    fn set(&mut self, outline: &Outline, state: RequestState) {
        // Field by field: a struct literal would be copied through the stack (see `BioSlot`).
        self.sector = outline.sector;
        self.sectors = outline.sectors;
        self.start_ns = outline.start_ns;
        self.operation = outline.operation;
        self.flags = outline.flags;
        self.state = state;
        self.pdu = [0; 2];
    }

    /// The idle request of `tag`. The fields that are the same for every plain bio are set already.
    pub(crate) const fn of_tag(tag: u16) -> Request {
        Request { first_bio: tag as u32, last_bio: tag as u32, segments: 1, ..Request::idle() }
    }

    /// Starts the request of a plain bio, which has one buffer and is in the slot whose number is the tag.
    /// Leaves the fields that [`Request::of_tag`] has set.
    #[inline(always)]
    pub(crate) fn begin_plain(&mut self, outline: &Outline) {
        debug_assert!(
            self.state == RequestState::Idle && self.first_bio == self.last_bio && self.segments == 1
        );
        let is_write = outline.operation.is_write();
        self.set(outline, if is_write { RequestState::PlainWrite } else { RequestState::PlainRead });
    }

    /// Makes the request idle, and restores the fields on which [`Request::begin_plain`] relies.
    pub(crate) fn complete(&mut self, tag: Tag) {
        self.state = RequestState::Idle;
        (self.first_bio, self.last_bio, self.segments) = (tag.0.into(), tag.0.into(), 1);
    }

    pub(crate) fn is_plain(&self) -> bool {
        matches!(self.state, RequestState::PlainRead | RequestState::PlainWrite)
    }

    pub(crate) fn outline(&self) -> Outline {
        let &Request { operation, flags, sector, sectors, start_ns, .. } = self;
        Outline { operation, flags, sector, sectors, start_ns }
    }

    /// The operation. A driver gets only operations that its limits declare.
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// The flags of the operation.
    pub fn flags(&self) -> BioFlags {
        self.flags
    }

    /// The first sector of the request.
    pub fn sector(&self) -> Sector {
        self.sector
    }

    /// The position of the first byte on the device.
    pub fn offset(&self) -> u64 {
        self.sector.bytes()
    }

    /// Length in bytes. 0 for a flush.
    pub fn bytes(&self) -> u64 {
        self.sectors << SECTOR_SHIFT
    }

    /// The number of memory segments.
    pub fn segment_count(&self) -> usize {
        self.segments as usize
    }

    /// The first sector after the request.
    pub(crate) fn end(&self) -> Sector {
        self.sector + self.sectors
    }
}

//! A [`Request`] is what a driver gets: one slot of the tag set, preallocated, one
//! cache line, with one or more merged bios.

use crate::bio::{BioFlags, Operation, Outline};
use crate::sector::{SECTOR_SHIFT, Sector};

/// No bio: the end of a list of them.
pub(crate) const NIL: u32 = u32::MAX;

/// Where a request is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum RequestState {
    /// The tag is free.
    Idle,
    /// Built, and not completed.
    Busy,
    /// The same, of one plain bio that reads, alone: in the slot of the tag's number. Where it is, how
    /// long, and when it began is the request's, until `BioSlab::fill_plain`.
    PlainRead,
    /// The same of one that writes.
    PlainWrite,
    /// The same of a plain bio and others that merged with it.
    PlainMerged,
}

impl RequestState {
    /// The state of a request of one plain bio alone, if those of `operation` can be plain.
    #[inline(always)]
    pub(crate) const fn of_plain(operation: Operation) -> Option<RequestState> {
        match operation {
            Operation::Read => Some(RequestState::PlainRead),
            Operation::Write => Some(RequestState::PlainWrite),
            Operation::Discard | Operation::WriteZeroes | Operation::Flush => None,
        }
    }
}

/// One slot of the tag set. Drivers read it through its methods and keep words of
/// their own in `pdu`.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Request {
    pub(crate) sector: Sector,
    pub(crate) sectors: u64,
    pub(crate) first_bio: u32,
    pub(crate) last_bio: u32,
    /// When the first of its bios was accepted, in nanoseconds of the queue's clock.
    pub(crate) start_ns: u64,
    pub(crate) operation: Operation,
    pub(crate) flags: BioFlags,
    pub(crate) state: RequestState,
    pub(crate) segments: u16,
    /// The driver's own words, zeroed when the request starts.
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

    /// A flush of the queue's own.
    pub(crate) const fn flush(start_ns: u64) -> Request {
        Request { operation: Operation::Flush, state: RequestState::Busy, start_ns, ..Request::idle() }
    }

    /// Becomes the request of one bio.
    #[inline]
    pub(crate) fn begin(&mut self, bio: u32, outline: &Outline, segments: u16) {
        debug_assert!(self.state == RequestState::Idle);
        // Field by field: a literal would go through the stack (see `BioSlot`).
        self.sector = outline.sector;
        self.sectors = outline.sectors;
        self.first_bio = bio;
        self.last_bio = bio;
        self.start_ns = outline.start_ns;
        self.operation = outline.operation;
        self.flags = outline.flags;
        self.state = RequestState::Busy;
        self.segments = segments;
        self.pdu = [0; 2];
    }

    /// The idle request of `tag`: as that of a plain bio is, as far as those are alike.
    pub(crate) const fn of_tag(tag: u16) -> Request {
        Request { first_bio: tag as u32, last_bio: tag as u32, segments: 1, ..Request::idle() }
    }

    /// Becomes the request of the plain bio in the slot of its tag's number: of one buffer. The fields
    /// that are not written are as [`Request::of_tag`] has them.
    #[inline(always)]
    pub(crate) fn begin_plain(&mut self, outline: &Outline) {
        debug_assert!(
            self.state == RequestState::Idle && self.first_bio == self.last_bio && self.segments == 1
        );
        self.sector = outline.sector;
        self.sectors = outline.sectors;
        self.start_ns = outline.start_ns;
        self.operation = outline.operation;
        self.flags = outline.flags;
        self.state =
            if outline.operation.is_write() { RequestState::PlainWrite } else { RequestState::PlainRead };
        self.pdu = [0; 2];
    }

    /// Becomes the idle request of `tag` again, as far as [`Request::begin_plain`] counts on that.
    #[inline]
    pub(crate) fn complete(&mut self, tag: u16) {
        self.state = RequestState::Idle;
        (self.first_bio, self.last_bio, self.segments) = (u32::from(tag), u32::from(tag), 1);
    }

    /// Whether it is of a plain bio alone.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self.state, RequestState::PlainRead | RequestState::PlainWrite)
    }

    /// The operation. A driver sees only those that its limits declare.
    #[inline]
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// How to do it.
    #[inline]
    pub fn flags(&self) -> BioFlags {
        self.flags
    }

    /// Where it begins.
    #[inline]
    pub fn sector(&self) -> Sector {
        self.sector
    }

    /// Where it begins, in bytes.
    #[inline]
    pub fn offset(&self) -> u64 {
        self.sector.bytes()
    }

    /// Its length in bytes; 0 for a flush.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.sectors << SECTOR_SHIFT
    }

    /// How many pieces of memory it consists of.
    #[inline]
    pub fn segment_count(&self) -> usize {
        self.segments as usize
    }

    /// The first sector after it.
    #[inline]
    pub(crate) fn end(&self) -> Sector {
        self.sector + self.sectors
    }
}

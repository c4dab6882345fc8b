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

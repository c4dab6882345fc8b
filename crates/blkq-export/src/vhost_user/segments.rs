//! The data of a request as segments of guest memory. The lists of completed requests are reused. Data whose
//! alignment the disk does not accept is copied between the segments and a buffer.

use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use blkq::{Data, Segment, SegmentOwner};

use super::chain::{Buffer, RingError, for_each_part};
use super::config::SEGMENTS_MAX;
use super::memory::{Cursor, GuestMemory, Span};

/// Most idle lists of a ring.
const IDLE_MAX: usize = 1024;
/// Most segments that an idle list has room for: more than a request within the advertised limits needs.
/// Longer lists are freed, because they would keep the memory of the largest request that a guest ever made.
const IDLE_SEGMENTS_MAX: usize = 2 * SEGMENTS_MAX as usize;
/// Most segments that all idle lists of a ring together have room for, 512 KiB: enough for 260 requests of
/// the advertised size. A guest may have 64 rings.
const IDLE_SEGMENTS_TOTAL_MAX: usize = 32 << 10;

#[derive(Default)]
struct GuestSegments {
    segments: Vec<Segment>,
    memory: Option<Arc<GuestMemory>>,
}

// SAFETY: the segments are spans of `memory`, which keeps them mapped. Only `fill` removes either, and needs
// an exclusive borrow. The guest may access the memory at the same time: see `SegmentOwner` on memory that
// another process shares.
unsafe impl SegmentOwner for GuestSegments {
    fn segments(&self) -> &[Segment] {
        &self.segments
    }
}

impl GuestSegments {
    /// Replaces the segments by the `bytes` bytes of `buffers` that follow the first `skip`. Returns all
    /// addresses and lengths of the segments, combined by OR.
    fn fill(
        &mut self,
        memory: &Arc<GuestMemory>,
        cursor: &mut Cursor,
        buffers: &[Buffer],
        skip: u64,
        bytes: u64,
    ) -> Result<usize, RingError> {
        self.segments.clear();
        if !self.memory.as_ref().is_some_and(|held| Arc::ptr_eq(held, memory)) {
            self.memory = Some(Arc::clone(memory));
        }
        let mut unaligned = 0;
        let found = for_each_part(buffers, skip, bytes, |at, length| {
            memory.for_each_span(cursor, at, length as usize, |span, _| {
                unaligned |= span.start().as_ptr().addr() | span.len() as usize;
                self.push(span.segment());
            })
        })?;
        debug_assert_eq!(found, bytes, "the caller counted them");
        Ok(unaligned)
    }

    fn registered_pieces(&self) -> usize {
        let Some(first) = self.segments.first().filter(|first| first.is_registered()) else { return 0 };
        let together = self.segments.iter().all(|other| other.same_registration(first));
        if together { self.segments.len() } else { 0 }
    }

    /// Adds a segment, or extends the last one if both are adjacent and have the same registration.
    fn push(&mut self, segment: Segment) {
        if let Some(last) = self.segments.last_mut()
            && last.ptr.addr().wrapping_add(last.len as usize) == segment.ptr.addr()
            && last.same_registration(&segment)
            && let Some(len) = last.len.checked_add(segment.len)
            && len <= i32::MAX as u32
        {
            last.len = len;
        } else {
            self.segments.push(segment);
        }
    }
}

#[derive(Default)]
pub struct SegmentPool {
    #[allow(clippy::vec_box, reason = "the boxes that bios carry")]
    idle: Vec<Box<Box<dyn SegmentOwner>>>,
    /// Number of segments that the idle lists have room for.
    idle_segments: usize,
    cursor: Cursor,
}

#[derive(Debug)]
pub struct Gathered {
    pub data: Data,
    /// All addresses and lengths of the segments, combined by OR. If a bit below the disk's `memory_align` is
    /// set, the data must be copied.
    pub unaligned: usize,
    /// The number of segments if all are in the same registration, else 0.
    pub registered_pieces: usize,
}

impl SegmentPool {
    /// Collects the segments of `bytes` bytes (at least 1) after the first `skip`, which `buffers` must
    /// contain. Fails with [`RingError::BufferUnmapped`] if a byte is not guest memory.
    pub fn gather(
        &mut self,
        memory: &Arc<GuestMemory>,
        buffers: &[Buffer],
        skip: u64,
        bytes: u64,
    ) -> Result<Gathered, RingError> {
        let mut owner = self.idle.pop().unwrap_or_else(fresh);
        let Some(segments) = segments_of(&mut owner) else {
            // Unreachable: only lists of this type are kept.
            return Err(RingError::MemoryLost);
        };
        // A new list has room for no segments.
        self.idle_segments -= segments.segments.capacity();
        match segments.fill(memory, &mut self.cursor, buffers, skip, bytes) {
            Ok(unaligned) => {
                let registered_pieces = segments.registered_pieces();
                Ok(Gathered { data: Data::Segments(owner), unaligned, registered_pieces })
            }
            Err(error) => {
                self.keep(owner);
                Err(error)
            }
        }
    }

    pub fn recycle(&mut self, data: Data) {
        if let Data::Segments(owner) = data {
            self.keep(owner);
        }
    }

    fn keep(&mut self, mut owner: Box<Box<dyn SegmentOwner>>) {
        let Some(room) = segments_of(&mut owner).map(|it| it.segments.capacity()) else { return };
        let total = self.idle_segments + room;
        if self.idle.len() < IDLE_MAX && room <= IDLE_SEGMENTS_MAX && total <= IDLE_SEGMENTS_TOTAL_MAX {
            self.idle_segments = total;
            self.idle.push(owner);
        }
    }
}

#[cold]
fn fresh() -> Box<Box<dyn SegmentOwner>> {
    Box::new(Box::new(GuestSegments::default()))
}

#[allow(clippy::borrowed_box, reason = "what a bio carries")]
fn segments_of(owner: &mut Box<Box<dyn SegmentOwner>>) -> Option<&mut GuestSegments> {
    let owner: &mut dyn Any = &mut ***owner;
    owner.downcast_mut()
}

/// Copies `guest` to the beginning of `buffer`, until one of the two ends, and reads each byte once.
pub fn copy_in(guest: &Data, buffer: &mut [u8]) {
    for_each_segment(guest, buffer.len(), |span, part| span.copy_to(&mut buffer[part]));
}

/// Copies the beginning of `buffer` to the memory of `guest`, until one of the two ends.
pub fn copy_out(buffer: &[u8], guest: &Data) {
    for_each_segment(guest, buffer.len(), |span, part| span.copy_from(&buffer[part]));
}

/// Calls `copy` for each segment of the first `bytes` bytes, with its place in the data.
fn for_each_segment(guest: &Data, bytes: usize, mut copy: impl FnMut(Span<'_>, Range<usize>)) {
    let Data::Segments(owner) = guest else { return };
    let mut at = 0;
    for segment in owner.segments() {
        let end = bytes.min(at + segment.len as usize);
        if let Some(start) = NonNull::new(segment.ptr) {
            // SAFETY: the owner of the segment keeps it mapped.
            copy(unsafe { Span::new(start, segment.len) }, at..end);
        }
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_of_segments_are_not_kept() {
        let mut pool = SegmentPool::default();
        for (capacity, kept) in [(4, 1), (IDLE_SEGMENTS_MAX, 2), (IDLE_SEGMENTS_MAX + 1, 2)] {
            let owner = GuestSegments { segments: Vec::with_capacity(capacity), memory: None };
            pool.recycle(Data::Segments(Box::new(Box::new(owner))));
            assert_eq!(pool.idle.len(), kept, "{capacity}");
        }
        for _ in 0..IDLE_MAX {
            let owner = GuestSegments { segments: Vec::with_capacity(IDLE_SEGMENTS_MAX), memory: None };
            pool.recycle(Data::Segments(Box::new(Box::new(owner))));
        }
        let room = |pool: &mut SegmentPool| -> usize {
            pool.idle.iter_mut().map(|owner| segments_of(owner).unwrap().segments.capacity()).sum()
        };
        assert!(room(&mut pool) <= IDLE_SEGMENTS_TOTAL_MAX);
        assert_eq!(room(&mut pool), pool.idle_segments);
    }
}

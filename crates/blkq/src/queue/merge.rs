//! Merging: a bio that continues a request becomes part of that request (block/blk-merge.c). A merged request
//! never exceeds the limits ([`QueueLimits::allow`](crate::limits::QueueLimits)), and only bios of the same
//! operation without special flags are merged.

use crate::limits::{ALONE, MergeSide, is_mergeable};
use crate::slab::FlushStep;
use crate::tags::Tag;

use super::io::Io;

impl Io {
    /// Whether bio `index` may be merged with other bios at all.
    #[inline(always)]
    pub fn may_merge(&self, index: u32) -> bool {
        let slot = &self.in_flight[index];
        self.disk.settings().merge && is_mergeable(slot.operation, slot.flags)
    }

    /// Merges bio `index` into request `tag` if they touch, and operation, flags and limits allow it.
    /// `segments` is the bio's number of segments, `None` if unknown.
    #[inline(always)]
    pub fn try_merge(&mut self, tag: Tag, index: u32, segments: Option<u16>) -> bool {
        let (slot, request) = (&self.in_flight[index], &self.in_flight[tag]);
        let Some(side) = MergeSide::of(request.sector, request.end(), slot.sector, slot.sectors) else {
            return false;
        };
        if !self.may_merge(index)
            || slot.operation != request.operation
            || request.flags.intersects(ALONE)
            || slot.step != FlushStep::None
        {
            return false;
        }
        let segments = segments.unwrap_or_else(|| self.in_flight.count_segments(index));
        let total_segments = u32::from(request.segments) + u32::from(segments);
        let sectors = request.sectors + slot.sectors;
        let start = if side == MergeSide::Back { request.sector } else { slot.sector };
        if !self.disk.allows(slot.operation, start, sectors, total_segments) {
            return false;
        }
        let operation = slot.operation;
        self.in_flight.merge(tag, index, side, total_segments as u16);
        if self.disk.settings().iostats {
            self.stats.merged(operation.into());
        }
        true
    }

    pub fn can_join(&self, first: Tag, second: Tag) -> bool {
        let (head, tail) = (&self.in_flight[first], &self.in_flight[second]);
        let sectors = head.sectors + tail.sectors;
        let segments = u32::from(head.segments) + u32::from(tail.segments);
        head.operation == tail.operation
            && !head.flags.union(tail.flags).intersects(ALONE)
            && self.disk.limits().allow(head.operation, head.sector, sectors, segments)
    }

    /// Joins request `second`, which starts where `first` ends, to `first`, and frees the tag of `second`.
    pub fn join(&mut self, first: Tag, second: Tag) {
        let operation = self.in_flight[first].operation;
        self.in_flight.join(first, second);
        self.tags.freed().push(second);
        self.tags.share_freed();
        if self.disk.settings().iostats {
            self.stats.joined(operation.into());
        }
    }
}

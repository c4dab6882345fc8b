//! Merging: a bio that continues a request becomes part of that request (block/blk-merge.c). A merged request
//! never exceeds the limits ([`QueueLimits::allow`](crate::limits::QueueLimits)), and only bios of the same
//! operation without special flags are merged.

use crate::bio::Outline;
use crate::limits::{ALONE, MergeSide, is_mergeable};
use crate::slab::FlushStep;
use crate::tags::Tag;

use super::Queue;

impl Queue {
    /// Tries to merge bio `index`: with the youngest request of the plug, else with a neighbour in the
    /// scheduler, else with the youngest request that waits for a limit. `segments` is the bio's number of
    /// segments, `None` if unknown.
    #[inline(always)]
    pub(super) fn try_merge(&mut self, index: u32, outline: &Outline, segments: Option<u16>) -> bool {
        (self.plug.is_touched(outline.sector, outline.sectors) && self.try_plug_merge(index, segments))
            || (self.dispatch.has_scheduler() && self.try_scheduler_merge(index, segments))
            || (self.dispatch.throttle().has_waiting() && self.try_throttled_merge(index, segments))
    }

    #[inline(always)]
    fn try_plug_merge(&mut self, index: u32, segments: Option<u16>) -> bool {
        let slot = &self.in_flight[index];
        let Some(tag) = self.plug.last() else { return false };
        let request = &self.in_flight[tag];
        let Some(side) = MergeSide::of(request.sector, request.end(), slot.sector, slot.sectors) else {
            return false;
        };
        let merged = self.disk.settings().merge && self.merge_into(tag, index, side, segments);
        if merged {
            self.plug.merged(&self.in_flight[tag]);
            if self.plug.has_large_request() {
                // The slow path flushes the plug before it adds the next request.
                self.close_fast_path();
            }
        }
        merged
    }

    #[cold]
    fn try_throttled_merge(&mut self, index: u32, segments: Option<u16>) -> bool {
        let slot = &self.in_flight[index];
        let Some(tag) = self.dispatch.throttle().youngest(slot.operation) else { return false };
        let request = &self.in_flight[tag];
        let side = MergeSide::of(request.sector, request.end(), slot.sector, slot.sectors);
        let Some(side) = side.filter(|_| self.disk.settings().merge) else { return false };
        let merged = self.merge_into(tag, index, side, segments);
        if merged {
            self.trace_merge_into(tag, index);
        }
        merged
    }

    #[cold]
    fn try_scheduler_merge(&mut self, index: u32, segments: Option<u16>) -> bool {
        let slot = &self.in_flight[index];
        if !self.disk.settings().merge || !is_mergeable(slot.operation, slot.flags) {
            return false;
        }
        let Some(scheduler) = self.dispatch.scheduler() else { return false };
        let Some((tag, side)) =
            scheduler.find_merge(self.in_flight.requests(), slot.operation, slot.sector, slot.sectors)
        else {
            return false;
        };
        if !self.merge_into(tag, index, side, segments) {
            return false;
        }
        self.trace_merge_into(tag, index);
        if let Some(scheduler) = self.dispatch.scheduler_mut() {
            scheduler.merged(tag, self.in_flight.requests());
            match (side, scheduler.find_neighbour(self.in_flight.requests(), tag, side)) {
                (MergeSide::Back, Some(next)) => self.join(tag, next),
                (MergeSide::Front, Some(previous)) => self.join(previous, tag),
                (_, None) => {}
            }
        }
        true
    }

    /// Merges bio `index` into request `tag` if operation, flags and limits allow it. `segments` is the bio's
    /// number of segments, `None` if unknown.
    #[inline(always)]
    fn merge_into(&mut self, tag: Tag, index: u32, side: MergeSide, segments: Option<u16>) -> bool {
        let slot = &self.in_flight[index];
        let request = &self.in_flight[tag];
        if slot.operation != request.operation
            || !is_mergeable(slot.operation, slot.flags)
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

    /// Joins two requests of the scheduler that touch after a merge, and frees the tag of the second.
    fn join(&mut self, first: Tag, second: Tag) {
        let (head, tail) = (&self.in_flight[first], &self.in_flight[second]);
        let sectors = head.sectors + tail.sectors;
        let segments = u32::from(head.segments) + u32::from(tail.segments);
        if head.operation != tail.operation
            || head.flags.union(tail.flags).intersects(ALONE)
            || !self.disk.limits().allow(head.operation, head.sector, sectors, segments)
        {
            return;
        }
        let operation = head.operation;
        self.trace_fast_path();
        if let Some(tracer) = self.dispatch.tracer() {
            tracer.joined(first, second, self.in_flight.requests(), &mut self.clock);
        }
        self.in_flight.join(first, second);
        if let Some(scheduler) = self.dispatch.scheduler_mut() {
            scheduler.joined(first, second);
        }
        self.tags.freed().push(second);
        self.tags.share_freed();
        if self.disk.settings().iostats {
            self.stats.joined(operation.into());
        }
    }
}

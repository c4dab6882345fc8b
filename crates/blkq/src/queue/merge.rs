//! Merging: a bio that continues a request becomes part of it (block/blk-merge.c).

use crate::bio::Outline;
use crate::limits::{ALONE, MergeSide, is_mergeable};
use crate::queue::Queue;
use crate::request::NIL;
use crate::request::Request;
use crate::slab::FlushStep;
use crate::tags::Tag;

impl Queue {
    /// Merges bio `index` into the youngest request of the plug, or into a neighbour
    /// that the scheduler knows.
    #[inline]
    pub(crate) fn try_merge(&mut self, index: u32, outline: &Outline) -> bool {
        (self.plug.is_touched(outline.sector, outline.sectors) && self.try_plug_merge(index))
            || (self.scheduler.is_some() && self.try_scheduler_merge(index))
    }

    fn try_plug_merge(&mut self, index: u32) -> bool {
        let slot = &self.bios[index];
        let Some(&tag) = self.plug.requests.last() else { return false };
        let request = &self.requests[tag.index()];
        let Some(side) = MergeSide::of(request.sector, request.end(), slot.sector, slot.sectors) else {
            return false;
        };
        let merged = self.settings.merge && self.merge_into(tag, index, side);
        if merged {
            self.plug.merged(&self.requests[tag.index()]);
        }
        merged
    }

    fn try_scheduler_merge(&mut self, index: u32) -> bool {
        let slot = &self.bios[index];
        if !self.settings.merge || !is_mergeable(slot.operation, slot.flags) {
            return false;
        }
        let Some(scheduler) = &self.scheduler else { return false };
        let Some((tag, side)) =
            scheduler.find_merge(&self.requests, slot.operation, slot.sector, slot.sectors)
        else {
            return false;
        };
        if !self.merge_into(tag, index, side) {
            return false;
        }
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.merged(tag, &self.requests);
            match (side, scheduler.find_neighbour(&self.requests, tag, side)) {
                (MergeSide::Back, Some(next)) => self.join(tag, next),
                (MergeSide::Front, Some(previous)) => self.join(previous, tag),
                (_, None) => {}
            }
        }
        true
    }

    /// Makes bio `index` a part of request `tag`, if operation, flags and limits allow.
    fn merge_into(&mut self, tag: Tag, index: u32, side: MergeSide) -> bool {
        let slot = &self.bios[index];
        let request = &self.requests[tag.index()];
        if slot.operation != request.operation
            || !is_mergeable(slot.operation, slot.flags)
            || request.flags.intersects(ALONE)
            || slot.step != FlushStep::None
        {
            return false;
        }
        let segments = self.bios.count_segments(index, &self.zeroes);
        let total_segments = u32::from(request.segments) + u32::from(segments);
        let sectors = request.sectors + slot.sectors;
        let start = if side == MergeSide::Back { request.sector } else { slot.sector };
        if !self.limits.allow(slot.operation, start, sectors, total_segments) {
            return false;
        }
        let operation = slot.operation;
        self.link(tag, index, side);
        let request = &mut self.requests[tag.index()];
        request.sector = start;
        request.sectors = sectors;
        request.segments = total_segments as u16;
        if self.settings.iostats {
            self.stats.merged(operation.into());
        }
        true
    }

    fn link(&mut self, tag: Tag, index: u32, side: MergeSide) {
        let request: &mut Request = &mut self.requests[tag.index()];
        match side {
            MergeSide::Back => {
                self.bios[request.last_bio].next = index;
                self.bios[index].next = NIL;
                request.last_bio = index;
            }
            MergeSide::Front => {
                self.bios[index].next = request.first_bio;
                request.first_bio = index;
            }
        }
    }

    /// Joins two requests of the scheduler that have come to touch; the tag of the
    /// second is free again. The earlier start time wins.
    fn join(&mut self, first: Tag, second: Tag) {
        let (head, tail) = (&self.requests[first.index()], &self.requests[second.index()]);
        let sectors = head.sectors + tail.sectors;
        let segments = u32::from(head.segments) + u32::from(tail.segments);
        if head.operation != tail.operation
            || head.flags.union(tail.flags).intersects(ALONE)
            || !self.limits.allow(head.operation, head.sector, sectors, segments)
        {
            return;
        }
        let operation = head.operation;
        let (tail_first, tail_last, tail_start) = (tail.first_bio, tail.last_bio, tail.start_ns);
        let head_last = head.last_bio;
        self.bios[head_last].next = tail_first;
        let head = &mut self.requests[first.index()];
        head.last_bio = tail_last;
        head.sectors = sectors;
        head.segments = segments as u16;
        head.start_ns = head.start_ns.min(tail_start);
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.joined(first, second);
        }
        self.requests[second.index()] = Request::idle();
        self.in_use -= 1;
        self.tags.put(second);
        if self.settings.iostats {
            self.stats.joined(operation.into());
        }
    }
}

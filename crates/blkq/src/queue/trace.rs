//! Where the steps of a bio are traced.

use crate::limits::MergeSide;
use crate::tags::Tag;
use crate::trace::Probes;

use super::Queue;

impl Queue {
    /// Fires the probes from now on if somebody is attached to one, or no longer.
    #[cold]
    #[inline(never)]
    pub(super) fn check_probes(&mut self) {
        let probes = Probes::attached(self.disk.disk().number(), self.disk.index());
        let fires = self.dispatch.tracer().is_some_and(|tracer| tracer.has_probes());
        if probes.is_some() != fires {
            self.dispatch.change_tracer(|tracer| tracer.set_probes(probes));
        }
    }
}

/// The steps of each bio, out of line: a queue that is not traced pays a branch for each and no more.
impl Queue {
    /// Bio `index` was submitted.
    #[inline]
    pub(super) fn trace_queued(&mut self, index: u32) {
        if let Some(tracer) = self.dispatch.tracer() {
            tracer.queued(index, &self.in_flight[index], &mut self.clock);
        }
    }

    /// Request `tag` was begun, and is about to be plugged.
    #[cold]
    pub(super) fn trace_request(&mut self, tag: Tag) {
        if let Some(tracer) = self.dispatch.tracer() {
            tracer.begun(tag, &self.in_flight[tag], self.plug.is_empty(), &mut self.clock);
        }
    }

    /// Bio `index` became a request, or was merged: if with the youngest of the plug, that is traced. A
    /// merge in the scheduler, or into a request that waits for a limit, has been.
    #[inline]
    pub(super) fn trace_merge(&mut self, index: u32) {
        if self.dispatch.is_traced()
            && let Some(tag) = self.plug.last()
        {
            let request = &self.in_flight[tag];
            if request.first_bio != request.last_bio && [request.first_bio, request.last_bio].contains(&index)
            {
                self.trace_merge_into(tag, index);
            }
        }
    }

    /// Bio `index` was merged into request `tag`.
    #[cold]
    pub(super) fn trace_merge_into(&mut self, tag: Tag, index: u32) {
        if let Some(tracer) = self.dispatch.tracer() {
            let side = if self.in_flight[tag].last_bio == index { MergeSide::Back } else { MergeSide::Front };
            tracer.merged(tag, index, &self.in_flight[index], side, &mut self.clock);
        }
    }
}

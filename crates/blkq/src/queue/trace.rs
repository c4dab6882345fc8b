//! Where the steps of a bio are traced.

use std::sync::Arc;

use crate::limits::MergeSide;
use crate::tags::Tag;
use crate::trace::{Probes, TraceClient, TraceMemory, TraceWriter};

use super::Queue;

/// A trace begins and stops, and its settings change.
impl Queue {
    /// Traces the queue into `memory`, if there is one; else not any more.
    pub fn set_trace(&mut self, memory: Option<&Arc<TraceMemory>>) {
        self.trace_lane();
        self.close_lane();
        let index = self.disk.index();
        let writer = memory.and_then(|memory| TraceWriter::new(memory, index));
        let (plugged, in_flight) = (self.plug.requests().len(), self.in_flight.tags());
        let (clock, limits) = (self.disk.settings().clock, self.disk.limits());
        self.dispatch.change_tracer(|tracer| {
            tracer.set_writer(writer, plugged, in_flight);
            tracer.reload(clock, limits);
        });
    }

    /// Fires the probes from now on if somebody is attached to one, or no longer.
    #[cold]
    #[inline(never)]
    pub(super) fn check_probes(&mut self) {
        let probes = Probes::attached(self.disk.disk().number(), self.disk.index());
        let fires = self.dispatch.tracer().is_some_and(|tracer| tracer.has_probes());
        if probes.is_some() != fires {
            self.trace_lane();
            self.close_lane();
            let plugged = self.plug.requests().len();
            self.dispatch.change_tracer(|tracer| tracer.set_probes(probes, plugged));
        }
    }

    /// Takes over another clock, or size: the plug is empty.
    #[cold]
    pub(super) fn reload_tracer(&mut self) {
        let (clock, limits) = (self.disk.settings().clock, self.disk.limits());
        self.dispatch.change_tracer(|tracer| tracer.reload(clock, limits));
    }

    /// The client that submits the next bio, if that is to be traced.
    #[inline]
    pub fn set_trace_client(&mut self, client: impl FnOnce() -> TraceClient) {
        if let Some(tracer) = self.dispatch.tracer() {
            tracer.set_client(client(), self.plug.requests().len());
        }
    }
}

/// The steps of each bio, out of line: a queue that is not traced pays a branch for each and no more.
impl Queue {
    /// Traces the requests that the lane took, if the queue is traced: before any other event.
    #[inline]
    pub(super) fn trace_lane(&mut self) {
        if let Some(tracer) = self.dispatch.tracer() {
            tracer.lane_begun(self.plug.requests(), self.in_flight.requests(), &mut self.clock);
        }
    }

    /// Bio `index` was submitted.
    #[inline]
    pub(super) fn trace_queued(&mut self, index: u32) {
        self.trace_lane();
        if let Some(tracer) = self.dispatch.tracer() {
            tracer.queued(index, &self.in_flight[index], &mut self.clock);
        }
    }

    /// Request `tag` was begun, and is about to be plugged.
    #[cold]
    pub(super) fn trace_request(&mut self, tag: Tag) {
        self.trace_lane();
        if let Some(tracer) = self.dispatch.tracer() {
            tracer.begun(tag, &self.in_flight[tag], &mut self.clock);
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

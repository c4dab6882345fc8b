//! Trace points of the steps of a bio.

use std::sync::Arc;

use crate::limits::MergeSide;
use crate::tags::Tag;
use crate::trace::{Probes, TraceClient, TraceMemory, TraceWriter};

use super::Queue;

impl Queue {
    /// Starts a trace of the queue into `memory`; `None` stops the trace.
    pub fn set_trace(&mut self, memory: Option<&Arc<TraceMemory>>) {
        self.trace_fast_path();
        self.close_fast_path();
        let index = self.disk.index();
        let writer = memory.and_then(|memory| TraceWriter::new(memory, index));
        let (plugged, in_flight) = (self.plug.requests().len(), self.in_flight.tags());
        let (clock, limits) = (self.disk.settings().clock, self.disk.limits());
        self.dispatch.change_tracer(|tracer| {
            tracer.set_writer(writer, plugged, in_flight);
            tracer.reload(clock, limits);
        });
    }

    /// Starts or stops to fire USDT probes, depending on whether a tracer such as bpftrace is attached.
    #[cold]
    #[inline(never)]
    pub(super) fn check_probes(&mut self) {
        let probes = Probes::attached(self.disk.disk().number(), self.disk.index());
        let fires = self.dispatch.tracer().is_some_and(|tracer| tracer.has_probes());
        if probes.is_some() != fires {
            self.trace_fast_path();
            self.close_fast_path();
            let plugged = self.plug.requests().len();
            self.dispatch.change_tracer(|tracer| tracer.set_probes(probes, plugged));
        }
    }

    /// Applies a changed clock mode or device size. The plug must be empty.
    #[cold]
    pub(super) fn reload_tracer(&mut self) {
        let (clock, limits) = (self.disk.settings().clock, self.disk.limits());
        self.dispatch.change_tracer(|tracer| tracer.reload(clock, limits));
    }

    #[inline]
    pub fn set_trace_client(&mut self, client: impl FnOnce() -> TraceClient) {
        if let Some(tracer) = self.dispatch.tracer() {
            tracer.set_client(client(), self.plug.requests().len());
        }
    }
}

/// The steps of each bio. The tracer's part is out of line, so that a queue that is not traced pays one
/// branch for each step.
impl Queue {
    /// Records the requests that took the plug's fast path, if the queue is traced. Must be called before any
    /// other event is recorded, because events are in order.
    #[inline]
    pub(super) fn trace_fast_path(&mut self) {
        if let Some(tracer) = self.dispatch.tracer() {
            tracer.record_fast_path(self.plug.requests(), self.in_flight.requests(), &mut self.clock);
        }
    }

    #[inline]
    pub(super) fn trace_queued(&mut self, index: u32) {
        self.trace_fast_path();
        if let Some(tracer) = self.dispatch.tracer() {
            tracer.queued(index, &self.in_flight[index], &mut self.clock);
        }
    }

    #[cold]
    pub(super) fn trace_request(&mut self, tag: Tag) {
        self.trace_fast_path();
        if let Some(tracer) = self.dispatch.tracer() {
            tracer.begun(tag, &self.in_flight[tag], &mut self.clock);
        }
    }

    /// Records a merge of bio `index` into the youngest request of the plug, if it was merged there. Merges
    /// in the scheduler, or into a request that waits for a limit, are recorded where they are made.
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

    #[cold]
    pub(super) fn trace_merge_into(&mut self, tag: Tag, index: u32) {
        if let Some(tracer) = self.dispatch.tracer() {
            let side = if self.in_flight[tag].last_bio == index { MergeSide::Back } else { MergeSide::Front };
            tracer.merged(tag, index, &self.in_flight[index], side, &mut self.clock);
        }
    }
}

//! Trace points of the steps of a bio.

use std::sync::Arc;

use crate::clock::Clock;
use crate::limits::MergeSide;
use crate::tags::Tag;
use crate::trace::{Probes, TraceClient, TraceMemory, TraceWriter};

use super::Queue;
use super::in_flight::InFlight;
use super::tracer::Tracer;

impl Queue {
    /// Starts a trace of the queue into `memory`; `None` stops the trace.
    pub fn set_trace(&mut self, memory: Option<&Arc<TraceMemory>>) {
        let writer = memory.and_then(|memory| TraceWriter::new(memory, self.io.disk.index()));
        let in_flight = self.io.in_flight.tags().collect();
        self.change_tracer(|tracer, plugged| tracer.set_writer(writer, plugged, in_flight));
    }

    /// Starts or stops to fire USDT probes, depending on whether a tracer such as bpftrace is attached.
    #[cold]
    #[inline(never)]
    pub(super) fn check_probes(&mut self) {
        let probes = Probes::attached(self.io.disk.disk().number(), self.io.disk.index());
        let fires = self.io.tracer().is_some_and(Tracer::has_probes);
        if probes.is_some() != fires {
            self.change_tracer(|tracer, plugged| tracer.set_probes(probes, plugged));
        }
    }

    /// Applies `change` to the tracer, which gets the number of requests in the plug.
    #[cold]
    pub(super) fn change_tracer(&mut self, change: impl FnOnce(&mut Tracer, usize)) {
        self.trace_fast_path();
        self.close_fast_path();
        let plugged = self.plug.requests().len();
        self.io.change_tracer(|tracer| change(tracer, plugged));
        self.dispatch.update(self.io.tracer());
    }

    #[inline]
    pub fn set_trace_client(&mut self, client: impl FnOnce() -> TraceClient) {
        let plugged = self.plug.requests().len();
        self.io.trace(|tracer, _, _| tracer.set_client(client(), plugged));
    }
}

/// The steps of each bio. The tracer's part is out of line, so that a queue that is not traced pays one
/// branch for each step.
impl Queue {
    /// Records the requests that took the plug's fast path, if the queue is traced. Must be called before any
    /// other event is recorded, because events are in order.
    #[inline]
    pub(super) fn trace_fast_path(&mut self) {
        let plug = self.plug.requests();
        self.io.trace(|tracer, in_flight, clock| tracer.record_fast_path(plug, in_flight.requests(), clock));
    }

    /// Calls `record` if the queue is traced, after the fast path was recorded.
    #[inline]
    pub(super) fn trace(&mut self, record: impl FnOnce(&mut Tracer, &InFlight, &mut Clock)) {
        self.trace_fast_path();
        self.io.trace(record);
    }

    #[inline]
    pub(super) fn trace_queued(&mut self, index: u32) {
        self.trace(|tracer, in_flight, clock| tracer.queued(index, &in_flight[index], clock));
    }

    #[cold]
    pub(super) fn trace_request(&mut self, tag: Tag) {
        self.trace(|tracer, in_flight, clock| tracer.begun(tag, &in_flight[tag], clock));
    }

    /// Records a merge of bio `index` into the youngest request of the plug, if it was merged there. Merges
    /// in the scheduler, or into a request that waits for a limit, are recorded where they are made.
    #[inline]
    pub(super) fn trace_merge(&mut self, index: u32) {
        if self.io.is_traced()
            && let Some(tag) = self.plug.last()
        {
            let request = &self.io.in_flight[tag];
            if request.first_bio != request.last_bio && [request.first_bio, request.last_bio].contains(&index)
            {
                self.trace_merge_into(tag, index);
            }
        }
    }

    #[cold]
    pub(super) fn trace_merge_into(&mut self, tag: Tag, index: u32) {
        self.trace(|tracer, in_flight, clock| {
            let side = if in_flight[tag].last_bio == index { MergeSide::Back } else { MergeSide::Front };
            tracer.merged(tag, index, &in_flight[index], side, clock);
        });
    }
}

//! Dispatch of a traced queue: records the plug, then issues it.

use crate::clock::Clock;
use crate::driver::DriverContext;
use crate::stats::StatsWriter;
use crate::tags::Tag;
use crate::trace::EventKind;

use super::super::disk_view::DiskView;
use super::super::in_flight::InFlight;
use super::super::tracer::Tracer;
use super::Dispatch;

impl Dispatch {
    /// Applies `change` to the tracer, which is created before and removed after as needed.
    #[cold]
    pub fn change_tracer(&mut self, change: impl FnOnce(&mut Tracer)) {
        let mut tracer = self.tracer.take().unwrap_or_default();
        change(&mut tracer);
        self.tracer = tracer.is_on().then_some(tracer);
        self.update_flags();
    }

    #[inline]
    pub fn is_traced(&self) -> bool {
        self.tracer.is_some()
    }

    /// Records that the plug was flushed with the requests of `batch`, and that they were inserted into the
    /// scheduler if there is one.
    pub fn trace_unplug(&mut self, batch: &[Tag], in_flight: &InFlight, clock: &mut Clock) {
        let is_inserted = self.has_scheduler();
        if let Some(tracer) = self.tracer() {
            tracer.unplugged(batch, in_flight.requests(), clock);
            if is_inserted {
                tracer.requests(EventKind::Insert, batch, in_flight.requests(), clock);
            }
        }
    }

    #[inline]
    pub fn tracer(&mut self) -> Option<&mut Tracer> {
        self.tracer.as_deref_mut()
    }

    pub fn has_only_tracer(&self) -> bool {
        self.tracer.is_some()
            && self.scheduler.is_none()
            && self.device_time.is_none()
            && !self.throttle.is_on()
            && self.requeued.is_empty()
    }

    /// [`Dispatch::issue_directly`] for a traced queue. `plug` must be the requests of a whole plug, so that
    /// its events fit into one record.
    #[inline(never)]
    pub fn issue_traced(
        &mut self,
        plug: &[Tag],
        disk: &DiskView,
        stats: &mut StatsWriter,
        cx: &mut DriverContext<'_>,
    ) {
        let taken = self.issue(plug, disk, stats, cx, |tracer, cx| {
            if let Some(tracer) = tracer {
                tracer.issued(plug, cx.requests, cx.clock);
            }
        });
        if taken < plug.len() {
            match &mut self.tracer {
                Some(tracer) if self.blocked_by_quiesce => tracer.unplugged(plug, cx.requests, cx.clock),
                _ => self.trace(EventKind::Requeue, &plug[taken..], cx),
            }
            self.requeued.extend(&plug[taken..]);
        }
    }

    #[cold]
    pub(super) fn trace(&mut self, kind: EventKind, tags: &[Tag], cx: &mut DriverContext<'_>) {
        if let Some(tracer) = &mut self.tracer {
            tracer.requests(kind, tags, cx.requests, cx.clock);
        }
    }
}

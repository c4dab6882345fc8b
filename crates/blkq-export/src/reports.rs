//! Reports of events that clients cause. The owner of a server takes the reports and logs them, because engines
//! must not write logs. A server may report only a few events of each kind per minute, so that clients cannot
//! flood the log.

use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::event::signal;
use crate::sync::{Mutex, MutexGuard};

/// Most reports of one kind within [`WINDOW`]. Further events are only counted.
const REPORTED_MAX: u32 = 8;
const WINDOW: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Default)]
struct Limit {
    since: Option<Instant>,
    reported: u32,
    unreported: u64,
}

struct Queue<T, const KINDS: usize> {
    limits: [Limit; KINDS],
    reports: Vec<T>,
}

/// Reports that the owner has not taken yet, at most [`REPORTED_MAX`] of each kind for each minute.
pub struct Reports<T, const KINDS: usize> {
    /// Locked to push a report, and to take all of them.
    queue: Mutex<Queue<T, KINDS>>,
    /// An eventfd that is written when there are reports to take.
    event: Option<Arc<OwnedFd>>,
}

impl<T, const KINDS: usize> Reports<T, KINDS> {
    /// Without `event`, nothing is reported.
    pub fn new(event: Option<Arc<OwnedFd>>) -> Reports<T, KINDS> {
        let queue = Queue { limits: [Limit::default(); KINDS], reports: Vec::new() };
        Reports { queue: Mutex::new(queue), event }
    }

    fn queue(&self) -> MutexGuard<'_, Queue<T, KINDS>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a report of the kind with the index `kind`, or only counts the event if there were too many. The
    /// arguments of `report` are the number of earlier events of this kind that were only counted, and
    /// whether further ones are only counted until a minute has passed.
    pub fn push(&self, kind: usize, report: impl FnOnce(u64, bool) -> T) {
        let Some(event) = &self.event else { return };
        let mut queue = self.queue();
        let Queue { limits, reports } = &mut *queue;
        let limit = &mut limits[kind];
        if limit.since.is_none_or(|since| since.elapsed() >= WINDOW) {
            (limit.since, limit.reported) = (Some(Instant::now()), 0);
        }
        if limit.reported == REPORTED_MAX || reports.len() >= KINDS * REPORTED_MAX as usize {
            limit.unreported += 1;
            return;
        }
        limit.reported += 1;
        let (unreported, last) = (std::mem::take(&mut limit.unreported), limit.reported == REPORTED_MAX);
        reports.push(report(unreported, last));
        drop(queue);
        signal(event);
    }

    /// Takes the reports since the last call, oldest first.
    pub fn take(&self) -> Vec<T> {
        std::mem::take(&mut self.queue().reports)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn many_events_of_one_kind_do_not_hide_other_kinds() {
        let event = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let reports = Reports::<_, 2>::new(Some(event.clone()));
        let push = |kind| reports.push(kind, |unreported, last| (kind, unreported, last));
        (0..100).for_each(|_| push(0));
        push(1);
        let taken = reports.take();
        assert_eq!(taken.len(), REPORTED_MAX as usize + 1);
        assert!(taken[..7].iter().all(|(.., last)| !last) && taken[7].2);
        assert_eq!(taken[8], (1, 0, false));
        let mut count = [0; 8];
        rustix::io::read(&*event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 9);
        // The test pretends that a minute has passed.
        reports.queue.lock().unwrap().limits[0].since = Instant::now().checked_sub(WINDOW);
        push(0);
        assert_eq!(reports.take()[0].1, 92);
    }

    #[test]
    fn events_are_not_reported_without_an_eventfd() {
        let reports = Reports::<(), 1>::new(None);
        reports.push(0, |_, _| unreachable!());
        assert_eq!(reports.take(), []);
    }
}

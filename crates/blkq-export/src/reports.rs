//! Reports of events that clients cause. The owner of a server takes the reports and logs them, because engines
//! must not write logs. A server may report only a few events of each kind per minute, so that clients cannot
//! flood the log.

use std::mem::Discriminant;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkq::sync::{Mutex, lock};

/// Most reports of one kind within [`WINDOW`]. Further events are only counted.
const REPORTED_MAX: u32 = 8;
const WINDOW: Duration = Duration::from_secs(60);
/// Most reports that wait to be taken.
const WAITING_MAX: usize = 64;

/// Signals `event`, an eventfd that this process created, and that does not block. A write fails only if the counter is
/// at its limit, and then the event is signaled already.
pub fn signal(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

struct Limit<E> {
    kind: Discriminant<E>,
    since: Option<Instant>,
    reported: u32,
    unreported: u64,
}

struct Queue<T, E> {
    /// One for each variant of which there was an event.
    limits: Vec<Limit<E>>,
    reports: Vec<T>,
}

/// Reports of events `E` that the owner has not taken yet, at most [`REPORTED_MAX`] of each kind for each minute.
pub struct Reports<T, E> {
    /// Locked to push a report, and to take all of them.
    queue: Mutex<Queue<T, E>>,
    /// An eventfd that is written when there are reports to take.
    event: Option<Arc<OwnedFd>>,
}

impl<T, E> Reports<T, E> {
    /// Without `event`, nothing is reported.
    pub fn new(event: Option<Arc<OwnedFd>>) -> Reports<T, E> {
        let queue = Queue { limits: Vec::new(), reports: Vec::new() };
        Reports { queue: Mutex::new(queue), event }
    }

    /// Adds a report of an event of the variant `kind`, or only counts the event if there were too many. The
    /// arguments of `report` are the number of earlier events of this kind that were only counted, and
    /// whether further ones are only counted until a minute has passed.
    pub fn push(&self, kind: Discriminant<E>, report: impl FnOnce(u64, bool) -> T) {
        let Some(event) = &self.event else { return };
        let mut queue = lock(&self.queue);
        let Queue { limits, reports } = &mut *queue;
        let index = limits.iter().position(|limit| limit.kind == kind).unwrap_or_else(|| {
            limits.push(Limit { kind, since: None, reported: 0, unreported: 0 });
            limits.len() - 1
        });
        let limit = &mut limits[index];
        if limit.since.is_none_or(|since| since.elapsed() >= WINDOW) {
            (limit.since, limit.reported) = (Some(Instant::now()), 0);
        }
        if limit.reported == REPORTED_MAX || reports.len() >= WAITING_MAX {
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
        std::mem::take(&mut lock(&self.queue).reports)
    }
}

#[cfg(test)]
mod tests {
    use std::mem::discriminant;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn many_events_of_one_kind_do_not_hide_other_kinds() {
        let event = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let reports = Reports::new(Some(event.clone()));
        let push =
            |kind: Option<()>| reports.push(discriminant(&kind), |unreported, last| (kind, unreported, last));
        (0..100).for_each(|_| push(None));
        push(Some(()));
        let taken = reports.take();
        assert_eq!(taken.len(), REPORTED_MAX as usize + 1);
        assert!(taken[..7].iter().all(|(.., last)| !last) && taken[7].2);
        assert_eq!(taken[8], (Some(()), 0, false));
        let mut count = [0; 8];
        rustix::io::read(&*event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 9);
        // The test pretends that a minute has passed.
        let minute_ago = Instant::now().checked_sub(WINDOW);
        lock(&reports.queue).limits.iter_mut().for_each(|limit| limit.since = minute_ago);
        push(None);
        assert_eq!(reports.take()[0].1, 92);
    }

    #[test]
    fn events_are_not_reported_without_an_eventfd() {
        let reports = Reports::<(), Option<()>>::new(None);
        reports.push(discriminant(&None), |_, _| unreachable!());
        assert_eq!(reports.take(), []);
    }
}

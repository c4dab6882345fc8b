//! Clients that the server rejected or disconnected. The owner logs them, as engines must not write logs.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Rejections of one kind that are recorded within [`WINDOW`]. Further ones are only counted, so that clients
/// cannot flood the log.
const REPORTED_MAX: u32 = 8;
const WINDOW: Duration = Duration::from_secs(60);

/// The reason why the server rejected or disconnected a client.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Reason {
    /// The given maximum number of connections was reached.
    TooMany(usize),
    /// There was no memory for another connection.
    NoMemory,
    /// The server requires TLS and the client did not ask for it.
    WithoutTls,
    /// TLS failed; the text says how.
    Tls(String),
    /// The client broke the protocol in the handshake.
    Handshake,
    /// The client broke the protocol in the transmission phase.
    Request,
    /// The client did not finish its handshake, send a payload or take its replies in time.
    Late,
}

impl Reason {
    fn kind(&self) -> usize {
        match self {
            Reason::TooMany(_) => 0,
            Reason::NoMemory => 1,
            Reason::WithoutTls => 2,
            Reason::Tls(_) => 3,
            Reason::Handshake => 4,
            Reason::Request => 5,
            Reason::Late => 6,
        }
    }
}

const KINDS: usize = 7;

/// A client that the server rejected or disconnected.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Rejection {
    /// The client: `pid 123, uid 0` for a unix socket, or its address and port.
    pub peer: String,
    /// The reason of the rejection.
    pub reason: Reason,
    /// The number of earlier rejections of this kind that were counted only.
    pub unreported: u64,
    /// Whether further rejections of this kind are counted only, until a minute has passed.
    pub last: bool,
}

#[derive(Clone, Copy, Default)]
struct Kind {
    since: Option<Instant>,
    reported: u32,
    unreported: u64,
}

#[derive(Default)]
struct Queue {
    kinds: [Kind; KINDS],
    rejections: Vec<Rejection>,
}

/// Rejections that the owner has not taken yet, at most [`REPORTED_MAX`] of each kind for each minute.
pub(super) struct Rejections {
    queue: Mutex<Queue>,
    /// An eventfd that is written when there are rejections to take.
    event: Option<Arc<OwnedFd>>,
}

impl Rejections {
    pub fn new(event: Option<Arc<OwnedFd>>) -> Rejections {
        Rejections { queue: Mutex::default(), event }
    }

    /// Only counts the rejection if there were too many. Without an event, does nothing.
    pub fn push(&self, reason: Reason, peer: impl FnOnce() -> String) {
        let Some(event) = &self.event else { return };
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let Queue { kinds, rejections } = &mut *queue;
        let kind = &mut kinds[reason.kind()];
        if kind.since.is_none_or(|since| since.elapsed() >= WINDOW) {
            (kind.since, kind.reported) = (Some(Instant::now()), 0);
        }
        if kind.reported == REPORTED_MAX || rejections.len() >= KINDS * REPORTED_MAX as usize {
            kind.unreported += 1;
            return;
        }
        kind.reported += 1;
        let (unreported, last) = (std::mem::take(&mut kind.unreported), kind.reported == REPORTED_MAX);
        rejections.push(Rejection { peer: peer(), reason, unreported, last });
        drop(queue);
        // If the write fails, the counter of the eventfd is at its maximum, so the reader will be woken
        // anyway.
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    }

    pub fn take(&self) -> Vec<Rejection> {
        std::mem::take(&mut self.queue.lock().unwrap_or_else(PoisonError::into_inner).rejections)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn many_rejections_of_one_kind_do_not_hide_other_kinds() {
        let event = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let rejections = Rejections::new(Some(event.clone()));
        (0..100).for_each(|_| rejections.push(Reason::TooMany(64), || "a".into()));
        rejections.push(Reason::Request, || "b".into());
        let taken = rejections.take();
        assert_eq!(taken.len(), REPORTED_MAX as usize + 1);
        assert!(taken[..7].iter().all(|rejection| !rejection.last) && taken[7].last);
        assert_eq!(
            taken[8],
            Rejection { peer: "b".into(), reason: Reason::Request, unreported: 0, last: false }
        );
        let mut count = [0; 8];
        rustix::io::read(&*event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 9);
        // The test pretends that a minute has passed.
        rejections.queue.lock().unwrap().kinds[0].since = Instant::now().checked_sub(WINDOW);
        rejections.push(Reason::TooMany(64), || "c".into());
        assert_eq!(rejections.take()[0].unreported, 92);
    }

    #[test]
    fn rejections_are_not_recorded_without_an_event() {
        let rejections = Rejections::new(None);
        rejections.push(Reason::Late, || unreachable!());
        assert_eq!(rejections.take(), []);
    }
}

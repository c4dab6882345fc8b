//! Clients that were turned away or dropped, and why: for a log, which no engine writes.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Rejections of one kind that are reported within [`WINDOW`]; more are only counted.
const REPORTED_MAX: u32 = 8;
const WINDOW: Duration = Duration::from_secs(60);

/// Why a client was turned away, or dropped.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Reason {
    /// There were as many connections as there may be: so many.
    TooMany(usize),
    /// There was no memory for one more connection.
    NoMemory,
    /// It did not ask for TLS, which is required.
    WithoutTls,
    /// TLS failed: how, in words.
    Tls(String),
    /// It broke the protocol in the handshake.
    Handshake,
    /// It broke the protocol with a request.
    Request,
    /// It was late with its handshake, a payload, or taking its replies.
    Late,
}

impl Reason {
    /// Number of the kind.
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

/// Kinds of reasons.
const KINDS: usize = 7;

/// A client that was turned away, or dropped.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Rejection {
    /// The client: `pid 123, uid 0`, or an address and port.
    pub peer: String,
    /// Why.
    pub reason: Reason,
    /// Others before it, for reasons of this kind, that were only counted.
    pub unreported: u64,
    /// Whether others within the next minute are only counted.
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

/// Rejections that nobody has taken yet. At most [`REPORTED_MAX`] of each kind.
pub(super) struct Rejections {
    /// Held for a push or a swap, when a client is rejected.
    queue: Mutex<Queue>,
    /// An eventfd that is written when there is one to be taken.
    event: Option<Arc<OwnedFd>>,
}

impl Rejections {
    pub fn new(event: Option<Arc<OwnedFd>>) -> Rejections {
        Rejections { queue: Mutex::default(), event }
    }

    /// Notes that `peer` was rejected, unless too many were or nobody wants to know.
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
        // Full, it has been written and not been read yet.
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    }

    /// Those since the last call, oldest first.
    pub fn take(&self) -> Vec<Rejection> {
        std::mem::take(&mut self.queue.lock().unwrap_or_else(PoisonError::into_inner).rejections)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn a_flood_is_reported_once_and_other_kinds_still_are() {
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
        // A minute later.
        rejections.queue.lock().unwrap().kinds[0].since = Instant::now().checked_sub(WINDOW);
        rejections.push(Reason::TooMany(64), || "c".into());
        assert_eq!(rejections.take()[0].unreported, 92);
    }

    #[test]
    fn without_a_reader_nothing_is_kept() {
        let rejections = Rejections::new(None);
        rejections.push(Reason::Late, || unreachable!());
        assert_eq!(rejections.take(), []);
    }
}

//! The control thread of a device: accepts front ends, one at a time, and does what they ask for. It
//! waits in poll(2), and for engines that drain a ring; for no front end.

use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};

use super::channel::{Channel, Closed};
use super::foreign::{Foreign, are_too_many};
use super::message::refuse;
use super::session::Session;
use super::shared::Shared;
use super::status::Event;
use crate::nbd::Listener;
use crate::peer::Peer;
use crate::sync::atomic::Ordering::SeqCst;

/// How long nothing is accepted after that failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Messages of a front end that are handled before all else is looked at.
const MESSAGES_MAX: usize = 64;

/// A front end.
struct Connected {
    channel: Channel,
    session: Session,
}

/// The control thread.
pub struct Control {
    shared: Arc<Shared>,
    listener: Listener,
    connected: Option<Connected>,
    /// When to accept again.
    accept_at: Option<Instant>,
}

/// The result of poll(2).
struct Ready {
    woken: bool,
    arrival: bool,
    front_end: bool,
    /// Of the socket of this side's requests.
    requests: PollFlags,
}

impl Control {
    /// The control thread of the device of `shared`, which accepts from `listener`.
    pub(super) fn new(shared: Arc<Shared>, listener: Listener) -> Control {
        Control { shared, listener, connected: None, accept_at: None }
    }

    /// Serves front ends until the device stops.
    pub fn run(mut self) {
        while !self.shared.stopping.load(SeqCst) {
            let ready = self.wait();
            // Nothing that a front end sends shall end the thread.
            if catch_unwind(AssertUnwindSafe(|| self.turn(&ready))).is_err() {
                self.disconnect(Some("an internal error: please report it".to_owned()));
            }
        }
        self.disconnect(None);
        close_listener(self.listener);
    }

    /// Waits until there is something to do.
    fn wait(&mut self) -> Ready {
        let now = Instant::now();
        let pause = self.accept_at.map(|at| at.saturating_duration_since(now));
        let accepts = pause.is_none_or(|pause| pause.is_zero());
        let deadline = self.connected.as_ref().and_then(|connected| connected.channel.deadline());
        let left = deadline.map(|deadline| deadline.saturating_duration_since(now));
        let timeout = pause.filter(|_| !accepts).into_iter().chain(left).min();
        let timeout =
            timeout.map(|it| Timespec { tv_sec: it.as_secs() as i64, tv_nsec: it.subsec_nanos().into() });
        let mut polls = vec![PollFd::from_borrowed_fd(self.shared.wake.as_fd(), PollFlags::IN)];
        let events = if accepts { PollFlags::IN } else { PollFlags::empty() };
        polls.push(PollFd::from_borrowed_fd(self.listener.as_fd(), events));
        if let Some(Connected { channel, session }) = &self.connected {
            let (read, write) = channel.interest();
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, read);
            events.set(PollFlags::OUT, write);
            polls.push(PollFd::from_borrowed_fd(channel.as_fd(), events));
            if let Some(socket) = session.request_socket() {
                polls.push(PollFd::from_borrowed_fd(socket, PollFlags::IN));
            }
        }
        // An error, and an interruption, are looked at as if all were ready: nothing here blocks.
        match poll(&mut polls, timeout.as_ref()) {
            Ok(_) => Ready {
                woken: !polls[0].revents().is_empty(),
                arrival: accepts && !polls[1].revents().is_empty(),
                front_end: polls.get(2).is_some_and(|poll| !poll.revents().is_empty()),
                requests: polls.get(3).map_or(PollFlags::empty(), PollFd::revents),
            },
            Err(_) => Ready { woken: true, arrival: false, front_end: true, requests: PollFlags::empty() },
        }
    }

    fn turn(&mut self, ready: &Ready) {
        if ready.woken {
            take_wakeup(&self.shared, self.connected.as_mut().map(|connected| &mut connected.session));
        }
        if !ready.requests.is_empty()
            && let Some(Connected { session, .. }) = &mut self.connected
        {
            session.close_request_socket(ready.requests);
        }
        let exchanged = if ready.front_end { self.exchange() } else { Ok(()) };
        if let Err(closed) = exchanged.and_then(|()| self.check_deadline()) {
            self.disconnect(match closed {
                Closed::ByPeer => None,
                Closed::Violation(refusal) => Some(refusal.0),
                Closed::Socket(errno) => Some(format!("its socket: {errno}")),
            });
        }
        if ready.arrival {
            self.accept();
        }
    }

    /// Sends and receives what there is.
    fn exchange(&mut self) -> Result<(), Closed> {
        let Some(Connected { channel, session }) = &mut self.connected else { return Ok(()) };
        channel.flush()?;
        for _ in 0..MESSAGES_MAX {
            if !channel.interest().0 || self.shared.stopping.load(SeqCst) {
                break;
            }
            if are_too_many() {
                return Err(Closed::Violation(refuse("too many descriptors of front ends cannot be closed")));
            }
            let Some(message) = channel.receive()? else { break };
            if let Some(reply) = session.handle(message).map_err(Closed::Violation)? {
                channel.send(reply)?;
            }
        }
        Ok(())
    }

    fn check_deadline(&self) -> Result<(), Closed> {
        self.connected.as_ref().map_or(Ok(()), |connected| connected.channel.check_deadline(Instant::now()))
    }

    fn accept(&mut self) {
        self.accept_at = None;
        if are_too_many() {
            // One more socket could not be closed either.
            return self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
        }
        let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(socket) => Foreign::new(socket),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
            // Out of descriptors or memory: again at once would only fail again.
            Err(_) => return self.accept_at = Some(Instant::now() + ACCEPT_PAUSE),
        };
        let peer = peer_name(&socket);
        // Dropped, the socket of one that is not let in closes.
        if self.shared.registry.admit(&peer) {
            match Session::new(self.shared.clone(), &peer) {
                Ok(session) => self.connected = Some(Connected { channel: Channel::new(socket), session }),
                Err(_) => self.shared.registry.leave(),
            }
        }
    }

    /// The front end has disconnected, or broke the protocol: its rings are drained, and its memory unmapped.
    fn disconnect(&mut self, violation: Option<String>) {
        let Some(Connected { channel, session }) = self.connected.take() else { return };
        drop(channel);
        if let Some(reason) = violation {
            self.shared.registry.report(session.peer(), Event::Violation(reason));
        }
        // Whatever becomes of it, another one may come.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(session)));
        self.shared.registry.leave();
    }
}

/// Does what the control thread was woken for. The wake-up is forgotten first: all that is noted after
/// that brings another.
pub fn take_wakeup(shared: &Shared, session: Option<&mut Session>) {
    shared.wake.clear();
    if let Some(session) = session {
        session.woken();
    }
}

/// Closes `listener`. Connections that wait there, with whatever descriptors in their queues, are
/// closed by other threads.
pub fn close_listener(listener: Listener) {
    // An inherited socket is that of other processes too.
    if listener.unix_path().is_some() && shutdown(&listener, Shutdown::Both).is_ok() {
        while let Ok(socket) = accept_with(&listener, SocketFlags::CLOEXEC) {
            drop(Foreign::new(socket));
        }
    }
}

fn peer_name(socket: &Foreign) -> String {
    match Peer::of(socket) {
        Ok(Peer { pid, uid }) => {
            format!("pid {}, uid {}", rustix::process::Pid::as_raw(pid), uid.as_raw())
        }
        Err(_) => "unknown".into(),
    }
}

//! The control thread of a device: accepts front ends, one at a time, and executes their requests. The thread
//! blocks only in poll(2), and while an engine drains a ring; it never waits for a front end.

use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};

use super::channel::{Channel, Closed};
use super::message::refuse;
use super::session::Session;
use super::status::{Event, Shared};
use super::untrusted_fd::{UntrustedFd, are_too_many};
use crate::listener::Listener;
use crate::peer::peer_name;
use crate::sync::atomic::Ordering::SeqCst;

const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Most messages of a front end that are handled before other events are checked.
const MESSAGES_MAX: usize = 64;

pub struct Control {
    shared: Arc<Shared>,
    listener: Listener,
    connected: Option<(Channel, Session)>,
    accept_at: Option<Instant>,
}

struct Ready {
    arrival: bool,
    front_end: bool,
    /// Events of the socket for requests of the back end ([`Session::request_socket`]).
    requests: PollFlags,
}

impl Control {
    pub(super) fn new(shared: Arc<Shared>, listener: Listener) -> Control {
        Control { shared, listener, connected: None, accept_at: None }
    }

    pub fn run(mut self) {
        while !self.shared.stopping.load(SeqCst) {
            let ready = self.wait();
            // A panic that a front end provokes must not end the thread: it closes the connection.
            if catch_unwind(AssertUnwindSafe(|| self.turn(&ready))).is_err() {
                self.disconnect(Some("internal error; please report it".to_owned()));
            }
        }
        self.disconnect(None);
        close_listener(self.listener);
    }

    fn wait(&mut self) -> Ready {
        let now = Instant::now();
        let accepts = self.accept_at.is_none_or(|at| at <= now);
        let deadline = self.connected.as_ref().and_then(|(channel, _)| channel.deadline());
        let until = self.accept_at.filter(|_| !accepts).into_iter().chain(deadline).min();
        let timeout = until.and_then(|until| Timespec::try_from(until.saturating_duration_since(now)).ok());
        let mut polls = vec![PollFd::from_borrowed_fd(self.shared.wake.as_fd(), PollFlags::IN)];
        if let Some((channel, session)) = &self.connected {
            let events = if channel.has_reply() { PollFlags::OUT } else { PollFlags::IN };
            polls.push(PollFd::from_borrowed_fd(channel.as_fd(), events));
            if let Some(socket) = session.request_socket() {
                polls.push(PollFd::from_borrowed_fd(socket, PollFlags::IN));
            }
        }
        // During a pause, the listener is not polled at all: poll(2) returns immediately for a listener that
        // another process has shut down, whatever the events.
        polls.extend(accepts.then(|| PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN)));
        // An error or an interruption returns no events.
        let _ = poll(&mut polls, timeout.as_ref());
        let arrival = accepts && polls.pop().is_some_and(|poll| !poll.revents().is_empty());
        let events = |index: usize| polls.get(index).map_or(PollFlags::empty(), PollFd::revents);
        Ready { arrival, front_end: !events(1).is_empty(), requests: events(2) }
    }

    fn turn(&mut self, ready: &Ready) {
        take_wakeup(&self.shared, self.connected.as_mut().map(|(_, session)| session));
        if !ready.requests.is_empty()
            && let Some((_, session)) = &mut self.connected
        {
            session.close_request_socket(ready.requests);
        }
        if let Err(closed) = self.exchange(ready.front_end) {
            self.disconnect(match closed {
                Closed::ByPeer => None,
                Closed::Violation(error) => Some(error.to_string()),
                Closed::Socket(errno) => Some(format!("socket error: {errno}")),
            });
        }
        if ready.arrival {
            self.accept();
        }
    }

    /// Handles messages of the front end, if its socket is ready.
    fn exchange(&mut self, is_ready: bool) -> Result<(), Closed> {
        let Some((channel, session)) = &mut self.connected else { return Ok(()) };
        channel.flush()?;
        for _ in 0..MESSAGES_MAX {
            if !is_ready || channel.has_reply() || self.shared.stopping.load(SeqCst) {
                break;
            }
            if are_too_many() {
                let why = "too many descriptors of front ends hang when they are closed";
                return Err(Closed::Violation(refuse(why)));
            }
            let Some(message) = channel.receive()? else { break };
            if let Some(reply) = session.handle(message).map_err(Closed::Violation)? {
                channel.send(reply)?;
            }
        }
        channel.check_deadline(Instant::now())
    }

    fn accept(&mut self) {
        self.accept_at = None;
        if are_too_many() {
            // Another socket could not be closed either.
            return self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
        }
        let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(socket) => UntrustedFd::new(socket),
            Err(Errno::INTR | Errno::CONNABORTED) => return,
            // Descriptors or memory are exhausted, or the listener was shut down. An immediate retry would fail,
            // too.
            Err(_) => return self.accept_at = Some(Instant::now() + ACCEPT_PAUSE),
        };
        let peer = peer_name(&socket);
        // If the front end is rejected, dropping the socket closes the connection.
        if self.shared.registry.admit(&peer) {
            let session = Session::new(self.shared.clone(), &peer);
            self.connected = Some((Channel::new(socket), session));
        }
    }

    /// Drains the rings and unmaps the memory. `violation`: how the front end violated the protocol.
    fn disconnect(&mut self, violation: Option<String>) {
        let Some((channel, session)) = self.connected.take() else { return };
        drop(channel);
        if let Some(reason) = violation {
            self.shared.registry.report(session.peer(), Event::Violation(reason));
        }
        // Another front end may connect even if the drop panics.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(session)));
        self.shared.registry.leave();
    }
}

/// The event is cleared before the reasons are read: a later reason then wakes the thread again.
pub fn take_wakeup(shared: &Shared, session: Option<&mut Session>) {
    shared.wake.clear();
    if let Some(session) = session {
        session.handle_wakeup();
    }
}

/// Closes `listener`, and the connections that wait there. Other threads close these connections, because
/// their queues may contain any descriptors.
pub fn close_listener(listener: Listener) {
    // Only a socket that this process created is shut down. Other processes share an inherited one.
    if listener.unix_path().is_some() && shutdown(&listener, Shutdown::Both).is_ok() {
        while let Ok(socket) = accept_with(&listener, SocketFlags::CLOEXEC) {
            drop(UntrustedFd::new(socket));
        }
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use std::os::unix::net::UnixListener;

    use blkq::Disk;
    use blkq::drivers::null::{Null, NullOptions};

    use super::*;
    use crate::listener::{Listen, SocketAccess};

    #[test]
    fn a_listener_that_is_shut_down_does_not_keep_the_thread_busy() {
        let disk = Disk::builder(Box::new(Null::new(NullOptions::new(1 << 20)).unwrap())).build().unwrap();
        let shared = Arc::new(Shared::new(&disk, Vec::new(), "").unwrap());
        let path = std::env::temp_dir().join(format!("blkq-shut-down-{}.sock", std::process::id()));
        let socket = UnixListener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let other_holder = socket.try_clone().unwrap();
        let mut control =
            Control::new(shared, Listen::Inherited(socket.into()).listen(SocketAccess::default()).unwrap());
        shutdown(&other_holder, Shutdown::Both).unwrap();
        let begin = Instant::now();
        for _ in 0..4 {
            let ready = control.wait();
            control.turn(&ready);
        }
        assert!(begin.elapsed() >= ACCEPT_PAUSE, "the thread waits in between");
    }
}

//! The control thread of a device: accepts front ends, one at a time, and does what they ask for. It
//! waits in poll(2), and for engines that drain a ring; for no front end.

use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::channel::{Channel, Closed};
use super::session::Session;
use super::shared::Shared;
use super::status::Event;
use crate::nbd::Listener;
use crate::peer::Peer;

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
    front_end: PollFlags,
}

impl Control {
    /// The control thread of the device of `shared`, which accepts from `listener`.
    pub fn new(shared: Arc<Shared>, listener: Listener) -> Control {
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
    }

    fn wait(&mut self) -> Ready {
        let now = Instant::now();
        let pause = self.accept_at.map(|at| at.saturating_duration_since(now));
        let accepts = pause.is_none_or(|pause| pause.is_zero());
        let timeout = if accepts { None } else { pause };
        let timeout = timeout
            .map(|it| Timespec { tv_sec: it.as_secs() as i64, tv_nsec: i64::from(it.subsec_nanos()) + 1 });
        let mut polls = vec![PollFd::from_borrowed_fd(self.shared.wake.as_fd(), PollFlags::IN)];
        let events = if accepts { PollFlags::IN } else { PollFlags::empty() };
        polls.push(PollFd::from_borrowed_fd(self.listener.as_fd(), events));
        if let Some(Connected { channel, .. }) = &self.connected {
            let (read, write) = channel.interest();
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, read);
            events.set(PollFlags::OUT, write);
            polls.push(PollFd::from_borrowed_fd(channel.as_fd(), events));
        }
        // An error, and an interruption, are looked at as if all were ready: nothing here blocks.
        match poll(&mut polls, timeout.as_ref()) {
            Ok(_) => Ready {
                woken: !polls[0].revents().is_empty(),
                arrival: accepts && !polls[1].revents().is_empty(),
                front_end: polls.get(2).map_or(PollFlags::empty(), |poll| poll.revents()),
            },
            Err(_) => Ready { woken: true, arrival: false, front_end: PollFlags::empty() },
        }
    }

    fn turn(&mut self, ready: &Ready) {
        if ready.woken {
            let _ = rustix::io::read(&*self.shared.wake, &mut [0; 8]);
            if let Some(Connected { session, .. }) = &mut self.connected {
                if self.shared.config_changed.swap(false, SeqCst) {
                    session.config_changed();
                }
                session.report_rejections();
            }
        }
        if !ready.front_end.is_empty()
            && let Err(closed) = self.exchange()
        {
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
            let Some(message) = channel.receive()? else { break };
            if let Some(reply) = session.handle(message).map_err(Closed::Violation)? {
                channel.send(reply)?;
            }
        }
        Ok(())
    }

    fn accept(&mut self) {
        self.accept_at = None;
        let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
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

fn peer_name(socket: &OwnedFd) -> String {
    match Peer::of(socket) {
        Ok(Peer { pid, uid }) => {
            format!("pid {}, uid {}", rustix::process::Pid::as_raw(pid), uid.as_raw())
        }
        Err(_) => "unknown".into(),
    }
}

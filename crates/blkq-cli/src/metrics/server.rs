//! The endpoint's thread: a few connections at a time, each of which has so many bytes and so
//! much time. When all places are taken, a new client gets that of the oldest
//! one: a scraper asks at once, a client that only occupies a place does not.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use blkq_export::nbd::Listener;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, SocketFlags, accept_with, recv, send, shutdown};

use super::http::{self, Asked, HEAD_BYTES_MAX};
use super::page::{self, Sample, Served};

/// Connections at a time.
const CONNECTIONS_MAX: usize = 16;
/// How long each may take, from its first byte to its last.
const CONNECTION_TIME: Duration = Duration::from_secs(5);
/// Bytes of an answered request that are received and dropped, so that the answer arrives.
const LATE_BYTES_MAX: usize = 1 << 20;
/// How long to wait when a connection cannot be taken.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How much the thread steps back behind others ([`setpriority(2)`]).
const NICE: i32 = 10;

/// Reads what is reported; `None` once the device has stopped.
type Read<'a> = &'a dyn Fn() -> Option<Sample>;

/// Serves until `stop` is readable.
pub fn run(listener: &Listener, stop: &OwnedFd, read: Read<'_>) {
    // Of a thread on Linux. It is as good without.
    let _ = rustix::process::setpriority_process(None, NICE);
    let mut server = Server {
        listener,
        read,
        served: Served::default(),
        connections: Vec::new(),
        accept_at: Instant::now(),
    };
    while server.wait(stop) {
        server.turn();
    }
}

struct Server<'a> {
    listener: &'a Listener,
    read: Read<'a>,
    served: Served,
    /// Oldest first.
    connections: Vec<Connection>,
    accept_at: Instant,
}

struct Connection {
    socket: OwnedFd,
    until: Instant,
    state: State,
}

enum State {
    /// So much of the request has come.
    Asking(Vec<u8>),
    /// So many bytes of the answer have left.
    Answering(Vec<u8>, usize),
    /// The answer has left; so many bytes came that nobody asked for.
    Closing(usize),
    Over,
}

impl Server<'_> {
    /// Waits for something to do; false if it is to stop.
    fn wait(&self, stop: &OwnedFd) -> bool {
        let now = Instant::now();
        let mut until = self.connections.iter().map(|connection| connection.until).min();
        let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
        if self.accept_at <= now {
            fds.push(PollFd::new(self.listener, PollFlags::IN));
        } else {
            until = Some(until.map_or(self.accept_at, |until| until.min(self.accept_at)));
        }
        fds.extend(self.connections.iter().map(|connection| {
            let what = match connection.state {
                State::Answering(..) => PollFlags::OUT,
                _ => PollFlags::IN,
            };
            PollFd::new(&connection.socket, what)
        }));
        // A little later than due, so that it is due then.
        let left = until.map(|until| until.saturating_duration_since(now) + Duration::from_millis(1));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        // Interrupted, or out of memory: poll again.
        if poll(&mut fds, left.as_ref()).is_err_and(|e| e != Errno::INTR) {
            std::thread::sleep(ACCEPT_PAUSE);
        }
        !fds[0].revents().contains(PollFlags::IN)
    }

    fn turn(&mut self) {
        self.accept();
        let now = Instant::now();
        for connection in &mut self.connections {
            connection.advance(self.read, &self.served);
            if now >= connection.until && !matches!(connection.state, State::Over) {
                self.served.shed.fetch_add(1, Relaxed);
                connection.state = State::Over;
            }
        }
        self.connections.retain(|connection| !matches!(connection.state, State::Over));
    }

    /// Accepts waiting clients, as many at once as there are places.
    fn accept(&mut self) {
        for _ in 0..CONNECTIONS_MAX {
            if Instant::now() < self.accept_at {
                return;
            }
            match accept_with(self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => {
                    if self.connections.len() == CONNECTIONS_MAX {
                        self.served.shed.fetch_add(1, Relaxed);
                        self.connections.remove(0);
                    }
                    let until = Instant::now() + CONNECTION_TIME;
                    self.connections.push(Connection { socket, until, state: State::Asking(Vec::new()) });
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                // Out of descriptors, for one: others may be closed.
                Err(_) => self.accept_at = Instant::now() + ACCEPT_PAUSE,
            }
        }
    }
}

impl Connection {
    /// Does all that can be done now.
    fn advance(&mut self, read: Read<'_>, served: &Served) {
        loop {
            let next = match &mut self.state {
                State::Asking(input) => {
                    let mut piece = [0; HEAD_BYTES_MAX];
                    match recv(&self.socket, &mut piece[..], RecvFlags::empty()) {
                        Ok((_, 0)) => State::Over,
                        Ok((_, length)) => {
                            input.extend_from_slice(&piece[..length.min(piece.len())]);
                            match http::parse(input) {
                                Some(asked) => State::Answering(answer(asked, read, served), 0),
                                None => continue,
                            }
                        }
                        Err(Errno::INTR) => continue,
                        Err(Errno::AGAIN) => return,
                        Err(_) => State::Over,
                    }
                }
                State::Answering(output, sent) => {
                    match send(&self.socket, &output[*sent..], SendFlags::NOSIGNAL) {
                        Ok(length) if *sent + length < output.len() => {
                            *sent += length;
                            continue;
                        }
                        Ok(_) => {
                            // The client sees EOF at once, and what is still coming does not reset
                            // the connection before the answer has arrived.
                            let _ = shutdown(&self.socket, Shutdown::Write);
                            State::Closing(0)
                        }
                        Err(Errno::INTR) => continue,
                        Err(Errno::AGAIN) => return,
                        Err(_) => State::Over,
                    }
                }
                State::Closing(late) => {
                    let mut piece = [0; HEAD_BYTES_MAX];
                    match recv(&self.socket, &mut piece[..], RecvFlags::empty()) {
                        Ok((_, length)) if length > 0 && *late < LATE_BYTES_MAX => {
                            *late += length;
                            continue;
                        }
                        Err(Errno::INTR) => continue,
                        Err(Errno::AGAIN) => return,
                        _ => State::Over,
                    }
                }
                State::Over => return,
            };
            self.state = next;
        }
    }
}

fn answer(asked: Asked, read: Read<'_>, served: &Served) -> Vec<u8> {
    let text = match asked {
        Asked::Metrics { text } => text,
        Asked::Rejected(rejection) => {
            served.refused.fetch_add(1, Relaxed);
            return http::rejection(rejection);
        }
    };
    match read() {
        Some(sample) => {
            served.answered.fetch_add(1, Relaxed);
            http::metrics(&page::render(&sample, served), text)
        }
        None => http::rejection(http::STOPPING),
    }
}

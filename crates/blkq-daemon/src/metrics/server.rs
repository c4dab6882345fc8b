//! The thread of the endpoint. It serves a few connections at a time, and limits the bytes and the time of
//! each. If all places are taken, a new client replaces the oldest one: a scraper sends its request
//! immediately, unlike a client that only occupies a place.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use blkq_export::Listener;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, SocketFlags, accept_with, recv, send, shutdown};

use super::http::{self, Asked, HEAD_BYTES_MAX};
use super::page::{self, Sample, Served};

const CONNECTIONS_MAX: usize = 16;
const CONNECTION_TIME: Duration = Duration::from_secs(5);
/// Maximum number of bytes that are received and dropped after the answer. Closing a socket with unread input
/// would reset the connection, and the answer could be lost.
const LATE_BYTES_MAX: usize = 1 << 20;
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The nice value of the thread (setpriority(2)), so that it does not delay engines.
const NICE: i32 = 10;

/// Reads the current values, or returns `None` once the device has stopped.
type Read<'a> = &'a dyn Fn() -> Option<Sample>;

/// Serves until `stop` is readable.
pub fn run(listener: &Listener, stop: &OwnedFd, read: Read<'_>) {
    // On Linux this affects only the calling thread. If it fails, the thread serves with normal priority.
    let _ = rustix::process::setpriority_process(None, NICE);
    let (served, connections) = (Served::default(), Vec::new());
    let mut server = Server { listener, read, served, connections, accept_at: Instant::now() };
    while server.wait(stop) {
        server.turn();
    }
}

struct Server<'a> {
    listener: &'a Listener,
    read: Read<'a>,
    served: Served,
    /// In the order of their acceptance.
    connections: Vec<Connection>,
    accept_at: Instant,
}

struct Connection {
    socket: OwnedFd,
    until: Instant,
    state: State,
}

enum State {
    /// The part of the request that has been received.
    Asking(Vec<u8>),
    /// The answer, and how many bytes of it have been sent.
    Answering(Vec<u8>, usize),
    /// The answer has been sent. Counts bytes that were received afterwards and dropped.
    Closing(usize),
}

impl Server<'_> {
    /// Waits for events. Returns `false` if the server must stop.
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
        // poll counts in milliseconds and may return early, so wait a little longer than necessary.
        let left = until.map(|until| until.saturating_duration_since(now) + Duration::from_millis(1));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        // After an interruption or ENOMEM, poll again.
        if poll(&mut fds, left.as_ref()).is_err_and(|e| e != Errno::INTR) {
            std::thread::sleep(ACCEPT_PAUSE);
        }
        !fds[0].revents().contains(PollFlags::IN)
    }

    fn turn(&mut self) {
        self.accept();
        let now = Instant::now();
        let Server { read, served, connections, .. } = self;
        connections.retain_mut(|connection| {
            let is_open = connection.advance(*read, served);
            let is_late = is_open && now >= connection.until;
            served.shed += u64::from(is_late);
            is_open && !is_late
        });
    }

    /// Accepts waiting clients, at most as many as there are places.
    fn accept(&mut self) {
        for _ in 0..CONNECTIONS_MAX {
            if Instant::now() < self.accept_at {
                return;
            }
            match accept_with(self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => {
                    if self.connections.len() == CONNECTIONS_MAX {
                        self.served.shed += 1;
                        self.connections.remove(0);
                    }
                    let until = Instant::now() + CONNECTION_TIME;
                    self.connections.push(Connection { socket, until, state: State::Asking(Vec::new()) });
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                // Most likely no file descriptor is free; others may be closed soon.
                Err(_) => self.accept_at = Instant::now() + ACCEPT_PAUSE,
            }
        }
    }
}

impl Connection {
    /// Receives, answers and sends until the socket would block. Returns whether the connection stays open.
    fn advance(&mut self, read: Read<'_>, served: &mut Served) -> bool {
        loop {
            match self.step(read, served) {
                Ok(true) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return true,
                Ok(false) | Err(_) => return false,
            }
        }
    }

    /// Makes one system call. Returns whether the connection stays open.
    fn step(&mut self, read: Read<'_>, served: &mut Served) -> Result<bool, Errno> {
        let mut piece = [0; HEAD_BYTES_MAX];
        let mut receive = || Ok::<_, Errno>(recv(&self.socket, &mut piece[..], RecvFlags::empty())?.0);
        match &mut self.state {
            State::Asking(input) => {
                let length = receive()?;
                input.extend_from_slice(&piece[..length]);
                if let Some(asked) = http::parse(input) {
                    self.state = State::Answering(answer(asked, read, served), 0);
                }
                Ok(length > 0)
            }
            State::Answering(output, sent) => {
                *sent += send(&self.socket, &output[*sent..], SendFlags::NOSIGNAL)?;
                if *sent == output.len() {
                    // The client sees the end of the answer immediately. The socket stays open, because
                    // closing it with unread input would reset the connection before the answer has arrived.
                    let _ = shutdown(&self.socket, Shutdown::Write);
                    self.state = State::Closing(0);
                }
                Ok(true)
            }
            State::Closing(late) => {
                let length = receive()?;
                *late += length;
                Ok(length > 0 && *late < LATE_BYTES_MAX)
            }
        }
    }
}

fn answer(asked: Asked, read: Read<'_>, served: &mut Served) -> Vec<u8> {
    let text = match asked {
        Asked::Metrics { text } => text,
        Asked::Rejected(rejection) => {
            served.refused += 1;
            return http::rejection(rejection);
        }
    };
    match read() {
        Some(sample) => {
            served.answered += 1;
            http::metrics(&page::render(&sample, served), text)
        }
        None => http::rejection(http::STOPPING),
    }
}

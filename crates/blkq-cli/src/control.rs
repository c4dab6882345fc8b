//! The control protocol: over the unix socket NAME.control, one JSON line asks and one
//! JSON line answers, then the daemon closes the connection.

mod dialogue;

pub use dialogue::{BegunCommit, Committed, Dialogue, FILES_MAX, Snapshotted};

use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blkq_export::peer::Peer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recv, recvmsg};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::bitmaps::BitmapChange;
use crate::complain;
use crate::failure::{Failure, Outcome};
use crate::info::ClientInfo;
use crate::options::Record;
use crate::state::{DYING_WAIT, Found, StateDir};
use crate::statistics::Statistics;

/// Longest request, newline included.
pub const LINE_BYTES_MAX: usize = 64 << 10;
/// Longest reply, newline included: the options of a device, which the kernel limits as a command
/// line, and a thousand clients.
pub const REPLY_BYTES_MAX: usize = 8 << 20;
/// How long a daemon waits for a whole request line, and for the reply to be taken.
pub const LINE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client waits for what a daemon answers from memory.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client that waits for something else asks how far that is.
const STATE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a client waits for a change, which waits for the I/O in flight.
pub const CHANGE_TIMEOUT: Duration = Duration::from_secs(60);

/// A client's request to a daemon.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Are you there?
    Ping {},
    /// The device and its settings.
    Show {},
    /// The counters.
    Stat {},
    /// Change settings, in order, up to the first that fails.
    Set {
        /// Names and values.
        settings: Vec<(String, String)>,
    },
    /// Change the size.
    Resize {
        /// The new size in bytes; `None` for what the backing file now has.
        size: Option<u64>,
        /// A smaller one too, even if the device is in use.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        force: bool,
        /// The user of the block device, if the client saw one: a confined daemon sees no other
        /// processes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        user: Option<String>,
    },
    /// Reissue the requests that are held after errors; the reply is how many were.
    Resume {
        /// Complete them with their errors in place of that.
        fail: bool,
    },
    /// The dirty bitmaps.
    Bitmaps {},
    /// Keep the dirty bitmaps of a raw image in a file, which is new and comes with the next step ([`Dialogue`]).
    BitmapFile {},
    /// Change the dirty bitmaps.
    Bitmap {
        /// How.
        change: BitmapChange,
    },
    /// Change settings, and read the certificates anew: all of it, or nothing.
    Apply {
        /// Names and values.
        settings: Vec<(String, String)>,
    },
    /// Read the certificates anew, for connections from then on; nothing is done if there are none.
    ReloadCertificates {},
    /// Trace the device until the connection closes. The memory with the events comes with the reply.
    Trace {
        /// Its bytes for each queue: a multiple of [`PAGE_BYTES`](blkq::trace::PAGE_BYTES).
        ring_bytes: u64,
    },
    /// Go on in a new image over the present one. The daemon replies when it has flushed and is to get the new file,
    /// when it has prepared that and waits with all I/O, and, after one more byte, when it goes on ([`Snapshotted`]):
    /// see [`Dialogue`].
    Snapshot {
        /// The options of the device with the new image.
        options: Record,
        /// The number of the new image in `NAME.options`, where the command has recorded it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image: Option<u64>,
    },
    /// Have what the image has go to the one behind it, and go on in that. The daemon replies when it is to get that
    /// one, takes it with one byte, open for writing, once more for syncs, and perhaps the file with its bitmaps, and
    /// replies again when it is done ([`Committed`]). It stops if the connection is closed: see [`Dialogue`]. Before it
    /// sends the byte, the command records the image in `NAME.options`, with sectors as the first reply says
    /// ([`BegunCommit`]).
    Commit {
        /// The number under which the command will do that.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image: Option<u64>,
    },
    /// Stop the daemon, and leave the kernel's block device to the next one.
    Leave {},
    /// Detach the device.
    Detach {
        /// Even if clients are connected.
        force: bool,
    },
}

/// A daemon's answer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply<T> {
    /// Done; what was asked for.
    Ok(T),
    /// Refused or failed: why, and the cure.
    Error(String),
}

/// An outcome as a line of the protocol.
pub fn reply_line<T: Serialize>(outcome: Outcome<T>) -> Vec<u8> {
    outcome.and_then(|value| line_of(&Reply::Ok(value))).unwrap_or_else(|failure| {
        let error = Reply::<()>::Error(failure.to_string());
        line_of(&error).unwrap_or_else(|_| b"{\"error\":\"the error is too long\"}\n".to_vec())
    })
}

/// A reply as a line of the protocol.
///
/// # Errors
/// If it is too long.
pub fn line_of<T: Serialize>(reply: &Reply<T>) -> Outcome<Vec<u8>> {
    let mut line = serde_json::to_vec(reply).map_err(|e| Failure::new(format!("the reply: {e}")))?;
    line.push(b'\n');
    if line.len() > REPLY_BYTES_MAX {
        return Err(Failure::new(format!("the reply is longer than {REPLY_BYTES_MAX} bytes")));
    }
    Ok(line)
}

/// Reads a request from a line without its newline.
///
/// # Errors
/// The mistake in the line.
pub fn parse_request(line: &[u8]) -> Outcome<Request> {
    serde_json::from_slice(line).map_err(|e| Failure::new(format!("malformed request: {e}")))
}

/// Whether a daemon could be reached.
#[derive(Debug)]
pub enum Called<T> {
    /// It answered.
    Answered(T),
    /// No daemon listens under this name.
    Nobody,
}

/// How long a client waits until a device has stopped.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// Before it reports what it waits for.
    report_after: Duration,
    /// At all, of a forced stop: without force it lasts as long as the I/O in flight and a flush.
    forced: Duration,
}

const PATIENCE: Patience = Patience { report_after: Duration::from_secs(2), forced: Duration::from_secs(60) };

/// Asks the daemon of `name` and waits for its answer; when it is to stop, also until its
/// process has exited.
///
/// # Errors
/// The error of the daemon, or that it does not answer, or has not stopped in time.
pub fn call<T: DeserializeOwned>(dir: &StateDir, name: &str, request: &Request) -> Outcome<Called<T>> {
    call_with(dir, name, request, PATIENCE, |what| {
        complain(&Failure::new(format!("{name}: waiting for {what}")));
    })
}

/// As [`call`], with a patience of its own; `report` gets what is waited for.
fn call_with<T: DeserializeOwned>(
    dir: &StateDir,
    name: &str,
    request: &Request,
    patience: Patience,
    report: impl FnMut(&str),
) -> Outcome<Called<T>> {
    let log = dir.file(name, ".log");
    let hangs = |pid: Option<Pid>, why: &str| {
        let of = pid.map(|pid| format!(" (process {})", pid.as_raw_nonzero())).unwrap_or_default();
        Failure::new(format!("{name}: its daemon{of} {why}; see its log {}", log.display()))
    };
    let stream = match dir.connect(name, ANSWER_TIMEOUT) {
        Ok(stream) => stream,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Ok(Called::Nobody);
        }
        Err(e) if e.kind() == io::ErrorKind::TimedOut => return Err(hangs(None, "does not answer")),
        Err(e) => return Err(Failure::new(format!("control socket of {name}: {e}"))),
    };
    // The kernel's record of the listening process, by which its exit is seen.
    let pid = Peer::of(&stream).ok().and_then(|peer| peer.pid);
    let daemon = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let asks =
        matches!(request, Request::Ping {} | Request::Show {} | Request::Stat {} | Request::Bitmaps {});
    let stops = matches!(request, Request::Detach { .. } | Request::Leave {});
    let until = matches!(request, Request::Detach { force: true }).then(|| Instant::now() + patience.forced);
    let reply = send(&stream, request).and_then(|()| {
        if stops {
            wait_for_stop(dir, name, &stream, patience.report_after, until, report)?;
        }
        receive(&stream, if asks || stops { ANSWER_TIMEOUT } else { CHANGE_TIMEOUT })
    });
    let reply = match reply {
        // It was killed, and its threads exit one after the other. Whether a change was made is
        // unknown.
        Err(e) if asks && is_cut_off(&e) && daemon.as_ref().is_some_and(exits) => {
            return Ok(Called::Nobody);
        }
        reply => reply,
    };
    let reply = reply.map_err(|e| match e.kind() {
        io::ErrorKind::TimedOut if stops => not_stopped(dir, name, pid, patience.forced),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => hangs(pid, "does not answer"),
        _ => hangs(pid, &format!("gave no answer ({e})")),
    })?;
    match reply {
        Reply::Ok(value) => {
            // Its exit, not its answer, releases everything that it had.
            if let Some(daemon) = daemon.filter(|_| stops)
                && !is_readable(&daemon, until)
            {
                return Err(not_stopped(dir, name, pid, patience.forced));
            }
            Ok(Called::Answered(value))
        }
        Reply::Error(message) => Err(Failure::new(message)),
    }
}

/// The process that listens for commands for `name`, by the kernel's record.
///
/// # Errors
/// If there is none, or it cannot be seen.
pub fn daemon_of(dir: &StateDir, name: &str) -> io::Result<u32> {
    let stream = dir.connect(name, ANSWER_TIMEOUT)?;
    let peer = Peer::of(&stream)?;
    // The reply is that of a daemon that may have been taken over.
    send(&stream, &Request::Ping {})?;
    receive::<serde_json::Value>(&stream, ANSWER_TIMEOUT)?;
    let pid = peer.pid.map(|pid| pid.as_raw_nonzero().get());
    pid.and_then(|pid| pid.try_into().ok()).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Waits until a daemon that is to stop answers on `stream`, and reports what it waits for if that
/// takes long, and once more if requests are held later on.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] at `until`.
fn wait_for_stop(
    dir: &StateDir,
    name: &str,
    stream: &UnixStream,
    report_after: Duration,
    until: Option<Instant>,
    mut report: impl FnMut(&str),
) -> io::Result<()> {
    let mut reported: Option<bool> = None;
    while !is_readable(stream, Some(Instant::now() + report_after)) {
        let remaining = Remaining::of(dir, name);
        let is_held = matches!(remaining, Remaining::Held(_));
        if reported.is_none_or(|reported_held| is_held && !reported_held) {
            report(&remaining.describe(name));
            reported = Some(is_held);
        }
        // Forced, it fails what is held.
        if until.is_some() {
            return match is_readable(stream, until) {
                true => Ok(()),
                false => Err(io::ErrorKind::TimedOut.into()),
            };
        }
    }
    Ok(())
}

/// The work that a stopping device has left.
enum Remaining {
    InFlight(u64),
    /// Requests that are held after errors: the kernel writes pages back that the last user of a block device has left.
    Held(u64),
    /// Clients whose replies have not left.
    Clients(Vec<String>),
    /// Its daemon does not answer.
    Unknown,
}

impl Remaining {
    fn of(dir: &StateDir, name: &str) -> Remaining {
        let Some(statistics) = query::<Statistics>(dir, name, &Request::Stat {}) else {
            return Remaining::Unknown;
        };
        let snapshot = statistics.snapshot();
        let in_flight = snapshot.in_flight.iter().sum();
        match (snapshot.held, in_flight) {
            (0, 0) if statistics.nbd.is_some_and(|nbd| nbd.connected > 0) => {
                let clients = query::<Clients>(dir, name, &Request::Show {}).map(|info| info.clients);
                let waited_for = clients.into_iter().flatten().filter(|client| client.in_flight > 0);
                Remaining::Clients(waited_for.map(|client| client.peer).collect())
            }
            (0, in_flight) => Remaining::InFlight(in_flight),
            (held, _) => Remaining::Held(held),
        }
    }

    fn describe(&self, name: &str) -> String {
        let plural = |count: &u64| if *count == 1 { "" } else { "s" };
        match self {
            Remaining::InFlight(0) => "the last flush".to_owned(),
            Remaining::Clients(clients) => match &clients[..] {
                [] => "clients to disconnect".to_owned(),
                [client] => format!("the NBD client ({client}) to take its replies"),
                [client, others @ ..] => {
                    format!("the NBD client ({client}) and {} more to take their replies", others.len())
                }
            },
            Remaining::InFlight(count) => format!("{count} request{} in flight", plural(count)),
            Remaining::Held(count) => format!(
                "{count} request{} held after I/O errors; blkq resume {name} reissues them, or fails them with --fail",
                plural(count)
            ),
            Remaining::Unknown => "its daemon to exit".to_owned(),
        }
    }
}

/// The clients in the reply to [`Request::Show`].
#[derive(Deserialize)]
struct Clients {
    clients: Vec<ClientInfo>,
}

/// Asks the daemon that is stopping; `None` if it does not answer.
fn query<T: DeserializeOwned>(dir: &StateDir, name: &str, request: &Request) -> Option<T> {
    let reply = dir.connect(name, STATE_TIMEOUT).and_then(|stream| {
        send(&stream, request)?;
        receive::<T>(&stream, STATE_TIMEOUT)
    });
    match reply {
        Ok(Reply::Ok(answer)) => Some(answer),
        _ => None,
    }
}

/// The failure of a forced stop that is not done in time.
fn not_stopped(dir: &StateDir, name: &str, pid: Option<Pid>, waited: Duration) -> Failure {
    let kill = pid.map(|pid| format!(", or kill -9 {}", pid.as_raw_nonzero())).unwrap_or_default();
    let remaining = Remaining::of(dir, name);
    let reason = match remaining {
        Remaining::Clients(_) => "",
        _ => ": the image's disk does not answer (dmesg may have the reason)",
    };
    Failure::new(format!(
        "{name}: still waiting for {} after {} s{reason}; the device detaches by itself when that is over{kill} to abort \
         the I/O in flight",
        remaining.describe(name),
        waited.as_secs()
    ))
}

/// Waits until there is something to read, at the latest until `until`: whether there is.
fn is_readable(fd: &impl AsFd, until: Option<Instant>) -> bool {
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec::try_from(left).unwrap_or_default());
        match poll(&mut [PollFd::new(fd, PollFlags::IN)], left.as_ref()) {
            Err(Errno::INTR) => {}
            polled => return polled != Ok(0),
        }
    }
}

fn is_cut_off(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Whether the process exits in the time that a killed one takes.
fn exits(process: &OwnedFd) -> bool {
    is_readable(process, Some(Instant::now() + DYING_WAIT))
}

/// Asks the daemon of `name`, which the user named.
///
/// # Errors
/// As [`call`], and if there is no such device or its daemon died.
pub fn ask<T: DeserializeOwned>(dir: &StateDir, name: &str, request: &Request) -> Outcome<T> {
    ask_if_there(dir, name, request)?.ok_or_else(|| no_such_device(name))
}

/// As [`ask`]; `None` if there is no such device.
///
/// # Errors
/// As [`call`], and if its daemon died.
pub fn ask_if_there<T: DeserializeOwned>(
    dir: &StateDir,
    name: &str,
    request: &Request,
) -> Outcome<Option<T>> {
    // Only what could be a device's name becomes part of a path.
    if crate::state::check_name(name).is_ok() {
        match call(dir, name, request)? {
            Called::Answered(answer) => return Ok(Some(answer)),
            Called::Nobody => {
                if let Found::Remains(remains) = dir.inspect(name)? {
                    return Err(remains.failure());
                }
            }
        }
    }
    Ok(None)
}

/// There is nothing of that name.
pub fn no_such_device(name: &str) -> Failure {
    Failure::new(format!("{name}: no such device; blkq list shows those that there are"))
}

/// The daemon of `name` was found dead, and cleared away.
pub fn died(name: &str, last_words: &str) -> Failure {
    let last_words = if last_words.is_empty() { "without a word" } else { last_words };
    Failure::new(format!("{name}: its daemon died ({last_words}); what it left is cleared, attach it again"))
}

/// Sends a request. A daemon that turns a client away does so without reading: the reply has the reason, and not the
/// error of sending.
fn send(mut stream: &UnixStream, request: &Request) -> io::Result<()> {
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    match stream.write_all(&line) {
        Err(e) if matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => Ok(()),
        sent => sent,
    }
}

fn receive<T: DeserializeOwned>(stream: &UnixStream, timeout: Duration) -> io::Result<Reply<T>> {
    receive_with_file(stream, timeout).map(|(reply, _)| reply)
}

/// A reply, and the file that came with it. The bytes behind its line stay in the socket: the daemon may have written
/// the next reply already.
fn receive_with_file<T: DeserializeOwned>(
    stream: &UnixStream,
    timeout: Duration,
) -> io::Result<(Reply<T>, Option<OwnedFd>)> {
    stream.set_read_timeout(Some(timeout))?;
    let (mut answer, mut file) = (Vec::new(), None);
    let mut piece = vec![0; 4096];
    while answer.last() != Some(&b'\n') && answer.len() < REPLY_BYTES_MAX {
        let (seen, _) = retry_on_intr(|| recv(stream, &mut piece[..], RecvFlags::PEEK))?;
        let line = piece[..seen].iter().position(|byte| *byte == b'\n').map_or(seen, |at| at + 1);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = retry_on_intr(|| {
            let pieces = &mut [IoSliceMut::new(&mut piece[..line])];
            recvmsg(stream, pieces, &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        if received.bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed"));
        }
        answer.extend_from_slice(&piece[..received.bytes]);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                file = files.last().or(file);
            }
        }
    }
    Ok((serde_json::from_slice(&answer)?, file))
}

#[cfg(test)]
mod tests;

//! The control protocol. A client connects to the unix socket `NAME.control` and sends one line of JSON; the
//! daemon answers with one line and closes the connection. Commands in several steps use a [`Dialogue`].

mod dialogue;
mod socket;
pub mod statistics;

pub use dialogue::{BegunCommit, Committed, Dialogue, Snapshotted};
pub use socket::{FILES_MAX, is_readable, receive_files, send_files};

use std::ffi::OsStr;
use std::fmt::{self, Display, Formatter};
use std::io::{self, ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use blkq::units::format_bytes;
use blkq_export::peer::Peer;
use rustix::io::retry_on_intr;
use rustix::net::{RecvFlags, recv};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::control::statistics::Statistics;
use crate::failure::{Failure, Outcome, closest, print_error};
use crate::info::ClientInfo;
use crate::options::Record;
use crate::state::{DYING_WAIT, Found, StateDir, json_line, quote_last_line};
use socket::{connect, stopped, wait_for};

/// In bytes, including the newline.
pub const LINE_BYTES_MAX: usize = 64 << 10;
/// In bytes, including the newline. The largest reply holds the options of a device, which are as long as a
/// command line at most, and a thousand clients.
pub const REPLY_BYTES_MAX: usize = 8 << 20;
/// How long a daemon waits for a complete request, and for the client to read the reply.
pub const LINE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client waits for an answer that the daemon gives from memory.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client that waits for a device to stop waits for an answer about its progress.
const STATE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a client waits for a change. A change waits for the I/O in flight.
pub const CHANGE_TIMEOUT: Duration = Duration::from_secs(60);

/// A client's request to a daemon.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Check that the daemon answers.
    Ping {},
    /// Return the device and its settings.
    Show {},
    /// Return the counters of the device.
    Stat {},
    /// Change settings, in order, until one fails.
    Set { settings: Vec<(String, String)> },
    /// Change the size of the device.
    Resize {
        /// The new size in bytes; `None` for the current size of the image.
        size: Option<u64>,
        /// Number of bytes by which the device grows; `size` is then absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        grow_by: Option<u64>,
        /// Shrink the device even if it is in use.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        force: bool,
        /// A user of the block device that the client found. A confined daemon cannot see other processes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        user: Option<String>,
    },
    /// Reissue the requests that are held after I/O errors, or with `fail` complete them with their errors. The reply
    /// is their number.
    Resume { fail: bool },
    /// Return the dirty bitmaps of the device.
    Bitmaps {},
    /// Save the dirty bitmaps of a raw image in a new file, which the client sends in the next step.
    BitmapFile {},
    /// Change the dirty bitmaps of the device.
    Bitmap { change: BitmapChange },
    /// Make the device a member of a group. The file of the group, which a confined daemon must not open,
    /// comes with the next step ([`Dialogue`]).
    JoinGroup { group: String },
    /// Change settings and reload the certificates: all of it, or nothing.
    Apply { settings: Vec<(String, String)> },
    /// Reload the certificates, for new connections. Does nothing if there are none.
    ReloadCertificates {},
    /// Trace the device until the connection is closed. The reply carries the memory file with the events. The ring of
    /// each queue has `ring_bytes` bytes, a multiple of [`PAGE_BYTES`](blkq::trace::PAGE_BYTES).
    Trace { ring_bytes: u64 },
    /// Take an external snapshot: continue with a new overlay. The daemon replies three times ([`Dialogue`]):
    /// when it has flushed and expects the file of the overlay, when the overlay is ready and all I/O waits,
    /// and, after one more byte from the client, when I/O continues ([`Snapshotted`]).
    Snapshot {
        /// The options of the device with the overlay.
        options: Record,
        /// The number under which the command has recorded the overlay in `NAME.options`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image: Option<u64>,
    },
    /// Commit the overlay into its backing file and pivot to the backing file ([`Dialogue`]). The daemon
    /// replies when it expects the backing file ([`BegunCommit`]). The client records the image in
    /// `NAME.options`, with the sector size of that reply. Then it sends one byte with the backing file
    /// opened for writing, the same file opened once more for syncs, and, if there is one, the file with the
    /// bitmaps. The daemon replies again when the commit is complete ([`Committed`]), and cancels it if the
    /// client closes the connection.
    Commit {
        /// The number under which the command will record the backing file.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image: Option<u64>,
    },
    /// Stop the daemon, and leave the kernel's block device to the next daemon.
    Leave {},
    /// Detach the device, with `force` even if clients are connected, and stop the daemon.
    Detach { force: bool },
}

/// An atomic change of the dirty bitmaps. The granularity is the number of bytes per bit. A disabled bitmap stops
/// recording writes; its bits stay. A merge sets the bits of several bitmaps in another one, too.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum BitmapChange {
    Add { name: String, granularity: u64 },
    Remove { name: String },
    Clear { name: String },
    Enable { name: String },
    Disable { name: String },
    Merge { from: Vec<String>, into: String },
}

impl Display for BitmapChange {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (what, name) = match self {
            BitmapChange::Add { name, .. } => ("add", name),
            BitmapChange::Remove { name } => ("remove", name),
            BitmapChange::Clear { name } => ("clear", name),
            BitmapChange::Enable { name } => ("enable", name),
            BitmapChange::Disable { name } => ("disable", name),
            BitmapChange::Merge { into, .. } => ("merge into", into),
        };
        write!(f, "{what} {}", name.escape_debug())
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BitmapInfo {
    pub name: String,
    pub granularity: u64,
    /// Number of dirty bytes; `None` if the bitmap is inconsistent.
    pub dirty: Option<u64>,
    /// `recording`, `disabled` (writes are not recorded) or `inconsistent` (recorded writes may be missing).
    pub state: String,
}

/// A size that `blkq resize` accepts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NewSize {
    OfImage,
    Bytes(u64),
    LargerBy(u64),
}

impl NewSize {
    /// The size in bytes of a device whose size is `now`; `None` means the size of its image. Fails if the
    /// size exceeds 64 bits.
    pub fn bytes(self, now: u64) -> Outcome<Option<u64>> {
        match self {
            NewSize::OfImage => Ok(None),
            NewSize::Bytes(bytes) => Ok(Some(bytes)),
            NewSize::LargerBy(bytes) => now.checked_add(bytes).map(Some).ok_or_else(|| {
                let (now, bytes) = (format_bytes(now), format_bytes(bytes));
                Failure::new(format!("{now} and {bytes} more exceed the maximum size of a device"))
            }),
        }
    }
}

impl Display for NewSize {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            NewSize::OfImage => f.write_str("to the size of the image"),
            NewSize::Bytes(bytes) => write!(f, "to {} ({bytes} bytes)", format_bytes(*bytes)),
            NewSize::LargerBy(bytes) => write!(f, "by {} ({bytes} bytes)", format_bytes(*bytes)),
        }
    }
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply<T> {
    Ok(T),
    /// The reason and a hint.
    Error(String),
}

pub fn reply_line<T: Serialize>(outcome: Outcome<T>) -> Vec<u8> {
    outcome.and_then(|value| line_of(&Reply::Ok(value))).unwrap_or_else(|failure| {
        let error = Reply::<()>::Error(failure.to_string());
        line_of(&error).unwrap_or_else(|_| b"{\"error\":\"the error is too long\"}\n".to_vec())
    })
}

/// Fails if the line is longer than [`REPLY_BYTES_MAX`].
pub fn line_of<T: Serialize>(reply: &Reply<T>) -> Outcome<Vec<u8>> {
    let line = json_line(reply).map_err(|e| Failure::new(format!("cannot encode the reply: {e}")))?;
    if line.len() > REPLY_BYTES_MAX {
        return Err(Failure::new(format!("the reply is longer than {REPLY_BYTES_MAX} bytes")));
    }
    Ok(line)
}

/// The line has no newline.
pub fn parse_request(line: &[u8]) -> Outcome<Request> {
    serde_json::from_slice(line).map_err(|e| Failure::new(format!("malformed request: {e}")))
}

/// Sends a request to the daemon of `name`. If the request stops the daemon, also waits until its process has
/// exited. Returns `None` if no daemon listens under this name. Fails with the daemon's error, or if the daemon does
/// not answer or stop in time.
pub fn call<T: DeserializeOwned>(dir: &StateDir, name: &str, request: &Request) -> Outcome<Option<T>> {
    call_with(dir, name, request, [Duration::from_secs(2), Duration::from_secs(60)], |what| {
        print_error(&Failure::new(format!("{name}: waiting for {what}")));
    })
}

/// After the first of the times, `report` receives what the client waits for. A forced stop fails after the second one.
/// Without force, the client waits for the I/O in flight and the last flush, without a limit.
fn call_with<T: DeserializeOwned>(
    dir: &StateDir,
    name: &str,
    request: &Request,
    [report_after, forced]: [Duration; 2],
    report: impl FnMut(&str),
) -> Outcome<Option<T>> {
    let log = dir.file(name, ".log");
    let hangs = |pid: Option<Pid>, why: &str| {
        let of = pid.map(|pid| format!(" (pid {})", pid.as_raw_nonzero())).unwrap_or_default();
        Failure::new(format!("{name}: the daemon{of} {why}; see its log {}", log.display()))
    };
    let is_stopped = |e: &io::Error| stopped(e).map(|stopped| Failure::new(format!("{name}: {stopped}")));
    let stream = match connect(dir, name, ANSWER_TIMEOUT) {
        Ok(stream) => stream,
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => return Ok(None),
        Err(e) if e.kind() == ErrorKind::TimedOut => return Err(hangs(None, "does not answer")),
        Err(e) => {
            let other = || Failure::new(format!("cannot connect to the daemon of {name}: {e}"));
            return Err(is_stopped(&e).unwrap_or_else(other));
        }
    };
    // The process that listens, as the kernel recorded it. Its exit is observed through the pidfd.
    let pid = Peer::of(&stream).ok().and_then(|peer| peer.pid);
    let daemon = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let exits_soon = |daemon: &OwnedFd| is_readable(daemon, Some(Instant::now() + DYING_WAIT));
    let asks =
        matches!(request, Request::Ping {} | Request::Show {} | Request::Stat {} | Request::Bitmaps {});
    let stops = matches!(request, Request::Detach { .. } | Request::Leave {});
    let until = matches!(request, Request::Detach { force: true }).then(|| Instant::now() + forced);
    let reply = send(&stream, request).and_then(|()| {
        if stops {
            wait_for_stop(dir, name, &stream, report_after, until, report)?;
        }
        receive(&stream, if asks || stops { ANSWER_TIMEOUT } else { CHANGE_TIMEOUT })
    });
    let reply = match reply {
        // The daemon was killed, and its threads exit one after the other. Only requests without side effects
        // count as unanswered: whether a change was made is unknown.
        Err(e) if asks && is_cut_off(&e) && daemon.as_ref().is_some_and(exits_soon) => {
            return Ok(None);
        }
        reply => reply,
    };
    let reply = reply.map_err(|e| {
        is_stopped(&e).unwrap_or_else(|| match e.kind() {
            ErrorKind::TimedOut if stops => not_stopped(dir, name, pid, forced),
            ErrorKind::WouldBlock | ErrorKind::TimedOut => hangs(pid, "does not answer"),
            _ => hangs(pid, &format!("sent no answer ({e})")),
        })
    })?;
    match reply {
        Reply::Ok(value) => {
            // The daemon's files and locks are released by its exit, not by its answer.
            if let Some(daemon) = daemon.filter(|_| stops)
                && !is_readable(&daemon, until)
            {
                return Err(not_stopped(dir, name, pid, forced));
            }
            Ok(Some(value))
        }
        Reply::Error(message) => Err(refused(name, &message)),
    }
}

/// A daemon of an older version does not know all requests.
fn refused(name: &str, message: &str) -> Failure {
    match message.starts_with("malformed request: unknown ") {
        true => Failure::new(format!(
            "{name}: the daemon is older than this program and cannot do this; run `blkq upgrade {name}`, or detach \
             the device and attach it again"
        )),
        false => Failure::new(message),
    }
}

/// The ID of the process that accepts commands for `name`, as the kernel recorded it. Fails if no daemon
/// answers, or if its process is in another PID namespace.
pub fn daemon_of(dir: &StateDir, name: &str) -> io::Result<u32> {
    let stream = connect(dir, name, ANSWER_TIMEOUT)?;
    let peer = Peer::of(&stream)?;
    // A compromised daemon can reply anything, so the reply is not used.
    send(&stream, &Request::Ping {})?;
    receive::<serde_json::Value>(&stream, ANSWER_TIMEOUT)?;
    let pid = peer.pid.map(|pid| pid.as_raw_nonzero().get());
    pid.and_then(|pid| pid.try_into().ok()).ok_or_else(|| ErrorKind::NotFound.into())
}

/// Reports what the daemon waits for after `report_after`, and again if requests are held later on. Fails
/// with [`ErrorKind::TimedOut`] at `until`, and as [`wait_for`] does if the daemon is stopped.
fn wait_for_stop(
    dir: &StateDir,
    name: &str,
    stream: &UnixStream,
    report_after: Duration,
    until: Option<Instant>,
    mut report: impl FnMut(&str),
) -> io::Result<()> {
    let mut reported: Option<bool> = None;
    while !wait_for(stream, Some(Instant::now() + report_after))? {
        let Remaining { what, is_held, .. } = Remaining::of(dir, name);
        if reported.is_none_or(|reported_held| is_held && !reported_held) {
            report(&what);
            reported = Some(is_held);
        }
        // A forced stop fails held requests, so there is nothing more to report.
        if until.is_some() {
            return wait_for(stream, until)?.then_some(()).ok_or(ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// The work that is left until a daemon stops.
struct Remaining {
    what: String,
    /// Whether requests are held after I/O errors. This can become true during the wait: the kernel writes dirty pages
    /// back when the last user closes the block device, and these writes may fail.
    is_held: bool,
    /// Whether all I/O is complete, but clients have not read all their replies.
    of_clients: bool,
}

impl Remaining {
    fn of(dir: &StateDir, name: &str) -> Remaining {
        let remaining = |what: &str| Remaining { what: what.to_owned(), is_held: false, of_clients: false };
        let Some(statistics) = query::<Statistics>(dir, name, &Request::Stat {}) else {
            return remaining("the daemon to exit");
        };
        let snapshot = statistics.snapshot();
        let requests = |count| if count == 1 { "request" } else { "requests" };
        match (snapshot.held, snapshot.in_flight.iter().sum::<u64>()) {
            (0, 0) if statistics.nbd.is_some_and(|nbd| nbd.connected > 0) => {
                let clients = query::<Clients>(dir, name, &Request::Show {}).map(|info| info.clients);
                let waited_for = clients.into_iter().flatten().filter(|client| client.in_flight > 0);
                let clients: Vec<String> = waited_for.map(|client| client.peer).collect();
                let what = match &clients[..] {
                    [] => "clients to disconnect".to_owned(),
                    [client] => format!("the NBD client ({client}) to take its replies"),
                    [client, others @ ..] => {
                        format!("the NBD client ({client}) and {} more to take their replies", others.len())
                    }
                };
                Remaining { of_clients: true, ..remaining(&what) }
            }
            (0, 0) => remaining("the last flush"),
            (0, count) => remaining(&format!("{count} {} in flight", requests(count))),
            (count, _) => {
                let what = format!(
                    "{count} {} held after I/O errors; `blkq resume {name}` reissues them, `blkq resume --fail {name}` fails them",
                    requests(count)
                );
                Remaining { is_held: true, ..remaining(&what) }
            }
        }
    }
}

#[derive(Deserialize)]
struct Clients {
    clients: Vec<ClientInfo>,
}

/// `None` if the daemon does not answer.
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

fn not_stopped(dir: &StateDir, name: &str, pid: Option<Pid>, waited: Duration) -> Failure {
    let kill = pid
        .map(|pid| format!("; to abort the I/O in flight, run `kill -9 {}`", pid.as_raw_nonzero()))
        .unwrap_or_default();
    let Remaining { what, of_clients, .. } = Remaining::of(dir, name);
    let reason =
        if of_clients { "" } else { ", because the storage of the image does not respond (see dmesg)" };
    Failure::new(format!(
        "{name}: still waiting for {what} after {} s{reason}; the device detaches when this is done{kill}",
        waited.as_secs()
    ))
}

fn is_cut_off(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof)
}

/// As [`call`], for a `name` that the user gave. Also fails if no such device exists, its daemon was killed or
/// crashed, or its daemon does not accept commands.
pub fn ask<T: DeserializeOwned>(dir: &StateDir, name: &str, request: &Request) -> Outcome<T> {
    ask_if_there(dir, name, request)?.ok_or_else(|| not_accepting(dir, name))
}

/// Why no daemon accepts commands for `name`.
pub fn not_accepting(dir: &StateDir, name: &str) -> Failure {
    // A text that is not a valid name must not become part of a path.
    match crate::state::check_name(name).is_ok().then(|| dir.inspect(name)) {
        Some(Ok(Found::Busy(busy))) => Failure::new(format!("{name}: the device is {busy}")),
        _ => no_such_device(name),
    }
}

/// As [`ask`], but returns `None` if no such device exists or its daemon does not accept commands.
pub fn ask_if_there<T: DeserializeOwned>(dir: &StateDir, name: &str, asked: &Request) -> Outcome<Option<T>> {
    // A text that is not a valid name, for example "../x", must not become part of a path.
    if crate::state::check_name(name).is_err() {
        return Ok(None);
    }
    match call(dir, name, asked)? {
        None => match dir.inspect(name)? {
            Found::Remains(remains) => Err(remains.failure()),
            _ => Ok(None),
        },
        answer => Ok(answer),
    }
}

pub fn no_such_device(name: &str) -> Failure {
    let names = StateDir::locate().and_then(|dir| dir.names()).unwrap_or_default();
    let file = Path::new(name).file_name().and_then(OsStr::to_str).unwrap_or(name);
    let similar = closest(file, names).map(|similar| format!("did you mean {similar}? ")).unwrap_or_default();
    Failure::new(format!("{name}: no such device; {similar}`blkq list` shows all devices"))
}

/// The stale files of the daemon were just removed.
pub fn died(name: &str, last_log_line: &str) -> Failure {
    let why = quote_last_line(last_log_line);
    Failure::new(format!(
        "{name}: the daemon was killed or crashed ({why}), and its stale files were removed; attach the image again"
    ))
}

/// A daemon that rejects a client does so without reading the request, so sending fails with EPIPE or
/// ECONNRESET. That error is ignored here: the reply says why.
fn send(mut stream: &UnixStream, request: &Request) -> io::Result<()> {
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    match stream.write_all(&json_line(request)?) {
        Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => Ok(()),
        sent => sent,
    }
}

fn receive<T: DeserializeOwned>(stream: &UnixStream, timeout: Duration) -> io::Result<Reply<T>> {
    receive_with_file(stream, timeout).map(|(reply, _)| reply)
}

/// Reads no byte beyond the newline, because the daemon may already have sent the next reply.
fn receive_with_file<T: DeserializeOwned>(
    stream: &UnixStream,
    timeout: Duration,
) -> io::Result<(Reply<T>, Option<OwnedFd>)> {
    stream.set_read_timeout(Some(timeout))?;
    let (mut answer, mut file) = (Vec::new(), None);
    let mut piece = vec![0; 4096];
    while answer.last() != Some(&b'\n') && answer.len() < REPLY_BYTES_MAX {
        if !wait_for(stream, Some(Instant::now() + timeout))? {
            return Err(ErrorKind::TimedOut.into());
        }
        let (seen, _) = retry_on_intr(|| recv(stream, &mut piece[..], RecvFlags::PEEK))?;
        let line = piece[..seen].iter().position(|byte| *byte == b'\n').map_or(seen, |at| at + 1);
        let (received, files) = receive_files(stream, &mut piece[..line])?;
        if received == 0 {
            return Err(io::Error::new(ErrorKind::UnexpectedEof, "the connection was closed"));
        }
        answer.extend_from_slice(&piece[..received]);
        file = files.into_iter().last().or(file);
    }
    Ok((serde_json::from_slice(&answer)?, file))
}

#[cfg(test)]
mod tests;

//! The control protocol: over the unix socket NAME.control, one JSON line asks and one
//! JSON line answers, then the daemon closes the connection.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blkq_export::peer::Peer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, pidfd_open};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Outcome};
use crate::state::{DYING_WAIT, Dead, StateDir};

/// Longest line of either side, newline included.
pub const LINE_BYTES_MAX: usize = 64 << 10;
/// How long a daemon waits for a whole request line, and for the reply to be taken.
pub const LINE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client waits for what a daemon answers from memory.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client waits for a change, which waits for the I/O in flight.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(60);

/// What a client asks of a daemon.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Are you there?
    Ping {},
    /// What the device is and how it is set.
    Show {},
    /// The counters.
    Stat {},
    /// Change settings, in order, up to the first that is refused.
    Set {
        /// Names and values.
        settings: Vec<(String, String)>,
    },
    /// Change the size.
    Resize {
        /// The new size in bytes; `None` for what the backing file now has.
        size: Option<u64>,
    },
    /// End the daemon, and leave the kernel's block device to the next one.
    Leave {},
    /// End the device.
    Detach {
        /// Even if clients are connected.
        force: bool,
    },
}

/// What a daemon answers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply<T> {
    /// Done; what was asked for.
    Ok(T),
    /// Refused or failed: why, and the cure.
    Error(String),
}

/// An outcome as the line that tells a client of it.
pub fn reply_line<T: Serialize>(outcome: Outcome<T>) -> Vec<u8> {
    let reply = match outcome {
        Ok(value) => Reply::Ok(value),
        Err(failure) => Reply::Error(failure.to_string()),
    };
    match serde_json::to_vec(&reply) {
        Ok(mut line) if line.len() < LINE_BYTES_MAX => {
            line.push(b'\n');
            line
        }
        _ => b"{\"error\":\"the answer does not fit the protocol\"}\n".to_vec(),
    }
}

/// Reads a request from a line without its newline.
///
/// # Errors
/// What is wrong with the line.
pub fn parse_request(line: &[u8]) -> Outcome<Request> {
    serde_json::from_slice(line).map_err(|e| Failure::new(format!("malformed request: {e}")))
}

/// Whether a daemon could be reached.
#[derive(Debug)]
pub enum Called<T> {
    /// It answered.
    Answered(T),
    /// Nobody listens under this name.
    Nobody,
}

/// Asks the daemon of `name` and waits for its answer; when it is to end also until its
/// process is gone.
///
/// # Errors
/// What the daemon refused, or that it does not answer.
pub fn call<T: DeserializeOwned>(dir: &StateDir, name: &str, request: &Request) -> Outcome<Called<T>> {
    let stream = match UnixStream::connect(dir.control_socket(name)) {
        Ok(stream) => stream,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Ok(Called::Nobody);
        }
        Err(e) => return Err(Failure::new(format!("control socket of {name}: {e}"))),
    };
    // The kernel's record of who listens there: it tells when that process is gone.
    let pid = Peer::of(&stream).ok().and_then(|peer| peer.pid);
    let daemon = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let asks = matches!(request, Request::Ping {} | Request::Show {} | Request::Stat {});
    let timeout = match request {
        Request::Ping {} | Request::Show {} | Request::Stat {} => Some(ANSWER_TIMEOUT),
        Request::Set { .. } | Request::Resize { .. } => Some(CHANGE_TIMEOUT),
        // It waits for the I/O in flight and a flush, which take as long as they take.
        Request::Detach { .. } | Request::Leave {} => None,
    };
    let reply = match exchange(&stream, request, timeout) {
        // It was killed, and its threads go one after the other. Of a change nobody knows whether it
        // was made.
        Err(e) if asks && is_cut_off(&e) && daemon.as_ref().is_some_and(ends) => {
            return Ok(Called::Nobody);
        }
        reply => reply,
    };
    let reply = reply.map_err(|e| {
        let of = pid.map(|pid| format!(" (process {})", pid.as_raw_nonzero())).unwrap_or_default();
        let why = match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "does not answer".to_owned(),
            _ => format!("gave no answer ({e})"),
        };
        Failure::new(format!(
            "{name}: its daemon{of} {why}; look into its log {}",
            dir.file(name, ".log").display()
        ))
    })?;
    match reply {
        Reply::Ok(value) => {
            if let (Request::Detach { .. } | Request::Leave {}, Some(daemon)) = (request, daemon) {
                // Its end, not its answer, is when everything that it held is free.
                let mut fds = [PollFd::new(&daemon, PollFlags::IN)];
                while poll(&mut fds, None).is_err_and(|e| e == Errno::INTR) {}
            }
            Ok(Called::Answered(value))
        }
        Reply::Error(message) => Err(Failure::new(message)),
    }
}

fn is_cut_off(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Whether the process ends in the time that one takes which was killed.
fn ends(process: &OwnedFd) -> bool {
    let until = Instant::now() + DYING_WAIT;
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).unwrap_or_default();
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            ended => return ended == Ok(1),
        }
    }
}

/// Asks the daemon of `name`, of which the user says that it is there.
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
            Called::Nobody => match dir.clear_dead(name)? {
                Dead::Cleared(last_words) => return Err(died(name, &last_words)),
                Dead::Orphan(orphan) => return Err(orphan.refusal()),
                Dead::No => {}
            },
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

fn exchange<T: DeserializeOwned>(
    mut stream: &UnixStream,
    request: &Request,
    timeout: Option<Duration>,
) -> io::Result<Reply<T>> {
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    stream.set_read_timeout(timeout)?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = Vec::new();
    BufReader::new(stream.take(LINE_BYTES_MAX as u64)).read_until(b'\n', &mut answer)?;
    if answer.last() != Some(&b'\n') {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection ended"));
    }
    Ok(serde_json::from_slice(&answer)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_the_way() {
        for request in [
            Request::Ping {},
            Request::Show {},
            Request::Stat {},
            Request::Set { settings: vec![("depth".into(), "64".into())] },
            Request::Resize { size: None },
            Request::Resize { size: Some(1 << 40) },
            Request::Leave {},
            Request::Detach { force: true },
        ] {
            let line = serde_json::to_vec(&request).unwrap();
            assert_eq!(parse_request(&line).unwrap(), request);
        }
        assert_eq!(
            parse_request(br#"{"command":"detach","force":false}"#).unwrap(),
            Request::Detach { force: false }
        );
    }

    #[test]
    fn what_is_not_a_request_is_refused() {
        for line in [
            "",
            "null",
            "[]",
            "{",
            "\u{0}",
            r#"{"command":"reboot"}"#,
            r#"{"command":"ping","force":true}"#,
            r#"{"command":"detach"}"#,
            r#"{"command":"detach","force":1}"#,
            r#"{"command":"resize","size":-1}"#,
            r#"{"command":"set","settings":[["a"]]}"#,
            r#"{"command":"ping"} {}"#,
        ] {
            assert!(parse_request(line.as_bytes()).is_err(), "{line}");
        }
        assert!(parse_request(&[0xff, 0xfe]).is_err());
        assert!(parse_request("[".repeat(LINE_BYTES_MAX).as_bytes()).is_err());
    }

    #[test]
    fn a_reply_is_one_bounded_line() {
        let long = reply_line(Ok("x".repeat(LINE_BYTES_MAX)));
        assert!(long.len() < 200 && long.ends_with(b"\n"));
        assert!(matches!(serde_json::from_slice(&long).unwrap(), Reply::<String>::Error(_)));
        let lines = reply_line(Ok("two\nlines"));
        assert_eq!(lines.iter().filter(|b| **b == b'\n').count(), 1);
        assert_eq!(serde_json::from_slice::<Reply<()>>(&reply_line(Ok(()))).unwrap(), Reply::Ok(()));
    }
}

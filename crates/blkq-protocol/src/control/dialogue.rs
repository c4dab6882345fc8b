use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{
    ANSWER_TIMEOUT, CHANGE_TIMEOUT, Reply, Request, connect, is_readable, not_accepting, receive,
    receive_with_file, refused, send, send_files, stopped,
};
use crate::failure::{Failure, Outcome};
use crate::state::StateDir;

/// How long [`Dialogue::end`] waits. It is longer than a daemon waits for its engines, so only a daemon that does not
/// respond exceeds it.
const END_WAIT: Duration = Duration::from_secs(2);

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Committed {
    /// Path of the image that is served now.
    pub image: String,
    /// Path of the overlay, which is empty now.
    pub emptied: String,
    /// Includes zeroes that were copied.
    pub copied_bytes: u64,
    /// Warnings about the image that is served now, one line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Snapshotted {
    /// Warnings about the overlay that did not apply to the previous image, one line each.
    pub warnings: Vec<String>,
}

/// The daemon waits for the files of [`Request::Commit`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BegunCommit {
    /// The logical block size of the device in bytes, which does not change.
    pub sector_size: u32,
}

/// A command in several steps: the client answers each reply of the daemon with one byte and maybe files.
#[derive(Debug)]
pub struct Dialogue {
    stream: UnixStream,
}

impl Dialogue {
    /// Waits for the first reply. Fails with the daemon's error, or if the daemon does not answer.
    pub fn begin(dir: &StateDir, name: &str, request: &Request) -> Outcome<Dialogue> {
        Dialogue::begin_with_file::<()>(dir, name, request, CHANGE_TIMEOUT).map(|(dialogue, ..)| dialogue)
    }

    /// As [`Dialogue::begin`], with a timeout. Also returns the value and the file of the reply.
    pub fn begin_with_file<T: DeserializeOwned>(
        dir: &StateDir,
        name: &str,
        request: &Request,
        timeout: Duration,
    ) -> Outcome<(Dialogue, T, Option<OwnedFd>)> {
        let stream = connect(dir, name, ANSWER_TIMEOUT).map_err(|e| match e.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => not_accepting(dir, name),
            _ if stopped(&e).is_some() => no_answer(e),
            _ => Failure::new(format!("cannot connect to the daemon of {name}: {e}")),
        })?;
        send(&stream, request).map_err(no_answer)?;
        match receive_with_file(&stream, timeout).map_err(no_answer)? {
            (Reply::Ok(value), file) => Ok((Dialogue { stream }, value, file)),
            (Reply::Error(message), _) => Err(refused(name, &message)),
        }
    }

    /// Sends the byte of the next step with `files`. Fails as [`Dialogue::reply`] does.
    pub fn step(&self, files: &[BorrowedFd<'_>]) -> Outcome<Outcome> {
        self.go_on(files)?;
        self.reply()
    }

    /// Sends the byte of the next step with `files`, at most [`FILES_MAX`](super::FILES_MAX).
    pub fn go_on(&self, files: &[BorrowedFd<'_>]) -> Outcome {
        match send_files(&self.stream, b"\n", files) {
            // The daemon has cancelled the command. Its reply, which is read next, says why.
            Err(e) if !matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                Err(no_answer(e))
            }
            _ => Ok(()),
        }
    }

    /// Asks the daemon to end the command. The daemon then sends the reply of the command; a trace has none.
    pub fn give_up(&self) {
        // This fails only if the daemon has closed the connection.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Ends a command whose daemon sends no further reply (a trace). Waits until the daemon has closed the connection,
    /// which it does after it has released the device for the next such command.
    pub fn end(self) {
        self.give_up();
        is_readable(&self.stream, Some(Instant::now() + END_WAIT));
    }

    /// The daemon has not replied since the last step, and has not closed the connection.
    pub fn is_waiting(&self) -> bool {
        !is_readable(&self.stream, Some(Instant::now()))
    }

    /// The outer result fails if no reply arrives; then it is unknown how far the daemon got. The inner
    /// result is what the daemon sent.
    pub fn reply<T: DeserializeOwned>(&self) -> Outcome<Outcome<T>> {
        match receive(&self.stream, CHANGE_TIMEOUT).map_err(no_answer)? {
            Reply::Ok(value) => Ok(Ok(value)),
            Reply::Error(message) => Ok(Err(Failure::new(message))),
        }
    }
}

/// Readable when there is a reply, or the daemon has closed the connection.
impl AsFd for Dialogue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn no_answer(e: io::Error) -> Failure {
    stopped(&e).cloned().unwrap_or_else(|| Failure::new(format!("the daemon sent no answer ({e})")))
}

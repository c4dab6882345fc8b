//! A command in several steps, over one connection.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{
    ANSWER_TIMEOUT, CHANGE_TIMEOUT, Reply, Request, no_such_device, receive, receive_with_file, send,
};
use crate::failure::{Failure, Outcome};
use crate::state::StateDir;

/// Most files that come with a step.
pub const FILES_MAX: usize = 3;

/// The outcome of a block commit.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Committed {
    /// The image that is served now.
    pub image: String,
    /// The one that was, which is empty.
    pub emptied: String,
    /// Bytes that were copied, zeroes included.
    pub copied_bytes: u64,
    /// Warnings of the image that is served now, one line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// The outcome of a snapshot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Snapshotted {
    /// Warnings of the new image that the one before did not have, one line each.
    pub warnings: Vec<String>,
}

/// A block commit for which the daemon waits for the files.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BegunCommit {
    /// The logical block of the device, which stays.
    pub sector_size: u32,
}

/// A command in several steps: each reply of the daemon is followed by one byte of the client, perhaps with a file.
#[derive(Debug)]
pub struct Dialogue {
    stream: UnixStream,
}

impl Dialogue {
    /// Asks the daemon of `name`, and waits for its first reply.
    ///
    /// # Errors
    /// The error of the daemon, or that it does not answer.
    pub fn begin(dir: &StateDir, name: &str, request: &Request) -> Outcome<Dialogue> {
        Dialogue::begin_with_file::<()>(dir, name, request, CHANGE_TIMEOUT).map(|(dialogue, ..)| dialogue)
    }

    /// As [`Dialogue::begin`], with a timeout and the file that comes with the reply.
    ///
    /// # Errors
    /// As there.
    pub fn begin_with_file<T: DeserializeOwned>(
        dir: &StateDir,
        name: &str,
        request: &Request,
        timeout: Duration,
    ) -> Outcome<(Dialogue, T, Option<OwnedFd>)> {
        let stream = dir.connect(name, ANSWER_TIMEOUT).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => no_such_device(name),
            _ => Failure::new(format!("control socket of {name}: {e}")),
        })?;
        send(&stream, request).map_err(no_answer)?;
        match receive_with_file(&stream, timeout).map_err(no_answer)? {
            (Reply::Ok(value), file) => Ok((Dialogue { stream }, value, file)),
            (Reply::Error(message), _) => Err(Failure::new(message)),
        }
    }

    /// Takes the next step, and waits for the reply.
    ///
    /// # Errors
    /// As [`Dialogue::reply`].
    pub fn step(&self, files: &[BorrowedFd<'_>]) -> Outcome<Outcome> {
        self.go_on(files)?;
        self.reply()
    }

    /// Takes the next step, with [`FILES_MAX`] files at most.
    ///
    /// # Errors
    /// The socket's.
    pub fn go_on(&self, files: &[BorrowedFd<'_>]) -> Outcome {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(files));
        }
        match sendmsg(&self.stream, &[IoSlice::new(b"\n")], &mut control, SendFlags::NOSIGNAL) {
            // The daemon has cancelled, and its reply has the reason.
            Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(e) => Err(no_answer(e.into())),
        }
    }

    /// Has the daemon stop what it does; its reply follows.
    pub fn give_up(&self) {
        // If that fails it has closed the connection.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Whether the daemon waits for the next step: it has not replied since the last one, nor closed the connection.
    pub fn is_waiting(&self) -> bool {
        let mut fds = [PollFd::new(&self.stream, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0)
    }

    /// Waits for the reply to a step.
    ///
    /// # Errors
    /// The outer one if there is no reply, so that it is unknown how far the daemon came; the inner one is the
    /// daemon's.
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
    Failure::new(format!("its daemon gave no answer ({e})"))
}

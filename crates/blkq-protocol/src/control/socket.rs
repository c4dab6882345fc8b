//! Sockets of the control protocol: messages that carry open files (`SCM_RIGHTS` of unix(7)), and daemons that a signal
//! (SIGSTOP) has stopped, so that a command reports them instead of waiting.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blkq_export::peer::Peer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::failure::Failure;
use crate::state::{ProcessState, StateDir};

/// Maximum number of files of a message.
pub const FILES_MAX: usize = 3;

/// Sends bytes; the files go with the first one. Returns the number of bytes that the socket accepts without waiting.
pub fn send_files(stream: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(files));
    }
    Ok(sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
}

/// Receives bytes with the files that go with them. Returns the number of bytes.
pub fn receive_files(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    Ok((received.bytes, files.flatten().collect()))
}

/// How often the state of a silent process is checked. Two checks in a row must find it stopped.
const INTERVAL: Duration = Duration::from_millis(200);

/// The error of functions that find the daemon stopped: it carries a [`Failure`], which [`stopped`] returns.
fn stop_error(pid: u32) -> io::Error {
    io::Error::other(Failure::new(format!(
        "the daemon (pid {pid}) is stopped; run `kill -CONT {pid}` to continue it, or `kill -9 {pid}` to end it"
    )))
}

/// Why the daemon does not answer, if it is stopped.
pub(super) fn stopped(error: &io::Error) -> Option<&Failure> {
    error.get_ref()?.downcast_ref()
}

/// Returns false if `stream` is not readable by `until`. Fails with a [`stop_error`] if the daemon is stopped.
pub(super) fn wait_for(stream: &UnixStream, until: Option<Instant>) -> io::Result<bool> {
    let pid = Peer::of(stream).ok().and_then(|peer| peer.pid);
    let pid = pid.and_then(|pid| u32::try_from(pid.as_raw_nonzero().get()).ok());
    let mut was_stopped = false;
    loop {
        let next = Instant::now() + INTERVAL;
        if is_readable(stream, Some(until.map_or(next, |until| until.min(next)))) {
            return Ok(true);
        }
        if until.is_some_and(|until| Instant::now() >= until) {
            return Ok(false);
        }
        let stopped = pid.filter(|pid| ProcessState::of(*pid) == ProcessState::Stopped);
        if let Some(pid) = stopped.filter(|_| was_stopped) {
            return Err(stop_error(pid));
        }
        was_stopped = stopped.is_some();
    }
}

/// Returns whether `fd` is readable at `until` or before. `None` waits without a limit.
pub fn is_readable(fd: &impl AsFd, until: Option<Instant>) -> bool {
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec::try_from(left).unwrap_or_default());
        match poll(&mut [PollFd::new(fd, PollFlags::IN)], left.as_ref()) {
            Err(Errno::INTR) => {}
            polled => return polled != Ok(0),
        }
    }
}

/// As [`StateDir::connect`], but also fails with a [`stop_error`] if the daemon is stopped.
pub(super) fn connect(dir: &StateDir, name: &str, timeout: Duration) -> io::Result<UnixStream> {
    // A stopped daemon accepts no connections, and further ones fail when the backlog of its socket is full.
    let connected = dir.connect(name, timeout.min(2 * INTERVAL));
    if connected.as_ref().err().is_none_or(|e| e.kind() != io::ErrorKind::TimedOut) {
        return connected;
    }
    match dir.holder(name).filter(|pid| ProcessState::of(*pid) == ProcessState::Stopped) {
        Some(pid) => Err(stop_error(pid)),
        None => dir.connect(name, timeout),
    }
}

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use blkq_export::peer::Peer;
use blkq_protocol::control::{Reply, line_of};
use blkq_protocol::failure::{Failure, Outcome};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Serialize;

use super::shared::Shared;
use crate::log;

/// Traces the device until the client closes the connection or sends anything. The reply is sent when the
/// trace has started; no reply has been sent if this fails.
pub(super) fn serve_trace(shared: &Shared, stream: &UnixStream, ring_bytes: u64) -> Outcome {
    let tracer = client_of(stream);
    shared.stage().check()?;
    let trace = shared.device().trace(ring_bytes, &tracer)?;
    send_with_file(stream, (), trace.memory().file())?;
    log::line(&format!("trace: started by {tracer}"));
    shared.without_answer(|| wait_for_close(stream));
    log::line("trace: stopped");
    Ok(())
}

pub(super) fn client_of(stream: &UnixStream) -> String {
    let pid = Peer::of(stream).ok().and_then(|peer| peer.pid);
    pid.map_or("another process".to_owned(), |pid| format!("process {}", pid.as_raw_nonzero()))
}

/// `file` goes with the first byte of the reply. Fails if the client does not read the reply.
pub(super) fn send_with_file<T: Serialize>(stream: &UnixStream, value: T, file: BorrowedFd<'_>) -> Outcome {
    let line = line_of(&Reply::Ok(value))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file];
    control.push(SendAncillaryMessage::ScmRights(&files));
    // The line is short and the socket's buffer is empty, so the kernel accepts the whole line.
    match sendmsg(stream, &[IoSlice::new(&line)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(sent) if sent == line.len() => Ok(()),
        _ => Err(Failure::new("the client does not read the reply")),
    }
}

fn wait_for_close(stream: &UnixStream) {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    while poll(&mut fds, None) == Err(Errno::INTR) {}
}

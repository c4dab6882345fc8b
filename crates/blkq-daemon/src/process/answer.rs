use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkq_export::peer::Peer;
use blkq_protocol::control::{
    BegunCommit, LINE_BYTES_MAX, LINE_TIMEOUT, NewSize, Request, is_readable, parse_request, reply_line,
};
use blkq_protocol::failure::{EXIT_LEFT, Failure, Outcome};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};

use super::dialogues::{receive_file, serve_commit, serve_snapshot, serve_trace};
use super::shared::{LEAVE_WAIT, Shared, Stage};
use crate::log;

/// More commands at the same time are rejected.
pub(super) const ANSWERING_MAX: usize = 16;

/// How long the main thread of a stopping daemon waits for the rest of a command that has begun to arrive, once the
/// clients that get no thread have used up the [`LEAVE_WAIT`] that they share.
const SENT_WAIT: Duration = Duration::from_millis(1);

pub(super) fn accept(shared: &Arc<Shared>, stream: UnixStream) {
    if let Some(stream) = admit(shared, stream)
        && let Err((stream, why)) = serve_on_thread(shared, stream)
    {
        reject(&stream, why);
    }
}

/// Accepts all clients that have connected to a daemon that stops: each command has an answer of its own for a
/// stopped device. This thread answers the commands that get no other thread. No further client can connect.
pub(super) fn accept_all(shared: &Arc<Shared>, control: &UnixListener) {
    let _ = shutdown(control, Shutdown::Read);
    let until = Instant::now() + LEAVE_WAIT;
    while let Ok((stream, _)) = control.accept() {
        let Some(stream) = admit(shared, stream) else { continue };
        if let Err((stream, why)) = serve_on_thread(shared, stream) {
            match is_readable(&*stream, Some(until)) {
                true => serve(shared, stream, until.max(Instant::now() + SENT_WAIT)),
                false => reject(&stream, why),
            }
        }
    }
}

/// Rejects the client and returns `None` unless its user may send commands.
fn admit(shared: &Shared, stream: UnixStream) -> Option<Arc<UnixStream>> {
    // The mode of the socket restricts users already, but the socket may have been moved to another
    // directory.
    if !Peer::of(&stream).is_ok_and(|peer| peer.uid == shared.owner || peer.uid.is_root()) {
        reject(&stream, "only root and the user who runs the daemon may send commands");
        return None;
    }
    Some(Arc::new(stream))
}

/// If no thread can serve the client, returns the client and the reason.
fn serve_on_thread(
    shared: &Arc<Shared>,
    stream: Arc<UnixStream>,
) -> Result<(), (Arc<UnixStream>, &'static str)> {
    if shared.answering() >= ANSWERING_MAX {
        return Err((stream, "too many commands at the same time; try again"));
    }
    let of_thread = stream.clone();
    match shared.spawn(|shared| serve(shared, of_thread, Instant::now() + LINE_TIMEOUT)) {
        true => Ok(()),
        false => Err((stream, "cannot start a thread for the command; try again")),
    }
}

fn reject(stream: &UnixStream, why: &str) {
    answer(stream, &reply_line::<()>(Err(Failure::new(why))));
}

/// Executes the client's command, which must arrive before `until`.
fn serve(shared: &Shared, stream: Arc<UnixStream>, until: Instant) {
    if !is_readable(&*stream, Some(until.min(Instant::now() + LEAVE_WAIT))) {
        shared.without_answer(|| _ = is_readable(&*stream, Some(until)));
    }
    let request = match read_request(&stream, until) {
        Ok(request) => request,
        Err(failure) => return answer(&stream, &reply_line::<()>(Err(failure))),
    };
    let refused = |failure: &Failure| log::line(&format!("refused: {failure}"));
    // The client has already reported a failure to its user, because this daemon was stopped (SIGSTOP) or
    // accepted the connection too late. Executing the request now would be a surprise.
    if has_hung_up(&stream) {
        refused(&Failure::new("the client had exited before its request was read"));
        return;
    }
    // The client may also exit while its request waits for another change.
    let permit = || match has_hung_up(&stream) {
        true => Err(Failure::new("the client had exited before its request was executed")),
        false => Ok(()),
    };
    let reply = match request {
        Request::Ping {} => reply_line(Ok(())),
        Request::Show {} => reply_line(shared.device.info()),
        Request::Stat {} => reply_line(Ok(shared.device.statistics())),
        Request::Set { settings } => reply_line(shared.set(&settings, &permit).inspect_err(refused)),
        Request::Resize { size, grow_by, force, user } => {
            let new = match (size, grow_by) {
                (_, Some(bytes)) => NewSize::LargerBy(bytes),
                (Some(bytes), None) => NewSize::Bytes(bytes),
                (None, None) => NewSize::OfImage,
            };
            log::line(&format!("resize {new}"));
            let open = shared.stage().check();
            let resize = || shared.device.resize(new, force, user, &permit);
            reply_line(open.and_then(|()| resize()).inspect_err(refused))
        }
        Request::Resume { fail } => {
            let resumed = shared.device.resume(fail);
            if let Ok(count) = &resumed {
                let requests = if *count == 1 { "request" } else { "requests" };
                let done = if fail { "failed" } else { "reissued" };
                log::line(&format!("resume: {count} held {requests} {done}"));
            }
            reply_line(resumed)
        }
        Request::Bitmaps {} => reply_line(shared.device.bitmaps()),
        Request::BitmapFile {} => {
            let file = ask_for_file(shared, &stream);
            let open = shared.stage().check();
            let set = |file| open.and_then(|()| shared.device.set_bitmap_file(file, &permit));
            reply_line(file.and_then(set))
        }
        Request::JoinGroup { group } => {
            log::line(&format!("set group={group}"));
            let file = ask_for_file(shared, &stream);
            reply_line(file.and_then(|file| shared.join_group(&group, file, &permit)).inspect_err(refused))
        }
        Request::Bitmap { change } => {
            log::line(&format!("bitmap: {change}"));
            let open = shared.stage().check();
            reply_line(open.and_then(|()| shared.device.change_bitmap(&change, &permit)).inspect_err(refused))
        }
        Request::Apply { settings } => reply_line(shared.apply(&settings, &permit).inspect_err(refused)),
        Request::ReloadCertificates {} => {
            let reloaded = shared.device.reload_certificates().inspect_err(refused);
            if let Ok(Some(directory)) = &reloaded {
                log::line(&format!("reloaded the certificates in {}", directory.display()));
            }
            reply_line(reloaded.map(|_| ()))
        }
        Request::Trace { ring_bytes } => match serve_trace(shared, &stream, ring_bytes) {
            Ok(()) => return,
            Err(failure) => reply_line::<()>(Err(failure)),
        },
        Request::Snapshot { options, image } => {
            let next = || answer(&stream, &reply_line(Ok(())));
            reply_line(serve_snapshot(shared, &stream, &options, image, next).inspect_err(refused))
        }
        Request::Commit { image } => {
            let next = |begun: BegunCommit| answer(&stream, &reply_line(Ok(begun)));
            reply_line(serve_commit(shared, &stream, image, next).inspect_err(refused))
        }
        Request::Leave {} => match shared.leave() {
            Ok(()) => {
                log::line("stopping: another daemon takes over the device");
                answer(&stream, &reply_line(Ok(())));
                shared.wait_for_answers(1, LEAVE_WAIT);
                // Exit as if killed. The kernel aborts the requests that it passed to this process when the
                // process exits; if only the ring were closed, the kernel might wait for these requests for
                // ever.
                std::process::exit(EXIT_LEFT.into());
            }
            Err(failure) => reply_line::<()>(Err(failure)),
        },
        Request::Detach { force } => match shared.close(Stage::Stopping, |device| device.close(force)) {
            Ok(()) => {
                log::line("stopping: detach was requested");
                return shared.stop(Some(stream));
            }
            Err(failure) => reply_line::<()>(Err(failure)),
        },
    };
    answer(&stream, &reply);
}

/// Fails if the device is stopping, or no file arrives.
fn ask_for_file(shared: &Shared, stream: &UnixStream) -> Outcome<File> {
    shared.stage().check()?;
    answer(stream, &reply_line(Ok(())));
    receive_file(stream)
}

/// A client that only shut down its sending side still waits for an answer.
fn has_hung_up(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::empty())];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok()
        && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// Reads one line, at most [`LINE_BYTES_MAX`] long.
fn read_request(mut stream: &UnixStream, until: Instant) -> Outcome<Request> {
    let mut line = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Failure::new("no request was received in time"));
        }
        let read = stream.set_read_timeout(Some(left)).and_then(|()| stream.read(&mut piece));
        match read {
            Ok(0) => return Err(Failure::new("malformed request: the line is incomplete")),
            Ok(length) => line.extend_from_slice(&piece[..length]),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(Failure::new(format!("cannot read the request: {e}"))),
        }
        if let Some(end) = line.iter().position(|byte| *byte == b'\n') {
            return parse_request(&line[..end]);
        }
        if line.len() >= LINE_BYTES_MAX {
            return Err(Failure::new(format!("malformed request: longer than {LINE_BYTES_MAX} bytes")));
        }
    }
}

/// Sends a reply. Errors are ignored: a client that does not read its reply gets none.
pub(super) fn answer(mut stream: &UnixStream, reply: &[u8]) {
    let _ = stream.set_write_timeout(Some(LINE_TIMEOUT));
    let _ = stream.write_all(reply);
}

//! Executes the commands of clients. Snapshots, block commits and traces have several steps.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkq_drivers::qcow2::BaseFiles;
use blkq_export::peer::Peer;
use blkq_protocol::control::{
    BegunCommit, CHANGE_TIMEOUT, Committed, LINE_BYTES_MAX, LINE_TIMEOUT, NewSize, Reply, Request,
    Snapshotted, is_readable, line_of, parse_request, receive_files, reply_line, send_files,
};
use blkq_protocol::failure::{EXIT_LEFT, Failure, Outcome};
use blkq_protocol::options::Record;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};
use serde::Serialize;

use super::shared::{LEAVE_WAIT, Shared, Stage};
use crate::device::Permit;
use crate::log;

/// How long the I/O of this device waits for the other devices of a snapshot.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(10);

/// More commands at the same time are rejected.
pub(super) const ANSWERING_MAX: usize = 16;

/// How long the main thread of a stopping daemon waits for the rest of a command that has begun to arrive, once the
/// clients that get no thread have used up the [`LEAVE_WAIT`] that they share.
const SENT_WAIT: Duration = Duration::from_millis(1);

/// Serves the client on a thread of its own. If there is none, this thread serves the client, provided that its command
/// begins to arrive before `until`.
pub(super) fn accept(shared: &Arc<Shared>, stream: UnixStream, until: Option<Instant>) {
    // The mode of the socket restricts users already, but the socket may have been moved to another
    // directory.
    if !Peer::of(&stream).is_ok_and(|peer| peer.uid == shared.owner || peer.uid.is_root()) {
        return reject(&stream, "only root and the user who runs the daemon may send commands");
    }
    let stream = Arc::new(stream);
    let of_thread = stream.clone();
    let why = if shared.answering() >= ANSWERING_MAX {
        "too many commands at the same time; try again"
    } else if shared.spawn(|shared| serve(shared, of_thread, Instant::now() + LINE_TIMEOUT)) {
        return;
    } else {
        "cannot start a thread for the command; try again"
    };
    match until.filter(|until| is_readable(&*stream, Some(*until))) {
        Some(until) => serve(shared, stream, until.max(Instant::now() + SENT_WAIT)),
        None => reject(&stream, why),
    }
}

/// Accepts all clients that have connected to a daemon that stops: each command has an answer of its own for a
/// stopped device. This thread answers the commands that get no other thread. No further client can connect.
pub(super) fn accept_all(shared: &Arc<Shared>, control: &UnixListener) {
    let _ = shutdown(control, Shutdown::Read);
    let until = Instant::now() + LEAVE_WAIT;
    while let Ok((stream, _)) = control.accept() {
        accept(shared, stream, Some(until));
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
    let is_change = matches!(
        request,
        Request::Set { .. }
            | Request::Resize { .. }
            | Request::JoinGroup { .. }
            | Request::Bitmap { .. }
            | Request::Apply { .. }
            | Request::ReloadCertificates {}
            | Request::Snapshot { .. }
            | Request::Commit { .. }
    );
    match execute(shared, &stream, request, &permit) {
        Ok(Some(reply)) => answer(&stream, &reply),
        Ok(None) => {}
        Err(failure) => {
            if is_change {
                refused(&failure);
            }
            answer(&stream, &reply_line::<()>(Err(failure)));
        }
    }
}

/// The reply, or `None` if the client gets it elsewhere.
type Answer = Outcome<Option<Vec<u8>>>;

fn execute(shared: &Shared, stream: &Arc<UnixStream>, request: Request, permit: Permit) -> Answer {
    let device = &shared.device;
    match request {
        Request::Ping {} => reply(()),
        Request::Show {} => reply(device.info()?),
        Request::Stat {} => reply(device.statistics()),
        Request::Set { settings } => reply(shared.set(&settings, permit)?),
        Request::Resize { size, grow_by, force, user } => {
            let new = match (size, grow_by) {
                (_, Some(bytes)) => NewSize::LargerBy(bytes),
                (Some(bytes), None) => NewSize::Bytes(bytes),
                (None, None) => NewSize::OfImage,
            };
            log::line(&format!("resize {new}"));
            shared.check_stage()?;
            reply(device.resize(new, force, user, permit)?)
        }
        Request::Resume { fail } => {
            let count = device.resume(fail)?;
            let requests = if count == 1 { "request" } else { "requests" };
            let done = if fail { "failed" } else { "reissued" };
            log::line(&format!("resume: {count} held {requests} {done}"));
            reply(count)
        }
        Request::Bitmaps {} => reply(device.bitmaps()?),
        Request::BitmapFile {} => {
            let file = ask_for_file(shared, stream)?;
            shared.check_stage()?;
            reply(device.set_bitmap_file(file, permit)?)
        }
        Request::JoinGroup { group } => {
            log::line(&format!("set group={group}"));
            reply(shared.join_group(&group, ask_for_file(shared, stream)?, permit)?)
        }
        Request::Bitmap { change } => {
            log::line(&format!("bitmap: {change}"));
            shared.check_stage()?;
            reply(device.change_bitmap(&change, permit)?)
        }
        Request::Apply { settings } => reply(shared.apply(&settings, permit)?),
        Request::ReloadCertificates {} => {
            if let Some(directory) = device.reload_certificates()? {
                log::line(&format!("reloaded the certificates in {}", directory.display()));
            }
            reply(())
        }
        Request::Trace { ring_bytes } => trace(shared, stream, ring_bytes),
        Request::Snapshot { options, image } => {
            reply(Snapshotted { warnings: snapshot(shared, stream, &options, recorded(image)?)? })
        }
        Request::Commit { image } => reply(commit(shared, stream, recorded(image)?)?),
        Request::Leave {} => {
            shared.leave()?;
            log::line("stopping: another daemon takes over the device");
            answer(stream, &reply_line(Ok(())));
            shared.wait_for_answers(1, LEAVE_WAIT);
            // Exit as if killed. The kernel aborts the requests that it passed to this process when the
            // process exits; if only the ring were closed, the kernel might wait for these requests for
            // ever.
            std::process::exit(EXIT_LEFT.into());
        }
        Request::Detach { force } => {
            shared.close(Stage::Stopping, |device| device.close(force))?;
            log::line("stopping: detach was requested");
            shared.stop(Some(stream.clone()));
            Ok(None)
        }
    }
}

fn reply<T: Serialize>(value: T) -> Answer {
    line_of(&Reply::Ok(value)).map(Some)
}

/// Fails if the device is stopping, or no file arrives.
fn ask_for_file(shared: &Shared, stream: &UnixStream) -> Outcome<File> {
    shared.check_stage()?;
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
        if !is_readable(stream, Some(until)) {
            return Err(Failure::new("no request was received in time"));
        }
        match stream.read(&mut piece) {
            Ok(0) => return Err(Failure::new("malformed request: the line is incomplete")),
            Ok(length) => line.extend_from_slice(&piece[..length]),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
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

/// A snapshot has several steps, because several devices may be stopped at the same moment. If the client closes the
/// connection before the last step, or after a failure, the device continues with its image.
fn snapshot(shared: &Shared, stream: &UnixStream, options: &Record, image: u64) -> Outcome<Vec<String>> {
    let next = || answer(stream, &reply_line(Ok(())));
    let options = options.read()?;
    shared.check_stage()?;
    // Most of the data is flushed here, while I/O continues and before any device of the snapshot is stopped.
    // The stage is not locked: a flush may take long or hang, and a forced stop must not wait for it.
    shared.device.flush()?;
    next();
    let file = receive_file(stream)?;
    // The next daemon reads what is written here, so the stage is locked: nothing may be changed once the
    // device stops.
    let stage = shared.stage();
    stage.check()?;
    let ready = || {
        next();
        wait(stream)
    };
    let warnings = shared.device.snapshot(file, &options, image, ready, |state| shared.write_state(state))?;
    log::line(&format!("snapshot: the active image is now {}", shared.device.image()?));
    warnings.iter().for_each(|warning| log::line(&format!("warning: {warning}")));
    Ok(warnings)
}

/// Cancels the commit if the client closes the connection or sends anything. The backing file is entry `number`
/// of `NAME.options`. After a failure, the device continues with the overlay.
fn commit(shared: &Shared, stream: &UnixStream, number: u64) -> Outcome<Committed> {
    let client = client_of(stream);
    shared.check_stage()?;
    let device = &shared.device;
    device.check_committable()?;
    answer(stream, &reply_line(Ok(BegunCommit { sector_size: device.info()?.sector_size })));
    let mut files = receive_all(stream)?.into_iter();
    let (Some(image), Some(synced)) = (files.next(), files.next()) else {
        return Err(Failure::new("the command did not send the backing file"));
    };
    let files = BaseFiles { image, synced, bitmaps: files.next() };
    let closed = || match is_readable(stream, Some(Instant::now())) {
        true => Err(Failure::new(format!("cancelled by {client}"))),
        false => Ok(()),
    };
    let stop = || {
        // The lock is released immediately: a thread that changes the stage may wait for this commit.
        shared.check_stage()?;
        closed()
    };
    log::line(&format!("commit: started by {client}"));
    // The last step writes the state file, from which the next daemon reads the image, so it must not run
    // while the device stops. The lock must not be waited for: its holder may wait for I/O that the commit
    // has frozen, or for the commit itself. If the lock is taken, the commit tries again later.
    let last = || {
        closed()?;
        shared.try_stage().map(|stage| stage.check().map(|()| stage)).transpose()
    };
    let done = device.commit(files, number, &client, &stop, last, |state| shared.write_state(state))?;
    log::line(&format!("commit: pivoted to {}; {} is empty", done.image, done.emptied));
    done.warnings.iter().for_each(|warning| log::line(&format!("warning: {warning}")));
    Ok(done)
}

/// Traces the device until the client closes the connection or sends anything. The reply is sent when the
/// trace has started; no reply has been sent if this fails.
fn trace(shared: &Shared, stream: &UnixStream, ring_bytes: u64) -> Answer {
    let tracer = client_of(stream);
    shared.check_stage()?;
    let trace = shared.device.trace(ring_bytes, &tracer)?;
    let reply = line_of(&Reply::Ok(()))?;
    // The line is short and the socket's buffer is empty, so the kernel accepts the whole line.
    let sent = send_files(stream, &reply, &[trace.memory.file()]);
    if !sent.is_ok_and(|sent| sent == reply.len()) {
        return Err(Failure::new("the client does not read the reply"));
    }
    log::line(&format!("trace: started by {tracer}"));
    shared.without_answer(|| _ = is_readable(stream, None));
    log::line("trace: stopped");
    Ok(None)
}

fn client_of(stream: &UnixStream) -> String {
    let pid = Peer::of(stream).ok().and_then(|peer| peer.pid);
    pid.map_or("another process".to_owned(), |pid| format!("process {}", pid.as_raw_nonzero()))
}

/// `image` is the number of the image in `NAME.options`. Fails for a command of an older version, which
/// records nothing.
fn recorded(image: Option<u64>) -> Outcome<u64> {
    let of_older =
        "this blkq is older than the daemon; use the blkq that attached the device, or a later one";
    image.ok_or_else(|| Failure::new(of_older))
}

/// The file comes with the next byte. Fails if no file arrives within [`CHANGE_TIMEOUT`].
fn receive_file(stream: &UnixStream) -> Outcome<File> {
    let file = receive_all(stream)?.pop();
    file.ok_or_else(|| Failure::new("the command sent no file"))
}

/// The files come with the next byte, at most [`FILES_MAX`](blkq_protocol::control::FILES_MAX).
fn receive_all(stream: &UnixStream) -> Outcome<Vec<File>> {
    let received =
        stream.set_read_timeout(Some(CHANGE_TIMEOUT)).and_then(|()| receive_files(stream, &mut [0]));
    let (_, files) = received.map_err(|e| Failure::new(format!("cannot receive the file: {e}")))?;
    Ok(files.into_iter().map(File::from).collect())
}

fn wait(mut stream: &UnixStream) -> Outcome {
    let _ = stream.set_read_timeout(Some(OTHERS_TIMEOUT));
    match stream.read(&mut [0]) {
        Ok(1) => Ok(()),
        Ok(_) => Err(Failure::new("snapshot cancelled by the command")),
        Err(_) => {
            let seconds = OTHERS_TIMEOUT.as_secs();
            Err(Failure::new(format!("snapshot cancelled: the command sent nothing for {seconds} s")))
        }
    }
}

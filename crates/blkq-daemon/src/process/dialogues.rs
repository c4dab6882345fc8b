//! Commands in several steps: snapshots, block commits and traces. A snapshot has several steps because several devices
//! may be stopped at the same moment.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blkq_drivers::qcow2::BaseFiles;
use blkq_export::peer::Peer;
use blkq_protocol::control::{
    BegunCommit, CHANGE_TIMEOUT, Committed, FILES_MAX, Reply, Snapshotted, is_readable, line_of,
};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::options::Record;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use super::shared::Shared;
use crate::log;

/// How long the I/O of this device waits for the other devices of a snapshot.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(10);

/// `reply` announces to the client that its next step is due. If the client closes the connection before the
/// last step, or after a failure, the device continues with its image.
pub(super) fn serve_snapshot(
    shared: &Shared,
    stream: &UnixStream,
    options: &Record,
    image: Option<u64>,
    reply: impl Fn(),
) -> Outcome<Snapshotted> {
    let image = recorded(image)?;
    let options = options.read()?;
    shared.stage().check()?;
    // Most of the data is flushed here, while I/O continues and before any device of the snapshot is stopped.
    // The stage is not locked: a flush may take long or hang, and a forced stop must not wait for it.
    shared.device.flush()?;
    reply();
    let file = receive_file(stream)?;
    // The next daemon reads what is written here, so the stage is locked: nothing may be changed once the
    // device stops.
    let stage = shared.stage();
    stage.check()?;
    let ready = || {
        reply();
        wait(stream)
    };
    let warnings = shared.device.snapshot(file, &options, image, ready, |state| shared.write_state(state))?;
    log::line(&format!("snapshot: the active image is now {}", shared.device.image()));
    warnings.iter().for_each(|warning| log::line(&format!("warning: {warning}")));
    Ok(Snapshotted { warnings })
}

/// Cancels the commit if the client closes the connection or sends anything. `image` is the backing file in
/// `NAME.options`. `next` asks the client for the files. After a failure, the device continues with the
/// overlay.
pub(super) fn serve_commit(
    shared: &Shared,
    stream: &UnixStream,
    image: Option<u64>,
    next: impl FnOnce(BegunCommit),
) -> Outcome<Committed> {
    let number = recorded(image)?;
    let client = client_of(stream);
    shared.stage().check()?;
    let device = &shared.device;
    device.check_committable()?;
    next(BegunCommit { sector_size: device.info()?.sector_size });
    let mut files = receive_files(stream)?.into_iter();
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
        shared.stage().check()?;
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
pub(super) fn serve_trace(shared: &Shared, stream: &UnixStream, ring_bytes: u64) -> Outcome {
    let tracer = client_of(stream);
    shared.stage().check()?;
    let trace = shared.device.trace(ring_bytes, &tracer)?;
    send_with_file(stream, trace.memory.file())?;
    log::line(&format!("trace: started by {tracer}"));
    shared.without_answer(|| _ = is_readable(stream, None));
    log::line("trace: stopped");
    Ok(())
}

fn client_of(stream: &UnixStream) -> String {
    let pid = Peer::of(stream).ok().and_then(|peer| peer.pid);
    pid.map_or("another process".to_owned(), |pid| format!("process {}", pid.as_raw_nonzero()))
}

/// Sends a reply. `file` goes with its first byte. Fails if the client does not read the reply.
fn send_with_file(stream: &UnixStream, file: BorrowedFd<'_>) -> Outcome {
    let line = line_of(&Reply::Ok(()))?;
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

/// `image` is the number of the image in `NAME.options`. Fails for a command of an older version, which
/// records nothing.
fn recorded(image: Option<u64>) -> Outcome<u64> {
    let of_older =
        "this blkq is older than the daemon; use the blkq that attached the device, or a later one";
    image.ok_or_else(|| Failure::new(of_older))
}

/// The file comes with the next byte. Fails if no file arrives within [`CHANGE_TIMEOUT`].
pub(super) fn receive_file(stream: &UnixStream) -> Outcome<File> {
    let file = receive_files(stream)?.pop();
    file.ok_or_else(|| Failure::new("the command sent no file"))
}

/// The files come with the next byte, at most [`FILES_MAX`].
fn receive_files(stream: &UnixStream) -> Outcome<Vec<File>> {
    let failed = |why: String| Failure::new(format!("cannot receive the file: {why}"));
    stream.set_read_timeout(Some(CHANGE_TIMEOUT)).map_err(|e| failed(e.to_string()))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(|e| failed(e.to_string()))?;
    let files = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files.map(File::from).collect()),
        _ => None,
    });
    Ok(files.unwrap_or_default())
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

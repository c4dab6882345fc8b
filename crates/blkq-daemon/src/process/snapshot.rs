//! A snapshot has several steps, because several devices may be stopped at the same moment.

use std::fs::File;
use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use blkq_protocol::control::{CHANGE_TIMEOUT, FILES_MAX, Snapshotted};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::options::Record;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

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
    shared.device().flush_for_change()?;
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
    let warnings =
        shared.device().snapshot(file, &options, image, ready, |state| shared.write_state(state))?;
    log::line(&format!("snapshot: the active image is now {}", shared.device().image()));
    warnings.iter().for_each(|warning| log::line(&format!("warning: {warning}")));
    Ok(Snapshotted { warnings })
}

/// `image` is the number of the image in `NAME.options`. Fails for a command of an older version, which
/// records nothing.
pub(super) fn recorded(image: Option<u64>) -> Outcome<u64> {
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
pub(super) fn receive_files(stream: &UnixStream) -> Outcome<Vec<File>> {
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

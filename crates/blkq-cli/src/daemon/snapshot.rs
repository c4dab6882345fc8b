//! A snapshot over the control socket, in steps: another device may be stopped at the same moment.

use std::fs::File;
use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::shared::Shared;
use crate::control::{CHANGE_TIMEOUT, FILES_MAX, Snapshotted};
use crate::failure::{Failure, Outcome};
use crate::log;
use crate::options::Record;

/// How long I/O waits for the other devices of a snapshot.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(10);

/// Makes the snapshot, unless the client closes the connection before the last step. `reply` notifies the client that
/// the next step is its.
///
/// # Errors
/// Why there is none; the device goes on as it was.
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
    // Most of it while I/O goes on, before any device of the snapshot is stopped; and not under the lock: a flush may
    // take long, or hang, and a forced stop does not wait for it.
    shared.device().flush_for_change()?;
    reply();
    let file = receive_file(stream)?;
    // The next daemon of the device reads what is written here, and nothing is changed once it stops.
    let stage = shared.stage();
    stage.check()?;
    let ready = || {
        reply();
        wait(stream)
    };
    let warnings =
        shared.device().snapshot(file, &options, image, ready, |state| shared.write_state(state))?;
    log::line(&format!("snapshot: the image is {} now", shared.device().image()));
    warnings.iter().for_each(|warning| log::line(&format!("warning: {warning}")));
    Ok(Snapshotted { warnings })
}

/// The number of the image that the command has recorded for the next daemon.
///
/// # Errors
/// If it has recorded none.
pub(super) fn recorded(image: Option<u64>) -> Outcome<u64> {
    let of_older = "the command is of an older blkq than the daemon; run the blkq that attached the device, or a later one";
    image.ok_or_else(|| Failure::new(of_older))
}

/// The file that comes with the next byte.
///
/// # Errors
/// If none comes in time.
pub(super) fn receive_file(stream: &UnixStream) -> Outcome<File> {
    let file = receive_files(stream)?.pop();
    file.ok_or_else(|| Failure::new("the new file did not come: there was none"))
}

/// The files that come with the next byte: at most [`FILES_MAX`].
///
/// # Errors
/// The socket's.
pub(super) fn receive_files(stream: &UnixStream) -> Outcome<Vec<File>> {
    let failed = |why: String| Failure::new(format!("the file did not come: {why}"));
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

/// Waits for the last step.
fn wait(mut stream: &UnixStream) -> Outcome {
    let _ = stream.set_read_timeout(Some(OTHERS_TIMEOUT));
    match stream.read(&mut [0]) {
        Ok(1) => Ok(()),
        Ok(_) => Err(Failure::new("the snapshot was given up")),
        Err(_) => {
            let seconds = OTHERS_TIMEOUT.as_secs();
            Err(Failure::new(format!("the snapshot was given up: its command did nothing for {seconds} s")))
        }
    }
}

//! A block commit over the control socket: it lasts as long as its connection.

use std::os::unix::net::UnixStream;

use blkq_drivers::qcow2::BaseFiles;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::shared::Shared;
use super::snapshot::{receive_files, recorded};
use super::trace::client_of;
use crate::control::{BegunCommit, Committed};
use crate::failure::{Failure, Outcome};
use crate::log;

/// Has the device's image go to the one behind it, which the command records as `image`, unless the client closes the
/// connection, or sends anything. `next` asks for the files.
///
/// # Errors
/// Why it does not; the device goes on as it was.
pub(super) fn serve_commit(
    shared: &Shared,
    stream: &UnixStream,
    image: Option<u64>,
    next: impl FnOnce(BegunCommit),
) -> Outcome<Committed> {
    let number = recorded(image)?;
    let client = client_of(stream);
    shared.stage().check()?;
    let device = shared.device();
    device.check_committable()?;
    next(BegunCommit { sector_size: device.info()?.sector_size });
    let mut files = receive_files(stream)?.into_iter();
    let (Some(image), Some(synced)) = (files.next(), files.next()) else {
        return Err(Failure::new("the image behind was not opened"));
    };
    let files = BaseFiles { image, synced, bitmaps: files.next() };
    let closed = || match is_closed(stream) {
        true => Err(Failure::new(format!("stopped by {client}"))),
        false => Ok(()),
    };
    let stop = || {
        // Not kept: who changes the stage may wait for this.
        shared.stage().check()?;
        closed()
    };
    log::line(&format!("commit: {client} has the image go to the one behind it"));
    // The next daemon of the device reads what is written last, and nothing is changed once it stops. Not to be waited
    // for: who has it may wait for the I/O that waits for this, or for this change to be over.
    let last = || {
        closed()?;
        shared.try_stage().map(|stage| stage.check().map(|()| stage)).transpose()
    };
    let done = device.commit(files, number, &client, &stop, last, |state| shared.write_state(state))?;
    log::line(&format!("commit: the image is {} now, and {} is empty", done.image, done.emptied));
    done.warnings.iter().for_each(|warning| log::line(&format!("warning: {warning}")));
    Ok(done)
}

/// Whether there is something to read, the end of the stream for one.
fn is_closed(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) != Ok(0)
}

use std::os::unix::net::UnixStream;

use blkq_drivers::qcow2::BaseFiles;
use blkq_protocol::control::{BegunCommit, Committed};
use blkq_protocol::failure::{Failure, Outcome};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::shared::Shared;
use super::snapshot::{receive_files, recorded};
use super::trace::client_of;
use crate::log;

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
    let device = shared.device();
    device.check_committable()?;
    next(BegunCommit { sector_size: device.info()?.sector_size });
    let mut files = receive_files(stream)?.into_iter();
    let (Some(image), Some(synced)) = (files.next(), files.next()) else {
        return Err(Failure::new("the command did not send the backing file"));
    };
    let files = BaseFiles { image, synced, bitmaps: files.next() };
    let closed = || match is_closed(stream) {
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

/// The client has closed the connection or sent something.
fn is_closed(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) != Ok(0)
}

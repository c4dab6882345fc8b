//! The server's ends of the clients' sockets, identified by descriptor and inode.

use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::fs::MetadataExt;

/// Whether the server has more open sockets than `clients`: some clients have disconnected, and the server has not
/// noticed. Removes closed sockets from the list.
pub fn has_ghosts(sockets: &mut Vec<(RawFd, u64)>, clients: usize) -> bool {
    sockets.retain(|&(socket, inode)| {
        // SAFETY: the file is only inspected, and not closed.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(socket) });
        file.metadata().is_ok_and(|metadata| metadata.ino() == inode)
    });
    sockets.len() > clients
}

/// Closes the sockets that a panic leaks, as the exit of the process would do.
pub fn close_sockets(sockets: Vec<(RawFd, u64)>) {
    for (socket, inode) in sockets {
        // SAFETY: the file is closed only if it is still the same socket, whose owner was leaked then.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(socket) });
        if file.metadata().is_ok_and(|metadata| metadata.ino() == inode) {
            drop(ManuallyDrop::into_inner(file));
        }
    }
}

//! The server's side of clients' sockets, by descriptor and inode.

use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::fs::MetadataExt;

/// Whether the server, of whose `sockets` these are descriptors and inodes, has more than its `clients`: some have
/// gone.
pub fn has_ghosts(sockets: &[(RawFd, u64)], clients: usize) -> bool {
    let is_open = |&&(socket, inode): &&(RawFd, u64)| {
        // SAFETY: it is read only, and not closed.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(socket) });
        file.metadata().is_ok_and(|metadata| metadata.ino() == inode)
    };
    sockets.iter().filter(is_open).count() > clients
}

/// Closes the sockets that a panic leaks, as the exit of the process would.
pub fn close_sockets(sockets: Vec<(RawFd, u64)>) {
    for (socket, inode) in sockets {
        // SAFETY: it is read only, and closed only if it is that socket: then its owner was leaked.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(socket) });
        if file.metadata().is_ok_and(|metadata| metadata.ino() == inode) {
            drop(ManuallyDrop::into_inner(file));
        }
    }
}

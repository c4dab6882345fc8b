//! The server's ends of the clients' sockets, identified by descriptor and inode.

use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{BorrowedFd, FromRawFd, RawFd};
use std::os::unix::fs::MetadataExt;

use rustix::net::sockopt::set_socket_send_buffer_size;

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

/// Makes the send buffers of the sockets as small as the kernel allows, so that a client that does not read soon blocks
/// its server.
pub fn limit_send_buffers(sockets: &mut Vec<(RawFd, u64)>) {
    // Removes the closed ones.
    has_ghosts(sockets, 0);
    for (socket, _) in sockets {
        // SAFETY: the descriptor is open, and stays so during the call: no other code runs on the world's only thread.
        let socket = unsafe { BorrowedFd::borrow_raw(*socket) };
        set_socket_send_buffer_size(socket, 1).unwrap();
    }
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

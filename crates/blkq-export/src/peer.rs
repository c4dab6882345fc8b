//! The other end of a socket: the process for a unix socket, else an address.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, sockopt};
use rustix::process::{Pid, Uid};

/// A process, as the kernel recorded it when the connection was made (`SO_PEERCRED`).
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Process ID; `None` if the process is in a PID namespace that is not visible from here.
    pub pid: Option<Pid>,
    /// User ID; the overflow user (65534) if the user has no ID in this user namespace.
    pub uid: Uid,
}

impl Peer {
    /// Reads the credentials of the peer of `socket` from the kernel.
    ///
    /// # Errors
    /// The kernel's error, or `ENOTCONN` if the socket has no peer credentials (TCP).
    pub fn of(socket: impl AsFd) -> Result<Peer, Errno> {
        // rustix is not used here: its `Pid` cannot be 0, but the kernel returns 0 for a process in an
        // invisible PID namespace.
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        let socket = socket.as_fd().as_raw_fd();
        // SAFETY: the kernel writes at most `length` bytes to `peer`, and the length to `length`.
        let result = unsafe {
            let to = (&raw mut peer).cast();
            libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut length)
        };
        if result != 0 {
            return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
        }
        // For a socket without peer credentials, such as a TCP socket, the kernel returns pid 0, gid 0 and
        // uid -1.
        if peer.uid == u32::MAX {
            return Err(Errno::NOTCONN);
        }
        Ok(Peer { pid: Pid::from_raw(peer.pid), uid: Uid::from_raw(peer.uid) })
    }
}

/// Describes the peer for logs and lists of connections.
pub(crate) fn peer_name(socket: impl AsFd) -> String {
    let socket = socket.as_fd();
    if is_unix(socket) {
        return match Peer::of(socket) {
            Ok(Peer { pid, uid }) => format!("pid {}, uid {}", Pid::as_raw(pid), uid.as_raw()),
            Err(_) => "unknown".into(),
        };
    }
    match rustix::net::getpeername(socket).ok().flatten().map(SocketAddr::try_from) {
        Some(Ok(address)) => address.to_string(),
        _ => "unknown".into(),
    }
}

pub(crate) fn is_unix(socket: impl AsFd) -> bool {
    sockopt::socket_domain(socket) == Ok(AddressFamily::UNIX)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_peer_is_the_process_that_connected() {
        let (one, _other) = UnixStream::pair().unwrap();
        let peer = Peer::of(&one).unwrap();
        assert_eq!(peer.pid, Some(rustix::process::getpid()));
        assert_eq!(peer.uid, rustix::process::geteuid());
        assert!(Peer::of(std::fs::File::open("/dev/null").unwrap()).is_err());
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = std::net::TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
        assert!(Peer::of(&tcp).is_err());
    }

    /// The test runs itself again in a new PID namespace, from which this process is not visible.
    #[test]
    fn a_peer_in_an_invisible_pid_namespace_has_no_pid() {
        const NAME: &str = "peer::tests::a_peer_in_an_invisible_pid_namespace_has_no_pid";
        const INSIDE: &str = "BLKQ_TEST_INSIDE";
        if std::env::var_os(INSIDE).is_some() {
            let peer = Peer::of(std::io::stdin()).unwrap();
            assert_eq!((peer.pid, peer.uid.as_raw()), (None, 0), "{peer:?}");
            return;
        }
        let unshare = || {
            let mut command = Command::new("unshare");
            command.args(["-U", "-r", "-p", "-f"]);
            command
        };
        let able = unshare().arg("true").output().unwrap();
        assert!(able.status.success(), "no user namespace: {}", String::from_utf8_lossy(&able.stderr));
        let (_one, other) = UnixStream::pair().unwrap();
        let itself = std::env::current_exe().unwrap();
        let inside = unshare()
            .arg(itself)
            .arg(NAME)
            .env(INSIDE, "1")
            .stdin(Stdio::from(OwnedFd::from(other)))
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&inside.stdout);
        assert!(inside.status.success() && output.contains("1 passed"), "{output}");
    }
}

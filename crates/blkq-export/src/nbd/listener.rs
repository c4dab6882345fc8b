//! Sockets on which clients arrive, made on the control plane before an engine gets them.

use std::fmt;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use blkq::{Error, ErrorKind};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

/// Clients that the kernel lets wait to be accepted.
const BACKLOG: i32 = 128;
/// What the kernel may hold of a unix socket's replies, in bytes: one deep queue of small
/// reads. Without the privilege net.core.wmem_max is the limit.
const SEND_BUFFER_BYTES: usize = 1 << 20;

/// Where clients come from.
#[derive(Debug)]
pub enum Listen {
    /// A unix socket, made at this path for its owner only. One that nobody answers on
    /// is replaced.
    Unix(PathBuf),
    /// TCP: a host (or address) and a port, 0 for any free one.
    Tcp(String, u16),
    /// A socket from elsewhere: listening (socket activation) or connected (one client).
    Inherited(OwnedFd),
}

pub(super) enum Socket {
    Listening(Listener),
    Connected(OwnedFd),
}

/// A socket that listens. Dropped, its path is removed.
pub(super) struct Listener {
    socket: OwnedFd,
    address: Address,
}

enum Address {
    /// With device and inode of what was made there.
    Unix(PathBuf, (u64, u64)),
    Tcp(SocketAddr),
    Inherited,
}

impl Listen {
    pub(super) fn open(self) -> Result<Socket, Error> {
        match self {
            Listen::Unix(path) => listen_unix(path).map(Socket::Listening),
            Listen::Tcp(host, port) => listen_tcp(&host, port).map(Socket::Listening),
            Listen::Inherited(socket) => inherit(socket),
        }
    }
}

fn listen_unix(path: PathBuf) -> Result<Listener, Error> {
    let what = |path: &Path| format!("cannot listen on {}", path.display());
    let address = SocketAddrUnix::new(&path)
        .map_err(|e| Error::system(format!("{}: give a path of at most 107 bytes", what(&path)), e))?;
    let new_socket = || {
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|e| Error::system("cannot make a unix socket", e))
    };
    let socket = new_socket()?;
    let system = |e: Errno| Error::system(what(&path), e);
    // The path takes the mode of the socket, so that nobody else can ever connect to it.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(system)?;
    match rustix::net::bind(&socket, &address) {
        Err(Errno::ADDRINUSE) => {
            let busy = |why| Error::new(ErrorKind::Busy, format!("{}: {why}", what(&path)));
            let is_socket = std::fs::symlink_metadata(&path).is_ok_and(|found| found.file_type().is_socket());
            if !is_socket {
                return Err(busy("a file is there; remove it or choose another path"));
            }
            // Nobody answers on what a killed server left behind.
            if rustix::net::connect(new_socket()?, &address) != Err(Errno::CONNREFUSED) {
                return Err(busy("another server answers there; detach it or choose another path"));
            }
            std::fs::remove_file(&path).map_err(|e| Error::system(what(&path), e))?;
            rustix::net::bind(&socket, &address).map_err(system)?;
        }
        bound => bound.map_err(system)?,
    }
    let made = std::fs::symlink_metadata(&path).map_err(|e| Error::system(what(&path), e))?;
    let listener = Listener { socket, address: Address::Unix(path.clone(), (made.dev(), made.ino())) };
    rustix::net::listen(&listener.socket, BACKLOG).map_err(system)?;
    Ok(listener)
}

fn listen_tcp(host: &str, port: u16) -> Result<Listener, Error> {
    let what = || format!("cannot listen on {host}:{port}");
    let addresses: Vec<SocketAddr> =
        (host, port).to_socket_addrs().map_err(|e| Error::system(what(), e))?.collect();
    let socket = TcpListener::bind(&addresses[..]).map_err(|e| Error::system(what(), e))?;
    let address = socket.local_addr().map_err(|e| Error::system(what(), e))?;
    Ok(Listener { socket: socket.into(), address: Address::Tcp(address) })
}

fn inherit(socket: OwnedFd) -> Result<Socket, Error> {
    let what = || format!("file descriptor {} is not a stream socket", socket.as_raw_fd());
    let kind = sockopt::socket_type(&socket).map_err(|e| Error::system(what(), e))?;
    if kind != SocketType::STREAM {
        return Err(Error::new(ErrorKind::Invalid, what()));
    }
    // The ring waits by itself; with O_NONBLOCK it would not.
    let flags = rustix::fs::fcntl_getfl(&socket).map_err(|e| Error::system(what(), e))?;
    rustix::fs::fcntl_setfl(&socket, flags - OFlags::NONBLOCK).map_err(|e| Error::system(what(), e))?;
    if sockopt::socket_acceptconn(&socket).map_err(|e| Error::system(what(), e))? {
        return Ok(Socket::Listening(Listener { socket, address: Address::Inherited }));
    }
    rustix::net::getpeername(&socket)
        .map_err(|e| Error::system("the inherited socket neither listens nor is connected", e))?;
    Ok(Socket::Connected(socket))
}

impl Listener {
    pub fn raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl fmt::Display for Listener {
    /// As an NBD URI without an export.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.address {
            Address::Unix(path, _) => {
                f.write_str("nbd+unix:///?socket=")?;
                path.as_os_str().as_bytes().iter().try_for_each(|byte| match byte {
                    b'/' | b'-' | b'.' | b'_' | b'~' => write!(f, "{}", char::from(*byte)),
                    _ if byte.is_ascii_alphanumeric() => write!(f, "{}", char::from(*byte)),
                    _ => write!(f, "%{byte:02X}"),
                })
            }
            Address::Tcp(address) => write!(f, "nbd://{address}"),
            Address::Inherited => write!(f, "nbd on an inherited socket"),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Address::Unix(path, made) = &self.address else { return };
        // Another server may have taken the place meanwhile.
        if std::fs::symlink_metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == *made) {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Sets a client's socket up. What the kernel refuses here only costs speed.
pub(super) fn tune(socket: BorrowedFd<'_>) {
    if is_unix(socket) {
        if sockopt::set_socket_send_buffer_size_force(socket, SEND_BUFFER_BYTES).is_err() {
            let _ = sockopt::set_socket_send_buffer_size(socket, SEND_BUFFER_BYTES);
        }
    } else {
        let _ = sockopt::set_tcp_nodelay(socket, true);
        let _ = sockopt::set_socket_keepalive(socket, true);
    }
}

/// Who is at the other end, for people.
pub(super) fn peer_name(socket: BorrowedFd<'_>) -> String {
    if is_unix(socket) {
        return match sockopt::socket_peercred(socket) {
            Ok(peer) => format!("pid {}, uid {}", peer.pid.as_raw_nonzero(), peer.uid.as_raw()),
            Err(_) => "unknown".into(),
        };
    }
    match rustix::net::getpeername(socket).ok().flatten().map(SocketAddr::try_from) {
        Some(Ok(address)) => address.to_string(),
        _ => "unknown".into(),
    }
}

fn is_unix(socket: BorrowedFd<'_>) -> bool {
    sockopt::socket_domain(socket.as_fd()) == Ok(AddressFamily::UNIX)
}

//! The sockets of a server, opened on the control plane before an engine accepts clients from them.

use std::ffi::OsStr;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blkq::{Error, ErrorKind};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{AtFlags, Gid, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::peer::Peer;
use crate::retry::retry;

/// Length of the kernel's queue of clients that wait to be accepted.
const BACKLOG: i32 = 128;
/// Interval at which an address that is in use is tried again.
const RETRY: Duration = Duration::from_millis(10);

/// Group and mode of a unix socket that the server creates. Connecting needs write permission (unix(7)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SocketAccess {
    /// Mode of the socket file, at most 0o777.
    pub mode: u32,
    /// Group of the socket file; `None` for the group of the process.
    pub group: Option<u32>,
}

impl Default for SocketAccess {
    /// Only the owner and root may connect (mode 0600).
    fn default() -> SocketAccess {
        SocketAccess { mode: 0o600, group: None }
    }
}

/// The socket on which a server accepts clients.
#[derive(Debug)]
pub enum Listen {
    /// A unix socket that the server creates. A stale file, on which no process listens, is replaced.
    Unix(PathBuf),
    /// TCP, with a host name or address and a port. Port 0 selects any free port.
    Tcp(String, u16),
    /// A stream socket that another process opened. It listens (socket activation), or is connected to the
    /// only client.
    Inherited(OwnedFd),
}

/// An open socket and its address. The socket listens; only inside of this crate it may be connected to the only
/// client.
pub struct Listener {
    pub(crate) socket: OwnedFd,
    pub(crate) listen_address: ListenAddress,
}

/// The address of a server.
#[derive(Default)]
pub(crate) struct ListenAddress {
    /// The file of a unix socket that the server created.
    pub file: Option<SocketFile>,
    /// The address of a TCP socket.
    pub tcp: Option<SocketAddr>,
    /// Another process opened the socket.
    pub is_inherited: bool,
    /// The socket is connected to the only client.
    pub is_connected: bool,
    /// The name of the unix socket, if every user of this machine could connect to it when the server opened it.
    pub open_to_all: Option<String>,
}

/// A socket file, which is removed when this is dropped.
pub(crate) struct SocketFile {
    pub path: PathBuf,
    /// The device and inode number of the file.
    made: (u64, u64),
}

impl Listen {
    /// Listens, with the given access to a unix socket. The socket is non-blocking.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if another process listens there, [`ErrorKind::Invalid`] for a connected socket.
    pub fn listen(self, access: SocketAccess) -> Result<Listener, Error> {
        let listener = self.open(access, Duration::ZERO)?;
        if listener.listen_address.is_connected {
            let message = "the inherited socket is connected; pass a listening socket";
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        rustix::fs::fcntl_getfl(&listener)
            .and_then(|flags| rustix::fs::fcntl_setfl(&listener, flags | OFlags::NONBLOCK))
            .map_err(|e| Error::system("cannot make the listening socket non-blocking", e))?;
        Ok(listener)
    }

    /// Returns the address if other machines can connect to it; none if the host name cannot be resolved.
    pub fn beyond_this_machine(&self) -> Option<SocketAddr> {
        let Listen::Tcp(host, port) = self else { return None };
        let mut addresses = (host.as_str(), *port).to_socket_addrs().ok()?;
        addresses.find(|address| !is_loopback(address))
    }

    /// Opens the socket, which blocks. An inherited one may be connected to the only client. Waits for an address that
    /// is in use for up to `wait`; for a unix socket not if the process that listens is known to be running.
    pub(crate) fn open(self, access: SocketAccess, wait: Duration) -> Result<Listener, Error> {
        let until = Instant::now() + wait;
        let is_busy = |error: &Error| error.kind() == ErrorKind::Busy;
        match self {
            Listen::Unix(path) => listen_unix(path, access, until),
            Listen::Tcp(host, port) => retry(until, RETRY, || listen_tcp(&host, port), is_busy),
            Listen::Inherited(socket) => inherit(socket),
        }
    }
}

fn new_socket(flags: SocketFlags) -> Result<OwnedFd, Error> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | flags, None)
        .map_err(|e| Error::system("cannot create a unix socket", e))
}

fn listen_unix(path: PathBuf, access: SocketAccess, until: Instant) -> Result<Listener, Error> {
    let what = |path: &Path| format!("cannot listen on {}", path.display());
    let address = SocketAddrUnix::new(&path)
        .map_err(|e| Error::system(what(&path), e).with_hint("use a path of at most 107 bytes"))?;
    let socket = new_socket(SocketFlags::empty())?;
    let system = |e: Errno| {
        Error::system(what(&path), e).with_hint(match e {
            Errno::NOENT | Errno::NOTDIR => "create the directory, or choose another path",
            Errno::ACCESS | Errno::PERM | Errno::ROFS => "choose a path in a directory that you can write to",
            _ => "",
        })
    };
    // bind(2) gives the socket file the mode of the socket. So only the owner can connect before `grant` has
    // set the group and the mode.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(system)?;
    match rustix::net::bind(&socket, &address) {
        Err(Errno::ADDRINUSE) => {
            wait_until_stale(&path, &address, until)?;
            std::fs::remove_file(&path).map_err(|e| Error::system(what(&path), e))?;
            rustix::net::bind(&socket, &address).map_err(system)?;
        }
        bound => bound.map_err(system)?,
    }
    // The socket listens immediately after bind: until then, another attach would take it for the stale
    // socket of a killed server.
    rustix::net::listen(&socket, BACKLOG).map_err(system)?;
    let made = std::fs::symlink_metadata(&path).map_err(|e| Error::system(what(&path), e))?;
    let file = SocketFile { path: path.clone(), made: (made.dev(), made.ino()) };
    grant(&file, access)?;
    let open_to_all = is_open_to_all(&path).then(|| path.display().to_string());
    let listen_address = ListenAddress { file: Some(file), open_to_all, ..ListenAddress::default() };
    Ok(Listener { socket, listen_address })
}

/// Waits until no process listens on the socket at `path`. Fails if a running process does, or, after `until`, if the
/// kernel still holds the socket of a process that has exited, or of one that cannot be identified.
fn wait_until_stale(path: &Path, address: &SocketAddrUnix, until: Instant) -> Result<(), Error> {
    let busy = |why| Error::new(ErrorKind::Busy, format!("cannot listen on {}: {why}", path.display()));
    loop {
        let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
        if !is_socket {
            return Err(busy("a file with this path exists; remove it, or choose another path"));
        }
        // Connecting to the stale socket of a killed server is refused. The probe does not block.
        let probe = new_socket(SocketFlags::NONBLOCK)?;
        // If the queue of waiting clients is full (EAGAIN), the server cannot be identified.
        let is_last = Instant::now() >= until;
        let is_unknown = |e: &Errno| [Errno::AGAIN, Errno::INTR].contains(e);
        let is_released = match retry(until, RETRY, || rustix::net::connect(&probe, address), is_unknown) {
            Err(Errno::CONNREFUSED) => return Ok(()),
            // The kernel resets the connection when it closes the socket.
            Ok(()) => !is_last && !listener_is_running(&probe) && hangs_up(&probe, until),
            Err(_) => false,
        };
        if !is_released {
            return Err(busy("another server is listening; stop it, or choose another path"));
        }
    }
}

/// Whether the process that listens at the other end of `client` is known to be running. After it has exited, its ring
/// may still hold the socket. A process in a PID namespace that was removed, or is not visible, has no number.
fn listener_is_running(client: &OwnedFd) -> bool {
    let Ok(Peer { pid, .. }) = Peer::of(client) else { return true };
    let Some(pid) = pid else { return false };
    match std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())) {
        Ok(status) => !status.lines().any(|line| line.starts_with("State:\tZ")),
        Err(e) => e.kind() != std::io::ErrorKind::NotFound,
    }
}

fn hangs_up(client: &OwnedFd, until: Instant) -> bool {
    let poll = || {
        let left = until.saturating_duration_since(Instant::now());
        let time = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        rustix::event::poll(&mut [PollFd::new(client, PollFlags::empty())], Some(&time))
    };
    retry(until, Duration::ZERO, poll, |e| *e == Errno::INTR) == Ok(1)
}

/// Sets the group before the mode: the socket is never more accessible than `access` allows.
fn grant(SocketFile { path, made }: &SocketFile, access: SocketAccess) -> Result<(), Error> {
    if access == SocketAccess::default() {
        return Ok(());
    }
    let what =
        |change: String| move |e: Errno| Error::system(format!("{}: cannot {change}", path.display()), e);
    // The descriptor pins the file: another process may replace the file at the path, but only the file that
    // was created here is changed.
    let socket = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
        .map_err(what("open the new socket".to_owned()))?;
    let found = rustix::fs::fstat(&socket).map_err(what("inspect the socket".to_owned()))?;
    if (found.st_dev, found.st_ino) != *made {
        return Err(Error::new(ErrorKind::Busy, format!("{}: the socket was replaced", path.display())));
    }
    if let Some(group) = access.group {
        rustix::fs::chownat(&socket, "", None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH).map_err(
            what(format!("change the group to {group}, which only root and members of that group may do")),
        )?;
    }
    // fchmod(2) does not work on an O_PATH descriptor, and fchmodat2(2) with AT_EMPTY_PATH needs Linux 6.6.
    let descriptor = format!("/proc/self/fd/{}", socket.as_raw_fd());
    rustix::fs::chmod(descriptor, Mode::from_raw_mode(access.mode))
        .map_err(what(format!("set mode {:03o}", access.mode)))
}

fn listen_tcp(host: &str, port: u16) -> Result<Listener, Error> {
    let what = || format!("cannot listen on {host}:{port}");
    let unknown = |e| Error::system(what(), e).with_hint("correct the host name, or use an address");
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(unknown)?.collect();
    let refused = |e: std::io::Error| {
        let hint = match e.kind() {
            std::io::ErrorKind::AddrInUse => "choose another port, or 0 for any free port",
            std::io::ErrorKind::AddrNotAvailable => "use an address of this machine",
            std::io::ErrorKind::PermissionDenied => "choose a port of 1024 or more, or 0 for any free port",
            _ => "",
        };
        Error::system(what(), e).with_hint(hint)
    };
    let socket = TcpListener::bind(&addresses[..]).map_err(refused)?;
    let address = socket.local_addr().map_err(|e| Error::system(what(), e))?;
    let listen_address = ListenAddress { tcp: Some(address), ..ListenAddress::default() };
    Ok(Listener { socket: socket.into(), listen_address })
}

fn inherit(socket: OwnedFd) -> Result<Listener, Error> {
    let name = format!("file descriptor {}", socket.as_raw_fd());
    let invalid = |why: &str| Error::new(ErrorKind::Invalid, format!("{name} {why}"));
    let system = |e: Errno| Error::system(format!("{name} is not a stream socket"), e);
    if sockopt::socket_type(&socket).map_err(system)? != SocketType::STREAM {
        return Err(invalid("is not a stream socket"));
    }
    // io_uring waits for the next client by itself. With O_NONBLOCK it would complete with EAGAIN instead.
    let flags = rustix::fs::fcntl_getfl(&socket).map_err(system)?;
    rustix::fs::fcntl_setfl(&socket, flags - OFlags::NONBLOCK).map_err(system)?;
    let own = rustix::net::getsockname(&socket).map_err(system)?;
    let mut listen_address = ListenAddress { is_inherited: true, ..ListenAddress::default() };
    // For other families it is not known who can connect. With AF_VSOCK, for example, virtual machines can.
    match sockopt::socket_domain(&socket).map_err(system)? {
        AddressFamily::UNIX => {
            listen_address.open_to_all = SocketAddrUnix::try_from(own).ok().and_then(|own| open_to_all(&own));
        }
        AddressFamily::INET | AddressFamily::INET6 => {
            listen_address.tcp = Some(SocketAddr::try_from(own).map_err(system)?);
        }
        family => {
            let why = format!("is a socket of address family {}; pass a unix or TCP socket", family.as_raw());
            return Err(invalid(&why));
        }
    }
    if !sockopt::socket_acceptconn(&socket).map_err(system)? {
        rustix::net::getpeername(&socket)
            .map_err(|e| Error::system("the inherited socket neither listens nor is connected", e))?;
        (listen_address.is_connected, listen_address.open_to_all) = (true, None);
    }
    Ok(Listener { socket, listen_address })
}

/// Returns the name of the unix socket if every user of this machine can connect to it: an abstract socket,
/// which has no permissions, or a socket file that all may write (unix(7)).
fn open_to_all(address: &SocketAddrUnix) -> Option<String> {
    if let Some(name) = address.abstract_name() {
        return Some(format!("@{}", String::from_utf8_lossy(name)));
    }
    let path = Path::new(OsStr::from_bytes(address.path_bytes()?));
    is_open_to_all(path).then(|| path.display().to_string())
}

fn is_open_to_all(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.mode() & 0o002 != 0)
}

impl Listener {
    /// The TCP address on which the server listens, if any, also on an inherited socket.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.listen_address.tcp
    }

    /// The path of the unix socket on which the server listens, if any.
    pub fn unix_path(&self) -> Option<&Path> {
        self.listen_address.file.as_ref().map(|file| &*file.path)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl ListenAddress {
    /// The TCP address, if other machines can connect to it.
    pub fn beyond_this_machine(&self) -> Option<SocketAddr> {
        self.tcp.filter(|address| !is_loopback(address))
    }

    /// The TCP address, if it is a loopback address that every user of this machine can connect to.
    pub fn on_loopback(&self) -> Option<SocketAddr> {
        // A socket that is already connected accepts no other client.
        self.tcp.filter(|address| is_loopback(address) && !self.is_connected)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Another server may have created a socket at the same path meanwhile.
        if std::fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.made) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn is_loopback(address: &SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// Another thread checks the file: no mode may let the group connect before the group is the right one.
    #[test]
    fn a_socket_is_never_more_accessible_than_requested() {
        let path = std::env::temp_dir().join(format!("blkq-grant-{}", std::process::id()));
        let group =
            if rustix::process::geteuid().is_root() { 65_534 } else { rustix::process::getegid().as_raw() };
        let access = SocketAccess { mode: 0o660, group: Some(group) };
        let is_right = |found: &std::fs::Metadata| {
            let mode = found.mode() & 0o7777;
            mode == 0o600 || mode == 0o660 && found.gid() == group
        };
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let checking = scope.spawn(|| {
                let mut seen = 0;
                while !done.load(Ordering::Relaxed) {
                    let Ok(found) = std::fs::symlink_metadata(&path) else { continue };
                    // stat(2) reads the group before the mode, and both may change in between. So a wrong
                    // pair is read again.
                    let Ok(found) =
                        (if is_right(&found) { Ok(found) } else { std::fs::symlink_metadata(&path) })
                    else {
                        continue;
                    };
                    assert!(is_right(&found), "{:o} {}", found.mode(), found.gid());
                    seen += 1;
                }
                seen
            });
            for _ in 0..2_000 {
                let opened = Listen::Unix(path.clone()).listen(access).unwrap();
                let found = std::fs::symlink_metadata(&path).unwrap();
                assert_eq!((found.mode() & 0o7777, found.gid()), (0o660, group));
                drop(opened);
            }
            done.store(true, Ordering::Relaxed);
            assert!(checking.join().unwrap() > 0);
        });
        assert!(!path.exists());
    }

    /// The ring of a killed server holds its socket for a while, whose queue of clients may be full.
    #[test]
    fn a_full_queue_of_clients_is_waited_for() {
        let path = std::env::temp_dir().join(format!("blkq-full-{}", std::process::id()));
        let address = SocketAddrUnix::new(&path).unwrap();
        let server = new_socket(SocketFlags::empty()).unwrap();
        rustix::net::bind(&server, &address).unwrap();
        rustix::net::listen(&server, 0).unwrap();
        let mut waiting = Vec::new();
        loop {
            let client = new_socket(SocketFlags::NONBLOCK).unwrap();
            match rustix::net::connect(&client, &address) {
                Err(Errno::AGAIN) => break,
                connected => connected.unwrap(),
            }
            waiting.push(client);
        }
        let open = |wait| Listen::Unix(path.clone()).open(SocketAccess::default(), wait);
        assert_eq!(open(Duration::ZERO).err().map(|e| e.kind()), Some(ErrorKind::Busy));
        let closing = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(server);
        });
        assert!(open(Duration::from_secs(60)).is_ok());
        closing.join().unwrap();
    }
}

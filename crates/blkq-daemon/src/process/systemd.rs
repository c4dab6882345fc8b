//! Notifies a service manager of the state of its service (sd_notify(3)).

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::LazyLock;

/// The socket of the service manager, if it requests notifications.
static MANAGER: LazyLock<Option<UnixDatagram>> =
    LazyLock::new(|| connect(&std::env::var_os("NOTIFY_SOCKET")?).ok());

/// Connects to the socket of the service manager. Must be called early: later this process may lack the mount
/// of its path, and the privilege to create a socket. If there is no service manager, nothing happens.
pub fn connect_manager() {
    LazyLock::force(&MANAGER);
}

/// Sends the service manager lines such as `READY=1`, after [`connect_manager`]. Errors are ignored: a lost
/// notification must not stop the daemon.
pub fn notify(lines: &str) {
    if let Some(manager) = &*MANAGER {
        let _ = manager.send(lines.as_bytes());
    }
}

fn connect(address: &OsStr) -> std::io::Result<UnixDatagram> {
    let address = match address.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        path => SocketAddr::from_pathname(OsStr::from_bytes(path))?,
    };
    let socket = UnixDatagram::unbound()?;
    // A service manager that does not read must not block the daemon.
    socket.set_nonblocking(true)?;
    socket.connect_addr(&address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manager_is_notified_though_its_path_was_removed() {
        let name = format!("blkq-notify-{}", std::process::id());
        let path = std::env::temp_dir().join(&name);
        let _ = std::fs::remove_file(&path);
        let by_path = UnixDatagram::bind(&path).unwrap();
        let by_name = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let to_path = connect(path.as_os_str()).unwrap();
        let to_name = connect(OsStr::new(&format!("@{name}"))).unwrap();
        // This happens if the daemon detaches the mount of the path.
        std::fs::remove_file(&path).unwrap();
        to_path.send(b"READY=1").unwrap();
        to_name.send(b"STOPPING=1").unwrap();
        let mut buffer = [0; 32];
        let length = by_path.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"READY=1");
        let length = by_name.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"STOPPING=1");
    }
}

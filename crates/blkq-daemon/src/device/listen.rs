//! The addresses on which a device is served, the access to its unix sockets (`--socket-mode`, `--socket-group`), TLS,
//! and warnings about who can connect.

use std::ffi::{CStr, CString};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use blkq::ErrorKind;
use blkq_export::nbd::{TlsCertificates, TlsOptions};
use blkq_export::{Listen, SocketAccess};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::options::{Address, AttachOptions, Export, Tls};
use blkq_protocol::state::Claim;

/// The mode of sockets if only a group is given: the members of the group may connect.
const GROUP_MODE: u32 = 0o660;
/// Maximum size of the buffer for the record of a group with all its members, in bytes.
const GROUP_BYTES_MAX: usize = 1 << 20;

#[derive(Default)]
pub(super) struct Sockets {
    pub(super) nbd: Vec<Listen>,
    pub(super) vhost: Option<Listen>,
}

impl Sockets {
    /// With `nbd`, the device is exported over NBD: at the addresses of `options`, else on the `inherited` sockets. The
    /// default of each export is a unix socket in the state directory.
    pub(super) fn new(
        options: &AttachOptions,
        claim: &Claim,
        nbd: bool,
        inherited: Vec<OwnedFd>,
    ) -> Outcome<Sockets> {
        let nbd = if !nbd {
            Vec::new()
        } else if !options.listen.is_empty() {
            options.listen.iter().map(listen_at).collect::<Outcome<_>>()?
        } else if !inherited.is_empty() {
            inherited.into_iter().map(Listen::Inherited).collect()
        } else {
            vec![Listen::Unix(claim.file(".nbd"))]
        };
        let of_vhost = || match &options.vhost_socket {
            Some(path) => listen_at(&Address::Unix(path.clone())),
            None => Ok(Listen::Unix(claim.file(".vhost"))),
        };
        let vhost = options.exports.contains(&Export::VhostUserBlk).then(of_vhost).transpose()?;
        Ok(Sockets { nbd, vhost })
    }

    /// Warns about sockets in directories that some of the intended clients cannot enter.
    pub(super) fn warn_of_closed_directories(&self, access: SocketAccess) -> Vec<String> {
        let paths = self.nbd.iter().chain(&self.vhost).filter_map(unix_path);
        let closed = paths.filter_map(|path| {
            let directory = closed_directory(&path, access)?;
            let (path, directory) = (path.display(), directory.display());
            Some(format!("not all users that may connect to {path} can enter {directory}; change the mode of the directory, or choose another path"))
        });
        closed.collect()
    }
}

pub(super) fn unix_path(listen: &Listen) -> Option<PathBuf> {
    match listen {
        Listen::Unix(path) => Some(path.clone()),
        _ => None,
    }
}

pub(super) fn listen_at(address: &Address) -> Outcome<Listen> {
    match address {
        // The path must be absolute: the daemon changes its directory, and removes the socket later.
        Address::Unix(path) => std::path::absolute(path)
            .map(Listen::Unix)
            .map_err(|e| Failure::new(format!("cannot listen on {}: {e}", path.display()))),
        Address::Tcp(host, port) => Ok(Listen::Tcp(host.clone(), *port)),
    }
}

pub(super) fn no_server(error: blkq::Error) -> Failure {
    let hint = "require TLS (--tls require --tls-certificates DIR), listen on 127.0.0.1 or a unix socket, or use \
                --insecure to accept this";
    Failure::of(error, ErrorKind::Exposed, hint)
}

/// As [`no_server`], before a server listens on `address`.
pub(super) fn exposed(address: &SocketAddr) -> Failure {
    let message =
        format!("other machines can connect to {address} and could read and change the device without TLS");
    no_server(blkq::Error::new(ErrorKind::Exposed, message))
}

/// `is_take_over`: the device was served before, so an authority that has expired since is only a warning.
pub(super) fn tls(options: &AttachOptions, is_take_over: bool) -> Outcome<Option<TlsOptions>> {
    let Some(directory) = options.tls_certificates.as_deref().filter(|_| options.tls != Some(Tls::Off))
    else {
        return Ok(None);
    };
    let certificates = TlsCertificates::load_as(directory, is_take_over)?;
    Ok(Some(TlsOptions { certificates, required: options.tls != Some(Tls::On) }))
}

/// Includes the directories to which symbolic links in `directory` lead.
pub(super) fn directories_of(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let real = entries.filter_map(|entry| entry.path().canonicalize().ok()?.parent().map(Path::to_owned));
    let mut directories: Vec<PathBuf> = real.chain([directory.to_owned()]).collect();
    directories.sort();
    directories.dedup();
    directories
}

/// If only a group is given, its members may connect. Fails if there is no such group.
pub(super) fn socket_access(mode: Option<u32>, group: Option<&str>) -> Outcome<SocketAccess> {
    let default = SocketAccess::default().mode;
    let group = group.map(group_number).transpose()?;
    let mode = mode.unwrap_or(if group.is_some() { GROUP_MODE } else { default });
    Ok(SocketAccess { mode, group })
}

fn group_number(name: &str) -> Outcome<u32> {
    let no_group = || Failure::new(format!("--socket-group {name}: there is no such group"));
    let c_name = CString::new(name).map_err(|_| no_group())?;
    match find_group(&c_name) {
        Ok(Some(group)) => Ok(group),
        Ok(None) => name.parse().map_err(|_| no_group()),
        Err(e) => Err(Failure::new(format!("--socket-group {name}: {e}"))),
    }
}

/// Asks the C library, because groups need not be in a file.
fn find_group(name: &CStr) -> std::io::Result<Option<u32>> {
    let mut buffer = vec![0; 4096];
    loop {
        let mut group = std::mem::MaybeUninit::<libc::group>::uninit();
        let mut found = std::ptr::null_mut();
        let (space, length) = (buffer.as_mut_ptr(), buffer.len());
        // SAFETY: the name ends with a NUL, `group` and `found` are valid for writes, and the length is that
        // of the buffer.
        let error =
            unsafe { libc::getgrnam_r(name.as_ptr(), group.as_mut_ptr(), space, length, &raw mut found) };
        match error {
            // SAFETY: `found` points to `group`, which the call has initialized.
            0 if !found.is_null() => return Ok(Some(unsafe { (*found).gr_gid })),
            // According to getgrnam(3), these errors, too, can mean that the group does not exist.
            0 | libc::ENOENT | libc::ESRCH | libc::EBADF | libc::EPERM => return Ok(None),
            libc::EINTR => {}
            libc::ERANGE if buffer.len() < GROUP_BYTES_MAX => buffer.resize(buffer.len() * 2, 0),
            error => return Err(std::io::Error::from_raw_os_error(error)),
        }
    }
}

/// Returns an ancestor directory of the socket `path` that some of the intended clients cannot enter.
fn closed_directory(path: &Path, access: SocketAccess) -> Option<PathBuf> {
    let (group, to_all) = (access.group, access.mode & 0o002 != 0);
    if !to_all && access.mode & 0o020 == 0 {
        return None;
    }
    let directory = path.parent()?.canonicalize().ok()?;
    let keeps_out = |directory: &&Path| {
        std::fs::metadata(directory).is_ok_and(|found| {
            let is_of_group = group.is_none_or(|group| group == found.gid());
            found.mode() & if is_of_group && !to_all { 0o010 } else { 0o001 } == 0
        })
    };
    directory.ancestors().find(keeps_out).map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_numbers() {
        assert_eq!(socket_access(None, None), Ok(SocketAccess::default()));
        assert_eq!(socket_access(None, Some("root")), Ok(SocketAccess { mode: 0o660, group: Some(0) }));
        let by_number = SocketAccess { mode: 0o620, group: Some(4_000_123) };
        assert_eq!(socket_access(Some(0o620), Some("4000123")), Ok(by_number));
        for bad in ["no such group", "", "-1", "root\0"] {
            assert!(
                socket_access(None, Some(bad)).unwrap_err().to_string().contains("no such group"),
                "{bad}"
            );
        }
    }
}

//! The addresses that a device is served at, TLS, and warnings about their reach.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use blkq::ErrorKind;
use blkq_export::nbd::{Listen, NbdOptions, NbdServer, SocketAccess, TlsCertificates, TlsOptions};
use blkq_export::vhost_user::VhostUserDevice;

use crate::access::closed_directory;
use crate::failure::{Failure, Outcome};
use crate::options::{Address, AttachOptions, Export, Tls};
use crate::state::Claim;

/// Where a device listens.
#[derive(Default)]
pub(super) struct Sockets {
    pub(super) nbd: Vec<Listen>,
    pub(super) vhost: Option<Listen>,
}

/// The path of a unix socket that is to be made.
pub(super) fn unix_path(listen: &Listen) -> Option<PathBuf> {
    match listen {
        Listen::Unix(path) => Some(path.clone()),
        _ => None,
    }
}

/// Where to serve.
pub(super) fn addresses(
    options: &AttachOptions,
    claim: &Claim,
    inherited: Vec<OwnedFd>,
) -> Outcome<Vec<Listen>> {
    if options.listen.is_empty() && inherited.is_empty() {
        return Ok(vec![Listen::Unix(claim.file(".nbd"))]);
    }
    if options.listen.is_empty() {
        return Ok(inherited.into_iter().map(Listen::Inherited).collect());
    }
    options.listen.iter().map(listen_at).collect()
}

/// Where vhost-user-blk listens, if the device is served to virtual machines.
pub(super) fn vhost_address(options: &AttachOptions, claim: &Claim) -> Outcome<Option<Listen>> {
    if !options.exports.contains(&Export::VhostUserBlk) {
        return Ok(None);
    }
    match &options.vhost_socket {
        Some(path) => listen_at(&Address::Unix(path.clone())).map(Some),
        None => Ok(Some(Listen::Unix(claim.file(".vhost")))),
    }
}

pub(super) fn listen_at(address: &Address) -> Outcome<Listen> {
    match address {
        // The daemon changes its directory, and removes the socket from there.
        Address::Unix(path) => std::path::absolute(path)
            .map(Listen::Unix)
            .map_err(|e| Failure::new(format!("cannot listen on {}: {e}", path.display()))),
        Address::Tcp(host, port) => Ok(Listen::Tcp(host.clone(), *port)),
    }
}

/// Why nothing listens, with the cure.
pub(super) fn no_server(error: blkq::Error) -> Failure {
    match error.kind() {
        ErrorKind::Exposed => Failure::new(format!(
            "{error}: demand TLS (--tls require --tls-certificates DIR), listen on 127.0.0.1 or a unix socket, or \
             allow it with --insecure"
        )),
        _ => error.into(),
    }
}

/// TLS as it is to be offered.
pub(super) fn tls(options: &AttachOptions) -> Outcome<Option<TlsOptions>> {
    let Some(directory) = options.tls_certificates.as_deref().filter(|_| options.tls != Some(Tls::Off))
    else {
        return Ok(None);
    };
    let certificates = TlsCertificates::load(directory)?;
    Ok(Some(TlsOptions { certificates, required: options.tls != Some(Tls::On) }))
}

/// A directory, and those that symbolic links in it lead to.
pub(super) fn directories_of(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let real = entries.filter_map(|entry| entry.path().canonicalize().ok()?.parent().map(Path::to_owned));
    let mut directories: Vec<PathBuf> = real.chain([directory.to_owned()]).collect();
    directories.sort();
    directories.dedup();
    directories
}

/// Warnings about clients that are kept out: directories that do not let them in.
pub(super) fn warn_of_closed_directories<'a>(
    listen: impl Iterator<Item = &'a Listen>,
    access: SocketAccess,
) -> Vec<String> {
    let closed = listen.filter_map(unix_path).filter_map(|path| {
        let directory = closed_directory(&path, access)?;
        Some((path, directory))
    });
    closed
        .map(|(path, directory)| {
            let (path, directory) = (path.display(), directory.display());
            format!("{path} cannot be reached by all users that may connect: {directory} does not let them in; chmod it, or listen elsewhere")
        })
        .collect()
}

/// Warnings about servers that more clients reach than the user may expect.
pub(super) fn warn_of_access(
    options: &AttachOptions,
    nbd_options: &NbdOptions,
    servers: &[NbdServer],
    vhost: Option<&VhostUserDevice>,
) -> Vec<String> {
    let required = nbd_options.tls.as_ref().filter(|tls| tls.required);
    let verified = required.is_some_and(|tls| tls.certificates.verifies_clients());
    let mut warnings = Vec::new();
    if required.is_some() && !verified {
        warnings.extend(servers.iter().filter_map(NbdServer::beyond_this_machine).map(|address| {
            format!("every machine that reaches {address} can use the device: no client needs a certificate; put ca-cert.pem into the directory of certificates, or keep others out with a firewall")
        }));
    }
    let cure = match options.socket_mode {
        Some(_) => "give --socket-group and --socket-mode 660",
        None => "give its unit SocketMode=0600",
    };
    let open_to_all = servers.iter().filter_map(NbdServer::open_to_all_users);
    let open_to_all = open_to_all.chain(vhost.and_then(VhostUserDevice::open_to_all_users));
    warnings.extend(
        open_to_all.map(|socket| format!("all users of this machine may connect to {socket}: {cure}")),
    );
    if !(options.insecure || verified) {
        warnings.extend(servers.iter().filter_map(NbdServer::on_loopback).map(|address| {
            format!("all users of this machine may connect to {address}: a unix socket is its owner's alone; TLS with ca-cert.pem keeps others out, and --insecure lets them in without this warning")
        }));
    }
    warnings
}

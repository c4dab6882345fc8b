use blkq_drivers::DriverSpec;
use blkq_protocol::daemon::Obstacle;
use blkq_protocol::failure::Failure;
use blkq_protocol::group::GroupFile;
use blkq_protocol::options::{Address, AttachOptions, Export, Tls};
use blkq_protocol::state::StateDir;

use super::image::{driver_options, format_refusal};
use super::listen::{exposed, listen_at, tls};
use crate::metrics;

/// Finds the reasons for which `attach` would refuse `options`. Changes nothing; the image may be in use.
pub fn obstacles(options: &AttachOptions) -> Vec<Obstacle> {
    let mut found = Vec::new();
    let mut add = |option, failure| found.push(Obstacle { option, failure });
    // Checking an RBD image would require a connection to its cluster.
    if !matches!(options.image, DriverSpec::Rbd(_)) {
        let ublk = options.exports.contains(&Export::Ublk);
        if let Err(error) = blkq_drivers::check(&options.image, &driver_options(options, ublk)) {
            add("image", format_refusal(error, options));
        }
    }
    if let Err(failure) = tls(options, false) {
        add("tls-certificates", failure);
    }
    let has_certificates = options.tls_certificates.is_some();
    let requires_tls = has_certificates && !matches!(options.tls, Some(Tls::On | Tls::Off));
    if !requires_tls && !options.insecure {
        let listens = options.listen.iter().filter_map(|address| listen_at(address).ok());
        listens
            .filter_map(|listen| listen.beyond_this_machine())
            .for_each(|address| add("listen", exposed(&address)));
    }
    let metrics = options.metrics.as_ref().filter(|_| !options.insecure);
    if let Some(Ok(address)) = metrics.map(listen_at)
        && let Some(address) = address.beyond_this_machine()
    {
        add("metrics", metrics::exposed(&address));
    }
    if let Some(group) = &options.group
        && let Err(failure) = StateDir::locate().and_then(|dir| GroupFile::open(&dir, group))
    {
        add("group", failure);
    }
    let sockets = options.listen.iter().filter_map(|address| match address {
        Address::Unix(path) => Some(("listen", path)),
        Address::Tcp(..) => None,
    });
    let vhost = options.vhost_socket.iter().map(|path| ("vhost-socket", path));
    let pid_file = options.pid_file.iter().map(|path| ("pid-file", path));
    for (option, path) in sockets.chain(vhost).chain(pid_file) {
        let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
        if let Some(directory) = directory.filter(|directory| !directory.is_dir()) {
            add(option, Failure::new(format!("the directory {} does not exist", directory.display())));
        }
    }
    found
}

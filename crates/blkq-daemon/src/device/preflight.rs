//! Checks whether a daemon could serve a device, before it does: with options that are not in use yet, or while
//! the old daemon still serves the device.

use std::fs;

use blkq_drivers::DriverSpec;
use blkq_protocol::daemon::Obstacle;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::group::GroupFile;
use blkq_protocol::options::{Address, AttachOptions, Export, Format, Tls};
use blkq_protocol::state::StateDir;

use super::image::{driver_options, format_refusal, keep_format, keep_size};
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
        let reachable = listens.filter_map(|listen| listen.beyond_this_machine());
        reachable.for_each(|address| add("listen", exposed(&address)));
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

/// As [`check_take_over`], for a device that is attached again, which fails if its group does not exist.
pub fn check_successor(dir: &StateDir, options: &AttachOptions, bytes: u64) -> Outcome {
    if let Some(group) = &options.group {
        GroupFile::open(dir, group)?;
    }
    check_take_over(options, bytes)
}

/// Checks that this program could take over a device of `bytes`: the image and the certificates. Changes nothing.
pub fn check_take_over(options: &AttachOptions, bytes: u64) -> Outcome {
    let mut options = options.clone();
    keep_format(&mut options);
    keep_size(&mut options, bytes);
    let end = options.offset.saturating_add(bytes);
    // For block devices, fs::metadata has no size.
    let is_short = |path| fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() < end);
    if let DriverSpec::Image(path) = &options.image
        && options.format == Some(Format::Raw)
        && is_short(path)
    {
        let path = path.display();
        return Err(Failure::new(format!("{path} is smaller than the device; extend it to {end} bytes")));
    }
    tls(&options, true)?;
    Ok(blkq_drivers::check(&options.image, &driver_options(&options, true))?)
}

#[cfg(test)]
mod tests {
    use blkq_protocol::harness::{options, scratch};

    use super::*;

    #[test]
    fn a_device_that_is_attached_again_needs_its_group() {
        let dir = scratch("preflight-group");
        let options = options(&["ram:1M", "--export", "nbd", "--group", "g"]);
        assert!(check_successor(&dir, &options, 1 << 20).unwrap_err().to_string().contains("no group g"));
        GroupFile::set(&dir, "g", &"iops=10".parse().unwrap()).unwrap();
        assert_eq!(check_successor(&dir, &options, 1 << 20), Ok(()));
        fs::remove_dir_all(dir.path()).unwrap();
    }

    // Contract: durability
    #[test]
    fn an_image_is_checked_without_a_write() {
        let dir = scratch("preflight-qcow2");
        let image = dir.path().join("d");
        let create = ["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "1M"];
        assert!(std::process::Command::new("qemu-img").args(create).status().unwrap().success());
        let mut bytes = fs::read(&image).unwrap();
        // A daemon that was killed leaves an image with such a header: it is bound to its journal.
        bytes[88..92].copy_from_slice(&[1; 4]);
        fs::write(&image, &bytes).unwrap();
        let options = options(&[image.to_str().unwrap(), "--export", "ublk", "--format", "qcow2"]);
        assert_eq!(check_take_over(&options, 1 << 20), Ok(()));
        assert!(fs::read(&image).unwrap() == bytes);
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn an_image_that_cannot_be_taken_over_is_rejected_beforehand() {
        let dir = std::env::temp_dir().join(format!("blkq-preflight-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        let image = dir.join("disk.img");
        let with = |more: &[&str]| options(&[&[image.to_str().unwrap(), "--export", "ublk"], more].concat());
        let why = |more: &[&str]| check_take_over(&with(more), 1 << 20).unwrap_err().to_string();
        assert!(why(&[]).contains("disk.img"), "{}", why(&[]));
        fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        assert_eq!(check_take_over(&with(&[]), 1 << 20), Ok(()));
        // The check also works while the image is being served.
        let served = blkq_drivers::open(&with(&[]).image, &driver_options(&with(&[]), true)).unwrap();
        assert_eq!(check_take_over(&with(&[]), 1 << 20), Ok(()));
        assert!(why(&["--tls-certificates", "/nowhere"]).contains("/nowhere"));
        assert!(why(&["--offset", "512"]).contains("smaller than the device"));
        drop(served);
        fs::File::options().write(true).open(&image).unwrap().set_len(4096).unwrap();
        assert!(why(&[]).contains("smaller than the device"));
        fs::remove_dir_all(&dir).unwrap();
    }
}

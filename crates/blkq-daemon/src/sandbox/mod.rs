//! Drops the privileges that a running daemon does not need. docs/security.md explains the reasons, and how
//! to inspect the result.
//!
//! Each function here applies to the calling thread and the threads that it creates later, and fails if the
//! kernel supports a confinement but refuses it. The engines are created by a thread with the strictest
//! confinement: they read what clients send, and open no files.

mod capabilities;
pub mod filter;
mod landlock;
pub mod operations;
pub mod seccomp;

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use blkq::ring::{self, Policy};
use blkq_export::ublk::{self, CONTROL_PATH, SETTINGS_DIRECTORY};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::Confinement;
use rustix::thread::{CapabilitySet, set_no_new_privs};

use crate::sandbox::operations::OPERATIONS;
use landlock::Landlock;

#[derive(Debug, Default)]
pub struct Needs {
    /// The image file (`O_PATH`), if there is one. It is opened again when the device becomes writable.
    pub image: Option<OwnedFd>,
    /// Files that are removed at the end: sockets, and the files in the state directory.
    pub removed: Vec<PathBuf>,
    /// The directory of the journals of qcow2 images.
    pub journals: Option<PathBuf>,
    /// Directories with files that are read again, such as certificates.
    pub read: Vec<PathBuf>,
    pub block_device: Option<u32>,
}

/// Engines, their workers and watchers of trigger files cannot open files or connect to anything. `partscan`
/// keeps `CAP_SYS_ADMIN`, without which the kernel does not scan a block device that this thread serves for
/// partitions.
pub fn engine(partscan: bool) -> Outcome {
    ring::set_policy(Policy { operations: &NUMBERS, sealed: no_more_rings });
    let landlock = Landlock::new()?;
    let kept = if partscan { CapabilitySet::SYS_ADMIN } else { CapabilitySet::empty() };
    enter(kept, landlock, seccomp::ENGINE).map(|_| ())
}

static NUMBERS: [u8; OPERATIONS.len()] = {
    let mut numbers = [0; OPERATIONS.len()];
    let mut at = 0;
    while at < numbers.len() {
        numbers[at] = OPERATIONS[at].1;
        at += 1;
    }
    numbers
};

/// The ring of an engine is restricted to certain operations, but another ring would not be.
fn no_more_rings() -> Result<(), blkq::Error> {
    match filter::without_rings() {
        Ok(_) => Ok(()),
        Err(failure) => Err(blkq::Error::new(blkq::ErrorKind::System, failure.to_string())),
    }
}

pub fn control(needs: &Needs) -> Outcome<Confinement> {
    // rustix reads the page size from the kernel once and caches it. A raw image that was a backing file
    // needs it later, when the confined thread can no longer read it.
    let _ = rustix::param::page_size();
    let kept = capabilities_of(needs);
    let mut landlock = Landlock::new()?;
    if let Some(image) = &needs.image {
        landlock.allow_image(image.as_fd())?;
    }
    for directory in directories(&needs.removed) {
        landlock.allow_removing(directory)?;
    }
    if let Some(directory) = &needs.journals {
        // A snapshot creates the journal of the overlay.
        landlock.allow_replacing(directory)?;
        landlock.allow_reading(directory)?;
    }
    for directory in &needs.read {
        landlock.allow_reading(directory)?;
    }
    if let Some(id) = &needs.block_device {
        landlock.allow_device(Path::new(CONTROL_PATH))?;
        landlock.allow_device(Path::new(&ublk::block_path(*id)))?;
    }
    let confinement = enter(kept, landlock, seccomp::CONTROL)?;
    // Commands to ublk need new io_uring instances. Without a block device none is created from here on, and
    // the existing ones may only register the eventfds of virtual machines.
    if needs.block_device.is_none() {
        filter::without_rings()?;
        filter::register_eventfds_only()?;
    }
    Ok(confinement)
}

/// For the process that sends commands to the ublk control device. It may also change settings of block
/// devices in sysfs.
pub fn ublk_commands() -> Outcome {
    let mut landlock = Landlock::new()?;
    landlock.allow_device(Path::new(CONTROL_PATH))?;
    let settings = Path::new(SETTINGS_DIRECTORY);
    if settings.is_dir() {
        landlock.allow_writing(settings)?;
    }
    enter(CapabilitySet::SYS_ADMIN, landlock, seccomp::UBLK_COMMANDS).map(|_| ())
}

/// Read by Ceph's client library when it connects, besides its configuration: host names, the time zone and
/// the processors.
pub const READ_BY_CEPH: [&str; 9] = [
    "/etc/ceph",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/localtime",
    "/sys/devices/system",
];

/// Confines this thread, and the threads that Ceph's client library creates on it, to connections to the
/// cluster and to reading the files `read`, or files below them. `read` should include [`READ_BY_CEPH`].
pub fn cluster(read: &[PathBuf]) -> Outcome {
    let mut landlock = Landlock::new_connecting()?;
    for path in read {
        landlock.allow_reading_if_there(path)?;
    }
    // Keyrings may be readable only for Ceph's user, or for root.
    enter(CapabilitySet::DAC_READ_SEARCH, landlock, seccomp::CLUSTER).map(|_| ())
}

/// For the process that watches the users of a block device. It reads the open files of all processes.
pub fn watcher() -> Outcome {
    set_no_new_privs(true).map_err(|e| Failure::new(format!("cannot set no_new_privs: {e}")))?;
    capabilities::keep(CapabilitySet::SYS_PTRACE | CapabilitySet::DAC_READ_SEARCH)?;
    // Landlock is not used: it would hide the other processes.
    filter::enter(seccomp::WATCHER).map(|_| ())
}

/// 0 if the kernel does not support Landlock.
pub fn landlock_abi() -> u32 {
    landlock::abi()
}

fn capabilities_of(needs: &Needs) -> CapabilitySet {
    let mut kept = CapabilitySet::empty();
    // The ublk driver requires CAP_SYS_ADMIN for each command about a privileged device.
    kept.set(CapabilitySet::SYS_ADMIN, needs.block_device.is_some());
    // The device node may belong to another user and be inaccessible to others.
    kept.set(CapabilitySet::DAC_READ_SEARCH, needs.block_device.is_some());
    // Without CAP_DAC_OVERRIDE, the permissions of files also apply to root.
    let writable =
        capabilities::all_writable(needs.image.as_ref().map(AsFd::as_fd), directories(&needs.removed));
    kept.set(CapabilitySet::DAC_OVERRIDE, !writable);
    kept
}

fn directories(files: &[PathBuf]) -> impl Iterator<Item = &Path> {
    files.iter().filter_map(|file| file.parent())
}

fn enter(kept: CapabilitySet, landlock: Landlock, calls: seccomp::Lists) -> Outcome<Confinement> {
    set_no_new_privs(true).map_err(|e| Failure::new(format!("cannot set no_new_privs: {e}")))?;
    let capabilities = capabilities::keep(kept)?;
    // The filter must come last, because it does not allow the calls that the two steps before it make.
    let landlock_abi = landlock.enter()?;
    let seccomp = filter::enter(calls)?;
    Ok(Confinement { capabilities, no_new_privileges: true, landlock_abi, seccomp })
}

//! Privileges that a daemon drops once it is set up: capabilities, new privileges, the file system, and
//! the system calls that it does not make. docs/security.md has the reasons, and how to see it.
//!
//! Everything here applies to the thread that asks for it and to those that it makes later.
//! Engines are made by a thread that is confined more than the rest: they read what clients send,
//! and open nothing.

mod capabilities;
pub mod filter;
mod landlock;
pub mod seccomp;

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use blkq::ring::{self, Policy};
use blkq_export::ublk::{self, CONTROL_PATH, SETTINGS_DIRECTORY};
use rustix::thread::{CapabilitySet, set_no_new_privs};
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Outcome};
use crate::operations::OPERATIONS;
use landlock::Landlock;

/// The parts of the system that the control plane needs later.
#[derive(Debug, Default)]
pub struct Needs {
    /// The image, if there is one (`O_PATH`): it is opened anew to be written.
    pub image: Option<OwnedFd>,
    /// Files that are removed in the end: sockets, and those in the state directory.
    pub removed: Vec<PathBuf>,
    /// The directory of the journals of qcow2 images.
    pub journals: Option<PathBuf>,
    /// Directories whose files are read again: certificates.
    pub read: Vec<PathBuf>,
    /// The number of the block device, if there is one.
    pub block_device: Option<u32>,
}

/// The privileges that the control plane of a daemon has dropped.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Confinement {
    /// Those that are left: `none`, or their names.
    pub capabilities: String,
    /// Whether no program that it runs could have more.
    pub no_new_privileges: bool,
    /// The version of Landlock that keeps the file system from it; 0 where the kernel has none.
    pub landlock_abi: u32,
    /// Whether system calls are filtered.
    pub seccomp: bool,
}

impl Confinement {
    /// In words, for people.
    pub fn describe(&self) -> String {
        let Confinement { capabilities, no_new_privileges, landlock_abi, seccomp } = self;
        if *self == Confinement::default() {
            return "off (--no-sandbox)".to_owned();
        }
        let landlock = match landlock_abi {
            0 => "no Landlock (this kernel has none)".to_owned(),
            abi => format!("Landlock ABI {abi}"),
        };
        let privileges = if *no_new_privileges { "no new privileges" } else { "new privileges" };
        let seccomp = if *seccomp { "seccomp" } else { "no seccomp (this kernel has none)" };
        format!("capabilities: {capabilities}; {privileges}; {landlock}; {seccomp}")
    }
}

/// Confines this thread to what an engine, its worker and a watcher of trigger files do: nothing
/// is opened, nobody is connected to. With `partscan` it keeps the capability without which the
/// kernel scans for no partitions on a block device that it serves.
///
/// # Errors
/// Confinement that the kernel has, and refuses.
pub fn engine(partscan: bool) -> Outcome {
    ring::set_policy(Policy { operations: &NUMBERS, sealed: no_more_rings });
    let landlock = Landlock::new()?;
    let kept = if partscan { CapabilitySet::SYS_ADMIN } else { CapabilitySet::empty() };
    enter(kept, landlock, seccomp::ENGINE).map(|_| ())
}

/// The operations of a ring.
static NUMBERS: [u8; OPERATIONS.len()] = {
    let mut numbers = [0; OPERATIONS.len()];
    let mut at = 0;
    while at < numbers.len() {
        numbers[at] = OPERATIONS[at].1;
        at += 1;
    }
    numbers
};

/// An engine has its ring, which is restricted: another one would not be.
fn no_more_rings() -> Result<(), blkq::Error> {
    match filter::without_rings() {
        Ok(_) => Ok(()),
        Err(failure) => Err(blkq::Error::new(blkq::ErrorKind::System, failure.to_string())),
    }
}

/// Confines this thread, the first, to what the control plane does.
///
/// # Errors
/// Confinement that the kernel has, and refuses.
pub fn control(needs: &Needs) -> Outcome<Confinement> {
    // Read from the kernel once, and later by a raw image that was behind another.
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
        // For that of a snapshot.
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
    // Commands of ublk need rings. Without it none is made any more, and those that there are signal the
    // eventfds of virtual machines, and register nothing else.
    if needs.block_device.is_none() {
        filter::without_rings()?;
        filter::register_eventfds_only()?;
    }
    Ok(confinement)
}

/// Confines the process that gives commands to ublk's control device to that, and to settings of
/// block devices without hardware.
///
/// # Errors
/// Confinement that the kernel has, and refuses.
pub fn ublk_commands() -> Outcome {
    let mut landlock = Landlock::new()?;
    landlock.allow_device(Path::new(CONTROL_PATH))?;
    let settings = Path::new(SETTINGS_DIRECTORY);
    if settings.is_dir() {
        landlock.allow_writing(settings)?;
    }
    enter(CapabilitySet::SYS_ADMIN, landlock, seccomp::UBLK_COMMANDS).map(|_| ())
}

/// The parts of the file system that Ceph's client reads when it connects, wherever its configuration is: names
/// of hosts, the time zone, the processors.
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

/// Confines this thread, and those that Ceph's client makes on it, to what that does: connections to the cluster,
/// and reading what is at the paths `read`, such as [`READ_BY_CEPH`], or below them.
///
/// # Errors
/// Confinement that the kernel has, and refuses.
pub fn cluster(read: &[PathBuf]) -> Outcome {
    let mut landlock = Landlock::new_connecting()?;
    for path in read {
        landlock.allow_reading_if_there(path)?;
    }
    // Keyrings are Ceph's user's, or root's.
    enter(CapabilitySet::DAC_READ_SEARCH, landlock, seccomp::CLUSTER).map(|_| ())
}

/// Confines the process that watches the users of a block device to just that: it reads the open files of
/// all processes.
///
/// # Errors
/// The error of the kernel.
pub fn watcher() -> Outcome {
    set_no_new_privs(true).map_err(|e| Failure::new(format!("cannot give up new privileges: {e}")))?;
    capabilities::keep(CapabilitySet::SYS_PTRACE | CapabilitySet::DAC_READ_SEARCH)?;
    // Landlock would hide the processes.
    filter::enter(seccomp::WATCHER).map(|_| ())
}

/// The version of Landlock that this kernel has, 0 if none.
pub fn landlock_abi() -> u32 {
    landlock::abi()
}

/// The capabilities of this thread that may be needed.
fn capabilities_of(needs: &Needs) -> CapabilitySet {
    let mut kept = CapabilitySet::empty();
    // The kernel's ublk wants it for each command about a device that is not of an ordinary user.
    kept.set(CapabilitySet::SYS_ADMIN, needs.block_device.is_some());
    // The node may be given to another user, without access for others.
    kept.set(CapabilitySet::DAC_READ_SEARCH, needs.block_device.is_some());
    // Without it root is but another user where the files of others are.
    let writable =
        capabilities::all_writable(needs.image.as_ref().map(AsFd::as_fd), directories(&needs.removed));
    kept.set(CapabilitySet::DAC_OVERRIDE, !writable);
    kept
}

fn directories(files: &[PathBuf]) -> impl Iterator<Item = &Path> {
    files.iter().filter_map(|file| file.parent())
}

fn enter(kept: CapabilitySet, landlock: Landlock, calls: &[seccomp::Call]) -> Outcome<Confinement> {
    set_no_new_privs(true).map_err(|e| Failure::new(format!("cannot give up new privileges: {e}")))?;
    let capabilities = capabilities::keep(kept)?;
    // In this order: the filter knows no call of the two before it.
    let landlock_abi = landlock.enter()?;
    let seccomp = filter::enter(calls)?;
    Ok(Confinement { capabilities, no_new_privileges: true, landlock_abi, seccomp })
}

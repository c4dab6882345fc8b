//! Drops the privileges that a running daemon does not need. docs/security.md explains the reasons, and how
//! to inspect the result.
//!
//! Each function here applies to the calling thread and the threads that it creates later, and fails if the
//! kernel supports a confinement but refuses it. The engines are created by a thread with the strictest
//! confinement: they read what clients send, and open no files.

mod filter;
mod landlock;
pub mod seccomp;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use blkq::ring::{self, Policy};
use blkq_export::ublk::{self, CONTROL_PATH, SETTINGS_DIRECTORY};
use blkq_protocol::daemon::Operation;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::Confinement;
use io_uring::opcode;
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

use landlock::{BIND_TCP, CONNECT_TCP, Landlock, access};

/// Number of capability bits to try. The kernel has fewer capabilities, and rejects the first invalid one.
const CAPABILITY_NUMBERS: u32 = 63;

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
    let landlock = Landlock::new(BIND_TCP | CONNECT_TCP)?;
    let kept = if partscan { CapabilitySet::SYS_ADMIN } else { CapabilitySet::empty() };
    enter(kept, Some(landlock), seccomp::ENGINE).map(drop)
}

/// The io_uring operations that a daemon uses: name, number and purpose. The rings of a confined daemon allow no
/// others. None of them takes an address: SEND and SENDMSG could connect a socket (MSG_FASTOPEN) or send a datagram to
/// any path.
pub const OPERATIONS: [Operation; 17] = [
    ("IORING_OP_READ", opcode::Read::CODE, "reading files"),
    ("IORING_OP_READV", opcode::Readv::CODE, "reading into several buffers"),
    ("IORING_OP_READ_FIXED", opcode::ReadFixed::CODE, "direct reads into registered buffers"),
    ("IORING_OP_WRITE", opcode::Write::CODE, "writing files, NBD under TLS"),
    ("IORING_OP_WRITEV", opcode::Writev::CODE, "writing from several buffers, NBD replies"),
    ("IORING_OP_WRITE_FIXED", opcode::WriteFixed::CODE, "direct writes from registered buffers"),
    ("IORING_OP_READV_FIXED", opcode::ReadvFixed::CODE, "reading into several pieces of registered memory"),
    ("IORING_OP_WRITEV_FIXED", opcode::WritevFixed::CODE, "writing from several pieces of registered memory"),
    ("IORING_OP_FSYNC", opcode::Fsync::CODE, "flush"),
    ("IORING_OP_FALLOCATE", opcode::Fallocate::CODE, "discard, write zeroes"),
    ("IORING_OP_POLL_ADD", opcode::PollAdd::CODE, "waking an engine"),
    ("IORING_OP_TIMEOUT", opcode::Timeout::CODE, "freeing memory that is not used"),
    ("IORING_OP_ASYNC_CANCEL", opcode::AsyncCancel::CODE, "detach, closing connections"),
    ("IORING_OP_URING_CMD", opcode::UringCmd16::CODE, "ublk, discard of block devices"),
    ("IORING_OP_ACCEPT", opcode::Accept::CODE, "NBD connections"),
    ("IORING_OP_RECV", opcode::Recv::CODE, "NBD requests"),
    ("IORING_OP_RECVMSG", opcode::RecvMsg::CODE, "NBD payloads"),
];

static NUMBERS: LazyLock<Vec<u8>> = LazyLock::new(|| OPERATIONS.map(|(_, number, _)| number).into());

/// The ring of an engine is restricted to certain operations, but another ring would not be.
fn no_more_rings() -> Result<(), blkq::Error> {
    let confined = filter::without_rings().map(drop);
    confined.map_err(|failure| blkq::Error::new(blkq::ErrorKind::System, failure.to_string()))
}

pub fn control(needs: &Needs) -> Outcome<Confinement> {
    // rustix reads the page size from the kernel once and caches it. A raw image that was a backing file
    // needs it later, when the confined thread can no longer read it.
    let _ = rustix::param::page_size();
    let kept = capabilities_of(needs);
    let mut landlock = Landlock::new(BIND_TCP | CONNECT_TCP)?;
    if let Some(image) = &needs.image {
        landlock.allow_image(image.as_fd())?;
    }
    directories(&needs.removed).try_for_each(|directory| landlock.allow(directory, access::REMOVE_FILE))?;
    if let Some(directory) = &needs.journals {
        // A snapshot creates the journal of the overlay.
        landlock.allow(directory, access::REPLACE_FILE | access::READ_FILE)?;
    }
    needs.read.iter().try_for_each(|directory| landlock.allow(directory, access::READ_FILE))?;
    if let Some(id) = &needs.block_device {
        landlock.allow(Path::new(CONTROL_PATH), access::DEVICE)?;
        landlock.allow(Path::new(&ublk::block_path(*id)), access::DEVICE)?;
    }
    let confinement = enter(kept, Some(landlock), seccomp::CONTROL)?;
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
    let mut landlock = Landlock::new(BIND_TCP | CONNECT_TCP)?;
    landlock.allow(Path::new(CONTROL_PATH), access::DEVICE)?;
    let settings = Path::new(SETTINGS_DIRECTORY);
    if settings.is_dir() {
        landlock.allow(settings, access::WRITE_FILE)?;
    }
    enter(CapabilitySet::SYS_ADMIN, Some(landlock), seccomp::UBLK_COMMANDS).map(drop)
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
    let mut landlock = Landlock::new(BIND_TCP)?;
    let mut existing = read.iter().filter(|path| path.exists());
    existing.try_for_each(|path| landlock.allow(path, access::READ_FILE))?;
    // Keyrings may be readable only for Ceph's user, or for root.
    enter(CapabilitySet::DAC_READ_SEARCH, Some(landlock), seccomp::CLUSTER).map(drop)
}

/// For the process that watches the users of a block device. It reads the open files of all processes.
pub fn watcher() -> Outcome {
    let kept = CapabilitySet::SYS_PTRACE | CapabilitySet::DAC_READ_SEARCH;
    // Landlock is not used: it would hide the other processes.
    enter(kept, None, seccomp::WATCHER).map(drop)
}

fn capabilities_of(needs: &Needs) -> CapabilitySet {
    let mut kept = CapabilitySet::empty();
    // The ublk driver requires CAP_SYS_ADMIN for each command about a privileged device.
    kept.set(CapabilitySet::SYS_ADMIN, needs.block_device.is_some());
    // The device node may belong to another user and be inaccessible to others.
    kept.set(CapabilitySet::DAC_READ_SEARCH, needs.block_device.is_some());
    // Without CAP_DAC_OVERRIDE, the permissions of files also apply to root.
    let writable = all_writable(needs.image.as_ref().map(AsFd::as_fd), directories(&needs.removed));
    kept.set(CapabilitySet::DAC_OVERRIDE, !writable);
    kept
}

fn directories(files: &[PathBuf]) -> impl Iterator<Item = &Path> {
    files.iter().filter_map(|file| file.parent())
}

fn enter(kept: CapabilitySet, landlock: Option<Landlock>, calls: seccomp::Lists) -> Outcome<Confinement> {
    set_no_new_privs(true).map_err(|e| Failure::new(format!("cannot set no_new_privs: {e}")))?;
    let capabilities = keep_capabilities(kept)?;
    // The filter must come last, because it does not allow the calls that the two steps before it make.
    let landlock_abi = landlock.map_or(Ok(0), Landlock::enter)?;
    let seccomp = filter::enter(calls)?;
    Ok(Confinement { capabilities, no_new_privileges: true, landlock_abi, seccomp })
}

fn not_dropped(error: Errno) -> Failure {
    Failure::new(format!("cannot drop capabilities: {error}"))
}

/// Whether this user can write to `image` and to each of `directories` without any capability.
fn all_writable<'a>(image: Option<BorrowedFd<'_>>, mut directories: impl Iterator<Item = &'a Path>) -> bool {
    let Ok(had) = capabilities(None) else { return true };
    let without = CapabilitySets { effective: CapabilitySet::empty(), ..had };
    if had.effective.is_empty() || set_capabilities(None, without).is_err() {
        // Without capabilities, dropping them changes nothing.
        return true;
    }
    let refused = |result| matches!(result, Err(Errno::ACCESS | Errno::PERM));
    let of_file = |file| accessat(file, "", Access::WRITE_OK, AtFlags::EACCESS | AtFlags::EMPTY_PATH);
    let of_path = |path: &Path| accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS);
    let accessible =
        !image.is_some_and(|file| refused(of_file(file))) && !directories.any(|path| refused(of_path(path)));
    // This does not fail: a thread may always make its permitted capabilities effective.
    let _ = set_capabilities(None, had);
    accessible
}

/// Permanently drops all capabilities except `kept`. Returns the names of the remaining ones.
fn keep_capabilities(kept: CapabilitySet) -> Outcome<String> {
    let had = capabilities(None).map_err(not_dropped)?;
    let left = had.permitted & kept;
    if had.effective.contains(CapabilitySet::SETPCAP) {
        // Also remove the capabilities from the bounding set, so that no program that this process might
        // execute can regain them.
        for number in 0..CAPABILITY_NUMBERS {
            let one = CapabilitySet::from_bits_retain(1 << number);
            if !left.contains(one) && remove_capability_from_bounding_set(one) == Err(Errno::INVAL) {
                break;
            }
        }
    }
    clear_ambient_capability_set().map_err(not_dropped)?;
    let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).map_err(not_dropped)?;
    // Report what the kernel says, not what was requested.
    let now = capabilities(None).map_err(not_dropped)?.permitted;
    let names: Vec<String> = now.iter_names().map(|(name, _)| name.to_lowercase()).collect();
    Ok(if names.is_empty() { "none".to_owned() } else { names.join(" ") })
}

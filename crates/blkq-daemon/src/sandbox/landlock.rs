//! Landlock (landlock(7)). Declares a small part of linux/landlock.h and makes the system calls directly.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::system::landlock_abi;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

// `LANDLOCK_RULE_PATH_BENEATH`.
const PATH_BENEATH: u32 = 1;

/// Rights on files, as in the constants `LANDLOCK_ACCESS_FS_*`. A right on a directory applies to the files in it.
pub mod access {
    pub const WRITE_FILE: u64 = 1 << 1;
    pub const READ_FILE: u64 = 1 << 2;
    pub const REMOVE_FILE: u64 = 1 << 5;
    const MAKE_REG: u64 = 1 << 8;
    pub const TRUNCATE: u64 = 1 << 14;
    const IOCTL_DEV: u64 = 1 << 15;
    pub const DEVICE: u64 = READ_FILE | WRITE_FILE | IOCTL_DEV;
    /// Creating and replacing files.
    pub const REPLACE_FILE: u64 = MAKE_REG | WRITE_FILE | TRUNCATE | REMOVE_FILE;
}

/// Number of access rights on files, by the Landlock ABI versions that added rights.
const RIGHTS: [(u32, u32); 4] = [(1, 13), (2, 14), (3, 15), (5, 16)];
/// The ABI versions that added rules for TCP ports, and for signals and abstract unix sockets.
const NET_ABI: u32 = 4;
const SCOPE_ABI: u32 = 6;
// `LANDLOCK_ACCESS_NET_BIND_TCP`.
pub const BIND_TCP: u64 = 0b01;
// `LANDLOCK_ACCESS_NET_CONNECT_TCP`.
pub const CONNECT_TCP: u64 = 0b10;
// `LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | LANDLOCK_SCOPE_SIGNAL`.
const SCOPED: u64 = 0b11;

/// `struct landlock_ruleset_attr`. Older kernels know a prefix of it, and accept the rest if it is zero.
#[repr(C)]
struct RulesetAttr {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}
const _: () = assert!(size_of::<RulesetAttr>() == 24);

// `struct landlock_path_beneath_attr`.
#[repr(C, packed)]
struct PathBeneathAttr {
    allowed_access: u64,
    parent_fd: i32,
}
const _: () = assert!(size_of::<PathBeneathAttr>() == 12);

/// Rules that are collected first and then enforced permanently. A rule cannot be added if its path does not
/// exist.
pub struct Landlock {
    /// `None` if the kernel does not support Landlock.
    ruleset: Option<OwnedFd>,
    abi: u32,
    handled: u64,
}

/// The result of a system call, or its error.
fn checked(result: libc::c_long) -> rustix::io::Result<libc::c_long> {
    let error = || Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO);
    if result < 0 { Err(error()) } else { Ok(result) }
}

fn failed(what: impl std::fmt::Display, error: Errno) -> Failure {
    Failure::new(format!(
        "cannot confine the daemon: Landlock ({what}): {error}; use --no-sandbox to run without confinement"
    ))
}

impl Landlock {
    /// Allows no access to files yet, and denies `network`, a combination of [`BIND_TCP`] and [`CONNECT_TCP`]. Fails
    /// if the kernel supports Landlock but refuses.
    pub fn new(network: u64) -> Outcome<Landlock> {
        let abi = landlock_abi();
        if abi == 0 {
            return Ok(Landlock { ruleset: None, abi, handled: 0 });
        }
        let rights = RIGHTS.iter().rfind(|(since, _)| *since <= abi).map_or(13, |(_, rights)| *rights);
        let handled = (1 << rights) - 1;
        let attr = RulesetAttr {
            handled_access_fs: handled,
            handled_access_net: if abi >= NET_ABI { network } else { 0 },
            scoped: if abi >= SCOPE_ABI { SCOPED } else { 0 },
        };
        // SAFETY: the structure outlives the call, which gets its size.
        let fd = unsafe {
            libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attr, size_of::<RulesetAttr>(), 0u32)
        };
        let fd = checked(fd).map_err(|e| failed("rules", e))?;
        // SAFETY: the kernel created this descriptor (close-on-exec), and nothing else owns it.
        let ruleset = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        Ok(Landlock { ruleset: Some(ruleset), abi, handled })
    }

    /// Allows reading and writing `file`, whatever its name is.
    pub fn allow_image(&mut self, file: BorrowedFd<'_>) -> Outcome {
        self.add_rule(file, access::DEVICE | access::TRUNCATE).map_err(|e| failed("the image", e))
    }

    /// Allows `rights` ([`access`]) on the file or directory at `path`.
    pub fn allow(&mut self, path: &Path, rights: u64) -> Outcome {
        let file = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        file.and_then(|file| self.add_rule(file.as_fd(), rights)).map_err(|e| failed(path.display(), e))
    }

    fn add_rule(&self, file: BorrowedFd<'_>, rights: u64) -> rustix::io::Result<()> {
        let Some(ruleset) = &self.ruleset else { return Ok(()) };
        let attr = PathBeneathAttr { allowed_access: rights & self.handled, parent_fd: file.as_raw_fd() };
        let (call, ruleset) = (libc::SYS_landlock_add_rule, ruleset.as_raw_fd());
        // SAFETY: the structure outlives the call, and both descriptors are open.
        let result = unsafe { libc::syscall(call, ruleset, PATH_BENEATH, &raw const attr, 0u32) };
        checked(result).map(drop)
    }

    /// Permanently enforces the rules on this thread and the threads that it creates. Returns the Landlock
    /// ABI version, or 0 if the kernel does not support Landlock.
    pub fn enter(self) -> Outcome<u32> {
        let Some(ruleset) = &self.ruleset else { return Ok(0) };
        // SAFETY: the descriptor is open, and the call accesses no memory of this process.
        let result = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0u32) };
        checked(result).map(|_| self.abi).map_err(|e| failed("entering", e))
    }
}

//! Features and limits of the kernel, for the sandbox of daemons.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The version of Landlock in this kernel; 0 if the kernel does not support Landlock.
pub fn landlock_abi() -> u32 {
    // `LANDLOCK_CREATE_RULESET_VERSION`.
    const VERSION_FLAG: u32 = 1;
    let no_rules = std::ptr::null::<u8>();
    // SAFETY: without a ruleset the call only returns the version.
    let abi = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, no_rules, 0usize, VERSION_FLAG) };
    u32::try_from(abi).unwrap_or(0)
}

/// Whether the kernel supports seccomp filters.
pub fn has_seccomp() -> bool {
    let action = libc::SECCOMP_RET_ALLOW;
    // SAFETY: the kernel reads one word, and only returns whether it knows the action.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0u32, &raw const action) };
    result == 0
}

/// Raises the limits of this process as a daemon does. Open files are for connections, locked memory for
/// registered buffers. Errors are ignored: a limit that is too low is reported where it is exceeded.
pub fn raise_limits() {
    for resource in [Resource::Nofile, Resource::Memlock] {
        let maximum = getrlimit(resource).maximum;
        let _ = setrlimit(resource, Rlimit { current: maximum, maximum });
    }
    // Root may lock memory without a limit now, but not after it has dropped its privileges.
    let _ = setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None });
}

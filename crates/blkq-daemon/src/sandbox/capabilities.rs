//! The capabilities of this thread (capabilities(7)).

use std::os::fd::BorrowedFd;
use std::path::Path;

use blkq_protocol::failure::{Failure, Outcome};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities,
};

/// Number of capability bits to try. The kernel has fewer capabilities, and rejects the first invalid one.
const NUMBERS: u32 = 63;

fn failed(error: Errno) -> Failure {
    Failure::new(format!("cannot drop capabilities: {error}"))
}

/// Whether this user can write to `image` and to each of `directories` without any capability.
pub fn all_writable<'a>(
    image: Option<BorrowedFd<'_>>,
    mut directories: impl Iterator<Item = &'a Path>,
) -> bool {
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
pub fn keep(kept: CapabilitySet) -> Outcome<String> {
    let had = capabilities(None).map_err(failed)?;
    let left = had.permitted & kept;
    if had.effective.contains(CapabilitySet::SETPCAP) {
        // Also remove the capabilities from the bounding set, so that no program that this process might
        // execute can regain them.
        for number in 0..NUMBERS {
            let one = CapabilitySet::from_bits_retain(1 << number);
            if !left.contains(one) && remove_capability_from_bounding_set(one) == Err(Errno::INVAL) {
                break;
            }
        }
    }
    clear_ambient_capability_set().map_err(failed)?;
    let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).map_err(failed)?;
    // Report what the kernel says, not what was requested.
    let now = capabilities(None).map_err(failed)?.permitted;
    let names: Vec<String> = now.iter_names().map(|(name, _)| name.to_lowercase()).collect();
    Ok(if names.is_empty() { "none".to_owned() } else { names.join(" ") })
}

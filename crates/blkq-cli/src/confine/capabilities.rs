//! Capabilities of this thread (capabilities(7)).

use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities,
};

use crate::failure::{Failure, Outcome};

/// More than there are.
const NUMBERS: u32 = 63;

fn failed(error: Errno) -> Failure {
    Failure::new(format!("cannot drop capabilities: {error}"))
}

/// Whether this user may write to `image` and to each of `directories` without any capability.
pub fn all_writable<'a>(
    image: Option<BorrowedFd<'_>>,
    mut directories: impl Iterator<Item = &'a Path>,
) -> bool {
    let Ok(had) = capabilities(None) else { return true };
    let without = CapabilitySets { effective: CapabilitySet::empty(), ..had };
    if had.effective.is_empty() || set_capabilities(None, without).is_err() {
        // An ordinary user could do no more before.
        return true;
    }
    let refused = |result| matches!(result, Err(Errno::ACCESS | Errno::PERM));
    let of_file = |file| accessat(file, "", Access::WRITE_OK, AtFlags::EACCESS | AtFlags::EMPTY_PATH);
    let of_path = |path: &Path| accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS);
    let accessible =
        !image.is_some_and(|file| refused(of_file(file))) && !directories.any(|path| refused(of_path(path)));
    // A permitted capability may always become effective again.
    let _ = set_capabilities(None, had);
    accessible
}

/// Drops all capabilities but those of `kept` for good; returns the names of those that are left.
///
/// # Errors
/// If the kernel refuses.
pub fn keep(kept: CapabilitySet) -> Outcome<String> {
    let had = capabilities(None).map_err(failed)?;
    let left = had.permitted & kept;
    if had.effective.contains(CapabilitySet::SETPCAP) {
        // Capabilities that no program run by this one could have again, were there any.
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
    // Not what was asked for: what is so.
    let names: Vec<String> = capabilities(None)
        .map_err(failed)?
        .permitted
        .iter_names()
        .map(|(name, _)| name.to_lowercase())
        .collect();
    Ok(if names.is_empty() { "none".to_owned() } else { names.join(" ") })
}

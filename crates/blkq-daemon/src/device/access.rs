//! Access to the unix sockets of `--listen`: `--socket-mode` and `--socket-group`.

use std::ffi::{CStr, CString};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use blkq_export::SocketAccess;
use blkq_protocol::failure::{Failure, Outcome};

/// The mode of sockets if only a group is given: the members of the group may connect.
const GROUP_MODE: u32 = 0o660;
/// Maximum size of the buffer for the record of a group with all its members, in bytes.
const GROUP_BYTES_MAX: usize = 1 << 20;

/// If only a group is given, its members may connect. Fails if there is no such group.
pub fn socket_access(mode: Option<u32>, group: Option<&str>) -> Outcome<SocketAccess> {
    let default = SocketAccess::default().mode;
    let group = group.map(group_number).transpose()?;
    let mode = mode.unwrap_or(if group.is_some() { GROUP_MODE } else { default });
    Ok(SocketAccess { mode, group })
}

fn group_number(name: &str) -> Outcome<u32> {
    let no_group = || Failure::new(format!("--socket-group {name}: there is no such group"));
    let c_name = CString::new(name).map_err(|_| no_group())?;
    match find_group(&c_name) {
        Ok(Some(group)) => Ok(group),
        Ok(None) => name.parse().map_err(|_| no_group()),
        Err(e) => Err(Failure::new(format!("--socket-group {name}: {e}"))),
    }
}

/// Asks the C library, because groups need not be in a file.
fn find_group(name: &CStr) -> std::io::Result<Option<u32>> {
    let mut buffer = vec![0; 4096];
    loop {
        let mut group = std::mem::MaybeUninit::<libc::group>::uninit();
        let mut found = std::ptr::null_mut();
        // SAFETY: the name ends with a NUL, `group` and `found` are valid for writes, and the length is that
        // of the buffer.
        let error = unsafe {
            libc::getgrnam_r(
                name.as_ptr(),
                group.as_mut_ptr(),
                buffer.as_mut_ptr(),
                buffer.len(),
                &raw mut found,
            )
        };
        match error {
            // SAFETY: `found` points to `group`, which the call has initialized.
            0 if !found.is_null() => return Ok(Some(unsafe { (*found).gr_gid })),
            // According to getgrnam(3), these errors, too, can mean that the group does not exist.
            0 | libc::ENOENT | libc::ESRCH | libc::EBADF | libc::EPERM => return Ok(None),
            libc::EINTR => {}
            libc::ERANGE if buffer.len() < GROUP_BYTES_MAX => buffer.resize(buffer.len() * 2, 0),
            error => return Err(std::io::Error::from_raw_os_error(error)),
        }
    }
}

/// Returns an ancestor directory of the socket `path` that some of the intended clients cannot enter.
pub fn closed_directory(path: &Path, access: SocketAccess) -> Option<PathBuf> {
    let (group, to_all) = (access.group, access.mode & 0o002 != 0);
    if !to_all && access.mode & 0o020 == 0 {
        return None;
    }
    let directory = path.parent()?.canonicalize().ok()?;
    let keeps_out = |directory: &&Path| {
        std::fs::metadata(directory).is_ok_and(|found| {
            let is_of_group = group.is_none_or(|group| group == found.gid());
            found.mode() & if is_of_group && !to_all { 0o010 } else { 0o001 } == 0
        })
    };
    directory.ancestors().find(keeps_out).map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_numbers() {
        assert_eq!(socket_access(None, None), Ok(SocketAccess::default()));
        assert_eq!(socket_access(None, Some("root")), Ok(SocketAccess { mode: 0o660, group: Some(0) }));
        let by_number = SocketAccess { mode: 0o620, group: Some(4_000_123) };
        assert_eq!(socket_access(Some(0o620), Some("4000123")), Ok(by_number));
        for bad in ["no such group", "", "-1", "root\0"] {
            assert!(
                socket_access(None, Some(bad)).unwrap_err().to_string().contains("no such group"),
                "{bad}"
            );
        }
    }
}

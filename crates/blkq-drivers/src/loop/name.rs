//! The name of an open image, which another process may rename, on a mount that this process may leave.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};

use super::backing::name_now;

/// The name under which an image was opened.
#[derive(Clone, Debug)]
pub(crate) struct ImageName {
    path: PathBuf,
    /// The mount that it is on. A process that leaves it sees names below it as if it were the root.
    mount_point: PathBuf,
}

impl ImageName {
    /// Of the image at `path`, which is absolute, on a mount that this process has.
    pub fn new(path: &Path) -> ImageName {
        let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let mount_point = path.ancestors().find(|path| is_mount_root(path)).unwrap_or(Path::new("/"));
        ImageName { path: path.to_owned(), mount_point: mount_point.to_owned() }
    }

    /// The name that `file`, the image, has now.
    pub fn now(&self, file: &File) -> String {
        let now = name_now(file).map_or_else(|| self.path.clone(), |name| self.path_of(&name));
        now.display().to_string()
    }

    /// The path from the root of what the kernel calls `name`, from the mount on if that was left.
    fn path_of(&self, name: &Path) -> PathBuf {
        let below = match name.strip_prefix("/") {
            // A file does not leave its mount.
            Ok(below) if !name.starts_with(&self.mount_point) => below,
            _ => return name.to_owned(),
        };
        // Joined with an empty path it would be a directory.
        if below.as_os_str().is_empty() { self.mount_point.clone() } else { self.mount_point.join(below) }
    }
}

/// Whether something is mounted there; what cannot be inspected is no mount.
fn is_mount_root(path: &Path) -> bool {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    statx(CWD, path, flags, StatxFlags::empty())
        .is_ok_and(|stat| stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_below_a_mount_that_was_left_is_whole() {
        let name = |mount: &str| ImageName { path: "/net/a.img".into(), mount_point: mount.into() };
        let path_of = |mount: &str, now: &str| name(mount).path_of(Path::new(now)).display().to_string();
        assert_eq!(path_of("/net", "/a.img"), "/net/a.img");
        assert_eq!(path_of("/net", "/dir/b.img (deleted)"), "/net/dir/b.img (deleted)");
        // The mount is there; and there is one of the file alone.
        assert_eq!(path_of("/net", "/net/b.img"), "/net/b.img");
        assert_eq!(path_of("/", "/other/b.img"), "/other/b.img");
        assert_eq!(path_of("/net/a.img", "/"), "/net/a.img");
        assert_eq!(path_of("/net", "memfd:a"), "memfd:a");
        assert_eq!(ImageName::new(Path::new("/proc/self/nowhere")).mount_point, Path::new("/proc"));
    }
}

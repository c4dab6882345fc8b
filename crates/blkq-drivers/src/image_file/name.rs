//! Reports the current path of an open image, even after a rename and after this process has left the mount
//! namespace.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};

use super::file::ImageFile;

#[derive(Clone, Debug)]
pub(crate) struct ImageName {
    path: PathBuf,
    /// Once the process has left its mount namespace, the kernel reports paths relative to this mount.
    mount_point: PathBuf,
}

impl ImageName {
    /// Must be called before this process leaves its mount namespace. `path` is absolute.
    pub fn new(path: &Path) -> ImageName {
        let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let mount_point = path.ancestors().find(|path| is_mount_root(path)).unwrap_or(Path::new("/"));
        ImageName { path: path.to_owned(), mount_point: mount_point.to_owned() }
    }

    pub fn now(&self, file: &ImageFile) -> String {
        let now = file.name_now().map_or_else(|| self.path.clone(), |name| self.path_of(&name));
        now.display().to_string()
    }

    fn path_of(&self, name: &Path) -> PathBuf {
        let below = match name.strip_prefix("/") {
            // A rename cannot move a file to another mount, so a name outside of the mount point is relative to it.
            Ok(below) if !name.starts_with(&self.mount_point) => below,
            _ => return name.to_owned(),
        };
        // Joining an empty path would append a slash.
        if below.as_os_str().is_empty() { self.mount_point.clone() } else { self.mount_point.join(below) }
    }
}

/// Whether `path` is a mount point. A path that cannot be inspected counts as none.
fn is_mount_root(path: &Path) -> bool {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    statx(CWD, path, flags, StatxFlags::empty())
        .is_ok_and(|stat| stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_relative_to_a_left_mount_becomes_absolute() {
        let name = |mount: &str| ImageName { path: "/net/a.img".into(), mount_point: mount.into() };
        let path_of = |mount: &str, now: &str| name(mount).path_of(Path::new(now)).display().to_string();
        assert_eq!(path_of("/net", "/a.img"), "/net/a.img");
        assert_eq!(path_of("/net", "/dir/b.img (deleted)"), "/net/dir/b.img (deleted)");
        // The process still has the mount; then a mount of a single file.
        assert_eq!(path_of("/net", "/net/b.img"), "/net/b.img");
        assert_eq!(path_of("/", "/other/b.img"), "/other/b.img");
        assert_eq!(path_of("/net/a.img", "/"), "/net/a.img");
        assert_eq!(path_of("/net", "memfd:a"), "memfd:a");
        assert_eq!(ImageName::new(Path::new("/proc/self/nowhere")).mount_point, Path::new("/proc"));
    }
}

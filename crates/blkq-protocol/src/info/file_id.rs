//! Identifies files, regardless of their names.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{StatFs, statfs};
use serde::{Deserialize, Serialize};

/// Types of file systems that do not store inode numbers: vfat, exfat and FUSE (statfs(2)).
const RENUMBERED: [u64; 3] = [0x4d44, 0x2011_bab0, 0x6573_5546];

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileId {
    /// Major and minor number of the device of its file system.
    pub device: (u32, u32),
    pub inode: u64,
}

impl FileId {
    pub fn of(path: impl AsRef<Path>) -> Option<FileId> {
        fs::metadata(path).ok().map(|metadata| FileId::from(&metadata))
    }

    /// Whether the file at `path` keeps its inode number while no process has it open. The nodes of block devices
    /// do not, and neither do the files of some file systems.
    pub(super) fn is_permanent(path: &Path) -> bool {
        let is_renumbered = |system: StatFs| RENUMBERED.contains(&(system.f_type as u64));
        fs::metadata(path).is_ok_and(|metadata| metadata.is_file()) && !statfs(path).is_ok_and(is_renumbered)
    }
}

impl From<&fs::Metadata> for FileId {
    fn from(metadata: &fs::Metadata) -> FileId {
        FileId::from((metadata.dev(), metadata.ino()))
    }
}

/// From `st_dev` and `st_ino` of stat(2).
impl From<(u64, u64)> for FileId {
    fn from((device, inode): (u64, u64)) -> FileId {
        FileId { device: (libc::major(device), libc::minor(device)), inode }
    }
}

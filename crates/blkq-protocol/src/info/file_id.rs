//! Identifies files, regardless of their names.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use blkq_drivers::qcow2::BackingFile;
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

/// A backing file as it was recorded, when the headers of the images could be trusted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedBacking {
    pub file: FileId,
    /// Whether it is a qcow2 image; else it is raw, and its content, which a client may have written, must not name
    /// another backing file.
    pub qcow2: bool,
}

impl From<&BackingFile> for RecordedBacking {
    fn from(found: &BackingFile) -> RecordedBacking {
        RecordedBacking { file: found.identity.into(), qcow2: found.qcow2 }
    }
}

impl FileId {
    pub fn of(path: impl AsRef<Path>) -> Option<FileId> {
        fs::metadata(path).ok().map(|metadata| FileId::from(&metadata))
    }

    /// Whether `now`, the file at `path`, is another file than this one. `is_open` says whether a daemon still has
    /// this file open, so that its numbers stay.
    pub(crate) fn is_replaced(self, path: &Path, now: FileId, is_open: bool) -> bool {
        now != self && (is_open || !self.may_become(path, now))
    }

    /// Whether this file may have become `now`, the file at `path`, while no process had it open. A mount may change
    /// the number of a file system, some file systems renumber their files, and a block device may get a new node
    /// in the same file system. A path that leads to a node in another one was changed.
    fn may_become(self, path: &Path, now: FileId) -> bool {
        let is_renumbered = |system: StatFs| RENUMBERED.contains(&(system.f_type as u64));
        now.inode == self.inode
            || match fs::metadata(path).is_ok_and(|metadata| metadata.is_file()) {
                true => statfs(path).is_ok_and(is_renumbered),
                false => now.device == self.device,
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_of_another_file_system_is_another_file() {
        let id = |device, inode| FileId { device, inode };
        let (before, dev) = (id((8, 1), 7), Path::new("/dev/null"));
        assert!(!before.is_replaced(dev, before, true));
        assert!(before.is_replaced(dev, id((8, 1), 8), true), "the daemon has the node open");
        assert!(!before.is_replaced(dev, id((8, 1), 8), false), "the node was made again");
        assert!(before.is_replaced(dev, id((0, 5), 8), false));
        assert!(!before.is_replaced(dev, id((8, 2), 7), false), "the file system was mounted again");
    }
}

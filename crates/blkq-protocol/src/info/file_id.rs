//! Identifies files, regardless of their names.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use blkq_drivers::qcow2::BackingFile;
use rustix::fs::{StatFs, statfs};
use serde::{Deserialize, Serialize};

/// Types of file systems that do not store inode numbers: vfat, exfat and FUSE (statfs(2)).
const RENUMBERED: [u64; 3] = [0x4d44, 0x2011_bab0, 0x6573_5546];

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct FileId {
    /// Major and minor number of the device of its file system.
    pub device: (u32, u32),
    pub inode: u64,
    /// Major and minor number of the block device, if the file is the node of one. `None` also in what an older
    /// version recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<(u32, u32)>,
}

/// Two names of one file are equal, even if the numbers of the block device are not known for both.
impl PartialEq for FileId {
    fn eq(&self, other: &FileId) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }
}

impl Eq for FileId {}

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
        RecordedBacking { file: FileId::from(found), qcow2: found.qcow2 }
    }
}

impl RecordedBacking {
    /// Whether `now` is this file, as [`FileId::is_replaced`] says. The header of an image names it, which a daemon that
    /// was taken over may have changed, so a file of another file system with the same inode number is another file.
    /// `image` is the image of the device as it was recorded, and as it is: if a mount has changed the number of its
    /// file system, the backing files in it have the new number too.
    pub(crate) fn is_at(&self, now: &BackingFile, is_open: bool, image: [Option<FileId>; 2]) -> bool {
        let file = FileId::from(now);
        let device = match image {
            [Some(before), Some(now)] if before.device == self.file.device => now.device,
            _ => self.file.device,
        };
        // In a file system that renumbers its files, the image has another number too.
        let keeps_numbers = is_open || image[0].is_some() && image[0] == image[1];
        file.device == device && !self.file.is_replaced(&now.path, file, keeps_numbers)
    }
}

impl FileId {
    pub fn of(path: impl AsRef<Path>) -> Option<FileId> {
        fs::metadata(path).ok().map(|metadata| FileId::from(&metadata))
    }

    /// Whether `now`, the file at `path`, is another file than this one. `is_open` says whether a daemon still has
    /// this file open, so that its numbers stay.
    pub(crate) fn is_replaced(self, path: &Path, now: FileId, is_open: bool) -> bool {
        let is_other_device = self.node.is_some() && self.node != now.node;
        is_other_device || now != self && (is_open || !self.may_become(path, now))
    }

    /// Whether this file may have become `now`, the file at `path`, while no process had it open. A mount may change
    /// the number of a file system, some file systems renumber their files, and a block device may get a new node
    /// in the same file system. A path that leads to another file system was changed.
    fn may_become(self, path: &Path, now: FileId) -> bool {
        let is_renumbered = |system: StatFs| RENUMBERED.contains(&(system.f_type as u64));
        now.inode == self.inode
            || now.device == self.device && (now.node.is_some() || statfs(path).is_ok_and(is_renumbered))
    }
}

fn numbers(device: u64) -> (u32, u32) {
    (libc::major(device), libc::minor(device))
}

impl From<&fs::Metadata> for FileId {
    fn from(metadata: &fs::Metadata) -> FileId {
        let is_node = metadata.file_type().is_block_device();
        let node = is_node.then(|| numbers(metadata.rdev()));
        FileId { node, ..FileId::from((metadata.dev(), metadata.ino())) }
    }
}

impl From<&BackingFile> for FileId {
    fn from(found: &BackingFile) -> FileId {
        let file = FileId::from(found.identity);
        FileId::of(&found.path).filter(|now| *now == file).unwrap_or(file)
    }
}

/// From `st_dev` and `st_ino` of stat(2).
impl From<(u64, u64)> for FileId {
    fn from((device, inode): (u64, u64)) -> FileId {
        FileId { device: numbers(device), inode, node: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_of_another_device_is_another_file() {
        let id = |device, inode, node| FileId { device, inode, node };
        let (disk, other) = (Some((8, 16)), Some((8, 32)));
        let (before, path) = (id((8, 1), 7, disk), Path::new("/dev/null"));
        let is_replaced = |now, is_open| before.is_replaced(path, now, is_open);
        assert!(!is_replaced(before, true));
        assert!(is_replaced(id((8, 1), 8, disk), true), "the daemon has the node open");
        assert!(!is_replaced(id((8, 1), 8, disk), false), "the node was made again");
        assert!(!is_replaced(id((8, 2), 7, disk), false), "the file system was mounted again");
        for now in [id((8, 1), 8, other), id((8, 1), 7, other), id((8, 1), 7, None), id((0, 5), 8, disk)] {
            assert!(is_replaced(now, false), "{now:?}");
        }
        let of_older_version = id((8, 1), 7, None);
        assert!(!of_older_version.is_replaced(path, id((8, 1), 8, disk), false));
        assert!(of_older_version.is_replaced(path, id((8, 1), 8, None), false), "not on a node");
    }

    #[test]
    fn a_backing_file_is_in_the_file_system_that_was_recorded() {
        let id = |device, inode| FileId { device, inode, node: None };
        let recorded = RecordedBacking { file: id((8, 1), 257), qcow2: false };
        let path = std::path::PathBuf::from("/dev/null");
        let found =
            |device, inode| BackingFile { path: path.clone(), identity: (device, inode), qcow2: false };
        let is_at = |minor, inode, image: [u32; 2]| {
            let image = image.map(|minor| Some(id((8, minor), 256)));
            recorded.is_at(&found(libc::makedev(8, minor), inode), false, image)
        };
        assert!(is_at(1, 257, [1, 1]) && !is_at(1, 258, [1, 1]));
        assert!(!is_at(2, 257, [1, 1]), "an inode of another file system");
        assert!(is_at(2, 257, [1, 2]) && !is_at(1, 257, [1, 2]), "mounted again, with the image");
        assert!(!is_at(2, 257, [3, 2]), "the image was in another file system");
    }

    #[test]
    fn an_identity_of_an_older_version_is_understood() {
        let older = r#"{"device":[8,1],"inode":7}"#;
        let file: FileId = serde_json::from_str(older).unwrap();
        assert_eq!(serde_json::to_string(&file).unwrap(), older);
    }
}

//! Identifies files, regardless of their names.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

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
}

impl From<&fs::Metadata> for FileId {
    fn from(metadata: &fs::Metadata) -> FileId {
        let device = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
        FileId { device, inode: metadata.ino() }
    }
}

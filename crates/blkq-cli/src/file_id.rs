//! The identity of a file, whatever its name is.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// A file, whatever it is called.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileId {
    /// Major and minor number of its file system's device.
    pub device: (u32, u32),
    /// Its inode.
    pub inode: u64,
}

impl FileId {
    /// The identity of the file at `path`, if there is one.
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

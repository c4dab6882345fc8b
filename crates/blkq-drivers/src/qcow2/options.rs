//! Options of a qcow2 device.

use std::path::PathBuf;
use std::sync::Arc;

use crate::image_file::DirectIo;

use super::journal::Journals;

/// The backing files that an image may name. The name is data in the image and may come from an untrusted
/// author, so it must not open arbitrary files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BackingChain {
    /// Only files in the directory of the image that names them, or below. A path that leads out of this
    /// directory, for example through a symbolic link, is refused.
    #[default]
    OwnDirectory,
    /// All files that the process may read.
    Allow,
}

/// A qcow2 image, and how it is served.
#[derive(Clone, Debug, Default)]
pub struct Qcow2Options {
    /// The image: a regular file or a block device.
    pub path: PathBuf,
    /// The logical block size in bytes, one of [`LOGICAL_BLOCK_SIZES`](crate::LOGICAL_BLOCK_SIZES). `None`:
    /// the larger of 512 and the file's own logical block size, or what [`DirectIo::On`] requires.
    pub logical_block_bytes: Option<u32>,
    /// Whether to bypass the page cache.
    pub direct_io: DirectIo,
    /// Open the image read-only, and refuse writes.
    pub read_only: bool,
    /// Allow other readers of the image that set this option too. Requires `read_only`.
    pub shared: bool,
    /// The backing files that the image may name.
    pub backing_chain: BackingChain,
    /// The size in bytes of a device in use, whose clients do not know that the image has grown. A larger
    /// image is served up to this size.
    pub device_bytes: Option<u64>,
    /// The directory of journals, which keep completed writes if this process is killed. `None`: writes that
    /// were not flushed are lost with the process, and an image whose journal may contain writes is opened
    /// read-only at most.
    pub journals: Option<Arc<Journals>>,
}

impl Qcow2Options {
    /// Options for the image at `path`, for reading and writing.
    pub fn new(path: impl Into<PathBuf>) -> Qcow2Options {
        Qcow2Options { path: path.into(), ..Qcow2Options::default() }
    }
}

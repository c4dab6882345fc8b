//! The options of a user.

use std::path::PathBuf;
use std::sync::Arc;

use crate::r#loop::DirectIo;

use super::journal::Journals;

/// The backing files that an image may name: a name in a file is a path that a stranger may have written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BackingChain {
    /// Those in the directory of the image that names them, or below it, by any way that does not lead out
    /// of it.
    #[default]
    OwnDirectory,
    /// All that the user may read.
    Allow,
}

/// An image, and how it is served.
#[derive(Clone, Debug)]
pub struct Qcow2Options {
    /// The image: a regular file or a block device.
    pub path: PathBuf,
    /// The logical block in bytes, one of [`LOGICAL_BLOCK_SIZES`](crate::LOGICAL_BLOCK_SIZES);
    /// `None`: 512, or what [`DirectIo::On`] demands.
    pub logical_block_bytes: Option<u32>,
    /// Around the page cache or through it.
    pub direct_io: DirectIo,
    /// Refuse writes, and open the image for reading only.
    pub read_only: bool,
    /// Let others read the image too that have this option; for readers only.
    pub shared: bool,
    /// The backing files that it may have.
    pub backing_chain: BackingChain,
    /// The size of a device in use, whose clients do not know that the image has grown: a larger image is served up to
    /// there.
    pub device_bytes: Option<u64>,
    /// The directory in which what completed survives this process, if it is killed; `None`: what is not flushed is
    /// lost then, and an image that may lack writes of a killed process is opened for reading only.
    pub journals: Option<Arc<Journals>>,
}

impl Qcow2Options {
    /// The image at `path`, for reading and writing.
    pub fn new(path: impl Into<PathBuf>) -> Qcow2Options {
        Qcow2Options {
            path: path.into(),
            logical_block_bytes: None,
            direct_io: DirectIo::Auto,
            read_only: false,
            shared: false,
            backing_chain: BackingChain::OwnDirectory,
            device_bytes: None,
            journals: None,
        }
    }
}

//! Facts about an image that becomes the backing file of an overlay, or the base of a commit.

use std::path::Path;
use std::sync::Arc;

use blkq::{Error, ErrorKind};

use super::direct_io::ClientTerms;
use super::file::ImageFile;

/// A raw image and how it was opened, for a driver that uses it as the backing file of an overlay.
pub(crate) struct RawImage {
    pub file: Arc<ImageFile>,
    pub size: u64,
    /// Alignment of offsets and lengths in bytes; 1 for buffered I/O.
    pub align: u64,
    pub terms: ClientTerms,
}

/// Rejects a backing file that is longer than the device: its end would become visible after the switch.
pub(crate) fn check_not_longer(path: &Path, bytes: u64, size: u64) -> Result<(), Error> {
    if bytes <= size {
        return Ok(());
    }
    let message =
        format!("the backing file {} has {bytes} bytes, more than the device ({size})", path.display());
    Err(Error::new(ErrorKind::Mismatch, message))
}

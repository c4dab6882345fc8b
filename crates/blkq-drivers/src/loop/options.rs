//! The options of a loop device, and the checks and choices that follow from them for a given image.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkq::text::shell_word;
use blkq::{DriverSetting, Error, enumeration};

use crate::errors::invalid;
use crate::image_file::{DirectIo, ImageFile};
use crate::size::LOGICAL_BLOCK_SIZES;

enumeration! {
    /// How requests are submitted to the file.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    #[non_exhaustive]
    pub enum Dispatch {
        /// Immediately. Only buffered writes take turns, because the kernel admits one writer of a file at a time.
        #[default]
        Concurrent => "concurrent",
        /// One at a time, in order, as the kernel's loop driver did before it had hardware queues.
        Serial => "serial",
    }

    /// The name that [`FromStr`](std::str::FromStr) parses.
    pub const fn name(self) -> &'static str;
}

impl std::str::FromStr for Dispatch {
    type Err = Error;
    fn from_str(text: &str) -> Result<Dispatch, Error> {
        Dispatch::ALL
            .into_iter()
            .find(|mode| mode.name() == text)
            .ok_or_else(|| invalid(format!("dispatch is concurrent or serial, not {text:?}")))
    }
}

/// The part of an image to serve, and how to serve it.
#[derive(Clone, Debug, Default)]
pub struct LoopOptions {
    /// The image: a regular file or a block device.
    pub path: PathBuf,
    /// Offset of the device in the image, in bytes.
    pub offset: u64,
    /// Size of the device, in bytes; `None`: up to the end of the image.
    pub size_limit: Option<u64>,
    /// The logical block size in bytes, one of [`LOGICAL_BLOCK_SIZES`](crate::LOGICAL_BLOCK_SIZES). `None`: 512, or
    /// more if the image is a block device with larger blocks or [`DirectIo::On`] requires it.
    pub logical_block_bytes: Option<u32>,
    /// Serve the bytes at the end of a regular file, or of the window, that do not fill a logical block: the device
    /// has [`QueueLimits::padding_bytes`](blkq::QueueLimits::padding_bytes). Without this option these bytes are
    /// not served.
    pub partial_block: bool,
    /// Whether I/O bypasses the page cache.
    pub direct_io: DirectIo,
    /// How requests are submitted to the file.
    pub dispatch: Dispatch,
    /// Refuse writes, and open the image for reading only.
    pub read_only: bool,
    /// Share the bytes with other processes that set this option too, and do not check whether the kernel uses
    /// them.
    pub shared: bool,
    /// Serve the bytes of the file even if the image begins with the magic of another format.
    pub raw: bool,
}

impl LoopOptions {
    /// The whole image at `path`, for reading and writing, with the default of every option.
    pub fn new(path: impl Into<PathBuf>) -> LoopOptions {
        LoopOptions { path: path.into(), ..LoopOptions::default() }
    }
}

/// A setting of the loop driver that can be changed while the device is in use
/// ([`Disk::set_driver`](blkq::Disk::set_driver)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LoopSetting {
    /// Whether I/O bypasses the page cache ([`LoopOptions::direct_io`]).
    DirectIo(DirectIo),
    /// How requests are submitted to the file ([`LoopOptions::dispatch`]).
    Dispatch(Dispatch),
}

impl DriverSetting for LoopSetting {
    fn name(&self) -> &'static str {
        match self {
            LoopSetting::DirectIo(_) => "direct-io",
            LoopSetting::Dispatch(_) => "dispatch",
        }
    }
}

/// The part of an image that is served.
pub(super) struct Window {
    /// Offset of the device in the file, in bytes.
    pub offset: u64,
    pub logical_block_bytes: u32,
    /// The device may end within a sector.
    pub partial: bool,
}

impl Window {
    /// The size of the device in the image at `path`, which has `file_size` bytes, and the number of bytes after it that
    /// do not fill a sector. Fails with [`blkq::ErrorKind::Invalid`] if the window does not suit the image or the sectors.
    pub fn capacity(&self, path: &Path, file_size: u64, limit: Option<u64>) -> Result<(u64, u64), Error> {
        let (shown, offset, block) = (path.display(), self.offset, u64::from(self.logical_block_bytes));
        let available = file_size.saturating_sub(offset);
        Err(invalid(match limit {
            _ if file_size == 0 => {
                format!("{shown} is empty; give it a size with `truncate -s SIZE {}`", shell_word(path))
            }
            _ if available == 0 => format!(
                "the offset {offset} is beyond the end of {shown} ({file_size} bytes); choose a smaller offset"
            ),
            Some(0) => "the size limit must be more than 0".to_owned(),
            Some(limit) if !self.partial && !limit.is_multiple_of(block) => format!(
                "the size {limit} is not a multiple of the sector size {block}; choose a multiple, such as {}",
                (limit - limit % block).max(block)
            ),
            Some(limit) if limit > available => format!(
                "{limit} bytes from offset {offset} reach beyond the end of {shown} ({file_size} bytes); \
                 choose less, or extend the image"
            ),
            Some(limit) => return Ok((limit, 0)),
            None if self.partial => return Ok((available, 0)),
            None if available < block => {
                let plural = if available == 1 { "" } else { "s" };
                let has_smaller = block > u64::from(LOGICAL_BLOCK_SIZES[0]);
                let smaller = if has_smaller { ", or use a smaller sector size" } else { "" };
                format!(
                    "{shown} has only {available} byte{plural} from offset {offset}, less than a sector of {block}; extend it{smaller}"
                )
            }
            None => return Ok((available - available % block, available % block)),
        }))
    }

    /// Opens the image again, through the page cache, for the last bytes of a device that may end within a sector.
    pub fn open_tail(&self, image: &ImageFile, writable: bool) -> Result<Option<Arc<ImageFile>>, Error> {
        if !self.partial {
            return Ok(None);
        }
        let tail = image.reopen(writable)?;
        // The kernel must cache only the page that the queues reserve for the page cache, and none that direct I/O uses.
        tail.turn_off_read_ahead()?;
        Ok(Some(Arc::new(tail)))
    }
}

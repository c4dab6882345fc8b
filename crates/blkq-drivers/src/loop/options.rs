//! The options of a user, and what follows from them for a given image.

use std::path::{Path, PathBuf};

use blkq::text::shell_word;
use blkq::{DriverSetting, Error, ErrorKind};

use crate::size::{LOGICAL_BLOCK_SIZES, check_logical_block};

use super::backing::{Backing, DirectAlign};

/// Largest sector that clients are offered.
const LOGICAL_BLOCK_MAX_BYTES: u32 = 4096;

/// Whether I/O bypasses the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum DirectIo {
    /// It does, or the open fails.
    On,
    /// It does not.
    Off,
    /// If the image allows it with the sector size that was asked for.
    #[default]
    Auto,
}

impl DirectIo {
    /// The name by which it is chosen.
    pub const fn name(self) -> &'static str {
        match self {
            DirectIo::On => "on",
            DirectIo::Off => "off",
            DirectIo::Auto => "auto",
        }
    }
}

impl std::str::FromStr for DirectIo {
    type Err = Error;
    fn from_str(text: &str) -> Result<DirectIo, Error> {
        [DirectIo::On, DirectIo::Off, DirectIo::Auto]
            .into_iter()
            .find(|mode| mode.name() == text)
            .ok_or_else(|| invalid(format!("direct-io is on, off or auto, not {text:?}")))
    }
}

/// How requests are put to the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Dispatch {
    /// At once; only buffered writes take turns, because a file admits one writer anyway.
    #[default]
    Concurrent,
    /// One at a time, in order: what the loop driver did before it had hardware queues.
    Serial,
}

impl Dispatch {
    /// The name by which it is chosen.
    pub const fn name(self) -> &'static str {
        match self {
            Dispatch::Concurrent => "concurrent",
            Dispatch::Serial => "serial",
        }
    }
}

impl std::str::FromStr for Dispatch {
    type Err = Error;
    fn from_str(text: &str) -> Result<Dispatch, Error> {
        [Dispatch::Concurrent, Dispatch::Serial]
            .into_iter()
            .find(|mode| mode.name() == text)
            .ok_or_else(|| invalid(format!("dispatch is concurrent or serial, not {text:?}")))
    }
}

/// The part of an image that is served, and how.
#[derive(Clone, Debug)]
pub struct LoopOptions {
    /// The image: a regular file or a block device.
    pub path: PathBuf,
    /// Where in the image the device begins, in bytes.
    pub offset: u64,
    /// How much of it is served, in bytes; `None`: up to the end.
    pub size_limit: Option<u64>,
    /// The logical block in bytes, one of [`LOGICAL_BLOCK_SIZES`](crate::LOGICAL_BLOCK_SIZES);
    /// `None`: 512, the block of a block device, or what [`DirectIo::On`] demands.
    pub logical_block_bytes: Option<u32>,
    /// Serve the bytes at the end of a regular file, or of the window, that do not fill a logical
    /// block: the device has [`QueueLimits::padding_bytes`](blkq::QueueLimits::padding_bytes).
    /// Else they are left out.
    pub partial_block: bool,
    /// Around the page cache or through it.
    pub direct_io: DirectIo,
    /// How requests are put to the file.
    pub dispatch: Dispatch,
    /// Refuse writes, and open the image for reading only.
    pub read_only: bool,
    /// Share the bytes with others that have this option too, and the kernel.
    pub shared: bool,
    /// Serve the bytes as they are, whatever format the image has the magic of.
    pub raw: bool,
}

impl LoopOptions {
    /// All of the image at `path`, for reading and writing.
    pub fn new(path: impl Into<PathBuf>) -> LoopOptions {
        LoopOptions {
            path: path.into(),
            offset: 0,
            size_limit: None,
            logical_block_bytes: None,
            partial_block: false,
            direct_io: DirectIo::Auto,
            dispatch: Dispatch::Concurrent,
            read_only: false,
            shared: false,
            raw: false,
        }
    }
}

/// A setting of the loop driver that can be changed while I/O runs
/// ([`Disk::set_driver`](blkq::Disk::set_driver)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LoopSetting {
    /// Whether I/O goes around the page cache ([`LoopOptions::direct_io`]).
    DirectIo(DirectIo),
    /// How requests are put to the file ([`LoopOptions::dispatch`]).
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
pub(super) struct Window<'a> {
    pub path: &'a Path,
    pub offset: u64,
    pub logical_block_bytes: u32,
    /// Whether a part of a sector counts.
    pub partial: bool,
}

impl Window<'_> {
    /// The size of the device in an image of `file_size` bytes, and how many bytes after it
    /// do not fill a sector.
    pub fn capacity(&self, file_size: u64, limit: Option<u64>) -> Result<(u64, u64), Error> {
        let (path, offset, logical_block_bytes) =
            (self.path.display(), self.offset, u64::from(self.logical_block_bytes));
        if file_size == 0 {
            let word = shell_word(self.path);
            return Err(invalid(format!("{path} is empty; give it a size with `truncate -s SIZE {word}`")));
        }
        let there = file_size.saturating_sub(offset);
        if there == 0 {
            return Err(invalid(format!(
                "the offset {offset} is beyond the end of {path} ({file_size} bytes); choose a smaller offset"
            )));
        }
        match limit {
            Some(0) => Err(invalid("the size limit must be more than 0".to_owned())),
            Some(limit) if !self.partial && !limit.is_multiple_of(logical_block_bytes) => {
                Err(invalid(format!(
                    "the size {limit} is not a multiple of the sector size {logical_block_bytes}; choose a multiple, such as {}",
                    (limit - limit % logical_block_bytes).max(logical_block_bytes)
                )))
            }
            Some(limit) if limit > there => Err(invalid(format!(
                "{limit} bytes from offset {offset} reach beyond the end of {path} ({file_size} bytes); \
                 choose less, or extend the image"
            ))),
            Some(limit) => Ok((limit, 0)),
            None if self.partial => Ok((there, 0)),
            None if there < logical_block_bytes => {
                let plural = if there == 1 { "" } else { "s" };
                let smaller = if logical_block_bytes > LOGICAL_BLOCK_SIZES[0] as u64 {
                    ", or use a smaller sector size"
                } else {
                    ""
                };
                Err(invalid(format!(
                    "{path} has only {there} byte{plural} from offset {offset}, less than a sector of {logical_block_bytes}; extend it{smaller}"
                )))
            }
            None => Ok((there - there % logical_block_bytes, there % logical_block_bytes)),
        }
    }
}

/// The logical block to serve.
pub(super) fn choose_logical_block(options: &LoopOptions, backing: &Backing) -> Result<u32, Error> {
    if let Some(logical_block_bytes) = options.logical_block_bytes {
        return check_logical_block(logical_block_bytes);
    }
    let demanded = match &backing.direct {
        Ok(align) if options.direct_io == DirectIo::On => align.offset.max(align.memory),
        _ => 512,
    };
    Ok(demanded.max(backing.logical_block).clamp(512, LOGICAL_BLOCK_MAX_BYTES).next_power_of_two())
}

/// How I/O is done in effect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Mode {
    pub direct: Option<DirectAlign>,
    /// Why it is not direct.
    pub reason: String,
}

/// How I/O is to be done if `requested` is asked for.
pub(crate) fn choose_mode(
    requested: DirectIo,
    possible: &Result<DirectAlign, String>,
    path: &Path,
    logical_block_bytes: u32,
    offset: u64,
) -> Result<Mode, Error> {
    if requested == DirectIo::Off {
        return Ok(Mode { direct: None, reason: "as requested".to_owned() });
    }
    // The obstacle, and its kind with the facts of a cure.
    let (reason, kind) = match possible {
        Err(why) => (why.clone(), ErrorKind::NoDirectIo),
        Ok(align) if align.memory > 4096 || align.offset > LOGICAL_BLOCK_MAX_BYTES => {
            let demanded = align.memory.max(align.offset);
            (format!("it requires an alignment of {demanded} bytes"), ErrorKind::NoDirectIo)
        }
        // Each piece of memory must be a multiple of the alignment, and may be one sector long.
        Ok(align) if logical_block_bytes < align.offset.max(align.memory) => (
            format!(
                "it requires an alignment of {} bytes, and the sector size is {logical_block_bytes}",
                align.offset.max(align.memory)
            ),
            ErrorKind::DirectIoSector {
                needed_bytes: align.offset.max(align.memory).next_power_of_two(),
                sector_bytes: logical_block_bytes,
            },
        ),
        Ok(align) if !offset.is_multiple_of(u64::from(align.offset)) => (
            format!("it requires an alignment of {} bytes, and the offset is {offset}", align.offset),
            ErrorKind::DirectIoOffset { align_bytes: align.offset, offset_bytes: offset },
        ),
        Ok(align) if align.assumed && requested == DirectIo::Auto => {
            let reason = "its file system does not report the alignment that direct I/O requires";
            (reason.to_owned(), ErrorKind::NoDirectIo)
        }
        Ok(align) => return Ok(Mode { direct: Some(*align), reason: String::new() }),
    };
    if requested == DirectIo::Auto {
        return Ok(Mode { direct: None, reason });
    }
    Err(Error::new(kind, format!("no direct I/O on {}: {reason}", path.display())))
}

/// An error of kind [`ErrorKind::Invalid`].
pub(super) fn invalid(message: String) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

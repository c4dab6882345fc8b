//! Chooses between direct and buffered I/O, also for an image to which a device switches while clients use it.

use std::path::Path;

use blkq::{Error, ErrorKind};

use crate::options::DirectIo;

use super::probe::DirectAlign;

pub(super) const LOGICAL_BLOCK_MAX_BYTES: u32 = 4096;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Mode {
    /// The alignment of direct I/O; `None` for buffered I/O.
    pub direct: Option<DirectAlign>,
    /// The reason for buffered I/O; empty with direct I/O.
    pub reason: String,
}

/// The I/O mode that follows from `requested` and the alignment of the image, which is `possible`. Fails if
/// direct I/O is required and not possible; [`ErrorKind::DirectIoSector`] and [`ErrorKind::DirectIoOffset`]
/// carry the values that the caller needs for a hint.
pub(crate) fn choose_mode(
    requested: DirectIo,
    possible: &Result<DirectAlign, String>,
    path: &Path,
    sector_bytes: u32,
    offset: u64,
) -> Result<Mode, Error> {
    if requested == DirectIo::Off {
        return Ok(Mode { direct: None, reason: "as requested".to_owned() });
    }
    let align = match possible {
        Ok(align) => *align,
        Err(why) => return buffered(requested, path, why.clone(), ErrorKind::NoDirectIo),
    };
    let required = align.largest();
    let requires = format!("it requires an alignment of {required} bytes");
    let (reason, kind) = if required > LOGICAL_BLOCK_MAX_BYTES {
        (requires, ErrorKind::NoDirectIo)
    } else if sector_bytes < required {
        // A segment may be as short as one sector, and must be a multiple of the alignment.
        let needed_bytes = required.next_power_of_two();
        let reason = format!("{requires}, and the sector size is {sector_bytes}");
        (reason, ErrorKind::DirectIoSector { needed_bytes, sector_bytes })
    } else if !offset.is_multiple_of(u64::from(align.offset)) {
        let reason =
            format!("it requires an alignment of {} bytes, and the offset is {offset}", align.offset);
        (reason, ErrorKind::DirectIoOffset { align_bytes: align.offset, offset_bytes: offset })
    } else if align.assumed && requested == DirectIo::Auto {
        let reason = "its file system does not report the alignment that direct I/O requires";
        (reason.to_owned(), ErrorKind::NoDirectIo)
    } else {
        return Ok(Mode { direct: Some(align), reason: String::new() });
    };
    buffered(requested, path, reason, kind)
}

/// Buffered I/O because of `reason`. Fails with `kind` if `requested` demands direct I/O.
pub fn buffered(requested: DirectIo, path: &Path, reason: String, kind: ErrorKind) -> Result<Mode, Error> {
    match requested {
        DirectIo::On => Err(Error::new(kind, format!("no direct I/O on {}: {reason}", path.display()))),
        _ => Ok(Mode { direct: None, reason }),
    }
}

/// The properties of I/O that the clients of a device rely on, and that must stay the same with another image.
#[derive(Clone)]
pub(crate) struct ClientTerms {
    pub logical_block_bytes: u32,
    /// Alignment of the memory of the clients' requests, in bytes.
    pub memory_align: u32,
    pub requested: DirectIo,
    /// The reason for buffered I/O; `None` with direct I/O.
    pub buffered: Option<String>,
}

impl ClientTerms {
    /// The I/O mode of an image at `path` to which the device switches. `choose` returns the mode that the
    /// image would have without clients. Fails with [`ErrorKind::NoDirectIo`] if the alignment of the clients
    /// does not suffice and direct I/O was requested.
    pub fn mode(&self, path: &Path, choose: impl FnOnce() -> Result<Mode, Error>) -> Result<Mode, Error> {
        if let Some(why) = &self.buffered {
            return Ok(Mode { direct: None, reason: why.clone() });
        }
        let mode = choose()?;
        let align = mode.direct.map_or(1, DirectAlign::largest);
        if align <= self.memory_align {
            return Ok(mode);
        }
        let reason = format!(
            "it requires an alignment of {align} bytes, but the device's clients align to {} bytes",
            self.memory_align
        );
        buffered(self.requested, path, reason, ErrorKind::NoDirectIo)
    }
}

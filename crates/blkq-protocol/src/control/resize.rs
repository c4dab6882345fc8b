//! The sizes that `blkq resize` accepts.

use std::fmt;

use blkq::units::format_bytes;

use crate::failure::{Failure, Outcome};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NewSize {
    OfImage,
    Bytes(u64),
    LargerBy(u64),
}

impl NewSize {
    /// The size in bytes of a device whose size is `now`; `None` means the size of its image. Fails if the
    /// size exceeds 64 bits.
    pub fn bytes(self, now: u64) -> Outcome<Option<u64>> {
        match self {
            NewSize::OfImage => Ok(None),
            NewSize::Bytes(bytes) => Ok(Some(bytes)),
            NewSize::LargerBy(bytes) => now.checked_add(bytes).map(Some).ok_or_else(|| {
                let (now, bytes) = (format_bytes(now), format_bytes(bytes));
                Failure::new(format!("{now} and {bytes} more exceed the maximum size of a device"))
            }),
        }
    }
}

impl fmt::Display for NewSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NewSize::OfImage => f.write_str("to the size of the image"),
            NewSize::Bytes(bytes) => write!(f, "to {} ({bytes} bytes)", format_bytes(*bytes)),
            NewSize::LargerBy(bytes) => write!(f, "by {} ({bytes} bytes)", format_bytes(*bytes)),
        }
    }
}

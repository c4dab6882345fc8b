use std::fmt;
use std::ops::{Add, Sub};

/// Base-2 logarithm of the sector size (the kernel's `SECTOR_SHIFT`).
pub const SECTOR_SHIFT: u32 = 9;
/// The number of bytes per sector. Independent of the logical block size of a device.
pub const SECTOR_BYTES: u64 = 1 << SECTOR_SHIFT;

/// A position on a device, or a distance between two positions, in units of 512 bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct Sector(pub u64);

impl Sector {
    /// The sector that begins at byte `offset`, or `None` if `offset` is not a multiple of 512.
    pub const fn from_bytes(offset: u64) -> Option<Sector> {
        if offset.is_multiple_of(SECTOR_BYTES) { Some(Sector(offset >> SECTOR_SHIFT)) } else { None }
    }

    /// The byte offset at which this sector begins. Saturates at `u64::MAX`.
    pub const fn bytes(self) -> u64 {
        self.0.saturating_mul(SECTOR_BYTES)
    }
}

impl Add<u64> for Sector {
    type Output = Sector;
    fn add(self, sectors: u64) -> Sector {
        Sector(self.0 + sectors)
    }
}

impl Sub for Sector {
    type Output = u64;
    fn sub(self, earlier: Sector) -> u64 {
        self.0 - earlier.0
    }
}

impl fmt::Debug for Sector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}", self.0)
    }
}

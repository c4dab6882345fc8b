use blkq::Error;

use crate::errors::invalid;

/// The logical block sizes that a device may have, in bytes. The kernel's loop driver allows the same ones on machines
/// with pages of 4096 bytes.
pub const LOGICAL_BLOCK_SIZES: [u32; 4] = [512, 1024, 2048, 4096];

pub(crate) fn check_logical_block(bytes: u32) -> Result<u32, Error> {
    if LOGICAL_BLOCK_SIZES.contains(&bytes) {
        return Ok(bytes);
    }
    Err(invalid(format!("the sector size must be 512, 1024, 2048 or 4096, not {bytes}")))
}

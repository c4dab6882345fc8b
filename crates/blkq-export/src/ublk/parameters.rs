//! The parameters of a device, derived from the limits of its disk.

use blkq::{Error, ErrorKind, QueueLimits};

use super::abi::{self, BasicParameters, DiscardParameters, Parameters};
use super::copy::CopyMode;
use crate::mapping::page_bytes;

/// Largest request in bytes, which is the size of the buffer of one tag.
pub const REQUEST_MAX_BYTES: u32 = 512 << 10;
/// Largest discard and write zeroes in bytes. The kernel counts both in 32 bits of bytes. A smaller maximum
/// than that keeps one request from delaying others for long.
const DISCARD_MAX_BYTES: u64 = 1 << 30;
/// Largest logical block: the smallest page of a kernel.
const BLOCK_MAX_BYTES: u32 = 4096;

fn shift(bytes: u32) -> u8 {
    bytes.ilog2() as u8
}

fn sectors(bytes: u64, block: u32) -> u32 {
    // The cast is lossless: the result is at most DISCARD_MAX_BYTES >> 9.
    ((bytes.min(DISCARD_MAX_BYTES) & !(u64::from(block) - 1)) >> 9) as u32
}

/// The parameters for a disk with `limits`. Fails with [`ErrorKind::Invalid`] if its block exceeds 4 KiB.
pub fn parameters(limits: &QueueLimits, copy: CopyMode) -> Result<Parameters, Error> {
    let block = limits.logical_block_bytes;
    if block > BLOCK_MAX_BYTES {
        let message = format!(
            "ublk supports logical blocks of at most {BLOCK_MAX_BYTES} bytes, and those of the image have {block}"
        );
        return Err(Error::new(ErrorKind::Invalid, message));
    }
    let mut attrs = 0;
    let mut attribute = |has, bit| attrs |= if has { bit } else { 0 };
    attribute(limits.read_only, abi::ATTR_READ_ONLY);
    attribute(limits.rotational, abi::ATTR_ROTATIONAL);
    attribute(limits.write_cache, abi::ATTR_VOLATILE_CACHE);
    attribute(limits.write_cache && limits.fua, abi::ATTR_FUA);
    // The kernel's minimum for the largest request is a page (`PAGE_SECTORS`).
    let request_bytes = limits.max_request_bytes.clamp(page_bytes() as u32, REQUEST_MAX_BYTES) & !(block - 1);
    // Not every kernel splits at boundaries that are no powers of two. The disk splits such requests itself.
    let chunk_bytes = if limits.chunk_bytes.is_power_of_two() { limits.chunk_bytes } else { 0 };
    // A driver that supports one kind of write zeroes is enough, because the disk emulates the other kind.
    let zeroes_bytes = limits.max_write_zeroes_bytes.max(limits.max_write_zeroes_no_unmap_bytes);
    // With copy mode none, the pages go to the backing file as they are. Direct I/O never demands more
    // alignment than the logical block (see `QueueLimits::validate`), also when it is switched on later.
    let align = if copy == CopyMode::None { abi::PARAM_ALIGN } else { 0 };
    Ok(Parameters {
        len: size_of::<Parameters>() as u32,
        types: abi::PARAM_BASIC | abi::PARAM_DISCARD | align,
        alignment: block - 1,
        basic: BasicParameters {
            attrs,
            logical_bs_shift: shift(block),
            physical_bs_shift: shift(limits.physical_block_bytes),
            io_opt_shift: shift(limits.io_opt_bytes.max(limits.physical_block_bytes)),
            io_min_shift: shift(limits.physical_block_bytes),
            max_sectors: request_bytes >> 9,
            chunk_sectors: chunk_bytes >> 9,
            dev_sectors: limits.whole_bytes() >> 9,
            virt_boundary_mask: 0,
        },
        discard: DiscardParameters {
            discard_granularity: limits.discard_granularity.max(block),
            max_discard_sectors: sectors(limits.max_discard_bytes, block),
            max_write_zeroes_sectors: sectors(zeroes_bytes, block),
            max_discard_segments: 1,
            ..DiscardParameters::default()
        },
        ..Parameters::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> QueueLimits {
        QueueLimits {
            capacity_bytes: 10 << 20,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            write_cache: true,
            fua: true,
            max_discard_bytes: u64::MAX,
            discard_granularity: 4096,
            max_write_zeroes_no_unmap_bytes: 1 << 20,
            ..QueueLimits::default()
        }
    }

    #[test]
    fn every_limit_has_its_parameter() {
        let got = parameters(&limits(), CopyMode::Kernel).unwrap();
        assert_eq!((got.len, got.types), (120, 3));
        let basic = BasicParameters {
            attrs: 4 | 8,
            logical_bs_shift: 9,
            physical_bs_shift: 12,
            io_opt_shift: 12,
            io_min_shift: 12,
            max_sectors: 1024,
            chunk_sectors: 0,
            dev_sectors: 20480,
            virt_boundary_mask: 0,
        };
        assert_eq!(got.basic, basic);
        let discard = DiscardParameters {
            discard_alignment: 0,
            discard_granularity: 4096,
            max_discard_sectors: 1 << 21,
            max_write_zeroes_sectors: 2048,
            max_discard_segments: 1,
            reserved0: 0,
        };
        assert_eq!(got.discard, discard);
    }

    #[test]
    fn pages_that_go_to_the_file_are_aligned_for_direct_io() {
        for block in [512, 4096] {
            let limits = QueueLimits { logical_block_bytes: block, ..limits() };
            let got = parameters(&limits, CopyMode::None).unwrap();
            assert_eq!((got.types, got.alignment), (1 | 2 | 16, block - 1));
        }
    }

    #[test]
    fn capabilities_that_a_device_lacks_are_not_offered() {
        let bare = QueueLimits { capacity_bytes: 4096, read_only: true, fua: true, ..QueueLimits::default() };
        let got = parameters(&bare, CopyMode::User).unwrap();
        // FUA has no meaning without a write cache.
        assert_eq!(got.basic.attrs, abi::ATTR_READ_ONLY);
        assert_eq!((got.discard.max_discard_sectors, got.discard.max_write_zeroes_sectors), (0, 0));
        assert_eq!(got.discard.discard_granularity, 512, "the kernel rejects 0");
    }

    #[test]
    fn requests_are_whole_blocks_that_the_kernel_accepts() {
        for (request, block, max_sectors) in
            [(512, 512, 8), (100_000, 4096, 192), (u32::MAX, 512, 1024), (5000, 512, 9)]
        {
            let limits = QueueLimits {
                max_request_bytes: request,
                logical_block_bytes: block,
                physical_block_bytes: block,
                ..limits()
            };
            assert_eq!(
                parameters(&limits, CopyMode::Kernel).unwrap().basic.max_sectors,
                max_sectors,
                "{request}"
            );
        }
        let chunks =
            |bytes| parameters(&QueueLimits { chunk_bytes: bytes, ..limits() }, CopyMode::User).unwrap();
        assert_eq!(chunks(65536).basic.chunk_sectors, 128);
        assert_eq!(chunks(3 << 12).basic.chunk_sectors, 0);
    }

    #[test]
    fn blocks_larger_than_a_page_are_rejected() {
        let limits = QueueLimits { logical_block_bytes: 8192, physical_block_bytes: 8192, ..limits() };
        let error = parameters(&limits, CopyMode::Kernel).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("8192"), "{error}");
    }
}

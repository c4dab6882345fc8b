//! Splitting (`bio_split_rw` in block/blk-merge.c): how much of a bio one request may carry.

use crate::bio::Operation;
use crate::buffer::Segment;
use crate::error::Status;
use crate::limits::QueueLimits;

/// How many bytes of `length` from byte `offset` the first request may carry. If that is not all, the request
/// ends where the next one starts at a physical block, or for a discard at its granularity, or at least at a
/// logical block. `segments` is the memory of the bio, from byte `skip` on; empty if it has none.
///
/// 0 if not even one logical block fits: the driver does not support the operation, or the memory of the
/// block has more segments than a request may have.
pub(crate) fn split_point(
    limits: &QueueLimits,
    operation: Operation,
    no_unmap: bool,
    offset: u64,
    length: u64,
    segments: &[Segment],
    skip: u64,
) -> u64 {
    let mut bytes = length.min(limits.max_bytes_at(operation, no_unmap, offset));
    if !segments.is_empty() {
        bytes = bytes_of_segments(limits, segments, skip, bytes);
    }
    if bytes == length || bytes == 0 {
        return bytes;
    }
    let unit = match operation {
        Operation::Discard => limits.discard_granularity,
        _ => limits.physical_block_bytes,
    };
    let aligned = end_aligned(offset, bytes, unit);
    if aligned > 0 { aligned } else { end_aligned(offset, bytes, limits.logical_block_bytes) }
}

/// The length, at most `bytes`, with which a request at `offset` ends at a multiple of `unit`. 0 if none.
fn end_aligned(offset: u64, bytes: u64, unit: u32) -> u64 {
    bytes.saturating_sub((offset + bytes) % u64::from(unit))
}

/// How many of `bytes` fit into the largest number of segments that a request may have. Drivers get segments
/// unchanged, so a segment that is too long ends the request inside of it.
fn bytes_of_segments(limits: &QueueLimits, segments: &[Segment], mut skip: u64, bytes: u64) -> u64 {
    let longest = u64::from(limits.max_segment_bytes);
    let (mut sum, mut count) = (0, 0);
    for segment in segments {
        let len = u64::from(segment.len);
        if skip >= len {
            skip -= len;
            continue;
        }
        if sum == bytes || count == limits.max_segments {
            break;
        }
        let len = (len - skip).min(bytes - sum);
        skip = 0;
        sum += len.min(longest);
        count += 1;
        if len > longest {
            break;
        }
    }
    sum
}

/// Checks that memory is aligned as the device requires and has `length` bytes, else [`Status::Invalid`].
pub(crate) fn check_memory(limits: &QueueLimits, segments: &[Segment], length: u64) -> Result<(), Status> {
    let mask = limits.memory_align as usize - 1;
    let (mut bits, mut sum) = (0, 0);
    for segment in segments {
        bits |= segment.ptr.addr() | segment.len as usize;
        sum += u64::from(segment.len);
    }
    if bits & mask != 0 || sum < length { Err(Status::Invalid) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::limits::tests::limits;
    use crate::slab::slice_segments;

    fn segment(len: u32) -> Segment {
        Segment::new(std::ptr::without_provenance_mut(4096), len)
    }

    /// A bio inside the device: limits, operation, no-unmap, offset, length, and randomly cut memory.
    fn bio() -> impl Strategy<Value = (QueueLimits, Operation, bool, u64, u64, Vec<Segment>)> {
        let cuts = proptest::collection::vec(1u32..40_000, 1..60);
        (limits(), 0usize..4, any::<bool>(), 0u64..5000, 1u64..600, cuts).prop_map(
            |(limits, operation, no_unmap, at, blocks, cuts)| {
                let block = u64::from(limits.logical_block_bytes);
                let (offset, length) = (at * block, blocks * block);
                let operation = Operation::ALL[operation];
                let (mut segments, mut left) = (Vec::new(), length);
                if operation.has_data() {
                    for cut in cuts {
                        let len = u64::from(cut).min(left);
                        segments.extend((len > 0).then(|| segment(len as u32)));
                        left -= len;
                    }
                    // The last segment may be longer than the bio.
                    segments.push(segment(left as u32 + 512));
                }
                (limits, operation, no_unmap, offset, length, segments)
            },
        )
    }

    proptest! {
        // Contract: declared
        #[test]
        fn pieces_are_legal_and_make_up_the_whole(
            (limits, operation, no_unmap, offset, length, segments) in bio(),
        ) {
            let block = u64::from(limits.logical_block_bytes);
            let mut done = 0;
            while done < length {
                let (at, left) = (offset + done, length - done);
                let bytes = split_point(&limits, operation, no_unmap, at, left, &segments, done);
                let mut pieces = Vec::new();
                let shown = if bytes > 0 { bytes } else { block };
                slice_segments(&segments, done as u32, shown as u32, |segment| pieces.push(segment.len));
                let legal = pieces.len() <= usize::from(limits.max_segments)
                    && pieces.iter().all(|&len| len <= limits.max_segment_bytes);
                let max = limits.max_bytes_at(operation, no_unmap, at);
                if bytes == 0 {
                    prop_assert!(max < block || !legal);
                    return Ok(());
                }
                prop_assert!(legal && bytes <= max && bytes <= left && bytes.is_multiple_of(block));
                if operation.has_data() {
                    prop_assert_eq!(pieces.iter().map(|&len| u64::from(len)).sum::<u64>(), bytes);
                }
                if limits.chunk_bytes > 0 {
                    let chunk = u64::from(limits.chunk_bytes);
                    prop_assert_eq!(at / chunk, (at + bytes - 1) / chunk);
                }
                let unit = u64::from(match operation {
                    Operation::Discard => limits.discard_granularity,
                    _ => limits.physical_block_bytes,
                });
                if bytes < left && !(at + bytes).is_multiple_of(unit) {
                    prop_assert!(at / unit == (at + bytes) / unit, "no boundary of {unit} was passed by");
                }
                done += bytes;
            }
            prop_assert_eq!(done, length);
        }

        #[test]
        fn a_piece_is_as_long_as_the_limits_allow(
            (limits, operation, no_unmap, offset, length, _) in bio(),
        ) {
            // One segment, more than long enough, so that only sizes and boundaries matter.
            let limits = QueueLimits { max_segment_bytes: u32::MAX, ..limits };
            let bytes = split_point(&limits, operation, no_unmap, offset, length, &[segment(u32::MAX)], 0);
            let unit = u64::from(limits.physical_block_bytes.max(match operation {
                Operation::Discard => limits.discard_granularity,
                _ => 0,
            }));
            let max = limits.max_bytes_at(operation, no_unmap, offset);
            prop_assert!(bytes == length || bytes + unit > max);
        }
    }

    #[test]
    fn the_next_request_begins_at_a_physical_block() {
        let limits =
            QueueLimits { physical_block_bytes: 4096, max_request_bytes: 65536, ..Default::default() };
        let at = |offset, length| split_point(&limits, Operation::Write, false, offset, length, &[], 0);
        assert_eq!(at(512, 1 << 20), 65536 - 512);
        assert_eq!(at(512, 65536), 65536);
        assert_eq!(at(4096, 1 << 20), 65536);
        let small = QueueLimits { max_request_bytes: 1024, ..limits.clone() };
        assert_eq!(split_point(&small, Operation::Write, false, 512, 4096, &[], 0), 1024);
    }

    #[test]
    fn discards_are_cut_at_their_granularity() {
        let limits = QueueLimits {
            max_discard_bytes: 100_000 & !511,
            discard_granularity: 32768,
            ..Default::default()
        };
        let at = |offset| split_point(&limits, Operation::Discard, false, offset, 1 << 20, &[], 0);
        assert_eq!(at(0), 98304);
        assert_eq!(at(512), 98304 - 512);
        let coarse = QueueLimits { discard_granularity: 1 << 20, ..limits };
        assert_eq!(split_point(&coarse, Operation::Discard, false, 0, 1 << 20, &[], 0), 99840);
    }

    #[test]
    fn memory_must_be_aligned_and_enough() {
        let limits = QueueLimits { memory_align: 512, ..Default::default() };
        let at = |addr, len| Segment { ptr: std::ptr::without_provenance_mut(addr), ..segment(len) };
        assert_eq!(check_memory(&limits, &[at(512, 512), at(4096, 1024)], 1536), Ok(()));
        assert_eq!(check_memory(&limits, &[at(512, 512)], 1024), Err(Status::Invalid));
        assert_eq!(check_memory(&limits, &[at(512, 512), at(4100, 1024)], 512), Err(Status::Invalid));
        assert_eq!(check_memory(&limits, &[at(512, 500), at(4096, 1024)], 512), Err(Status::Invalid));
        let any = QueueLimits { memory_align: 1, ..limits };
        assert_eq!(check_memory(&any, &[at(513, 511), at(1, 1)], 512), Ok(()));
    }
}

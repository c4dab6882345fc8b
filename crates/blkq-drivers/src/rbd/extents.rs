//! Converts the allocated ranges of an image, which the cluster reports, to extents. With the feature `fast-diff` the
//! cluster reports whole objects from a map, and without it ranges within objects, which requires a query of each object.

use std::ffi::{c_int, c_void};
use std::ops::Range;

use blkq::Extent;

use crate::extents::append;

/// Largest range of one query, in bytes. Without `fast-diff`, each object in it is queried.
pub const WINDOW_BYTES: u64 = 1 << 30;

/// The allocated ranges in bytes of the image, in any order.
pub type Allocated = Vec<Range<u64>>;

/// The callback of `rbd_diff_iterate2`, called for each range. `exists` is 0 for a range without data.
///
/// # Safety
/// `argument` must point to an [`Allocated`] that nothing else uses during the call.
pub unsafe extern "C" fn found(offset: u64, bytes: usize, exists: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    let allocated = unsafe { &mut *argument.cast::<Allocated>() };
    if exists != 0 {
        allocated.push(offset..offset.saturating_add(bytes as u64));
    }
    0
}

/// The first `max` extents of `range`, in which the ranges `allocated` are data and all else is a hole.
pub fn describe(range: Range<u64>, mut allocated: Allocated, max: usize) -> Vec<Extent> {
    allocated.sort_unstable_by_key(|part| part.start);
    let mut extents: Vec<Extent> = Vec::new();
    let mut push = |length: u64, hole: bool| {
        append(&mut extents, Extent { length, hole, zero: hole }, usize::MAX);
    };
    let mut at = range.start;
    for part in allocated {
        let (start, end) = (part.start.clamp(at, range.end), part.end.clamp(at, range.end));
        push(start - at, true);
        push(end - start, false);
        at = end;
    }
    push(range.end - at, true);
    extents.truncate(max);
    extents
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn extents_agree_with_a_model_byte_by_byte(
            range in (0u64..64, 1u64..64).prop_map(|(start, length)| start..start + length),
            parts in proptest::collection::vec((0u64..128, 0usize..16, 0..2), 0..12),
            max in 1usize..8,
        ) {
            let mut allocated = Allocated::new();
            let mut bytes = [false; 256];
            for (offset, length, exists) in parts {
                // SAFETY: a list, borrowed for the call.
                unsafe { found(offset, length, exists, (&raw mut allocated).cast()) };
                bytes[offset as usize..][..length].iter_mut().for_each(|byte| *byte |= exists != 0);
            }
            let extents = describe(range.clone(), allocated, max);
            prop_assert!(!extents.is_empty() && extents.len() <= max);
            prop_assert!(extents.windows(2).all(|pair| pair[0].hole != pair[1].hole));
            let described = extents.iter().flat_map(|extent| (0..extent.length).map(|_| extent.hole));
            let mut at = range.start as usize;
            for hole in described {
                prop_assert_eq!(hole, !bytes[at]);
                at += 1;
            }
            prop_assert!(at as u64 == range.end || extents.len() == max);
        }
    }
}

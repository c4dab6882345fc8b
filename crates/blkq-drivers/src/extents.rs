use std::ops::Range;

use blkq::clock::worker_ns;
use blkq::{EXTENTS_QUERY_NS, Extent};

/// When a query of extents that starts now must return.
pub(crate) fn query_until_ns() -> u64 {
    worker_ns() + EXTENTS_QUERY_NS
}

/// Reports the bytes of `range` as data, which is always correct.
pub(crate) fn all_data(range: &Range<u64>) -> Vec<Extent> {
    vec![Extent { length: range.end - range.start, hole: false, zero: false }]
}

/// Appends `part` to `extents`, of which no two neighbours are of the same kind. Returns false, without effect, if
/// that would make more than `max` extents.
pub(crate) fn append(extents: &mut Vec<Extent>, part: Extent, max: usize) -> bool {
    let is_full = extents.len() >= max;
    match extents.last_mut() {
        _ if part.length == 0 => {}
        Some(last) if (last.hole, last.zero) == (part.hole, part.zero) => last.length += part.length,
        _ if is_full => return false,
        _ => extents.push(part),
    }
    true
}

/// The first `max` extents of `range`, in which the ranges `allocated` are data and all else is a hole.
pub(crate) fn describe(range: Range<u64>, mut allocated: Vec<Range<u64>>, max: usize) -> Vec<Extent> {
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

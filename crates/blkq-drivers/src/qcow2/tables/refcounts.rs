//! Refcounts in a slice of a refcount block. Each has 1 to 64 bits.

use std::ops::Range;

use crate::qcow2::format::entry::table_offset;
use crate::qcow2::journal::Record;

use super::cache::{Key, Table};
use super::state::{NotReady, State};

/// Refcount `index` of a slice, with refcounts of `1 << order` bits.
pub fn refcount(slice: &[u8], index: usize, order: u32) -> u64 {
    if order < 3 {
        let bits = 1 << order;
        let shift = index * bits % 8;
        return u64::from(slice[index * bits / 8] >> shift) & ((1 << bits) - 1);
    }
    let bytes = 1 << (order - 3);
    slice[index * bytes..][..bytes].iter().fold(0, |count, byte| count << 8 | u64::from(*byte))
}

pub fn set_refcount(slice: &mut [u8], index: usize, order: u32, count: u64) {
    if order < 3 {
        let bits = 1 << order;
        let shift = index * bits % 8;
        let mask = (((1u16 << bits) - 1) << shift) as u8;
        let byte = &mut slice[index * bits / 8];
        *byte = *byte & !mask | (count << shift) as u8 & mask;
        return;
    }
    let bytes = 1 << (order - 3);
    slice[index * bytes..][..bytes].copy_from_slice(&count.to_be_bytes()[8 - bytes..]);
}

/// `place` is the slot and the index of the first of `count` clusters; all must be in one slice.
pub fn set_refcounts(state: &mut State, place: (usize, usize), first: u64, count: u64, refcount: u64) {
    change(state, place, count, refcount);
    state.writer.note_linked(first, count);
    state.note(Record::Refcounts { first, count, refcount });
}

/// Sets the refcounts of those of `clusters` that are in the slice of the first, and returns their number.
pub fn set_refcounts_in_slice(
    state: &mut State,
    clusters: Range<u64>,
    refcount: u64,
) -> Result<u64, NotReady> {
    let (slot, index) = refcount_place(state, clusters.start)?;
    let count = (clusters.end - clusters.start).min((state.refcounts_per_slice() - index) as u64);
    set_refcounts(state, (slot, index), clusters.start, count, refcount);
    Ok(count)
}

/// As [`set_refcounts`], for clusters that were free: sets the refcounts to 1. A table is about to refer to
/// the clusters; until then they are unlinked.
pub fn allocate_refcounts(state: &mut State, place: (usize, usize), first: u64, count: u64) {
    change(state, place, count, 1);
    state.writer.unlinked.extend(first..first + count);
    state.note(Record::Allocated { first, count });
}

fn change(state: &mut State, (slot, index): (usize, usize), count: u64, refcount: u64) {
    let order = state.top.header.refcount_order;
    let slice = state.cache.change(slot);
    (index..index + count as usize).for_each(|at| set_refcount(slice, at, order, refcount));
}

pub fn refcount_place(state: &mut State, cluster: u64) -> Result<(usize, usize), NotReady> {
    let (slice_bytes, in_slice) = (state.cache.slice_bytes() as u64, state.refcounts_per_slice() as u64);
    let (bits, per_block) = (state.cluster_bits(), state.top.header.refcounts_per_block());
    let (block, index) = (cluster / per_block, cluster % per_block);
    let entry = state.writer.refcount_table.get(block as usize).copied().unwrap_or(0);
    let offset = table_offset(entry, bits)?.ok_or(NotReady::RefcountBlock(block))?;
    state.check_target(offset..offset + (1 << bits))?;
    let key = Key { layer: 0, offset: offset + index / in_slice * slice_bytes };
    let slot = state.cache.find(key).ok_or(NotReady::Slice(key, Table::Refcounts))?;
    Ok((slot, (index % in_slice) as usize))
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn setting_a_refcount_of_any_width_changes_no_other() {
        for order in 0..=6 {
            let most = u64::MAX >> (64 - (1u32 << order));
            let mut slice = [0; 64];
            let count = (64 * 8) >> order;
            for index in 0..count {
                set_refcount(&mut slice, index, order, most);
                assert_eq!(refcount(&slice, index, order), most);
                assert!((0..count).all(|other| (refcount(&slice, other, order) > 0) == (other <= index)));
            }
            set_refcount(&mut slice, 1, order, 0);
            assert_eq!([0, 1, 2].map(|index| refcount(&slice, index, order)), [most, 0, most]);
        }
    }
}

//! Applies the records of a journal to the tables of an image that was opened.

use std::collections::BTreeSet;

use blkq::Status;

use crate::qcow2::io::allocate::until_ready;
use crate::qcow2::io::env::Env;
use crate::qcow2::journal::Record;
use crate::qcow2::journal::leaks::Leaks;
use crate::qcow2::tables::cache::{Key, Table};
use crate::qcow2::tables::refcounts::set_refcounts_in_slice;
use crate::qcow2::tables::state::{NotReady, State};

/// Applies the records, in order. The image has no journal meanwhile, so if this process is killed, the image
/// has a part of the changes, as after a power loss. Returns the offsets of the clusters that the killed
/// process leaked. Fails with [`Status::Io`] for a record that does not fit the image.
pub(in crate::qcow2) async fn replay(env: &Env, records: Vec<Record>) -> Result<BTreeSet<u64>, Status> {
    let mut leaks = Leaks::new(env.state().cluster_bits());
    for record in records {
        leaks.note(record);
        match record {
            Record::Released { .. } => {}
            Record::RefcountTable { index, entry } => {
                env.state().set_refcount_block(index as usize, entry)?;
            }
            Record::L1 { index, entry } => {
                let mut state = env.state();
                // An index beyond the table belongs to a resize that the killed process did not finish.
                if let Some(old) = state.top.l1.get(index as usize).copied() {
                    leaks.note_l1(index, old, entry);
                    state.set_l1(index as usize, entry)?;
                }
            }
            Record::Refcounts { first, count, .. } | Record::Allocated { first, count } => {
                let refcount = if let Record::Refcounts { refcount, .. } = record { refcount } else { 1 };
                let mut left = first..first + count;
                while !left.is_empty() {
                    let set = |state: &mut State| set_refcounts_in_slice(state, left.clone(), refcount);
                    left.start += apply(env, set).await?;
                }
            }
            Record::L2 { offset, entry, count } => {
                for number in 0..count {
                    let set = |state: &mut State| {
                        let entry = entry.wrapping_add(number << state.cluster_bits());
                        let old = set_entry(state, offset + number * 8, entry)?;
                        leaks.note_entry(offset + number * 8, old, entry);
                        Ok(())
                    };
                    apply(env, set).await?;
                }
            }
        }
    }
    Ok(leaks.find())
}

fn set_entry(state: &mut State, offset: u64, entry: u64) -> Result<u64, NotReady> {
    let slice_bytes = state.cache.slice_bytes() as u64;
    state.check_target(offset..offset + 8)?;
    let key = Key { layer: 0, offset: offset - offset % slice_bytes };
    match state.cache.find(key) {
        Some(slot) => {
            let index = (offset % slice_bytes / 8) as usize;
            let old = state.cache.entry(slot, index);
            state.set_entries(slot, index, entry, 1);
            Ok(old)
        }
        None => Err(NotReady::Slice(key, Table::L2)),
    }
}

async fn apply<T>(env: &Env, mut change: impl FnMut(&mut State) -> Result<T, NotReady>) -> Result<T, Status> {
    // A record for a new refcount block precedes those for refcounts in it. A missing block means a damaged
    // journal.
    let damaged = |reason| match reason {
        NotReady::RefcountBlock(_) | NotReady::RefcountTable(_) => NotReady::Failed(Status::Io),
        reason => reason,
    };
    until_ready(env, |state| change(state).map_err(damaged)).await
}

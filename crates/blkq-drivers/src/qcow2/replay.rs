//! The changes of a journal, made anew in the tables of an image that was opened.

use std::collections::BTreeSet;

use blkq::{IoResult, Status};

use super::allocate::provide;
use super::cache::{Key, Table};
use super::env::Env;
use super::journal::Record;
use super::leaks::Leaks;
use super::refcounts::{refcount_place, set_refcounts};
use super::state::{Lack, State};

/// Makes the changes, in order. The image has no journal meanwhile: it is as after a power loss, with a part of them,
/// if that is the end of this process. Returns the clusters that it leaked, by their offset in the file.
///
/// # Errors
/// That of the file; [`Status::Io`] for changes that the image cannot have.
pub(super) async fn replay(env: &Env, records: Vec<Record>) -> Result<BTreeSet<u64>, Status> {
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
                // Else it is of a part that the image was to get, and did not.
                if let Some(old) = state.top()?.l1.get(index as usize).copied() {
                    leaks.note_l1(index, old, entry);
                    state.set_l1(index as usize, entry)?;
                }
            }
            Record::Refcounts { first, count, .. } | Record::Allocated { first, count } => {
                let refcount = if let Record::Refcounts { refcount, .. } = record { refcount } else { 1 };
                let mut next = first;
                while next < first + count {
                    let set = |state: &mut State| {
                        let (slot, index) = refcount_place(state, next)?;
                        let here = (first + count - next).min((state.refcounts_per_slice() - index) as u64);
                        set_refcounts(state, (slot, index), next, here, refcount);
                        next += here;
                        Ok(())
                    };
                    until_provided(env, set).await?;
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
                    until_provided(env, set).await?;
                }
            }
        }
    }
    Ok(leaks.find())
}

/// Sets an L2 entry; returns the old one.
fn set_entry(state: &mut State, offset: u64, entry: u64) -> Result<u64, Lack> {
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
        None => Err(Lack::Slice(key, Table::L2)),
    }
}

async fn until_provided(env: &Env, mut change: impl FnMut(&mut State) -> Result<(), Lack>) -> IoResult {
    loop {
        let done = change(&mut env.state());
        match done {
            Ok(()) => return Ok(()),
            // The journal has a block before the refcounts in it.
            Err(Lack::Block(_) | Lack::Room(_)) => return Err(Status::Io),
            Err(lack) => provide(env, lack).await?,
        }
    }
}

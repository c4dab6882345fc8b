//! The changes of a journal, made anew in the tables of an image that was opened.

use crate::error::{IoResult, Status};

use super::allocate::provide;
use super::cache::{Key, Table};
use super::env::Env;
use super::journal::Record;
use super::refcounts::{refcount_place, set_refcounts};
use super::state::{Lack, State};

/// Makes the changes, in order. The image has no journal meanwhile: it is as after a power loss, with a part of them,
/// if that is the end of this process.
///
/// # Errors
/// That of the file; [`Status::Io`] for changes that the image cannot have.
pub(super) async fn replay(env: &Env, records: Vec<Record>) -> IoResult {
    for record in records {
        match record {
            Record::RefcountTable { index, entry } => {
                env.state().set_refcount_block(index as usize, entry)?;
            }
            Record::L1 { index, entry } => {
                let mut state = env.state();
                // Else it is of a part that the image was to get, and did not.
                if state.top()?.l1.len() as u64 > index {
                    state.set_l1(index as usize, entry)?;
                }
            }
            Record::Refcounts { first, count, refcount } => {
                for cluster in first..first.saturating_add(count) {
                    let set = |state: &mut State| {
                        let place = refcount_place(state, cluster)?;
                        set_refcounts(state, place, cluster, 1, refcount);
                        Ok(())
                    };
                    until_provided(env, set).await?;
                }
            }
            Record::L2 { offset, entry, count } => {
                for number in 0..count {
                    let set = |state: &mut State| {
                        let entry =
                            if number == 0 { entry } else { entry + (number << state.cluster_bits()) };
                        set_entry(state, offset + number * 8, entry)
                    };
                    until_provided(env, set).await?;
                }
            }
        }
    }
    Ok(())
}

fn set_entry(state: &mut State, offset: u64, entry: u64) -> Result<(), Lack> {
    let slice_bytes = state.cache.slice_bytes() as u64;
    state.check_target(offset..offset + 8)?;
    let key = Key { layer: 0, offset: offset - offset % slice_bytes };
    match state.cache.find(key) {
        Some(slot) => {
            state.set_entries(slot, (offset % slice_bytes / 8) as usize, entry, 1);
            Ok(())
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

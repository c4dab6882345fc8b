//! Reserves space in the file before it is written. A direct write that extends the file excludes all other
//! writes to it, and a write to a hole waits until the file system has found space.

use blkq::{IoResult, Status};

use crate::qcow2::tables::state::Tables;

use super::env::Env;
use super::operations::Op;

/// The file grows by `1 / PART` of its length at a time, within these bounds in bytes.
const PART: u64 = 8;
const LEAST_BYTES: u64 = 4 << 20;
const MOST_BYTES: u64 = 64 << 20;

/// Extends the file for a write up to byte `end`, and some more. If this fails, for example on a full file
/// system or one without fallocate(2), the write continues without it. In some images a cluster may lie far
/// beyond the end of the file: what is between stays a hole.
pub async fn reserve(env: &Env, end: u64) {
    let (from, to) = loop {
        {
            let mut state = env.state();
            let bits = state.cluster_bits();
            let writer = &mut state.writer;
            writer.note_written(end, bits);
            let Some(reached) = writer.extended_to.filter(|reached| *reached < end) else { return };
            if !std::mem::replace(&mut writer.extending, true) {
                let from = reached.max(end.saturating_sub(MOST_BYTES));
                break (from, end + (from / PART).clamp(LEAST_BYTES, MOST_BYTES));
            }
        }
        env.io.wait().await;
    };
    let is_done = env.io.submit(Op::extend(from, to - from)).await.is_ok();
    {
        let mut state = env.state();
        state.writer.extending = false;
        state.writer.extended_to = is_done.then_some(to);
        if is_done {
            state.note_size(to);
        }
    }
    env.io.changed();
}

/// Size of the blocks in which file systems allocate space.
const BLOCK_BYTES: u64 = 4096;

/// Allocates the block of the file that contains entry `index` of the L1 table. qemu-img leaves the table a
/// hole, and on a full file system a flush could then not write the entry, although the writes before it
/// completed. Succeeds if the file system cannot reserve space.
pub async fn reserve_l1(env: &Env, index: usize) -> IoResult {
    let block = {
        let state = env.state();
        let Tables { header, l1 } = &state.top;
        let offset_of = |index: usize| header.l1_offset + index as u64 * 8;
        let begin = offset_of(index) / BLOCK_BYTES * BLOCK_BYTES;
        let range = begin.max(offset_of(0))..(begin + BLOCK_BYTES).min(offset_of(l1.len()));
        let entry_at = |offset: u64| ((offset - offset_of(0)) / 8) as usize;
        // A block with an entry other than zero was written, and so has space.
        if l1[entry_at(range.start)..entry_at(range.end)].iter().any(|entry| *entry != 0) {
            return Ok(());
        }
        range
    };
    match env.io.submit(Op::extend(block.start, block.end - block.start)).await {
        Err(Status::NoSpace) => Err(Status::NoSpace),
        _ => Ok(()),
    }
}

/// Frees the space that was reserved beyond the last cluster that was ever allocated.
pub async fn free_reserved(env: &Env) -> IoResult {
    let bits = env.state().cluster_bits();
    let from = env.state().writer.fresh_from.checked_shl(bits).unwrap_or(u64::MAX);
    let to = env.state().writer.extended_to.unwrap_or(0);
    if from < to && !env.state().writer.failed {
        env.io.submit(Op::punch(from, to - from)).await?;
    }
    Ok(())
}

//! Space of the file that is reserved before it is written: for clusters, as a direct write that makes a file longer
//! is alone on it, and one to a hole waits for the file system to find space.

use blkq::{IoResult, Status};

use super::env::Env;
use super::io::Op;

/// The part of the file's length that is reserved at a time, and its bounds in bytes.
const PART: u64 = 8;
const LEAST_BYTES: u64 = 4 << 20;
const MOST_BYTES: u64 = 64 << 20;

/// Has the file be as long as a write up to byte `end` needs, or longer. Where that fails, as on file systems that
/// cannot do it or are full, writes go on as they would without. A cluster may be anywhere behind the file's end, if
/// its image says so: what lies between stays a hole.
pub(super) async fn reserve(env: &Env, end: u64) {
    loop {
        let range = {
            let mut state = env.state();
            let bits = state.cluster_bits();
            let writer = &mut state.writer;
            writer.note_written(end, bits);
            let Some(reached) = writer.extended_to.filter(|reached| *reached < end) else { return };
            let from = reached.max(end.saturating_sub(MOST_BYTES));
            let to = end + (from / PART).clamp(LEAST_BYTES, MOST_BYTES);
            (!std::mem::replace(&mut writer.extending, true)).then_some(from..to)
        };
        let Some(range) = range else {
            env.io.wait().await;
            continue;
        };
        let done = env.io.run(Op::extend(range.start, range.end - range.start)).await;
        {
            let mut state = env.state();
            state.writer.extending = false;
            state.writer.extended_to = done.is_ok().then_some(range.end);
            if done.is_ok() {
                state.layers[0].file_bytes = state.layers[0].file_bytes.max(range.end);
            }
        }
        env.io.changed();
        return;
    }
}

/// The part of a file that its file system finds space for at once.
const BLOCK_BYTES: u64 = 4096;

/// Has the file have space for entry `index` of the L1 table, which qemu-img leaves a hole: without it a flush would
/// fail on a full file system, though the writes before it completed.
///
/// # Errors
/// [`Status::NoSpace`]. A file system that cannot reserve space is none.
pub(super) async fn reserve_l1(env: &Env, index: usize) -> IoResult {
    let block = {
        let state = env.state();
        let tables = state.top()?;
        let offset_of = |index: usize| tables.header.l1_offset + index as u64 * 8;
        let begin = offset_of(index) / BLOCK_BYTES * BLOCK_BYTES;
        let range = begin.max(offset_of(0))..(begin + BLOCK_BYTES).min(offset_of(tables.l1.len()));
        let entry_at = |offset: u64| ((offset - offset_of(0)) / 8) as usize;
        // An entry that names a table had space.
        if tables.l1[entry_at(range.start)..entry_at(range.end)].iter().any(|entry| *entry != 0) {
            return Ok(());
        }
        range
    };
    match env.io.run(Op::extend(block.start, block.end - block.start)).await {
        Err(Status::NoSpace) => Err(Status::NoSpace),
        _ => Ok(()),
    }
}

/// Frees what was reserved behind the last cluster that was ever allocated.
///
/// # Errors
/// That of the file.
pub(super) async fn free_reserved(env: &Env) -> IoResult {
    let (from, to) = {
        let state = env.state();
        let used = state.writer.fresh_from.checked_shl(state.cluster_bits()).unwrap_or(u64::MAX);
        (used, state.writer.extended_to.unwrap_or(0))
    };
    if from < to && !env.state().writer.failed {
        env.io.run(Op::punch(from, to - from)).await?;
    }
    Ok(())
}

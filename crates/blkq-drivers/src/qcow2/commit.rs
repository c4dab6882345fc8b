//! Tables are changed in memory, and written here, in an order that a power loss leaves an image which
//! has all that was flushed, and at worst clusters that nothing refers to:
//!
//! 1. refcounts, then a sync: with it the data of new clusters, and new L2 tables, are durable;
//! 2. entries of the refcount table for new blocks, then a sync;
//! 3. L2 and L1 entries, then a sync if somebody asked for it or clusters were released;
//! 4. the refcounts of released clusters are counted down in memory: only now can they have another use.
//!
//! In memory an L2 entry changes only after the data that it refers to was written.

use std::collections::BTreeSet;

use blkq::{IoBuffer, IoResult, Status};

use super::cache::{Key, Table};
use super::env::Env;
use super::io::Op;
use super::journal::Journal;
use super::refcounts::{refcount, refcount_place, set_refcounts};
use super::state::{Lack, State};

/// Writes in flight together.
const WRITES_MAX: usize = 32;

/// Writes what is dirty; `durable`: and makes everything that was written before durable.
///
/// # Errors
/// Those of writes and syncs. Tables that were not written stay dirty. After a failed sync each later commit
/// fails, too: the kernel may have dropped the data that the sync was to write (fsync(2)).
pub(super) async fn commit(env: &Env, durable: bool) -> IoResult {
    while !begin(&mut env.state())? {
        env.io.wait().await;
    }
    let result = write_all(env, durable).await;
    env.state().writer.committing = false;
    env.io.changed();
    result
}

/// Writes the dirty refcounts, for somebody who changes the refcount table.
///
/// # Errors
/// As [`commit`].
pub(super) async fn commit_refcounts(env: &Env) -> IoResult {
    let dirty = env.state().cache.take_dirty(Table::Refcounts);
    write_slices(env, dirty).await?;
    sync(env).await
}

/// Makes the file durable.
///
/// # Errors
/// As [`commit`].
pub(super) async fn sync(env: &Env) -> IoResult {
    let synced = env.io.run(Op::sync()).await;
    if synced.is_err() {
        env.state().writer.failed = true;
    }
    synced.map(drop)
}

/// Whether it is this task's turn to commit, which it has then.
///
/// # Errors
/// [`Status::Io`] once a sync has failed.
pub(super) fn begin(state: &mut State) -> Result<bool, Status> {
    if state.writer.failed {
        return Err(Status::Io);
    }
    Ok(!std::mem::replace(&mut state.writer.committing, true))
}

async fn write_all(env: &Env, durable: bool) -> IoResult {
    // The epoch that begins must have no I/O left from when it was the present one.
    while !env.state().writer.released.is_empty() && !env.shared.epochs.may_turn() {
        env.io.wait().await;
    }
    let (refcounts, l2, l1, table, released, epoch, l1_sectors, table_sectors, turned);
    {
        let mut state = env.state();
        state.commits += 1;
        turned = state.journal.as_mut().is_none_or(Journal::turn);
        refcounts = state.cache.take_dirty(Table::Refcounts);
        l2 = state.cache.take_dirty(Table::L2);
        let align = state.layers[0].align;
        let (writer, tables) = (&state.writer, state.top()?);
        l1_sectors = sectors_of(&writer.l1_dirty, tables.header.l1_offset, &tables.l1, align);
        let at = tables.header.refcount_table_offset;
        table_sectors = sectors_of(&writer.refcount_table_dirty, at, &writer.refcount_table, align);
        l1 = std::mem::take(&mut state.writer.l1_dirty);
        table = std::mem::take(&mut state.writer.refcount_table_dirty);
        released = env.shared.without_held(std::mem::take(&mut state.writer.released));
        if turned {
            state.note_pending(&released);
        }
        epoch = (!released.is_empty()).then(|| env.shared.epochs.turn());
    }
    let mut rest = Rest { env, l2, l1, table, released };
    write_slices(env, refcounts).await?;
    if !rest.l2.is_empty() || !rest.l1.is_empty() || !rest.table.is_empty() {
        sync(env).await?;
    }
    if !rest.table.is_empty() {
        write_sectors(env, table_sectors).await?;
        sync(env).await?;
        rest.table.clear();
    }
    let l2 = std::mem::take(&mut rest.l2);
    write_slices(env, l2).await?;
    write_sectors(env, l1_sectors).await?;
    rest.l1.clear();
    if durable || !rest.released.is_empty() {
        sync(env).await?;
    }
    let released = std::mem::take(&mut rest.released);
    drop(rest);
    if let Some(journal) = &mut env.state().journal {
        journal.finish();
    }
    if !turned {
        // The journal still has changes of tables that may be among them: no other use until it has not.
        env.state().writer.released.extend(released);
    } else if let Some(epoch) = epoch {
        while !env.shared.epochs.is_idle(epoch) {
            env.io.wait().await;
        }
        free(env, released).await;
    }
    Ok(())
}

/// The tables that are still to be written: on the way out of an error, they are dirty again.
struct Rest<'a> {
    env: &'a Env,
    l2: Vec<(Key, Vec<u8>)>,
    l1: BTreeSet<usize>,
    table: BTreeSet<usize>,
    released: Vec<u64>,
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        let mut state = self.env.state();
        for (key, _) in &self.l2 {
            state.cache.written(*key, false);
        }
        state.writer.l1_dirty.append(&mut self.l1);
        state.writer.refcount_table_dirty.append(&mut self.table);
        state.writer.released.append(&mut self.released);
    }
}

async fn write_slices(env: &Env, slices: Vec<(Key, Vec<u8>)>) -> IoResult {
    let mut result = Ok(());
    for group in slices.chunks(WRITES_MAX) {
        let mut running = Vec::with_capacity(group.len());
        for (key, content) in group {
            let mut buffer = IoBuffer::zeroed(content.len());
            buffer.copy_from_slice(content);
            running.push((*key, env.io.submit(env.write_op(key.offset).with_buffer(buffer))));
        }
        for (key, running) in running {
            let written = running.await;
            env.state().cache.written(key, written.is_ok());
            result = result.and(written.map(drop));
        }
    }
    result
}

/// The sectors of a table in which `entries` are, as they are now: what comes into the table later may refer
/// to what is not durable when they are written.
fn sectors_of(entries: &BTreeSet<usize>, offset: u64, table: &[u64], align: u64) -> Vec<(u64, IoBuffer)> {
    let sector = align.max(512) as usize;
    let numbers: BTreeSet<usize> = entries.iter().map(|entry| entry * 8 / sector).collect();
    let content = |number: usize| {
        let mut buffer = IoBuffer::zeroed(sector);
        let first = number * sector / 8;
        let last = (first + sector / 8).min(table.len());
        for (place, entry) in buffer.chunks_exact_mut(8).zip(&table[first..last]) {
            place.copy_from_slice(&entry.to_be_bytes());
        }
        buffer
    };
    numbers.into_iter().map(|number| (offset + (number * sector) as u64, content(number))).collect()
}

async fn write_sectors(env: &Env, sectors: Vec<(u64, IoBuffer)>) -> IoResult {
    for (offset, buffer) in sectors {
        env.io.run(env.write_op(offset).with_buffer(buffer)).await?;
    }
    Ok(())
}

/// Counts the refcounts of clusters down, and frees the space of those that are not used any more. A
/// cluster whose refcount cannot be read stays allocated, which harms nobody.
async fn free(env: &Env, mut released: Vec<u64>) {
    released.sort_unstable();
    let cluster_bytes = 1u64 << env.state().cluster_bits();
    let mut run = 0..0;
    for host in released {
        match refcount_of(env, host).await {
            // Twice, as an image has it whose tables are wrong: it is freed once.
            Some(1) if run.contains(&host) => {}
            Some(1) if run.end == host => run.end += cluster_bytes,
            Some(1) => {
                free_run(env, run, cluster_bytes).await;
                run = host..host + cluster_bytes;
            }
            Some(_) => count_down(env, host),
            None => {}
        }
    }
    free_run(env, run, cluster_bytes).await;
}

async fn free_run(env: &Env, run: std::ops::Range<u64>, cluster_bytes: u64) {
    if run.is_empty() {
        return;
    }
    // Before they are free, so that it cannot hit another use. A file system may be unable to do it.
    let _ = env.io.run(Op::punch(run.start, run.end - run.start)).await;
    for host in run.step_by(cluster_bytes as usize) {
        // The slice may have left the cache meanwhile.
        if refcount_of(env, host).await.is_some() {
            count_down(env, host);
        }
    }
}

/// The refcount of a cluster, whose slice is in the cache then.
pub(super) async fn refcount_of(env: &Env, host: u64) -> Option<u64> {
    for _ in 0..8 {
        let found = {
            let mut state = env.state();
            let (order, cluster) = (state.top().ok()?.header.refcount_order, host >> state.cluster_bits());
            let place = refcount_place(&mut state, cluster);
            place.map(|(slot, index)| refcount(state.cache.get(slot), index, order))
        };
        match found {
            Ok(count) => return Some(count),
            Err(Lack::Slice(key, table)) => drop(env.load(key, table).await.ok()?),
            Err(_) => return None,
        }
    }
    None
}

/// Counts the refcount of a cluster down, or leaves that to the next commit.
fn count_down(env: &Env, host: u64) {
    let mut state = env.state();
    if !state.journal.as_ref().is_none_or(Journal::has_room) {
        return state.writer.released.push(host);
    }
    let bits = state.cluster_bits();
    let Ok(order) = state.top().map(|tables| tables.header.refcount_order) else { return };
    let Ok((slot, index)) = refcount_place(&mut state, host >> bits) else { return };
    let count = refcount(state.cache.get(slot), index, order);
    if count > 0 {
        set_refcounts(&mut state, (slot, index), host >> bits, 1, count - 1);
    }
    if count == 1 {
        state.writer.next_free = state.writer.next_free.min(host >> bits);
    }
}

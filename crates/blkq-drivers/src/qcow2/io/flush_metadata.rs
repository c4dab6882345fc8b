//! Flushes metadata. Tables are changed in memory first, and written to the file here. The order of the
//! writes ensures that an image after a power loss has everything that was flushed, and at worst clusters to
//! which nothing refers:
//!
//! 1. Sync, if the header has a new tag, without which the next attach would not search for leaked clusters. Write
//!    the refcounts, then sync. This also makes the data of new clusters and new L2 tables durable.
//! 2. Write the entries of the refcount table for new refcount blocks, then sync.
//! 3. Write the L2 and L1 entries. Sync if the caller asks for it or clusters were released.
//! 4. Decrement the refcounts of released clusters in memory. Only now may the clusters be reused.
//!
//! In memory, an L2 entry changes only after the data to which it refers was written.

use std::collections::BTreeSet;

use blkq::{IoBuffer, IoResult, Status};

use crate::qcow2::journal::Journal;
use crate::qcow2::tables::cache::{Key, Table};
use crate::qcow2::tables::state::{NotReady, refcount, refcount_place, set_refcounts};

use super::env::Env;
use super::operations::Op;

const WRITES_MAX: usize = 32;

/// Writes all dirty tables. If `durable`, also makes everything durable that was written before. Tables that
/// were not written stay dirty. After a failed sync every later flush fails too, because the kernel may have
/// dropped the data that the sync should have written (fsync(2)).
pub async fn flush_metadata(env: &Env, durable: bool) -> IoResult {
    exclude_flushes(env, write_all(env, durable)).await
}

/// Runs `task` when no other task is flushing, and lets none flush meanwhile. Fails with [`Status::Io`] after a failed
/// sync.
pub async fn exclude_flushes(env: &Env, task: impl Future<Output = IoResult>) -> IoResult {
    while std::mem::replace(&mut env.state().writer.flushing, true) {
        env.io.wait().await;
    }
    let has_failed = env.state().writer.failed;
    let result = if has_failed { Err(Status::Io) } else { task.await };
    env.state().writer.flushing = false;
    env.io.changed();
    result
}

/// Writes the dirty refcounts, durably, for a task that replaces the refcount table. To be called within
/// [`exclude_flushes`].
pub async fn flush_refcounts(env: &Env) -> IoResult {
    sync_tag(env).await?;
    let dirty = env.state().cache.take_dirty(Table::Refcounts);
    write_slices(env, dirty).await?;
    sync(env).await
}

pub async fn sync(env: &Env) -> IoResult {
    let synced = env.io.submit(Op::sync()).await;
    env.state().writer.failed |= synced.is_err();
    synced.map(drop)
}

/// Makes a new tag in the header durable before the file gets refcounts of clusters that may leak.
async fn sync_tag(env: &Env) -> IoResult {
    let is_new = std::mem::take(&mut env.state().writer.tag_is_new);
    if is_new { sync(env).await } else { Ok(()) }
}

async fn write_all(env: &Env, durable: bool) -> IoResult {
    sync_tag(env).await?;
    // The epoch that this flush begins must be idle: I/O left from its last use would be counted as new.
    while !env.state().writer.released.is_empty() && !env.shared.epochs.may_turn() {
        env.io.wait().await;
    }
    let (mut rest, refcounts, l1_sectors, table_sectors, turned, epoch) = {
        let state = &mut *env.state();
        state.flushes += 1;
        let turned = state.journal.as_mut().is_none_or(Journal::turn);
        let refcounts = state.cache.take_dirty(Table::Refcounts);
        let l2 = state.cache.take_dirty(Table::L2);
        let (writer, tables, align) = (&mut state.writer, &state.top, state.layers[0].align);
        let l1 = std::mem::take(&mut writer.l1_dirty);
        let l1_sectors = sectors_of(&l1, tables.header.l1_offset, &tables.l1, align);
        let table = std::mem::take(&mut writer.refcount_table_dirty);
        let at = tables.header.refcount_table_offset;
        let table_sectors = sectors_of(&table, at, &writer.refcount_table, align);
        let released = writer.take_released();
        if turned {
            state.note_pending(&released);
        }
        let epoch = (!released.is_empty()).then(|| env.shared.epochs.turn());
        (Rest { env, l2, l1, table, released }, refcounts, l1_sectors, table_sectors, turned, epoch)
    };
    write_slices(env, refcounts).await?;
    if !rest.l2.is_empty() || !rest.l1.is_empty() || !rest.table.is_empty() {
        sync(env).await?;
    }
    if !rest.table.is_empty() {
        write_sectors(env, table_sectors).await?;
        sync(env).await?;
        rest.table.clear();
    }
    write_slices(env, std::mem::take(&mut rest.l2)).await?;
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
        // The journal still has records that may be about these clusters. They must not be reused until it is
        // emptied.
        env.state().writer.released.extend(released);
    } else if let Some(epoch) = epoch {
        while !env.shared.epochs.is_idle(epoch) {
            env.io.wait().await;
        }
        free(env, released).await;
    }
    Ok(())
}

/// The tables that are still to be written. If the flush fails, dropping this makes them dirty again.
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
    let mut slices = slices.into_iter();
    while !slices.as_slice().is_empty() {
        // The buffer of a small slice is much larger than the slice. Only those of one group exist.
        let begin = |(key, content): (Key, Vec<u8>)| {
            let mut buffer = IoBuffer::zeroed(content.len());
            buffer.copy_from_slice(&content);
            (key, env.io.submit(env.write_op(key.offset).with_buffer(buffer)))
        };
        let group: Vec<_> = slices.by_ref().take(WRITES_MAX).map(begin).collect();
        for (key, running) in group {
            let written = running.await;
            env.state().cache.written(key, written.is_ok());
            result = result.and(written.map(drop));
        }
    }
    result
}

/// Copies of the sectors of a table that contain `entries`. They are copied now, because an entry that is set
/// later may refer to data that is not durable when the sectors are written.
fn sectors_of(entries: &BTreeSet<usize>, offset: u64, table: &[u64], align: u64) -> Vec<(u64, IoBuffer)> {
    let sector = align.max(512) as usize;
    let numbers: BTreeSet<usize> = entries.iter().map(|entry| entry * 8 / sector).collect();
    let content = |number: usize| {
        let mut buffer = IoBuffer::zeroed(sector);
        put_numbers(&mut buffer, &table[number * sector / 8..]);
        buffer
    };
    numbers.into_iter().map(|number| (offset + (number * sector) as u64, content(number))).collect()
}

/// Fills `buffer` with entries of a table, from the first of `entries` on, as far as both reach.
pub fn put_numbers(buffer: &mut [u8], entries: &[u64]) {
    for (place, entry) in buffer.chunks_exact_mut(8).zip(entries) {
        place.copy_from_slice(&entry.to_be_bytes());
    }
}

async fn write_sectors(env: &Env, sectors: Vec<(u64, IoBuffer)>) -> IoResult {
    for (offset, buffer) in sectors {
        env.io.submit(env.write_op(offset).with_buffer(buffer)).await?;
    }
    Ok(())
}

/// Decrements the refcounts of clusters, and frees the space of those that reach 0. A cluster whose refcount
/// cannot be read stays allocated: it is wasted, but nothing is damaged.
async fn free(env: &Env, mut released: Vec<u64>) {
    released.sort_unstable();
    let cluster_bytes = 1u64 << env.state().cluster_bits();
    let mut run = 0..0;
    for host in released {
        match refcount_of(env, host).await {
            // In a damaged image, two entries may refer to a cluster with a refcount of 1. It is freed once.
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
    // The hole is punched while the clusters are still allocated, so that it cannot destroy new data. Errors
    // are ignored, because not every file system can punch holes.
    let _ = env.io.submit(Op::punch(run.start, run.end - run.start)).await;
    for host in run.step_by(cluster_bytes as usize) {
        // The slice with the refcount may have been evicted since the first lookup.
        if refcount_of(env, host).await.is_some() {
            count_down(env, host);
        }
    }
}

/// The refcount of the cluster at byte `host`; `None` if it cannot be read. Leaves its slice in the cache.
pub async fn refcount_of(env: &Env, host: u64) -> Option<u64> {
    // Repeated, because the slice may be evicted between its load and the lookup.
    for _ in 0..8 {
        let found = {
            let mut state = env.state();
            let (order, cluster) = (state.top.header.refcount_order, host >> state.cluster_bits());
            let place = refcount_place(&mut state, cluster);
            place.map(|(slot, index)| refcount(state.cache.get(slot), index, order))
        };
        match found {
            Ok(count) => return Some(count),
            Err(NotReady::Slice(key, table)) => drop(env.load(key, table).await.ok()?),
            Err(_) => return None,
        }
    }
    None
}

/// Decrements the refcount of a cluster. If the journal has no room for that, leaves it to the next flush.
fn count_down(env: &Env, host: u64) {
    let mut state = env.state();
    if !state.journal.as_ref().is_none_or(Journal::has_room) {
        return state.writer.released.push(host);
    }
    let bits = state.cluster_bits();
    let order = state.top.header.refcount_order;
    let Ok((slot, index)) = refcount_place(&mut state, host >> bits) else { return };
    let count = refcount(state.cache.get(slot), index, order);
    if count > 0 {
        set_refcounts(&mut state, (slot, index), host >> bits, 1, count - 1);
    }
    if count == 1 {
        state.writer.next_free = state.writer.next_free.min(host >> bits);
    }
}

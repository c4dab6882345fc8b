//! Allocates clusters of the file, L2 tables, refcount blocks, and a larger refcount table.

use std::ops::Range;

use blkq::{IoBuffer, IoResult, Status};

use crate::qcow2::format::entry::{COPIED, table_offset};
use crate::qcow2::format::header::{REFCOUNT_TABLE_AT, REFCOUNT_TABLE_MAX_BYTES};
use crate::qcow2::tables::cache::{Key, Table};
use crate::qcow2::tables::refcounts::{
    allocate_refcounts, refcount, refcount_place, set_refcount, set_refcounts, set_refcounts_in_slice,
};
use crate::qcow2::tables::state::{NotReady, State};

use super::env::Env;
use super::flush_metadata::{begin, flush_metadata, flush_refcounts, sync};
use super::reserve::reserve_l1;

/// Slices that a search for a free cluster reads before it lets other tasks run.
const SEARCH_MAX: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Clusters {
    pub host: u64,
    pub count: u64,
    /// The clusters read as zeroes.
    pub fresh: bool,
}

impl Clusters {
    /// The offset of each cluster, which has `cluster` bytes.
    pub fn hosts(self, cluster: u64) -> impl Iterator<Item = u64> {
        (0..self.count).map(move |number| self.host + number * cluster)
    }
}

/// Provides what an operation on the state was lacking, or waits for another task that may do so.
async fn provide(env: &Env, reason: NotReady) -> IoResult {
    match reason {
        NotReady::Slice(key, table) => {
            if !env.load(key, table).await? {
                flush_metadata(env, false).await?;
            }
            Ok(())
        }
        // Boxed, because creating a table allocates clusters, which may come back here.
        NotReady::L2Table(index) => Box::pin(make_l2(env, index)).await,
        NotReady::RefcountBlock(block) => Box::pin(make_refcounts(env, write_block(env, block))).await,
        NotReady::RefcountTable(block) => Box::pin(make_refcounts(env, make_room(env, block))).await,
        // One flush is enough for all tasks that wait for it.
        NotReady::FlushFirst if !env.state().writer.flushing => flush_metadata(env, false).await,
        NotReady::Busy | NotReady::FlushFirst => {
            env.io.wait().await;
            Ok(())
        }
        NotReady::Yield => {
            env.io.pause().await;
            Ok(())
        }
        NotReady::Failed(status) => Err(status),
    }
}

/// Repeats `attempt` until it is done or fails for good, and provides in between what it was lacking.
pub async fn until_ready<T>(
    env: &Env,
    mut attempt: impl FnMut(&mut State) -> Result<T, NotReady>,
) -> Result<T, Status> {
    loop {
        // A statement of its own, which unlocks the state.
        let attempted = attempt(&mut env.state());
        match attempted {
            Ok(done) => return Ok(done),
            Err(reason) => provide(env, reason).await?,
        }
    }
}

/// Allocates `count` contiguous clusters, or fewer if fewer are free in a row. If the process is killed
/// before an L1 or L2 table refers to the clusters, they are freed when the journal is applied. Fails with
/// [`Status::NoSpace`] if the file cannot have more clusters.
pub async fn allocate(env: &Env, count: u64) -> Result<Clusters, Status> {
    until_ready(env, |state| find_free(state, count, allocate_refcounts)).await
}

/// As [`allocate`], for clusters that the L1 and L2 tables do not refer to, such as those of bitmaps: if the
/// process is killed, they stay allocated.
pub async fn allocate_apart(env: &Env, count: u64) -> Result<Clusters, Status> {
    let take: Take = |state, place, first, count| set_refcounts(state, place, first, count, 1);
    until_ready(env, |state| find_free(state, count, take)).await
}

/// Frees clusters that were allocated and to which nothing refers.
pub async fn free_unused(env: &Env, clusters: Clusters) {
    let mut cluster = clusters.host >> env.state().cluster_bits();
    let end = cluster + clusters.count;
    while cluster < end {
        let freed = until_ready(env, |state| {
            let count = set_refcounts_in_slice(state, cluster..end, 0)?;
            state.writer.next_free = state.writer.next_free.min(cluster);
            Ok(count)
        });
        // If this fails, the clusters stay allocated. They are wasted, but nothing is damaged.
        let Ok(count) = freed.await else { return };
        cluster += count;
    }
}

/// Sets refcounts to allocate clusters. The arguments are the slot and index of the first refcount, the
/// number of the first cluster, and the count.
type Take = fn(&mut State, (usize, usize), u64, u64);

fn find_free(state: &mut State, wanted: u64, take: Take) -> Result<Clusters, NotReady> {
    if state.writer.failed {
        return Err(NotReady::Failed(Status::Io));
    }
    let (bits, order) = (state.cluster_bits(), state.top.header.refcount_order);
    let in_slice = state.refcounts_per_slice();
    for _ in 0..SEARCH_MAX {
        let cluster = state.writer.next_free;
        if cluster >= state.writer.clusters_max {
            return Err(NotReady::Failed(Status::NoSpace));
        }
        let (slot, index) = refcount_place(state, cluster)?;
        let slice = state.cache.get(slot);
        let is_free = |at: &usize| refcount(slice, *at, order) == 0;
        let Some(first) = (index..in_slice).find(is_free) else {
            state.writer.next_free = cluster + (in_slice - index) as u64;
            continue;
        };
        let host = cluster + (first - index) as u64;
        let most = wanted.min(state.writer.clusters_max.saturating_sub(host)) as usize;
        let end = in_slice.min(first + most);
        let last = (first..end).find(|at| !is_free(at)).unwrap_or(end);
        if last == first {
            return Err(NotReady::Failed(Status::NoSpace));
        }
        let count = (last - first) as u64;
        state.check_target(host << bits..(host + count) << bits)?;
        take(state, (slot, first), host, count);
        let writer = &mut state.writer;
        writer.next_free = host + count;
        let fresh = host >= writer.fresh_from;
        writer.fresh_from = writer.fresh_from.max(host + count);
        return Ok(Clusters { host: host << bits, count, fresh });
    }
    Err(NotReady::Yield)
}

/// Creates an L2 table that may be changed for entry `index` of the L1 table: an empty one, or a copy of a
/// table that a snapshot shares.
async fn make_l2(env: &Env, index: usize) -> IoResult {
    let is_mine = |state: &mut State| -> Result<bool, Status> {
        let entry = *state.top.l1.get(index).ok_or(Status::Io)?;
        // In a damaged image, an entry may have the COPIED bit and name no table.
        let may_change = entry & COPIED != 0 && table_offset(entry, state.cluster_bits())?.is_some();
        Ok(!may_change && state.writer.making_l2.insert(index))
    };
    if !is_mine(&mut env.state())? {
        if env.state().writer.making_l2.contains(&index) {
            env.io.wait().await;
        }
        return Ok(());
    }
    let made = write_l2(env, index).await;
    env.state().writer.making_l2.remove(&index);
    env.io.changed();
    made
}

async fn write_l2(env: &Env, index: usize) -> IoResult {
    reserve_l1(env, index).await?;
    let clusters = allocate(env, 1).await?;
    let written = copy_l2(env, index, clusters.host).await;
    if written.is_err() {
        free_unused(env, clusters).await;
    }
    written
}

async fn copy_l2(env: &Env, index: usize, host: u64) -> IoResult {
    let (old, bytes) = {
        let mut state = env.state();
        let old = table_offset(state.top.l1[index], state.cluster_bits())?;
        let bytes = state.top.header.cluster_bytes();
        state.cache.forget(0, host..host + bytes);
        (old, bytes)
    };
    let write = env.write_op(host);
    let write = match old {
        None => write.with_zeroes(bytes),
        Some(old) => write.with_buffer(env.read(0, old, bytes).await?),
    };
    env.io.submit(write).await?;
    let mut state = env.state();
    state.set_l1(index, host | COPIED)?;
    state.writer.released.extend(old);
    Ok(())
}

/// Runs `make`, which creates a refcount block or a larger refcount table. If another task is doing so, waits for a
/// change instead.
async fn make_refcounts(env: &Env, make: impl Future<Output = IoResult>) -> IoResult {
    if std::mem::replace(&mut env.state().writer.growing, true) {
        env.io.wait().await;
        return Ok(());
    }
    let made = make.await;
    env.state().writer.growing = false;
    env.io.changed();
    made
}

/// Creates a refcount block, in the first of the clusters whose refcounts it contains; all of these are free.
async fn write_block(env: &Env, block: u64) -> IoResult {
    let (range, first, slice_bytes) = {
        let mut state = env.state();
        let header = &state.top.header;
        let bits = header.cluster_bits;
        let first = block * header.refcounts_per_block();
        let is_there = state.writer.refcount_table.get(block as usize).is_none_or(|entry| *entry != 0);
        if is_there {
            return Ok(());
        }
        let range = first << bits..(first + 1) << bits;
        if first >= state.writer.clusters_max {
            return Err(Status::NoSpace);
        }
        state.check_target(range.clone())?;
        state.cache.forget(0, range.clone());
        state.writer.fresh_from = state.writer.fresh_from.max(first + 1);
        (range, first, state.cache.slice_bytes())
    };
    env.io.submit(env.write_op(range.start).with_zeroes(range.end - range.start)).await?;
    loop {
        {
            let mut state = env.state();
            let key = Key { layer: 0, offset: range.start };
            if let Some(slot) = state.cache.insert(key, Table::Refcounts, &vec![0; slice_bytes]) {
                // The entry of the refcount table comes first, because the journal is replayed in order, and
                // the refcount is found through the entry.
                state.set_refcount_block(block as usize, range.start)?;
                set_refcounts(&mut state, (slot, 0), first, 1, 1);
                return Ok(());
            }
        }
        flush_metadata(env, false).await?;
    }
}

/// Creates a larger refcount table, with an entry for `block` at least, after all clusters that have
/// refcounts. Also creates the refcount blocks for the clusters of the table.
async fn make_room(env: &Env, block: u64) -> IoResult {
    if block < env.state().writer.refcount_table.len() as u64 {
        return Ok(());
    }
    // As the task that flushes, this one prevents others from writing entries of the old table meanwhile.
    while !begin(&mut env.state())? {
        env.io.wait().await;
    }
    let moved = move_table(env, block).await;
    env.state().writer.flushing = false;
    moved
}

/// A new refcount table, at the bytes `place` of the file, with the refcount blocks for its own clusters,
/// which begin at byte `at`, before it is written.
struct Growth {
    table: Vec<u64>,
    place: Range<u64>,
    blocks: Vec<u8>,
    at: u64,
}

fn plan_growth(state: &State, block: u64) -> Result<Growth, Status> {
    let header = &state.top.header;
    let (cluster, order) = (header.cluster_bytes(), header.refcount_order);
    let per_block = header.refcounts_per_block();
    let old = &state.writer.refcount_table;
    let mut count = 1;
    let (entries, clusters) = loop {
        let entries = (block + count).max(old.len() as u64 * 3 / 2);
        let clusters = (entries * 8).div_ceil(cluster);
        if count * per_block >= count + clusters {
            break (clusters * cluster / 8, clusters);
        }
        count += 1;
    };
    let first = block * per_block;
    let used = first + count + clusters;
    if entries * 8 > REFCOUNT_TABLE_MAX_BYTES.max(cluster) || used > state.writer.clusters_max {
        return Err(Status::NoSpace);
    }
    let mut table = old.clone();
    table.resize(entries as usize, 0);
    let mut blocks = vec![0; (count * cluster) as usize];
    for number in 0..count {
        table[(block + number) as usize] = (first + number) * cluster;
        let content = &mut blocks[(number * cluster) as usize..][..cluster as usize];
        let here = (used - first).saturating_sub(number * per_block).min(per_block);
        (0..here as usize).for_each(|index| set_refcount(content, index, order, 1));
    }
    let place = (first + count) * cluster..used * cluster;
    state.check_target(first * cluster..place.end)?;
    Ok(Growth { table, place, blocks, at: first * cluster })
}

async fn move_table(env: &Env, block: u64) -> IoResult {
    // The new table names all existing blocks, so their content must be in the file first.
    flush_refcounts(env).await?;
    let growth = plan_growth(&env.state(), block)?;
    {
        let mut state = env.state();
        let bits = state.cluster_bits();
        state.cache.forget(0, growth.at..growth.place.end);
        state.writer.fresh_from = state.writer.fresh_from.max(growth.place.end >> bits);
    }
    let mut content = IoBuffer::zeroed((growth.place.end - growth.at) as usize);
    content[..growth.blocks.len()].copy_from_slice(&growth.blocks);
    for (place, entry) in content[growth.blocks.len()..].chunks_exact_mut(8).zip(&growth.table) {
        place.copy_from_slice(&entry.to_be_bytes());
    }
    env.io.submit(env.write_op(growth.at).with_buffer(content)).await?;
    sync(env).await?;
    let clusters = (growth.place.end - growth.place.start) >> env.state().cluster_bits();
    let mut place = growth.place.start.to_be_bytes().to_vec();
    place.extend((clusters as u32).to_be_bytes());
    change_header(env, REFCOUNT_TABLE_AT, &place).await?;
    let mut state = env.state();
    let header = &mut state.top.header;
    let old = std::mem::replace(&mut header.refcount_table_offset, growth.place.start);
    let old_clusters = std::mem::replace(&mut header.refcount_table_clusters, clusters as u32);
    let cluster = header.cluster_bytes();
    state.writer.refcount_table = growth.table;
    state.writer.refcount_table_dirty.clear();
    state.writer.released.extend((0..u64::from(old_clusters)).map(|number| old + number * cluster));
    Ok(())
}

pub async fn change_header(env: &Env, at: usize, bytes: &[u8]) -> IoResult {
    write_header(env, at, bytes).await?;
    sync(env).await
}

/// Changes bytes of the header, without a sync. After a failed write, nothing more is written to the tables.
pub async fn write_header(env: &Env, at: usize, bytes: &[u8]) -> IoResult {
    let sector = env.state().layers[0].align.max(512) as usize;
    let start = at - at % sector;
    let end = (at + bytes.len()).next_multiple_of(sector);
    let mut buffer = env.read(0, start as u64, (end - start) as u64).await?;
    buffer[at - start..][..bytes.len()].copy_from_slice(bytes);
    let written = env.io.submit(env.write_op(start as u64).with_buffer(buffer)).await;
    if written.is_err() {
        // The header on disk may be the old or the new one.
        env.state().writer.failed = true;
    }
    written.map(drop)
}

//! Allocates clusters of the file, L2 tables, refcount blocks, and a larger refcount table. Reserves space in the file
//! before it is written: a direct write that extends the file excludes all other writes to it, and a write to a hole
//! waits until the file system has found space.

use blkq::{IoBuffer, IoResult, Status};

use crate::qcow2::format::{COPIED, REFCOUNT_TABLE_AT, REFCOUNT_TABLE_MAX_BYTES, table_offset};
use crate::qcow2::tables::cache::{Key, Table};
use crate::qcow2::tables::state::{
    NewTable, NotReady, State, Tables, allocate_refcounts, refcount, refcount_place, set_refcount,
    set_refcounts, set_refcounts_in_slice,
};

use super::env::Env;
use super::flush_metadata::{exclude_flushes, flush_metadata, flush_refcounts, put_numbers, sync};
use super::operations::Op;

/// Slices that a search for a free cluster reads before it lets other tasks run.
const SEARCH_MAX: usize = 64;
/// The file grows by `1 / PART` of its length at a time, within these bounds in bytes.
const PART: u64 = 8;
const LEAST_BYTES: u64 = 4 << 20;
const MOST_BYTES: u64 = 64 << 20;
/// Size of the blocks in which file systems allocate space.
const BLOCK_BYTES: u64 = 4096;

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
        }
        // Boxed, because creating a table allocates clusters, which may come back here.
        NotReady::L2Table(index) => Box::pin(make(env, NewTable::L2(index), make_l2(env, index))).await?,
        NotReady::RefcountBlock(block) => {
            Box::pin(make(env, NewTable::Refcounts, make_block(env, block))).await?
        }
        // One flush is enough for all tasks that wait for it.
        NotReady::FlushFirst if !env.state().writer.flushing => flush_metadata(env, false).await?,
        NotReady::Busy | NotReady::FlushFirst => env.io.wait().await,
        NotReady::Yield => env.io.pause().await,
        NotReady::Failed(status) => return Err(status),
    }
    Ok(())
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
    until_ready(env, |state| find_free(state, count, false)).await
}

/// As [`allocate`], for clusters that the L1 and L2 tables do not refer to, such as those of bitmaps: if the
/// process is killed, they stay allocated.
pub async fn allocate_apart(env: &Env, count: u64) -> Result<Clusters, Status> {
    until_ready(env, |state| find_free(state, count, true)).await
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

fn find_free(state: &mut State, wanted: u64, apart: bool) -> Result<Clusters, NotReady> {
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
        match apart {
            true => set_refcounts(state, (slot, first), host, count, 1),
            false => allocate_refcounts(state, (slot, first), host, count),
        }
        let writer = &mut state.writer;
        writer.next_free = host + count;
        let fresh = host >= writer.fresh_from;
        writer.fresh_from = writer.fresh_from.max(host + count);
        return Ok(Clusters { host: host << bits, count, fresh });
    }
    Err(NotReady::Yield)
}

/// Runs `task`, which creates `table`. If another task is doing so, waits for a change instead.
async fn make(env: &Env, table: NewTable, task: impl Future<Output = IoResult>) -> IoResult {
    if !env.state().writer.making.insert(table) {
        env.io.wait().await;
        return Ok(());
    }
    let made = task.await;
    env.state().writer.making.remove(&table);
    env.io.changed();
    made
}

/// Creates an L2 table that may be changed for entry `index` of the L1 table: an empty one, or a copy of a
/// table that a snapshot shares.
async fn make_l2(env: &Env, index: usize) -> IoResult {
    let old = {
        let state = env.state();
        let entry = *state.top.l1.get(index).ok_or(Status::Io)?;
        let old = table_offset(entry, state.cluster_bits())?;
        // In a damaged image, an entry may have the COPIED bit and name no table.
        if entry & COPIED != 0 && old.is_some() {
            return Ok(());
        }
        old
    };
    reserve_l1(env, index).await?;
    let clusters = allocate(env, 1).await?;
    let written = write_l2(env, index, old, clusters.host).await;
    if written.is_err() {
        free_unused(env, clusters).await;
    }
    written
}

async fn write_l2(env: &Env, index: usize, old: Option<u64>, host: u64) -> IoResult {
    let bytes = 1 << env.state().cluster_bits();
    env.state().cache.forget(0, host..host + bytes);
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

/// Creates a refcount block, and a larger refcount table if the block has no entry in the table.
async fn make_block(env: &Env, block: u64) -> IoResult {
    let entry = env.state().writer.refcount_table.get(block as usize).copied();
    match entry {
        Some(0) => write_block(env, block).await,
        Some(_) => Ok(()),
        // As a flush, this prevents others from writing entries of the old table meanwhile.
        None => exclude_flushes(env, move_table(env, block)).await,
    }
}

/// Creates a refcount block, in the first of the clusters whose refcounts it contains; all of these are free.
async fn write_block(env: &Env, block: u64) -> IoResult {
    let (range, first) = {
        let mut state = env.state();
        let header = &state.top.header;
        let bits = header.cluster_bits;
        let first = block * header.refcounts_per_block();
        let range = first << bits..(first + 1) << bits;
        if first >= state.writer.clusters_max {
            return Err(Status::NoSpace);
        }
        state.check_target(range.clone())?;
        state.cache.forget(0, range.clone());
        state.writer.fresh_from = state.writer.fresh_from.max(first + 1);
        (range, first)
    };
    env.io.submit(env.write_op(range.start).with_zeroes(range.end - range.start)).await?;
    until_ready(env, |state| {
        let (key, content) = (Key { layer: 0, offset: range.start }, vec![0; state.cache.slice_bytes()]);
        let slot = state.cache.insert(key, Table::Refcounts, &content).ok_or(NotReady::FlushFirst)?;
        // The entry of the refcount table comes first, because the journal is replayed in order, and the
        // refcount is found through the entry.
        state.set_refcount_block(block as usize, range.start)?;
        set_refcounts(state, (slot, 0), first, 1, 1);
        Ok(())
    })
    .await
}

/// A larger refcount table, and the refcount blocks for its own clusters.
struct Growth {
    table: Vec<u64>,
    /// The content of the blocks and after them of the table.
    content: IoBuffer,
    /// Where the blocks and the table begin in the file.
    blocks_at: u64,
    table_at: u64,
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
    let used = count + clusters;
    if entries * 8 > REFCOUNT_TABLE_MAX_BYTES.max(cluster) || first + used > state.writer.clusters_max {
        return Err(Status::NoSpace);
    }
    let (blocks_at, table_at) = (first * cluster, (first + count) * cluster);
    state.check_target(blocks_at..blocks_at + used * cluster)?;
    let mut table = old.clone();
    table.resize(entries as usize, 0);
    for (number, entry) in table[block as usize..].iter_mut().take(count as usize).enumerate() {
        *entry = blocks_at + number as u64 * cluster;
    }
    let mut content = IoBuffer::zeroed((used * cluster) as usize);
    (0..used as usize).for_each(|index| set_refcount(&mut content, index, order, 1));
    put_numbers(&mut content[(count * cluster) as usize..], &table);
    Ok(Growth { table, content, blocks_at, table_at })
}

/// Creates a larger refcount table, with an entry for `block` at least, after all clusters that have
/// refcounts. Also creates the refcount blocks for the clusters of the table.
async fn move_table(env: &Env, block: u64) -> IoResult {
    // The new table names all existing blocks, so their content must be in the file first.
    flush_refcounts(env).await?;
    let Growth { table, content, blocks_at, table_at } = plan_growth(&env.state(), block)?;
    {
        let mut state = env.state();
        let end = blocks_at + content.len() as u64;
        state.cache.forget(0, blocks_at..end);
        state.writer.fresh_from = state.writer.fresh_from.max(end >> state.cluster_bits());
    }
    env.io.submit(env.write_op(blocks_at).with_buffer(content)).await?;
    sync(env).await?;
    let clusters = (table.len() as u64 * 8) >> env.state().cluster_bits();
    let mut place = table_at.to_be_bytes().to_vec();
    place.extend((clusters as u32).to_be_bytes());
    change_header(env, REFCOUNT_TABLE_AT, &place).await?;
    let mut state = env.state();
    let header = &mut state.top.header;
    let [_, (_, old, old_bytes), _] = header.tables();
    (header.refcount_table_offset, header.refcount_table_clusters) = (table_at, clusters as u32);
    let cluster = header.cluster_bytes() as usize;
    state.writer.refcount_table = table;
    state.writer.refcount_table_dirty.clear();
    state.writer.released.extend((old..old + old_bytes).step_by(cluster));
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
    // After an error, the header on disk may be the old or the new one.
    env.state().writer.failed |= written.is_err();
    written.map(drop)
}

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

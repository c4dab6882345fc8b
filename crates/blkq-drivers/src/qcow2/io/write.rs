//! Writes: in place, or to new clusters together with a copy of the data around them.

use std::ops::Range;

use blkq::{IoResult, Status};

use crate::qcow2::format::{COPIED, Entry};
use crate::qcow2::tables::state::{NotReady, State};

use super::allocate::{Clusters, allocate, free_unused, reserve, until_ready};
use super::env::Env;
use super::flush_metadata::flush_metadata;
use super::operations::{Memory, Op};
use super::read::read_device;

/// Bytes of new clusters that one step of a write allocates. The step locks their clusters of the device.
const STEP_MAX_BYTES: u64 = 2 << 20;

#[derive(Clone, Copy)]
pub enum Source<'a> {
    Memory(&'a Memory),
    Zeroes,
}

/// The part of a write that is left: `at..end` of the device. The data of `source` begins at `position`.
#[derive(Clone, Copy)]
struct Remaining<'a> {
    at: u64,
    end: u64,
    position: u64,
    source: Source<'a>,
}

enum Step {
    /// In place: the first number is the byte of the file, the second the number of bytes.
    InPlace(u64, u64),
    /// To `count` new clusters of the file, or to the one at `host`, which is allocated for a zero cluster. The
    /// clusters of the device are locked.
    Locked { count: u64, host: Option<u64> },
}

/// Writes `bytes` from `position` of the device on. Fails with [`Status::NoSpace`], or with [`Status::Io`] if
/// the tables are damaged.
pub async fn write(env: &Env, position: u64, bytes: u64, source: Source<'_>) -> IoResult {
    let end = position + bytes;
    let (mut at, mut has_freed) = (position, false);
    while at < end {
        match write_step(env, Remaining { at, end, position, source }).await {
            Ok(run) => at += run,
            Err(Status::NoSpace) if !has_freed && env.state().may_free() => {
                has_freed = true;
                flush_metadata(env, false).await?;
            }
            Err(status) => return Err(status),
        }
    }
    Ok(())
}

async fn write_step(env: &Env, rest: Remaining<'_>) -> Result<u64, Status> {
    let Remaining { at, end, position, source } = rest;
    match until_ready(env, |state| plan(state, at, end)).await? {
        Step::InPlace(host, run) => {
            let run = run.min(STEP_MAX_BYTES);
            let op = add(env.write_op(host), source, at - position, run);
            env.io.submit(op.in_epoch(&env.shared.epochs)).await?;
            Ok(run)
        }
        Step::Locked { count, host } => {
            let written = write_new(env, rest, count, host).await;
            {
                let mut state = env.state();
                let first = at >> state.cluster_bits();
                state.writer.locked.retain(|cluster| !(first..first + count).contains(cluster));
                state.writer.changing -= 1;
            }
            env.io.changed();
            written
        }
    }
}

fn add(op: Op, source: Source<'_>, skip: u64, bytes: u64) -> Op {
    match source {
        Source::Memory(memory) => op.with_memory(memory, skip, bytes),
        Source::Zeroes => op.with_zeroes(bytes),
    }
}

fn plan(state: &mut State, position: u64, end: u64) -> Result<Step, NotReady> {
    if let Some((host, run)) = state.find_in_place(position, end - position)? {
        return Ok(Step::InPlace(host, run));
    }
    if state.writer.failed {
        return Err(NotReady::Failed(Status::Io));
    }
    state.may_change()?;
    let (slot, index) = state.entry_to_change(position)?;
    let bits = state.cluster_bits();
    let first = position >> bits;
    if state.writer.locked.contains(&first) {
        return Err(NotReady::Busy);
    }
    let (mut count, mut host) = (1, None);
    if let Entry::Zero { host: Some(zero), copied: true } =
        Entry::parse(state.cache.entry(slot, index), bits)?
    {
        state.check_target(zero..zero + (1 << bits))?;
        host = Some(zero);
    } else {
        let in_slice = (state.cache.slice_bytes() / 8 - index) as u64;
        let asked = ((end - 1) >> bits) - first + 1;
        let most = asked.min(in_slice).min((STEP_MAX_BYTES >> bits).max(1));
        while count < most && !state.writer.locked.contains(&(first + count)) {
            match Entry::parse(state.cache.entry(slot, index + count as usize), bits)? {
                Entry::Data { copied: true, .. } | Entry::Zero { host: Some(_), .. } => break,
                _ => count += 1,
            }
        }
    }
    state.writer.locked.extend(first..first + count);
    state.writer.changing += 1;
    Ok(Step::Locked { count, host })
}

/// Writes to the next `count` clusters of the device. Returns the number of bytes written, which is smaller if fewer
/// clusters of the file are free in a row.
async fn write_new(env: &Env, rest: Remaining<'_>, count: u64, host: Option<u64>) -> Result<u64, Status> {
    let clusters = match host {
        Some(host) => Clusters { host, count, fresh: false },
        None => allocate(env, count).await?,
    };
    let written = copy_and_write(env, rest, clusters).await;
    if written.is_err() && host.is_none() {
        free_unused(env, clusters).await;
    }
    written
}

async fn copy_and_write(env: &Env, rest: Remaining<'_>, clusters: Clusters) -> Result<u64, Status> {
    let Remaining { at, end, position, source } = rest;
    let bits = env.state().cluster_bits();
    let begin = at >> bits << bits;
    let limit = begin + (clusters.count << bits);
    let until = end.min(limit);
    let head = around(env, begin, at, clusters.fresh).await?;
    let tail = around(env, until, limit, clusters.fresh).await?;
    let bounce = env.reserve(head.memory(1 << bits) + tail.memory(1 << bits)).await;
    let op = env.write_op(clusters.host + (head.range.start - begin));
    let op = add(head.add_to(op, env).await?, source, at - position, until - at);
    let op = tail.add_to(op, env).await?;
    let written_end = op.offset + op.bytes;
    reserve(env, written_end).await;
    drop(env.io.submit(op).await?);
    drop(bounce);
    env.state().note_size(written_end);
    link(env, begin, clusters).await?;
    Ok(until - at)
}

/// The bytes of the device that new clusters need next to the data of a write; none if the clusters already read as
/// zeroes there, or the data reaches their edge.
struct Around {
    range: Range<u64>,
    /// The bytes are zeroes; else they are copied.
    zero: bool,
}

impl Around {
    /// An upper bound for the memory that this takes, in bytes: a copy takes a second one of each part, and a
    /// compressed cluster with its content.
    fn memory(&self, cluster: u64) -> u64 {
        if self.zero { 0 } else { 2 * (self.range.end - self.range.start) + 2 * cluster }
    }

    async fn add_to(self, op: Op, env: &Env) -> Result<Op, Status> {
        let Range { start, end } = self.range;
        match self.zero {
            true => Ok(op.with_zeroes(end - start)),
            false => Ok(op.with_buffer(read_device(env, start, end - start).await?)),
        }
    }
}

/// How to fill `from..to` of the device. `fresh`: the new clusters read as zeroes.
async fn around(env: &Env, from: u64, to: u64, fresh: bool) -> Result<Around, Status> {
    let zero = from == to || until_ready(env, |state| state.is_zero(from, to - from)).await?;
    Ok(Around { range: if zero && fresh { to..to } else { from..to }, zero })
}

/// Makes the L2 table refer to the new clusters, after their content was written.
async fn link(env: &Env, position: u64, clusters: Clusters) -> IoResult {
    until_ready(env, |state| {
        let (slot, index) = state.entry_to_change(position)?;
        let bits = state.cluster_bits();
        for number in 0..clusters.count {
            let host = clusters.host + (number << bits);
            let old = Entry::parse(state.cache.entry(slot, index + number as usize), bits)?;
            if !matches!(old, Entry::Zero { host: Some(old), .. } if old == host) {
                release(env, state, old);
            }
        }
        state.set_entries(slot, index, clusters.host | COPIED, clusters.count);
        Ok(())
    })
    .await
}

pub fn release(env: &Env, state: &mut State, old: Entry) {
    // The cached content may belong to this cluster, whose offset may soon be reused.
    if matches!(old, Entry::Compressed { .. }) {
        env.decompressed.borrow_mut().take();
    }
    let bits = state.cluster_bits();
    // The next flush of the metadata frees the clusters.
    state.writer.released.extend(old.hosts(bits));
}

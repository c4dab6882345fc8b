//! Discard, write zeroes and grow. Whole clusters are changed in their L2 entries; the parts of clusters at both
//! ends are written.

use blkq::{IoBuffer, IoResult, Status};

use super::allocate::{change_header, until_ready};
use super::env::Env;
use super::flush_metadata::{flush_metadata, put_numbers, sync};
use super::write::{Source, release, write};
use crate::qcow2::format::{Entry, SIZE_AT, ZERO};
use crate::qcow2::tables::state::{NotReady, State, Tables};

/// Clusters after which a task yields: a request may have hundreds of thousands, and a queue a hundred of such
/// requests.
const CLUSTERS_AT_ONCE: u64 = 2048;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// The data is no longer needed, and may read as anything.
    Discard,
    /// The range must read as zeroes. Its space may be freed.
    Zeroes,
    /// The range must read as zeroes, and its space must stay allocated.
    ZeroesKept,
}

pub async fn clear(env: &Env, position: u64, bytes: u64, wanted: Wanted) -> IoResult {
    let end = position + bytes;
    let cluster = 1u64 << env.state().cluster_bits();
    let size = env.state().layers[0].size;
    // At the end of the device, the rest of the last cluster has no data, so the cluster counts as whole.
    let whole_end = if end == size { end } else { end - end % cluster };
    let whole = position.next_multiple_of(cluster)..whole_end;
    if whole.start >= whole.end {
        return clear_part(env, position, end, wanted).await;
    }
    clear_part(env, position, whole.start, wanted).await?;
    clear_whole(env, whole.start, whole.end, wanted).await?;
    clear_part(env, whole.end, end, wanted).await
}

/// Writes zeroes to a part of a cluster, unless it reads as zeroes already.
async fn clear_part(env: &Env, position: u64, end: u64, wanted: Wanted) -> IoResult {
    if position == end || wanted == Wanted::Discard {
        return Ok(());
    }
    match until_ready(env, |state| state.is_zero(position, end - position)).await? {
        true => Ok(()),
        false => write(env, position, end - position, Source::Zeroes).await,
    }
}

/// `end` is the end of a cluster or of the device.
async fn clear_whole(env: &Env, position: u64, end: u64, wanted: Wanted) -> IoResult {
    let pause_bytes = CLUSTERS_AT_ONCE << env.state().cluster_bits();
    let (mut at, mut pause_at) = (position, position + pause_bytes);
    while at < end {
        if at >= pause_at {
            env.io.pause().await;
            pause_at = at + pause_bytes;
        }
        let next = until_ready(env, |state| clear_entries(env, state, at, end, wanted)).await?;
        if next == at {
            let bytes = (1 << env.state().cluster_bits()).min(end - at);
            write(env, at, bytes, Source::Zeroes).await?;
            at += bytes;
        } else {
            at = next;
        }
    }
    Ok(())
}

/// Changes L2 entries of one cached slice, from `from` to `end` at most. Returns where it stopped: at `from` if
/// the entry of its cluster cannot express zeroes, so that they have to be written.
fn clear_entries(env: &Env, state: &mut State, from: u64, end: u64, wanted: Wanted) -> Result<u64, NotReady> {
    let bits = state.cluster_bits();
    let cluster = 1u64 << bits;
    let (has_backing, v3) = (state.layers.len() > 1, state.top.header.version >= 3);
    let covers = state.top.header.l2_covers();
    let (slot, mut index) = match state.entry_place(from)? {
        Some(place) => place,
        None if wanted == Wanted::Discard || !has_backing => {
            return Ok((from / covers + 1).saturating_mul(covers).min(end));
        }
        None if !v3 => return Ok(from),
        None => {
            state.may_change()?;
            return Err(NotReady::L2Table((from / covers) as usize));
        }
    };
    let count = state.cache.slice_bytes() / 8;
    let mut at = from;
    while at < end && index < count {
        let old = state.cache.entry(slot, index);
        let parsed = Entry::parse(old, bits)?;
        let unmapped = if has_backing { ZERO } else { 0 };
        let new = match (wanted, parsed) {
            (Wanted::Discard, Entry::Unallocated) | (_, Entry::Zero { host: None, .. }) => old,
            (Wanted::Discard, _) if has_backing && !v3 => old,
            (Wanted::ZeroesKept, Entry::Zero { .. }) => old,
            (_, Entry::Unallocated) if !has_backing => old,
            (Wanted::ZeroesKept, Entry::Data { copied: true, .. }) if v3 => old | ZERO,
            _ if wanted == Wanted::ZeroesKept || has_backing && !v3 => return Ok(at),
            _ => unmapped,
        };
        if new != old {
            if state.writer.failed {
                return Err(NotReady::Failed(Status::Io));
            }
            let is_locked = state.writer.locked.contains(&(at >> bits));
            let locked = if is_locked { Err(NotReady::Busy) } else { Ok(()) };
            if let Err(reason) = state.may_change().and(locked) {
                return if at == from { Err(reason) } else { Ok(at) };
            }
            // Checked here, because a snapshot may share the L2 table, which is then copied before the
            // change.
            state.entry_to_change(at)?;
            state.set_entries(slot, index, new, 1);
            if new & !ZERO == 0 {
                release(env, state, parsed);
            }
        }
        at += cluster;
        index += 1;
    }
    Ok(at)
}

/// The largest virtual size in bytes for which the clusters of the L1 table have entries.
pub fn room(state: &State) -> u64 {
    let header = &state.top.header;
    let bytes = (u64::from(header.l1_entries) * 8).next_multiple_of(header.cluster_bytes());
    (bytes / 8).saturating_mul(header.l2_covers()).min(i64::MAX as u64)
}

/// Grows the device to `bytes`, at most [`room`]. The new part reads as zeroes.
pub async fn grow(env: &Env, bytes: u64) -> IoResult {
    flush_metadata(env, true).await?;
    let (counted, entries, l1_offset, align) = {
        let mut state = env.state();
        let align = state.layers[0].align.max(512) as usize;
        let Tables { header, l1 } = &mut state.top;
        let entries = (header.l1_entries_for(bytes) as usize).max(l1.len());
        l1.resize(entries, 0);
        (header.l1_entries as usize, entries, header.l1_offset, align)
    };
    // The new entries are written before the header counts them. They are zeroes, unless an earlier attempt
    // to grow has failed.
    if entries > counted {
        let start = counted * 8 / align * align;
        let mut buffer = IoBuffer::zeroed((entries * 8).next_multiple_of(align) - start);
        put_numbers(&mut buffer, &env.state().top.l1[start / 8..]);
        env.io.submit(env.write_op(l1_offset + start as u64).with_buffer(buffer)).await?;
        sync(env).await?;
    }
    let old = std::mem::replace(&mut env.state().layers[0].size, bytes);
    let grown = hide_and_count(env, old, bytes, entries).await;
    if grown.is_err() {
        env.state().layers[0].size = old;
    }
    grown
}

/// Zeroes the new part where the backing file or the last cluster of the old size has data, and then writes
/// the new size to the header. In the other order, a power loss in between would make that data visible.
async fn hide_and_count(env: &Env, old: u64, bytes: u64, entries: usize) -> IoResult {
    let (start, end) = {
        let state = env.state();
        let backing_size = state.layers.get(1).map_or(0, |layer| layer.size);
        let cluster_end = old.next_multiple_of(1 << state.cluster_bits());
        (old.next_multiple_of(state.layers[0].align), backing_size.max(cluster_end).min(bytes))
    };
    if end > start {
        clear(env, start, end - start, Wanted::Zeroes).await?;
        flush_metadata(env, true).await?;
    }
    // The size, the encryption method (0 for none) and the number of L1 entries are adjacent in the header.
    let mut fields = bytes.to_be_bytes().to_vec();
    fields.extend([0; 4]);
    fields.extend(u32::try_from(entries).map_err(|_| Status::Io)?.to_be_bytes());
    change_header(env, SIZE_AT, &fields).await?;
    let mut state = env.state();
    state.top.header.l1_entries = entries as u32;
    state.top.header.size = bytes;
    state.size = bytes;
    Ok(())
}

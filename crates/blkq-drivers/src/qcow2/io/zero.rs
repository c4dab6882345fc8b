//! Discard and write zeroes. Whole clusters are changed in their L2 entries; the parts of clusters at both
//! ends are written.

use blkq::{IoResult, Status};

use crate::qcow2::format::{Entry, ZERO};
use crate::qcow2::tables::state::{NotReady, State};

use super::allocate::until_ready;
use super::env::Env;
use super::write::{Source, release, write};

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

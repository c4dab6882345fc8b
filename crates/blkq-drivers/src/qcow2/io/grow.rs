//! Increases the virtual size of an image.

use blkq::{IoBuffer, IoResult, Status};

use crate::qcow2::format::SIZE_AT;
use crate::qcow2::tables::state::{State, Tables};

use super::allocate::change_header;
use super::env::Env;
use super::flush_metadata::{flush_metadata, put_numbers, sync};
use super::zero::{Wanted, clear};

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

//! Block status: which bytes of the device are data, and at which depth of the chain. The lookups
//! may wait for I/O, so they do not run on the thread of the queue, and they have a time limit, the argument `until_ns`.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use blkq::clock::worker_ns;
use blkq::sync::lock;
use blkq::{DepthExtent, Extent};

use crate::extents::append;
use crate::qcow2::tables::state::Found;

use super::blocking_reader::BlockingReader;
use super::env::Shared;

pub fn of_chain(
    shared: &Arc<Shared>,
    range: Range<u64>,
    max: usize,
    until_ns: u64,
) -> io::Result<Vec<Extent>> {
    let mut extents: Vec<Extent> = Vec::new();
    let is_raw = |layer: u8| lock(&shared.state).tables(usize::from(layer)).is_none();
    each_run(shared, range, until_ns, |found, _, run| {
        let parts = match found {
            Found::Data { layer, host } if is_raw(layer) => {
                shared.files[usize::from(layer)].extents(0, 512, host..host + run, max, until_ns)?
            }
            Found::Zero | Found::Unallocated => vec![Extent { length: run, hole: true, zero: true }],
            _ => vec![Extent { length: run, hole: false, zero: false }],
        };
        let mut done = 0;
        for part in parts {
            if !append(&mut extents, part, max) {
                return Ok(None);
            }
            done += part.length;
        }
        Ok(Some(done))
    })?;
    Ok(extents)
}

/// The depths in the chain at which the bytes of `range` are allocated, as at most `max` runs. As in QEMU,
/// the bytes beyond the end of a backing file count as allocated in it.
pub fn depths(
    shared: &Arc<Shared>,
    range: Range<u64>,
    max: usize,
    until_ns: u64,
) -> io::Result<Vec<DepthExtent>> {
    let mut depths: Vec<DepthExtent> = Vec::new();
    each_run(shared, range, until_ns, |found, layer, run| {
        let depth = if found == Found::Unallocated { 0 } else { layer as u32 + 1 };
        let full = depths.len() == max;
        match depths.last_mut() {
            Some(last) if last.depth == depth => last.length += run,
            _ if full => return Ok(None),
            _ => depths.push(DepthExtent { length: run, depth }),
        }
        Ok(Some(run))
    })?;
    Ok(depths)
}

/// Calls `each` with the runs of `range`, in order: where the run is stored, the number of the layer, and the
/// bytes. `each` returns how many of the bytes it took, or `None` to stop. No run follows after the time `until_ns`.
fn each_run(
    shared: &Arc<Shared>,
    range: Range<u64>,
    until_ns: u64,
    mut each: impl FnMut(Found, usize, u64) -> io::Result<Option<u64>>,
) -> io::Result<()> {
    let mut left = range.start..range.end.min(lock(&shared.state).size);
    let mut reader = BlockingReader::new(shared);
    while left.start < left.end {
        let (found, layer, run) = reader.find(shared.files.len(), &left)?;
        let Some(taken) = each(found, layer, run)? else { break };
        left.start += taken;
        if worker_ns() >= until_ns {
            break;
        }
    }
    Ok(())
}

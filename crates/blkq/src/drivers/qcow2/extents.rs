//! Which bytes of the device are data, and which image has them, for a thread that may wait.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::buffer::IoBuffer;
use crate::driver::{DepthExtent, Extent};
use crate::drivers::r#loop::extents::of_file;
use crate::sync::lock;

use super::env::Shared;
use super::state::{Extra, Found, Lack};

/// The extents of `range`, at most `max`.
pub(super) fn of_chain(
    shared: &Shared,
    files: &[Arc<File>],
    range: Range<u64>,
    max: usize,
) -> io::Result<Vec<Extent>> {
    let mut extents: Vec<Extent> = Vec::new();
    let is_raw = |layer: u8| lock(&shared.state).layers[usize::from(layer)].tables.is_none();
    each_run(shared, files, range, |found, _, run| {
        let parts = match found {
            Found::Data { layer, host } if is_raw(layer) => {
                of_file(&files[usize::from(layer)], 0, 512, host..host + run, max)?
            }
            Found::Zero | Found::Nothing => vec![Extent { length: run, hole: true, zero: true }],
            _ => vec![Extent { length: run, hole: false, zero: false }],
        };
        let mut done = 0;
        for part in parts {
            let full = extents.len() == max;
            match extents.last_mut() {
                Some(last) if (last.hole, last.zero) == (part.hole, part.zero) => last.length += part.length,
                _ if full => return Ok(None),
                _ => extents.push(part),
            }
            done += part.length;
        }
        Ok(Some(done))
    })?;
    Ok(extents)
}

/// How deep in the chain the bytes of `range` are allocated, in at most `max` runs: what is beyond the end of an image
/// counts as its own, as QEMU has it.
pub(super) fn depths(
    shared: &Shared,
    files: &[Arc<File>],
    range: Range<u64>,
    max: usize,
) -> io::Result<Vec<DepthExtent>> {
    let mut depths: Vec<DepthExtent> = Vec::new();
    each_run(shared, files, range, |found, layer, run| {
        let depth = if found == Found::Nothing { 0 } else { layer as u32 + 1 };
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

/// Calls `each` with the runs of `range`, in order: where they are, the number of the image, and their bytes. It
/// returns how many of them it took, or that it wants no more. Slices of tables that are not in memory are read
/// from the files, which then have what they had in memory.
fn each_run(
    shared: &Shared,
    files: &[Arc<File>],
    range: Range<u64>,
    mut each: impl FnMut(Found, usize, u64) -> io::Result<Option<u64>>,
) -> io::Result<()> {
    let end = range.end.min(lock(&shared.state).size);
    let mut at = range.start;
    // One of each image: a place of the device may need them all.
    let (mut extra, mut commits) = (Extra::new(), 0);
    while at < end {
        let found = {
            let mut state = lock(&shared.state);
            if std::mem::replace(&mut commits, state.commits) != state.commits {
                // Slices may have been changed in memory since, and have left it.
                extra.clear();
            }
            state.find_with_layer(0, at, end - at, Some(&extra))
        };
        let (found, layer, run) = match found {
            Ok(found) => found,
            Err(Lack::Slice(key, _)) => {
                let bytes = lock(&shared.state).cache.slice_bytes();
                let mut buffer = IoBuffer::zeroed(bytes);
                let length = files[usize::from(key.layer)].read_at(&mut buffer, key.offset)?;
                buffer[length..].fill(0);
                extra.retain(|(other, _)| other.layer != key.layer);
                extra.push((key, buffer.to_vec()));
                continue;
            }
            Err(_) => return Err(io::Error::from_raw_os_error(libc::EIO)),
        };
        match each(found, layer, run)? {
            Some(taken) => at += taken,
            None => break,
        }
    }
    Ok(())
}

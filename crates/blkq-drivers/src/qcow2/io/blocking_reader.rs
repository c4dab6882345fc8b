//! Lookups and reads on a thread that may wait for I/O, while the queue of the image continues: for the block status,
//! which says what bytes of the device are data and at which depth of the chain, and for copies.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use blkq::clock::worker_ns;
use blkq::sync::lock;
use blkq::{DepthExtent, Extent, IoBuffer};

use crate::extents::append;
use crate::qcow2::tables::state::{Extra, Found, NotReady};

use super::env::Shared;
use super::inflate::Compressed;

/// Largest read of data in bytes.
const READ_MAX_BYTES: u64 = 1 << 20;

/// Reads slices of tables without the cache, which only the queue fills.
pub struct BlockingReader {
    shared: Arc<Shared>,
    /// At most one slice of each image, because a lookup may need one of each.
    extra: Extra,
    flushes: u64,
}

impl BlockingReader {
    pub fn new(shared: &Arc<Shared>) -> BlockingReader {
        BlockingReader { shared: Arc::clone(shared), extra: Extra::new(), flushes: 0 }
    }

    /// Where the start of `range` is stored in the first `depth` images of the chain, as
    /// [`State::find`](crate::qcow2::tables::state::State::find) returns it. Reads the slices that are not in
    /// memory. They are not dirty, so the files have their current content. Fails with EIO for damaged tables.
    pub fn find(&mut self, depth: usize, range: &Range<u64>) -> io::Result<(Found, usize, u64)> {
        loop {
            let (key, bytes) = {
                let mut state = lock(&self.shared.state);
                if std::mem::replace(&mut self.flushes, state.flushes) != state.flushes {
                    // Since the last lookup, slices may have been changed in memory, written, and evicted.
                    self.extra.clear();
                }
                match state.find(depth, range.start, range.end - range.start, Some(&self.extra)) {
                    Ok(found) => return Ok(found),
                    Err(NotReady::Slice(key, _)) => (key, state.cache.slice_bytes()),
                    Err(_) => return Err(io::Error::from_raw_os_error(libc::EIO)),
                }
            };
            let slice = self.read_file(usize::from(key.layer), key.offset, bytes)?;
            self.extra.retain(|(other, _)| other.layer != key.layer);
            self.extra.push((key, slice.to_vec()));
        }
    }

    /// The parts of `range` that are data and those that are not, as at most `max` extents. No extent follows after the
    /// time `until_ns`.
    pub fn extents(&mut self, range: Range<u64>, max: usize, until_ns: u64) -> io::Result<Vec<Extent>> {
        let shared = Arc::clone(&self.shared);
        let mut extents: Vec<Extent> = Vec::new();
        let is_raw = |layer: u8| lock(&shared.state).tables(usize::from(layer)).is_none();
        self.each_run(range, until_ns, |found, _, run| {
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

    /// The depths in the chain at which the bytes of `range` are allocated, as at most `max` runs. As in QEMU, the bytes
    /// beyond the end of a backing file count as allocated in it. No run follows after the time `until_ns`.
    pub fn depths(&mut self, range: Range<u64>, max: usize, until_ns: u64) -> io::Result<Vec<DepthExtent>> {
        let mut depths: Vec<DepthExtent> = Vec::new();
        self.each_run(range, until_ns, |found, layer, run| {
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
        &mut self,
        range: Range<u64>,
        until_ns: u64,
        mut each: impl FnMut(Found, usize, u64) -> io::Result<Option<u64>>,
    ) -> io::Result<()> {
        let (size, depth) = (lock(&self.shared.state).size, self.shared.files.len());
        let mut left = range.start..range.end.min(size);
        while left.start < left.end {
            let (found, layer, run) = self.find(depth, &left)?;
            let Some(taken) = each(found, layer, run)? else { break };
            left.start += taken;
            if worker_ns() >= until_ns {
                break;
            }
        }
        Ok(())
    }

    /// The first part of `range` that the active image maps in one way.
    pub fn next_allocated(&mut self, mut range: Range<u64>) -> io::Result<Option<Range<u64>>> {
        while range.start < range.end {
            let (found, _, bytes) = self.find(1, &range)?;
            if found != Found::Unallocated {
                return Ok(Some(range.start..range.start + bytes));
            }
            range.start += bytes;
        }
        Ok(None)
    }

    /// Reads from the start of `range`, as far as the active image maps it in one way. Returns where this part is
    /// stored, its length in bytes, and its data unless it is zeroes or unallocated. A write in flight may appear in the
    /// data completely, in part, or not at all.
    pub fn read(&mut self, range: &Range<u64>) -> io::Result<(Found, u64, Option<IoBuffer>)> {
        let (found, _, bytes) = self.find(1, range)?;
        let data = match found {
            Found::Unallocated | Found::Zero => return Ok((found, bytes, None)),
            Found::Data { host, .. } => self.read_file(0, host, bytes.min(READ_MAX_BYTES) as usize)?,
            Found::Compressed { host, bytes: compressed, skip, .. } => {
                let found = Compressed::find(&lock(&self.shared.state), 0, host, compressed)?;
                let read =
                    self.read_file(0, found.file.start, (found.file.end - found.file.start) as usize)?;
                let content = found.inflate(&read)?;
                let mut part = IoBuffer::zeroed(bytes as usize);
                part.copy_from_slice(&content[skip as usize..][..bytes as usize]);
                part
            }
        };
        Ok((found, data.len() as u64, Some(data)))
    }

    fn read_file(&self, layer: usize, offset: u64, bytes: usize) -> io::Result<IoBuffer> {
        let file_bytes = lock(&self.shared.state).layers[layer].file_bytes;
        let mut buffer = IoBuffer::zeroed(bytes);
        self.shared.files[layer].read_padded_at(&mut buffer, offset, file_bytes)?;
        Ok(buffer)
    }
}

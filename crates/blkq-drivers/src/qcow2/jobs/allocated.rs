//! Reads the clusters that are allocated in the active overlay, for a block commit. It runs on a thread
//! besides the queue's.

use std::io;
use std::ops::Range;

use blkq::IoBuffer;
use blkq::sync::lock;

use crate::qcow2::Qcow2;
use crate::qcow2::io::inflate::Compressed;
use crate::qcow2::io::uncached_slices::UncachedSlices;
use crate::qcow2::tables::state::Found;

/// Largest read of data in bytes.
pub(in crate::qcow2) const READ_MAX_BYTES: u64 = 1 << 20;

pub(crate) enum Extent {
    Data(IoBuffer),
    /// This number of zero bytes.
    Zeroes(u64),
    /// The overlay does not map this number of bytes; the backing file has them.
    Unallocated(u64),
}

impl Extent {
    pub fn bytes(&self) -> u64 {
        match self {
            Extent::Data(data) => data.len() as u64,
            Extent::Zeroes(bytes) | Extent::Unallocated(bytes) => *bytes,
        }
    }
}

impl Qcow2 {
    /// How the overlay maps the start of `range`, and how many bytes it maps in the same way contiguously.
    fn find_allocated(&self, slices: &mut UncachedSlices, range: &Range<u64>) -> io::Result<(Found, u64)> {
        slices
            .find(&self.shared, &self.files, |state, extra| {
                state.find(0..1, range.start, range.end - range.start, Some(extra))
            })
            .map(|(found, _, bytes)| (found, bytes))
    }

    pub(in crate::qcow2) fn next_allocated(
        &self,
        slices: &mut UncachedSlices,
        mut range: Range<u64>,
    ) -> io::Result<Option<Range<u64>>> {
        while range.start < range.end {
            let (found, bytes) = self.find_allocated(slices, &range)?;
            if found != Found::Unallocated {
                return Ok(Some(range.start..range.start + bytes));
            }
            range.start += bytes;
        }
        Ok(None)
    }

    /// Reads from the start of `range`. A write in flight may appear in the result completely, in part, or
    /// not at all.
    pub(in crate::qcow2) fn read_extent(
        &self,
        slices: &mut UncachedSlices,
        range: &Range<u64>,
    ) -> io::Result<Extent> {
        let (found, bytes) = self.find_allocated(slices, range)?;
        match found {
            Found::Unallocated => Ok(Extent::Unallocated(bytes)),
            Found::Zero => Ok(Extent::Zeroes(bytes)),
            Found::Data { host, .. } => {
                let mut data = IoBuffer::zeroed(bytes.min(READ_MAX_BYTES) as usize);
                self.read_host(&mut data, host)?;
                Ok(Extent::Data(data))
            }
            Found::Compressed { host, bytes: compressed, skip, .. } => {
                let (place, compressed) =
                    Compressed::place(&lock(&self.shared.state).layers[0], host, compressed)?;
                let mut buffer = IoBuffer::zeroed((place.end - place.start) as usize);
                self.read_host(&mut buffer, place.start)?;
                let content = compressed(buffer).inflate()?;
                let mut content_part = IoBuffer::zeroed(bytes as usize);
                content_part.copy_from_slice(&content[skip as usize..][..bytes as usize]);
                Ok(Extent::Data(content_part))
            }
        }
    }

    fn read_host(&self, buffer: &mut IoBuffer, host: u64) -> io::Result<()> {
        let file_bytes = lock(&self.shared.state).layers[0].file_bytes;
        self.files[0].read_padded_at(buffer, host, file_bytes, None)
    }
}

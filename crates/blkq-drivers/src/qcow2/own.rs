//! The data that the image itself has, for a block commit: read beside its queue.

use std::io;
use std::ops::Range;

use blkq::IoBuffer;
use blkq::sync::lock;

use super::Qcow2;
use super::inflate::Compressed;
use super::slices::{Slices, read_host};
use super::state::Found;

/// Most bytes of data that are read together.
pub(super) const PIECE_MAX_BYTES: u64 = 1 << 20;

/// A part of the device.
pub(crate) enum Piece {
    Data(IoBuffer),
    /// So many zeroes.
    Zeroes(u64),
    /// So many bytes that are not the image's own.
    Behind(u64),
}

impl Piece {
    pub fn bytes(&self) -> u64 {
        match self {
            Piece::Data(data) => data.len() as u64,
            Piece::Zeroes(bytes) | Piece::Behind(bytes) => *bytes,
        }
    }
}

impl Qcow2 {
    /// Where the image itself has the bytes from the beginning of `range` on, and how many there are together.
    fn find_own(&self, slices: &mut Slices, range: &Range<u64>) -> io::Result<(Found, u64)> {
        slices.find(&self.shared, &self.files, |state, extra| {
            state.find_own(range.start, range.end - range.start, Some(extra))
        })
    }

    /// The first part of `range` that the image has itself, as data or as zeroes.
    ///
    /// # Errors
    /// That of reading a table.
    pub(super) fn next_own(
        &self,
        slices: &mut Slices,
        mut range: Range<u64>,
    ) -> io::Result<Option<Range<u64>>> {
        while range.start < range.end {
            let (found, bytes) = self.find_own(slices, &range)?;
            if found != Found::Nothing {
                return Ok(Some(range.start..range.start + bytes));
            }
            range.start += bytes;
        }
        Ok(None)
    }

    /// The bytes from the beginning of `range` on, as the image has them at this moment: a write meanwhile may be in
    /// it or not, in any part.
    ///
    /// # Errors
    /// That of reading the image.
    pub(super) fn read_piece(&self, slices: &mut Slices, range: &Range<u64>) -> io::Result<Piece> {
        let (found, bytes) = self.find_own(slices, range)?;
        match found {
            Found::Nothing => Ok(Piece::Behind(bytes)),
            Found::Zero => Ok(Piece::Zeroes(bytes)),
            Found::Data { host, .. } => self.read_host(host, bytes.min(PIECE_MAX_BYTES)).map(Piece::Data),
            Found::Compressed { host, bytes: compressed, skip, .. } => {
                let content = self.decompress(host, compressed)?;
                let mut piece = IoBuffer::zeroed(bytes as usize);
                piece.copy_from_slice(&content[skip as usize..][..bytes as usize]);
                Ok(Piece::Data(piece))
            }
        }
    }

    fn read_host(&self, host: u64, bytes: u64) -> io::Result<IoBuffer> {
        let file_bytes = lock(&self.shared.state).layers[0].file_bytes;
        let mut buffer = IoBuffer::zeroed(bytes as usize);
        read_host(&self.files[0], &mut buffer, host, file_bytes)?;
        Ok(buffer)
    }

    fn decompress(&self, host: u64, bytes: u64) -> io::Result<Vec<u8>> {
        let (align, method, cluster_bytes) = {
            let state = lock(&self.shared.state);
            let header = &state.top()?.header;
            (state.layers[0].align, header.compression, header.cluster_bytes() as usize)
        };
        let begin = host - host % align;
        let buffer = self.read_host(begin, (host + bytes).next_multiple_of(align) - begin)?;
        let first = (host - begin) as usize;
        let compressed = Compressed { buffer, range: first..first + bytes as usize, method, cluster_bytes };
        Ok(compressed.inflate()?)
    }
}

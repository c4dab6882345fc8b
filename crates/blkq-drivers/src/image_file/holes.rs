//! Reports which bytes of the device are data and which are holes of the file.
//!
//! A file may be truncated while it is served. Reads beyond its end fail, so these bytes are reported as data: a client
//! that copies the device then reads them and gets the error.

use std::io;
use std::ops::Range;

use blkq::Extent;
use blkq::clock::worker_ns;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::extents::append;

use super::file::ImageFile;

impl ImageFile {
    /// The extents of `range`, in bytes of a device that begins at byte `offset` of the file; at most `max`.
    /// Holes are narrowed to whole sectors. The search ends when the time `until_ns` has passed, but not before it has
    /// found an extent.
    pub fn extents(
        &self,
        offset: u64,
        logical_block_bytes: u64,
        range: Range<u64>,
        max: usize,
        until_ns: u64,
    ) -> io::Result<Vec<Extent>> {
        let file = &self.file;
        let end = offset + range.end;
        let mut at = offset + range.start;
        let mut extents: Vec<Extent> = Vec::new();
        let mut advance = |until: u64, at: &mut u64, hole: bool| {
            let length = until - *at;
            *at = until;
            append(&mut extents, Extent { length, hole, zero: hole }, max)
        };
        // Round a position in the file to a sector of the device.
        let down = |position: u64| offset + (position - offset) / logical_block_bytes * logical_block_bytes;
        let up =
            |position: u64| offset + (position - offset).div_ceil(logical_block_bytes) * logical_block_bytes;
        while at < end {
            let data = match seek(file, SeekFrom::Data(at)) {
                Ok(data) => down(data).clamp(at, end),
                Err(Errno::NXIO) => {
                    // The size is read after the search, so that a truncation before the search is not reported as
                    // a hole.
                    let file_end = seek(file, SeekFrom::End(0))?;
                    let hole_end =
                        if file_end < end { down(file_end.max(offset)).clamp(at, end) } else { end };
                    if advance(hole_end, &mut at, true) {
                        advance(end, &mut at, false);
                    }
                    break;
                }
                // The file system does not support SEEK_DATA.
                Err(Errno::INVAL | Errno::OPNOTSUPP) => at,
                Err(error) => return Err(error.into()),
            };
            if !advance(data, &mut at, true) || at == end {
                break;
            }
            let hole = match seek(file, SeekFrom::Hole(at)) {
                Ok(hole) => up(hole).clamp(at, end),
                Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => end,
                Err(error) => return Err(error.into()),
            };
            // If the file changes between the two searches, the second one may not advance. Reporting one sector as
            // data guarantees progress.
            let hole = if hole == at { up(at + 1).min(end) } else { hole };
            if !advance(hole, &mut at, false) || worker_ns() >= until_ns {
                break;
            }
        }
        Ok(extents)
    }
}

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
        let end = offset + range.end;
        let mut at = offset + range.start;
        let mut extents: Vec<Extent> = Vec::new();
        // Round a position in the file to a sector of the device.
        let down = |position: u64| offset + (position - offset) / logical_block_bytes * logical_block_bytes;
        let up =
            |position: u64| offset + (position - offset).div_ceil(logical_block_bytes) * logical_block_bytes;
        // Holes and data alternate. The hole at the beginning may be empty.
        let mut hole = true;
        while at < end {
            let from = if hole { SeekFrom::Data(at) } else { SeekFrom::Hole(at) };
            let until = match (seek(&self.file, from), hole) {
                (Ok(data), true) => down(data),
                // If the file changes between two searches, the second one may not advance. Reporting one sector as data
                // guarantees progress.
                (Ok(hole), false) => up(hole).max(up(at + 1)),
                (Err(Errno::NXIO), true) => {
                    // The size is read after the search, so that a truncation before the search is not reported as
                    // a hole.
                    let file_end = seek(&self.file, SeekFrom::End(0))?;
                    if file_end < end { down(file_end.max(offset)) } else { end }
                }
                // The file system does not support SEEK_DATA.
                (Err(Errno::INVAL | Errno::OPNOTSUPP), true) => at,
                (Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP), false) => end,
                (Err(error), _) => return Err(error.into()),
            };
            let until = until.clamp(at, end);
            let is_appended = append(&mut extents, Extent { length: until - at, hole, zero: hole }, max);
            if !is_appended || !hole && worker_ns() >= until_ns {
                break;
            }
            (at, hole) = (until, !hole);
        }
        Ok(extents)
    }
}

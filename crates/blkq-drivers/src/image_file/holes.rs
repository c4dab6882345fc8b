//! Reports which bytes of the device are data and which are holes of the file.
//!
//! A file may be truncated while it is served. Reads beyond its end fail, so these bytes are reported as data: a client
//! that copies the device then reads them and gets the error.

use std::fs::File;
use std::io;
use std::ops::Range;

use blkq::Extent;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

pub(super) fn of_file(
    file: &File,
    offset: u64,
    logical_block_bytes: u64,
    range: Range<u64>,
    max: usize,
) -> io::Result<Vec<Extent>> {
    let end = offset + range.end;
    let mut at = offset + range.start;
    let mut extents: Vec<Extent> = Vec::new();
    let mut append = |until: u64, at: &mut u64, hole: bool| {
        let length = until - *at;
        *at = until;
        match extents.last_mut() {
            _ if length == 0 => true,
            Some(last) if last.hole == hole => {
                last.length += length;
                true
            }
            _ => {
                let room = extents.len() < max;
                if room {
                    extents.push(Extent { length, hole, zero: hole });
                }
                room
            }
        }
    };
    // Round a position in the file to a sector of the device.
    let down = |position: u64| offset + (position - offset) / logical_block_bytes * logical_block_bytes;
    let up = |position: u64| offset + (position - offset).div_ceil(logical_block_bytes) * logical_block_bytes;
    while at < end {
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => down(data).clamp(at, end),
            Err(Errno::NXIO) => {
                // The size is read after the search, so that a truncation before the search is not reported as
                // a hole.
                let file_end = seek(file, SeekFrom::End(0))?;
                let hole_end = if file_end < end { down(file_end.max(offset)).clamp(at, end) } else { end };
                if append(hole_end, &mut at, true) {
                    append(end, &mut at, false);
                }
                break;
            }
            // The file system does not support SEEK_DATA.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => at,
            Err(error) => return Err(error.into()),
        };
        if !append(data, &mut at, true) || at == end {
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
        if !append(hole, &mut at, false) {
            break;
        }
    }
    Ok(extents)
}

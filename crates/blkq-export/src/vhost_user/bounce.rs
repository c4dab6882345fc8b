//! Copies data between a guest's memory and a buffer whose alignment the disk accepts.

use std::ops::Range;
use std::ptr::NonNull;

use blkq::Data;

use super::memory::Span;

/// Copies `guest` to the beginning of `buffer`, until one of the two ends, and reads each byte once.
pub fn copy_in(guest: &Data, buffer: &mut [u8]) {
    for_each(guest, buffer.len(), |span, part| span.copy_to(&mut buffer[part]));
}

/// Copies the beginning of `buffer` to the memory of `guest`, until one of the two ends.
pub fn copy_out(buffer: &[u8], guest: &Data) {
    for_each(guest, buffer.len(), |span, part| span.copy_from(&buffer[part]));
}

/// Calls `copy` for each segment of the first `bytes` bytes, with its place in the data.
fn for_each(guest: &Data, bytes: usize, mut copy: impl FnMut(Span<'_>, Range<usize>)) {
    let Data::Segments(owner) = guest else { return };
    let mut at = 0;
    for segment in owner.segments() {
        let end = bytes.min(at + segment.len as usize);
        if let Some(start) = NonNull::new(segment.ptr) {
            // SAFETY: the owner of the segment keeps it mapped.
            copy(unsafe { Span::new(start, segment.len) }, at..end);
        }
        at = end;
    }
}

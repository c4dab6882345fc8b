//! Copies data between a guest's memory and a buffer whose alignment the disk accepts.

use blkq::{Data, Segment};

/// A word at an unaligned address.
#[repr(C, packed)]
#[derive(Clone, Copy)]
struct Unaligned(u64);

/// Copies `guest` to the beginning of `buffer`, until one of the two ends, and reads each byte once.
pub fn copy_in(guest: &Data, buffer: &mut [u8]) {
    for_each(guest, buffer.len(), |start, at, bytes| {
        let to = &mut buffer[at..at + bytes];
        let mut words = to.chunks_exact_mut(8);
        let mut from = start;
        for word in &mut words {
            // SAFETY: the word is inside the segment, which its owner keeps mapped. The read is volatile,
            // because the guest may write to the segment at the same time.
            let value = unsafe { from.cast::<Unaligned>().read_volatile() };
            word.copy_from_slice(&value.0.to_ne_bytes());
            // SAFETY: the result is at most one byte past the end of the segment.
            from = unsafe { from.add(8) };
        }
        for byte in words.into_remainder() {
            // SAFETY: the byte is inside the segment, as above.
            (*byte, from) = unsafe { (from.read_volatile(), from.add(1)) };
        }
    });
}

/// Copies the beginning of `buffer` to the memory of `guest`, until one of the two ends.
pub fn copy_out(buffer: &[u8], guest: &Data) {
    for_each(guest, buffer.len(), |start, at, bytes| {
        let words = buffer[at..at + bytes].chunks_exact(8);
        let mut to = start;
        let rest = words.remainder();
        for word in words {
            let mut value = [0; 8];
            value.copy_from_slice(word);
            // SAFETY: as in `copy_in`.
            unsafe { to.cast::<Unaligned>().write_volatile(Unaligned(u64::from_ne_bytes(value))) };
            // SAFETY: as in `copy_in`.
            to = unsafe { to.add(8) };
        }
        for byte in rest {
            // SAFETY: as in `copy_in`.
            unsafe { to.write_volatile(*byte) };
            // SAFETY: as in `copy_in`.
            to = unsafe { to.add(1) };
        }
    });
}

/// Calls `piece` for each segment of the first `bytes` bytes: address, offset in the data, length.
fn for_each(guest: &Data, bytes: usize, mut piece: impl FnMut(*mut u8, usize, usize)) {
    let Data::Segments(owner) = guest else { return };
    let mut at = 0;
    for &Segment { ptr, len, .. } in owner.segments() {
        let len = (len as usize).min(bytes - at);
        piece(ptr, at, len);
        at += len;
    }
}

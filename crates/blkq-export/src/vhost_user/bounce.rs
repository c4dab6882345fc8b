//! Data on its way between a guest's memory and a buffer that the disk can use.

use blkq::{Data, IoBuffer, Segment};

use crate::buffers::{BUFFER_MAX_BYTES, BufferPool};

/// A word at any address.
#[repr(C, packed)]
#[derive(Clone, Copy)]
struct Unaligned(u64);

/// Copies the guest's bytes, each read once, to the begin of `buffer`, as far as it goes.
pub fn copy_in(guest: &Data, buffer: &mut [u8]) {
    for_each(guest, buffer.len(), |start, at, bytes| {
        let to = &mut buffer[at..at + bytes];
        let mut words = to.chunks_exact_mut(8);
        let mut from = start;
        for word in &mut words {
            // SAFETY: inside the segment, which its owner keeps mapped; the guest may write to it
            // meanwhile, so it is read by volatile words.
            let value = unsafe { from.cast::<Unaligned>().read_volatile() };
            word.copy_from_slice(&value.0.to_ne_bytes());
            // SAFETY: at most one byte past the end of the segment.
            from = unsafe { from.add(8) };
        }
        for byte in words.into_remainder() {
            // SAFETY: as above.
            (*byte, from) = unsafe { (from.read_volatile(), from.add(1)) };
        }
    });
}

/// Copies the begin of `buffer` to the guest's memory, as far as that goes.
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

/// Calls with the begin of each segment of `guest`, how many bytes are before it, and how many it has,
/// for `bytes` of them.
fn for_each(guest: &Data, bytes: usize, mut piece: impl FnMut(*mut u8, usize, usize)) {
    let Data::Segments(owner) = guest else { return };
    let mut at = 0;
    for &Segment { ptr, len, .. } in owner.segments() {
        let len = (len as usize).min(bytes - at);
        piece(ptr, at, len);
        at += len;
    }
}

/// Bytes of buffers in use from which on no more requests are taken: a guest with little memory may
/// name it in many of them.
const IN_USE_MAX_BYTES: u64 = 2 * BUFFER_MAX_BYTES as u64;

/// Where buffers come from.
pub struct Bounces {
    pool: BufferPool,
    in_use_bytes: u64,
}

impl Bounces {
    /// Without buffers.
    pub fn new() -> Bounces {
        Bounces { pool: BufferPool::new(), in_use_bytes: 0 }
    }

    /// A buffer of at least `bytes`; `None` if there is no memory, or that is more than
    /// [`BUFFER_MAX_BYTES`].
    pub fn take(&mut self, bytes: u32, ring: blkq::Registrar<'_>) -> Option<IoBuffer> {
        if bytes > BUFFER_MAX_BYTES {
            return None;
        }
        let buffer = self.pool.take(bytes, ring)?;
        self.in_use_bytes += buffer.len() as u64;
        Some(buffer)
    }

    /// Takes back a buffer.
    pub fn put(&mut self, buffer: IoBuffer) {
        self.in_use_bytes -= buffer.len() as u64;
        self.pool.put(buffer);
    }

    /// Whether no more requests are to be taken until a buffer comes back.
    pub fn is_exhausted(&self) -> bool {
        self.in_use_bytes >= IN_USE_MAX_BYTES
    }

    /// Whether there is memory to release.
    pub fn is_idle(&self) -> bool {
        self.pool.is_idle()
    }

    /// Releases it.
    pub fn trim(&mut self, ring: blkq::Registrar<'_>) {
        self.pool.trim(ring);
    }
}

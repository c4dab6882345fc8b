//! The record of what is in flight (vhost-user, "Inflight I/O tracking"): memory that the front end
//! keeps while a daemon dies and another one takes its place, which resubmits exactly what the driver
//! does not know to be used.
//!
//! Stores are in the order of the specification, each of them atomic: a daemon may die between any
//! two. All that is read at the start is checked, as the front end may have written it; later nothing
//! is read.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkq::{Error, ErrorKind};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::area::Area;
use crate::mapping::Mapping;

/// Regions of queues begin at multiples of this.
const ALIGN: u64 = 64;
/// Bytes before the records, and of a record, of a split ring.
const SPLIT: (u64, u64) = (16, 16);
/// The same of a packed ring.
const PACKED: (u64, u64) = (32, 32);
/// Where a queue's region has its version, which is 0 in a new one.
pub(super) const VERSION: usize = 8;
/// Most queues of a device.
const QUEUES_MAX: u16 = 256;

/// Bytes behind the regions of the queues, of this program's own: a mark, and whether the driver has a
/// write cache. Front ends do not send that again to the next daemon.
const TRAILER_BYTES: u64 = 64;
const TRAILER_MARK: u64 = u64::from_le_bytes(*b"blkq-wce");
const WRITE_CACHE_AT: usize = 8;

/// Descriptors for each queue in a new record, for a front end that asks for `size`. QEMU asks for as many as its
/// option queue-size says, by default 128, but on virtio-mmio the driver may use rings of 1024.
pub fn recorded_size(size: u16) -> u16 {
    size.max(1024)
}

/// Bytes of a queue's region.
fn queue_bytes(size: u16, packed: bool) -> u64 {
    let (header, record) = if packed { PACKED } else { SPLIT };
    (header + record * u64::from(size)).next_multiple_of(ALIGN)
}

/// The record of a device: a region for each of its queues.
pub struct InflightRegion {
    mapping: Arc<Mapping>,
    queues: u16,
    size: u16,
    packed: bool,
    /// None in a record of another program.
    trailer: Option<Area>,
}

impl InflightRegion {
    /// A new one, of zeroes, for `queues` of `size` descriptors; the file is for the front end, and has
    /// [`InflightRegion::bytes`].
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for no queues, too many, or none of a size; and the kernel's error.
    pub fn create(queues: u16, size: u16, packed: bool) -> Result<(InflightRegion, OwnedFd), Error> {
        check(queues, size)?;
        let bytes = u64::from(queues) * queue_bytes(size, packed) + TRAILER_BYTES;
        let failed = |e| Error::system("cannot make memory for the requests in flight", e);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("blkq-inflight", flags).map_err(failed)?;
        ftruncate(&file, bytes).map_err(failed)?;
        fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL).map_err(failed)?;
        let mapping = Arc::new(Mapping::new(file.as_fd(), 0, bytes)?);
        let trailer = Some(trailer_of(&mapping, bytes));
        Ok((InflightRegion { mapping, queues, size, packed, trailer }, file))
    }

    /// The one that the front end kept: `bytes` of `file` from `offset` on.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if it is too small for that many queues of that size; whatever
    /// [`Mapping::new`] refuses.
    pub fn open(
        file: OwnedFd,
        offset: u64,
        bytes: u64,
        queues: u16,
        size: u16,
        packed: bool,
    ) -> Result<InflightRegion, Error> {
        check(queues, size)?;
        let needed = u64::from(queues) * queue_bytes(size, packed);
        if bytes < needed || !offset.is_multiple_of(ALIGN) {
            return Err(invalid(format!(
                "{bytes} bytes at {offset} for {queues} queues of {size} descriptors"
            )));
        }
        let has_trailer = bytes >= needed + TRAILER_BYTES;
        let mapped = if has_trailer { needed + TRAILER_BYTES } else { needed };
        let mapping = Arc::new(Mapping::new(file.as_fd(), offset, mapped)?);
        let trailer = has_trailer.then(|| trailer_of(&mapping, mapped));
        Ok(InflightRegion { mapping, queues, size, packed, trailer })
    }

    /// The descriptors for each queue in a record of `bytes` that the front end kept, which says `size`: those of
    /// [`recorded_size`] if this program made it.
    pub fn kept_size(bytes: u64, queues: u16, size: u16, packed: bool) -> u16 {
        let recorded = recorded_size(size);
        let is_own = bytes == u64::from(queues) * queue_bytes(recorded, packed) + TRAILER_BYTES;
        if is_own { recorded } else { size }
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        let queues = u64::from(self.queues) * queue_bytes(self.size, self.packed);
        queues + if self.trailer.is_some() { TRAILER_BYTES } else { 0 }
    }

    /// Whether the driver has a write cache, if a daemon has noted that.
    pub fn write_cache(&self) -> Option<bool> {
        let trailer = self.trailer.as_ref()?;
        let is_noted = trailer.load_u64(0, Ordering::Acquire) == TRAILER_MARK;
        is_noted.then(|| trailer.load_u64(WRITE_CACHE_AT, Ordering::Relaxed) != 0)
    }

    /// Notes for the next daemon whether the driver has a write cache.
    pub fn set_write_cache(&self, on: bool) {
        if let Some(trailer) = &self.trailer {
            trailer.store_u64(WRITE_CACHE_AT, on.into(), Ordering::Relaxed);
            trailer.store_u64(0, TRAILER_MARK, Ordering::Release);
        }
    }

    /// Forgets all requests: no ring uses it now, and the next ones begin anew.
    pub fn clear(&self) {
        for index in 0..self.queues {
            if let Some(queue) = self.queue(index, self.size, self.packed) {
                queue.area.store_u16(VERSION, 0, Ordering::Release);
            }
        }
    }

    /// The record of queue `index`, for a ring of `size` descriptors of that kind; `None` if there is
    /// none, or not for such a ring.
    pub fn queue(&self, index: u16, size: u16, packed: bool) -> Option<InflightQueue> {
        if index >= self.queues || size > self.size || packed != self.packed {
            return None;
        }
        let bytes = queue_bytes(self.size, packed);
        let start = u64::from(index) * bytes;
        // SAFETY: inside the mapping, which has `queues` times as much.
        let start = unsafe { self.mapping.start().add(start as usize) };
        // SAFETY: the mapping has these bytes, and a region begins at a multiple of 64 of it.
        let area = unsafe { Area::new(Arc::clone(&self.mapping), start, bytes as usize) };
        Some(InflightQueue { area, size })
    }
}

/// The last bytes of a region of `bytes`.
fn trailer_of(mapping: &Arc<Mapping>, bytes: u64) -> Area {
    // SAFETY: the region has these bytes at its end.
    let start = unsafe { mapping.start().add((bytes - TRAILER_BYTES) as usize) };
    // SAFETY: inside the mapping; regions of queues, and so this, begin at multiples of 64 of it.
    unsafe { Area::new(Arc::clone(mapping), start, TRAILER_BYTES as usize) }
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::Invalid, format!("requests in flight: {what}"))
}

fn check(queues: u16, size: u16) -> Result<(), Error> {
    if queues == 0 || queues > QUEUES_MAX || size == 0 || size > 1 << 15 {
        return Err(invalid(format!("{queues} queues of {size} descriptors")));
    }
    Ok(())
}

/// The record of one queue, not yet used.
pub struct InflightQueue {
    pub(super) area: Area,
    /// Records that are used: one for each descriptor of the ring.
    pub(super) size: u16,
}

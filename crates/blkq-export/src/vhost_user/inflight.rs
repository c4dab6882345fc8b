//! The record of requests in flight (vhost-user, "Inflight I/O tracking"): memory that the front end keeps
//! when a daemon is killed. The next daemon submits the requests again that the driver does not see as used.
//!
//! The stores are atomic and in the order of the specification, because a daemon may be killed between any
//! two. When a daemon opens a record it checks all that it reads, because the front end can write to this
//! memory. Later it reads nothing.
//!
//! Loads are relaxed, because the daemon that wrote the record has exited. A kill leaves the stores that were
//! executed, in the order of the machine code. So a store has release ordering if the next daemon must not
//! find it without the stores before it: that ordering keeps the compiler from reordering them.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkq::{Error, ErrorKind};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::area::Area;
use super::chain::{Descriptor, Head};
use crate::mapping::Mapping;

/// The region of each queue begins at a multiple of this number of bytes.
const ALIGN: u64 = 64;
/// Offset of the version in a queue's region. The version of a new region is 0.
pub(super) const VERSION: usize = 8;
/// Most queues that a record may have.
const QUEUES_MAX: u16 = 256;

/// Size of the trailer that this program adds after the regions of the queues: a mark, and whether the
/// driver has switched the write cache on. Front ends do not send that setting to the next daemon.
const TRAILER_BYTES: u64 = 64;
const TRAILER_MARK: u64 = u64::from_le_bytes(*b"blkq-wce");
const WRITE_CACHE_AT: usize = 8;

/// Descriptors of each queue in a new record. QEMU asks for its property queue-size, 128 by default, but with
/// virtio-mmio the driver may use rings of 1024.
pub fn recorded_size(size: u16) -> u16 {
    size.max(1024)
}

fn queue_bytes(size: u16, packed: bool) -> u64 {
    // The header of a region has the size of a record.
    let record = if packed { 32 } else { 16 };
    (record * (1 + u64::from(size))).next_multiple_of(ALIGN)
}

pub struct InflightRegion {
    mapping: Arc<Mapping>,
    queues: u16,
    size: u16,
    packed: bool,
    /// `None` if another program created the record.
    trailer: Option<Area>,
}

impl InflightRegion {
    /// Creates a record of zeroes. The front end gets the file, whose first [`InflightRegion::bytes`] the
    /// record takes. Fails with [`ErrorKind::Invalid`] for 0 or more than 256 queues or a size that is not 1
    /// to 32768, and with the kernel's error.
    pub fn create(queues: u16, size: u16, packed: bool) -> Result<(InflightRegion, OwnedFd), Error> {
        let bytes = u64::from(queues) * queue_bytes(size, packed) + TRAILER_BYTES;
        let failed = |e| Error::system("cannot create the memory that records requests in flight", e);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("blkq-inflight", flags).map_err(failed)?;
        ftruncate(&file, bytes).map_err(failed)?;
        fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL).map_err(failed)?;
        Ok((InflightRegion::open(&file, 0, bytes, queues, size, packed)?, file))
    }

    /// Opens a record that the front end kept. Fails with [`ErrorKind::Invalid`] if it is too small for
    /// `queues` queues of `size` descriptors, and as [`Mapping::new`] does.
    pub fn open(
        file: impl AsFd,
        offset: u64,
        bytes: u64,
        queues: u16,
        size: u16,
        packed: bool,
    ) -> Result<InflightRegion, Error> {
        if queues == 0 || queues > QUEUES_MAX || size == 0 || size > 1 << 15 {
            return Err(invalid(format!("it cannot have {queues} queues of {size} descriptors")));
        }
        let needed = u64::from(queues) * queue_bytes(size, packed);
        if bytes < needed || !offset.is_multiple_of(ALIGN) {
            return Err(invalid(format!(
                "{bytes} bytes at offset {offset} do not fit {queues} queues of {size} descriptors"
            )));
        }
        let has_trailer = bytes >= needed + TRAILER_BYTES;
        let mapped = if has_trailer { needed + TRAILER_BYTES } else { needed };
        let mapping = Arc::new(Mapping::new(file.as_fd(), offset, mapped)?);
        let trailer = has_trailer.then(|| area(&mapping, needed, TRAILER_BYTES));
        Ok(InflightRegion { mapping, queues, size, packed, trailer })
    }

    /// Descriptors of each queue in a kept record: [`recorded_size`] if this program created it, else `size`.
    pub fn stored_size(bytes: u64, queues: u16, size: u16, packed: bool) -> u16 {
        let recorded = recorded_size(size);
        let is_own = bytes == u64::from(queues) * queue_bytes(recorded, packed) + TRAILER_BYTES;
        if is_own { recorded } else { size }
    }

    pub fn bytes(&self) -> u64 {
        let queues = u64::from(self.queues) * queue_bytes(self.size, self.packed);
        queues + if self.trailer.is_some() { TRAILER_BYTES } else { 0 }
    }

    /// Whether the driver has switched the write cache on; `None` if no daemon has recorded that.
    pub fn write_cache(&self) -> Option<bool> {
        let trailer = self.trailer.as_ref()?;
        // Acquire, because the mark is stored after the setting that it confirms.
        let is_noted = trailer.load_u64(0, Ordering::Acquire) == TRAILER_MARK;
        is_noted.then(|| trailer.load_u64(WRITE_CACHE_AT, Ordering::Relaxed) != 0)
    }

    pub fn set_write_cache(&self, on: bool) {
        if let Some(trailer) = &self.trailer {
            // The mark confirms the setting, and so is stored after it.
            trailer.store_u64(WRITE_CACHE_AT, on.into(), Ordering::Relaxed);
            trailer.store_u64(0, TRAILER_MARK, Ordering::Release);
        }
    }

    /// Discards all requests. No ring may use the record; the next rings begin with new regions.
    pub fn clear(&self) {
        for index in 0..self.queues {
            if let Some(queue) = self.queue(index, self.size, self.packed) {
                queue.area.store_u16(VERSION, 0, Ordering::Release);
            }
        }
    }

    /// The record of queue `index`; `None` if its region is missing, too small or for the other kind of ring.
    pub fn queue(&self, index: u16, size: u16, packed: bool) -> Option<InflightQueue> {
        if index >= self.queues || size > self.size || packed != self.packed {
            return None;
        }
        let bytes = queue_bytes(self.size, packed);
        Some(InflightQueue { area: area(&self.mapping, u64::from(index) * bytes, bytes), size })
    }
}

/// The region of a queue, or the trailer: the `bytes` bytes of the record from `offset`, a multiple of 64, on.
fn area(mapping: &Arc<Mapping>, offset: u64, bytes: u64) -> Area {
    // SAFETY: the mapping contains the regions of all queues, and the trailer, if there is one.
    let start = unsafe { mapping.start().add(offset as usize) };
    // SAFETY: as above, the bytes are inside the mapping. They begin at a multiple of 64 bytes in it.
    unsafe { Area::new(Arc::clone(mapping), start, bytes as usize) }
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::Invalid, format!("the in-flight table: {what}"))
}

/// The record of one queue, before a ring uses it.
pub struct InflightQueue {
    pub(super) area: Area,
    /// Number of records that the ring uses: one for each of its descriptors.
    pub(super) size: u16,
}

/// A chain that was in flight when the device was killed.
pub struct Recovered {
    /// Gives the order in which chains were taken.
    pub(super) counter: u64,
    pub(super) head: Head,
    /// The descriptors of the chain in a packed ring. In a split ring they are unchanged in the ring.
    pub(super) descriptors: Vec<Descriptor>,
}

/// Sorts the chains, the oldest last, and returns the counter of the next chain.
pub fn sort_recovered(chains: &mut [Recovered]) -> u64 {
    chains.sort_by_key(|chain| chain.counter);
    // Of chains with equal counters, which only a foreign record has, the first is taken first.
    chains.reverse();
    chains.first().map_or(0, |newest| newest.counter.wrapping_add(1))
}

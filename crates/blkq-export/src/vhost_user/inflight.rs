//! The record of what is in flight (vhost-user, "Inflight I/O tracking"): memory that the front end
//! keeps while a daemon dies and another one takes its place, which resubmits exactly what the driver
//! does not know to be used.
//!
//! Stores are in the order of the specification, each of them atomic: a daemon may die between any
//! two. All that is read at the start is checked, as the front end may have written it; later nothing
//! is read.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use blkq::{Error, ErrorKind};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::area::Area;
use super::mapping::Mapping;

/// Regions of queues begin at multiples of this.
const ALIGN: u64 = 64;
/// Bytes before the records, and of a record, of a split ring.
const SPLIT: (u64, u64) = (16, 16);
/// The same of a packed ring.
const PACKED: (u64, u64) = (32, 32);
/// Most queues of a device.
const QUEUES_MAX: u16 = 256;

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
}

impl InflightRegion {
    /// A new one, of zeroes, for `queues` of `size` descriptors; the file is for the front end, and has
    /// [`InflightRegion::bytes`].
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for no queues, too many, or none of a size; whatever the kernel says.
    pub fn create(queues: u16, size: u16, packed: bool) -> Result<(InflightRegion, OwnedFd), Error> {
        check(queues, size)?;
        let bytes = u64::from(queues) * queue_bytes(size, packed);
        let failed = |e| Error::system("cannot make memory for the requests in flight", e);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("blkq-inflight", flags).map_err(failed)?;
        ftruncate(&file, bytes).map_err(failed)?;
        fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL).map_err(failed)?;
        let mapping = Arc::new(Mapping::new(file.as_fd(), 0, bytes)?);
        Ok((InflightRegion { mapping, queues, size, packed }, file))
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
        let mapping = Arc::new(Mapping::new(file.as_fd(), offset, needed)?);
        Ok(InflightRegion { mapping, queues, size, packed })
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        u64::from(self.queues) * queue_bytes(self.size, self.packed)
    }

    /// Whether the front end truncated it.
    pub fn is_broken(&self) -> bool {
        self.mapping.is_broken()
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

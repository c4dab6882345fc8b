//! The end of a device whose size is not whole sectors: its last sector is there in part.
//!
//! The block layer transfers whole sectors. Here the file's end is put in: what is beyond it reads
//! as zeroes, and is never written, so that the file does not grow. Direct I/O cannot transfer a
//! part of a sector: then the last page of the file is read and written through the page cache,
//! always and as a whole, since the kernel keeps the two apart by pages. A request that begins
//! before that page is done in two calls, one after the other.

use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::sync::Arc;

use blkq::{DriverContext, Error, FileSlot, Registrar, Request, Segment, Tag};

/// The end of a device, as its state has it.
#[derive(Clone)]
pub(super) struct TailSettings {
    /// Where calls have to be cut, in bytes of the device; `u64::MAX` if its size is whole sectors.
    pub begin: u64,
    /// The device's size in bytes.
    pub size: u64,
    /// The image through the page cache, if the device may have a partial sector.
    pub file: Option<Arc<File>>,
}

impl TailSettings {
    /// Of a device of `size` bytes from byte `offset` of the file on. With direct I/O the unit of the
    /// page cache is `direct_unit` bytes, a power of two.
    pub fn new(
        size: u64,
        logical_block_bytes: u64,
        offset: u64,
        direct_unit: Option<u64>,
        file: Option<&Arc<File>>,
    ) -> Self {
        let begin = match direct_unit {
            _ if size.is_multiple_of(logical_block_bytes) => u64::MAX,
            Some(unit) => ((offset + size) & !(unit - 1)).saturating_sub(offset),
            None => size - size % logical_block_bytes,
        };
        TailSettings { begin, size, file: file.cloned() }
    }
}

/// The end of a device on one ring.
pub(super) struct Tail {
    settings: TailSettings,
    direct: bool,
    slot: Option<FileSlot>,
}

impl Tail {
    /// Registers what it needs. `direct` is whether the rest of the device bypasses the page cache.
    pub fn open(settings: TailSettings, direct: bool, ring: &mut Registrar<'_>) -> Result<Tail, Error> {
        let slot = settings.file.as_ref().map(|file| ring.register_file(file.as_fd())).transpose()?;
        Ok(Tail { settings, direct, slot })
    }

    /// Takes over new settings.
    ///
    /// # Errors
    /// If its file cannot be registered; the old one stays.
    pub fn reload(
        &mut self,
        settings: TailSettings,
        direct: bool,
        ring: Option<Registrar<'_>>,
    ) -> Result<(), Error> {
        let same = match (&self.settings.file, &settings.file) {
            (Some(old), Some(new)) => Arc::ptr_eq(old, new),
            (old, new) => old.is_none() && new.is_none(),
        };
        if let Some(mut ring) = ring.filter(|_| !same) {
            let new = Tail::open(settings.clone(), direct, &mut ring);
            // The size is the new one in any case.
            (self.settings.begin, self.settings.size) = (settings.begin, settings.size);
            self.direct = direct;
            let mut old = std::mem::replace(self, new?);
            old.close(&mut ring);
            return Ok(());
        }
        (self.settings, self.direct) = (settings, direct);
        Ok(())
    }

    /// Takes its file off the ring.
    pub fn close(&mut self, ring: &mut Registrar<'_>) {
        if let Some(slot) = &mut self.slot {
            ring.unregister_file(slot);
        }
    }

    /// Whether what fdatasync does not write back is lost with direct I/O too.
    pub fn is_cached(&self) -> bool {
        self.slot.is_some()
    }

    /// Whether `request` is about it.
    #[inline]
    pub fn has(&self, request: &Request) -> bool {
        request.offset() + request.bytes() > self.settings.begin
    }

    /// The bytes of `request`, which is about it, that the device has.
    pub fn bytes(&self, request: &Request) -> u64 {
        request.bytes().min(self.settings.size.saturating_sub(request.offset()))
    }

    /// The end of the call that continues `request`, which is about it, from byte `done` on, in
    /// bytes of the request.
    pub fn until(&self, request: &Request, done: u64) -> u64 {
        if self.is_apart(request, done) {
            self.bytes(request)
        } else {
            self.settings.begin - request.offset()
        }
    }

    /// The file for that call, if it is not that of the device.
    pub fn slot(&self, request: &Request, done: u64) -> Option<&FileSlot> {
        self.slot.as_ref().filter(|_| self.direct && self.is_apart(request, done))
    }

    fn is_apart(&self, request: &Request, done: u64) -> bool {
        !self.direct || request.offset() + done >= self.settings.begin
    }

    /// Zeroes the memory of a read, which is about it, behind the bytes that the device has.
    pub fn clear_padding(&self, cx: &DriverContext<'_>, tag: Tag) {
        let mut keep = self.bytes(cx.request(tag));
        cx.for_each_segment(tag, |segment| {
            let kept = keep.min(u64::from(segment.len));
            keep -= kept;
            let (kept, len) = (kept as usize, segment.len as usize);
            // SAFETY: the memory of a read that has not completed is valid and ours to fill.
            unsafe { segment.ptr.add(kept).write_bytes(0, len - kept) }
        });
    }
}

/// Shortens a call that has memory in the first `count` of `iovecs` by `excess` bytes, less than all
/// of it. Returns the new count and the last piece.
pub(super) fn cut(
    iovecs: &mut [MaybeUninit<libc::iovec>],
    mut count: usize,
    mut excess: u64,
) -> (usize, Segment) {
    loop {
        // SAFETY: the caller has written the first `count`.
        let last = unsafe { iovecs[count - 1].assume_init_mut() };
        if excess < last.iov_len as u64 || count == 1 {
            last.iov_len -= excess as usize;
            let (ptr, len) = (last.iov_base.cast(), last.iov_len as u32);
            return (count, Segment::new(ptr, len));
        }
        excess -= last.iov_len as u64;
        count -= 1;
    }
}

//! The end of a device whose size is not a multiple of the sector size.
//!
//! The block layer transfers whole sectors. This module cuts transfers at the end of the file: bytes beyond it read
//! as zeroes and are never written, so the file does not grow.
//!
//! Direct I/O cannot transfer a part of a sector. With direct I/O the last page of the device is therefore always
//! read and written through the page cache. No direct I/O ever touches that page, because the kernel keeps the page
//! cache and direct I/O coherent by whole pages only. A request that begins before that page takes two calls, one
//! after the other.
//!
//! A request *reaches the tail* if it extends beyond [`TailSettings::begin`].

use std::sync::Arc;

use blkq::{DriverContext, Error, FileSlot, Registrar, Request, Tag};

use crate::image_file::ImageFile;

#[derive(Clone)]
pub(super) struct TailSettings {
    /// Offset in the device at which calls must be cut: with direct I/O at the unit of the page cache that contains
    /// the end. `u64::MAX` if the size is a multiple of the sector size.
    pub begin: u64,
    pub size: u64,
    /// The rest of the device uses direct I/O.
    pub direct: bool,
    pub file: Option<Arc<ImageFile>>,
}

pub(super) struct Tail {
    settings: TailSettings,
    slot: Option<FileSlot>,
}

impl Tail {
    pub fn open(settings: TailSettings, ring: &mut Registrar<'_>) -> Result<Tail, Error> {
        let slot = settings.file.as_ref().map(|file| ring.register_file(file.ring_file())).transpose()?;
        Ok(Tail { settings, slot })
    }

    /// If a new file cannot be registered with the ring, the old file stays registered, but the new size
    /// applies.
    pub fn reload(&mut self, settings: TailSettings, ring: Option<Registrar<'_>>) -> Result<(), Error> {
        let pointer = |settings: &TailSettings| settings.file.as_ref().map(Arc::as_ptr);
        let same = pointer(&self.settings) == pointer(&settings);
        // The new size applies even if the registration below fails.
        self.settings = TailSettings { file: self.settings.file.take(), ..settings.clone() };
        if let Some(mut ring) = ring.filter(|_| !same) {
            let new = Tail::open(settings.clone(), &mut ring)?;
            std::mem::replace(self, new).close(&mut ring);
        }
        self.settings = settings;
        Ok(())
    }

    pub fn close(&mut self, ring: &mut Registrar<'_>) {
        if let Some(slot) = &mut self.slot {
            ring.unregister_file(slot);
        }
    }

    /// Whether writes to the tail go through the page cache although the device uses direct I/O.
    pub fn is_cached(&self) -> bool {
        self.slot.is_some()
    }

    #[inline]
    pub fn is_reached_by(&self, request: &Request) -> bool {
        request.offset() + request.bytes() > self.settings.begin
    }

    /// The number of bytes of `request` that are within the device. The request must reach the tail.
    pub fn bytes(&self, request: &Request) -> u64 {
        request.bytes().min(self.settings.size.saturating_sub(request.offset()))
    }

    /// The end of the call that continues `request` at byte `done`, in bytes of the request, which reaches
    /// the tail.
    pub fn until(&self, request: &Request, done: u64) -> u64 {
        if self.is_apart(request, done) {
            self.bytes(request)
        } else {
            self.settings.begin - request.offset()
        }
    }

    /// The buffered file, if the call that continues `request` at byte `done` must use it.
    pub fn slot(&self, request: &Request, done: u64) -> Option<&FileSlot> {
        self.slot.as_ref().filter(|_| self.settings.direct && self.is_apart(request, done))
    }

    fn is_apart(&self, request: &Request, done: u64) -> bool {
        !self.settings.direct || request.offset() + done >= self.settings.begin
    }

    /// Zeroes the memory of a read beyond the end of the device. The request must reach the tail.
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

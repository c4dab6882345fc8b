//! The files of the image that one queue has registered with its ring, and the submissions to them.

use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::sync::Arc;

use blkq::sync::atomic::Ordering::Relaxed;
use blkq::{BioFlags, DriverContext, Error, FileSlot, IoBuffer, Operation, Registrar, Request, Segment, Tag};
use io_uring::{opcode, squeue, types};

use crate::image_file::ImageFile;

use super::shared::{QueueSettings, SEGMENTS_MAX, Shared};
use super::tail::Tail;

/// Size of the scratch buffer in bytes: the largest alignment of direct I/O, which is the largest logical block.
const SCRATCH_BYTES: usize = 4096;
/// `BLOCK_URING_CMD_DISCARD` of <linux/blkdev.h>: `_IO(0x12, 0)`, since Linux 6.12.
const BLOCK_URING_CMD_DISCARD: u32 = 0x12 << 8;

/// The registered files, and the memory that submissions need.
pub(super) struct Image {
    file: Arc<ImageFile>,
    slot: FileSlot,
    /// The open file that is used for flushes: see [`Shared::synced_by`].
    synced: FileSlot,
    /// The unit of offsets and lengths in bytes, in which a direct transfer can continue; 1 for buffered I/O.
    pub align: u64,
    pub tail: Tail,
    /// Whether the kernel supports vectored calls on registered memory (Linux 6.15).
    vectors_registered: bool,
    /// Arguments of the vectored calls in flight: [`SEGMENTS_MAX`] for each tag. The array stays uninitialised, so
    /// that the kernel allocates no pages for tags that are never used.
    iovecs: Box<[MaybeUninit<libc::iovec>]>,
    /// The target of the reads of [`Image::end_entry`]. Its content is never used.
    scratch: IoBuffer,
}

impl Image {
    pub fn open(
        shared: &Shared,
        queue: u16,
        settings: QueueSettings,
        tags: usize,
        ring: &mut Registrar<'_>,
    ) -> Result<Image, Error> {
        let synced = shared.synced_by(queue)?.as_fd();
        let mut slot = ring.register_file(settings.file.ring_file())?;
        let mut synced = ring.register_file(synced).inspect_err(|_| ring.unregister_file(&mut slot))?;
        let tail = Tail::open(settings.tail, ring).inspect_err(|_| {
            ring.unregister_file(&mut slot);
            ring.unregister_file(&mut synced);
        })?;
        Ok(Image {
            file: settings.file,
            slot,
            synced,
            align: settings.align,
            tail,
            vectors_registered: ring.supports(opcode::ReadvFixed::CODE)
                && ring.supports(opcode::WritevFixed::CODE),
            iovecs: Box::new_uninit_slice(tags * usize::from(SEGMENTS_MAX)),
            scratch: IoBuffer::zeroed(SCRATCH_BYTES),
        })
    }

    /// Applies changed settings, such as another file or I/O mode. No request may be in flight. If a new file
    /// cannot be registered with the ring, the old file stays in use.
    pub fn reload(&mut self, settings: QueueSettings, cx: &mut DriverContext<'_>) -> Result<(), Error> {
        self.align = settings.align;
        let tail = self.tail.reload(settings.tail, cx.registrar());
        if !Arc::ptr_eq(&self.file, &settings.file)
            && let Some(mut ring) = cx.registrar()
        {
            let slot = ring.register_file(settings.file.ring_file())?;
            ring.unregister_file(&mut self.slot);
            self.slot = slot;
            self.file = settings.file;
        }
        tail
    }

    pub fn close(&mut self, ring: &mut Registrar<'_>) {
        ring.unregister_file(&mut self.slot);
        ring.unregister_file(&mut self.synced);
        self.tail.close(ring);
    }

    /// Leaks the memory that calls in flight may still use: the kernel reads the arguments and writes the scratch
    /// buffer.
    pub fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.iovecs));
        std::mem::forget(std::mem::replace(&mut self.scratch, IoBuffer::zeroed(0)));
    }

    /// Whether writes, or at least those to the tail, go through the page cache.
    pub fn is_cached(&self) -> bool {
        self.align == 1 || self.tail.is_cached()
    }

    /// The number of bytes of `request` that are within the device.
    pub fn bytes(&self, request: &Request) -> u64 {
        if self.tail.is_reached_by(request) { self.tail.bytes(request) } else { request.bytes() }
    }

    /// The submission that continues a call at byte `done`. The call consists of the requests `tags`, which are
    /// adjacent in this order.
    pub fn entry(
        &mut self,
        cx: &DriverContext<'_>,
        shared: &Shared,
        tags: &[Tag],
        done: u64,
    ) -> squeue::Entry {
        let first = tags[0];
        let request = cx.request(first);
        let (operation, flags) = (request.operation(), request.flags());
        let bytes = self.bytes(request);
        let offset = shared.window.offset + request.offset() + done;
        let file = cx.file(&self.slot);
        let fallocate = |mode| opcode::Fallocate::new(file, bytes).offset(offset).mode(mode).build();
        let punch_hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        match operation {
            Operation::Flush => {
                opcode::Fsync::new(cx.file(&self.synced)).flags(types::FsyncFlags::DATASYNC).build()
            }
            Operation::Read | Operation::Write => self.transfer_entry(cx, tags, offset, done),
            Operation::WriteZeroes if done > 0 => self.end_entry(cx, cx.request(first), offset),
            Operation::Discard => {
                let range = shared.discard_range(request.offset(), bytes);
                let bytes = range.end - range.start;
                if !shared.discard_by_command.load(Relaxed) {
                    return opcode::Fallocate::new(file, bytes).offset(range.start).mode(punch_hole).build();
                }
                let mut length = [0; 16];
                length[..8].copy_from_slice(&bytes.to_ne_bytes());
                opcode::UringCmd16::new(file, BLOCK_URING_CMD_DISCARD)
                    .addr(Some(range.start))
                    .cmd(length)
                    .build()
            }
            Operation::WriteZeroes if flags.contains(BioFlags::NO_UNMAP) => {
                fallocate(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE)
            }
            Operation::WriteZeroes => fallocate(punch_hole),
        }
    }

    /// A read of the last bytes before `end`, after fallocate(2) has zeroed a range that ends there. If the file has
    /// become shorter, fallocate(2) does nothing beyond its end and still succeeds. Only a short read reveals this.
    fn end_entry(&mut self, cx: &DriverContext<'_>, request: &Request, end: u64) -> squeue::Entry {
        let in_tail = self.tail.is_reached_by(request);
        let apart = if in_tail { self.tail.slot(request, request.bytes()) } else { None };
        let file = cx.file(apart.unwrap_or(&self.slot));
        let unit = self.end_unit(request);
        opcode::Read::new(file, self.scratch.as_mut_ptr(), unit as u32).offset(end - unit).build()
    }

    pub fn end_unit(&self, request: &Request) -> u64 {
        if self.tail.is_reached_by(request) { 1 } else { self.align }
    }

    /// The submission that transfers `tags` from byte `done`, which is at `offset` of the file. If there are more
    /// segments than the arguments have room for, the call is shorter, and continues as after a short transfer.
    fn transfer_entry(
        &mut self,
        cx: &DriverContext<'_>,
        tags: &[Tag],
        offset: u64,
        done: u64,
    ) -> squeue::Entry {
        let request = cx.request(tags[0]);
        let has_tail = self.tail.is_reached_by(request);
        let apart = if has_tail { self.tail.slot(request, done) } else { None };
        let file = cx.file(apart.unwrap_or(&self.slot));
        let read = request.operation() == Operation::Read;
        let is_durable = !read && request.flags().contains(BioFlags::FUA);
        let rw_flags = if is_durable { libc::RWF_DSYNC } else { 0 };
        macro_rules! transfer {
            ($opcode:ident, $($argument:expr),+) => {
                opcode::$opcode::new(file, $($argument),+).offset(offset).rw_flags(rw_flags).build()
            };
        }
        if let Some(pages) = cx.kernel_pages(tags[0]) {
            let rest = pages.part(done as u32, pages.len() - done as u32);
            let place = std::ptr::without_provenance_mut(rest.offset() as usize);
            return match read {
                true => transfer!(ReadFixed, place, rest.len(), rest.index()),
                false => transfer!(WriteFixed, place, rest.len(), rest.index()),
            };
        }
        let room = usize::from(SEGMENTS_MAX);
        let begin = tags[0].index() * room;
        let iovecs = &mut self.iovecs[begin..begin + room];
        // The bytes before and after the begin of this call.
        let mut skip = done;
        let mut left = if has_tail { self.tail.until(request, done) - done } else { u64::MAX };
        let mut count = 0;
        let mut last = Segment::new(std::ptr::null_mut(), 0);
        // Whether all segments are in one registered buffer.
        let mut together = true;
        for &tag in tags {
            cx.for_each_segment(tag, |mut segment| {
                let skipped = skip.min(u64::from(segment.len));
                skip -= skipped;
                segment.ptr = segment.ptr.wrapping_add(skipped as usize);
                segment.len = left.min(u64::from(segment.len) - skipped) as u32;
                left -= u64::from(segment.len);
                if segment.len > 0
                    && let Some(place) = iovecs.get_mut(count)
                {
                    place.write(libc::iovec { iov_base: segment.ptr.cast(), iov_len: segment.len as usize });
                    together &= count == 0 || last.same_registration(&segment);
                    last = segment;
                    count += 1;
                }
            });
        }
        let Segment { ptr, len, .. } = last;
        let vectors = iovecs.as_ptr().cast();
        let is_reached = count == 1 || together && self.vectors_registered;
        let registered = if is_reached { cx.registered_buffer(&last) } else { None };
        match (read, count, registered) {
            (true, 1, Some(index)) => transfer!(ReadFixed, ptr, len, index),
            (true, 1, None) => transfer!(Read, ptr, len),
            (true, _, Some(index)) => transfer!(ReadvFixed, vectors, count as u32, index),
            (true, _, None) => transfer!(Readv, vectors, count as u32),
            (false, 1, Some(index)) => transfer!(WriteFixed, ptr, len, index),
            (false, 1, None) => transfer!(Write, ptr, len),
            (false, _, Some(index)) => transfer!(WritevFixed, vectors, count as u32, index),
            (false, _, None) => transfer!(Writev, vectors, count as u32),
        }
    }
}

use std::sync::Arc;

use crate::bio::{Bio, BioFlags, Operation};
use crate::buffer::{BUFFER_ALIGN, Data, IoBuffer, Segment};
use crate::clock::monotonic_ns;
use crate::completer::{BioWaiter, Callback, Completer, InlineCallback};
use crate::disk::{Disk, HardwareQueue};
use crate::error::{IoResult, Status};
use crate::limits::QueueLimits;
use crate::remote::gate::{Batcher, Direction};
use crate::remote::software::Staging;
use crate::sector::Sector;

/// Submits bios from any thread. Each thread needs one of its own: create it with [`Disk::submitter`], or
/// clone another.
///
/// The disk's queues must have an owner: an [`EngineThread`](crate::EngineThread), or a thread that polls a
/// [`LocalQueue`](crate::LocalQueue). Without an owner, bios complete with [`Status::Offline`].
pub struct Submitter {
    disk: Arc<Disk>,
    shared: Arc<HardwareQueue>,
    software: usize,
    batcher: Batcher,
    limits: QueueLimits,
    merge: bool,
    generation: u64,
}

impl Clone for Submitter {
    fn clone(&self) -> Submitter {
        self.disk.submitter()
    }
}

impl Disk {
    /// Creates a [`Submitter`], for a thread that owns no queue.
    pub fn submitter(self: &Arc<Self>) -> Submitter {
        let shared = self.hardware_queue(self.next_queue()).clone();
        // Read before the limits, so that `refresh` notices a change made in between.
        let generation = self.control.generation();
        Submitter {
            software: shared.software.assign(),
            shared,
            batcher: Batcher::default(),
            limits: self.limits(),
            merge: self.settings().merge,
            generation,
            disk: self.clone(),
        }
    }
}

impl Submitter {
    /// Submits `bio`, and waits while the device is full. `callback` is called as described at [`Callback`];
    /// if no thread owns the queue, before this method returns. `bio.user_data` is not used.
    pub fn submit(&mut self, bio: Bio, callback: impl FnOnce(IoResult, Data) + Send + 'static) {
        self.stage(bio, Completer::Callback(InlineCallback::new(callback)));
    }

    /// Submits `bio`, or returns it with its callback where [`Submitter::submit`] would wait.
    pub fn try_submit(&mut self, bio: Bio, callback: Callback) -> Result<(), (Bio, Callback)> {
        let direction = Direction::of(bio.operation);
        if !self.disk.gate.try_enter(direction, &mut self.batcher, monotonic_ns) {
            return Err((bio, callback));
        }
        self.push(bio, Completer::Callback(InlineCallback::new(callback)));
        Ok(())
    }

    /// Submits `bio` and waits for its completion.
    pub fn submit_and_wait(&mut self, bio: Bio) -> (IoResult, Data) {
        let waiter = BioWaiter::new();
        let notified = waiter.clone();
        self.submit(bio, move |result, data| notified.notify(result, data));
        waiter.wait()
    }

    /// Applies live changes of the disk. The generation is read first, so that a change made in between is
    /// noticed by the next call.
    fn refresh(&mut self) {
        let generation = self.disk.control.generation();
        if generation != self.generation {
            self.generation = generation;
            self.limits = self.disk.limits();
            self.merge = self.disk.settings().merge;
        }
    }

    fn stage(&mut self, bio: Bio, completer: Completer) {
        self.refresh();
        let (disk, shared) = (&*self.disk, &*self.shared);
        let (direction, batcher) = (Direction::of(bio.operation), &mut self.batcher);
        let limits = self.merge.then_some(&self.limits);
        let may_enter = || disk.gate.try_enter(direction, batcher, monotonic_ns);
        match shared.software.stage(self.software, bio, completer, limits, may_enter) {
            Staging::Merged => {}
            Staging::Pushed => self.notify(),
            Staging::Full(bio, completer) => {
                disk.gate.enter(direction, &mut self.batcher, monotonic_ns, || shared.kick.kick());
                self.push(bio, completer);
            }
        }
    }

    fn push(&self, bio: Bio, completer: Completer) {
        self.shared.software.push(self.software, bio, completer);
        self.notify();
    }

    /// Notifies the owner of the queue of a bio that was staged.
    fn notify(&self) {
        self.shared.kick.kick();
        self.disk.fail_staged_if_closed(&self.shared);
    }

    /// Reads `memory.len()` bytes from byte `offset`. Both must be multiples of the logical block size. Fails
    /// with the status of the I/O.
    pub fn read_at(&mut self, memory: &mut [u8], offset: u64) -> std::io::Result<()> {
        let (ptr, len) = (memory.as_mut_ptr(), memory.len());
        // SAFETY: `memory` is borrowed exclusively until the call returns.
        if let Some(copy) = unsafe { self.transfer(Operation::Read, ptr, len, offset, |_| {})? } {
            memory.copy_from_slice(&copy.into_buffer().ok_or(Status::Io)?);
        }
        Ok(())
    }

    /// Writes `memory` at byte `offset`. Offset and length must be multiples of the logical block size. Fails
    /// with the status of the I/O.
    pub fn write_at(&mut self, memory: &[u8], offset: u64) -> std::io::Result<()> {
        let (ptr, len) = (memory.as_ptr().cast_mut(), memory.len());
        let fill = |copy: &mut IoBuffer| copy.copy_from_slice(memory);
        // SAFETY: `memory` is borrowed until the call returns, and a write only reads it.
        unsafe { self.transfer(Operation::Write, ptr, len, offset, fill)? };
        Ok(())
    }

    /// Makes everything durable that has completed. Fails with the status of the flush.
    pub fn flush(&mut self) -> std::io::Result<()> {
        Ok(self.submit_and_wait(Bio::flush(0)).0?)
    }

    /// Discards `length` bytes from byte `offset`. Fails with the status of the I/O.
    pub fn discard(&mut self, offset: u64, length: u64) -> std::io::Result<()> {
        Ok(self.submit_and_wait(ranged(Operation::Discard, offset, length)?).0?)
    }

    /// Makes `length` bytes from byte `offset` read as zeroes. With `keep_allocated` the blocks stay
    /// allocated. Fails with the status of the I/O.
    pub fn write_zeroes(&mut self, offset: u64, length: u64, keep_allocated: bool) -> std::io::Result<()> {
        let flags = if keep_allocated { BioFlags::NO_UNMAP } else { BioFlags::empty() };
        Ok(self.submit_and_wait(ranged(Operation::WriteZeroes, offset, length)?.with_flags(flags)).0?)
    }

    /// Reads or writes `len` bytes of memory from `ptr` on. If the device cannot use the memory in place, uses a copy
    /// instead, which `fill` initializes, and returns it.
    ///
    /// # Safety
    /// The memory must stay valid, and borrowed as the operation needs it, until the call returns.
    unsafe fn transfer(
        &mut self,
        operation: Operation,
        ptr: *mut u8,
        len: usize,
        offset: u64,
        fill: impl FnOnce(&mut IoBuffer),
    ) -> Result<Option<Data>, Status> {
        if self.may_use(ptr, len) {
            let bio = ranged(operation, offset, len as u64)?;
            // SAFETY: this call returns only after the bio has completed.
            let data = unsafe { Data::borrowed([Segment::new(ptr, len as u32)]) };
            let (result, data) = self.submit_and_wait(Bio { data, ..bio });
            if !matches!(data, Data::Segments(_)) {
                // The owner of the queue panicked with the bio in flight, and the memory was leaked to the
                // kernel. If this call returned or unwound, the caller would free the memory while the kernel
                // uses it.
                std::process::abort();
            }
            // Otherwise the alignment that the device requires was raised in between.
            if result != Err(Status::Invalid) || self.may_use(ptr, len) {
                return result.map(|()| None);
            }
        }
        if len > i32::MAX as usize {
            return Err(Status::Invalid);
        }
        let mut copy = IoBuffer::zeroed(len);
        fill(&mut copy);
        let bio = Bio { data: copy.into(), ..ranged(operation, offset, len as u64)? };
        let (result, data) = self.submit_and_wait(bio);
        result.map(|()| Some(data))
    }

    /// Whether the device can use the memory in place now. Otherwise it must be copied.
    fn may_use(&mut self, ptr: *const u8, len: usize) -> bool {
        self.refresh();
        let align = (self.limits.memory_align as usize).min(BUFFER_ALIGN);
        (ptr.addr() | len).is_multiple_of(align) && len <= u32::MAX as usize
    }
}

fn ranged(operation: Operation, offset: u64, length: u64) -> Result<Bio, Status> {
    let sector = Sector::from_bytes(offset).ok_or(Status::Invalid)?;
    let sectors = Sector::from_bytes(length).ok_or(Status::Invalid)?.0;
    Ok(Bio::bare(operation, sector, sectors, 0))
}

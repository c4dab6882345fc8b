//! The ring under the model checkers: it can wait for kicks, and supports no other operation.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{squeue, types};

use super::token::{Cqe, FileSlot, RingCounters, Token};
use crate::buffer::{IoBuffer, MemoryOwner, RegisteredMemory, Segment};
use crate::error::{Error, ErrorKind};
use crate::kick::Kick;
use crate::sync::thread;

pub struct Ring {
    /// The kick for which the ring waits, once.
    watched: Option<(Arc<Kick>, Token)>,
    counters: RingCounters,
}

#[allow(missing_docs, reason = "documented at the real ring")]
impl Ring {
    pub fn new(_entries: u32) -> Result<Ring, Error> {
        Ok(Ring { watched: None, counters: RingCounters::default() })
    }

    pub fn supports(&self, _code: u8) -> bool {
        true
    }

    /// # Safety
    /// The requirements of the real ring apply.
    pub unsafe fn push(&mut self, _entry: squeue::Entry, _token: Token) {
        unreachable!("no driver of a model submits to the kernel");
    }

    /// # Safety
    /// The requirements of the real ring apply.
    pub unsafe fn push_early(&mut self, _entry: squeue::Entry, _token: Token) {
        unreachable!("no driver of a model submits to the kernel");
    }

    /// Waits for `kick`. Replaces a poll of its descriptor.
    ///
    /// # Safety
    /// The requirements of the real ring apply.
    pub unsafe fn watch(&mut self, kick: &Arc<Kick>, token: Token) {
        assert!(self.watched.is_none(), "an engine of a model has one queue");
        self.watched = Some((kick.clone(), token));
    }

    pub fn has_submissions(&mut self) -> bool {
        false
    }

    pub fn enter(&mut self, want: usize, timeout: Option<Duration>) {
        self.counters.enters += 1;
        match &self.watched {
            Some((kick, _)) if want > 0 && timeout.is_none() => kick.wait(),
            // Any time may have passed.
            _ => thread::yield_now(),
        }
    }

    pub fn reap_all(&mut self, into: &mut Vec<Cqe>) {
        if let Some((_, token)) = self.watched.take_if(|(kick, _)| kick.is_readable()) {
            self.counters.completions += 1;
            into.push(Cqe { token, result: 1, flags: 0 });
        }
    }

    pub fn register_file(&mut self, _fd: BorrowedFd<'_>) -> Result<FileSlot, Error> {
        Err(Error::new(ErrorKind::Unsupported, "a model has no files"))
    }

    pub fn file(&self, slot: &FileSlot) -> types::Fixed {
        slot.of_ring(0)
    }

    pub fn unregister_file(&mut self, _slot: &mut FileSlot) {}

    pub fn register_buffer(&mut self, _buffer: &mut IoBuffer) {}

    pub fn register_front(&mut self, _buffer: &mut IoBuffer, _bytes: usize) {}

    pub fn unregister_buffer(&mut self, _buffer: &mut IoBuffer) {}

    /// # Safety
    /// The requirements of the real ring apply.
    pub unsafe fn register_memory(
        &mut self,
        _start: NonNull<u8>,
        _bytes: usize,
        _owner: MemoryOwner,
    ) -> Result<RegisteredMemory, Error> {
        Err(Error::new(ErrorKind::Unsupported, "a model registers nothing"))
    }

    pub fn unregister_dropped(&mut self) {}

    pub fn registered_buffer(&self, _segment: &Segment) -> Option<u16> {
        None
    }

    pub fn kernel_buffers_left(&self) -> u16 {
        0
    }

    pub fn keep_kernel_buffers(&mut self, _count: u16) -> Result<u16, Error> {
        Err(Error::new(ErrorKind::Unsupported, "a model has no buffers of the kernel's"))
    }

    pub fn abandon(&mut self) {}

    pub fn counters(&self) -> RingCounters {
        self.counters
    }
}

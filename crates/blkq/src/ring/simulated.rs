//! The ring of the simulated kernel, with the interface of the real ring.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use io_uring::{squeue, types};

use super::buffers::BufferTable;
use super::token::{Cqe, FileSlot, RingCounters, Token, new_ring_id};
use crate::error::{Error, ErrorKind};
use crate::simulation::world;

const BUFFER_SLOTS: u16 = 64;

pub struct Ring {
    id: u64,
    queued: Vec<squeue::Entry>,
    files: Vec<i32>,
    pub(super) buffers: BufferTable,
    counters: RingCounters,
}

#[allow(missing_docs, reason = "documented at the real ring")]
impl Ring {
    pub fn new(_entries: u32) -> Result<Ring, Error> {
        let id = new_ring_id();
        Ok(Ring {
            id,
            queued: Vec::new(),
            files: Vec::new(),
            buffers: BufferTable::new(id, BUFFER_SLOTS, usize::MAX),
            counters: RingCounters::default(),
        })
    }

    pub fn supports(&self, _code: u8) -> bool {
        true
    }

    /// # Safety
    /// The requirements of the real ring apply.
    pub unsafe fn push(&mut self, entry: squeue::Entry, token: Token) {
        world().instant();
        self.counters.submissions += 1;
        self.queued.push(entry.user_data(token.0));
    }

    /// # Safety
    /// The requirements of the real ring apply.
    pub unsafe fn push_early(&mut self, entry: squeue::Entry, token: Token) {
        if !self.queued.is_empty() {
            self.counters.early_submissions += 1;
            self.submit();
        }
        // SAFETY: the caller's promise.
        unsafe { self.push(entry, token) }
    }

    pub fn has_submissions(&mut self) -> bool {
        !self.queued.is_empty()
    }

    pub fn submit(&mut self) {
        self.enter(0, None);
    }

    pub fn enter(&mut self, want: usize, timeout: Option<Duration>) {
        self.counters.enters += 1;
        world().instant();
        world().enter(&mut self.queued, &self.files, want, timeout);
    }

    pub fn reap_all(&mut self, into: &mut Vec<Cqe>) {
        world().instant();
        let before = into.len();
        world().reap(&mut |user_data, result, flags| {
            into.push(Cqe { token: Token(user_data), result, flags });
        });
        self.counters.completions += (into.len() - before) as u64;
    }

    pub fn register_file(&mut self, fd: BorrowedFd<'_>) -> Result<FileSlot, Error> {
        self.files.push(fd.as_raw_fd());
        Ok(FileSlot::new(self.id, self.files.len() as u32 - 1))
    }

    pub fn file(&self, slot: &FileSlot) -> types::Fixed {
        slot.of_ring(self.id)
    }

    pub fn unregister_file(&mut self, slot: &mut FileSlot) {
        slot.take(self.id);
    }

    pub(super) fn update_buffer(
        &mut self,
        _place: u16,
        _start: *mut u8,
        _bytes: usize,
    ) -> std::io::Result<()> {
        Ok(())
    }

    pub fn kernel_buffers_left(&self) -> u16 {
        0
    }

    pub fn keep_kernel_buffers(&mut self, _count: u16) -> Result<u16, Error> {
        Err(Error::new(ErrorKind::Unsupported, "the simulated kernel has no buffers of its own"))
    }

    pub fn abandon(&mut self) {}

    pub fn counters(&self) -> RingCounters {
        self.counters
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // An operation that waits for a kick must be cancelled, because another file may soon have its
        // descriptor number.
        world().close_ring();
    }
}

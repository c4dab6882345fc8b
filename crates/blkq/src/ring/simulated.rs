//! The ring of the simulated kernel, with the interface of the real ring.

use std::os::fd::RawFd;
use std::time::Duration;

use io_uring::squeue;

use super::interface::{Cqe, RingCounters, Token};
use super::tables::Tables;
use crate::error::Error;
use crate::simulation::world;

const FILE_SLOTS: u32 = 1024;
const BUFFER_SLOTS: u16 = 64;

pub struct Ring {
    queued: Vec<squeue::Entry>,
    files: Vec<RawFd>,
    pub(super) tables: Tables,
    pub(super) counters: RingCounters,
    /// The number of completions that were reaped.
    pub reaped: u64,
}

impl Ring {
    pub fn new(_entries: u32) -> Result<Ring, Error> {
        Ok(Ring {
            queued: Vec::new(),
            files: vec![-1; FILE_SLOTS as usize],
            tables: Tables::new(FILE_SLOTS, BUFFER_SLOTS, usize::MAX, 0),
            counters: RingCounters::default(),
            reaped: 0,
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
            self.enter(0, None);
        }
        // SAFETY: the caller's promise.
        unsafe { self.push(entry, token) }
    }

    pub fn has_submissions(&mut self) -> bool {
        !self.queued.is_empty()
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
        self.reaped += (into.len() - before) as u64;
    }

    pub(super) fn update_file(&mut self, slot: u32, fd: RawFd) -> std::io::Result<()> {
        self.files[slot as usize] = fd;
        Ok(())
    }

    pub(super) fn update_buffer(&mut self, _: u16, _: *mut u8, _: usize) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // An operation that waits for a kick must be cancelled, because another file may soon have its
        // descriptor number.
        world().close_ring();
    }
}

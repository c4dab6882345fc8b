//! The ring under the model checkers: it can wait for kicks, and supports no other operation.

use std::os::fd::RawFd;
use std::time::Duration;

use io_uring::squeue;

use super::interface::{Cqe, KICK, RingCounters, Token};
use super::tables::Tables;
use crate::error::Error;
use crate::sync::thread;

pub struct Ring {
    /// The ring waits for its kick.
    is_armed: bool,
    pub(super) tables: Tables,
    pub(super) counters: RingCounters,
}

impl Ring {
    pub fn new(_entries: u32) -> Result<Ring, Error> {
        Ok(Ring { is_armed: false, tables: Tables::new(0, 0, 0, 0), counters: RingCounters::default() })
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

    /// Waits for the kick. Replaces a poll of its descriptor.
    pub(super) fn arm(&mut self, index: usize) {
        assert!(index == 0, "an engine of a model has one queue");
        self.is_armed = true;
    }

    pub fn has_submissions(&mut self) -> bool {
        false
    }

    pub fn enter(&mut self, want: usize, timeout: Option<Duration>) {
        self.counters.enters += 1;
        match &self.tables.kicks[..] {
            [kick] if self.is_armed && want > 0 && timeout.is_none() => kick.wait(),
            // Any time may have passed.
            _ => thread::yield_now(),
        }
    }

    pub fn reap_all(&mut self, into: &mut Vec<Cqe>) {
        if self.is_armed && self.tables.kicks[0].is_readable() {
            self.is_armed = false;
            into.push(Cqe { token: Token::new(KICK, 0), result: 1, flags: 0 });
        }
    }

    pub(super) fn update_file(&mut self, _: u32, _: RawFd) -> std::io::Result<()> {
        unreachable!("a model registers nothing");
    }

    pub(super) fn update_buffer(&mut self, _: u16, _: *mut u8, _: usize) -> std::io::Result<()> {
        unreachable!("a model registers nothing");
    }
}

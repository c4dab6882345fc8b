//! The ring under the model checkers: it can wait for kicks, and supports no other operation.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use io_uring::squeue;

use super::tables::Tables;
use super::{Cqe, RingCounters, Token};
use crate::error::Error;
use crate::kick::Kick;
use crate::sync::thread;

pub struct Ring {
    /// The kick for which the ring waits, once.
    watched: Option<(Arc<Kick>, Token)>,
    pub(super) tables: Tables,
    pub(super) counters: RingCounters,
}

#[allow(missing_docs, reason = "documented at the real ring")]
impl Ring {
    pub fn new(_entries: u32) -> Result<Ring, Error> {
        Ok(Ring { watched: None, tables: Tables::new(0, 0, 0, 0), counters: RingCounters::default() })
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

    pub(super) fn update_file(&mut self, _: u32, _: RawFd) -> std::io::Result<()> {
        unreachable!("a model registers nothing");
    }

    pub(super) fn update_buffer(&mut self, _: u16, _: *mut u8, _: usize) -> std::io::Result<()> {
        unreachable!("a model registers nothing");
    }

    pub fn abandon(&mut self) {}
}

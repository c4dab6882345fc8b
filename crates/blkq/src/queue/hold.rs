//! Requests that the driver failed and that are held until the disk is resumed
//! ([`disk::ErrorPolicy`](crate::disk::ErrorPolicy)). They keep their tags and their bios, and wait in the
//! order in which they failed.
//!
//! All other I/O goes on, but for flushes: a flush that comes after a write which is held does not
//! complete before it does, on whatever queue of the disk. So nobody takes for durable what has not been
//! written.

use std::collections::VecDeque;

use crate::bio::Operation;
use crate::disk::{Disk, ErrorPolicy, Resume};
use crate::error::{IoResult, Status};
use crate::tags::Tag;

/// The held requests of one queue.
pub(super) struct Hold {
    /// In force.
    policy: ErrorPolicy,
    /// The queue's own flush, which is never held.
    flush: Tag,
    held: VecDeque<(Tag, Status)>,
    /// For each tag whether its request was held, is none that reads, and has not completed.
    writes: Vec<bool>,
    write_count: usize,
    /// Of the disk's requests to reissue, and to fail, those that were followed.
    resumed: (u64, u64),
    /// The queue's owner stops: nothing is held any more.
    closing: bool,
}

impl Hold {
    pub fn new(disk: &Disk, queue: usize, flush: Tag, slots: usize) -> Hold {
        let mut hold = Hold {
            policy: ErrorPolicy::Report,
            flush,
            held: VecDeque::new(),
            writes: vec![false; slots],
            write_count: 0,
            resumed: disk.hold.resumed(),
            closing: false,
        };
        hold.reload(disk);
        disk.hold.follow(queue, hold.resumed);
        hold
    }

    /// Takes over the disk's policy.
    pub fn reload(&mut self, disk: &Disk) {
        let reports = self.closing || disk.hold.is_reporting();
        self.policy = if reports { ErrorPolicy::Report } else { disk.hold.policy() };
    }

    /// Whether completions are to be looked through.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.policy != ErrorPolicy::Report || self.write_count > 0
    }

    /// Whether requests are held.
    #[inline]
    pub fn has_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// The error after which request `tag` is held, if it is.
    pub fn status(&self, tag: Tag) -> Option<Status> {
        self.held.iter().find(|(held, _)| *held == tag).map(|(_, status)| *status)
    }

    /// The held requests, in the order in which they failed.
    pub fn held(&self) -> impl Iterator<Item = Tag> + '_ {
        self.held.iter().map(|(tag, _)| *tag)
    }

    /// How many are held.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Takes out what is held and `which` is true of.
    pub fn take_if(&mut self, which: impl Fn(Tag) -> bool) -> Vec<(Tag, IoResult)> {
        let mut taken = Vec::new();
        self.held.retain(|&(tag, status)| {
            let is_taken = which(tag);
            if is_taken {
                taken.push((tag, Err(status)));
            }
            !is_taken
        });
        taken
    }

    /// Whether the disk was resumed since this was last asked: what is held is to be reissued, or to fail.
    pub fn take_resumed(&mut self, disk: &Disk) -> Option<Resume> {
        let (reissues, failures) = disk.hold.resumed();
        let (reissued, failed) = std::mem::replace(&mut self.resumed, (reissues, failures));
        if failures != failed || disk.hold.is_reporting() {
            return Some(Resume::Fail);
        }
        (reissues != reissued).then_some(Resume::Reissue)
    }

    /// The queue has done what [`Hold::take_resumed`] returned, and counted it.
    pub fn note_resumed(&self, disk: &Disk, queue: usize) {
        disk.hold.follow(queue, self.resumed);
    }

    /// Nothing is held from now on.
    pub fn close(&mut self, disk: &Disk) {
        self.closing = true;
        self.reload(disk);
    }

    /// Whether the queue's owner stops.
    pub fn is_closing(&self) -> bool {
        self.closing
    }

    /// Takes out all that is held.
    pub fn take(&mut self) -> Vec<Tag> {
        self.held.drain(..).map(|(tag, _)| tag).collect()
    }

    /// The error of request `tag`, which completed with `result`, if it is to be held.
    pub fn holds(&self, tag: Tag, result: IoResult) -> Option<Status> {
        result.err().filter(|status| tag != self.flush && self.policy.holds(*status))
    }

    /// Request `tag` is held.
    pub fn push(&mut self, tag: Tag, status: Status, operation: Operation, disk: &Disk) {
        self.held.push_back((tag, status));
        if operation != Operation::Read && !std::mem::replace(&mut self.writes[tag.index()], true) {
            self.write_count += 1;
            disk.hold.add_write();
        }
    }

    /// The queue is no more: flushes wait for none of its writes, whatever becomes of these. Returns whether
    /// they were the last.
    pub fn forget_writes(&mut self, disk: &Disk) -> bool {
        let mut is_last = false;
        for index in 0..self.writes.len() {
            is_last |= self.complete(Tag(index as u16), disk);
        }
        is_last
    }

    /// Request `tag` completes. Returns whether it was the last one of the disk that flushes waited for.
    pub fn complete(&mut self, tag: Tag, disk: &Disk) -> bool {
        if !std::mem::take(&mut self.writes[tag.index()]) {
            return false;
        }
        self.write_count -= 1;
        disk.hold.remove_write()
    }
}

//! Failed requests that are held until the operator resumes the disk
//! ([`disk::ErrorPolicy`](crate::disk::ErrorPolicy)). They keep their tags and bios, and stay in the order in
//! which they failed.
//!
//! Other I/O continues, except for flushes: while a write is held, on any queue of the disk, no flush is
//! issued. Otherwise the client would take data for durable that has not been written.

use std::collections::VecDeque;

use crate::bio::Operation;
use crate::disk::{Disk, ErrorPolicy, Resume};
use crate::error::{IoResult, Status};
use crate::tags::Tag;

pub(super) struct Hold {
    /// The policy in force on this queue.
    policy: ErrorPolicy,
    /// The tag of the queue's own flush, which is never held.
    flush: Tag,
    held: VecDeque<(Tag, Status)>,
    /// For each tag whether its request was held, is not a read, and has not completed.
    writes: Vec<bool>,
    write_count: usize,
    /// How many resumes of the disk this queue has applied: reissues, failures.
    resumed: (u64, u64),
    /// The owner of the queue is stopping, so no request is held.
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

    pub fn reload(&mut self, disk: &Disk) {
        let reports = self.closing || disk.hold.is_reporting();
        self.policy = if reports { ErrorPolicy::Report } else { disk.hold.policy() };
    }

    /// Whether completions must be checked for requests to hold, or for writes that were held.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.policy != ErrorPolicy::Report || self.write_count > 0
    }

    #[inline]
    pub fn has_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// The error of request `tag`, if the request is held.
    pub fn status(&self, tag: Tag) -> Option<Status> {
        self.held.iter().find(|(held, _)| *held == tag).map(|(_, status)| *status)
    }

    pub fn held(&self) -> impl Iterator<Item = Tag> + '_ {
        self.held.iter().map(|(tag, _)| *tag)
    }

    pub fn held_from(&self, first: usize) -> impl Iterator<Item = (Tag, Status)> + '_ {
        self.held.range(first..).copied()
    }

    pub fn len(&self) -> usize {
        self.held.len()
    }

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

    /// Whether the disk was resumed since the last call, and how.
    pub fn take_resumed(&mut self, disk: &Disk) -> Option<Resume> {
        let (reissues, failures) = disk.hold.resumed();
        let (reissued, failed) = std::mem::replace(&mut self.resumed, (reissues, failures));
        if failures != failed || disk.hold.is_reporting() {
            return Some(Resume::Fail);
        }
        (reissues != reissued).then_some(Resume::Reissue)
    }

    /// Publishes that the queue has applied what [`Hold::take_resumed`] returned, and has counted it.
    pub fn note_resumed(&self, disk: &Disk, queue: usize) {
        disk.hold.follow(queue, self.resumed);
    }

    pub fn close(&mut self, disk: &Disk) {
        self.closing = true;
        self.reload(disk);
    }

    pub fn is_closing(&self) -> bool {
        self.closing
    }

    pub fn take(&mut self) -> Vec<Tag> {
        self.held.drain(..).map(|(tag, _)| tag).collect()
    }

    /// The error of request `tag`, which the driver completed with `result`, if the request must be held.
    pub fn holds(&self, tag: Tag, result: IoResult) -> Option<Status> {
        result.err().filter(|status| tag != self.flush && self.policy.holds(*status))
    }

    pub fn push(&mut self, tag: Tag, status: Status, operation: Operation, disk: &Disk) {
        self.held.push_back((tag, status));
        if operation != Operation::Read && !std::mem::replace(&mut self.writes[tag.index()], true) {
            self.write_count += 1;
            disk.hold.add_write();
        }
    }

    /// Removes this queue's writes from those that flushes wait for, because the queue is closed. Returns
    /// whether they were the last of the disk.
    pub fn forget_writes(&mut self, disk: &Disk) -> bool {
        let mut is_last = false;
        for index in 0..self.writes.len() {
            is_last |= self.complete(Tag(index as u16), disk);
        }
        is_last
    }

    /// Records that request `tag` completes. Returns whether it was the last held write of the disk.
    pub fn complete(&mut self, tag: Tag, disk: &Disk) -> bool {
        if !std::mem::take(&mut self.writes[tag.index()]) {
            return false;
        }
        self.write_count -= 1;
        disk.hold.remove_write()
    }
}

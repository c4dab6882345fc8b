//! Failed requests that are held until the operator resumes the disk
//! ([`disk::ErrorPolicy`](crate::disk::ErrorPolicy)). They keep their tags and bios, and stay in the order in
//! which they failed.
//!
//! Other I/O continues, except for flushes: while a write is held, on any queue of the disk, no flush is
//! issued. Otherwise the client would take data for durable that has not been written.

use std::collections::BTreeSet;

use crate::bio::Operation;
use crate::disk::{Disk, ErrorPolicy, Resume};
use crate::error::{IoResult, Status};
use crate::stats::Counter;
use crate::tags::Tag;
use crate::trace::EventKind;

use super::dispatch::Dispatch;
use super::io::Io;

pub(super) struct Hold {
    /// The policy in force on this queue.
    policy: ErrorPolicy,
    held: Vec<(Tag, Status)>,
    /// The requests that were held, are not reads, and have not completed.
    writes: BTreeSet<Tag>,
    /// How many resumes of the disk this queue has applied: reissues, failures.
    pub resumed: (u64, u64),
    /// The owner of the queue is stopping, so no request is held, and no staged bio is pulled.
    pub closing: bool,
}

impl Hold {
    pub fn new(disk: &Disk, queue: usize) -> Hold {
        let mut hold = Hold {
            policy: ErrorPolicy::Report,
            held: Vec::new(),
            writes: BTreeSet::new(),
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
    pub fn is_on(&self) -> bool {
        self.policy != ErrorPolicy::Report || !self.writes.is_empty()
    }

    /// The error of request `tag`, if the request is held.
    pub fn status(&self, tag: Tag) -> Option<Status> {
        self.held.iter().find(|(held, _)| *held == tag).map(|(_, status)| *status)
    }

    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Finds held requests that must not be reissued, because clients have disconnected: a write if one of
    /// its merged bios is abandoned, because the reissued write could overwrite newer data of that client,
    /// and a read if all of its bios are abandoned. `is_abandoned` is called with the `user_data` of bios.
    pub fn find_abandoned(&self, io: &mut Io, is_abandoned: impl Fn(u64) -> bool) -> Vec<Tag> {
        let mut found: Vec<Tag> = self.held.iter().map(|(tag, _)| *tag).collect();
        found.retain(|&tag| {
            io.in_flight.fill_plain(tag);
            let is = |bio| io.user_data_of(bio).is_some_and(&is_abandoned);
            let (any, all) = (io.in_flight.bios_of(tag).any(is), io.in_flight.bios_of(tag).all(is));
            any && (all || io.in_flight[tag].operation.is_write())
        });
        found
    }

    /// Removes the held requests for which `which` returns true, so that they complete with their errors.
    pub fn take_failed(&mut self, which: impl Fn(Tag) -> bool, io: &mut Io) -> Vec<(Tag, IoResult)> {
        let failed: Vec<_> = self.held.extract_if(.., |&mut (tag, _)| which(tag)).collect();
        io.tags.resume(failed.len());
        io.stats.held(self.held.len() as u64);
        self.remove_writes(failed.iter().map(|(tag, _)| *tag), &io.disk.disk);
        failed.into_iter().map(|(tag, status)| (tag, Err(status))).collect()
    }

    /// Requeues all held requests.
    pub fn reissue(&mut self, io: &mut Io, dispatch: &mut Dispatch) {
        io.tags.resume(self.held.len());
        dispatch.requeued.extend(self.held.drain(..).map(|(tag, _)| tag));
        io.stats.held(0);
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

    /// Moves requests that must be held from `completed` to the held requests.
    #[cold]
    pub fn hold_failed(
        &mut self,
        completed: &mut Vec<(Tag, IoResult)>,
        io: &mut Io,
        dispatch: &mut Dispatch,
    ) {
        let (before, flush) = (self.held.len(), io.flush.tag);
        completed.retain(|&(tag, result)| match result {
            // The queue's own flush is never held.
            Err(status) if tag != flush && self.policy.holds(status) => {
                self.held.push((tag, status));
                false
            }
            _ => true,
        });
        let failed = self.held[before..].to_vec();
        for &(tag, status) in &failed {
            self.add_write(tag, io);
            io.in_flight.fill_plain(tag);
            // The driver starts with clean words when the request is reissued.
            io.in_flight[tag].pdu = [0; 2];
            io.note_failure(tag, io.in_flight[tag].first_bio, status);
        }
        // After the held writes were added, so that no queue issues a flush in between.
        self.remove_writes(completed.iter().map(|(tag, _)| *tag), &io.disk.disk);
        if failed.is_empty() {
            return;
        }
        let tags: Vec<Tag> = failed.iter().map(|(tag, _)| *tag).collect();
        io.trace_requests(EventKind::Requeue, &tags);
        dispatch.hold(&tags);
        io.tags.hold(tags.len());
        io.stats.held(self.held.len() as u64);
        io.stats.count(Counter::HeldRequests, tags.len() as u64);
        if io.disk.is_frozen() {
            // A freeze would wait for the held requests until its timeout. It fails instead.
            io.disk.disk.control.wake_waiters();
        }
    }

    fn add_write(&mut self, tag: Tag, io: &Io) {
        if io.in_flight[tag].operation == Operation::Read {
            return;
        }
        #[cfg(simulation)]
        crate::simulation::world().write_held(io.disk.index, tag.0);
        if self.writes.insert(tag) {
            io.disk.disk.hold.add_write();
        }
    }

    /// Removes this queue's writes from those that flushes wait for, because the queue is closed.
    pub fn forget_writes(&mut self, disk: &Disk) {
        // A copy, because `remove_writes` removes them from the set.
        self.remove_writes(self.writes.clone().into_iter(), disk);
    }

    /// Removes completed requests from the held writes, and wakes all queues after the last one of the disk.
    fn remove_writes(&mut self, completed: impl Iterator<Item = Tag>, disk: &Disk) {
        if self.writes.is_empty() {
            return;
        }
        let mut is_last = false;
        for tag in completed {
            is_last |= self.writes.remove(&tag) && disk.hold.remove_write();
        }
        if is_last {
            disk.wake_queues();
        }
    }
}

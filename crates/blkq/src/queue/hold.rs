//! Failed requests that are held until the operator resumes the disk
//! ([`disk::ErrorPolicy`](crate::disk::ErrorPolicy)). They keep their tags and bios, and stay in the order in
//! which they failed.
//!
//! Other I/O continues, except for flushes: while a write is held, on any queue of the disk, no flush is
//! issued. Otherwise the client would take data for durable that has not been written.

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
    /// The tag of the queue's own flush, which is never held.
    flush: Tag,
    held: Vec<(Tag, Status)>,
    /// For each tag whether its request was held, is not a read, and has not completed.
    writes: Vec<bool>,
    write_count: usize,
    /// How many resumes of the disk this queue has applied: reissues, failures.
    pub resumed: (u64, u64),
    /// The owner of the queue is stopping, so no request is held, and no staged bio is pulled.
    pub closing: bool,
}

impl Hold {
    pub fn new(disk: &Disk, queue: usize, flush: Tag, slots: usize) -> Hold {
        let mut hold = Hold {
            policy: ErrorPolicy::Report,
            flush,
            held: Vec::new(),
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
    pub fn is_on(&self) -> bool {
        self.policy != ErrorPolicy::Report || self.write_count > 0
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
    pub fn take_failed(
        &mut self,
        which: impl Fn(Tag) -> bool,
        io: &mut Io,
        dispatch: &mut Dispatch,
    ) -> Vec<(Tag, IoResult)> {
        let failed: Vec<_> = self.held.extract_if(.., |&mut (tag, _)| which(tag)).collect();
        io.tags.resume(failed.len());
        io.stats.held(self.held.len() as u64);
        // They are about to complete, which subtracts them a second time.
        dispatch.started += failed.len() as u32;
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

    pub fn close(&mut self, disk: &Disk) {
        self.closing = true;
        self.reload(disk);
    }

    /// Moves requests that must be held from `completed` to the held requests.
    #[cold]
    pub fn hold_failed(
        &mut self,
        completed: &mut Vec<(Tag, IoResult)>,
        io: &mut Io,
        dispatch: &mut Dispatch,
    ) {
        let before = self.held.len();
        completed.retain(|&(tag, result)| match result {
            Err(status) if tag != self.flush && self.policy.holds(status) => {
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
        if !std::mem::replace(&mut self.writes[tag.index()], true) {
            self.write_count += 1;
            io.disk.disk.hold.add_write();
        }
    }

    /// Removes this queue's writes from those that flushes wait for, because the queue is closed.
    pub fn forget_writes(&mut self, disk: &Disk) {
        self.remove_writes((0..self.writes.len()).map(|index| Tag(index as u16)), disk);
    }

    /// Removes completed requests from the held writes, and wakes all queues after the last one of the disk.
    fn remove_writes(&mut self, completed: impl Iterator<Item = Tag>, disk: &Disk) {
        if self.write_count == 0 {
            return;
        }
        let mut is_last = false;
        for tag in completed {
            if std::mem::take(&mut self.writes[tag.index()]) {
                self.write_count -= 1;
                is_last |= disk.hold.remove_write();
            }
        }
        if is_last {
            disk.wake_queues();
        }
    }
}

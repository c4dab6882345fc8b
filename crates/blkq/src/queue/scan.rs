//! Scans a queue for requests that hang: see [`hang`](super::hang).

use std::fmt::Write;

use crate::bio::Outline;
use crate::request::{NIL, RequestState};
use crate::stats::Counter;
use crate::tags::Tag;

use super::Queue;
use super::failures::THREAD;
use super::hang::{Hang, HangScan, HungIo, Place};

struct Scan {
    now_ns: u64,
    limit_ns: u64,
    found: HangScan,
    new: u64,
}

impl Scan {
    fn is_hung(&self, start_ns: u64) -> bool {
        self.now_ns.saturating_sub(start_ns) > self.limit_ns
    }
}

impl Queue {
    /// Finds requests and bios that started more than `limit_ns` before `now_ns`.
    pub(crate) fn scan_for_hangs(&mut self, now_ns: u64, limit_ns: u64) -> HangScan {
        let mut scan = Scan { now_ns, limit_ns, found: HangScan::default(), new: 0 };
        self.hang_tracker.begin_scan();
        let mut left = self.io.in_flight.in_use();
        for index in 0..self.io.in_flight.requests().len() {
            if left == 0 {
                break;
            }
            let tag = Tag(index as u16);
            if self.io.in_flight[tag].state != RequestState::Idle {
                left -= 1;
                self.scan_request(tag, &mut scan);
            }
        }
        let frozen = self.io.disk.is_frozen();
        let (mut bio, mut before) = (self.io.waiting.first(), 0);
        while bio != NIL {
            let place = if frozen { Place::Frozen } else { Place::ForTag(before) };
            self.scan_bio(bio, place, &mut scan);
            (bio, before) = (self.io.in_flight[bio].next, before + 1);
        }
        for index in 0..self.io.flush.pending().len() {
            let bio = self.io.flush.pending()[index];
            let held = self.io.disk.has_held_writes();
            let place = match (frozen, held) {
                (true, _) => Place::Frozen,
                (_, true) => Place::ForHeldWrites,
                _ => Place::ForFlush,
            };
            self.scan_bio(bio, place, &mut scan);
        }
        // The bios that the flush in flight serves are reported as part of the flush.
        for &bio in self.io.flush.running() {
            self.hang_tracker.see(bio, self.io.in_flight[bio].start_ns);
        }
        let mut found = scan.found;
        found.completed = self.hang_tracker.finish_scan(now_ns);
        found.failures = self.io.failures.take();
        self.io.stats.count(Counter::Hangs, scan.new);
        self.io.stats.hung(found.hung);
        found
    }

    /// If the client of the first failed request is not known yet, calls `name` to write it. Must be called
    /// before the queue's owner takes the completion of the bio whose `user_data` `name` receives.
    #[inline]
    pub(crate) fn name_failed(&mut self, name: impl FnOnce(u64, &mut dyn Write)) {
        if self.io.failures.lacks_name() {
            self.io.failures.name(name);
        }
    }

    fn scan_request(&mut self, tag: Tag, scan: &mut Scan) {
        self.io.in_flight.fill_plain(tag);
        let request = &mut self.io.in_flight[tag];
        if request.start_ns == 0 {
            request.start_ns = scan.now_ns;
        }
        let (first, start_ns, outline) = (request.first_bio, request.start_ns, request.outline());
        // The time for which a request waits for a rate limit does not count.
        let is_hung = scan.is_hung(start_ns.max(self.throttled_until_ns(tag)));
        if is_hung {
            scan.found.hung += 1;
        }
        // Any bio of the request may have been counted or reported before it was part of a request.
        let (mut counted, mut bios, mut bio) = (false, 0, first);
        if bio == NIL {
            counted = self.hang_tracker.has_counted(NIL, start_ns);
            self.hang_tracker.see(NIL, start_ns);
            bios = self.io.flush.running().len() as u32;
        }
        while bio != NIL {
            let slot = &mut self.io.in_flight[bio];
            if slot.start_ns == 0 {
                slot.start_ns = start_ns;
            }
            let (began_ns, next) = (slot.start_ns, slot.next);
            counted |= self.hang_tracker.has_counted(bio, began_ns);
            self.hang_tracker.see(bio, began_ns);
            (bio, bios) = (next, bios + 1);
        }
        if is_hung && !counted {
            let began_ns = if first == NIL { start_ns } else { self.io.in_flight[first].start_ns };
            self.add_hang(scan, (first, began_ns), outline, Some(tag), bios, |queue| queue.place_of(tag));
        }
    }

    fn scan_bio(&mut self, bio: u32, place: Place, scan: &mut Scan) {
        let slot = &mut self.io.in_flight[bio];
        if slot.start_ns == 0 {
            slot.start_ns = scan.now_ns;
        }
        let outline = slot.outline();
        self.hang_tracker.see(bio, outline.start_ns);
        if !scan.is_hung(outline.start_ns) || self.dispatch.throttle().is_waiting() {
            return;
        }
        scan.found.hung += 1;
        if !self.hang_tracker.has_counted(bio, outline.start_ns) {
            self.add_hang(scan, (bio, outline.start_ns), outline, None, 1, |_| place);
        }
    }

    /// Counts I/O that hangs and was not counted before, and reports it unless too many reported hangs have
    /// not completed. Its first bio is `bio` ([`NIL`] for the driver's flush), accepted at `began_ns`.
    fn add_hang(
        &mut self,
        scan: &mut Scan,
        (bio, began_ns): (u32, u64),
        outline: Outline,
        tag: Option<Tag>,
        bios: u32,
        place: impl FnOnce(&Queue) -> Place,
    ) {
        scan.new += 1;
        self.hang_tracker.count(bio, began_ns);
        if self.hang_tracker.is_full() {
            scan.found.more += 1;
            return;
        }
        let Outline { operation, flags, sector, sectors, start_ns } = outline;
        let (number, queue) = (self.hang_tracker.next_number(), self.io.disk.index());
        let io = HungIo { number, queue, tag, operation, flags, sector, sectors };
        self.hang_tracker.add_reported(&io, bio, began_ns);
        let submitted = if bio == NIL { self.io.flush.running().front().copied() } else { Some(bio) };
        let user_data = submitted.and_then(|bio| self.io.user_data_of(bio));
        let client = (submitted.is_some() && user_data.is_none()).then(|| THREAD.to_owned());
        let age_ns = scan.now_ns.saturating_sub(start_ns);
        scan.found.hangs.push(Hang { io, age_ns, bios, place: place(self), client, user_data });
    }

    /// When the request stopped waiting for a rate limit; `u64::MAX` while it waits.
    fn throttled_until_ns(&self, tag: Tag) -> u64 {
        let throttle = self.dispatch.throttle();
        match self.dispatch.is_scheduled(tag) && throttle.is_blocked(self.io.in_flight[tag].operation) {
            true => u64::MAX,
            false => throttle.released_ns(tag),
        }
    }

    fn place_of(&self, tag: Tag) -> Place {
        if let Some(status) = self.hold.status(tag) {
            return Place::Held(status);
        }
        let scheduled = self.dispatch.is_scheduled(tag);
        let plugged = self.plug.requests().contains(&tag);
        let requeued = self.dispatch.is_requeued(tag);
        if (scheduled || plugged || requeued) && self.io.disk.is_quiesced() {
            return Place::Quiesced;
        }
        match (scheduled, plugged, requeued) {
            (true, _, _) => Place::Scheduler,
            (_, true, _) => Place::Plug,
            (_, _, true) => Place::Dispatch,
            _ => Place::Driver(self.dispatch.state(tag, &self.io.in_flight[tag])),
        }
    }
}

//! Scans a queue for I/O that hangs (see [`hang`](super::hang)), and keeps the hangs that were counted and reported.

use std::collections::BTreeMap;

use crate::bio::Outline;
use crate::error::IoResult;
use crate::request::{NIL, Request, RequestState};
use crate::stats::Counter;
use crate::tags::Tag;

use super::dispatch::Dispatch;
use super::failures::THREAD;
use super::hang::{Hang, HangCompletion, HangScan, HungIo, Place, REPORTED_MAX};
use super::hold::Hold;
use super::io::Io;

#[derive(Debug)]
struct ReportedHang {
    io: HungIo,
    /// The first bio of the request, or [`NIL`] for the driver's flush.
    bio: u32,
    start_ns: u64,
    /// Whether the current scan has seen it.
    seen: bool,
}

#[derive(Debug, Default)]
pub(super) struct HangTracker {
    /// By bio slot, or [`NIL`] for the driver's flush, the start time of the bio that was counted as hanging. The time
    /// identifies the bio: no other bio in the same slot has the same start time.
    counted_ns: BTreeMap<u32, u64>,
    reported: Vec<ReportedHang>,
    /// Completions since the last scan. True: `age_ns` is a start time, because without iostats no clock was
    /// read when the request completed.
    completed: Vec<(HangCompletion, bool)>,
    reported_count: u64,
}

/// A scan, with the other parts of the queue in which requests may be.
pub(super) struct Scan<'a> {
    pub dispatch: &'a Dispatch,
    pub plug: &'a [Tag],
    pub hold: &'a Hold,
    pub now_ns: u64,
    /// I/O that started longer ago hangs.
    pub limit_ns: u64,
    pub found: HangScan,
}

impl Scan<'_> {
    /// When request `tag` stopped waiting for a rate limit; `u64::MAX` while it waits.
    fn throttled_until_ns(&self, tag: Tag, io: &Io) -> u64 {
        let Dispatch { throttle, .. } = self.dispatch;
        match self.dispatch.is_scheduled(tag) && throttle.is_blocked(io.in_flight[tag].operation) {
            true => u64::MAX,
            false => throttle.released_ns(tag),
        }
    }

    fn place_of(&self, tag: Tag, io: &Io) -> Place {
        if let Some(status) = self.hold.status(tag) {
            return Place::Held(status);
        }
        let place = if self.dispatch.is_scheduled(tag) {
            Place::Scheduler
        } else if self.plug.contains(&tag) {
            Place::Plug
        } else if self.dispatch.requeued.contains(&tag) {
            Place::Dispatch
        } else {
            return Place::Driver(self.dispatch.state(tag, &io.in_flight[tag]));
        };
        if io.disk.control().is_quiesced() { Place::Quiesced } else { place }
    }

    /// Counts I/O that started at `start_ns` if it hangs. Returns whether it does.
    fn count(&mut self, start_ns: u64) -> bool {
        let is_hung = self.now_ns.saturating_sub(start_ns) > self.limit_ns;
        self.found.hung += u64::from(is_hung);
        is_hung
    }
}

impl HangTracker {
    /// Whether completing requests must be compared with the reported ones.
    pub fn has_reported(&self) -> bool {
        !self.reported.is_empty()
    }

    /// Records which of the requests that complete now were reported.
    #[cold]
    pub fn note_completed(&mut self, completed: &[(Tag, IoResult)], io: &mut Io) {
        let iostats = io.disk.settings.iostats;
        for &(tag, result) in completed {
            io.in_flight.fill_plain(tag);
            let Request { first_bio, start_ns, .. } = io.in_flight[tag];
            // Without iostats no clock is read here. The next scan computes the age.
            let age_ns = if iostats { io.clock.now_ns().saturating_sub(start_ns) } else { start_ns };
            let flush = (first_bio == NIL).then_some((NIL, start_ns));
            let bios = io.in_flight.bios_of(tag).map(|bio| (bio, io.in_flight[bio].start_ns));
            for began in flush.into_iter().chain(bios) {
                if let Some(at) = self.reported.iter().position(|one| (one.bio, one.start_ns) == began) {
                    let hung = HungIo { tag: Some(tag), ..self.reported.swap_remove(at).io };
                    let completion = HangCompletion { io: hung, age_ns, result: Some(result) };
                    self.completed.push((completion, !iostats));
                }
            }
        }
    }

    /// Finds requests and bios that hang.
    pub fn scan(&mut self, io: &mut Io, mut scan: Scan<'_>) -> HangScan {
        self.reported.iter_mut().for_each(|one| one.seen = false);
        for tag in (0..io.in_flight.requests().len()).map(|index| Tag(index as u16)) {
            if io.in_flight[tag].state != RequestState::Idle {
                self.scan_request(tag, io, &mut scan);
            }
        }
        let frozen = io.disk.is_frozen();
        for before in 0..io.waiting.len() {
            let place = if frozen { Place::Frozen } else { Place::ForTag(before) };
            self.scan_bio(io.waiting[before].0, place, io, &mut scan);
        }
        for index in 0..io.flush.pending.len() {
            let place = match (frozen, io.disk.disk.hold.has_writes()) {
                (true, _) => Place::Frozen,
                (_, true) => Place::ForHeldWrites,
                _ => Place::ForFlush,
            };
            self.scan_bio(io.flush.pending[index], place, io, &mut scan);
        }
        // The bios that the flush in flight serves are reported as part of the flush.
        for &bio in &io.flush.running {
            self.see(bio, io.in_flight[bio].start_ns);
        }
        let Scan { mut found, now_ns, .. } = scan;
        found.completed = self.finish_scan(now_ns);
        found.failures = io.failures.take();
        io.stats.count(Counter::Hangs, found.hangs.len() as u64 + found.more);
        io.stats.hung(found.hung);
        found
    }

    fn scan_request(&mut self, tag: Tag, io: &mut Io, scan: &mut Scan<'_>) {
        io.in_flight.fill_plain(tag);
        let request = &mut io.in_flight[tag];
        if request.start_ns == 0 {
            request.start_ns = scan.now_ns;
        }
        let (first, outline) = (request.first_bio, request.outline());
        // The time for which a request waits for a rate limit does not count.
        let is_hung = scan.count(outline.start_ns.max(scan.throttled_until_ns(tag, io)));
        // Any bio of the request may have been counted or reported before it was part of a request.
        let (mut counted, mut bios, mut began_ns) = (false, 0, outline.start_ns);
        if first == NIL {
            counted = self.see(NIL, outline.start_ns);
            bios = io.flush.running.len() as u32;
        }
        let mut bio = first;
        while bio != NIL {
            let slot = &mut io.in_flight[bio];
            if slot.start_ns == 0 {
                slot.start_ns = outline.start_ns;
            }
            if bio == first {
                began_ns = slot.start_ns;
            }
            counted |= self.see(bio, slot.start_ns);
            (bio, bios) = (slot.next, bios + 1);
        }
        if is_hung && !counted {
            let place = scan.place_of(tag, io);
            self.add_hang(scan, (first, began_ns), outline, Some(tag), bios, place, io);
        }
    }

    fn scan_bio(&mut self, bio: u32, place: Place, io: &mut Io, scan: &mut Scan<'_>) {
        let slot = &mut io.in_flight[bio];
        if slot.start_ns == 0 {
            slot.start_ns = scan.now_ns;
        }
        let outline = slot.outline();
        let counted = self.see(bio, outline.start_ns);
        if !scan.dispatch.throttle.is_waiting() && scan.count(outline.start_ns) && !counted {
            self.add_hang(scan, (bio, outline.start_ns), outline, None, 1, place, io);
        }
    }

    /// Marks the bio, or the driver's flush for [`NIL`], as still in flight. Returns whether it was counted as hanging
    /// before.
    fn see(&mut self, bio: u32, start_ns: u64) -> bool {
        let same = |one: &&mut ReportedHang| one.bio == bio && one.start_ns == start_ns;
        if let Some(one) = self.reported.iter_mut().find(same) {
            one.seen = true;
        }
        self.counted_ns.get(&bio) == Some(&start_ns)
    }

    /// Counts I/O that hangs and was not counted before, and reports it unless too many reported hangs have
    /// not completed. Its first bio is `bio` ([`NIL`] for the driver's flush), accepted at `began_ns`.
    #[expect(clippy::too_many_arguments, reason = "the facts of a report")]
    fn add_hang(
        &mut self,
        scan: &mut Scan<'_>,
        (bio, began_ns): (u32, u64),
        outline: Outline,
        tag: Option<Tag>,
        bios: u32,
        place: Place,
        io: &Io,
    ) {
        self.counted_ns.insert(bio, began_ns);
        if self.reported.len() == REPORTED_MAX {
            scan.found.more += 1;
            return;
        }
        let Outline { operation, flags, sector, sectors, start_ns } = outline;
        self.reported_count += 1;
        let (number, queue) = (self.reported_count, io.disk.index);
        let hung = HungIo { number, queue, tag, operation, flags, sector, sectors };
        self.reported.push(ReportedHang { io: hung.clone(), bio, start_ns: began_ns, seen: true });
        let submitted = if bio == NIL { io.flush.running.front().copied() } else { Some(bio) };
        let user_data = submitted.and_then(|bio| io.user_data_of(bio));
        let client = (submitted.is_some() && user_data.is_none()).then(|| THREAD.to_owned());
        let age_ns = scan.now_ns.saturating_sub(start_ns);
        scan.found.hangs.push(Hang { io: hung, age_ns, bios, place, client, user_data });
    }

    /// Ends a scan. Returns the reported hangs that have completed since the last scan, also those of bios
    /// that never became requests, which this scan no longer sees.
    fn finish_scan(&mut self, now_ns: u64) -> Vec<HangCompletion> {
        let age_ns = |start_ns: u64| now_ns.saturating_sub(start_ns);
        let unseen = self.reported.extract_if(.., |one| !one.seen);
        let unseen =
            unseen.map(|one| HangCompletion { io: one.io, age_ns: age_ns(one.start_ns), result: None });
        let completed = self.completed.drain(..).map(|(completion, is_start)| HangCompletion {
            age_ns: if is_start { age_ns(completion.age_ns) } else { completion.age_ns },
            ..completion
        });
        unseen.chain(completed).collect()
    }
}

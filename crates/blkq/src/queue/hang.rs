//! Detects I/O that hangs: which requests have been in flight for too long, where they are, and how they
//! complete in the end. Unlike the kernel's request timeout (block/blk-timeout.c), this only reports: nothing
//! is aborted or retried.
//!
//! The data path does no work for this. A watcher asks the owner of a queue from time to time to scan its
//! requests, and passes the time of its own clock. The scan runs on the owner's thread, so it needs no lock
//! and sees no request half changed. With iostats, requests already carry their start time, for the latency.
//! Without iostats, the first scan that sees a request writes the watcher's time into it, and the request's
//! age is counted from that time.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use crate::bio::{BioFlags, Operation, Outline};
use crate::error::{IoResult, Status};
use crate::request::{NIL, Request, RequestState};
use crate::sector::Sector;
use crate::stats::Counter;
use crate::tags::Tag;

use super::dispatch::Dispatch;
use super::failures::{Failures, THREAD};
use super::hold::Hold;
use super::io::Io;

/// The number of hanging requests of a queue that are reported one by one, until they complete. The others
/// are only counted.
pub const REPORTED_MAX: usize = 32;

/// Where a request, or a bio without a request, waits.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Place {
    /// The bio waits for a tag, with this number of bios ahead.
    ForTag(usize),
    /// The bio or flush waits for the end of a freeze.
    Frozen,
    /// The bio waits for the next flush, which starts when the flush in flight has completed.
    ForFlush,
    /// The flush waits for held writes to complete.
    ForHeldWrites,
    /// The request failed with this error, and is held until the operator resumes the disk.
    Held(Status),
    /// The request is in the plug, until the batch is full or the owner of the queue polls.
    Plug,
    /// The request is queued in the scheduler.
    Scheduler,
    /// The request is requeued, because the driver was busy.
    Dispatch,
    /// The request waits for the end of a quiesce.
    Quiesced,
    /// The driver has the request. The text is from [`DriverQueue::state`](crate::DriverQueue::state).
    Driver(Cow<'static, str>),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::ForTag(0) => f.write_str("waiting for a tag, first in line"),
            Place::ForTag(before) => write!(f, "waiting for a tag, {before} ahead of it"),
            Place::Frozen => f.write_str("waiting until the device is no longer frozen"),
            Place::ForFlush => f.write_str("waiting for a flush to begin"),
            Place::ForHeldWrites => f.write_str("waiting for writes that are held"),
            Place::Held(status) => write!(f, "held: {status}"),
            Place::Plug => f.write_str("in the plug"),
            Place::Scheduler => f.write_str("in the scheduler"),
            Place::Dispatch => f.write_str("requeued: the driver was busy"),
            Place::Quiesced => f.write_str("waiting until the device is no longer quiesced"),
            Place::Driver(state) => f.write_str(state),
        }
    }
}

/// The identity of a request, or of a bio without a request, in reports.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HungIo {
    /// Number of the report, from 1 in each queue.
    pub number: u64,
    /// Index of the hardware queue.
    pub queue: usize,
    /// The tag of the request, or `None` for a bio without a request.
    pub tag: Option<Tag>,
    /// The operation of the request or bio.
    pub operation: Operation,
    /// The flags of the operation.
    pub flags: BioFlags,
    /// The first sector. 0 for a flush.
    pub sector: Sector,
    /// The length in sectors of 512 bytes. 0 for a flush.
    pub sectors: u64,
}

impl fmt::Display for HungIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HungIo { number, queue, tag, operation, flags, sector, sectors } = self;
        write!(f, "#{queue}.{number} {}", operation.name())?;
        if *operation != Operation::Flush {
            write!(f, " sector {} + {sectors}", sector.0)?;
        }
        if !flags.is_empty() {
            let names: Vec<String> =
                flags.iter_names().map(|(name, _)| name.to_lowercase().replace('_', "-")).collect();
            write!(f, " ({})", names.join(", "))?;
        }
        write!(f, ", queue {queue}")?;
        match tag {
            Some(tag) => write!(f, ", tag {}", tag.0),
            None => f.write_str(", no tag"),
        }
    }
}

/// A request or bio that has been in flight for too long.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Hang {
    /// The request or bio that hangs.
    pub io: HungIo,
    /// How long it has been in flight, in nanoseconds. Without iostats the time since a scan first saw it.
    pub age_ns: u64,
    /// The number of its bios. For a flush, the number of bios that it serves.
    pub bios: u32,
    /// Where the request or bio waits.
    pub place: Place,
    /// The client that submitted its first bio, if known.
    pub client: Option<String>,
    /// The `user_data` of that bio, if the owner of the queue submitted it.
    pub(crate) user_data: Option<u64>,
}

/// The completion of a request or bio that was reported as hanging.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HangCompletion {
    /// The request or bio that hung.
    pub io: HungIo,
    /// How long it was in flight, in nanoseconds. Without iostats or a result, only as exact as the scans.
    pub age_ns: u64,
    /// The result, or `None` if a bio completed between two scans and never became a request.
    pub result: Option<IoResult>,
}

/// The result of a scan.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct HangScan {
    /// Hangs that were found for the first time. A queue with [`REPORTED_MAX`] reported hangs reports further
    /// ones only after some of these have completed.
    pub hangs: Vec<Hang>,
    /// The number of further hangs that were found for the first time.
    pub more: u64,
    /// The number of all requests and bios that are hanging now.
    pub hung: u64,
    /// Hangs that were reported before and have completed since.
    pub completed: Vec<HangCompletion>,
    /// Requests that failed since the last scan, however long they took.
    pub failures: Failures,
}

impl HangScan {
    pub(crate) fn add(&mut self, other: HangScan) {
        self.hangs.extend(other.hangs);
        self.more += other.more;
        self.hung += other.hung;
        self.completed.extend(other.completed);
        self.failures.add(other.failures);
    }
}

#[derive(Debug)]
struct ReportedHang {
    io: HungIo,
    /// The first bio of the request, or [`NIL`] for the driver's flush.
    bio: u32,
    start_ns: u64,
    /// Whether the current scan has seen it.
    seen: bool,
}

/// The hangs of a queue that were counted and reported.
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
    pub io: &'a mut Io,
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
    fn throttled_until_ns(&self, tag: Tag) -> u64 {
        let Dispatch { throttle, .. } = self.dispatch;
        let operation = self.io.in_flight[tag].operation;
        let is_blocked = throttle.is_blocked(operation) && self.dispatch.is_scheduled(tag);
        if is_blocked { u64::MAX } else { throttle.released_ns(tag) }
    }

    fn place_of(&self, tag: Tag) -> Place {
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
            return Place::Driver(self.dispatch.state(tag, &self.io.in_flight[tag]));
        };
        if self.io.disk.control().is_quiesced() { Place::Quiesced } else { place }
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
    pub fn scan(&mut self, mut scan: Scan<'_>) -> HangScan {
        self.reported.iter_mut().for_each(|one| one.seen = false);
        for tag in (0..scan.io.in_flight.requests().len()).map(|index| Tag(index as u16)) {
            if scan.io.in_flight[tag].state != RequestState::Idle {
                self.scan_request(tag, &mut scan);
            }
        }
        let frozen = scan.io.disk.is_frozen();
        for before in 0..scan.io.waiting.len() {
            let place = if frozen { Place::Frozen } else { Place::ForTag(before) };
            self.scan_bio(scan.io.waiting[before].0, place, &mut scan);
        }
        for index in 0..scan.io.flush.pending.len() {
            let place = match (frozen, scan.io.disk.disk.hold.has_writes()) {
                (true, _) => Place::Frozen,
                (_, true) => Place::ForHeldWrites,
                _ => Place::ForFlush,
            };
            self.scan_bio(scan.io.flush.pending[index], place, &mut scan);
        }
        let Scan { io, mut found, now_ns, .. } = scan;
        // The bios that the flush in flight serves are reported as part of the flush.
        for &bio in &io.flush.running {
            self.see(bio, io.in_flight[bio].start_ns);
        }
        found.completed = self.finish_scan(now_ns);
        found.failures = io.failures.take();
        io.stats.count(Counter::Hangs, found.hangs.len() as u64 + found.more);
        io.stats.hung(found.hung);
        found
    }

    fn scan_request(&mut self, tag: Tag, scan: &mut Scan<'_>) {
        scan.io.in_flight.fill_plain(tag);
        let request = &mut scan.io.in_flight[tag];
        if request.start_ns == 0 {
            request.start_ns = scan.now_ns;
        }
        let (first, outline) = (request.first_bio, request.outline());
        // The time for which a request waits for a rate limit does not count.
        let is_hung = scan.count(outline.start_ns.max(scan.throttled_until_ns(tag)));
        // Any bio of the request may have been counted or reported before it was part of a request.
        let (mut counted, mut bios, mut began_ns) = (false, 0, outline.start_ns);
        if first == NIL {
            counted = self.see(NIL, outline.start_ns);
            bios = scan.io.flush.running.len() as u32;
        }
        let mut bio = first;
        while bio != NIL {
            let slot = &mut scan.io.in_flight[bio];
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
            let place = scan.place_of(tag);
            self.add_hang(scan, (first, began_ns), outline, Some(tag), bios, place);
        }
    }

    fn scan_bio(&mut self, bio: u32, place: Place, scan: &mut Scan<'_>) {
        let slot = &mut scan.io.in_flight[bio];
        if slot.start_ns == 0 {
            slot.start_ns = scan.now_ns;
        }
        let outline = slot.outline();
        let counted = self.see(bio, outline.start_ns);
        if !scan.dispatch.throttle.is_waiting() && scan.count(outline.start_ns) && !counted {
            self.add_hang(scan, (bio, outline.start_ns), outline, None, 1, place);
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
    fn add_hang(
        &mut self,
        scan: &mut Scan<'_>,
        (bio, began_ns): (u32, u64),
        outline: Outline,
        tag: Option<Tag>,
        bios: u32,
        place: Place,
    ) {
        let io = &*scan.io;
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

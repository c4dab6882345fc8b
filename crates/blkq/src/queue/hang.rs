//! Watching for requests that hang: which are in flight for longer than they should be, where
//! they are, and how they complete at last.
//!
//! Nothing of this is on the data path. A watcher asks the owner of a queue now and then,
//! with the time of its own clock, and the owner scans its requests: what it finds
//! needs no lock and is never half a state. Requests carry the time of their beginning anyway.
//! Without iostats they carry none; then the first scan that finds one writes the watcher's
//! time where it would be, and from then on it ages.

use std::borrow::Cow;
use std::fmt;

use crate::bio::{BioFlags, Operation};
use crate::clock::Clock;
use crate::error::{IoResult, Status};
use crate::request::{NIL, Request};
use crate::sector::Sector;
use crate::tags::Tag;

use super::in_flight::InFlight;

/// Requests of a queue that are reported one by one, until they complete; of more there is only
/// the number.
pub const REPORTED_MAX: usize = 32;

/// Where a request is, or a bio that has none yet.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Place {
    /// It waits for a tag, behind so many others.
    ForTag(usize),
    /// It waits until a freeze is lifted.
    Frozen,
    /// It waits for the flush in flight to complete, and for the next one.
    ForFlush,
    /// It is a flush that waits for writes which are held.
    ForHeldWrites,
    /// It failed with this error, and is held until the disk is resumed.
    Held(Status),
    /// It waits until its batch is full or the owner of the queue polls.
    Plug,
    /// The scheduler has it.
    Scheduler,
    /// The driver was busy: it is requeued.
    Dispatch,
    /// It waits until a quiesce is lifted.
    Quiesced,
    /// The driver has it, in this state.
    Driver(Cow<'static, str>),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::ForTag(0) => f.write_str("first of those that wait for a tag"),
            Place::ForTag(before) => write!(f, "waiting for a tag, {before} before it"),
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

/// A request, or a bio without one.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HungIo {
    /// Counted up from 1 in each queue.
    pub number: u64,
    /// The hardware queue.
    pub queue: usize,
    /// Its tag; `None` for a bio that has none.
    pub tag: Option<Tag>,
    /// The operation.
    pub operation: Operation,
    /// How to do it.
    pub flags: BioFlags,
    /// Where it begins.
    pub sector: Sector,
    /// How long it is.
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

/// Something that is in flight for too long.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Hang {
    /// The request or bio that hangs.
    pub io: HungIo,
    /// For how long it has been in flight, in nanoseconds; without iostats, since a scan first
    /// found it.
    pub age_ns: u64,
    /// Bios in it; for a flush, those that it serves.
    pub bios: u32,
    /// Where it is.
    pub place: Place,
    /// The client of the first of its bios, if that is known.
    pub client: Option<String>,
    /// That bio's `user_data`, if the owner of the queue submitted it.
    pub(crate) user_data: Option<u64>,
}

/// The completion of something that hung and was reported.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HangCompletion {
    /// The request or bio that hung.
    pub io: HungIo,
    /// For how long it was in flight, in nanoseconds, as far as is known.
    pub age_ns: u64,
    /// How it completed; `None` if it did between two scans, without a request.
    pub result: Option<IoResult>,
}

/// The findings of a scan.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct HangScan {
    /// Found for the first time: at most [`REPORTED_MAX`] of a queue until those have completed.
    pub hangs: Vec<Hang>,
    /// How many more were found for the first time.
    pub more: u64,
    /// All that is in flight for too long now.
    pub hung: u64,
    /// Reported before, and completed since.
    pub completed: Vec<HangCompletion>,
}

impl HangScan {
    /// Adds what was found in another queue.
    pub(crate) fn add(&mut self, other: HangScan) {
        self.hangs.extend(other.hangs);
        self.more += other.more;
        self.hung += other.hung;
        self.completed.extend(other.completed);
    }
}

/// Something that was reported and has not completed.
#[derive(Debug)]
struct ReportedHang {
    io: HungIo,
    /// Its first bio; [`NIL`] for the driver's flush.
    bio: u32,
    start_ns: u64,
    /// The last scan found it.
    seen: bool,
}

/// The state of a queue between two scans.
#[derive(Debug, Default)]
pub(super) struct HangTracker {
    /// For each bio the time of its beginning, once it was counted as hanging: no other bio
    /// in its place began then.
    counted_ns: Vec<u64>,
    /// The same of the driver's flush.
    flush_counted_ns: u64,
    reported: Vec<ReportedHang>,
    /// Whether the age is the time of its beginning instead, as no clock was read then.
    completed: Vec<(HangCompletion, bool)>,
    reported_count: u64,
}

impl HangTracker {
    /// Whether requests that complete are to be compared with those that were reported.
    #[inline]
    pub fn has_reported(&self) -> bool {
        !self.reported.is_empty()
    }

    /// Notes which of the requests that complete now were reported.
    #[cold]
    pub fn note_completed(
        &mut self,
        completed: &[(Tag, IoResult)],
        in_flight: &InFlight,
        clock: &mut Clock,
        iostats: bool,
    ) {
        for &(tag, result) in completed {
            let Request { first_bio, start_ns, .. } = in_flight[tag];
            // Without iostats no clock is read: the next scan knows the time.
            let age_ns = if iostats { clock.now_ns().saturating_sub(start_ns) } else { start_ns };
            let (mut bio, is_flush) = (first_bio, first_bio == NIL);
            while is_flush || bio != NIL {
                let began_ns = if is_flush { start_ns } else { in_flight[bio].start_ns };
                let same = |one: &ReportedHang| one.bio == bio && one.start_ns == began_ns;
                if let Some(at) = self.reported.iter().position(same) {
                    let io = HungIo { tag: Some(tag), ..self.reported.swap_remove(at).io };
                    let completion = HangCompletion { io, age_ns, result: Some(result) };
                    self.completed.push((completion, !iostats));
                }
                if is_flush {
                    break;
                }
                bio = in_flight[bio].next;
            }
        }
    }

    /// A scan begins: nothing has been seen.
    pub fn begin_scan(&mut self) {
        self.reported.iter_mut().for_each(|one| one.seen = false);
    }

    /// The bio, or the driver's flush, is still in flight.
    pub fn see(&mut self, bio: u32, start_ns: u64) {
        let same = |one: &&mut ReportedHang| one.bio == bio && one.start_ns == start_ns;
        if let Some(one) = self.reported.iter_mut().find(same) {
            one.seen = true;
        }
    }

    /// Whether the bio, or the driver's flush, was counted as hanging before.
    pub fn has_counted(&self, bio: u32, start_ns: u64) -> bool {
        match bio {
            NIL => self.flush_counted_ns == start_ns,
            _ => self.counted_ns.get(bio as usize) == Some(&start_ns),
        }
    }

    pub fn count(&mut self, bio: u32, start_ns: u64) {
        if bio == NIL {
            self.flush_counted_ns = start_ns;
            return;
        }
        let at = bio as usize;
        if self.counted_ns.len() <= at {
            self.counted_ns.resize(at + 1, 0);
        }
        self.counted_ns[at] = start_ns;
    }

    /// Whether there are as many reported as are reported one by one.
    pub fn is_full(&self) -> bool {
        self.reported.len() == REPORTED_MAX
    }

    pub fn next_number(&mut self) -> u64 {
        self.reported_count += 1;
        self.reported_count
    }

    /// `io`, which begins with `bio`, is reported.
    pub fn add_reported(&mut self, io: &HungIo, bio: u32, start_ns: u64) {
        self.reported.push(ReportedHang { io: io.clone(), bio, start_ns, seen: true });
    }

    /// A scan is over: what was reported and not seen has completed, and what completed since the
    /// last scan.
    pub fn finish_scan(&mut self, now_ns: u64) -> Vec<HangCompletion> {
        let mut all = Vec::new();
        self.reported.retain(|one| {
            if !one.seen {
                let age_ns = now_ns.saturating_sub(one.start_ns);
                all.push(HangCompletion { io: one.io.clone(), age_ns, result: None });
            }
            one.seen
        });
        for (mut completion, is_start) in self.completed.drain(..) {
            if is_start {
                completion.age_ns = now_ns.saturating_sub(completion.age_ns);
            }
            all.push(completion);
        }
        all
    }
}

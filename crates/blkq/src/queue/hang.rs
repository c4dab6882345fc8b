//! Watching for requests that hang: which are in flight for longer than they should be, where
//! they are, and how they end at last.
//!
//! Nothing of this is on the data path. Whoever watches asks the owner of a queue now and then,
//! with the time of its own clock, and the owner looks through its requests: what it finds
//! needs no lock and is never half a state. Requests carry the time of their beginning anyway.
//! Without iostats they carry none; then the first look that finds one writes the watcher's
//! time where it would be, and from then on it ages.

use std::borrow::Cow;
use std::fmt;

use crate::bio::{BioFlags, Operation};
use crate::error::IoResult;
use crate::queue::Queue;
use crate::request::NIL;
use crate::request::{Request, RequestState};
use crate::sector::Sector;
use crate::stats::Counter;
use crate::tags::Tag;

/// Requests of a queue that are told of one by one, until they end; of more there is only
/// the number.
pub const NAMED_MAX: usize = 32;

/// Where a request is, or a bio that has none yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// It waits for a tag, behind so many others.
    ForTag(usize),
    /// It waits until a freeze ends.
    Frozen,
    /// It waits for the flush in flight to end, and for the next one.
    ForFlush,
    /// It is held back until its batch is full or the owner of the queue polls.
    Plug,
    /// The scheduler has it.
    Scheduler,
    /// The driver refused it, and is to be offered it again.
    Dispatch,
    /// It waits until a quiesce ends.
    Quiesced,
    /// The driver has it, and says so.
    Driver(Cow<'static, str>),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::ForTag(0) => f.write_str("first of those that wait for a tag"),
            Place::ForTag(before) => write!(f, "waiting for a tag, {before} before it"),
            Place::Frozen => f.write_str("waiting until the device is no longer frozen"),
            Place::ForFlush => f.write_str("waiting for a flush to begin"),
            Place::Plug => f.write_str("in the plug"),
            Place::Scheduler => f.write_str("in the scheduler"),
            Place::Dispatch => f.write_str("refused by the driver, to be offered again"),
            Place::Quiesced => f.write_str("waiting until the device is no longer quiesced"),
            Place::Driver(state) => f.write_str(state),
        }
    }
}

/// A request, or a bio without one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Subject {
    /// Counted up from 1 in each queue.
    pub number: u64,
    /// The hardware queue.
    pub queue: usize,
    /// Its tag; `None` for a bio that has none.
    pub tag: Option<Tag>,
    /// What to do.
    pub operation: Operation,
    /// How to do it.
    pub flags: BioFlags,
    /// Where it begins.
    pub sector: Sector,
    /// How long it is.
    pub sectors: u64,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Subject { number, queue, tag, operation, flags, sector, sectors } = self;
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
pub struct Hang {
    /// What it is.
    pub subject: Subject,
    /// For how long it has been in flight, in nanoseconds; without iostats, since a look first
    /// found it.
    pub age_ns: u64,
    /// Bios in it; for a flush, those that it serves.
    pub bios: u32,
    /// Where it is.
    pub place: Place,
    /// Who asked for the first of its bios, if that is known.
    pub client: Option<String>,
    /// That bio's mark, if the owner of the queue submitted it.
    pub(crate) mark: Option<u64>,
}

/// The end of something that hung and was told of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HangCompletion {
    /// What it was.
    pub subject: Subject,
    /// For how long it was in flight, in nanoseconds, as far as is known.
    pub age_ns: u64,
    /// How it ended; `None` if it did between two looks, without a request.
    pub result: Option<IoResult>,
}

/// What a look found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HangScan {
    /// Found for the first time: at most [`NAMED_MAX`] of a queue until those have ended.
    pub hangs: Vec<Hang>,
    /// How many more were found for the first time.
    pub more: u64,
    /// All that is in flight for too long now.
    pub hung: u64,
    /// What was told of and has ended since.
    pub ended: Vec<HangCompletion>,
}

impl HangScan {
    /// Adds what was found in another queue.
    pub(crate) fn add(&mut self, other: HangScan) {
        self.hangs.extend(other.hangs);
        self.more += other.more;
        self.hung += other.hung;
        self.ended.extend(other.ended);
    }
}

/// Something that was told of and has not ended.
#[derive(Debug)]
struct Named {
    subject: Subject,
    /// Its first bio; [`NIL`] for the driver's flush.
    bio: u32,
    start_ns: u64,
    /// The last look found it.
    seen: bool,
}

/// What a queue remembers between two looks.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// For each bio the time of its beginning, once it was counted as hanging: no other bio
    /// in its place began then.
    counted_ns: Vec<u64>,
    /// The same of the driver's flush.
    flush_counted_ns: u64,
    named: Vec<Named>,
    /// Whether what is told as its age is the time of its beginning, as no clock was read then.
    ended: Vec<(HangCompletion, bool)>,
    told: u64,
}

/// One look in progress.
struct Scan {
    now_ns: u64,
    limit_ns: u64,
    look: HangScan,
    new: u64,
}

impl Watch {
    /// Whether ends of requests are to be compared with what was told of.
    #[inline]
    pub fn waits_for_ends(&self) -> bool {
        !self.named.is_empty()
    }
}

impl Queue {
    /// Looks for what began more than `limit_ns` before `now_ns`.
    pub(crate) fn scan_for_hangs(&mut self, now_ns: u64, limit_ns: u64) -> HangScan {
        let mut looking = Scan { now_ns, limit_ns, look: HangScan::default(), new: 0 };
        self.watch.named.iter_mut().for_each(|named| named.seen = false);
        let mut left = self.in_use;
        for index in 0..self.requests.len() {
            if left == 0 {
                break;
            }
            if self.requests[index].state == RequestState::Busy {
                left -= 1;
                self.scan_request(Tag(index as u16), &mut looking);
            }
        }
        let frozen = self.disk.control.is_frozen();
        let (mut bio, mut before) = (self.waiting.first(), 0);
        while bio != NIL {
            let place = if frozen { Place::Frozen } else { Place::ForTag(before) };
            self.scan_bio(bio, place, &mut looking);
            (bio, before) = (self.bios[bio].next, before + 1);
        }
        for index in 0..self.flush.pending().len() {
            let bio = self.flush.pending()[index];
            let place = if frozen { Place::Frozen } else { Place::ForFlush };
            self.scan_bio(bio, place, &mut looking);
        }
        // What a running flush serves is part of that.
        let Watch { named, .. } = &mut self.watch;
        for one in named.iter_mut().filter(|one| !one.seen) {
            one.seen = self.flush.running().contains(&one.bio) && self.bios[one.bio].start_ns == one.start_ns;
        }
        let mut look = looking.look;
        self.watch.named.retain(|one| {
            if !one.seen {
                let age_ns = now_ns.saturating_sub(one.start_ns);
                look.ended.push(HangCompletion { subject: one.subject.clone(), age_ns, result: None });
            }
            one.seen
        });
        for (mut end, is_start) in self.watch.ended.drain(..) {
            if is_start {
                end.age_ns = now_ns.saturating_sub(end.age_ns);
            }
            look.ended.push(end);
        }
        self.stats.count(Counter::Hangs, looking.new);
        self.stats.hung(look.hung);
        look
    }

    fn scan_request(&mut self, tag: Tag, looking: &mut Scan) {
        let request = &mut self.requests[tag.index()];
        if request.start_ns == 0 {
            request.start_ns = looking.now_ns;
        }
        let start_ns = request.start_ns;
        let (first, operation, flags) = (request.first_bio, request.operation, request.flags);
        let (sector, sectors) = (request.sector, request.sectors);
        let is_hung = looking.is_hung(start_ns);
        if is_hung {
            looking.look.hung += 1;
        }
        // Of its bios any may have been told of while it had no request.
        let (mut counted, mut bios, mut bio) = (false, 0, first);
        if bio == NIL {
            counted = self.watch.flush_counted_ns == start_ns;
            self.watch.see(NIL, start_ns);
            bios = self.flush.running().len() as u32;
        }
        while bio != NIL {
            let slot = &mut self.bios[bio];
            if slot.start_ns == 0 {
                slot.start_ns = start_ns;
            }
            let (began_ns, next) = (slot.start_ns, slot.next);
            counted |= self.watch.has_counted(bio, began_ns);
            self.watch.see(bio, began_ns);
            (bio, bios) = (next, bios + 1);
        }
        if !is_hung || counted {
            return;
        }
        looking.new += 1;
        let key_ns = if first == NIL { start_ns } else { self.bios[first].start_ns };
        self.watch.count(first, key_ns);
        if self.watch.named.len() == NAMED_MAX {
            looking.look.more += 1;
            return;
        }
        let asker = if first == NIL { self.flush.running().front().copied() } else { Some(first) };
        let (mark, client) = asker.map(|bio| self.asker(bio)).unwrap_or_default();
        let hang = Hang {
            subject: Subject {
                number: self.watch.next_number(),
                queue: self.index,
                tag: Some(tag),
                operation,
                flags,
                sector,
                sectors,
            },
            age_ns: looking.now_ns.saturating_sub(start_ns),
            bios,
            place: self.place_of(tag),
            client,
            mark,
        };
        self.watch.name(&hang.subject, first, key_ns);
        looking.look.hangs.push(hang);
    }

    fn scan_bio(&mut self, bio: u32, place: Place, looking: &mut Scan) {
        let slot = &mut self.bios[bio];
        if slot.start_ns == 0 {
            slot.start_ns = looking.now_ns;
        }
        let outline = slot.outline();
        self.watch.see(bio, outline.start_ns);
        if !looking.is_hung(outline.start_ns) {
            return;
        }
        looking.look.hung += 1;
        if self.watch.has_counted(bio, outline.start_ns) {
            return;
        }
        looking.new += 1;
        self.watch.count(bio, outline.start_ns);
        if self.watch.named.len() == NAMED_MAX {
            looking.look.more += 1;
            return;
        }
        let (mark, client) = self.asker(bio);
        let hang = Hang {
            subject: Subject {
                number: self.watch.next_number(),
                queue: self.index,
                tag: None,
                operation: outline.operation,
                flags: outline.flags,
                sector: outline.sector,
                sectors: outline.sectors,
            },
            age_ns: looking.now_ns.saturating_sub(outline.start_ns),
            bios: 1,
            place,
            client,
            mark,
        };
        self.watch.name(&hang.subject, bio, outline.start_ns);
        looking.look.hangs.push(hang);
    }

    /// Who is told of the end of a bio: the mark of one that the queue's owner submitted, or in words.
    fn asker(&self, bio: u32) -> (Option<u64>, Option<String>) {
        let mut slot = &self.bios[bio];
        while slot.parent != NIL {
            slot = &self.bios[slot.parent];
        }
        match slot.owners_mark() {
            Some(mark) => (Some(mark), None),
            None => (None, Some("a thread of this process".to_owned())),
        }
    }

    fn place_of(&self, tag: Tag) -> Place {
        let held = self.scheduler.as_ref().is_some_and(|scheduler| scheduler.holds(tag));
        let plugged = self.plug.requests.contains(&tag);
        let refused = self.dispatch.contains(&tag);
        if (held || plugged || refused) && self.disk.control.is_quiesced() {
            return Place::Quiesced;
        }
        match (held, plugged, refused) {
            (true, _, _) => Place::Scheduler,
            (_, true, _) => Place::Plug,
            (_, _, true) => Place::Dispatch,
            _ => Place::Driver(self.driver.state(tag, &self.requests[tag.index()])),
        }
    }

    /// Notes which of the requests that end now were told of.
    #[cold]
    pub(crate) fn note_ends(&mut self, completed: &[(Tag, IoResult)]) {
        for &(tag, result) in completed {
            let Request { first_bio, start_ns, .. } = self.requests[tag.index()];
            // Without iostats no clock is read: the next look knows the time.
            let age_ns =
                if self.settings.iostats { self.clock.now_ns().saturating_sub(start_ns) } else { start_ns };
            let (mut bio, is_flush) = (first_bio, first_bio == NIL);
            while is_flush || bio != NIL {
                let began_ns = if is_flush { start_ns } else { self.bios[bio].start_ns };
                let Watch { named, ended, .. } = &mut self.watch;
                if let Some(at) = named.iter().position(|one| one.bio == bio && one.start_ns == began_ns) {
                    let subject = Subject { tag: Some(tag), ..named.swap_remove(at).subject };
                    ended.push((
                        HangCompletion { subject, age_ns, result: Some(result) },
                        !self.settings.iostats,
                    ));
                }
                if is_flush {
                    break;
                }
                bio = self.bios[bio].next;
            }
        }
    }
}

impl Scan {
    fn is_hung(&self, start_ns: u64) -> bool {
        self.now_ns.saturating_sub(start_ns) > self.limit_ns
    }
}

impl Watch {
    /// The bio, or the driver's flush, is still in flight.
    fn see(&mut self, bio: u32, start_ns: u64) {
        let same = |one: &&mut Named| one.bio == bio && one.start_ns == start_ns;
        if let Some(one) = self.named.iter_mut().find(same) {
            one.seen = true;
        }
    }

    fn has_counted(&self, bio: u32, start_ns: u64) -> bool {
        self.counted_ns.get(bio as usize) == Some(&start_ns)
    }

    fn count(&mut self, bio: u32, start_ns: u64) {
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

    fn next_number(&mut self) -> u64 {
        self.told += 1;
        self.told
    }

    fn name(&mut self, subject: &Subject, bio: u32, start_ns: u64) {
        self.named.push(Named { subject: subject.clone(), bio, start_ns, seen: true });
    }
}

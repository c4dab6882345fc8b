//! The hangs of a queue that were counted and reported.

use crate::error::IoResult;
use crate::request::{NIL, Request};
use crate::tags::Tag;

use super::hang::{HangCompletion, HungIo, REPORTED_MAX};
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
    /// For each bio slot the start time of the bio that was counted as hanging. The time identifies the bio:
    /// no other bio in the same slot has the same start time.
    counted_ns: Vec<u64>,
    /// The start time of the driver's flush that was counted as hanging.
    flush_counted_ns: u64,
    reported: Vec<ReportedHang>,
    /// Completions since the last scan. True: `age_ns` is a start time, because without iostats no clock was
    /// read when the request completed.
    completed: Vec<(HangCompletion, bool)>,
    reported_count: u64,
}

impl HangTracker {
    /// Whether completing requests must be compared with the reported ones.
    #[inline]
    pub fn has_reported(&self) -> bool {
        !self.reported.is_empty()
    }

    /// Records which of the requests that complete now were reported.
    #[cold]
    pub fn note_completed(&mut self, completed: &[(Tag, IoResult)], io: &mut Io) {
        let iostats = io.disk.settings().iostats;
        for &(tag, result) in completed {
            io.in_flight.fill_plain(tag);
            let Request { first_bio, start_ns, .. } = io.in_flight[tag];
            // Without iostats no clock is read here. The next scan computes the age.
            let age_ns = if iostats { io.clock.now_ns().saturating_sub(start_ns) } else { start_ns };
            let (mut bio, is_flush) = (first_bio, first_bio == NIL);
            while is_flush || bio != NIL {
                let began_ns = if is_flush { start_ns } else { io.in_flight[bio].start_ns };
                let same = |one: &ReportedHang| one.bio == bio && one.start_ns == began_ns;
                if let Some(at) = self.reported.iter().position(same) {
                    let hung = HungIo { tag: Some(tag), ..self.reported.swap_remove(at).io };
                    let completion = HangCompletion { io: hung, age_ns, result: Some(result) };
                    self.completed.push((completion, !iostats));
                }
                if is_flush {
                    break;
                }
                bio = io.in_flight[bio].next;
            }
        }
    }

    pub fn begin_scan(&mut self) {
        self.reported.iter_mut().for_each(|one| one.seen = false);
    }

    /// Marks the bio, or the driver's flush for [`NIL`], as still in flight.
    pub fn see(&mut self, bio: u32, start_ns: u64) {
        let same = |one: &&mut ReportedHang| one.bio == bio && one.start_ns == start_ns;
        if let Some(one) = self.reported.iter_mut().find(same) {
            one.seen = true;
        }
    }

    /// Whether the bio, or the driver's flush for [`NIL`], was counted as hanging before.
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

    pub fn is_full(&self) -> bool {
        self.reported.len() == REPORTED_MAX
    }

    pub fn next_number(&mut self) -> u64 {
        self.reported_count += 1;
        self.reported_count
    }

    pub fn add_reported(&mut self, io: &HungIo, bio: u32, start_ns: u64) {
        self.reported.push(ReportedHang { io: io.clone(), bio, start_ns, seen: true });
    }

    /// Ends a scan. Returns the reported hangs that have completed since the last scan, also those of bios
    /// that never became requests, which this scan no longer sees.
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

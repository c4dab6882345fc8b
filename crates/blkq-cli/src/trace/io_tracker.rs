//! Follows each I/O through its events: finds which events belong together, and how long each stage took.
//!
//! An I/O consists of a bio, all requests that carry it out, and all bios that were merged into these
//! requests. It has completed when the last of these requests has.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;

use blkq::trace::{EventKind, NO_BIO, TraceEvent};
use blkq::{Operation, Tag};
use serde::Serialize;

use super::item::{Item, ItemKind};

/// Whether the filter selects an I/O, shared with the events of the I/O. `None` until the I/O has completed.
pub type Decision = Rc<Cell<Option<bool>>>;

#[derive(Debug)]
pub struct Io {
    /// When its first bio was submitted, or `None` if that was before the trace.
    pub queued_ns: Option<u64>,
    pub operation: Operation,
    /// Size in bytes: the larger of its largest bio and its largest request.
    pub bytes: u32,
    /// The decision on this I/O, and those on the I/Os that were merged into it.
    decisions: Vec<Decision>,
    /// Number of requests, and of bios without a request, that have not completed.
    open: u32,
    /// Number of bytes of a split bio for which no part has been seen yet.
    unsplit: u32,
    is_split: bool,
    bios: Vec<u32>,
}

impl Io {
    pub fn decide(&self, is_selected: bool) {
        self.decisions.iter().for_each(|decision| decision.set(Some(is_selected)));
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// From submission to the scheduler or the driver: checks, merging, tags and the plug.
    Queued,
    /// Waiting for a rate limit.
    Throttled,
    Scheduled,
    Driver,
    /// Requeued because the driver was busy.
    Requeued,
}

#[derive(Debug)]
pub struct CompletedRequest {
    /// The stages and their start times in nanoseconds. Each stage ends when the next one starts.
    pub stages: Vec<(Stage, u64)>,
    /// The event of its completion.
    pub completion: TraceEvent,
}

/// The effects of an item on the tracked I/Os, returned by [`IoTracker::observe`].
#[derive(Default)]
pub struct Effects {
    /// The decision on the I/O of the event, or `None` if the event belongs to no tracked I/O.
    pub decision: Option<Decision>,
    pub request: Option<CompletedRequest>,
    /// The I/O that the item completes, and the time in nanoseconds.
    pub io: Option<(Io, u64)>,
}

struct Request {
    io: u64,
    bio: u32,
    stages: Vec<(Stage, u64)>,
}

/// Tracks the I/Os in flight of one queue, by the numbers of their bios and tags: finds the I/O to which each item belongs,
/// and what the item completes.
#[derive(Default)]
pub struct IoTracker {
    ios: HashMap<u64, Io>,
    next: u64,
    bios: HashMap<u32, u64>,
    requests: HashMap<Tag, Request>,
    /// Flushes that wait for a flush request.
    flushes: Vec<u64>,
}

impl IoTracker {
    /// Drops all I/Os that have not completed. After a gap, it is no longer known which events belong together, because
    /// numbers of bios and tags are reused.
    pub fn forget(&mut self) {
        self.ios.values().for_each(|io| io.decide(false));
        *self = IoTracker { next: self.next, ..IoTracker::default() };
    }

    pub fn observe(&mut self, item: &Item) -> Effects {
        let ItemKind::Event(event) = &item.kind else {
            self.forget();
            return Effects::default();
        };
        let mut request = None;
        let io = match (event.kind, event.tag) {
            (EventKind::Queue, _) => Some(self.queued(event)),
            (EventKind::Split, _) => self.split(event),
            (EventKind::GetRequest, Some(tag)) => Some(self.begun(tag, event)),
            (EventKind::BackMerge | EventKind::FrontMerge, Some(tag)) => self.merged(tag, event),
            (EventKind::Throttle, Some(tag)) => self.entered(tag, Stage::Throttled, event),
            (EventKind::Insert, Some(tag)) => self.entered(tag, Stage::Scheduled, event),
            (EventKind::Issue, Some(tag)) => self.entered(tag, Stage::Driver, event),
            (EventKind::Requeue, Some(tag)) => self.entered(tag, Stage::Requeued, event),
            (EventKind::Complete, Some(tag)) => {
                request = self.requests.remove(&tag);
                request.as_ref().map(|request| request.io)
            }
            (EventKind::Complete, None) => self.bios.get(&event.bio).copied(),
            _ => None,
        };
        let request = request.map(|request| CompletedRequest { stages: request.stages, completion: *event });
        let mut effects = Effects { request, ..Effects::default() };
        let Some((id, io)) = io.and_then(|id| Some((id, self.ios.get_mut(&id)?))) else { return effects };
        io.bytes = io.bytes.max(event.bytes);
        effects.decision = io.decisions.first().cloned();
        if event.kind == EventKind::Complete {
            io.open = io.open.saturating_sub(1);
            if io.open == 0 && io.unsplit == 0 {
                effects.io = self.remove(id).map(|io| (io, event.time_ns));
            }
        }
        effects
    }

    fn entered(&mut self, tag: Tag, stage: Stage, event: &TraceEvent) -> Option<u64> {
        let request = self.requests.get_mut(&tag)?;
        request.stages.push((stage, event.time_ns));
        Some(request.io)
    }

    fn insert(&mut self, event: &TraceEvent, queued_ns: Option<u64>) -> u64 {
        self.next += 1;
        let io = Io {
            queued_ns,
            operation: event.operation,
            bytes: event.bytes,
            decisions: vec![Decision::default()],
            open: 1,
            unsplit: 0,
            is_split: false,
            bios: Vec::new(),
        };
        self.ios.insert(self.next, io);
        self.own(event.bio, self.next);
        self.next
    }

    fn own(&mut self, bio: u32, id: u64) {
        if bio != NO_BIO {
            self.bios.insert(bio, id);
            if let Some(io) = self.ios.get_mut(&id) {
                io.bios.push(bio);
            }
        }
    }

    fn queued(&mut self, event: &TraceEvent) -> u64 {
        let id = self.insert(event, Some(event.time_ns));
        if event.operation == Operation::Flush {
            self.flushes.push(id);
        }
        id
    }

    fn split(&mut self, event: &TraceEvent) -> Option<u64> {
        let id = *self.bios.get(&event.other)?;
        let io = self.ios.get_mut(&id)?;
        if !io.is_split {
            // The parts replace the bio, so the bio itself is no longer counted.
            (io.is_split, io.unsplit, io.open) = (true, io.bytes, io.open.saturating_sub(1));
        }
        io.unsplit = io.unsplit.saturating_sub(event.bytes);
        io.open += 1;
        self.own(event.bio, id);
        Some(id)
    }

    fn begun(&mut self, tag: Tag, event: &TraceEvent) -> u64 {
        let id = if event.bio == NO_BIO {
            // A flush request serves all flushes that wait.
            let mut waiting = std::mem::take(&mut self.flushes).into_iter();
            let first = waiting.next();
            if let Some(first) = first {
                waiting.for_each(|other| self.unite(other, first));
            }
            first.filter(|first| self.ios.contains_key(first))
        } else {
            self.bios.get(&event.bio).copied()
        };
        let id = id.unwrap_or_else(|| self.insert(event, None));
        let queued_ns = self.ios.get(&id).and_then(|io| io.queued_ns).unwrap_or(event.time_ns);
        let stages = vec![(Stage::Queued, queued_ns)];
        self.requests.insert(tag, Request { io: id, bio: event.bio, stages });
        id
    }

    fn merged(&mut self, tag: Tag, event: &TraceEvent) -> Option<u64> {
        let into = self.requests.get(&tag)?.io;
        if let Some(from) = self.bios.get(&event.bio).copied() {
            // If the bio already had a request (a scheduler merged two requests), that request is now part of
            // the other.
            self.requests.retain(|of, request| *of == tag || request.bio != event.bio);
            let queued_ns = self.ios.get(&from).and_then(|io| io.queued_ns);
            if let (Some(queued_ns), Some(request)) = (queued_ns, self.requests.get_mut(&tag))
                && let Some((_, first_ns)) = request.stages.first_mut()
            {
                *first_ns = (*first_ns).min(queued_ns);
            }
            self.unite(from, into);
        }
        Some(into)
    }

    /// Combines two I/Os, because one request completes for both.
    fn unite(&mut self, from: u64, into: u64) {
        if from == into {
            if let Some(io) = self.ios.get_mut(&into) {
                io.open = io.open.saturating_sub(1);
            }
            return;
        }
        if !self.ios.contains_key(&into) {
            return;
        }
        let Some(other) = self.ios.remove(&from) else { return };
        for bio in &other.bios {
            if self.bios.get(bio) == Some(&from) {
                self.bios.insert(*bio, into);
            }
        }
        for request in self.requests.values_mut().filter(|request| request.io == from) {
            request.io = into;
        }
        if let Some(io) = self.ios.get_mut(&into) {
            io.queued_ns = [io.queued_ns, other.queued_ns].into_iter().flatten().min();
            io.bytes = io.bytes.max(other.bytes);
            io.open = (io.open + other.open).saturating_sub(1);
            io.unsplit = io.unsplit.saturating_add(other.unsplit);
            io.is_split |= other.is_split;
            io.bios.extend(other.bios);
            io.decisions.extend(other.decisions);
        }
    }

    fn remove(&mut self, id: u64) -> Option<Io> {
        let io = self.ios.remove(&id)?;
        for bio in &io.bios {
            if self.bios.get(bio) == Some(&id) {
                self.bios.remove(bio);
            }
        }
        self.flushes.retain(|flush| *flush != id);
        Some(io)
    }
}

#[cfg(test)]
mod tests {
    use super::super::item::tests::step;
    use super::*;
    use EventKind::{BackMerge, Complete, GetRequest, Insert, Issue, Queue, Requeue, Split, Throttle};

    /// Returns the effects of the last of `items`, and asserts that none before it completes an I/O.
    #[track_caller]
    fn observe(items: &[Item]) -> Effects {
        let mut tracker = IoTracker::default();
        let (last, before) = items.split_last().unwrap();
        before.iter().for_each(|item| assert!(tracker.observe(item).io.is_none(), "over at {item:?}"));
        tracker.observe(last)
    }

    fn with_other(item: Item, other: u32) -> Item {
        let event = TraceEvent { other, ..*item.event().unwrap() };
        Item { kind: ItemKind::Event(event), ..item }
    }

    fn with_bytes(item: Item, bytes: u32) -> Item {
        let event = TraceEvent { bytes, ..*item.event().unwrap() };
        Item { kind: ItemKind::Event(event), ..item }
    }

    fn flush(item: Item) -> Item {
        let event = TraceEvent { operation: Operation::Flush, ..*item.event().unwrap() };
        Item { kind: ItemKind::Event(event), ..item }
    }

    #[test]
    fn the_stages_of_a_request_follow_each_other() {
        let items = [
            step(Queue, 1, 5, None),
            step(GetRequest, 2, 5, Some(9)),
            step(Insert, 3, 5, Some(9)),
            step(Issue, 4, 5, Some(9)),
            step(Requeue, 5, 5, Some(9)),
            step(Issue, 6, 5, Some(9)),
            step(Complete, 8, 5, Some(9)),
        ];
        let effects = observe(&items);
        let request = effects.request.unwrap();
        let stages = [Stage::Queued, Stage::Scheduled, Stage::Driver, Stage::Requeued, Stage::Driver];
        let stages: Vec<_> = stages.into_iter().zip([1000, 3000, 4000, 5000, 6000]).collect();
        assert_eq!((request.stages, request.completion.time_ns), (stages, 8000));
        assert_eq!(effects.io.unwrap().0.queued_ns, Some(1000));
    }

    #[test]
    fn a_request_that_waits_for_a_limit_has_a_stage_for_it() {
        let items = [
            step(Queue, 1, 5, None),
            step(GetRequest, 2, 5, Some(9)),
            step(Throttle, 3, 5, Some(9)),
            step(Issue, 6, 5, Some(9)),
            step(Complete, 8, 5, Some(9)),
        ];
        let stages = [(Stage::Queued, 1000), (Stage::Throttled, 3000), (Stage::Driver, 6000)];
        assert_eq!(observe(&items).request.unwrap().stages, stages);
    }

    #[test]
    fn merged_bios_are_one_io_with_the_earliest_time() {
        let items = [
            step(Queue, 1, 5, None),
            step(GetRequest, 1, 5, Some(9)),
            step(Queue, 2, 6, None),
            step(BackMerge, 2, 6, Some(9)),
            with_bytes(step(Complete, 8, 5, Some(9)), 8192),
        ];
        let (io, completed_ns) = observe(&items).io.unwrap();
        assert_eq!((io.queued_ns, io.bytes, completed_ns), (Some(1000), 8192, 8000));
    }

    #[test]
    fn requests_that_a_scheduler_joins_complete_once() {
        let items = [
            step(Queue, 1, 5, None),
            step(GetRequest, 1, 5, Some(9)),
            step(Queue, 2, 6, None),
            step(GetRequest, 2, 6, Some(8)),
            step(BackMerge, 3, 6, Some(9)),
            step(Issue, 4, 5, Some(9)),
            step(Complete, 8, 5, Some(9)),
        ];
        let mut tracker = IoTracker::default();
        let last = items.iter().map(|item| tracker.observe(item)).last().unwrap();
        assert!(last.io.is_some() && tracker.requests.is_empty() && tracker.bios.is_empty());
    }

    #[test]
    fn a_split_bio_is_over_when_its_last_part_has_completed() {
        let items = [
            with_bytes(step(Queue, 1, 5, None), 12288),
            with_other(step(Split, 1, 6, None), 5),
            step(GetRequest, 1, 6, Some(1)),
            step(Complete, 2, 6, Some(1)),
            // The second part is created when the first has completed.
            with_other(step(Split, 3, 7, None), 5),
            step(GetRequest, 3, 7, Some(1)),
            with_other(step(Split, 3, 8, None), 5),
            step(GetRequest, 3, 8, Some(2)),
            step(Complete, 4, 8, Some(2)),
            step(Complete, 5, 7, Some(1)),
        ];
        let (io, _) = observe(&items).io.unwrap();
        assert_eq!((io.queued_ns, io.bytes), (Some(1000), 12288));
    }

    #[test]
    fn a_flush_request_serves_all_waiting_flushes() {
        let items = [
            flush(step(Queue, 1, 5, None)),
            flush(step(Queue, 2, 6, None)),
            flush(step(GetRequest, 3, NO_BIO, Some(64))),
            flush(step(Queue, 4, 7, None)),
            flush(step(Complete, 8, NO_BIO, Some(64))),
        ];
        let effects = observe(&items);
        assert_eq!(effects.io.unwrap().0.queued_ns, Some(1000));
        assert_eq!(effects.request.unwrap().stages, [(Stage::Queued, 1000)]);
    }

    #[test]
    fn a_rejected_bio_is_over_without_a_request() {
        let effects = observe(&[step(Queue, 1, 5, None), step(Complete, 2, 5, None)]);
        assert!(effects.io.is_some() && effects.request.is_none());
    }

    #[test]
    fn after_a_gap_open_ios_are_forgotten_and_numbers_reused() {
        let mut tracker = IoTracker::default();
        let decision = tracker.observe(&step(Queue, 1, 5, None)).decision.unwrap();
        tracker.observe(&Item { queue: 0, time_ns: 2, kind: ItemKind::Lost(1) });
        assert_eq!(decision.get(), Some(false));
        assert!(tracker.observe(&step(Complete, 2, 5, Some(3))).io.is_none(), "the I/O began before the gap");
        for item in [step(Queue, 3, 5, None), step(GetRequest, 3, 5, Some(3))] {
            assert!(tracker.observe(&item).io.is_none());
        }
        assert_eq!(tracker.observe(&step(Complete, 9, 5, Some(3))).io.unwrap().0.queued_ns, Some(3000));
    }
}

//! Selects I/Os by conditions such as `op=write,size>64k,latency>1ms`.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::str::FromStr;

use blkq::Operation;
use blkq::units::{parse_bytes, parse_duration_ns};

use super::io_tracker::{CompletedRequest, Decision, Effects, Io};
use super::item::{Item, ItemKind};

/// Maximum number of items that wait for the completion of an I/O. Beyond it, the oldest items are discarded.
const WAITING_MAX: usize = 1 << 20;

#[derive(Clone, PartialEq, Debug)]
enum Condition {
    Operation(Operation),
    Size(Ordering, u64),
    LatencyNs(Ordering, u64),
}

impl Condition {
    fn holds(&self, io: &Io, completed_ns: u64) -> bool {
        match self {
            Condition::Operation(operation) => io.operation == *operation,
            Condition::Size(ordering, bytes) => u64::from(io.bytes).cmp(bytes) == *ordering,
            Condition::LatencyNs(ordering, ns) => io
                .queued_ns
                .is_some_and(|queued_ns| completed_ns.saturating_sub(queued_ns).cmp(ns) == *ordering),
        }
    }
}

/// Conditions that must all hold.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Filter(Vec<Condition>);

const RULE: &str =
    "a filter consists of op=NAME, size>BYTES, size<BYTES, latency>TIME, latency<TIME, separated by commas";

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Filter, String> {
        text.split(',').map(condition).collect::<Result<_, _>>().map(Filter)
    }
}

fn condition(text: &str) -> Result<Condition, String> {
    let at = text.find(['=', '<', '>']).ok_or_else(|| RULE.to_owned())?;
    let (key, value) = (&text[..at], &text[at + 1..]);
    let ordering = match &text[at..=at] {
        "<" => Ordering::Less,
        ">" => Ordering::Greater,
        _ => Ordering::Equal,
    };
    match (key, ordering) {
        ("op", Ordering::Equal) => {
            let named = Operation::ALL.into_iter().find(|operation| operation.name() == value);
            named.map(Condition::Operation).ok_or_else(|| {
                let names = Operation::ALL.map(Operation::name).join(", ");
                format!("op must be one of {names}, not {value}")
            })
        }
        ("size", _) => Ok(Condition::Size(ordering, parse_bytes(value).map_err(|e| e.to_string())?)),
        ("latency", Ordering::Less | Ordering::Greater) => {
            Ok(Condition::LatencyNs(ordering, parse_duration_ns(value).map_err(|e| e.to_string())?))
        }
        _ => Err(RULE.to_owned()),
    }
}

/// Holds items in order, until it is known whether the filter selects them.
pub struct Filtered {
    filter: Filter,
    waiting: VecDeque<(Item, Decision)>,
    requests: Vec<(usize, CompletedRequest, Decision)>,
    /// Number of events that were discarded because their I/Os took too long.
    pub discarded: u64,
}

impl Filtered {
    pub fn new(filter: Filter) -> Filtered {
        Filtered { filter, waiting: VecDeque::new(), requests: Vec::new(), discarded: 0 }
    }

    pub fn push(&mut self, item: Item, effects: Effects) {
        if let Some((io, completed_ns)) = &effects.io {
            io.decide(self.filter.0.iter().all(|condition| condition.holds(io, *completed_ns)));
        }
        // Events that belong to no I/O are dropped: those of the plug, and those of I/Os that began before
        // the trace.
        if let (ItemKind::Event(_), Some(decision)) = (&item.kind, &effects.decision) {
            self.waiting.push_back((item, decision.clone()));
        }
        if let (Some(request), Some(decision)) = (effects.request, effects.decision) {
            self.requests.push((item.queue, request, decision));
        }
    }

    /// Removes and returns the selected requests of completed I/Os, with their queues.
    pub fn take_requests(&mut self) -> Vec<(usize, CompletedRequest)> {
        let decided = self.requests.extract_if(.., |(.., decision)| decision.get().is_some());
        let selected = decided.filter(|(.., decision)| decision.get() == Some(true));
        selected.map(|(queue, request, _)| (queue, request)).collect()
    }

    /// Removes and returns the selected items, up to the first I/O that has not completed.
    pub fn take(&mut self) -> Vec<Item> {
        let mut items = Vec::new();
        while let Some((item, decision)) = self.waiting.front() {
            match decision.get() {
                None if self.waiting.len() <= WAITING_MAX => break,
                None => self.discarded += 1,
                Some(true) => items.push(*item),
                Some(false) => {}
            }
            self.waiting.pop_front();
        }
        items
    }
}

#[cfg(test)]
mod tests {
    use blkq::trace::EventKind::{Complete, GetRequest, Issue, Plug, Queue};

    use super::super::io_tracker::IoTracker;
    use super::super::item::tests::step;
    use super::*;

    #[test]
    fn filters_are_conditions_separated_by_commas() {
        let filter: Filter = "op=write-zeroes,size>64k,latency<1.5ms".parse().unwrap();
        let conditions = vec![
            Condition::Operation(Operation::WriteZeroes),
            Condition::Size(Ordering::Greater, 64 << 10),
            Condition::LatencyNs(Ordering::Less, 1_500_000),
        ];
        assert_eq!(filter, Filter(conditions));
        for text in [
            "",
            "op",
            "op>read",
            "op=erase",
            "size>x",
            "latency>5",
            "latency=1ms",
            "latency>-1s",
            "a=b",
            "op=read,",
        ] {
            assert!(text.parse::<Filter>().is_err(), "{text}");
        }
    }

    #[test]
    fn slow_requests_are_returned_with_all_events_in_order() {
        let items = [
            step(Queue, 1, 5, None),
            step(Plug, 1, blkq::trace::NO_BIO, None),
            step(GetRequest, 1, 5, Some(9)),
            step(Queue, 2, 6, None),
            step(GetRequest, 2, 6, Some(8)),
            step(Issue, 3, 5, Some(9)),
            step(Issue, 3, 6, Some(8)),
            step(Complete, 20, 6, Some(8)),
            step(Complete, 5000, 5, Some(9)),
        ];
        let (mut tracker, mut filtered) =
            (IoTracker::default(), Filtered::new("latency>1ms".parse().unwrap()));
        for item in &items {
            assert!(filtered.take().is_empty() && filtered.take_requests().is_empty());
            let effects = tracker.observe(item);
            filtered.push(*item, effects);
        }
        assert_eq!(filtered.take(), [items[0], items[2], items[5], items[8]]);
        assert_eq!(filtered.take_requests().len(), 1);
    }

    #[test]
    fn an_io_that_never_completes_blocks_nothing_at_the_end() {
        let (mut tracker, mut filtered) = (IoTracker::default(), Filtered::new("op=read".parse().unwrap()));
        for item in [step(Queue, 1, 5, None), step(Queue, 2, 6, None), step(Complete, 3, 6, None)] {
            let effects = tracker.observe(&item);
            filtered.push(item, effects);
        }
        assert!(filtered.take().is_empty());
        tracker.forget();
        assert_eq!(filtered.take().len(), 2);
    }
}

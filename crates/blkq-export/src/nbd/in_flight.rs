//! The requests of one engine that the block layer or a worker is processing, and those that wait for the worker.

use std::collections::{BTreeMap, VecDeque};

use blkq::trace::TraceClient;

use super::contexts::ChosenContexts;
use super::split::Part;
use super::transmission::Request;

/// A request, or a part of a split read, that the block layer or a worker is processing.
#[derive(Clone, Copy)]
pub(super) struct InFlight {
    pub connection: u32,
    pub client: TraceClient,
    pub request: Request,
    pub part: Option<Part>,
}

pub(super) struct Query {
    pub in_flight: InFlight,
    pub queue: usize,
    pub contexts: ChosenContexts,
    /// Maximum number of extents in each context.
    pub extents_max: usize,
}

/// The block status requests that wait for the engine's worker. One query runs at a time and clients take turns, so
/// that no client delays the queries of others by more than one of its own.
#[derive(Default)]
pub(super) struct Queries {
    /// The queries by connection. No list is empty.
    waiting: BTreeMap<u32, VecDeque<Query>>,
    /// The connection whose query started last.
    last: u32,
    pub running: bool,
}

impl Queries {
    pub fn push(&mut self, query: Query) {
        self.waiting.entry(query.in_flight.connection).or_default().push_back(query);
    }

    /// Returns the query to start now; the caller resets `running` when the query has completed. Returns `None` if a
    /// query is running or none waits.
    pub fn start(&mut self) -> Option<Query> {
        if self.running {
            return None;
        }
        let next = self.waiting.range(self.last + 1..).next().or_else(|| self.waiting.first_key_value());
        self.last = *next?.0;
        let mut queries = self.waiting.remove(&self.last)?;
        let query = queries.pop_front();
        if !queries.is_empty() {
            self.waiting.insert(self.last, queries);
        }
        self.running = query.is_some();
        query
    }

    /// Removes the queries of `connection` that have not started.
    pub fn remove(&mut self, connection: u32) -> VecDeque<Query> {
        self.waiting.remove(&connection).unwrap_or_default()
    }
}

//! The block status requests that wait for the engine's worker. One query runs at a time and clients take turns, so
//! that no client delays the queries of others by more than one of its own.

use std::collections::{BTreeMap, VecDeque};

use super::contexts::ChosenContexts;
use super::in_flight::InFlight;

pub(super) struct Query {
    pub request: InFlight,
    pub queue: usize,
    pub contexts: ChosenContexts,
    /// Maximum number of extents in each context.
    pub extents_max: usize,
}

#[derive(Default)]
pub(super) struct Queries {
    /// The queries by connection. No list is empty.
    waiting: BTreeMap<u32, VecDeque<Query>>,
    /// The connection whose query started last.
    last: u32,
    running: bool,
}

impl Queries {
    pub fn push(&mut self, query: Query) {
        self.waiting.entry(query.request.connection).or_default().push_back(query);
    }

    /// Returns the query to start now, after which the caller must call [`Queries::finish`]. Returns `None` if a query
    /// is running or none waits.
    pub fn start(&mut self) -> Option<Query> {
        if self.running {
            return None;
        }
        let next = self.waiting.range(self.last + 1..).next().or_else(|| self.waiting.first_key_value());
        let connection = *next?.0;
        let queries = self.waiting.get_mut(&connection)?;
        let query = queries.pop_front()?;
        if queries.is_empty() {
            self.waiting.remove(&connection);
        }
        self.last = connection;
        self.running = true;
        Some(query)
    }

    pub fn finish(&mut self) {
        self.running = false;
    }

    /// Removes the queries of `connection` that have not started.
    pub fn remove(&mut self, connection: u32) -> VecDeque<Query> {
        self.waiting.remove(&connection).unwrap_or_default()
    }
}

//! The state that the connections of one engine share: buffers, requests in flight, submission of bios.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use blkq::trace::TraceClient;
use blkq::{EngineHandle, SourceContext, SourceId, Worker};

use crate::buffers::BufferPool;
use crate::submissions::{Slots, Submissions, TurnWork};

use super::budget::Budget;
use super::contexts::ContextStatus;
use super::in_flight::{InFlight, Queries, Query};
use super::status::Registry;
use super::tls::Tls;
use super::unaligned::Unaligned;

/// Kinds of ring operations. An operation's token has the kind above the 32 bits of the slot.
pub(super) const RECEIVED: u64 = 0;
pub(super) const SENT: u64 = 1;
pub(super) const ACCEPTED: u64 = 2;
pub(super) const CANCELLED: u64 = 3;

/// Minimum rate at which a client must take replies and send payloads, in bytes per second.
const RATE_MIN: u64 = 1 << 20;
const NS_PER_SECOND: u64 = 1_000_000_000;
/// Time limit for each send once the server is stopping.
const STOPPING_SEND_NS: u64 = NS_PER_SECOND;

pub(super) fn token(kind: u64, slot: u32) -> u64 {
    kind << 32 | u64::from(slot)
}

/// Messages to a source of the server.
pub(super) enum Message {
    /// Accept clients from this socket, and pass some of them to the sources on these other engines.
    Listen(OwnedFd, Vec<(EngineHandle, SourceId)>),
    /// A client that was accepted for this engine.
    Client(OwnedFd),
    /// Too many clients are in their handshake: shorten the time limit.
    Crowded,
    /// The TLS state of the connection in this slot, after a worker carried out a step of the handshake.
    Handshake(u32, Box<Tls>),
    /// Extents for the request with this number in the table of requests in flight; `None`: the query failed.
    Status(u64, Option<Vec<ContextStatus>>),
}

pub(super) struct EngineShared {
    pub registry: Arc<Registry>,
    pub buffers: BufferPool,
    pub budget: Budget,
    /// Requests that the block layer or a worker is processing, by a number that is the `user_data` of their bios.
    pub in_flight: Slots<InFlight>,
    pub unaligned: Unaligned,
    pub queries: Queries,
    pub submissions: Submissions,
    /// No deadline of a connection is before this time. It may be earlier than the earliest deadline.
    pub deadline_ns: u64,
    pub stopping: bool,
    pub work: TurnWork,
    /// Runs steps of TLS handshakes, which make signatures.
    handshakes: Worker,
}

impl EngineShared {
    pub fn new(registry: Arc<Registry>) -> EngineShared {
        let options = &registry.options;
        EngineShared {
            buffers: BufferPool::default(),
            // Each engine has its own budget, so that no engine waits for memory of another.
            budget: Budget::new(options.buffered_bytes_total / registry.engines),
            in_flight: Slots::default(),
            unaligned: Unaligned::new(options.unaligned.clone()),
            queries: Queries::default(),
            registry,
            submissions: Submissions::new(TraceClient::NONE),
            deadline_ns: u64::MAX,
            stopping: false,
            work: TurnWork::default(),
            handshakes: Worker::new("blkq-worker-tls"),
        }
    }

    /// Returns the deadline for sending or receiving `bytes`, and schedules a check of the deadlines. Once the server
    /// is stopping, each send has one second, because the last flush of the disk waits until all clients are
    /// disconnected.
    pub fn transfer_until_ns(&mut self, bytes: u64, cx: &SourceContext<'_>) -> u64 {
        let seconds = self.registry.options.transfer_timeout_s + bytes / RATE_MIN;
        let timeout_ns = if self.stopping { STOPPING_SEND_NS } else { seconds * NS_PER_SECOND };
        let until_ns = cx.now_ns() + timeout_ns;
        self.expect_deadline(until_ns);
        until_ns
    }

    pub fn expect_deadline(&mut self, at_ns: u64) {
        self.deadline_ns = self.deadline_ns.min(at_ns);
    }

    /// Runs a step of a TLS handshake on a worker, as a signature takes up to some milliseconds. Handshakes
    /// have their own worker, because queries of extents may occupy the engine's for much longer.
    pub fn offload_handshake(&mut self, slot: u32, mut tls: Box<Tls>, cx: &SourceContext<'_>) {
        cx.offload_to(&mut self.handshakes, move || {
            tls.shake_hands();
            Box::new(Message::Handshake(slot, tls))
        });
    }

    /// Starts the next query of metadata contexts on the engine's worker, unless one is running there.
    pub fn start_query(&mut self, cx: &mut SourceContext<'_>) {
        let Some(Query { in_flight, queue, contexts, extents_max }) = self.queries.start() else { return };
        let range = in_flight.request.range();
        let index = self.in_flight.insert(in_flight);
        let disk = cx.disk(queue).clone();
        // A panic of the driver in the query fails the request, as an error of the driver does.
        let query = AssertUnwindSafe(move || contexts.query(&disk, &range, extents_max).ok());
        cx.offload(move || Box::new(Message::Status(index, catch_unwind(query).unwrap_or(None))));
    }
}

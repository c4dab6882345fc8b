//! The state that the connections of one engine share: buffers and their budget, the requests in flight,
//! and the way of bios into the block layer.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use blkq::trace::TraceClient;
use blkq::{Bio, Completion, SourceContext, Worker};

use crate::buffers::BufferPool;
use crate::client_kind;
use crate::work::TurnWork;

use super::budget::Budget;
use super::contexts::{ChosenContexts, ContextStatus};
use super::in_flight::{InFlight, InFlightTable};
use super::options::NbdOptions;
use super::status::Registry;
use super::tls::Tls;
use super::unaligned::{BufferSource, Finished, OrderedWrite, OrderingResults, Unaligned};

/// Kinds of submissions, in the token above the slot of the connection.
pub(super) const RECEIVED: u64 = 0;
pub(super) const SENT: u64 = 1;
pub(super) const ACCEPTED: u64 = 2;
pub(super) const CANCELLED: u64 = 3;

/// Bytes that a client must at least take, or send of a payload, per second.
const RATE_MIN: u64 = 1 << 20;
const NS_PER_SECOND: u64 = 1_000_000_000;
/// The time that each send may take once the server stops.
const STOPPING_SEND_NS: u64 = NS_PER_SECOND;

pub(super) fn token(kind: u64, slot: u32) -> u64 {
    kind << 32 | u64::from(slot)
}

/// Messages of other threads.
pub(super) enum Message {
    /// A client for this engine.
    Client(OwnedFd),
    /// Too many clients are in their handshake.
    Crowded,
    /// TLS of a connection, after a step of its handshake.
    Handshake(u32, Box<Tls>),
    /// The state of a range in the metadata contexts that a request asked for, `None` if the query failed.
    Status(u32, Option<Vec<ContextStatus>>),
}

/// The state that the connections of one engine share.
pub(super) struct EngineShared {
    pub options: Arc<NbdOptions>,
    pub buffers: BufferPool,
    pub budget: Budget,
    in_flight: InFlightTable,
    unaligned: Unaligned,
    /// The results of ordering.
    ready: OrderingResults,
    /// Bios for which the queue had no room, with the queue.
    requeued: VecDeque<(usize, Bio)>,
    /// Receive back-offs of this turn, which the registry does not count yet.
    receive_backoffs: u64,
    /// The number of the client of each connection, by its slot: for a trace.
    clients: Vec<u32>,
    /// The earliest deadline of a connection, or earlier.
    deadline_ns: u64,
    /// The server stops.
    stopping: bool,
    /// The work for the clients of this engine in the present turn.
    pub work: TurnWork,
    /// Makes the signatures of handshakes.
    handshakes: Worker,
}

impl EngineShared {
    /// With an engine's part of the options' limits, of `engines` engines.
    pub fn new(options: Arc<NbdOptions>, engines: usize) -> EngineShared {
        EngineShared {
            buffers: BufferPool::new(),
            // Engines share no memory, so that none has to wait for another.
            budget: Budget::new(options.buffered_bytes_total / engines),
            in_flight: InFlightTable::default(),
            unaligned: Unaligned::new(options.unaligned.clone()),
            ready: OrderingResults::default(),
            options,
            requeued: VecDeque::new(),
            receive_backoffs: 0,
            clients: Vec::new(),
            deadline_ns: u64::MAX,
            stopping: false,
            work: TurnWork::default(),
            handshakes: Worker::new("blkq-worker-tls"),
        }
    }

    /// From now on this engine's writes are ordered with those of others, if parts of blocks are served.
    pub fn join(&mut self, cx: &SourceContext<'_>) {
        if self.options.unaligned.is_some() {
            self.unaligned.join(cx);
        }
    }

    /// Whether the block layer wants nothing more for now.
    pub fn is_full(&self) -> bool {
        !self.requeued.is_empty()
    }

    /// Whether nothing is left to be done for a connection that has closed.
    pub fn is_idle(&self) -> bool {
        self.unaligned.is_idle()
    }

    /// When `bytes` must have left or arrived; the deadlines are checked then.
    pub fn transfer_until_ns(&mut self, bytes: u64, cx: &SourceContext<'_>) -> u64 {
        let seconds = self.options.transfer_timeout_s + bytes / RATE_MIN;
        let timeout_ns = if self.stopping { STOPPING_SEND_NS } else { seconds * NS_PER_SECOND };
        let until_ns = cx.now_ns() + timeout_ns;
        self.expect_deadline(until_ns);
        until_ns
    }

    /// The server stops: sends have little time from now on, as the last flush waits for all clients. Returns when
    /// those in flight must be done.
    pub fn begin_stop(&mut self, cx: &SourceContext<'_>) -> u64 {
        self.stopping = true;
        self.transfer_until_ns(0, cx)
    }

    /// A deadline of a connection.
    pub fn expect_deadline(&mut self, at_ns: u64) {
        self.deadline_ns = self.deadline_ns.min(at_ns);
    }

    /// Whether a deadline may have passed. Then all of them are to be expected again.
    pub fn take_deadline(&mut self, now_ns: u64) -> bool {
        let passed = now_ns >= self.deadline_ns;
        if passed {
            self.deadline_ns = u64::MAX;
        }
        passed
    }

    /// When something is to be done, `u64::MAX` if nothing is.
    pub fn deadline_ns(&self) -> u64 {
        if self.unaligned.is_contended() { 0 } else { self.deadline_ns }
    }

    /// Counts a connection that receives later.
    pub fn count_backoff(&mut self) {
        self.receive_backoffs += 1;
    }

    /// Whether writes of whole blocks have to be ordered now.
    #[inline]
    pub fn must_order(&self) -> bool {
        self.unaligned.must_order()
    }

    /// Takes a write that must not run at the same time as another to the same block.
    pub fn order(&mut self, write: OrderedWrite) {
        self.unaligned.push(write);
    }

    /// Another engine changed the ranges that are locked.
    pub fn notify_of_ranges(&mut self) {
        self.unaligned.notify();
    }

    /// Submits `bio`, now or as soon as there is room.
    pub fn submit(&mut self, in_flight: InFlight, queue: usize, mut bio: Bio, cx: &mut SourceContext<'_>) {
        bio.user_data = self.in_flight.remember(in_flight).into();
        self.submit_bio(queue, bio, cx);
    }

    /// Submits `bio`, which has its `user_data`, now or as soon as there is room.
    fn submit_bio(&mut self, queue: usize, bio: Bio, cx: &mut SourceContext<'_>) {
        self.name_client(queue, &bio, cx);
        if let Err(bio) = cx.submit(queue, bio) {
            self.requeued.push_back((queue, bio));
        }
    }

    /// The connection in `slot` is that of client `number`.
    pub fn set_client(&mut self, slot: usize, number: u64) {
        if self.clients.len() <= slot {
            self.clients.resize(slot + 1, 0);
        }
        self.clients[slot] = number as u32;
    }

    /// Names the client of `bio`, which is about to be submitted.
    #[inline]
    fn name_client(&self, queue: usize, bio: &Bio, cx: &mut SourceContext<'_>) {
        cx.set_trace_client(queue, || {
            let request = self.request_of(bio.user_data);
            let number = request.and_then(|request| self.clients.get(request.connection as usize));
            number.map_or(TraceClient::NONE, |number| TraceClient::new(client_kind::NBD, *number))
        });
    }

    /// Submits the bios that the queues had no room for. True if there were some and none is left.
    pub fn resubmit_requeued(&mut self, cx: &mut SourceContext<'_>) -> bool {
        if self.requeued.is_empty() {
            return false;
        }
        while let Some((queue, bio)) = self.requeued.pop_front() {
            self.name_client(queue, &bio, cx);
            if let Err(bio) = cx.submit(queue, bio) {
                self.requeued.push_front((queue, bio));
                return false;
            }
        }
        true
    }

    /// Begins the ordered writes whose ranges were granted. [`EngineShared::next_finished`] comes next.
    pub fn order_writes(&mut self, cx: &mut SourceContext<'_>) {
        let mut memory = BufferSource { buffers: &mut self.buffers, cx };
        self.unaligned.order_writes(&mut self.in_flight, &mut memory, &mut self.ready);
        self.submit_ready(cx);
    }

    /// A bio completed. Returns the request that it carried out, `None` if it is part of an ordered
    /// write: [`EngineShared::next_finished`] comes next.
    pub fn complete(
        &mut self,
        completion: Completion,
        cx: &mut SourceContext<'_>,
    ) -> Option<(InFlight, Completion)> {
        if !Unaligned::is_ordered(completion.user_data) {
            return Some((self.in_flight.recall(completion.user_data as u32), completion));
        }
        let mut memory = BufferSource { buffers: &mut self.buffers, cx };
        self.unaligned.complete(completion, &mut memory, &mut self.ready);
        self.submit_ready(cx);
        None
    }

    fn submit_ready(&mut self, cx: &mut SourceContext<'_>) {
        let mut bios = std::mem::take(&mut self.ready.bios);
        bios.drain(..).for_each(|(queue, bio)| self.submit_bio(queue, bio, cx));
        self.ready.bios = bios;
    }

    /// An ordered write that has completed.
    pub fn next_finished(&mut self) -> Option<Finished> {
        self.ready.finished.pop()
    }

    /// The request whose bio has this `user_data`.
    pub fn request_of(&self, user_data: u64) -> Option<&InFlight> {
        match Unaligned::is_ordered(user_data) {
            true => self.unaligned.request_of(user_data),
            false => self.in_flight.get(user_data as u32),
        }
    }

    /// Has a worker continue the handshake of TLS: a signature takes up to some milliseconds, in
    /// which the engine serves others. The engine's worker may be busy with extents for much longer.
    pub fn offload_handshake(&mut self, slot: u32, mut tls: Box<Tls>, cx: &SourceContext<'_>) {
        cx.offload_to(&mut self.handshakes, move || {
            tls.shake_hands();
            Box::new(Message::Handshake(slot, tls))
        });
    }

    /// Queries the metadata contexts that a request asks for.
    pub fn query_status(
        &mut self,
        asks: InFlight,
        queue: usize,
        contexts: &ChosenContexts,
        max: usize,
        cx: &mut SourceContext<'_>,
    ) {
        let range = asks.to.offset..asks.to.offset + asks.length;
        let index = self.in_flight.remember(asks);
        let (disk, contexts) = (cx.disk(queue).clone(), contexts.clone());
        // A driver that panics there fails the command, as one that returns an error does.
        let query = AssertUnwindSafe(move || contexts.query(&disk, &range, max).ok());
        cx.offload(move || Box::new(Message::Status(index, catch_unwind(query).unwrap_or(None))));
    }

    /// The request whose contexts were queried.
    pub fn recall(&mut self, index: u32) -> InFlight {
        self.in_flight.recall(index)
    }

    /// Ends a turn of the engine: adds what it counted to the counters of `registry`.
    pub fn finish_turn(&mut self, registry: &Registry) {
        registry.count_backoffs(std::mem::take(&mut self.receive_backoffs));
    }
}

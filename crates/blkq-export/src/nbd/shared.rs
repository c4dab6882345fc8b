//! The state that the connections of one engine share: buffers, requests in flight, submission of bios.

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
use super::contexts::ContextStatus;
use super::in_flight::{InFlight, InFlightTable};
use super::options::NbdOptions;
use super::queries::{Queries, Query};
use super::tls::Tls;
use super::unaligned::{BufferSource, Unaligned};

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
    /// A client that another engine has accepted.
    Client(OwnedFd),
    /// Too many clients are in their handshake: shorten the time limit.
    Crowded,
    /// The TLS state of the connection in this slot, after a worker carried out a step of the handshake.
    Handshake(u32, Box<Tls>),
    /// Extents for the request with this number in the table of requests in flight; `None`: the query failed.
    Status(u64, Option<Vec<ContextStatus>>),
}

pub(super) struct EngineShared {
    pub options: Arc<NbdOptions>,
    pub buffers: BufferPool,
    pub budget: Budget,
    pub in_flight: InFlightTable,
    pub unaligned: Unaligned,
    pub queries: Queries,
    /// Bios that a queue did not accept because it was full, each with the index of its queue.
    requeued: VecDeque<(usize, Bio)>,
    /// Client number of each connection by its slot, for traces.
    clients: Vec<u32>,
    /// No deadline of a connection is before this time. It may be earlier than the earliest deadline.
    deadline_ns: u64,
    stopping: bool,
    pub work: TurnWork,
    /// Runs steps of TLS handshakes, which make signatures.
    handshakes: Worker,
}

impl EngineShared {
    pub fn new(options: Arc<NbdOptions>, engines: usize) -> EngineShared {
        EngineShared {
            buffers: BufferPool::default(),
            // Each engine has its own budget, so that no engine waits for memory of another.
            budget: Budget::new(options.buffered_bytes_total / engines),
            in_flight: InFlightTable::default(),
            unaligned: Unaligned::new(options.unaligned.clone()),
            queries: Queries::default(),
            options,
            requeued: VecDeque::new(),
            clients: Vec::new(),
            deadline_ns: u64::MAX,
            stopping: false,
            work: TurnWork::default(),
            handshakes: Worker::new("blkq-worker-tls"),
        }
    }

    pub fn is_full(&self) -> bool {
        !self.requeued.is_empty()
    }

    /// Returns the deadline for sending or receiving `bytes`, and schedules a check of the deadlines.
    pub fn transfer_until_ns(&mut self, bytes: u64, cx: &SourceContext<'_>) -> u64 {
        let seconds = self.options.transfer_timeout_s + bytes / RATE_MIN;
        let timeout_ns = if self.stopping { STOPPING_SEND_NS } else { seconds * NS_PER_SECOND };
        let until_ns = cx.now_ns() + timeout_ns;
        self.expect_deadline(until_ns);
        until_ns
    }

    /// Begins to stop the server. From now on each send has one second, because the last flush of the disk
    /// waits until all clients are disconnected. Returns the deadline for sends in flight.
    pub fn begin_stop(&mut self, cx: &SourceContext<'_>) -> u64 {
        self.stopping = true;
        self.transfer_until_ns(0, cx)
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping
    }

    pub fn expect_deadline(&mut self, at_ns: u64) {
        self.deadline_ns = self.deadline_ns.min(at_ns);
    }

    /// Returns the time if a check of the deadlines is due. The caller must then schedule all deadlines again. The
    /// clock is read only if there is a deadline.
    pub fn take_deadline(&mut self, cx: &SourceContext<'_>) -> Option<u64> {
        if self.deadline_ns == u64::MAX {
            return None;
        }
        let now_ns = cx.now_ns();
        (now_ns >= self.deadline_ns).then(|| {
            self.deadline_ns = u64::MAX;
            now_ns
        })
    }

    pub fn deadline_ns(&self) -> u64 {
        if self.unaligned.is_contended() { 0 } else { self.deadline_ns }
    }

    /// Submits `bio` for the request `in_flight`. If the queue is full, the bio is submitted again later.
    pub fn submit(&mut self, in_flight: InFlight, queue: usize, mut bio: Bio, cx: &mut SourceContext<'_>) {
        bio.user_data = self.in_flight.requests.insert(in_flight);
        self.submit_bio(queue, bio, cx);
    }

    fn submit_bio(&mut self, queue: usize, bio: Bio, cx: &mut SourceContext<'_>) {
        if let Err(bio) = self.try_submit(queue, bio, cx) {
            self.requeued.push_back((queue, bio));
        }
    }

    pub fn set_client(&mut self, slot: usize, number: u64) {
        if self.clients.len() <= slot {
            self.clients.resize(slot + 1, 0);
        }
        self.clients[slot] = number as u32;
    }

    #[inline]
    fn try_submit(&self, queue: usize, bio: Bio, cx: &mut SourceContext<'_>) -> Result<(), Bio> {
        cx.set_trace_client(queue, || {
            let request = self.request_of(bio.user_data);
            let number = request.and_then(|request| self.clients.get(request.connection as usize));
            number.map_or(TraceClient::NONE, |number| TraceClient::new(client_kind::NBD, *number))
        });
        cx.submit(queue, bio)
    }

    /// Submits requeued bios again. Returns whether there were some and all were accepted now.
    pub fn resubmit_requeued(&mut self, cx: &mut SourceContext<'_>) -> bool {
        if self.requeued.is_empty() {
            return false;
        }
        while let Some((queue, bio)) = self.requeued.pop_front() {
            if let Err(bio) = self.try_submit(queue, bio, cx) {
                self.requeued.push_front((queue, bio));
                return false;
            }
        }
        true
    }

    /// Begins the ordered writes whose ranges were granted. Then handle [`Unaligned::finished`].
    pub fn order_writes(&mut self, cx: &mut SourceContext<'_>) {
        let mut memory = BufferSource { buffers: &mut self.buffers, cx };
        self.unaligned.order_writes(&mut self.in_flight, &mut memory);
        self.submit_ready(cx);
    }

    /// Handles a completed bio. Returns the request that it carried out. Returns `None` if the bio belongs to
    /// an ordered write: then handle [`Unaligned::finished`].
    pub fn complete(
        &mut self,
        completion: Completion,
        cx: &mut SourceContext<'_>,
    ) -> Option<(InFlight, Completion)> {
        if !Unaligned::is_ordered(completion.user_data) {
            return Some((self.in_flight.requests.take(completion.user_data)?, completion));
        }
        let mut memory = BufferSource { buffers: &mut self.buffers, cx };
        self.unaligned.complete(completion, &mut memory);
        self.submit_ready(cx);
        None
    }

    fn submit_ready(&mut self, cx: &mut SourceContext<'_>) {
        while let Some((queue, bio)) = self.unaligned.bios.pop_front() {
            self.submit_bio(queue, bio, cx);
        }
    }

    pub fn request_of(&self, user_data: u64) -> Option<&InFlight> {
        match Unaligned::is_ordered(user_data) {
            true => self.unaligned.request_of(user_data),
            false => self.in_flight.requests.get(user_data),
        }
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
        let Some(Query { request, queue, contexts, extents_max }) = self.queries.start() else { return };
        let range = request.to.offset..request.to.offset + request.length;
        let index = self.in_flight.requests.insert(request);
        let disk = cx.disk(queue).clone();
        // A panic of the driver in the query fails the request, as an error of the driver does.
        let query = AssertUnwindSafe(move || contexts.query(&disk, &range, extents_max).ok());
        cx.offload(move || Box::new(Message::Status(index, catch_unwind(query).unwrap_or(None))));
    }
}

//! Carries out one client's requests: parses them, submits bios, and writes replies.
//!
//! A client that has too much in flight is slowed down by its socket: [`Requests::parse`] reads no further
//! request until replies were sent, so that requests stay in the kernel's socket buffer.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use blkq::trace::TraceClient;
use blkq::{Bio, BioFlags, Data, IoBuffer, IoResult, Operation, SourceContext, Status};

use crate::buffers::BufferPool;

use super::contexts::{ChosenContexts, ContextStatus, StatusExtent};
use super::handshake::{Export, Session};
use super::in_flight::{InFlight, Query};
use super::proto::{Command, CommandFlags, NbdError};
use super::reply::{EXTENTS_MAX, Outgoing, ReplyStyle, ReplyTo};
use super::shared::EngineShared;
use super::split::{self, SplitReads};
use super::status::NbdCounters;
use super::stream::Stream;
use super::transmission::{Request, Step, Transmission, beyond_end};
use super::unaligned::{OrderedWrite, bio, blocks_around, blocks_within, edges};

/// Maximum size in bytes of the extents of one request in one metadata context.
const EXTENTS_MAX_BYTES: usize = EXTENTS_MAX * size_of::<StatusExtent>();
/// Maximum number of bytes that one cache request reads.
const CACHE_MAX_BYTES: u64 = 4 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Parsed {
    /// A request or payload is incomplete: receive more bytes.
    Receive,
    /// A limit is reached: parse again after a request has completed or replies have been sent.
    Wait,
    /// The budget of this turn is spent: parse again in the next turn.
    Later,
    /// The client sent `NBD_CMD_DISC`, and sends nothing more.
    Disconnect,
    /// The client broke the protocol.
    Violation,
}

/// The requests of one client. There are none until its handshake is complete.
#[derive(Default)]
pub(super) struct Requests {
    transmission: Transmission,
    pub slot: u32,
    client: TraceClient,
    queue: usize,
    /// Logical block size in bytes.
    block: u64,
    style: ReplyStyle,
    contexts: ChosenContexts,
    pub counters: NbdCounters,
    /// The write whose payload is being received, and the buffer for the blocks around its range.
    incoming: Option<(Request, IoBuffer)>,
    /// Deadline of the payload that is being received.
    pub payload_until_ns: Option<u64>,
    /// A parsed request that waits for memory.
    parsed: Option<Request>,
    /// Requests that were received and whose replies were not sent.
    pub outstanding: usize,
    /// I/O buffers of this client, in bytes.
    buffered: usize,
    /// Requests, and parts of reads, in the block layer, in the range lock or with a worker.
    pub busy: usize,
    /// Split reads. `None` for simple replies, or if splitting was off when the client connected.
    split: Option<Box<SplitReads>>,
    /// Replies to send, also those of the handshake.
    pub replies: Outgoing,
}

impl Requests {
    pub fn new(slot: u32, client: TraceClient) -> Requests {
        Requests { slot, client, ..Requests::default() }
    }

    /// Begins the transmission phase.
    pub fn open(&mut self, session: Session, export: &Export, shared: &EngineShared, cx: &SourceContext<'_>) {
        let in_parts = shared.registry.options.switches.split_reads.load(Relaxed);
        self.queue = shared.registry.options.exports[session.export].queue;
        self.block = cx.limits(self.queue).logical_block_bytes.into();
        self.style = session.replies;
        self.contexts = ChosenContexts { contexts: session.contexts, bitmaps: export.bitmaps.clone() };
        self.split = (in_parts && session.replies != ReplyStyle::Simple).then(Box::default);
        self.transmission = Transmission::new(session);
    }

    /// The part of the buffer into which the rest of the expected payload must be received.
    pub fn missing_payload(&mut self) -> Option<&mut [u8]> {
        let (request, buffer) = self.incoming.as_mut()?;
        let end = ((request.offset & (self.block - 1)) + request.length) as usize;
        Some(&mut buffer[end - self.transmission.payload_bytes() as usize..end])
    }

    pub fn expect_payload(&mut self, shared: &mut EngineShared, cx: &SourceContext<'_>) {
        if let Some((request, _)) = &self.incoming {
            self.payload_until_ns.get_or_insert_with(|| shared.transfer_until_ns(request.length, cx));
        }
    }

    pub fn took_payload(&mut self, bytes: usize) {
        if self.incoming.is_some() {
            self.transmission.took_payload(bytes as u32);
        }
    }

    /// Releases all memory of a client that has disconnected and has nothing in flight.
    pub fn release(&mut self, shared: &mut EngineShared) {
        self.replies.recycle(&mut shared.buffers);
        if let Some((_, buffer)) = self.incoming.take() {
            shared.buffers.put(buffer);
        }
        self.free(self.buffered, shared);
    }

    pub fn free(&mut self, bytes: usize, shared: &mut EngineShared) {
        shared.budget.free(self.slot, self.buffered, bytes);
        self.buffered -= bytes;
    }

    /// Drops the replies that are not being sent, and parts of reads that were not submitted.
    pub fn abandon(&mut self, shared: &mut EngineShared) {
        if let Some(split) = &mut self.split {
            split.waiting.clear();
        }
        let freed = self.replies.recycle(&mut shared.buffers);
        self.free(freed, shared);
    }

    pub fn parse(
        &mut self,
        stream: &mut Stream,
        shared: &mut EngineShared,
        cx: &mut SourceContext<'_>,
    ) -> Parsed {
        loop {
            if let Some(missing) = self.missing_payload() {
                let input = stream.input();
                let bytes = missing.len().min(input.len());
                missing[..bytes].copy_from_slice(&input[..bytes]);
                stream.consume(bytes);
                self.took_payload(bytes);
                if self.transmission.payload_bytes() > 0 {
                    return Parsed::Receive;
                }
                if let Some((request, buffer)) = self.incoming.take() {
                    self.payload_until_ns = None;
                    self.submit(request, Operation::Write, request.range(), buffer.into(), shared, cx);
                }
            } else if shared.submissions.requeued() > 0 {
                return Parsed::Wait;
            } else if let Some(request) = self.parsed {
                let (bytes, is_read) = (self.buffer_bytes(&request), request.command == Command::Read);
                if self.buffered > 0 && self.buffered + bytes > shared.registry.options.buffered_bytes_max
                    || !shared.budget.take(self.slot, self.buffered, bytes, is_read)
                {
                    return Parsed::Wait;
                }
                self.buffered += bytes;
                self.parsed = None;
                self.begin(request, shared, cx);
            } else if self.outstanding >= shared.registry.options.requests_max {
                return Parsed::Wait;
            } else if shared.work.is_over() {
                return Parsed::Later;
            } else {
                let input = stream.input();
                let mut rest = input;
                let step = self.transmission.next(&mut rest);
                let taken = input.len() - rest.len();
                stream.consume(taken);
                match step {
                    Step::Receive => return Parsed::Receive,
                    Step::Request(mut request) => {
                        self.count_request(shared);
                        if request.command == Command::Cache {
                            request.length = request.length.min(CACHE_MAX_BYTES);
                        }
                        self.parsed = Some(request);
                    }
                    Step::Rejected { cookie, offset, error } => {
                        self.count_request(shared);
                        self.counters.refused_requests += 1;
                        self.error(ReplyTo { cookie, offset }, error);
                    }
                    Step::Disconnect => return Parsed::Disconnect,
                    Step::Violation => return Parsed::Violation,
                }
            }
        }
    }

    fn count_request(&mut self, shared: &mut EngineShared) {
        shared.work.spend(1);
        self.outstanding += 1;
        self.counters.requests += 1;
    }

    /// Carries out a request, on a block layer that accepts whole logical blocks only.
    fn begin(&mut self, request: Request, shared: &mut EngineShared, cx: &mut SourceContext<'_>) {
        if self.is_split(&request)
            && let Some(split) = &mut self.split
        {
            self.counters.split_reads += 1;
            split.begin(request);
            return self.begin_parts(shared, cx);
        }
        let (range, limits) = (request.range(), cx.limits(self.queue));
        let is_whole = self.is_whole_blocks(&range);
        let to_submit = match request.command {
            // The device shrank since the client connected. The block layer cannot detect this if the new end is
            // in the same block.
            command if !is_whole && range.end > limits.size_bytes() => Err(beyond_end(command)),
            Command::Cache if !limits.page_cache => Ok(None),
            command @ (Command::Read | Command::Write | Command::Cache) => {
                let blocks = blocks_around(&range, self.block);
                match shared.buffers.take((blocks.end - blocks.start) as u32, cx.registrar()) {
                    Some(buffer) if command == Command::Write => {
                        self.incoming = Some((request, buffer));
                        return;
                    }
                    Some(buffer) => Ok(Some((Operation::Read, blocks, buffer.into()))),
                    None => Err(NbdError::NoMemory),
                }
            }
            Command::Flush => Ok(Some((Operation::Flush, range, Data::None))),
            // The blocks at the ends would have to be read and written, which is not fast.
            Command::WriteZeroes if !is_whole && request.flags.contains(CommandFlags::FAST_ZERO) => {
                Err(NbdError::NotSupported)
            }
            Command::WriteZeroes => Ok(Some((Operation::WriteZeroes, range, Data::None))),
            Command::Trim => {
                let blocks = blocks_within(&range, self.block);
                Ok((!blocks.is_empty()).then_some((Operation::Discard, blocks, Data::None)))
            }
            Command::BlockStatus => return self.query_status(request, shared, cx),
            // The parser reports `NBD_CMD_DISC` as a step of its own.
            Command::Disconnect => Err(NbdError::Invalid),
        };
        if let Ok(Some((operation, range, data))) = to_submit {
            return self.submit(request, operation, range, data, shared, cx);
        }
        self.free(self.buffer_bytes(&request), shared);
        let to = request.reply_to();
        match to_submit {
            Ok(_) => self.done(to),
            Err(error) => {
                self.transmission.drop_payload();
                self.error(to, error);
            }
        }
    }

    fn is_split(&self, request: &Request) -> bool {
        request.command == Command::Read
            && request.length > split::PART_BYTES
            && self.split.is_some()
            && !request.flags.contains(CommandFlags::DF)
            && self.is_whole_blocks(&request.range())
    }

    /// Submits parts of split reads, as many as may be in flight.
    pub fn begin_parts(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) {
        while let Some((request, part)) = self.split.as_mut().and_then(|split| split.next()) {
            let in_flight = InFlight { part: Some(part), ..self.in_flight(request) };
            self.busy += 1;
            match shared.buffers.take(part.length as u32, cx.registrar()) {
                Some(buffer) => {
                    let range = part.offset..part.offset + part.length;
                    let bio = bio(Operation::Read, BioFlags::empty(), &range, buffer.into());
                    self.submit_bio(in_flight, bio, shared, cx);
                }
                None => {
                    self.free(BufferPool::size(part.length as u32), shared);
                    self.complete(in_flight, Err(Status::Resource), Data::None, shared);
                }
            }
        }
    }

    fn query_status(&mut self, request: Request, shared: &mut EngineShared, cx: &mut SourceContext<'_>) {
        self.busy += 1;
        let extents_max = if request.flags.contains(CommandFlags::REQ_ONE) { 1 } else { EXTENTS_MAX };
        let (in_flight, contexts) = (self.in_flight(request), self.contexts.clone());
        shared.queries.push(Query { in_flight, queue: self.queue, contexts, extents_max });
        shared.start_query(cx);
    }

    /// Cancels the block status requests that have not started. They are answered if the server stops, but not if
    /// the client has disconnected.
    pub fn cancel_queries(&mut self, has_client: bool, shared: &mut EngineShared) {
        for query in shared.queries.remove(self.slot) {
            match has_client {
                true => self.complete_status(query.in_flight, Err(NbdError::Shutdown)),
                false => self.end_query(),
            }
        }
    }

    fn end_query(&mut self) {
        self.busy -= 1;
        self.replies.hold_extents(self.extents_max_bytes());
    }

    fn is_whole_blocks(&self, range: &Range<u64>) -> bool {
        (range.start | range.end) & (self.block - 1) == 0
    }

    /// Size in bytes of the memory that `request` needs.
    fn buffer_bytes(&self, request: &Request) -> usize {
        match request.command {
            Command::BlockStatus => self.extents_max_bytes(),
            _ if self.is_split(request) => split::buffer_bytes(request.length),
            command => self.block_bytes(command, &request.range()),
        }
    }

    /// Size in bytes of the buffers for the blocks around `range`, and for those at its ends if `command` writes.
    fn block_bytes(&self, command: Command, range: &Range<u64>) -> usize {
        let blocks = blocks_around(range, self.block);
        let size = || BufferPool::size((blocks.end - blocks.start) as u32);
        let edges =
            || edges(range, self.block).iter().flatten().count() * BufferPool::size(self.block as u32);
        match command {
            Command::Read | Command::Cache => size(),
            Command::Write => size() + edges(),
            Command::WriteZeroes => edges(),
            _ => 0,
        }
    }

    /// Submits the operation, or passes it to the range lock: a write to a part of a block must not run at the same
    /// time as another write to the block.
    fn submit(
        &mut self,
        request: Request,
        operation: Operation,
        range: Range<u64>,
        data: Data,
        shared: &mut EngineShared,
        cx: &mut SourceContext<'_>,
    ) {
        self.busy += 1;
        let (in_flight, queue, block) = (self.in_flight(request), self.queue, self.block);
        let mut flags = BioFlags::empty();
        // Clients may set FUA on each command, but it only affects commands that write.
        flags.set(BioFlags::FUA, request.flags.contains(CommandFlags::FUA) && operation.is_write());
        flags.set(BioFlags::NO_UNMAP, request.flags.contains(CommandFlags::NO_HOLE));
        flags.set(BioFlags::NO_FALLBACK, request.flags.contains(CommandFlags::FAST_ZERO));
        if !operation.is_write() || self.is_whole_blocks(&range) && !shared.unaligned.lock.is_taken() {
            return self.submit_bio(in_flight, bio(operation, flags, &range, data), shared, cx);
        }
        shared.unaligned.push(OrderedWrite { in_flight, queue, operation, flags, range, block, data });
    }

    /// If the queue is full, the bio is submitted again later.
    fn submit_bio(&self, request: InFlight, bio: Bio, shared: &mut EngineShared, cx: &mut SourceContext<'_>) {
        let user_data = shared.in_flight.insert(request);
        shared.submissions.submit_for(cx, self.client, self.queue, Bio { user_data, ..bio });
    }

    fn in_flight(&self, request: Request) -> InFlight {
        InFlight { connection: self.slot, client: self.client, request, part: None }
    }

    /// Handles a completed write that the range lock ordered.
    pub fn complete_ordered(&mut self, write: InFlight, result: IoResult, shared: &mut EngineShared) {
        self.free(self.block_bytes(write.request.command, &write.request.range()), shared);
        self.complete(write, result, Data::None, shared);
    }

    /// Handles a request or part that completed, or for which there was no memory. An error of a part is reported in
    /// the last chunk, so a reply contains at most one.
    pub fn complete(&mut self, completed: InFlight, result: IoResult, data: Data, shared: &mut EngineShared) {
        self.busy -= 1;
        let InFlight { request, part, .. } = completed;
        let (command, to) = (request.command, request.reply_to());
        // The result of the whole request; `None` if other parts have not completed.
        let (offset, length, outcome) = match part {
            None => (request.offset, request.length, Some(result)),
            Some(part) => {
                let split = self.split.as_mut().expect("it was split");
                (part.offset, part.length, split.complete(part, result))
            }
        };
        match data.into_buffer() {
            Some(buffer) if command == Command::Read && result.is_ok() => {
                self.counters.read_bytes += length;
                let from = (offset & (self.block - 1)) as usize;
                let (content, last) = (from..from + length as usize, outcome == Some(Ok(())));
                self.replies.append(|output| self.style.data(to, offset, length as u32, last, output));
                self.replies.append_data(buffer, content, last);
            }
            Some(buffer) => {
                self.free(buffer.len(), shared);
                shared.buffers.put(buffer);
            }
            None => {}
        }
        match outcome {
            None => {}
            // The data is the reply.
            Some(Ok(())) if command == Command::Read => {}
            // The device turned out not to support discard. A trim is only a hint, so it succeeds.
            Some(Err(Status::NotSupported)) if command == Command::Trim => self.done(to),
            Some(Err(status)) => self.error(to, status.into()),
            Some(Ok(())) => {
                if command == Command::Write {
                    self.counters.written_bytes += length;
                }
                self.done(to);
            }
        }
    }

    /// Handles a query of metadata contexts that completed or was cancelled.
    pub fn complete_status(&mut self, query: InFlight, contexts: Result<Vec<ContextStatus>, NbdError>) {
        self.end_query();
        let to = query.request.reply_to();
        match contexts {
            // The device shrank since the client connected, and the whole range is beyond its end.
            Ok(contexts) if contexts.iter().any(|context| context.extents.is_empty()) => {
                self.error(to, NbdError::Invalid);
            }
            Ok(contexts) => {
                self.replies.reply(|output| self.style.block_status(to, &contexts, output));
            }
            Err(error) => self.error(to, error),
        }
    }

    fn extents_max_bytes(&self) -> usize {
        EXTENTS_MAX_BYTES * self.contexts.contexts.ids().count()
    }

    fn done(&mut self, to: ReplyTo) {
        self.replies.reply(|output| self.style.done(to, output));
    }

    fn error(&mut self, to: ReplyTo, error: NbdError) {
        self.counters.errors += 1;
        self.replies.reply(|output| self.style.error(to, error, output));
    }
}

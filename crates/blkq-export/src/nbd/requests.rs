//! Carries out one client's requests: parses them, submits bios, and writes replies.
//!
//! A client that has too much in flight is slowed down by its socket: [`Requests::parse`] reads no further
//! request until replies were sent, so that requests stay in the kernel's socket buffer.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use blkq::{Completion, Data, IoBuffer, Operation, SourceContext, Status};

use crate::buffers::BufferPool;

use super::contexts::{ChosenContexts, ContextStatus, StatusExtent};
use super::handshake::{Export, Session};
use super::in_flight::InFlight;
use super::outgoing::Outgoing;
use super::plan::{self, Plan};
use super::proto::{Command, CommandFlags, NbdError};
use super::queries::Query;
use super::reply::{EXTENTS_MAX, ReplyStyle, ReplyTo};
use super::shared::EngineShared;
use super::split::{self, Part, SplitReads};
use super::status::NbdCounters;
use super::stream::Stream;
use super::transmission::{Request, Step, Transmission};
use super::unaligned::OrderedWrite;

/// Maximum size in bytes of the extents of one request in one metadata context.
const EXTENTS_MAX_BYTES: usize = EXTENTS_MAX * size_of::<StatusExtent>();

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

/// The transmission phase of one client.
pub(super) struct Requests {
    transmission: Transmission,
    slot: u32,
    queue: usize,
    /// Logical block size in bytes, minus 1.
    block_mask: u64,
    style: ReplyStyle,
    contexts: ChosenContexts,
    pub counters: NbdCounters,
    /// The write whose payload is being received, and the buffer for the blocks around its range.
    incoming: Option<(Request, IoBuffer)>,
    /// Deadline of the payload; `u64::MAX` if no payload is expected.
    pub payload_until_ns: u64,
    /// A parsed request that waits for memory.
    parsed: Option<Request>,
    /// Requests that were received and whose replies were not sent.
    pub outstanding: usize,
    /// I/O buffers of this client, in bytes.
    buffered: usize,
    /// Requests, and parts of reads, in the block layer, in the range lock or with a worker.
    busy: usize,
    /// Split reads. `None` for simple replies, or if splitting was off when the client connected.
    split: Option<Box<SplitReads>>,
}

impl Requests {
    pub fn new(
        slot: u32,
        session: Session,
        export: &Export,
        shared: &EngineShared,
        cx: &SourceContext<'_>,
    ) -> Requests {
        let queue = shared.options.exports[session.export].queue;
        let in_parts =
            session.replies != ReplyStyle::Simple && shared.options.switches.split_reads.load(Relaxed);
        Requests {
            slot,
            queue,
            block_mask: u64::from(cx.limits(queue).logical_block_bytes) - 1,
            style: session.replies,
            contexts: ChosenContexts { contexts: session.contexts, bitmaps: export.bitmaps.clone() },
            transmission: Transmission::new(session),
            counters: NbdCounters::default(),
            incoming: None,
            payload_until_ns: u64::MAX,
            parsed: None,
            outstanding: 0,
            buffered: 0,
            busy: 0,
            split: in_parts.then(Box::default),
        }
    }

    pub fn is_idle(&self) -> bool {
        self.busy == 0
    }

    /// The part of the buffer into which the rest of the expected payload must be received.
    pub fn missing_payload(&mut self) -> Option<&mut [u8]> {
        let (request, buffer) = self.incoming.as_mut()?;
        let end = ((request.offset & self.block_mask) + request.length) as usize;
        Some(&mut buffer[end - self.transmission.payload_bytes() as usize..end])
    }

    pub fn expect_payload(&mut self, shared: &mut EngineShared, cx: &SourceContext<'_>) {
        if let Some((request, _)) = &self.incoming
            && self.payload_until_ns == u64::MAX
        {
            self.payload_until_ns = shared.transfer_until_ns(request.length, cx);
        }
    }

    pub fn took_payload(&mut self, bytes: usize) {
        if self.incoming.is_some() {
            self.transmission.took_payload(bytes as u32);
        }
    }

    pub fn release(&mut self, shared: &mut EngineShared) {
        if let Some((_, buffer)) = self.incoming.take() {
            shared.buffers.put(buffer);
        }
        self.free(self.buffered, shared);
    }

    pub fn free(&mut self, bytes: usize, shared: &mut EngineShared) {
        shared.budget.free(self.slot, self.buffered, bytes);
        self.buffered -= bytes;
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
                self.submit_write(shared, cx);
            } else if shared.is_full() {
                return Parsed::Wait;
            } else if let Some(request) = self.parsed {
                let (bytes, is_read) = (self.buffer_bytes(&request), request.command == Command::Read);
                if self.buffered > 0 && self.buffered + bytes > shared.options.buffered_bytes_max
                    || !shared.budget.take(self.slot, self.buffered, bytes, is_read)
                {
                    return Parsed::Wait;
                }
                self.buffered += bytes;
                self.parsed = None;
                self.begin(request, stream.replies(), shared, cx);
            } else if self.outstanding >= shared.options.requests_max {
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
                    Step::Request(request) => {
                        self.count_request(shared);
                        self.parsed = Some(request);
                    }
                    Step::Rejected { cookie, offset, error } => {
                        self.count_request(shared);
                        self.counters.refused_requests += 1;
                        self.error(ReplyTo { cookie, offset }, error, stream.replies());
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

    fn begin(
        &mut self,
        request: Request,
        replies: &mut Outgoing,
        shared: &mut EngineShared,
        cx: &mut SourceContext<'_>,
    ) {
        if self.is_split(&request)
            && let Some(split) = &mut self.split
        {
            self.counters.split_reads += 1;
            split.begin(request);
            return self.begin_parts(replies, shared, cx);
        }
        let answer = match plan::plan(&request, cx.limits(self.queue)) {
            Plan::Answer(answer) => answer,
            Plan::Transfer(blocks) => {
                match shared.buffers.take((blocks.end - blocks.start) as u32, cx.registrar()) {
                    None => Err(NbdError::NoMemory),
                    Some(buffer) if request.command == Command::Write => {
                        self.incoming = Some((request, buffer));
                        return;
                    }
                    Some(buffer) => {
                        return self.submit(request, Operation::Read, blocks, buffer.into(), shared, cx);
                    }
                }
            }
            Plan::Submit(operation, blocks) => {
                return self.submit(request, operation, blocks, Data::None, shared, cx);
            }
            Plan::Extents => return self.query_status(request, shared, cx),
        };
        self.free(self.buffer_bytes(&request), shared);
        let to = self.in_flight(&request).to;
        match answer {
            Ok(()) => self.done(to, replies),
            Err(error) => {
                self.transmission.drop_payload();
                self.error(to, error, replies);
            }
        }
    }

    fn is_split(&self, request: &Request) -> bool {
        request.command == Command::Read
            && split::is_split(request.length)
            && self.split.is_some()
            && !request.flags.contains(CommandFlags::DF)
            && self.is_whole_blocks(&request.range())
    }

    pub fn begin_parts(
        &mut self,
        replies: &mut Outgoing,
        shared: &mut EngineShared,
        cx: &mut SourceContext<'_>,
    ) {
        while let Some((request, part, range)) = self.split.as_mut().and_then(|split| split.next()) {
            let length = range.end - range.start;
            let in_flight = InFlight { length, part: Some(part), ..self.in_flight(&request) };
            match shared.buffers.take(length as u32, cx.registrar()) {
                Some(buffer) => {
                    let flags = plan::bio_flags(&request, Operation::Read);
                    let bio = plan::bio(Operation::Read, flags, &range, buffer.into());
                    self.busy += 1;
                    shared.submit(in_flight, self.queue, bio, cx);
                }
                None => {
                    self.free(BufferPool::size(length as u32), shared);
                    let completion =
                        Completion { user_data: 0, result: Err(Status::Resource), data: Data::None };
                    self.complete_part(in_flight, part, completion, replies, shared);
                }
            }
        }
    }

    pub fn abandon_parts(&mut self) {
        if let Some(split) = &mut self.split {
            split.abandon();
        }
    }

    fn query_status(&mut self, request: Request, shared: &mut EngineShared, cx: &mut SourceContext<'_>) {
        self.busy += 1;
        let extents_max = if request.flags.contains(CommandFlags::REQ_ONE) { 1 } else { EXTENTS_MAX };
        let (request, contexts) = (self.in_flight(&request), self.contexts.clone());
        shared.queries.push(Query { request, queue: self.queue, contexts, extents_max });
        shared.start_query(cx);
    }

    /// Cancels the block status requests that have not started. They are answered if the server stops, but not if
    /// the client has disconnected.
    pub fn cancel_queries(&mut self, has_client: bool, replies: &mut Outgoing, shared: &mut EngineShared) {
        for query in shared.queries.remove(self.slot) {
            match has_client {
                true => self.complete_status(query.request, Err(NbdError::Shutdown), replies),
                false => self.end_query(replies),
            }
        }
    }

    fn end_query(&mut self, replies: &mut Outgoing) {
        self.busy -= 1;
        replies.hold_extents(self.extents_max_bytes());
    }

    fn submit_write(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) {
        if let Some((request, buffer)) = self.incoming.take() {
            self.payload_until_ns = u64::MAX;
            self.submit(request, Operation::Write, request.range(), buffer.into(), shared, cx);
        }
    }

    fn is_whole_blocks(&self, range: &Range<u64>) -> bool {
        (range.start | range.end) & self.block_mask == 0
    }

    fn buffer_bytes(&self, request: &Request) -> usize {
        if request.command == Command::BlockStatus {
            return self.extents_max_bytes();
        }
        if self.is_split(request) {
            return split::buffer_bytes(request.length);
        }
        plan::buffer_bytes(request, self.block_mask + 1)
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
        let (in_flight, queue) = (self.in_flight(&request), self.queue);
        let flags = plan::bio_flags(&request, operation);
        if !operation.is_write() || self.is_whole_blocks(&range) && !shared.unaligned.must_order() {
            return shared.submit(in_flight, queue, plan::bio(operation, flags, &range, data), cx);
        }
        let block = self.block_mask + 1;
        let buffered = plan::buffer_bytes(&request, block);
        let write =
            OrderedWrite { request: in_flight, queue, operation, flags, range, block, data, buffered };
        shared.unaligned.push(write);
    }

    fn in_flight(&self, request: &Request) -> InFlight {
        InFlight {
            connection: self.slot,
            command: request.command,
            to: ReplyTo { cookie: request.cookie, offset: request.offset },
            length: request.length,
            part: None,
        }
    }

    pub fn complete(
        &mut self,
        request: InFlight,
        completion: Completion,
        replies: &mut Outgoing,
        shared: &mut EngineShared,
    ) {
        self.busy -= 1;
        if let Some(part) = request.part {
            return self.complete_part(request, part, completion, replies, shared);
        }
        if let Some(buffer) = completion.data.into_buffer() {
            if request.command == Command::Read && completion.result.is_ok() {
                self.counters.read_bytes += request.length;
                let from = (request.to.offset & self.block_mask) as usize;
                let part = from..from + request.length as usize;
                let write = |output: &mut _| self.style.data(request.to, request.length as u32, output);
                return replies.append_data(buffer, part, true, write);
            }
            self.free(buffer.len(), shared);
            shared.buffers.put(buffer);
        }
        match completion.result {
            // The device turned out not to support discard. A trim is only a hint, so it succeeds.
            Err(Status::NotSupported) if request.command == Command::Trim => self.done(request.to, replies),
            Err(status) => self.error(request.to, status.into(), replies),
            Ok(()) => {
                if request.command == Command::Write {
                    self.counters.written_bytes += request.length;
                }
                self.done(request.to, replies);
            }
        }
    }

    /// Handles a part of a read that completed, or for which there was no memory. An error is reported in the
    /// last chunk, so a reply contains at most one.
    fn complete_part(
        &mut self,
        request: InFlight,
        part: Part,
        completion: Completion,
        replies: &mut Outgoing,
        shared: &mut EngineShared,
    ) {
        let split = self.split.as_mut().expect("it was split");
        let result = split.complete(part, completion.result);
        match (completion.data.into_buffer(), completion.result) {
            (Some(buffer), Ok(())) => {
                self.counters.read_bytes += request.length;
                let (style, length) = (self.style, request.length as u32);
                let content = 0..request.length as usize;
                let done = result == Some(Ok(()));
                let write = |output: &mut _| style.part(request.to, part.offset, length, done, output);
                replies.append_data(buffer, content, done, write);
            }
            (Some(buffer), Err(_)) => {
                self.free(buffer.len(), shared);
                shared.buffers.put(buffer);
            }
            (None, _) => {}
        }
        if let Some(Err(status)) = result {
            self.error(request.to, status.into(), replies);
        }
    }

    /// Handles a query of metadata contexts that completed or was cancelled.
    pub fn complete_status(
        &mut self,
        request: InFlight,
        contexts: Result<Vec<ContextStatus>, NbdError>,
        replies: &mut Outgoing,
    ) {
        self.end_query(replies);
        let contexts = match contexts {
            Ok(contexts) => contexts,
            Err(error) => return self.error(request.to, error, replies),
        };
        // The device shrank since the client connected, and the whole range is beyond its end.
        if contexts.iter().any(|context| context.extents.is_empty()) {
            return self.error(request.to, NbdError::Invalid, replies);
        }
        replies.reply(|output| self.style.block_status(request.to, &contexts, output));
    }

    fn extents_max_bytes(&self) -> usize {
        EXTENTS_MAX_BYTES * self.contexts.contexts.count()
    }

    fn done(&self, to: ReplyTo, replies: &mut Outgoing) {
        replies.reply(|output| self.style.done(to, output));
    }

    fn error(&mut self, to: ReplyTo, error: NbdError, replies: &mut Outgoing) {
        self.counters.errors += 1;
        replies.reply(|output| self.style.error(to, error, output));
    }
}

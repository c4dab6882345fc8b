//! The requests of one client, once its handshake is done: found in the stream, submitted as bios, and
//! answered.
//!
//! Requests wait in the kernel's socket buffer, not here, when the client has too much in flight:
//! [`Requests::parse`] then wants nothing more until replies have left.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use blkq::{Bio, Completion, Data, Operation, Sector, SourceContext, Status};

use crate::buffers::BufferPool;

use super::contexts::{ChosenContexts, ContextStatus, StatusExtent};
use super::handshake::{Export, Session};
use super::in_flight::InFlight;
use super::outgoing::Outgoing;
use super::payload::Payload;
use super::plan::{self, CACHE_MAX_BYTES, Plan};
use super::proto::{Command, CommandFlags, NbdError};
use super::reply::{EXTENTS_MAX, ReplyStyle, ReplyTo};
use super::shared::EngineShared;
use super::split::{self, Part, SplitReads};
use super::status::RequestCounters;
use super::stream::Stream;
use super::transmission::{Request, Step, Transmission};
use super::unaligned::{Finished, OrderedWrite};

/// Most that the extents of one request take in one metadata context, in bytes.
const EXTENTS_MAX_BYTES: usize = EXTENTS_MAX * size_of::<StatusExtent>();

/// How [`Requests::parse`] left the stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Parsed {
    /// More bytes are wanted.
    Receive,
    /// Nothing is, until something has completed or left.
    Wait,
    /// Nothing is in this turn, whose budget is spent.
    Later,
    /// The client disconnects.
    Disconnect,
    /// The client broke the protocol.
    Violation,
}

/// The requests of one client.
pub(super) struct Requests {
    transmission: Transmission,
    /// The connection's slot.
    slot: u32,
    /// The engine's queue behind the export.
    queue: usize,
    /// The bits of a byte's number within its logical block.
    block_mask: u64,
    style: ReplyStyle,
    contexts: ChosenContexts,
    counters: RequestCounters,
    incoming: Option<Payload>,
    /// When the payload must have arrived, `u64::MAX` if none is expected.
    payload_until_ns: u64,
    /// A request for which there is no room yet.
    parsed: Option<Request>,
    /// Requests received whose replies have not left.
    outstanding: usize,
    /// Bytes in I/O buffers of this client.
    buffered: usize,
    /// Bios, ordered writes and queries in flight.
    busy: usize,
    /// The reads that are done in parts, if the client understands that, and it was on when the client connected.
    split: Option<Box<SplitReads>>,
}

impl Requests {
    /// Those of the connection in `slot` for `export`, as agreed on in `session`.
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
            counters: RequestCounters::default(),
            incoming: None,
            payload_until_ns: u64::MAX,
            parsed: None,
            outstanding: 0,
            buffered: 0,
            busy: 0,
            split: in_parts.then(Box::default),
        }
    }

    /// Counters of the requests so far.
    pub fn counters(&self) -> &RequestCounters {
        &self.counters
    }

    /// A receive operation begins.
    pub fn count_receive(&mut self) {
        self.counters.receives += 1;
    }

    /// A send operation begins.
    pub fn count_send(&mut self) {
        self.counters.sends += 1;
    }

    /// Requests received whose replies have not left.
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Whether nothing is in flight in the block layer.
    pub fn is_idle(&self) -> bool {
        self.busy == 0
    }

    /// When a payload must have arrived.
    pub fn payload_until_ns(&self) -> u64 {
        self.payload_until_ns
    }

    /// Whether a payload follows in the stream.
    pub fn expects_payload(&self) -> bool {
        self.incoming.is_some()
    }

    /// Memory for the rest of the payload that follows in the stream.
    pub fn missing_payload(&mut self) -> Option<&mut [u8]> {
        self.incoming.as_mut().map(Payload::missing)
    }

    /// The payload is received from now on: there is a time for it.
    pub fn expect_payload(&mut self, shared: &mut EngineShared, cx: &SourceContext<'_>) {
        if let Some(incoming) = &self.incoming
            && self.payload_until_ns == u64::MAX
        {
            self.payload_until_ns = shared.transfer_until_ns(incoming.length(), cx);
        }
    }

    /// `bytes` of the payload that is on its way have arrived where they belong.
    pub fn took_payload(&mut self, bytes: usize) {
        if let Some(incoming) = &mut self.incoming {
            incoming.took(bytes);
            self.transmission.took_payload(bytes as u32);
        }
    }

    /// `replies` have left, and with them `freed` bytes of buffers.
    pub fn sent(&mut self, replies: usize, freed: usize, shared: &mut EngineShared) {
        self.outstanding -= replies;
        self.free(freed, shared);
    }

    /// Returns its buffers, before it is dropped.
    pub fn release(&mut self, shared: &mut EngineShared) {
        if let Some(incoming) = self.incoming.take() {
            shared.buffers.put(incoming.into_parts().1);
        }
        self.free(self.buffered, shared);
    }

    /// Notes that `bytes` of its buffers are free.
    pub fn free(&mut self, bytes: usize, shared: &mut EngineShared) {
        shared.budget.free(self.buffered, bytes);
        self.buffered -= bytes;
    }

    /// Parses all that has arrived and there is room for.
    pub fn parse(
        &mut self,
        stream: &mut Stream,
        shared: &mut EngineShared,
        cx: &mut SourceContext<'_>,
    ) -> Parsed {
        loop {
            if let Some(incoming) = &mut self.incoming {
                let input = stream.input();
                let bytes = (self.transmission.payload_bytes() as usize).min(input.len());
                incoming.missing()[..bytes].copy_from_slice(&input[..bytes]);
                stream.consume(bytes);
                self.took_payload(bytes);
                if self.transmission.payload_bytes() > 0 {
                    return Parsed::Receive;
                }
                self.submit_write(shared, cx);
            } else if shared.is_full() {
                return Parsed::Wait;
            } else if let Some(request) = self.parsed {
                let bytes = self.buffer_bytes(&request);
                if self.buffered > 0 && self.buffered + bytes > shared.options.buffered_bytes_max
                    || !shared.budget.take(self.slot, self.buffered, bytes)
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

    /// Begins to carry out a request.
    fn begin(
        &mut self,
        request: Request,
        replies: &mut Outgoing,
        shared: &mut EngineShared,
        cx: &mut SourceContext<'_>,
    ) {
        if !self.is_whole_blocks(&request) {
            return self.begin_unaligned(request, replies, shared, cx);
        }
        if self.is_split(&request) {
            self.counters.split_reads += 1;
            if let Some(split) = &mut self.split {
                split.begin(request);
            }
            return self.begin_parts(replies, shared, cx);
        }
        match request.command {
            Command::Cache if !cx.limits(self.queue).page_cache => {
                self.free(self.buffer_bytes(&request), shared);
                self.done(ReplyTo { cookie: request.cookie, offset: request.offset }, replies);
            }
            Command::Write | Command::Read | Command::Cache => {
                let cached = request.command == Command::Cache;
                let length = if cached { request.length.min(CACHE_MAX_BYTES) } else { request.length };
                match shared.buffers.take(length as u32, cx.registrar()) {
                    None => self.reject(&request, NbdError::NoMemory, replies, shared),
                    Some(buffer) if request.command == Command::Write => {
                        self.incoming = Some(Payload::new(request, buffer, 0));
                    }
                    Some(buffer) => {
                        let range = request.offset..request.offset + length;
                        self.submit(request, Operation::Read, range, buffer.into(), shared, cx);
                    }
                }
            }
            Command::Flush => self.submit(request, Operation::Flush, 0..0, Data::None, shared, cx),
            Command::Trim => {
                self.submit(request, Operation::Discard, request.range(), Data::None, shared, cx);
            }
            Command::WriteZeroes => {
                self.submit(request, Operation::WriteZeroes, request.range(), Data::None, shared, cx);
            }
            Command::BlockStatus => self.query_status(request, shared, cx),
            // The parser turns it into a step of its own.
            Command::Disconnect => {}
        }
    }

    /// Whether a read is done in parts, which not every request wants.
    fn is_split(&self, request: &Request) -> bool {
        request.command == Command::Read
            && split::is_split(request.length)
            && self.split.is_some()
            && !request.flags.contains(CommandFlags::DF)
            && self.is_whole_blocks(request)
    }

    /// Begins the parts of reads that need not wait for others.
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
                    self.submit_bio(&request, in_flight, Operation::Read, range, buffer.into(), shared, cx);
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

    /// The connection is broken: parts of reads that have not begun never do.
    pub fn abandon_parts(&mut self) {
        if let Some(split) = &mut self.split {
            split.abandon();
        }
    }

    /// Begins to carry out a request that is not whole blocks.
    #[cold]
    fn begin_unaligned(
        &mut self,
        request: Request,
        replies: &mut Outgoing,
        shared: &mut EngineShared,
        cx: &mut SourceContext<'_>,
    ) {
        match plan::plan(&request, cx.limits(self.queue)) {
            Plan::Answer(Ok(())) => {
                self.free(self.buffer_bytes(&request), shared);
                self.done(self.in_flight(&request).to, replies);
            }
            Plan::Answer(Err(error)) => self.reject(&request, error, replies, shared),
            Plan::Transfer(blocks) => {
                match shared.buffers.take((blocks.end - blocks.start) as u32, cx.registrar()) {
                    None => self.reject(&request, NbdError::NoMemory, replies, shared),
                    Some(buffer) if request.command == Command::Write => {
                        let from = (request.offset - blocks.start) as usize;
                        self.incoming = Some(Payload::new(request, buffer, from));
                    }
                    Some(buffer) => self.submit(request, Operation::Read, blocks, buffer.into(), shared, cx),
                }
            }
            Plan::Order => self.order(request, Operation::WriteZeroes, request.range(), Data::None, shared),
            Plan::Discard(blocks) => self.submit(request, Operation::Discard, blocks, Data::None, shared, cx),
            Plan::Extents => self.query_status(request, shared, cx),
        }
    }

    fn query_status(&mut self, request: Request, shared: &mut EngineShared, cx: &mut SourceContext<'_>) {
        self.busy += 1;
        let max = if request.flags.contains(CommandFlags::REQ_ONE) { 1 } else { EXTENTS_MAX };
        shared.query_status(self.in_flight(&request), self.queue, &self.contexts, max, cx);
    }

    /// Answers a request with an error before anything was done for it. A payload is dropped.
    fn reject(
        &mut self,
        request: &Request,
        error: NbdError,
        replies: &mut Outgoing,
        shared: &mut EngineShared,
    ) {
        self.free(self.buffer_bytes(request), shared);
        self.transmission.drop_payload();
        self.error(ReplyTo { cookie: request.cookie, offset: request.offset }, error, replies);
    }

    fn submit_write(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) {
        if let Some((request, buffer)) = self.incoming.take().map(Payload::into_parts) {
            self.payload_until_ns = u64::MAX;
            let range = request.range();
            match self.is_whole_blocks(&request) {
                true => self.submit(request, Operation::Write, range, buffer.into(), shared, cx),
                false => self.order(request, Operation::Write, range, buffer.into(), shared),
            }
        }
    }

    fn is_whole_blocks(&self, request: &Request) -> bool {
        (request.offset | request.length) & self.block_mask == 0
    }

    /// Size of the buffers that a request needs.
    fn buffer_bytes(&self, request: &Request) -> usize {
        if request.command == Command::BlockStatus {
            return self.extents_max_bytes();
        }
        if self.is_split(request) {
            return split::buffer_bytes(request.length);
        }
        plan::buffer_bytes(request, self.block_mask + 1)
    }

    /// Submits a write that must not run at the same time as another to the same block.
    fn order(
        &mut self,
        request: Request,
        operation: Operation,
        range: Range<u64>,
        data: Data,
        shared: &mut EngineShared,
    ) {
        self.busy += 1;
        let (in_flight, block) = (self.in_flight(&request), self.block_mask + 1);
        shared.order(OrderedWrite::new(&request, in_flight, self.queue, operation, range, block, data));
    }

    fn submit(
        &mut self,
        request: Request,
        operation: Operation,
        range: Range<u64>,
        data: Data,
        shared: &mut EngineShared,
        cx: &mut SourceContext<'_>,
    ) {
        if operation.is_write() && shared.must_order() {
            return self.order(request, operation, range, data, shared);
        }
        self.submit_bio(&request, self.in_flight(&request), operation, range, data, shared, cx);
    }

    #[expect(clippy::too_many_arguments, reason = "a bio, whose it is, and where it goes")]
    fn submit_bio(
        &mut self,
        request: &Request,
        in_flight: InFlight,
        operation: Operation,
        range: Range<u64>,
        data: Data,
        shared: &mut EngineShared,
        cx: &mut SourceContext<'_>,
    ) {
        let flags = plan::bio_flags(request, operation);
        // Whole logical blocks are whole sectors.
        let (sector, sectors) = (Sector(range.start >> 9), (range.end - range.start) >> 9);
        self.busy += 1;
        let bio = Bio { operation, flags, sector, sectors, data, user_data: 0 };
        shared.submit(in_flight, self.queue, bio, cx);
    }

    fn in_flight(&self, request: &Request) -> InFlight {
        InFlight::new(self.slot, request)
    }

    /// A bio completed.
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
                return replies.reply_with(buffer, part, write);
            }
            self.free(buffer.len(), shared);
            shared.buffers.put(buffer);
        }
        match completion.result {
            // Of a device that turned out not to discard: a trim is advice.
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

    /// A part of a read completed, or had no memory. A reply has at most one error, at its end.
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
                if done {
                    return replies.reply_with(buffer, content, write);
                }
                replies.part_with(buffer, content, write);
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

    /// An ordered write completed.
    pub fn complete_ordered(
        &mut self,
        finished: Finished,
        replies: &mut Outgoing,
        shared: &mut EngineShared,
    ) {
        let Finished { request, result, freed } = finished;
        self.free(freed, shared);
        self.complete(request, Completion { user_data: 0, result, data: Data::None }, replies, shared);
    }

    /// A query of the metadata contexts completed.
    pub fn complete_status(
        &mut self,
        request: InFlight,
        contexts: Option<Vec<ContextStatus>>,
        replies: &mut Outgoing,
    ) {
        self.busy -= 1;
        replies.hold_extents(self.extents_max_bytes());
        let Some(contexts) = contexts else { return self.error(request.to, NbdError::Io, replies) };
        // All of it lies beyond the end of a device that shrank.
        if contexts.iter().any(|context| context.extents.is_empty()) {
            return self.error(request.to, NbdError::Invalid, replies);
        }
        replies.reply(|output| self.style.block_status(request.to, &contexts, output));
    }

    /// Most that the extents of one request take, in bytes.
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

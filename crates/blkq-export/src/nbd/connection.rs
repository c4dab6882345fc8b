//! One client: its stream of requests in, bios out, and one stream of replies back.
//!
//! Requests wait in the kernel's socket buffer, not here, when the client has too much
//! in flight: nothing more is received until replies have left.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkq::{Bio, Completion, Data, Extent, Operation, Sector, SourceContext, Status};
use rustix::net::Shutdown;

use super::handshake::{Export, Handshake, Next, TlsPolicy};
use super::payload::Payload;
use super::pending::Pending;
use super::proto::{Command, CommandFlags, NbdError};
use super::receive_backoff::{Decision, ReceiveBackoff};
use super::rejections::Reason;
use super::reply::{EXTENTS_MAX, ReplyStyle, ReplyTo};
use super::source::Core;
use super::status::{ConnectionStatus, Counters};
use super::stream::{ConnectionBuffers, Received, Stream};
use super::tls::{Tls, TlsEnd};
use super::transmission::{Request, Step, Transmission};
use super::unaligned::{self, CACHE_MAX_BYTES, Finished, OrderedWrite, Plan};

/// What the extents of one request may take, in bytes.
const EXTENTS_MAX_BYTES: usize = EXTENTS_MAX * size_of::<Extent>();

enum Phase {
    Handshake(Handshake, Vec<Export>),
    Transmission(Transmission),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// Not in sight.
    No,
    /// Nothing more is received; what is in flight is answered.
    Drain,
    /// Nothing more is sent either; what is in flight only ends.
    Broken,
}

pub(super) struct Connection {
    slot: u32,
    stream: Stream,
    status: Arc<ConnectionStatus>,
    counters: Counters,
    phase: Phase,
    /// The engine's queue behind the export.
    queue: usize,
    /// The bits of a byte's number within its logical block.
    block_mask: u64,
    style: ReplyStyle,
    incoming: Option<Payload>,
    /// A request for which there is no room yet.
    stalled: Option<Request>,
    /// Requests received whose replies have not left.
    outstanding: usize,
    /// Bytes in I/O buffers of this client.
    buffered: usize,
    /// Bios and queries on the way.
    busy: usize,
    ending: Ending,
    handshake_since_ns: u64,
    handshake_until_ns: u64,
    send_until_ns: u64,
    payload_until_ns: u64,
    backoff: ReceiveBackoff,
    /// Whether it is on its source's list for this turn.
    pub ready: bool,
    /// Why it was dropped, if that was not its client's wish.
    rejection: Option<Reason>,
}

impl Connection {
    pub fn new(
        slot: u32,
        socket: OwnedFd,
        status: Arc<ConnectionStatus>,
        exports: Vec<Export>,
        tls: TlsPolicy,
        handshake_ns: Range<u64>,
        buffers: ConnectionBuffers,
    ) -> Connection {
        let mut stream = Stream::new(slot, socket, buffers);
        let handshake = Handshake::new(tls, &mut stream.replies().headers);
        Connection {
            slot,
            stream,
            status,
            counters: Counters::default(),
            phase: Phase::Handshake(handshake, exports),
            queue: 0,
            block_mask: 0,
            style: ReplyStyle::Simple,
            incoming: None,
            stalled: None,
            outstanding: 0,
            buffered: 0,
            busy: 0,
            ending: Ending::No,
            handshake_since_ns: handshake_ns.start,
            handshake_until_ns: handshake_ns.end,
            send_until_ns: u64::MAX,
            payload_until_ns: u64::MAX,
            backoff: ReceiveBackoff::default(),
            ready: false,
            rejection: None,
        }
    }

    pub fn status(&self) -> &Arc<ConnectionStatus> {
        &self.status
    }

    /// Why it was dropped, if that was not its client's wish. Once.
    pub fn take_rejection(&mut self) -> Option<Reason> {
        match &self.phase {
            Phase::Handshake(handshake, _) if handshake.lacks_tls() => Some(Reason::WithoutTls),
            _ => self.rejection.take(),
        }
    }

    /// The client broke a rule.
    fn violate(&mut self, reason: Reason) {
        self.counters.violations += 1;
        self.rejection = Some(reason);
    }

    /// When something of this connection is due.
    pub fn deadline_ns(&self) -> u64 {
        self.client_until_ns().min(self.backoff.until_ns())
    }

    /// When its client is late.
    fn client_until_ns(&self) -> u64 {
        self.handshake_until_ns.min(self.send_until_ns).min(self.payload_until_ns)
    }

    /// Leaves its client no more than `timeout_ns` for the handshake, if that goes on.
    pub fn hurry(&mut self, timeout_ns: u64) {
        if self.handshake_until_ns != u64::MAX {
            self.handshake_until_ns = self.handshake_until_ns.min(self.handshake_since_ns + timeout_ns);
        }
    }

    /// Gives up on a client that is late.
    pub fn check_deadline(&mut self, now_ns: u64) {
        if now_ns >= self.client_until_ns() {
            self.counters.timeouts += 1;
            self.rejection = Some(Reason::Late);
            self.break_off();
        }
    }

    /// Whether nothing is in flight any more and it may be dropped.
    pub fn is_over(&self) -> bool {
        self.ending != Ending::No
            && self.busy == 0
            && !self.is_armed()
            && (self.ending == Ending::Broken || self.stream.is_flushed())
    }

    /// Whether the kernel has memory of this connection.
    pub fn is_armed(&self) -> bool {
        self.stream.is_armed()
    }

    /// Gives its buffers back, before it is dropped.
    pub fn release(&mut self, core: &mut Core) {
        self.stream.release(&mut core.buffers);
        if let Some(incoming) = self.incoming.take() {
            core.buffers.put(incoming.into_parts().1);
        }
        core.budget.forget(self.slot);
        self.give(self.buffered, core);
    }

    /// Notes that `bytes` of its buffers are free.
    fn give(&mut self, bytes: usize, core: &mut Core) {
        core.budget.give(self.buffered, bytes);
        self.buffered -= bytes;
    }

    /// The server goes down: new requests are refused, or with `force` not even read.
    pub fn stop(&mut self, force: bool) {
        match &mut self.phase {
            Phase::Transmission(transmission) if !force => transmission.shut_down(),
            Phase::Handshake(handshake, _) => {
                handshake.shut_down();
                // What has arrived is answered, then the end of the stream closes the connection.
                self.stream.shutdown(Shutdown::Read);
            }
            _ if self.ending == Ending::No => {
                self.ending = Ending::Drain;
                self.stream.shutdown(Shutdown::Read);
            }
            _ => {}
        }
    }

    /// Neither receives nor sends any more.
    fn break_off(&mut self) {
        self.ending = Ending::Broken;
        self.handshake_until_ns = u64::MAX;
        self.send_until_ns = u64::MAX;
        self.payload_until_ns = u64::MAX;
        self.stream.shutdown(Shutdown::Both);
    }

    /// Does all that can be done now: parses, submits, sends, receives.
    pub fn turn(&mut self, core: &mut Core, cx: &mut SourceContext<'_>) {
        if self.stream.is_handshake_offloaded() {
            return;
        }
        let mut hungry = self.parse(core, cx);
        while hungry && self.decrypt() {
            hungry = self.parse(core, cx);
        }
        if hungry && let Some(tls) = self.stream.offload_handshake() {
            self.busy += 1;
            return core.offload_handshake(self.slot, tls, cx);
        }
        hungry &= !self.stream.must_send_first() && self.ending == Ending::No;
        if self.ending != Ending::No {
            core.budget.forget(self.slot);
        }
        if self.ending == Ending::Broken {
            // A send in flight keeps its memory until it ends.
            let freed = self.stream.drop_replies(&mut core.buffers);
            self.give(freed, core);
        } else if !self.stream.is_sending() {
            self.send(core, cx);
        }
        if !hungry || self.stream.is_receiving() {
            self.backoff.cancel();
        } else if !self.backs_off(core, cx) {
            self.receive(core, cx);
        }
        self.status.publish(&self.counters, self.outstanding);
    }

    /// Parses all that has arrived and there is room for. True if more bytes are wanted.
    fn parse(&mut self, core: &mut Core, cx: &mut SourceContext<'_>) -> bool {
        // While a receive is in flight the stream, or the payload, is the kernel's.
        if self.stream.is_receiving() {
            return false;
        }
        while self.ending == Ending::No {
            let transmission = match &mut self.phase {
                Phase::Transmission(transmission) => transmission,
                Phase::Handshake(handshake, exports) => {
                    let (input, replies) = self.stream.input_and_replies();
                    let (taken, next) = handshake.receive(input, exports, &mut replies.headers);
                    self.stream.consume(taken);
                    match next {
                        Next::Receive => return true,
                        Next::StartTls => {
                            self.start_tls();
                            return self.ending == Ending::No;
                        }
                        Next::Close => {
                            if !handshake.is_aborted() {
                                self.violate(Reason::Handshake);
                            }
                            self.ending = Ending::Drain;
                        }
                        Next::Transmission(session) => {
                            self.handshake_until_ns = u64::MAX;
                            self.stream.forget_tls();
                            self.queue = core.options.exports[session.export].queue;
                            self.block_mask = u64::from(cx.limits(self.queue).logical_block_bytes) - 1;
                            self.style = session.replies;
                            self.status.establish(exports[session.export].name.clone());
                            self.phase = Phase::Transmission(Transmission::new(session));
                        }
                    }
                    continue;
                }
            };
            if let Some(incoming) = &mut self.incoming {
                let input = self.stream.input();
                let bytes = (transmission.payload_bytes() as usize).min(input.len());
                incoming.missing()[..bytes].copy_from_slice(&input[..bytes]);
                incoming.took(bytes);
                self.stream.consume(bytes);
                transmission.took_payload(bytes as u32);
                if transmission.payload_bytes() > 0 {
                    return true;
                }
                self.submit_write(core, cx);
            } else if core.is_full() {
                return false;
            } else if let Some(request) = self.stalled {
                let bytes = self.buffer_bytes(&request);
                if self.buffered > 0 && self.buffered + bytes > core.options.buffered_bytes_max
                    || !core.budget.take(self.slot, self.buffered, bytes)
                {
                    return false;
                }
                self.buffered += bytes;
                self.stalled = None;
                self.begin(request, core, cx);
            } else if self.outstanding >= core.options.requests_max {
                return false;
            } else {
                let input = self.stream.input();
                let mut rest = input;
                let step = transmission.next(&mut rest);
                let taken = input.len() - rest.len();
                self.stream.consume(taken);
                match step {
                    Step::Receive => return true,
                    Step::Request(request) => {
                        self.count_request();
                        self.stalled = Some(request);
                    }
                    Step::Refused { cookie, offset, error } => {
                        self.count_request();
                        self.counters.refused_requests += 1;
                        self.error(ReplyTo { cookie, offset }, error);
                    }
                    Step::Disconnect => self.ending = Ending::Drain,
                    Step::Violation => {
                        self.violate(Reason::Request);
                        self.ending = Ending::Drain;
                    }
                }
            }
        }
        false
    }

    fn start_tls(&mut self) {
        if !self.stream.start_tls() {
            self.violate(Reason::Handshake);
            self.break_off();
        }
    }

    /// Decrypts what has arrived to where it belongs. True if there is something to parse now.
    fn decrypt(&mut self) -> bool {
        let payload = self.incoming.as_mut().map(Payload::missing);
        let to_payload = payload.is_some();
        match self.stream.decrypt(payload) {
            Ok(bytes) => {
                if to_payload {
                    self.took_payload(bytes);
                }
                return bytes > 0;
            }
            Err(TlsEnd::Closed) => self.ending = Ending::Drain,
            Err(TlsEnd::Broken) => {
                let reason = Reason::Tls(self.stream.tls_failure());
                self.violate(reason);
                self.ending = Ending::Drain;
            }
        }
        false
    }

    /// A worker went on with the handshake of TLS.
    pub fn resume_handshake(&mut self, tls: Box<Tls>) {
        self.busy -= 1;
        self.stream.resume_handshake(tls);
    }

    /// `bytes` of the payload that is on its way have arrived where they belong.
    fn took_payload(&mut self, bytes: usize) {
        if let (Some(incoming), Phase::Transmission(transmission)) = (&mut self.incoming, &mut self.phase) {
            incoming.took(bytes);
            transmission.took_payload(bytes as u32);
        }
    }

    fn count_request(&mut self) {
        self.outstanding += 1;
        self.counters.requests += 1;
    }

    /// Sets a request going.
    fn begin(&mut self, request: Request, core: &mut Core, cx: &mut SourceContext<'_>) {
        if !self.is_whole_blocks(&request) {
            return self.begin_unaligned(request, core, cx);
        }
        match request.command {
            Command::Cache if !cx.limits(self.queue).page_cache => {
                self.give(self.buffer_bytes(&request), core);
                self.done(ReplyTo { cookie: request.cookie, offset: request.offset });
            }
            Command::Write | Command::Read | Command::Cache => {
                let cached = request.command == Command::Cache;
                let length = if cached { request.length.min(CACHE_MAX_BYTES) } else { request.length };
                match core.buffers.take(length as u32, cx.registrar()) {
                    None => self.refuse(&request, NbdError::NoMemory, core),
                    Some(buffer) if request.command == Command::Write => {
                        self.incoming = Some(Payload::new(request, buffer, 0));
                    }
                    Some(buffer) => {
                        let range = request.offset..request.offset + length;
                        self.submit(request, Operation::Read, range, buffer.into(), core, cx);
                    }
                }
            }
            Command::Flush => self.submit(request, Operation::Flush, 0..0, Data::None, core, cx),
            Command::Trim => {
                self.submit(request, Operation::Discard, request.range(), Data::None, core, cx);
            }
            Command::WriteZeroes => {
                self.submit(request, Operation::WriteZeroes, request.range(), Data::None, core, cx);
            }
            Command::BlockStatus => self.query_extents(request, core, cx),
            // The parser turns it into a step of its own.
            Command::Disconnect => {}
        }
    }

    /// Sets a request going that is not whole blocks.
    #[cold]
    fn begin_unaligned(&mut self, request: Request, core: &mut Core, cx: &mut SourceContext<'_>) {
        match unaligned::plan(&request, cx.limits(self.queue)) {
            Plan::Answer(Ok(())) => {
                self.give(self.buffer_bytes(&request), core);
                self.done(self.pending(&request).to);
            }
            Plan::Answer(Err(error)) => self.refuse(&request, error, core),
            Plan::Transfer(blocks) => {
                match core.buffers.take((blocks.end - blocks.start) as u32, cx.registrar()) {
                    None => self.refuse(&request, NbdError::NoMemory, core),
                    Some(buffer) if request.command == Command::Write => {
                        let from = (request.offset - blocks.start) as usize;
                        self.incoming = Some(Payload::new(request, buffer, from));
                    }
                    Some(buffer) => self.submit(request, Operation::Read, blocks, buffer.into(), core, cx),
                }
            }
            Plan::Order => self.order(request, Operation::WriteZeroes, request.range(), Data::None, core),
            Plan::Discard(blocks) => self.submit(request, Operation::Discard, blocks, Data::None, core, cx),
            Plan::Extents => self.query_extents(request, core, cx),
        }
    }

    fn query_extents(&mut self, request: Request, core: &mut Core, cx: &mut SourceContext<'_>) {
        self.busy += 1;
        let max = if request.flags.contains(CommandFlags::REQ_ONE) { 1 } else { EXTENTS_MAX };
        core.query_extents(self.pending(&request), self.queue, max, cx);
    }

    /// Answers a request with an error before anything was done for it. A payload is dropped.
    fn refuse(&mut self, request: &Request, error: NbdError, core: &mut Core) {
        self.give(self.buffer_bytes(request), core);
        if let Phase::Transmission(transmission) = &mut self.phase {
            transmission.drop_payload();
        }
        self.error(ReplyTo { cookie: request.cookie, offset: request.offset }, error);
    }

    fn submit_write(&mut self, core: &mut Core, cx: &mut SourceContext<'_>) {
        if let Some((request, buffer)) = self.incoming.take().map(Payload::into_parts) {
            self.payload_until_ns = u64::MAX;
            let range = request.range();
            match self.is_whole_blocks(&request) {
                true => self.submit(request, Operation::Write, range, buffer.into(), core, cx),
                false => self.order(request, Operation::Write, range, buffer.into(), core),
            }
        }
    }

    fn is_whole_blocks(&self, request: &Request) -> bool {
        (request.offset | request.length) & self.block_mask == 0
    }

    /// Size of the buffers that a request needs.
    fn buffer_bytes(&self, request: &Request) -> usize {
        if request.command == Command::BlockStatus {
            return EXTENTS_MAX_BYTES;
        }
        unaligned::buffer_bytes(request, self.block_mask + 1)
    }

    /// Submits a write that must not run at the same time as another to the same block.
    fn order(
        &mut self,
        request: Request,
        operation: Operation,
        range: Range<u64>,
        data: Data,
        core: &mut Core,
    ) {
        self.busy += 1;
        let (pending, block) = (self.pending(&request), self.block_mask + 1);
        core.unaligned.push(OrderedWrite::new(&request, pending, self.queue, operation, range, block, data));
    }

    /// An ordered write completed.
    pub fn complete_ordered(&mut self, finished: Finished, core: &mut Core) {
        let Finished { pending, result, freed } = finished;
        self.give(freed, core);
        self.complete(pending, Completion { user_data: 0, result, data: Data::None }, core);
    }

    fn submit(
        &mut self,
        request: Request,
        operation: Operation,
        range: Range<u64>,
        data: Data,
        core: &mut Core,
        cx: &mut SourceContext<'_>,
    ) {
        if operation.is_write() && core.unaligned.must_order() {
            return self.order(request, operation, range, data, core);
        }
        let flags = unaligned::bio_flags(&request, operation);
        // Whole logical blocks are whole sectors.
        let (sector, sectors) = (Sector(range.start >> 9), (range.end - range.start) >> 9);
        self.busy += 1;
        let bio = Bio { operation, flags, sector, sectors, data, user_data: 0 };
        core.submit(self.pending(&request), self.queue, bio, cx);
    }

    fn pending(&self, request: &Request) -> Pending {
        Pending::new(self.slot, request)
    }

    /// A bio ended.
    pub fn complete(&mut self, pending: Pending, completion: Completion, core: &mut Core) {
        self.busy -= 1;
        if let Some(buffer) = completion.data.into_buffer() {
            if pending.command == Command::Read && completion.result.is_ok() {
                self.counters.read_bytes += pending.length;
                self.style.data(pending.to, pending.length as u32, &mut self.stream.replies().headers);
                let from = (pending.to.offset & self.block_mask) as usize;
                self.stream.replies().push_content(buffer, from..from + pending.length as usize);
                self.stream.replies().replies += 1;
                return;
            }
            self.give(buffer.len(), core);
            core.buffers.put(buffer);
        }
        match completion.result {
            // Of a device that turned out not to discard: a trim is advice.
            Err(Status::NotSupported) if pending.command == Command::Trim => self.done(pending.to),
            Err(status) => self.error(pending.to, status.into()),
            Ok(()) => {
                if pending.command == Command::Write {
                    self.counters.written_bytes += pending.length;
                }
                self.done(pending.to);
            }
        }
    }

    fn done(&mut self, to: ReplyTo) {
        self.style.done(to, &mut self.stream.replies().headers);
        self.stream.replies().replies += 1;
    }

    /// A query of extents ended.
    pub fn complete_extents(&mut self, pending: Pending, extents: Option<Vec<Extent>>) {
        self.busy -= 1;
        self.stream.replies().extents_bytes += EXTENTS_MAX_BYTES;
        let Some(mut extents) = extents else { return self.error(pending.to, NbdError::Io) };
        let mut left = pending.length;
        // Exactly what was asked for, whatever the driver says.
        extents.retain_mut(|extent| {
            extent.length = extent.length.min(left);
            left -= extent.length;
            extent.length > 0
        });
        // All of it lies beyond the end of a device that became smaller.
        if extents.is_empty() {
            return self.error(pending.to, NbdError::Invalid);
        }
        self.style.block_status(pending.to, &extents, &mut self.stream.replies().headers);
        self.stream.replies().replies += 1;
    }

    fn error(&mut self, to: ReplyTo, error: NbdError) {
        self.counters.errors += 1;
        self.style.error(to, error, &mut self.stream.replies().headers);
        self.stream.replies().replies += 1;
    }

    /// Whether to receive later.
    fn backs_off(&mut self, core: &mut Core, cx: &mut SourceContext<'_>) -> bool {
        let on = core.options.switches.receive_backoff.load(Relaxed);
        if !on || self.incoming.is_some() || self.ending != Ending::No {
            self.backoff.cancel();
            return false;
        }
        let starts = self.backoff.until_ns() == u64::MAX;
        match self.backoff.consider(self.counters.requests, cx.now_ns(), self.stream.socket()) {
            Decision::Later(until_ns) => {
                core.receive_backoffs += u64::from(starts);
                core.expect_deadline(until_ns);
                true
            }
            Decision::Over => {
                self.stream.expect_input();
                false
            }
            Decision::Now => false,
        }
    }

    /// Sends all that was gathered, if there is anything, and what TLS has to say by itself.
    fn send(&mut self, core: &mut Core, cx: &mut SourceContext<'_>) {
        if self.ending == Ending::Drain && self.busy == 0 && self.stream.replies().is_empty() {
            self.stream.close_tls();
        }
        if let Some(bytes) = self.stream.prepare_send() {
            self.send_until_ns = core.transfer_until_ns(bytes, cx);
            self.push_send(cx);
        }
    }

    fn push_send(&mut self, cx: &mut SourceContext<'_>) {
        if !self.stream.push_send(cx) {
            self.break_off();
        }
    }

    /// A send completed with a count of bytes, or a negative errno.
    pub fn sent(&mut self, result: i32, core: &mut Core, cx: &mut SourceContext<'_>) {
        let sent = self.stream.sent(result);
        if sent.is_err() {
            self.break_off();
        }
        if self.ending != Ending::Broken && sent == Ok(false) {
            return self.push_send(cx);
        }
        self.send_until_ns = u64::MAX;
        let (replies, freed) = self.stream.recycle_sent(&mut core.buffers);
        self.outstanding -= replies;
        self.give(freed, core);
    }

    /// Receives more of the stream, or of a payload, for which there is a time.
    fn receive(&mut self, core: &mut Core, cx: &mut SourceContext<'_>) {
        if let Some(incoming) = &self.incoming
            && self.payload_until_ns == u64::MAX
        {
            self.payload_until_ns = core.transfer_until_ns(incoming.length(), cx);
        }
        self.stream.receive(self.incoming.as_mut().map(Payload::missing), cx);
    }

    /// A receive completed with a count of bytes, or a negative errno.
    pub fn received(&mut self, result: i32) {
        self.backoff.device_idle = self.outstanding == self.stream.unsent_replies();
        let payload = self.incoming.as_mut().map_or(0, |incoming| incoming.missing().len());
        match self.stream.received(result, payload) {
            Received::Payload(bytes) => self.took_payload(bytes),
            Received::Nothing => {}
            // What was requested before is answered.
            Received::Closed if self.ending == Ending::No => self.ending = Ending::Drain,
            Received::Closed => {}
            Received::Failed => self.break_off(),
        }
    }
}

//! The connection of one client. [`Stream`] moves the bytes, [`Requests`] carries out the requests.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkq::{Completion, Data, SourceContext};
use rustix::net::Shutdown;

use super::contexts::ContextStatus;
use super::handshake::{Export, Handshake, Next, TlsPolicy};
use super::in_flight::InFlight;
use super::proto::NbdError;
use super::receive_backoff::{Decision, ReceiveBackoff};
use super::rejections::Reason;
use super::requests::{Parsed, Requests};
use super::shared::EngineShared;
use super::status::ConnectionStatus;
use super::stream::Stream;
use super::tls::StreamEnd;
use super::unaligned::Finished;

#[expect(clippy::large_enum_variant, reason = "a connection is in its handshake only briefly")]
enum Phase {
    Handshake(Handshake, Vec<Export>),
    Transmission(Requests),
}

/// Cost of a decryption step, in items of the turn's budget: a client may send records with almost no data.
const DECRYPT_ITEMS: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Closing {
    No,
    /// No more requests are received. Requests in flight are answered.
    Drain,
    /// Nothing is received or sent. Requests in flight complete without a reply.
    Broken,
}

pub(super) struct Connection {
    slot: u32,
    pub stream: Stream,
    pub status: Arc<ConnectionStatus>,
    phase: Phase,
    closing: Closing,
    handshake_since_ns: u64,
    handshake_until_ns: u64,
    send_until_ns: u64,
    backoff: ReceiveBackoff,
    /// The connection is on its source's list of ready connections.
    ready: bool,
    rejection: Option<Reason>,
}

impl Connection {
    pub fn new(
        slot: u32,
        mut stream: Stream,
        status: Arc<ConnectionStatus>,
        exports: Vec<Export>,
        tls: TlsPolicy,
        handshake_ns: Range<u64>,
    ) -> Connection {
        let handshake = stream.replies().append(|output| Handshake::new(tls, output));
        Connection {
            slot,
            stream,
            status,
            phase: Phase::Handshake(handshake, exports),
            closing: Closing::No,
            handshake_since_ns: handshake_ns.start,
            handshake_until_ns: handshake_ns.end,
            send_until_ns: u64::MAX,
            backoff: ReceiveBackoff::default(),
            ready: false,
            rejection: None,
        }
    }

    pub fn make_ready(&mut self) -> bool {
        !std::mem::replace(&mut self.ready, true)
    }

    pub fn take_rejection(&mut self) -> Option<Reason> {
        match &self.phase {
            Phase::Handshake(handshake, _) if handshake.lacks_tls() => Some(Reason::WithoutTls),
            _ => self.rejection.take(),
        }
    }

    /// Records that the client broke the protocol. No further requests are received.
    fn end_after_violation(&mut self, reason: Reason) {
        self.status.count_violation();
        self.rejection = Some(reason);
        self.closing = Closing::Drain;
    }

    pub fn deadline_ns(&self) -> u64 {
        self.client_until_ns().min(self.backoff.until_ns())
    }

    /// When to disconnect the client; `u64::MAX` if the server does not wait for the client.
    fn client_until_ns(&self) -> u64 {
        let until_ns = match &self.phase {
            _ if self.closing == Closing::Broken => return u64::MAX,
            Phase::Handshake(..) => self.handshake_until_ns,
            Phase::Transmission(requests) => requests.payload_until_ns,
        };
        until_ns.min(self.send_until_ns)
    }

    pub fn shorten_handshake(&mut self, timeout_ns: u64) {
        self.handshake_until_ns = self.handshake_until_ns.min(self.handshake_since_ns + timeout_ns);
    }

    pub fn check_deadline(&mut self, now_ns: u64) {
        if now_ns >= self.client_until_ns() {
            self.status.count_timeout();
            self.rejection = Some(Reason::Late);
            self.break_off();
        }
    }

    pub fn is_closing(&self) -> bool {
        self.closing != Closing::No
    }

    /// Whether this can be dropped: closing, nothing in flight, and no reply left that can be sent.
    pub fn is_over(&self) -> bool {
        self.closing != Closing::No
            && self.is_idle()
            && !self.stream.is_armed()
            && (self.closing == Closing::Broken || self.stream.is_flushed())
    }

    fn is_idle(&self) -> bool {
        match &self.phase {
            Phase::Handshake(..) => !self.stream.handshake_offloaded,
            Phase::Transmission(requests) => requests.is_idle(),
        }
    }

    /// Returns the buffers to `shared`. The connection is dropped afterwards.
    pub fn release(&mut self, shared: &mut EngineShared) {
        self.stream.release(&mut shared.buffers);
        shared.budget.forget(self.slot);
        if let Phase::Transmission(requests) = &mut self.phase {
            requests.release(shared);
        }
    }

    /// Reads no further requests. The handshake and the sending of replies may last until `until_ns`.
    pub fn stop(&mut self, until_ns: u64) {
        match &mut self.phase {
            Phase::Handshake(handshake, _) => {
                handshake.shut_down();
                // Options that were received are still answered. The end of the stream then closes the
                // connection.
                self.handshake_until_ns = self.handshake_until_ns.min(until_ns);
            }
            Phase::Transmission(_) => self.closing = self.closing.max(Closing::Drain),
        }
        if self.closing != Closing::Broken {
            self.stream.shutdown(Shutdown::Read);
        }
        if self.stream.send_armed {
            self.send_until_ns = self.send_until_ns.min(until_ns);
        }
    }

    /// Closes the connection in both directions. Unsent replies are dropped.
    fn break_off(&mut self) {
        self.closing = Closing::Broken;
        self.stream.shutdown(Shutdown::Both);
    }

    /// Parses, submits, sends and receives. Returns whether received data is left to parse in the next turn.
    pub fn turn(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) -> bool {
        self.ready = false;
        if self.stream.handshake_offloaded {
            return false;
        }
        if let Phase::Transmission(requests) = &mut self.phase {
            match self.closing {
                Closing::Broken => requests.abandon_parts(),
                _ => requests.begin_parts(self.stream.replies(), shared, cx),
            }
        }
        let mut parsed = self.parse(shared, cx);
        while parsed == Parsed::Receive && self.decrypt(shared) {
            parsed = self.parse(shared, cx);
            // The parser does not check the budget while it copies the rest of a payload.
            if parsed == Parsed::Receive && shared.work.is_over() {
                parsed = Parsed::Later;
            }
        }
        let mut wants_input = parsed == Parsed::Receive;
        if wants_input && let Some(tls) = self.stream.offload_handshake() {
            shared.offload_handshake(self.slot, tls, cx);
            return false;
        }
        wants_input &= !self.stream.must_send_first() && self.closing == Closing::No;
        if self.closing != Closing::No {
            shared.budget.forget(self.slot);
        }
        if (self.closing == Closing::Broken || shared.is_stopping())
            && let Phase::Transmission(requests) = &mut self.phase
        {
            requests.cancel_queries(self.closing != Closing::Broken, self.stream.replies(), shared);
        }
        if self.closing == Closing::Broken {
            // Only the gathered replies are dropped. A send in flight uses its memory until it completes.
            let freed = self.stream.drop_replies(&mut shared.buffers);
            if let Phase::Transmission(requests) = &mut self.phase {
                requests.free(freed, shared);
            }
        } else if !self.stream.send_armed {
            self.send(shared, cx);
        }
        if !wants_input || self.stream.receive_armed {
            self.backoff.cancel();
        } else if !self.backs_off(shared, cx) {
            self.receive(shared, cx);
        }
        if let Phase::Transmission(requests) = &self.phase {
            self.status.publish(&requests.counters, requests.outstanding);
        }
        parsed == Parsed::Later && self.closing == Closing::No
    }

    /// Parses the received data, as far as the limits of memory and requests and the turn's budget allow.
    fn parse(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) -> Parsed {
        // While a receive is in flight, the kernel may write to the input buffer and to the payload.
        if self.stream.receive_armed {
            return Parsed::Wait;
        }
        while self.closing == Closing::No {
            let (handshake, exports) = match &mut self.phase {
                Phase::Transmission(requests) => {
                    let parsed = requests.parse(&mut self.stream, shared, cx);
                    match parsed {
                        Parsed::Disconnect => self.closing = Closing::Drain,
                        Parsed::Violation => self.end_after_violation(Reason::Request),
                        Parsed::Receive | Parsed::Later | Parsed::Wait => {}
                    }
                    return parsed;
                }
                Phase::Handshake(..) if shared.work.is_over() => return Parsed::Later,
                Phase::Handshake(handshake, exports) => (handshake, exports),
            };
            let (input, replies) = self.stream.input_and_replies();
            let (taken, next) = replies.append(|output| handshake.receive(input, exports, output));
            self.stream.consume(taken);
            shared.work.spend(handshake.take_work());
            match next {
                Next::Receive => return Parsed::Receive,
                Next::Later => return Parsed::Later,
                Next::StartTls if self.stream.start_tls() => return Parsed::Receive,
                Next::StartTls => {
                    self.end_after_violation(Reason::Handshake);
                    self.break_off();
                }
                Next::Abort => self.closing = Closing::Drain,
                Next::Close => self.end_after_violation(Reason::Handshake),
                Next::Transmission(session) => {
                    self.stream.forget_tls();
                    let export = &exports[session.export];
                    self.status.establish(export.name.clone());
                    let requests = Requests::new(self.slot, session, export, shared, cx);
                    self.phase = Phase::Transmission(requests);
                }
            }
        }
        Parsed::Wait
    }

    /// Decrypts into the expected payload, else into the input buffer. Returns whether there is new data.
    fn decrypt(&mut self, shared: &mut EngineShared) -> bool {
        let payload = match &mut self.phase {
            Phase::Handshake(..) => None,
            Phase::Transmission(requests) => requests.missing_payload(),
        };
        let decrypted = self.stream.decrypt(payload);
        shared.work.spend(DECRYPT_ITEMS * self.stream.take_decrypt_steps());
        match decrypted {
            Ok(bytes) => {
                // The bytes belong to the payload if one is expected, else the parser finds them in the
                // input.
                if let Phase::Transmission(requests) = &mut self.phase {
                    requests.took_payload(bytes);
                }
                return bytes > 0;
            }
            Err(StreamEnd::Closed) => self.closing = Closing::Drain,
            Err(StreamEnd::Broken) => {
                let reason = Reason::Tls(self.stream.tls_failure());
                self.end_after_violation(reason);
            }
        }
        false
    }

    pub fn complete(&mut self, request: InFlight, completion: Completion, shared: &mut EngineShared) {
        if let Phase::Transmission(requests) = &mut self.phase {
            requests.complete(request, completion, self.stream.replies(), shared);
        }
    }

    pub fn complete_ordered(&mut self, finished: Finished, shared: &mut EngineShared) {
        let Finished { request, result, freed } = finished;
        if let Phase::Transmission(requests) = &mut self.phase {
            requests.free(freed, shared);
        }
        self.complete(request, Completion { user_data: 0, result, data: Data::None }, shared);
    }

    /// `contexts` is `None` if the query failed.
    pub fn complete_status(&mut self, request: InFlight, contexts: Option<Vec<ContextStatus>>) {
        if let Phase::Transmission(requests) = &mut self.phase {
            requests.complete_status(request, contexts.ok_or(NbdError::Io), self.stream.replies());
        }
    }

    fn backs_off(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) -> bool {
        let Phase::Transmission(requests) = &mut self.phase else { return false };
        let on = shared.options.switches.receive_backoff.load(Relaxed);
        if !on || requests.missing_payload().is_some() || self.closing != Closing::No {
            self.backoff.cancel();
            return false;
        }
        let starts = self.backoff.until_ns() == u64::MAX;
        match self.backoff.consider(requests.counters.requests, cx.now_ns(), self.stream.socket()) {
            Decision::Later(until_ns) => {
                requests.counters.receive_backoffs += u64::from(starts);
                shared.expect_deadline(until_ns);
                true
            }
            Decision::Over => {
                self.stream.expect_input();
                false
            }
            Decision::Now => false,
        }
    }

    /// Sends the gathered replies, and what TLS has to send itself.
    fn send(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) {
        if self.closing == Closing::Drain && self.is_idle() && self.stream.replies().is_empty() {
            self.stream.close_tls();
        }
        if let Some(bytes) = self.stream.prepare_send() {
            self.send_until_ns = shared.transfer_until_ns(bytes, cx);
            self.push_send(cx);
        }
    }

    fn push_send(&mut self, cx: &mut SourceContext<'_>) {
        if let Phase::Transmission(requests) = &mut self.phase {
            requests.counters.sends += 1;
        }
        if !self.stream.push_send(cx) {
            self.break_off();
        }
    }

    pub fn sent(&mut self, result: i32, shared: &mut EngineShared, cx: &mut SourceContext<'_>) {
        let sent = self.stream.sent(result);
        if sent.is_err() {
            self.break_off();
        }
        if self.closing != Closing::Broken && sent == Ok(false) {
            return self.push_send(cx);
        }
        self.send_until_ns = u64::MAX;
        let (replies, freed) = self.stream.recycle_sent(&mut shared.buffers);
        if let Phase::Transmission(requests) = &mut self.phase {
            requests.outstanding -= replies;
            requests.free(freed, shared);
        }
    }

    /// Receives more of the stream, or of a payload, whose deadline then begins.
    fn receive(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) {
        let payload = match &mut self.phase {
            Phase::Handshake(..) => None,
            Phase::Transmission(requests) => {
                requests.counters.receives += 1;
                requests.expect_payload(shared, cx);
                requests.missing_payload()
            }
        };
        self.stream.receive(payload, cx);
    }

    pub fn received(&mut self, result: i32) {
        let mut payload = 0;
        if let Phase::Transmission(requests) = &mut self.phase {
            self.backoff.note_device(requests.outstanding == self.stream.unsent_replies());
            payload = requests.missing_payload().map_or(0, |missing| missing.len());
        }
        match self.stream.received(result, payload) {
            Ok(bytes) => {
                if let Phase::Transmission(requests) = &mut self.phase {
                    requests.took_payload(bytes);
                }
            }
            // The client sends nothing more, but earlier requests are still answered.
            Err(StreamEnd::Closed) => self.closing = self.closing.max(Closing::Drain),
            Err(StreamEnd::Broken) => self.break_off(),
        }
    }
}

//! One client: its handshake, its requests, and how the connection closes. [`Stream`] has its bytes,
//! [`Requests`] what it asks for.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkq::{Completion, SourceContext};
use rustix::net::Shutdown;

use super::contexts::ContextStatus;
use super::handshake::{Export, Handshake, Next, TlsPolicy};
use super::in_flight::InFlight;
use super::receive_backoff::{Decision, ReceiveBackoff};
use super::rejections::Reason;
use super::requests::{Parsed, Requests};
use super::shared::EngineShared;
use super::status::ConnectionStatus;
use super::stream::{ConnectionBuffers, Received, Stream};
use super::tls::{Tls, TlsEnd};
use super::unaligned::Finished;

enum Phase {
    Handshake(Handshake, Vec<Export>),
    Transmission(Requests),
}

/// The items of the turn's budget that a step of decryption costs: a client may send records of one byte each, or of
/// none, such as updates of keys.
const DECRYPT_ITEMS: usize = 4;

/// The thing that parsing needs to continue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wish {
    /// More bytes.
    Receive,
    /// The next turn.
    Later,
    /// A completion.
    Nothing,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Closing {
    /// Not in sight.
    No,
    /// Nothing more is received; what is in flight is answered.
    Drain,
    /// Nothing more is sent either; what is in flight only completes.
    Broken,
}

pub(super) struct Connection {
    slot: u32,
    stream: Stream,
    status: Arc<ConnectionStatus>,
    phase: Phase,
    closing: Closing,
    handshake_since_ns: u64,
    handshake_until_ns: u64,
    send_until_ns: u64,
    backoff: ReceiveBackoff,
    /// Whether it is on its source's list for this turn.
    ready: bool,
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

    pub fn status(&self) -> &Arc<ConnectionStatus> {
        &self.status
    }

    /// Notes that its turn comes. False if that was noted before.
    pub fn make_ready(&mut self) -> bool {
        !std::mem::replace(&mut self.ready, true)
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
        self.status.count_violation();
        self.rejection = Some(reason);
    }

    /// When something of this connection is due.
    pub fn deadline_ns(&self) -> u64 {
        self.client_until_ns().min(self.backoff.until_ns())
    }

    /// When its client is late.
    fn client_until_ns(&self) -> u64 {
        let until_ns = match &self.phase {
            _ if self.closing == Closing::Broken => return u64::MAX,
            Phase::Handshake(..) => self.handshake_until_ns,
            Phase::Transmission(requests) => requests.payload_until_ns(),
        };
        until_ns.min(self.send_until_ns)
    }

    /// Leaves its client no more than `timeout_ns` for the handshake, unless that is done.
    pub fn hurry(&mut self, timeout_ns: u64) {
        self.handshake_until_ns = self.handshake_until_ns.min(self.handshake_since_ns + timeout_ns);
    }

    /// Breaks the connection to a client that is late.
    pub fn check_deadline(&mut self, now_ns: u64) {
        if now_ns >= self.client_until_ns() {
            self.status.count_timeout();
            self.rejection = Some(Reason::Late);
            self.break_off();
        }
    }

    /// Whether it takes no more requests.
    pub fn is_closing(&self) -> bool {
        self.closing != Closing::No
    }

    /// Whether nothing is in flight any more and it may be dropped.
    pub fn is_over(&self) -> bool {
        self.closing != Closing::No
            && self.is_idle()
            && !self.is_armed()
            && (self.closing == Closing::Broken || self.stream.is_flushed())
    }

    /// Whether neither the block layer nor a worker has anything of it.
    fn is_idle(&self) -> bool {
        match &self.phase {
            Phase::Handshake(..) => !self.stream.is_handshake_offloaded(),
            Phase::Transmission(requests) => requests.is_idle(),
        }
    }

    /// Whether the kernel has memory of this connection.
    pub fn is_armed(&self) -> bool {
        self.stream.is_armed()
    }

    /// Returns its buffers, before it is dropped.
    pub fn release(&mut self, shared: &mut EngineShared) {
        self.stream.release(&mut shared.buffers);
        shared.budget.forget(self.slot);
        if let Phase::Transmission(requests) = &mut self.phase {
            requests.release(shared);
        }
    }

    /// The server stops: no further request is read. The client has until `until_ns` to finish its handshake, and to
    /// take what is being sent to it.
    pub fn stop(&mut self, until_ns: u64) {
        match &mut self.phase {
            Phase::Handshake(handshake, _) => {
                handshake.shut_down();
                // Options that have arrived are answered; end of stream then closes the connection.
                self.handshake_until_ns = self.handshake_until_ns.min(until_ns);
            }
            Phase::Transmission(_) if self.closing == Closing::No => self.closing = Closing::Drain,
            Phase::Transmission(_) => {}
        }
        if self.closing != Closing::Broken {
            self.stream.shutdown(Shutdown::Read);
        }
        if self.stream.is_sending() {
            self.send_until_ns = self.send_until_ns.min(until_ns);
        }
    }

    /// Neither receives nor sends any more.
    fn break_off(&mut self) {
        self.closing = Closing::Broken;
        self.stream.shutdown(Shutdown::Both);
    }

    /// Does all that can be done in this turn: parses, submits, sends, receives. Returns whether more of what has
    /// arrived is to be parsed in the next turn.
    pub fn turn(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) -> bool {
        self.ready = false;
        if self.stream.is_handshake_offloaded() {
            return false;
        }
        if let Phase::Transmission(requests) = &mut self.phase {
            match self.closing {
                Closing::Broken => requests.abandon_parts(),
                _ => requests.begin_parts(self.stream.replies(), shared, cx),
            }
        }
        let mut wish = self.parse(shared, cx);
        while wish == Wish::Receive && self.decrypt(shared) {
            wish = self.parse(shared, cx);
            // The rest of a payload is not checked against the budget by the parser.
            if wish == Wish::Receive && shared.work.is_over() {
                wish = Wish::Later;
            }
        }
        let mut hungry = wish == Wish::Receive;
        if hungry && let Some(tls) = self.stream.offload_handshake() {
            shared.offload_handshake(self.slot, tls, cx);
            return false;
        }
        hungry &= !self.stream.must_send_first() && self.closing == Closing::No;
        if self.closing != Closing::No {
            shared.budget.forget(self.slot);
        }
        if self.closing == Closing::Broken {
            // A send in flight keeps its memory until it completes.
            let freed = self.stream.drop_replies(&mut shared.buffers);
            if let Phase::Transmission(requests) = &mut self.phase {
                requests.free(freed, shared);
            }
        } else if !self.stream.is_sending() {
            self.send(shared, cx);
        }
        if !hungry || self.stream.is_receiving() {
            self.backoff.cancel();
        } else if !self.backs_off(shared, cx) {
            self.receive(shared, cx);
        }
        if let Phase::Transmission(requests) = &self.phase {
            self.status.publish(requests.counters(), requests.outstanding());
        }
        wish == Wish::Later && self.closing == Closing::No
    }

    /// Parses what has arrived, as far as there is room for it and the turn's budget allows.
    fn parse(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) -> Wish {
        // While a receive is in flight the stream, or the payload, is the kernel's.
        if self.stream.is_receiving() {
            return Wish::Nothing;
        }
        while self.closing == Closing::No {
            let (handshake, exports) = match &mut self.phase {
                Phase::Transmission(requests) => {
                    match requests.parse(&mut self.stream, shared, cx) {
                        Parsed::Receive => return Wish::Receive,
                        Parsed::Later => return Wish::Later,
                        Parsed::Wait => {}
                        Parsed::Disconnect => self.closing = Closing::Drain,
                        Parsed::Violation => {
                            self.violate(Reason::Request);
                            self.closing = Closing::Drain;
                        }
                    }
                    return Wish::Nothing;
                }
                Phase::Handshake(..) if shared.work.is_over() => return Wish::Later,
                Phase::Handshake(handshake, exports) => (handshake, exports),
            };
            let (input, replies) = self.stream.input_and_replies();
            let (taken, next) = replies.append(|output| handshake.receive(input, exports, output));
            self.stream.consume(taken);
            shared.work.spend(handshake.take_work());
            match next {
                Next::Receive => return Wish::Receive,
                Next::Later => return Wish::Later,
                Next::StartTls => {
                    self.start_tls();
                    return if self.closing == Closing::No { Wish::Receive } else { Wish::Nothing };
                }
                Next::Close => {
                    if !handshake.is_aborted() {
                        self.violate(Reason::Handshake);
                    }
                    self.closing = Closing::Drain;
                }
                Next::Transmission(session) => {
                    self.stream.forget_tls();
                    let export = &exports[session.export];
                    self.status.establish(export.name.clone());
                    let requests = Requests::new(self.slot, session, export, shared, cx);
                    self.phase = Phase::Transmission(requests);
                }
            }
        }
        Wish::Nothing
    }

    fn start_tls(&mut self) {
        if !self.stream.start_tls() {
            self.violate(Reason::Handshake);
            self.break_off();
        }
    }

    /// Decrypts what has arrived to where it belongs. True if there is something to parse now.
    fn decrypt(&mut self, shared: &mut EngineShared) -> bool {
        let payload = match &mut self.phase {
            Phase::Handshake(..) => None,
            Phase::Transmission(requests) => requests.missing_payload(),
        };
        let decrypted = self.stream.decrypt(payload);
        shared.work.spend(DECRYPT_ITEMS * self.stream.take_decrypt_steps());
        match decrypted {
            Ok(0) => return false,
            Ok(bytes) => {
                // Of a payload, if one is on its way; else for the parser.
                if let Phase::Transmission(requests) = &mut self.phase {
                    requests.took_payload(bytes);
                }
                return true;
            }
            Err(TlsEnd::Closed) => self.closing = Closing::Drain,
            Err(TlsEnd::Broken) => {
                let reason = Reason::Tls(self.stream.tls_failure());
                self.violate(reason);
                self.closing = Closing::Drain;
            }
        }
        false
    }

    /// A worker went on with the handshake of TLS.
    pub fn resume_handshake(&mut self, tls: Box<Tls>) {
        self.stream.resume_handshake(tls);
    }

    /// A bio completed.
    pub fn complete(&mut self, request: InFlight, completion: Completion, shared: &mut EngineShared) {
        if let Phase::Transmission(requests) = &mut self.phase {
            requests.complete(request, completion, self.stream.replies(), shared);
        }
    }

    /// An ordered write completed.
    pub fn complete_ordered(&mut self, finished: Finished, shared: &mut EngineShared) {
        if let Phase::Transmission(requests) = &mut self.phase {
            requests.complete_ordered(finished, self.stream.replies(), shared);
        }
    }

    /// A query of the metadata contexts completed.
    pub fn complete_status(&mut self, request: InFlight, contexts: Option<Vec<ContextStatus>>) {
        if let Phase::Transmission(requests) = &mut self.phase {
            requests.complete_status(request, contexts, self.stream.replies());
        }
    }

    /// Whether to receive later.
    fn backs_off(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) -> bool {
        let Phase::Transmission(requests) = &self.phase else { return false };
        let on = shared.options.switches.receive_backoff.load(Relaxed);
        if !on || requests.expects_payload() || self.closing != Closing::No {
            self.backoff.cancel();
            return false;
        }
        let starts = self.backoff.until_ns() == u64::MAX;
        match self.backoff.consider(requests.counters().requests, cx.now_ns(), self.stream.socket()) {
            Decision::Later(until_ns) => {
                if starts {
                    shared.count_backoff();
                }
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

    /// Sends what was gathered, if anything, and what TLS sends by itself.
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
            requests.count_send();
        }
        if !self.stream.push_send(cx) {
            self.break_off();
        }
    }

    /// A send completed with a count of bytes, or a negative errno.
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
            requests.sent(replies, freed, shared);
        }
    }

    /// Receives more of the stream, or of a payload, for which there is a time.
    fn receive(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) {
        let payload = match &mut self.phase {
            Phase::Handshake(..) => None,
            Phase::Transmission(requests) => {
                requests.count_receive();
                requests.expect_payload(shared, cx);
                requests.missing_payload()
            }
        };
        self.stream.receive(payload, cx);
    }

    /// A receive completed with a count of bytes, or a negative errno.
    pub fn received(&mut self, result: i32) {
        let mut payload = 0;
        if let Phase::Transmission(requests) = &mut self.phase {
            self.backoff.note_device(requests.outstanding() == self.stream.unsent_replies());
            payload = requests.missing_payload().map_or(0, |missing| missing.len());
        }
        match self.stream.received(result, payload) {
            Received::Payload(bytes) => {
                if let Phase::Transmission(requests) = &mut self.phase {
                    requests.took_payload(bytes);
                }
            }
            Received::Nothing => {}
            // Earlier requests are answered.
            Received::Closed if self.closing == Closing::No => self.closing = Closing::Drain,
            Received::Closed => {}
            Received::Failed => self.break_off(),
        }
    }
}

//! The connection of one client. [`Stream`] moves the bytes, [`Requests`] carries out the requests.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkq::SourceContext;
use blkq::trace::TraceClient;
use rustix::net::Shutdown;

use super::handshake::{Export, Handshake, Next};
use super::options::NbdOptions;
use super::receive_backoff::ReceiveBackoff;
use super::requests::{Parsed, Requests};
use super::shared::EngineShared;
use super::status::{ConnectionStatus, Reason};
use super::stream::Stream;
use super::tls::StreamEnd;
use crate::client_kind;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Closing {
    No,
    /// No more requests are received. Requests in flight are answered.
    Drain,
    /// Nothing is received or sent. Requests in flight complete without a reply.
    Broken,
}

pub(super) struct Connection {
    pub stream: Stream,
    pub requests: Requests,
    pub status: Arc<ConnectionStatus>,
    /// `None` once the client has chosen one of the exports: the transmission phase.
    handshake: Option<(Handshake, Vec<Export>)>,
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
        stream: Stream,
        status: Arc<ConnectionStatus>,
        exports: Vec<Export>,
        options: &NbdOptions,
        now_ns: u64,
    ) -> Connection {
        let mut requests = Requests::new(slot, TraceClient::new(client_kind::NBD, status.id as u32));
        let handshake = requests.replies.append(|output| Handshake::new(options.tls_policy(), output));
        Connection {
            stream,
            requests,
            status,
            handshake: Some((handshake, exports)),
            closing: Closing::No,
            handshake_since_ns: now_ns,
            handshake_until_ns: now_ns + options.handshake_timeout_s * 1_000_000_000,
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
        match &self.handshake {
            Some((handshake, _)) if handshake.lacks_tls() => Some(Reason::WithoutTls),
            _ => self.rejection.take(),
        }
    }

    /// Records that the client broke the protocol. No further requests are received.
    fn end_after_violation(&mut self, reason: Reason) {
        self.requests.counters.violations += 1;
        self.rejection = Some(reason);
        self.closing = Closing::Drain;
    }

    pub fn deadline_ns(&self) -> u64 {
        self.client_until_ns().min(self.backoff.until_ns.unwrap_or(u64::MAX))
    }

    /// When to disconnect the client; `u64::MAX` if the server does not wait for the client.
    fn client_until_ns(&self) -> u64 {
        if self.closing == Closing::Broken {
            return u64::MAX;
        }
        let payload_until_ns = self.requests.payload_until_ns.unwrap_or(u64::MAX);
        self.handshake_until_ns.min(payload_until_ns).min(self.send_until_ns)
    }

    pub fn shorten_handshake(&mut self, timeout_ns: u64) {
        if self.handshake.is_some() {
            self.handshake_until_ns = self.handshake_until_ns.min(self.handshake_since_ns + timeout_ns);
        }
    }

    pub fn check_deadline(&mut self, now_ns: u64) {
        if now_ns >= self.client_until_ns() {
            self.requests.counters.timeouts += 1;
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
            && (self.closing == Closing::Broken
                || self.requests.replies.is_empty() && !self.stream.wants_tls_send())
    }

    fn is_idle(&self) -> bool {
        self.requests.busy == 0 && !self.stream.handshake_offloaded
    }

    /// Returns the buffers to `shared`. The connection is dropped afterwards.
    pub fn release(&mut self, shared: &mut EngineShared) {
        self.stream.sending.recycle(&mut shared.buffers);
        shared.budget.forget(self.requests.slot);
        self.requests.release(shared);
    }

    /// Reads no further requests. The handshake and the sending of replies may last until `until_ns`.
    pub fn stop(&mut self, until_ns: u64) {
        match &mut self.handshake {
            Some((handshake, _)) => {
                handshake.shut_down();
                // Options that were received are still answered. The end of the stream then closes the
                // connection.
                self.handshake_until_ns = self.handshake_until_ns.min(until_ns);
            }
            None => self.closing = self.closing.max(Closing::Drain),
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
        if self.closing != Closing::Broken {
            self.requests.begin_parts(shared, cx);
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
            shared.offload_handshake(self.requests.slot, tls, cx);
            return false;
        }
        wants_input &= !self.stream.must_send_first() && self.closing == Closing::No;
        if self.closing != Closing::No {
            shared.budget.forget(self.requests.slot);
        }
        if self.closing == Closing::Broken || shared.stopping {
            self.requests.cancel_queries(self.closing != Closing::Broken, shared);
        }
        if self.closing == Closing::Broken {
            // Only the gathered replies are dropped. A send in flight uses its memory until it completes.
            self.requests.abandon(shared);
        } else if !self.stream.send_armed {
            self.send(shared, cx);
        }
        if !wants_input || self.stream.receive_armed {
            self.backoff.until_ns = None;
        } else if !self.backs_off(shared, cx) {
            self.receive(shared, cx);
        }
        self.status.publish(&self.requests.counters, self.requests.outstanding);
        parsed == Parsed::Later && self.closing == Closing::No
    }

    /// Parses the received data, as far as the limits of memory and requests and the turn's budget allow.
    fn parse(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) -> Parsed {
        // While a receive is in flight, the kernel may write to the input buffer and to the payload.
        if self.stream.receive_armed {
            return Parsed::Wait;
        }
        while self.closing == Closing::No {
            let Some((handshake, exports)) = &mut self.handshake else {
                let parsed = self.requests.parse(&mut self.stream, shared, cx);
                match parsed {
                    Parsed::Disconnect => self.closing = Closing::Drain,
                    Parsed::Violation => self.end_after_violation(Reason::Request),
                    Parsed::Receive | Parsed::Later | Parsed::Wait => {}
                }
                return parsed;
            };
            if shared.work.is_over() {
                return Parsed::Later;
            }
            let (input, replies) = (self.stream.input(), &mut self.requests.replies);
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
                    self.stream.tls_offered = None;
                    let export = &exports[session.export];
                    shared.registry.establish(&self.status, &export.name);
                    self.requests.open(session, export, shared, cx);
                    self.handshake = None;
                    self.handshake_until_ns = u64::MAX;
                }
            }
        }
        Parsed::Wait
    }

    /// Decrypts into the expected payload, else into the input buffer, where the parser finds the data. Returns
    /// whether there is new data.
    fn decrypt(&mut self, shared: &mut EngineShared) -> bool {
        match self.stream.decrypt(self.requests.missing_payload(), &mut shared.work) {
            Ok(bytes) => {
                self.requests.took_payload(bytes);
                return bytes > 0;
            }
            Err(StreamEnd::Closed) => self.closing = Closing::Drain,
            Err(StreamEnd::Broken) => self.end_after_violation(Reason::Tls(self.stream.tls_failure())),
        }
        false
    }

    fn backs_off(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) -> bool {
        let on = shared.registry.options.switches.receive_backoff.load(Relaxed) && self.handshake.is_none();
        if !on || self.requests.missing_payload().is_some() {
            self.backoff.until_ns = None;
            return false;
        }
        let was_delayed = self.backoff.until_ns.is_some();
        let counters = &mut self.requests.counters;
        let delays = self.backoff.delays(counters.requests, cx.now_ns(), &self.stream.socket);
        if let Some(until_ns) = self.backoff.until_ns {
            counters.receive_backoffs += u64::from(!was_delayed);
            shared.expect_deadline(until_ns);
        } else if was_delayed {
            self.stream.drained = false;
        }
        delays
    }

    /// Sends the gathered replies, and what TLS has to send itself.
    fn send(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) {
        if self.closing == Closing::Drain && self.is_idle() && self.requests.replies.is_empty() {
            self.stream.close_tls();
        }
        if let Some(bytes) = self.stream.prepare_send(&mut self.requests.replies) {
            self.send_until_ns = shared.transfer_until_ns(bytes, cx);
            self.push_send(cx);
        }
    }

    fn push_send(&mut self, cx: &mut SourceContext<'_>) {
        self.requests.counters.sends += u64::from(self.handshake.is_none());
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
        self.requests.outstanding -= self.stream.sending.replies();
        let freed = self.stream.recycle_sent(self.requests.replies.is_empty(), &mut shared.buffers);
        self.requests.free(freed, shared);
    }

    /// Receives more of the stream, or of a payload, whose deadline then begins.
    fn receive(&mut self, shared: &mut EngineShared, cx: &mut SourceContext<'_>) {
        self.requests.counters.receives += u64::from(self.handshake.is_none());
        self.requests.expect_payload(shared, cx);
        self.stream.receive(self.requests.missing_payload(), cx);
    }

    pub fn received(&mut self, result: i32) {
        let unsent = self.stream.sending.replies() + self.requests.replies.replies();
        self.backoff.device_idle = self.handshake.is_none() && self.requests.outstanding == unsent;
        let payload = self.requests.missing_payload().map_or(0, |missing| missing.len());
        match self.stream.received(result, payload) {
            Ok(bytes) => self.requests.took_payload(bytes),
            // The client sends nothing more, but earlier requests are still answered.
            Err(StreamEnd::Closed) => self.closing = self.closing.max(Closing::Drain),
            Err(StreamEnd::Broken) => self.break_off(),
        }
    }
}

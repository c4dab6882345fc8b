//! The server's source on one engine: accepts clients, and passes completions to their connections.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use blkq::{Completion, Cqe, EngineHandle, Error, Source, SourceContext, SourceId};
use io_uring::{opcode, types};

use super::connection::Connection;
use super::contexts::offered_bitmaps;
use super::handshake::Export;
use super::in_flight::InFlight;
use super::proto::{NbdError, TransmissionFlags};
use super::shared::{ACCEPTED, CANCELLED, EngineShared, Message, SENT, token};
use super::status::{ConnectionStatus, Reason, Registry};
use super::stream::{Stream, block_sigpipe};
use super::unaligned::{RangesChanged, Unaligned};
use crate::peer::peer_name;

/// Pause in accepting after accept failed, for example for lack of descriptors.
const ACCEPT_PAUSE_NS: u64 = 100_000_000;
/// Interval of counting the connections in their handshake, while there are too many.
const CROWDED_POLL_NS: u64 = 20_000_000;
/// Limit of a handshake in that case.
const CROWDED_HANDSHAKE_NS: u64 = 1_000_000_000;

/// The server's part on one engine.
pub(super) struct NbdSource {
    shared: EngineShared,
    /// The socket from which the source accepts clients, and the sources on other engines that get some of them.
    listening: Option<(OwnedFd, Vec<(EngineHandle, SourceId)>)>,
    engine: usize,
    connections: Vec<Option<Box<Connection>>>,
    /// Slots of the connections that have something to do, in the order of their turns.
    ready: VecDeque<u32>,
    accept_armed: bool,
    cancel_armed: bool,
    accept_at_ns: u64,
    /// Too many clients were in their handshake when they were last counted.
    crowded: bool,
}

impl NbdSource {
    pub fn new(registry: Arc<Registry>, engine: usize) -> NbdSource {
        NbdSource {
            shared: EngineShared::new(registry),
            listening: None,
            engine,
            connections: Vec::new(),
            ready: VecDeque::new(),
            accept_armed: false,
            cancel_armed: false,
            accept_at_ns: 0,
            crowded: false,
        }
    }

    /// Accepts the next client, unless accepting is paused. If too many clients are in their handshake, new
    /// ones wait in the socket's backlog, so that clients that never finish leave most connections to others.
    fn accept_next(&mut self, cx: &mut SourceContext<'_>) {
        let Some((listener, others)) = &self.listening else { return };
        let crowded = self.shared.registry.is_crowded();
        if !crowded && self.crowded {
            self.accept_at_ns = 0;
        }
        self.crowded = crowded;
        if self.accept_at_ns > 0 && cx.now_ns() < self.accept_at_ns {
            return;
        }
        self.accept_at_ns = 0;
        if crowded {
            self.accept_at_ns = cx.now_ns() + CROWDED_POLL_NS;
            others.iter().for_each(|(handle, id)| handle.send(*id, Box::new(Message::Crowded)));
            return self.shorten_handshakes();
        }
        // Accepts one client only (no multishot), because further clients may have to wait until others have
        // finished their handshake.
        let null = std::ptr::null_mut();
        let entry = opcode::Accept::new(types::Fd(listener.as_raw_fd()), null, null.cast())
            .flags(libc::SOCK_CLOEXEC)
            .build();
        self.accept_armed = true;
        // SAFETY: the source keeps the listening socket open, and the kernel gets no pointer.
        unsafe { cx.push(entry, token(ACCEPTED, 0)) }
    }

    fn shorten_handshakes(&mut self) {
        for connection in self.connections.iter_mut().flatten() {
            connection.shorten_handshake(CROWDED_HANDSHAKE_NS);
            self.shared.expect_deadline(connection.deadline_ns());
        }
    }

    fn accepted(&mut self, cx: &mut SourceContext<'_>, cqe: Cqe) {
        self.accept_armed = false;
        if cqe.result >= 0 {
            // SAFETY: the kernel returned this new descriptor, which nothing else owns.
            let socket = unsafe { OwnedFd::from_raw_fd(cqe.result) };
            let Some(engine) = self.shared.registry.admit(|| peer_name(&socket)) else { return };
            match &self.listening {
                Some((_, others)) if engine > 0 => {
                    let (handle, id) = &others[engine - 1];
                    handle.send(*id, Box::new(Message::Client(socket)));
                }
                _ => self.connect(cx, socket),
            }
        } else if !matches!(-cqe.result, libc::ECONNABORTED | libc::EINTR | libc::EAGAIN) {
            // The process is out of descriptors or memory, or another process that shares the socket has shut
            // it down. An immediate retry would fail as well.
            self.accept_at_ns = cx.now_ns() + ACCEPT_PAUSE_NS;
        }
    }

    fn connect(&mut self, cx: &mut SourceContext<'_>, socket: OwnedFd) {
        let registry = &self.shared.registry;
        let options = &registry.options;
        // After each rejection, the socket closes: a client that connects again must find its place free.
        if self.shared.stopping {
            return registry.reject_admitted(self.engine);
        }
        let slot = self.connections.iter().position(Option::is_none).unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let stream = match Stream::new(slot as u32, socket, options.tls.as_ref()) {
            Ok(stream) => stream,
            Err(socket) => {
                registry.report(Reason::NoMemory, || peer_name(&socket));
                return registry.reject_admitted(self.engine);
            }
        };
        let status = registry.register(peer_name(&stream.socket));
        let unaligned = options.unaligned.is_some();
        let exports = options.exports.iter().map(|export| {
            let limits = cx.limits(export.queue);
            Export {
                name: export.name.clone(),
                description: export.description.clone(),
                size_bytes: if unaligned { limits.size_bytes() } else { limits.whole_bytes() },
                flags: transmission_flags(limits),
                minimum_block_bytes: if unaligned { 1 } else { limits.logical_block_bytes },
                preferred_block_bytes: limits.physical_block_bytes.max(4096),
                bitmaps: offered_bitmaps(cx.disk(export.queue)),
            }
        });
        let exports = exports.collect();
        let connection = Connection::new(slot as u32, stream, status, exports, options, cx.now_ns());
        self.shared.expect_deadline(connection.deadline_ns());
        self.connections[slot] = Some(Box::new(connection));
        self.make_ready(slot as u32);
    }

    fn make_ready(&mut self, slot: u32) {
        if let Some(Some(connection)) = self.connections.get_mut(slot as usize)
            && connection.make_ready()
        {
            self.ready.push_back(slot);
        }
    }

    fn make_all_ready(&mut self) {
        (0..self.connections.len() as u32).for_each(|slot| self.make_ready(slot));
    }

    /// Handles deadlines that have passed.
    fn check_deadlines(&mut self, cx: &mut SourceContext<'_>) {
        // The clock is read only if there is a deadline.
        let deadline_ns = self.shared.deadline_ns;
        let now_ns = if deadline_ns == u64::MAX { 0 } else { cx.now_ns() };
        if now_ns < deadline_ns {
            return;
        }
        self.shared.deadline_ns = u64::MAX;
        for connection in self.connections.iter_mut().flatten() {
            connection.check_deadline(now_ns);
            self.shared.expect_deadline(connection.deadline_ns());
        }
        self.make_all_ready();
    }

    fn order_writes(&mut self, cx: &mut SourceContext<'_>) {
        let EngineShared { unaligned, in_flight, buffers, .. } = &mut self.shared;
        unaligned.order_writes(in_flight, buffers, cx);
        self.continue_ordered(cx);
    }

    /// Submits the bios of ordered writes, and replies to the writes that have completed.
    fn continue_ordered(&mut self, cx: &mut SourceContext<'_>) {
        while let Some((queue, client, bio)) = self.shared.unaligned.bios.pop_front() {
            self.shared.submissions.submit_for(cx, client, queue, bio);
        }
        while let Some((request, result)) = self.shared.unaligned.finished.pop() {
            self.update(request.connection, |connection, shared| {
                connection.requests.complete_ordered(request, result, shared);
            });
        }
    }

    /// Changes the connection in `slot`, if it still exists, and lets it have a turn.
    fn update(&mut self, slot: u32, change: impl FnOnce(&mut Connection, &mut EngineShared)) {
        if let Some(Some(connection)) = self.connections.get_mut(slot as usize) {
            change(connection, &mut self.shared);
            self.make_ready(slot);
        }
    }

    /// The request and the connection to which a bio belongs.
    fn owner_of(&self, user_data: u64) -> Option<(&InFlight, &Connection)> {
        let request = match Unaligned::is_ordered(user_data) {
            true => self.shared.unaligned.request_of(user_data),
            false => self.shared.in_flight.get(user_data),
        }?;
        Some((request, self.connections.get(request.connection as usize)?.as_ref()?))
    }

    /// Gives a connection its turn, and drops it if it is over. If it has more to do, it goes to the end of the ready
    /// list, so that each connection gets its share.
    fn run_connection(&mut self, slot: u32, cx: &mut SourceContext<'_>) {
        let Some(connection) = &mut self.connections[slot as usize] else { return };
        let has_more = connection.turn(&mut self.shared, cx);
        if !connection.is_over() {
            if has_more {
                self.make_ready(slot);
            }
            return;
        }
        connection.release(&mut self.shared);
        if let Some(reason) = connection.take_rejection() {
            self.shared.registry.report(reason, || connection.status.peer.clone());
        }
        self.shared.registry.unregister(&connection.status, self.engine);
        self.connections[slot as usize] = None;
    }
}

// SAFETY: the source counts as stopped only when it has no connection, and a connection is dropped only after
// all operations that it submitted have completed.
unsafe impl Source for NbdSource {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        cx.registrar().require(&[
            ("IORING_OP_ACCEPT", opcode::Accept::CODE),
            ("IORING_OP_RECV", opcode::Recv::CODE),
            ("IORING_OP_RECVMSG", opcode::RecvMsg::CODE),
            ("IORING_OP_WRITE", opcode::Write::CODE),
            ("IORING_OP_WRITEV", opcode::Writev::CODE),
        ])?;
        block_sigpipe();
        if self.shared.registry.options.unaligned.is_some() {
            // From now on, writes of this engine are ordered with those of other engines.
            self.shared.unaligned.join(cx);
        }
        Ok(())
    }

    fn on_cqe(&mut self, cx: &mut SourceContext<'_>, cqe: Cqe) {
        let payload = cqe.token.payload();
        match payload >> 32 {
            ACCEPTED => self.accepted(cx, cqe),
            CANCELLED => self.cancel_armed = false,
            kind => self.update(payload as u32, |connection, shared| match kind {
                SENT => connection.sent(cqe.result, shared, cx),
                _ => connection.received(cqe.result),
            }),
        }
    }

    fn on_bio(&mut self, cx: &mut SourceContext<'_>, completion: Completion) {
        if Unaligned::is_ordered(completion.user_data) {
            self.shared.unaligned.complete(completion, &mut self.shared.buffers);
            return self.continue_ordered(cx);
        }
        let Some(request) = self.shared.in_flight.take(completion.user_data) else { return };
        self.update(request.connection, |connection, shared| {
            connection.requests.complete(request, completion.result, completion.data, shared);
        });
    }

    fn on_message(&mut self, cx: &mut SourceContext<'_>, message: Box<dyn Any + Send>) {
        if message.is::<RangesChanged>() {
            self.shared.unaligned.notified = true;
        }
        let Ok(message) = message.downcast::<Message>() else { return };
        match *message {
            Message::Listen(socket, others) => self.listening = Some((socket, others)),
            Message::Client(socket) => self.connect(cx, socket),
            Message::Crowded => self.shorten_handshakes(),
            Message::Handshake(slot, tls) => {
                self.update(slot, |connection, _| connection.stream.resume_handshake(tls));
            }
            Message::Status(number, contexts) => {
                self.shared.queries.running = false;
                self.shared.start_query(cx);
                let Some(request) = self.shared.in_flight.take(number) else { return };
                self.update(request.connection, |connection, _| {
                    connection.requests.complete_status(request, contexts.ok_or(NbdError::Io));
                });
            }
        }
    }

    fn on_turn(&mut self, cx: &mut SourceContext<'_>) {
        self.shared.work.begin(cx);
        self.check_deadlines(cx);
        if self.shared.submissions.resubmit(cx) {
            self.make_all_ready();
        }
        self.order_writes(cx);
        while !self.ready.is_empty() && !self.shared.work.is_over() {
            for _ in 0..self.ready.len() {
                let Some(slot) = self.ready.pop_front() else { break };
                self.run_connection(slot, cx);
                if self.shared.work.is_over() {
                    break;
                }
            }
            self.order_writes(cx);
            // A connection that waits for memory gets a turn, if memory was released.
            if let Some(slot) = self.shared.budget.next() {
                self.make_ready(slot);
            }
        }
        self.shared.buffers.trim_if_idle(cx);
        if !self.accept_armed && !self.shared.stopping {
            self.accept_next(cx);
        }
    }

    fn deadline_ns(&self) -> Option<u64> {
        // The budget of the last turn was spent, or another thread had the range lock: run again immediately.
        if !self.ready.is_empty() || self.shared.unaligned.contended {
            return Some(0);
        }
        let accept_at_ns = (self.accept_at_ns > 0 && !self.shared.stopping).then_some(self.accept_at_ns);
        let times_ns = [Some(self.shared.deadline_ns), self.shared.buffers.trim_at_ns(), accept_at_ns];
        times_ns.into_iter().flatten().min().filter(|at_ns| *at_ns < u64::MAX)
    }

    fn write_client(&self, user_data: u64, text: &mut dyn fmt::Write) -> fmt::Result {
        let Some((in_flight, connection)) = self.owner_of(user_data) else { return Ok(()) };
        let ConnectionStatus { id, peer, .. } = &*connection.status;
        write!(text, "nbd client {id} ({peer}), cookie {:#x}", in_flight.request.cookie)
    }

    fn is_abandoned(&self, user_data: u64) -> bool {
        self.owner_of(user_data).is_some_and(|(_, connection)| connection.is_closing())
    }

    // `force` makes no difference here: `Registry::close` lets a server stop without force only when
    // it has no clients.
    fn stop(&mut self, cx: &mut SourceContext<'_>, _force: bool) {
        self.shared.stopping = true;
        if self.accept_armed && !self.cancel_armed {
            let accept = cx.token(token(ACCEPTED, 0)).0;
            self.cancel_armed = true;
            // SAFETY: the operation passes neither a pointer nor a descriptor.
            unsafe { cx.push(opcode::AsyncCancel::new(accept).build(), token(CANCELLED, 0)) }
        }
        let until_ns = self.shared.transfer_until_ns(0, cx);
        for connection in self.connections.iter_mut().flatten() {
            connection.stop(until_ns);
        }
        self.make_all_ready();
    }

    fn is_stopped(&self) -> bool {
        self.shared.stopping
            && !self.accept_armed
            && !self.cancel_armed
            && self.connections.iter().all(Option::is_none)
            && self.shared.unaligned.is_idle()
    }
}

impl Drop for NbdSource {
    fn drop(&mut self) {
        // An engine that exits without stopping its sources leaves operations in the kernel. The memory that
        // these use is leaked.
        for mut connection in self.connections.drain(..).flatten() {
            if connection.stream.is_armed() {
                std::mem::forget(connection);
            } else {
                connection.release(&mut self.shared);
            }
        }
    }
}

fn transmission_flags(limits: &blkq::QueueLimits) -> TransmissionFlags {
    // CAN_MULTI_CONN: all connections share one disk, so a flush covers the completed writes of all of them.
    let mut flags = TransmissionFlags::HAS_FLAGS
        | TransmissionFlags::SEND_FLUSH
        | TransmissionFlags::SEND_FUA
        | TransmissionFlags::SEND_CACHE
        | TransmissionFlags::CAN_MULTI_CONN;
    flags.set(TransmissionFlags::ROTATIONAL, limits.rotational);
    flags.set(TransmissionFlags::READ_ONLY, limits.read_only);
    if !limits.read_only {
        flags |= TransmissionFlags::SEND_WRITE_ZEROES | TransmissionFlags::SEND_FAST_ZERO;
        flags.set(TransmissionFlags::SEND_TRIM, limits.max_discard_bytes > 0);
    }
    flags
}

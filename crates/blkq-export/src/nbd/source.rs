//! The server's part on one engine: its connections, and what they share there.

use std::any::Any;
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use blkq::{Bio, Completion, Cqe, EngineHandle, Error, Extent, Source, SourceContext, SourceId, Worker};
use io_uring::{opcode, types};

use crate::buffers::BufferPool;

use super::budget::Budget;
use super::connection::Connection;
use super::handshake::Export;
use super::listener::{peer_name, tune};
use super::pacing::Pacing;
use super::pending::{Pending, PendingTable};
use super::proto::TransmissionFlags;
use super::rejections::Reason;
use super::server::NbdOptions;
use super::status::Registry;
use super::stream::ConnectionBuffers;
use super::tls::Tls;
use super::unaligned::{RangesChanged, Ready, Room, Unaligned};

/// Kinds of submissions, in the token above the slot of the connection.
pub(super) const RECEIVED: u64 = 0;
pub(super) const SENT: u64 = 1;
const ACCEPTED: u64 = 2;
const CANCELLED: u64 = 3;

/// How long accepting rests after it failed.
const ACCEPT_REST_NS: u64 = 100_000_000;
/// Bytes that a client must at least take, or send of a payload, per second.
const RATE_MIN: u64 = 1 << 20;
const NS_PER_SECOND: u64 = 1_000_000_000;
/// How often connections in their handshake are counted while too many are.
const CROWDED_POLL_NS: u64 = 20_000_000;
/// The time that a handshake then may take.
const CROWDED_HANDSHAKE_NS: u64 = 1_000_000_000;
/// How long unused buffers are kept.
const IDLE_NS: u64 = 1_000_000_000;

pub(super) fn token(kind: u64, slot: u32) -> u64 {
    kind << 32 | u64::from(slot)
}

/// Messages of other threads.
pub(super) enum Message {
    /// A client for this engine.
    Client(OwnedFd),
    /// Too many clients are in their handshake.
    Crowded,
    /// TLS of a connection, whose handshake went on.
    Handshake(u32, Box<Tls>),
    /// The extents of a pending request, `None` if they could not be found out.
    Extents(u32, Option<Vec<Extent>>),
}

/// What the connections of one engine share.
pub(super) struct Core {
    pub options: Arc<NbdOptions>,
    pub buffers: BufferPool,
    pub budget: Budget,
    pub pending: PendingTable,
    pub unaligned: Unaligned,
    /// The results of ordering.
    ready: Ready,
    /// Bios for which the queue had no room, with the queue.
    refused: VecDeque<(usize, Bio)>,
    pacing: Pacing,
    /// Bios that wait for room in the pacing, with the queue.
    held: VecDeque<(usize, Bio)>,
    /// Bios that had to wait there, and times that a connection received later, which the
    /// registry does not count yet.
    paced: u64,
    pub receive_backoffs: u64,
    /// The earliest deadline of a connection, or earlier.
    deadline_ns: u64,
    /// Makes the signatures of handshakes.
    handshakes: Worker,
}

impl Core {
    /// Whether the block layer wants nothing more for now.
    pub fn is_full(&self) -> bool {
        !self.refused.is_empty()
    }

    /// When `bytes` must have left or arrived; the deadlines are checked then.
    pub fn transfer_until_ns(&mut self, bytes: u64, cx: &SourceContext<'_>) -> u64 {
        let seconds = self.options.transfer_timeout_s + bytes / RATE_MIN;
        let until_ns = cx.now_ns() + seconds * NS_PER_SECOND;
        self.expect_deadline(until_ns);
        until_ns
    }

    pub fn expect_deadline(&mut self, at_ns: u64) {
        self.deadline_ns = self.deadline_ns.min(at_ns);
    }

    /// Submits `bio`, now or as soon as there is room.
    pub fn submit(&mut self, pending: Pending, queue: usize, mut bio: Bio, cx: &mut SourceContext<'_>) {
        bio.user_data = self.pending.remember(pending).into();
        self.submit_bio(queue, bio, cx);
    }

    /// Submits `bio`, which has its mark, now or as soon as there is room.
    pub fn submit_bio(&mut self, queue: usize, bio: Bio, cx: &mut SourceContext<'_>) {
        if self.held.is_empty() && self.has_room() {
            self.submit_now(queue, bio, cx);
        } else {
            self.paced += 1;
            self.held.push_back((queue, bio));
        }
    }

    /// Whether the block layer may have one more bio.
    fn has_room(&self) -> bool {
        self.pacing.has_room() || !self.options.switches.pacing.load(Relaxed)
    }

    fn submit_now(&mut self, queue: usize, bio: Bio, cx: &mut SourceContext<'_>) {
        self.pacing.submit();
        if let Err(bio) = cx.submit(queue, bio) {
            self.refused.push_back((queue, bio));
        }
    }

    fn order_writes(&mut self, cx: &mut SourceContext<'_>) {
        let mut room = Room { buffers: &mut self.buffers, cx };
        self.unaligned.order_writes(&mut self.pending, &mut room, &mut self.ready);
        self.submit_ready(cx);
    }

    fn complete_ordered(&mut self, completion: Completion, cx: &mut SourceContext<'_>) {
        let mut room = Room { buffers: &mut self.buffers, cx };
        self.unaligned.complete(completion, &mut room, &mut self.ready);
        self.submit_ready(cx);
    }

    fn submit_ready(&mut self, cx: &mut SourceContext<'_>) {
        let mut bios = std::mem::take(&mut self.ready.bios);
        bios.drain(..).for_each(|(queue, bio)| self.submit_bio(queue, bio, cx));
        self.ready.bios = bios;
    }

    /// Submits what waited for others to end, and lets the device begin with it before what
    /// these read is copied to their clients.
    fn release(&mut self, cx: &mut SourceContext<'_>) {
        if !self.pacing.has_news() {
            return;
        }
        self.pacing.look(self.held.len(), cx.now_ns());
        let held = self.held.len();
        while self.has_room()
            && let Some((queue, bio)) = self.held.pop_front()
        {
            self.submit_now(queue, bio, cx);
        }
        if self.held.len() < held {
            cx.dispatch();
        }
    }

    /// Has a worker go on with the handshake of TLS: a signature takes up to some milliseconds, in
    /// which the engine serves others. The engine's worker may be busy with extents for much longer.
    pub fn offload_handshake(&mut self, slot: u32, mut tls: Box<Tls>, cx: &SourceContext<'_>) {
        cx.offload_to(&mut self.handshakes, move || {
            tls.shake_hands();
            Box::new(Message::Handshake(slot, tls))
        });
    }

    /// Finds out the extents of the range of `pending`.
    pub fn query_extents(&mut self, pending: Pending, queue: usize, max: usize, cx: &mut SourceContext<'_>) {
        let range = pending.to.offset..pending.to.offset + pending.length;
        let index = self.pending.remember(pending);
        let disk = cx.disk(queue).clone();
        // A driver that panics there fails the command, as one that returns an error does.
        let extents = AssertUnwindSafe(move || disk.driver().extents(range, max).ok());
        cx.offload(move || Box::new(Message::Extents(index, catch_unwind(extents).unwrap_or(None))));
    }
}

/// Where clients of this engine come from.
pub(super) enum Arrivals {
    /// A socket that listens, and other engines that may take a client over.
    Listener(OwnedFd, Vec<(EngineHandle, SourceId)>),
    /// One client.
    Client(Option<OwnedFd>),
    /// The engine with the socket.
    Elsewhere,
}

/// Connections of every engine, by its number.
pub(super) type Loads = Box<[AtomicUsize]>;

/// The server on one engine.
pub(super) struct NbdSource {
    core: Core,
    registry: Arc<Registry>,
    arrivals: Arrivals,
    loads: Arc<Loads>,
    engine: usize,
    connections: Vec<Option<Box<Connection>>>,
    ready: Vec<u32>,
    accept_armed: bool,
    cancel_armed: bool,
    accept_at_ns: u64,
    /// Too many clients were in their handshake when that was last counted.
    crowded: bool,
    /// Since when nothing is in use.
    idle_since_ns: Option<u64>,
    stopping: bool,
}

impl NbdSource {
    pub fn new(
        options: Arc<NbdOptions>,
        registry: Arc<Registry>,
        loads: Arc<Loads>,
        engine: usize,
        arrivals: Arrivals,
    ) -> NbdSource {
        NbdSource {
            core: Core {
                buffers: BufferPool::new(),
                // Engines share no memory, so that none has to wait for another.
                budget: Budget::new(options.buffered_bytes_total / loads.len()),
                pending: PendingTable::default(),
                unaligned: Unaligned::new(options.unaligned.clone()),
                ready: Ready::default(),
                options,
                refused: VecDeque::new(),
                pacing: Pacing::default(),
                held: VecDeque::new(),
                paced: 0,
                receive_backoffs: 0,
                deadline_ns: u64::MAX,
                handshakes: Worker::new("blkq-worker-tls"),
            },
            registry,
            arrivals,
            loads,
            engine,
            connections: Vec::new(),
            ready: Vec::new(),
            accept_armed: false,
            cancel_armed: false,
            accept_at_ns: 0,
            crowded: false,
            idle_since_ns: None,
            stopping: false,
        }
    }

    fn accept(&mut self, cx: &mut SourceContext<'_>) {
        let Arrivals::Listener(listener, _) = &self.arrivals else { return };
        // One at a time: the next one may have to wait for others' handshakes.
        let null = std::ptr::null_mut();
        let entry = opcode::Accept::new(types::Fd(listener.as_raw_fd()), null, null.cast())
            .flags(libc::SOCK_CLOEXEC)
            .build();
        self.accept_armed = true;
        // SAFETY: the listener stays open as long as the source, and no memory is passed.
        unsafe { cx.push(entry, token(ACCEPTED, 0)) }
    }

    /// Accepts the next client, when it is time. Those who have not finished their handshake leave
    /// most connections to others, who wait in the listener's backlog meanwhile.
    fn accept_next(&mut self, cx: &mut SourceContext<'_>) {
        let Arrivals::Listener(_, others) = &self.arrivals else { return };
        let crowded = self.registry.handshaking() >= self.core.options.handshakes_max();
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
            return self.hurry();
        }
        self.accept(cx);
    }

    /// Has the clients finish their handshake soon.
    fn hurry(&mut self) {
        for connection in self.connections.iter_mut().flatten() {
            connection.hurry(CROWDED_HANDSHAKE_NS);
            self.core.expect_deadline(connection.deadline_ns());
        }
    }

    fn accepted(&mut self, cx: &mut SourceContext<'_>, cqe: Cqe) {
        self.accept_armed = false;
        if cqe.result >= 0 {
            // SAFETY: the kernel made this descriptor for us.
            let socket = unsafe { OwnedFd::from_raw_fd(cqe.result) };
            if self.registry.admit(self.core.options.connections_max, || peer_name(socket.as_fd())) {
                self.place(cx, socket);
            }
        } else if !matches!(-cqe.result, libc::ECONNABORTED | libc::EINTR | libc::EAGAIN) {
            // For want of descriptors or memory, or because the socket was shut down by another
            // process that has it: again at once would only fail again.
            self.accept_at_ns = cx.now_ns() + ACCEPT_REST_NS;
        }
    }

    /// Gives a client to the engine that has the fewest.
    fn place(&mut self, cx: &mut SourceContext<'_>, socket: OwnedFd) {
        let load = |engine: &usize| self.loads[*engine].load(Relaxed);
        let engine = (0..self.loads.len()).min_by_key(load).unwrap_or(0);
        self.loads[engine].fetch_add(1, Relaxed);
        match &self.arrivals {
            Arrivals::Listener(_, others) if engine > 0 => {
                let (handle, id) = &others[engine - 1];
                handle.send(*id, Box::new(Message::Client(socket)));
            }
            _ => self.connect(cx, socket),
        }
    }

    /// Begins with a client that was admitted.
    fn connect(&mut self, cx: &mut SourceContext<'_>, socket: OwnedFd) {
        let buffers =
            if self.stopping { None } else { ConnectionBuffers::new(self.core.options.tls.as_ref()) };
        let Some(buffers) = buffers else {
            self.loads[self.engine].fetch_sub(1, Relaxed);
            if !self.stopping {
                self.registry.rejections.push(Reason::NoMemory, || peer_name(socket.as_fd()));
            }
            return self.registry.turn_away();
        };
        tune(socket.as_fd());
        let status = self.registry.begin(peer_name(socket.as_fd()));
        let unaligned = self.core.options.unaligned.is_some();
        let exports = self.core.options.exports.iter().map(|export| {
            let limits = cx.limits(export.queue);
            Export {
                name: export.name.clone(),
                description: export.description.clone(),
                size_bytes: if unaligned { limits.size_bytes() } else { limits.whole_bytes() },
                flags: transmission_flags(limits),
                block_min_bytes: if unaligned { 1 } else { limits.logical_block_bytes },
                block_preferred_bytes: limits.physical_block_bytes.max(4096),
            }
        });
        let exports: Vec<Export> = exports.collect();
        let since_ns = cx.now_ns();
        let until_ns = since_ns + self.core.options.handshake_timeout_s * 1_000_000_000;
        self.core.expect_deadline(until_ns);
        let slot = match self.connections.iter().position(Option::is_none) {
            Some(slot) => slot,
            None => {
                self.connections.push(None);
                self.connections.len() - 1
            }
        };
        let tls = self.core.options.tls_policy();
        let connection =
            Connection::new(slot as u32, socket, status, exports, tls, since_ns..until_ns, buffers);
        self.connections[slot] = Some(Box::new(connection));
        self.make_ready(slot as u32);
    }

    fn make_ready(&mut self, slot: u32) {
        if let Some(Some(connection)) = self.connections.get_mut(slot as usize)
            && !connection.ready
        {
            connection.ready = true;
            self.ready.push(slot);
        }
    }

    fn make_all_ready(&mut self) {
        (0..self.connections.len() as u32).for_each(|slot| self.make_ready(slot));
    }

    /// Submits what the queues had no room for. The connections that waited for that go on.
    fn retry_refused(&mut self, cx: &mut SourceContext<'_>) {
        if self.core.refused.is_empty() {
            return;
        }
        while let Some((queue, bio)) = self.core.refused.pop_front() {
            if let Err(bio) = cx.submit(queue, bio) {
                self.core.refused.push_front((queue, bio));
                return;
            }
        }
        self.make_all_ready();
    }

    /// Looks at the clock when a deadline may have passed.
    fn check_deadlines(&mut self, cx: &mut SourceContext<'_>) {
        let Some(deadline_ns) = self.deadline_ns() else { return };
        let now_ns = cx.now_ns();
        if now_ns < deadline_ns {
            return;
        }
        if now_ns >= self.core.deadline_ns {
            self.core.deadline_ns = u64::MAX;
            for connection in self.connections.iter_mut().flatten() {
                connection.check_deadline(now_ns);
                self.core.deadline_ns = self.core.deadline_ns.min(connection.deadline_ns());
            }
            self.make_all_ready();
        }
        if self.idle_since_ns.is_some_and(|since_ns| now_ns >= since_ns + IDLE_NS) {
            self.core.buffers.trim(cx.registrar());
            self.idle_since_ns = None;
        }
    }

    fn order_writes(&mut self, cx: &mut SourceContext<'_>) {
        self.core.order_writes(cx);
        self.finish_ordered();
    }

    /// Answers the ordered writes that completed.
    fn finish_ordered(&mut self) {
        while let Some(finished) = self.core.ready.finished.pop() {
            let slot = finished.pending.connection;
            if let Some(Some(connection)) = self.connections.get_mut(slot as usize) {
                connection.complete_ordered(finished, &mut self.core);
                self.make_ready(slot);
            }
        }
    }

    fn drop_connection(&mut self, slot: u32) {
        if let Some(mut connection) = self.connections[slot as usize].take() {
            connection.release(&mut self.core);
            if let Some(reason) = connection.take_rejection() {
                self.registry.rejections.push(reason, || connection.status().who().1.to_owned());
            }
            self.registry.end(connection.status());
            self.loads[self.engine].fetch_sub(1, Relaxed);
        }
    }
}

// SAFETY: it is stopped when it has no connection, and a connection goes after all that it submitted.
unsafe impl Source for NbdSource {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        cx.registrar().require(&[
            ("IORING_OP_ACCEPT", opcode::Accept::CODE),
            ("IORING_OP_RECV", opcode::Recv::CODE),
            ("IORING_OP_RECVMSG", opcode::RecvMsg::CODE),
            ("IORING_OP_SENDMSG", opcode::SendMsg::CODE),
        ])?;
        if self.core.options.tls.is_some() {
            cx.registrar().require(&[("IORING_OP_SEND", opcode::Send::CODE)])?;
        }
        if self.core.options.unaligned.is_some() {
            self.core.unaligned.join(cx);
        }
        if let Arrivals::Client(client) = &mut self.arrivals
            && let Some(socket) = client.take()
            && self.registry.admit(1, || peer_name(socket.as_fd()))
        {
            self.place(cx, socket);
        }
        Ok(())
    }

    fn on_cqe(&mut self, cx: &mut SourceContext<'_>, cqe: Cqe) {
        let payload = cqe.token.payload();
        let slot = payload as u32;
        match payload >> 32 {
            ACCEPTED => return self.accepted(cx, cqe),
            CANCELLED => {
                self.cancel_armed = false;
                return;
            }
            kind => {
                let Some(Some(connection)) = self.connections.get_mut(slot as usize) else { return };
                match kind {
                    SENT => connection.sent(cqe.result, &mut self.core, cx),
                    _ => connection.received(cqe.result),
                }
            }
        }
        self.make_ready(slot);
    }

    fn on_bio(&mut self, cx: &mut SourceContext<'_>, completion: Completion) {
        self.core.pacing.end();
        if Unaligned::is_marked(completion.user_data) {
            self.core.complete_ordered(completion, cx);
            return self.finish_ordered();
        }
        let pending = self.core.pending.recall(completion.user_data as u32);
        if let Some(Some(connection)) = self.connections.get_mut(pending.connection as usize) {
            connection.complete(pending, completion, &mut self.core);
            self.make_ready(pending.connection);
        }
    }

    fn on_message(&mut self, cx: &mut SourceContext<'_>, message: Box<dyn Any + Send>) {
        let message = match message.downcast::<Message>() {
            Ok(message) => message,
            Err(other) => {
                if other.is::<RangesChanged>() {
                    self.core.unaligned.notify();
                }
                return;
            }
        };
        match *message {
            Message::Client(socket) => self.connect(cx, socket),
            Message::Crowded => self.hurry(),
            Message::Handshake(slot, tls) => {
                if let Some(Some(connection)) = self.connections.get_mut(slot as usize) {
                    connection.resume_handshake(tls);
                    self.make_ready(slot);
                }
            }
            Message::Extents(index, extents) => {
                let pending = self.core.pending.recall(index);
                if let Some(Some(connection)) = self.connections.get_mut(pending.connection as usize) {
                    connection.complete_extents(pending, extents);
                    self.make_ready(pending.connection);
                }
            }
        }
    }

    fn on_turn(&mut self, cx: &mut SourceContext<'_>) {
        self.check_deadlines(cx);
        self.retry_refused(cx);
        self.core.release(cx);
        self.order_writes(cx);
        while !self.ready.is_empty() {
            let mut ready = std::mem::take(&mut self.ready);
            for slot in ready.drain(..) {
                let Some(connection) = &mut self.connections[slot as usize] else { continue };
                connection.ready = false;
                connection.turn(&mut self.core, cx);
                if connection.is_over() {
                    self.drop_connection(slot);
                }
            }
            self.ready = ready;
            self.order_writes(cx);
            // Who waited for memory may have its turn now.
            if let Some(slot) = self.core.budget.next() {
                self.make_ready(slot);
            }
        }
        self.core.pacing.turn(|| cx.now_ns());
        self.registry.count_waits(&mut self.core.paced, &mut self.core.receive_backoffs);
        match (self.core.buffers.is_idle(), self.idle_since_ns) {
            (true, None) => self.idle_since_ns = Some(cx.now_ns()),
            (false, Some(_)) => self.idle_since_ns = None,
            _ => {}
        }
        if !self.accept_armed && !self.stopping {
            self.accept_next(cx);
        }
    }

    fn deadline_ns(&self) -> Option<u64> {
        if self.core.unaligned.is_contended() {
            return Some(0);
        }
        let mut deadline_ns = self.core.deadline_ns;
        if let Some(since_ns) = self.idle_since_ns {
            deadline_ns = deadline_ns.min(since_ns + IDLE_NS);
        }
        if self.accept_at_ns > 0 && !self.stopping {
            deadline_ns = deadline_ns.min(self.accept_at_ns);
        }
        (deadline_ns < u64::MAX).then_some(deadline_ns)
    }

    fn client_of(&self, mark: u64) -> Option<String> {
        let pending = match Unaligned::is_marked(mark) {
            true => self.core.unaligned.connection_of(mark)?,
            false => self.core.pending.get(mark as u32)?,
        };
        let connection = self.connections.get(pending.connection as usize)?.as_ref()?;
        let (id, peer) = connection.status().who();
        Some(format!("nbd client {id} ({peer}), cookie {:#x}", pending.to.cookie))
    }

    fn stop(&mut self, cx: &mut SourceContext<'_>, force: bool) {
        self.stopping = true;
        if self.accept_armed && !self.cancel_armed {
            let accept = cx.token(token(ACCEPTED, 0)).0;
            self.cancel_armed = true;
            // SAFETY: no memory and no descriptor is passed.
            unsafe { cx.push(opcode::AsyncCancel::new(accept).build(), token(CANCELLED, 0)) }
        }
        for connection in self.connections.iter_mut().flatten() {
            connection.stop(force);
        }
        self.make_all_ready();
    }

    fn is_stopped(&self) -> bool {
        self.stopping
            && !self.accept_armed
            && !self.cancel_armed
            && self.connections.iter().all(Option::is_none)
            && self.core.unaligned.is_idle()
    }
}

impl Drop for NbdSource {
    fn drop(&mut self) {
        // An engine that ends without stopping its sources leaves operations to the kernel:
        // their memory is left to it too.
        for mut connection in self.connections.drain(..).flatten() {
            if connection.is_armed() {
                let _ = ManuallyDrop::new(connection);
            } else {
                connection.release(&mut self.core);
            }
        }
    }
}

/// What a disk with these limits offers.
fn transmission_flags(limits: &blkq::QueueLimits) -> TransmissionFlags {
    // All connections share one disk: a flush covers the completed writes of all of them.
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

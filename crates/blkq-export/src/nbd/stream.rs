//! The byte stream of one connection: its socket, TLS, and what is received and sent in one
//! operation of the ring each. It knows nothing of requests.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use blkq::SourceContext;
use io_uring::{opcode, types};
use rustix::net::{Shutdown, shutdown};

use crate::buffers::{BufferPool, try_zeroed};

use super::handshake::INPUT_BYTES;
use super::outgoing::Outgoing;
use super::shared::{RECEIVED, SENT, token};
use super::tls::{Tls, TlsEnd, TlsOptions};

/// Size of the buffer that requests are received into: thirty writes of 4 KiB, and any
/// option of the handshake.
const INPUT_BUFFER_BYTES: usize = 128 << 10;
const _: () = assert!(INPUT_BUFFER_BYTES >= INPUT_BYTES);
/// `IORING_RECVSEND_POLL_FIRST` of the kernel's io_uring.h.
const IORING_RECVSEND_POLL_FIRST: u16 = 1 << 0;

/// The memory that a connection needs whatever its client does.
pub(super) struct ConnectionBuffers {
    input: Box<[u8]>,
    /// For the client that asks for it.
    tls: Option<Box<Tls>>,
}

impl ConnectionBuffers {
    /// `None` if there is not enough memory.
    pub fn new(tls: Option<&TlsOptions>) -> Option<ConnectionBuffers> {
        let input = try_zeroed(INPUT_BUFFER_BYTES)?;
        let tls = match tls {
            Some(tls) => Some(Box::new(Tls::new(&tls.certificates)?)),
            None => None,
        };
        Some(ConnectionBuffers { input, tls })
    }
}

/// The outcome of a completed receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Received {
    /// So many bytes of the payload, and maybe more after it.
    Payload(usize),
    /// Nothing: receive again.
    Nothing,
    /// The peer sends no more.
    Closed,
    /// The socket failed.
    Failed,
}

/// The byte stream of one connection.
pub(super) struct Stream {
    slot: u32,
    socket: OwnedFd,
    input: Box<[u8]>,
    /// The part of `input` that was received and not parsed.
    start: usize,
    end: usize,
    gathering: Outgoing,
    sending: Outgoing,
    tls: Option<Box<Tls>>,
    /// Until TLS starts.
    tls_offered: Option<Box<Tls>>,
    /// Replies gathered before TLS started have not left yet: they are sent in clear.
    clear: bool,
    /// A worker continues the handshake of TLS, and has its records.
    handshake_offloaded: bool,
    receive_armed: bool,
    /// The last receive emptied the socket.
    drained: bool,
    send_armed: bool,
    receive_iovecs: [libc::iovec; 2],
    receive_message: libc::msghdr,
}

impl Stream {
    pub fn new(slot: u32, socket: OwnedFd, buffers: ConnectionBuffers) -> Stream {
        Stream {
            slot,
            socket,
            input: buffers.input,
            start: 0,
            end: 0,
            gathering: Outgoing::new(),
            sending: Outgoing::new(),
            tls: None,
            tls_offered: buffers.tls,
            clear: false,
            handshake_offloaded: false,
            receive_armed: false,
            drained: false,
            send_armed: false,
            receive_iovecs: [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2],
            // SAFETY: a msghdr of zeroes is an empty message.
            receive_message: unsafe { std::mem::zeroed() },
        }
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Received bytes that are not consumed, in clear.
    pub fn input(&self) -> &[u8] {
        &self.input[self.start..self.end]
    }

    /// The same, and the gathered replies.
    pub fn input_and_replies(&mut self) -> (&[u8], &mut Outgoing) {
        (&self.input[self.start..self.end], &mut self.gathering)
    }

    /// `bytes` of the input were used.
    pub fn consume(&mut self, bytes: usize) {
        self.start += bytes;
    }

    /// Replies gathered for the next send.
    pub fn replies(&mut self) -> &mut Outgoing {
        &mut self.gathering
    }

    /// Replies gathered or being sent.
    pub fn unsent_replies(&self) -> usize {
        self.sending.replies() + self.gathering.replies()
    }

    /// Whether nothing is left to be sent, once no send is in flight.
    pub fn is_flushed(&self) -> bool {
        self.gathering.is_empty() && !self.tls.as_ref().is_some_and(|tls| tls.wants_send())
    }

    pub fn is_receiving(&self) -> bool {
        self.receive_armed
    }

    pub fn is_sending(&self) -> bool {
        self.send_armed
    }

    /// Whether the kernel uses memory of this connection.
    pub fn is_armed(&self) -> bool {
        self.receive_armed || self.send_armed
    }

    /// Nothing may be received until the client knows that TLS starts, and while what was received
    /// of its handshake waits for a send.
    pub fn must_send_first(&self) -> bool {
        self.clear || self.tls.as_ref().is_some_and(|tls| tls.wants_handshake())
    }

    /// The next receive tries the socket at once instead of polling it first.
    pub fn expect_input(&mut self) {
        self.drained = false;
    }

    /// Completes what is in flight. The peer may have closed already, which is no error here.
    pub fn shutdown(&self, how: Shutdown) {
        let _ = shutdown(&self.socket, how);
    }

    /// From here on all is encrypted, except the replies gathered before. False if that cannot
    /// be: a client that sends on before the answer did not ask for TLS.
    pub fn start_tls(&mut self) -> bool {
        let Some(tls) = self.tls_offered.take_if(|_| self.start == self.end) else { return false };
        self.tls = Some(tls);
        self.clear = true;
        true
    }

    /// TLS can no longer start.
    pub fn forget_tls(&mut self) {
        self.tls_offered = None;
    }

    /// Sends close_notify, if TLS is in use.
    pub fn close_tls(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.close();
        }
    }

    /// Decrypts what was received, into `payload` if there is one, else to the input. Returns
    /// the number of bytes, 0 if more must be received first.
    pub fn decrypt(&mut self, payload: Option<&mut [u8]>) -> Result<usize, TlsEnd> {
        let Some(tls) = &mut self.tls else { return Ok(0) };
        if self.receive_armed || self.clear || tls.wants_handshake() {
            return Ok(0);
        }
        if let Some(payload) = payload {
            return tls.read(payload);
        }
        // Less than a request, or an option, is left of it: there is room.
        self.input.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let bytes = tls.read(&mut self.input[self.end..])?;
        self.end += bytes;
        Ok(bytes)
    }

    /// The steps of decryption since the last call.
    pub fn take_decrypt_steps(&mut self) -> usize {
        self.tls.as_mut().map_or(0, |tls| tls.take_steps())
    }

    /// Gives out TLS for a worker to continue its handshake, if that is due. Nothing may be sent or
    /// received until it is back.
    pub fn offload_handshake(&mut self) -> Option<Box<Tls>> {
        let idle = !self.is_armed() && !self.clear;
        let tls = self.tls.take_if(|tls| idle && tls.wants_handshake())?;
        self.handshake_offloaded = true;
        Some(tls)
    }

    /// TLS is back.
    pub fn resume_handshake(&mut self, tls: Box<Tls>) {
        self.handshake_offloaded = false;
        self.tls = Some(tls);
    }

    /// Whether a worker continues the handshake of TLS.
    pub fn is_handshake_offloaded(&self) -> bool {
        self.handshake_offloaded
    }

    /// How TLS failed, in words.
    pub fn tls_failure(&self) -> String {
        self.tls.as_ref().map(|tls| tls.failure()).unwrap_or_default()
    }

    /// Prepares a send of all that was gathered, and of what TLS sends by itself. Returns its
    /// length in bytes, `None` if there is nothing to send. [`Stream::push_send`] comes next.
    pub fn prepare_send(&mut self) -> Option<u64> {
        if self.gathering.is_empty() {
            return self.tls.as_ref().is_some_and(|tls| tls.wants_send()).then_some(0);
        }
        std::mem::swap(&mut self.gathering, &mut self.sending);
        Some(self.sending.prepare() as u64)
    }

    /// Sends what was prepared and has not left. False if it cannot be encrypted.
    ///
    /// WRITE and WRITEV send to the peer of the connection only. SEND and SENDMSG take an address: with MSG_FASTOPEN a
    /// thread that was taken over could connect a socket to any host, which the restrictions of the ring do not see.
    /// Neither has flags: a short write is submitted again for the rest ([`Stream::sent`]), and engines that serve
    /// clients block SIGPIPE ([`block_sigpipe`]).
    #[must_use]
    pub fn push_send(&mut self, cx: &mut SourceContext<'_>) -> bool {
        let fd = types::Fd(self.socket.as_raw_fd());
        let entry = match self.tls.as_mut().filter(|_| !self.clear) {
            None => {
                let iovecs = self.sending.unsent();
                opcode::Writev::new(fd, iovecs.as_ptr(), iovecs.len() as u32).build()
            }
            Some(tls) => {
                if tls.unsent().is_empty() && tls.encrypt(&mut self.sending).is_err() {
                    return false;
                }
                let piece = tls.unsent();
                opcode::Write::new(fd, piece.as_ptr(), piece.len() as u32).build()
            }
        };
        self.send_armed = true;
        // SAFETY: the connection is boxed and stays until the send has completed, and nothing
        // touches `sending`, or what TLS has to send, while `send_armed` is set.
        unsafe { cx.push(entry, token(SENT, self.slot)) }
        true
    }

    /// A send completed with a count of bytes, or a negative errno. Returns whether all that was
    /// prepared has left; `Err` if the socket failed.
    pub fn sent(&mut self, result: i32) -> Result<bool, ()> {
        self.send_armed = false;
        if result < 0 && !matches!(-result, libc::EINTR | libc::EAGAIN) {
            return Err(());
        }
        let bytes = result.max(0) as usize;
        Ok(match self.tls.as_mut().filter(|_| !self.clear) {
            None => self.sending.advance(bytes),
            Some(tls) => {
                tls.sent(bytes);
                tls.unsent().is_empty() && self.sending.next(1).is_empty()
            }
        })
    }

    /// The send is over: its buffers go back to `pool`. Returns the number of replies in it, and
    /// the bytes that are free with it.
    pub fn recycle_sent(&mut self, pool: &mut BufferPool) -> (usize, usize) {
        self.clear &= !self.gathering.is_empty();
        let replies = self.sending.replies();
        (replies, self.sending.recycle(pool))
    }

    /// Drops the gathered replies. Returns the bytes that are free with it.
    pub fn drop_replies(&mut self, pool: &mut BufferPool) -> usize {
        self.gathering.recycle(pool)
    }

    /// Receives more of the stream, and before it the rest of a payload right where it belongs.
    pub fn receive(&mut self, payload: Option<&mut [u8]>, cx: &mut SourceContext<'_>) {
        self.input.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let fd = types::Fd(self.socket.as_raw_fd());
        // Trying a socket that was just emptied would be in vain.
        let ioprio = if self.drained { IORING_RECVSEND_POLL_FIRST } else { 0 };
        let (room, payload) = match &mut self.tls {
            // Decryption puts it into the payload.
            Some(tls) => (tls.room(), None),
            None => (&mut self.input[self.end..], payload),
        };
        let entry = match payload {
            None => opcode::Recv::new(fd, room.as_mut_ptr(), room.len() as u32).ioprio(ioprio).build(),
            Some(payload) => {
                self.receive_iovecs = [iovec(payload), iovec(room)];
                self.receive_message.msg_iov = self.receive_iovecs.as_mut_ptr();
                self.receive_message.msg_iovlen = 2;
                opcode::RecvMsg::new(fd, &raw mut self.receive_message).ioprio(ioprio).build()
            }
        };
        self.receive_armed = true;
        // SAFETY: the connection is boxed and stays until the receive has completed, and nothing
        // touches input, payload or TLS's records while `receive_armed` is set.
        unsafe { cx.push(entry, token(RECEIVED, self.slot)) }
    }

    /// A receive completed with a count of bytes, or a negative errno, when `payload` bytes of
    /// a payload were outstanding.
    pub fn received(&mut self, result: i32, payload: usize) -> Received {
        self.receive_armed = false;
        match -result {
            libc::EINTR | libc::EAGAIN => return Received::Nothing,
            0 => return Received::Closed,
            1.. => return Received::Failed,
            _ => {}
        }
        let bytes = result as usize;
        if let Some(tls) = &mut self.tls {
            self.drained = tls.received(bytes);
            return Received::Nothing;
        }
        let room = payload + self.input.len() - self.end;
        self.drained = bytes < room;
        let of_payload = bytes.min(payload);
        self.end += bytes - of_payload;
        Received::Payload(of_payload)
    }

    /// Returns the buffers to `pool`, before the connection is dropped.
    pub fn release(&mut self, pool: &mut BufferPool) {
        self.gathering.recycle(pool);
        self.sending.recycle(pool);
    }
}

/// Blocks SIGPIPE on this thread: a write to a socket whose peer has closed raises it, and would end a process that does
/// not ignore it. Threads that the kernel writes on have all signals blocked.
pub(super) fn block_sigpipe() {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is initialized by the first call; the last one reads it and changes this thread's mask.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}

fn iovec(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

//! The byte stream of one connection: the socket, TLS, and at most one receive and one send on the ring.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use blkq::SourceContext;
use io_uring::{opcode, types};
use rustix::net::{Shutdown, shutdown, sockopt};

use crate::buffers::{BufferPool, try_zeroed};
use crate::peer::is_unix;
use crate::submissions::TurnWork;

use super::handshake::INPUT_BYTES;
use super::reply::Outgoing;
use super::shared::{RECEIVED, SENT, token};
use super::tls::{StreamEnd, Tls, TlsOptions};

/// Size of the input buffer in bytes: room for thirty writes of 4 KiB, or for any option of the handshake.
const INPUT_BUFFER_BYTES: usize = 128 << 10;
const _: () = assert!(INPUT_BUFFER_BYTES >= INPUT_BYTES);
/// Send buffer of a unix socket, in bytes: the replies of one deep queue of small reads. A process without
/// CAP_NET_ADMIN is limited by net.core.wmem_max.
const SEND_BUFFER_BYTES: usize = 1 << 20;

/// Cost of a decryption step, in items of the turn's budget: a client may send records with almost no data.
const DECRYPT_ITEMS: usize = 4;

/// TCP keepalive: after 30 s of silence the kernel probes the client every 10 s, and breaks the connection
/// when three probes had no answer. So a dead client is detected after a minute.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

/// `IORING_RECVSEND_POLL_FIRST` of io_uring.h: poll the socket before the first attempt to receive.
const IORING_RECVSEND_POLL_FIRST: u16 = 1 << 0;

/// The stream must not move while an operation is in flight.
pub(super) struct Stream {
    slot: u32,
    pub socket: OwnedFd,
    input: Box<[u8]>,
    /// `input[start..end]` was received and not parsed.
    start: usize,
    end: usize,
    pub sending: Outgoing,
    tls: Option<Box<Tls>>,
    /// The TLS state until TLS is in use.
    pub tls_offered: Option<Box<Tls>>,
    /// The client has started TLS. It is in use once the replies gathered so far were sent in plaintext.
    starts_tls: bool,
    /// A worker has the TLS state, and continues the handshake.
    pub handshake_offloaded: bool,
    pub receive_armed: bool,
    /// The last receive emptied the socket, so the next one polls the socket before its first attempt.
    pub drained: bool,
    pub send_armed: bool,
    receive_iovecs: [libc::iovec; 2],
    receive_message: libc::msghdr,
}

impl Stream {
    /// Returns the socket if there is no memory.
    pub fn new(slot: u32, socket: OwnedFd, tls: Option<&TlsOptions>) -> Result<Stream, OwnedFd> {
        let Some(input) = try_zeroed(INPUT_BUFFER_BYTES) else { return Err(socket) };
        let tls_offered = match tls.map(|tls| Tls::new(&tls.certificates)) {
            Some(None) => return Err(socket),
            offered => offered.flatten().map(Box::new),
        };
        tune(&socket);
        Ok(Stream {
            slot,
            socket,
            input,
            start: 0,
            end: 0,
            sending: Outgoing::default(),
            tls: None,
            tls_offered,
            starts_tls: false,
            handshake_offloaded: false,
            receive_armed: false,
            drained: false,
            send_armed: false,
            receive_iovecs: [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2],
            // SAFETY: a msghdr of zeroes is an empty message.
            receive_message: unsafe { std::mem::zeroed() },
        })
    }

    pub fn input(&self) -> &[u8] {
        &self.input[self.start..self.end]
    }

    pub fn consume(&mut self, bytes: usize) {
        self.start += bytes;
    }

    /// Whether TLS itself has something to send. Valid only while no send is in flight.
    pub fn wants_tls_send(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_send())
    }

    /// Whether the kernel is using memory of this connection.
    pub fn is_armed(&self) -> bool {
        self.receive_armed || self.send_armed
    }

    /// Whether nothing may be received at present: until the reply to STARTTLS was sent in plaintext, and
    /// while received handshake records wait for a send to complete.
    pub fn must_send_first(&self) -> bool {
        self.starts_tls || self.tls.as_ref().is_some_and(|tls| tls.wants_handshake())
    }

    /// Completes receives in flight. An error is ignored: the peer may have closed the connection.
    pub fn shutdown(&self, how: Shutdown) {
        let _ = shutdown(&self.socket, how);
    }

    /// Encrypts all but the replies gathered so far. Returns false, and TLS must not start, if the client
    /// sent data after STARTTLS without waiting for the reply: a man in the middle may have sent that data.
    pub fn start_tls(&mut self) -> bool {
        self.starts_tls = self.tls_offered.is_some() && self.start == self.end;
        self.starts_tls
    }

    /// Queues close_notify, if TLS is in use.
    pub fn close_tls(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.close();
        }
    }

    /// Decrypts into `payload`, else into the input buffer. Returns 0 bytes if more must be received first.
    pub fn decrypt(&mut self, payload: Option<&mut [u8]>, work: &mut TurnWork) -> Result<usize, StreamEnd> {
        let Some(tls) = &mut self.tls else { return Ok(0) };
        if self.receive_armed || tls.wants_handshake() {
            return Ok(0);
        }
        let decrypted = match payload {
            Some(payload) => tls.read(payload),
            None => {
                // At most an incomplete request or option is left in the input, so there is room after it.
                self.input.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
                tls.read(&mut self.input[self.end..]).inspect(|bytes| self.end += bytes)
            }
        };
        work.spend(DECRYPT_ITEMS * tls.take_steps());
        decrypted
    }

    /// Returns the TLS state if a worker must continue the handshake. Nothing may be sent or received until
    /// [`Stream::resume_handshake`] is called.
    pub fn offload_handshake(&mut self) -> Option<Box<Tls>> {
        let idle = !self.is_armed();
        let tls = self.tls.take_if(|tls| idle && tls.wants_handshake())?;
        self.handshake_offloaded = true;
        Some(tls)
    }

    pub fn resume_handshake(&mut self, tls: Box<Tls>) {
        self.handshake_offloaded = false;
        self.tls = Some(tls);
    }

    pub fn tls_failure(&self) -> String {
        self.tls.as_ref().map(|tls| tls.failure()).unwrap_or_default()
    }

    /// Prepares to send the gathered `replies`, or what TLS itself has to send. Returns the length of the
    /// replies in bytes, `None` if there is nothing to send. After `Some`, the caller calls
    /// [`Stream::push_send`].
    pub fn prepare_send(&mut self, replies: &mut Outgoing) -> Option<u64> {
        if replies.is_empty() {
            return self.wants_tls_send().then_some(0);
        }
        std::mem::swap(replies, &mut self.sending);
        Some(self.sending.prepare() as u64)
    }

    /// Submits a write of what was prepared and not sent. Returns false if it cannot be encrypted.
    ///
    /// The operations are WRITE and WRITEV, which can only send to the connected peer. SEND and SENDMSG take
    /// an address: with MSG_FASTOPEN, an attacker who controls this thread could connect a socket to any
    /// host, which the restrictions of the ring cannot prevent. WRITE and WRITEV have no flags such as
    /// MSG_WAITALL and MSG_NOSIGNAL. So after a short write the rest is submitted again ([`Stream::sent`]),
    /// and the thread blocks SIGPIPE ([`block_sigpipe`]).
    #[must_use]
    pub fn push_send(&mut self, cx: &mut SourceContext<'_>) -> bool {
        let fd = types::Fd(self.socket.as_raw_fd());
        let entry = match &mut self.tls {
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
        // SAFETY: the boxed connection exists until the send has completed. Nothing changes `sending`, or the
        // encrypted bytes of TLS, while `send_armed` is set.
        unsafe { cx.push(entry, token(SENT, self.slot)) }
        true
    }

    /// `result` is bytes or a negative errno. Returns whether all was sent, `Err` if the socket failed.
    pub fn sent(&mut self, result: i32) -> Result<bool, ()> {
        self.send_armed = false;
        if result < 0 && !matches!(-result, libc::EINTR | libc::EAGAIN) {
            return Err(());
        }
        let bytes = result.max(0) as usize;
        Ok(match &mut self.tls {
            None => self.sending.advance(bytes),
            Some(tls) => {
                tls.sent(bytes);
                tls.unsent().is_empty() && self.sending.next(1).is_empty()
            }
        })
    }

    /// Ends a send. `is_last`: no replies were gathered meanwhile. Returns the number of buffer bytes that are now
    /// free.
    pub fn recycle_sent(&mut self, is_last: bool, pool: &mut BufferPool) -> usize {
        if self.starts_tls && is_last {
            (self.starts_tls, self.tls) = (false, self.tls_offered.take());
        }
        self.sending.recycle(pool)
    }

    /// Receives the rest of a payload directly into its buffer, and what follows into the input buffer.
    pub fn receive(&mut self, payload: Option<&mut [u8]>, cx: &mut SourceContext<'_>) {
        self.input.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let fd = types::Fd(self.socket.as_raw_fd());
        // The last receive emptied the socket, so an immediate attempt would most likely fail.
        let ioprio = if self.drained { IORING_RECVSEND_POLL_FIRST } else { 0 };
        let (room, payload) = match &mut self.tls {
            // With TLS, records are received here, and decryption writes the payload.
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
        // SAFETY: the boxed connection exists until the receive has completed. Nothing touches the input, the
        // payload or the records of TLS while `receive_armed` is set.
        unsafe { cx.push(entry, token(RECEIVED, self.slot)) }
    }

    /// `result` is bytes or a negative errno. `payload` is the number of payload bytes that were expected. Returns how
    /// many of them were received. Input may follow them, and with TLS there may be records to decrypt.
    pub fn received(&mut self, result: i32, payload: usize) -> Result<usize, StreamEnd> {
        self.receive_armed = false;
        match -result {
            libc::EINTR | libc::EAGAIN => return Ok(0),
            0 => return Err(StreamEnd::Closed),
            1.. => return Err(StreamEnd::Broken),
            _ => {}
        }
        let bytes = result as usize;
        if let Some(tls) = &mut self.tls {
            self.drained = tls.received(bytes);
            return Ok(0);
        }
        let room = payload + self.input.len() - self.end;
        self.drained = bytes < room;
        let of_payload = bytes.min(payload);
        self.end += bytes - of_payload;
        Ok(of_payload)
    }
}

/// Blocks SIGPIPE, which a write to a closed socket raises and which would end a process that does not ignore
/// it. The kernel threads that perform operations of the ring have all signals blocked.
pub(super) fn block_sigpipe() {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the first call initializes the set, and the last call changes only this thread's signal mask.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}

fn iovec(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

/// Sets the options of a client's socket. Errors are ignored, because the options only affect speed and the
/// detection of dead clients.
fn tune(socket: &OwnedFd) {
    if is_unix(socket) {
        if sockopt::set_socket_send_buffer_size_force(socket, SEND_BUFFER_BYTES).is_err() {
            let _ = sockopt::set_socket_send_buffer_size(socket, SEND_BUFFER_BYTES);
        }
    } else {
        let _ = sockopt::set_tcp_nodelay(socket, true);
        let _ = sockopt::set_socket_keepalive(socket, true);
        let _ = sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE);
        let _ = sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL);
        let _ = sockopt::set_tcp_keepcnt(socket, KEEPALIVE_PROBES);
    }
}

//! The socket of a front end: receives whole messages and sends replies, without blocking. The descriptors of
//! a message are those that arrive with any of its bytes; a receive never reads beyond the end of a message.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use blkq::Error;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, recvmsg, sendmsg, shutdown,
};

use super::message::{FILES_MAX, HEADER_BYTES, Header, Reply, refuse};
use super::untrusted_fd::UntrustedFd;

/// Time that a front end may take to send the rest of a message, or to read a reply.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// `SCM_MAX_FD`, the most descriptors that the kernel passes in one message. A receive has room for all:
/// otherwise the kernel would close the rest on the receiving thread, which may block it forever.
const PASSED_MAX: usize = 253;

#[derive(Debug)]
pub enum Closed {
    /// The front end closed it.
    ByPeer,
    /// The front end violated the protocol.
    Violation(Error),
    /// An operation on the socket failed.
    Socket(Errno),
}

#[derive(Debug)]
pub struct Incoming {
    pub header: Header,
    pub payload: Vec<u8>,
    pub files: Vec<UntrustedFd>,
}

pub struct Channel {
    socket: UntrustedFd,
    /// Received bytes of the next message.
    bytes: Vec<u8>,
    files: Vec<UntrustedFd>,
    /// The rest of a reply that is not sent yet. While it waits, no request is received.
    waiting: Option<Reply>,
    /// The time since which the channel waits for the rest of a message, or for a reply to be read.
    since: Option<Instant>,
}

impl Channel {
    pub fn new(socket: UntrustedFd) -> Channel {
        Channel { socket, bytes: Vec::new(), files: Vec::new(), waiting: None, since: None }
    }

    pub fn deadline(&self) -> Option<Instant> {
        self.since.map(|since| since + MESSAGE_TIMEOUT)
    }

    /// Checks that [`Channel::deadline`] has not passed. The caller must first have received and sent all
    /// that the socket allows. The error names what the front end failed to do.
    pub fn check_deadline(&self, now: Instant) -> Result<(), Closed> {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return Ok(());
        }
        let what = if self.waiting.is_none() { "sent the rest of a message" } else { "read a reply" };
        let seconds = MESSAGE_TIMEOUT.as_secs();
        Err(Closed::Violation(refuse(format!("the front end has not {what} for {seconds} s"))))
    }

    /// Whether the front end must read a reply before its next request is received.
    pub fn has_reply(&self) -> bool {
        self.waiting.is_some()
    }

    /// Receives the next message; `None` if it is incomplete. The error is why the connection must be closed.
    pub fn receive(&mut self) -> Result<Option<Incoming>, Closed> {
        loop {
            let header = self.bytes.first_chunk().copied().map(Header::parse).transpose();
            let header = header.map_err(Closed::Violation)?;
            let wanted = HEADER_BYTES + header.map_or(0, |header| header.size as usize);
            if let Some(header) = header.filter(|_| self.bytes.len() == wanted) {
                self.since = None;
                let payload = self.bytes.split_off(HEADER_BYTES);
                self.bytes.clear();
                return Ok(Some(Incoming { header, payload, files: std::mem::take(&mut self.files) }));
            }
            match self.receive_some(wanted) {
                Ok(()) | Err(Closed::Socket(Errno::INTR)) => {}
                Err(Closed::Socket(Errno::AGAIN)) => {
                    if !self.bytes.is_empty() {
                        self.since.get_or_insert_with(Instant::now);
                    }
                    return Ok(None);
                }
                Err(closed) => return Err(closed),
            }
        }
    }

    fn receive_some(&mut self, wanted: usize) -> Result<(), Closed> {
        let before = self.bytes.len();
        self.bytes.resize(wanted, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PASSED_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut self.bytes[before..])];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&self.socket, &mut into, &mut control, flags);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files.extend(files.map(UntrustedFd::new));
            }
        }
        self.bytes.truncate(before + received.as_ref().map_or(0, |received| received.bytes));
        let received = received.map_err(|errno| match errno {
            Errno::CONNRESET => Closed::ByPeer,
            errno => Closed::Socket(errno),
        })?;
        if received.flags.contains(ReturnFlags::CTRUNC) || self.files.len() > FILES_MAX {
            let why = format!("a message has more than {FILES_MAX} descriptors");
            return Err(Closed::Violation(refuse(why)));
        }
        match received.bytes {
            0 if self.bytes.is_empty() => Err(Closed::ByPeer),
            0 => Err(Closed::Violation(refuse("the connection was closed in the middle of a message"))),
            _ => Ok(()),
        }
    }

    /// Queues `reply`, and flushes. No other reply may wait. The error is why the connection must be closed.
    pub fn send(&mut self, reply: Reply) -> Result<(), Closed> {
        self.waiting = Some(reply);
        self.flush()
    }

    /// Sends the queued reply, as far as the socket takes it. The error is why the connection must be closed.
    pub fn flush(&mut self) -> Result<(), Closed> {
        while let Some(reply) = &mut self.waiting {
            match send_some(self.socket.as_fd(), &reply.bytes, reply.file.as_ref().map(AsFd::as_fd)) {
                Ok(sent) => {
                    reply.bytes.drain(..sent);
                    reply.file = None;
                }
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {
                    self.since.get_or_insert_with(Instant::now);
                    return Ok(());
                }
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Closed::ByPeer),
                Err(errno) => return Err(Closed::Socket(errno)),
            }
            if reply.bytes.is_empty() {
                (self.waiting, self.since) = (None, None);
            }
        }
        Ok(())
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // The front end sees the end of the connection now, although another thread closes the socket later.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

pub(super) fn send_some(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    file: Option<BorrowedFd<'_>>,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = file.as_slice();
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(files));
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::super::message::code;
    use super::*;

    fn pair() -> (UnixStream, Channel) {
        let (front, back) = UnixStream::pair().unwrap();
        (front, Channel::new(UntrustedFd::new(back.into())))
    }

    fn header(code: u32, flags: u32, size: u32) -> Vec<u8> {
        [code, flags, size].iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn send_with_files(front: &UnixStream, bytes: &[u8], count: usize) {
        let file = std::fs::File::open("/dev/null").unwrap();
        let files = vec![file.as_fd(); count];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        let sent = sendmsg(front, &[IoSlice::new(bytes)], &mut control, SendFlags::empty());
        assert_eq!(sent, Ok(bytes.len()));
    }

    #[test]
    fn a_message_may_arrive_byte_by_byte() {
        let (mut front, mut back) = pair();
        let bytes = [header(code::SET_FEATURES, 1, 8), 7u64.to_ne_bytes().to_vec()].concat();
        for byte in &bytes {
            assert!(back.receive().unwrap().is_none());
            front.write_all(&[*byte]).unwrap();
        }
        let message = back.receive().unwrap().unwrap();
        assert_eq!((message.header.code, message.payload), (code::SET_FEATURES, 7u64.to_ne_bytes().to_vec()));
        assert!(back.receive().unwrap().is_none());
        drop(front);
        assert!(matches!(back.receive(), Err(Closed::ByPeer)));
    }

    #[test]
    fn descriptors_stay_with_their_message() {
        let (mut front, mut back) = pair();
        front.write_all(&header(code::SET_OWNER, 1, 0)).unwrap();
        send_with_files(&front, &header(code::SET_VRING_CALL, 1, 8), 1);
        send_with_files(&front, &[0; 8], 1);
        send_with_files(&front, &header(code::GET_FEATURES, 1, 0), 3);
        let counts: Vec<(u32, usize)> =
            std::iter::from_fn(|| back.receive().unwrap().map(|it| (it.header.code, it.files.len())))
                .collect();
        assert_eq!(counts, [(code::SET_OWNER, 0), (code::SET_VRING_CALL, 2), (code::GET_FEATURES, 3)]);
        send_with_files(&front, &header(code::SET_MEM_TABLE, 1, 8), FILES_MAX + 1);
        assert!(matches!(back.receive(), Err(Closed::Violation(_))));
    }

    #[test]
    fn headers_of_other_versions_and_replies_are_violations() {
        for (flags, size) in [(0, 0), (2, 0), (1 | 4, 0), (1 | 16, 0), (1, 4097), (1, u32::MAX)] {
            let (mut front, mut back) = pair();
            front.write_all(&header(code::GET_FEATURES, flags, size)).unwrap();
            assert!(matches!(back.receive(), Err(Closed::Violation(_))), "{flags} {size}");
        }
        let (mut front, mut back) = pair();
        front.write_all(&header(code::GET_FEATURES, 1, 0)[..5]).unwrap();
        drop(front);
        assert!(matches!(back.receive(), Err(Closed::Violation(_))), "half a message");
    }

    #[test]
    fn replies_wait_for_a_front_end_that_does_not_read() {
        let (mut front, mut back) = pair();
        let mut count = 0;
        while !back.has_reply() {
            back.send(Reply::number(code::GET_FEATURES, count)).unwrap();
            count += 1;
            assert!(count < 1_000_000);
        }
        let mut bytes = vec![0; 20];
        for number in 0..count {
            front.read_exact(&mut bytes).unwrap();
            assert_eq!(bytes[12..], number.to_ne_bytes());
            back.flush().unwrap();
        }
        assert!(!back.has_reply());
        drop(front);
        assert!(matches!(back.send(Reply::number(code::GET_FEATURES, 0)), Err(Closed::ByPeer)));
    }
}

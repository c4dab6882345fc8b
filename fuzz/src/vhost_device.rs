//! A vhost-user-blk device with its threads, an arbitrary front end, and a guest that writes and kicks meanwhile. The
//! device must not panic, hang or leak descriptors, and must serve the next front end.
//!
//! Input: how far the front end has negotiated, then steps in the format of `arbitrary`.
// Contract: bounded-input

#[path = "../../crates/blkq-export/tests/vhost/mod.rs"]
mod vhost;

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use crate::vhost::{Input, Link, check_descriptors, run};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost::{Served, ram, serve};

const REPLY_WAIT: Duration = Duration::from_secs(15);
/// Time within which the device must notice that a front end has closed the connection.
const GONE_WAIT: Duration = Duration::from_secs(10);

static SERVED: LazyLock<Served> = LazyLock::new(|| serve(ram(), 2));

struct Connection(UnixStream);

impl Link for Connection {
    fn send(&mut self, bytes: &[u8], files: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(files.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(files)));
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = sendmsg(&self.0, &[IoSlice::new(bytes)], &mut ancillary, flags);
    }

    fn reply(&mut self) -> Vec<u8> {
        let mut reply = vec![0; 12];
        self.0.read_exact(&mut reply).expect("a reply");
        let bytes = u32::from_le_bytes(reply[8..].try_into().expect("four"));
        reply.resize(12 + bytes as usize, 0);
        self.0.read_exact(&mut reply[12..]).expect("the rest of a reply");
        reply
    }

    fn skip_replies(&mut self) {
        self.0.set_nonblocking(true).expect("a flag");
        let _ = self.0.read(&mut [0; 4096]);
        self.0.set_nonblocking(false).expect("a flag");
    }

    fn socket(&mut self) -> OwnedFd {
        self.0.try_clone().expect("one more descriptor").into()
    }
}

/// Checks one input.
pub fn check(data: &[u8]) {
    let Some(input) = Input::parse(data) else { return };
    let stream = UnixStream::connect(&SERVED.path).expect("it listens");
    stream.set_read_timeout(Some(REPLY_WAIT)).expect("a time");
    let mut connection = Connection(stream);
    run(&input, &mut connection);
    // Closing is not enough, because the device may have received a descriptor of this end.
    let _ = connection.0.shutdown(Shutdown::Both);
    drop(connection);
    let begin = Instant::now();
    while SERVED.device.connection_count() != 0 {
        assert!(begin.elapsed() < GONE_WAIT, "the front end has closed, and is still connected");
        std::thread::yield_now();
    }
    check_descriptors();
}

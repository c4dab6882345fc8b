//! The connection to a daemon that traces its device, and the rings that it writes.

use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use blkq::trace::{TraceEvent, TraceMemory, TraceReader};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::control::{LINE_BYTES_MAX, Reply, Request, ask};
use crate::failure::{Failure, Outcome};
use crate::state::StateDir;

use super::item::{Item, What};

/// How long a daemon may take to begin.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A trace, which its daemon stops when this is dropped.
pub struct TraceConnection {
    stream: UnixStream,
    readers: Vec<TraceReader>,
    events: Vec<TraceEvent>,
}

impl TraceConnection {
    /// Has the daemon of `name` trace its device, with room for so many events of each queue.
    ///
    /// # Errors
    /// If there is no such device, it is traced already, or its daemon does not know how.
    pub fn open(dir: &StateDir, name: &str, events: u64) -> Outcome<TraceConnection> {
        // A daemon that died is reported as every command does.
        ask::<()>(dir, name, &Request::Ping {})?;
        let failed = |e: io::Error| Failure::new(format!("{name}: its daemon does not answer: {e}"));
        let mut stream = dir.connect(name, TIMEOUT).map_err(failed)?;
        let mut line = serde_json::to_vec(&Request::Trace { events })
            .map_err(|e| Failure::new(format!("the request: {e}")))?;
        line.push(b'\n');
        let timed = stream.set_read_timeout(Some(TIMEOUT)).and_then(|()| stream.write_all(&line));
        timed.map_err(failed)?;
        let (reply, memory) = receive(&mut stream).map_err(failed)?;
        match serde_json::from_slice(&reply) {
            Ok(Reply::Ok(())) => {}
            Ok(Reply::Error(message)) => return Err(Failure::new(message)),
            Err(e) => return Err(Failure::new(format!("{name}: its daemon's reply: {e}"))),
        }
        let memory = memory.ok_or_else(|| Failure::new(format!("{name}: its daemon sent no memory")))?;
        let memory = TraceMemory::open(memory)?;
        let readers =
            (0..memory.queue_count()).filter_map(|queue| TraceReader::new(&memory, queue)).collect();
        Ok(TraceConnection { stream, readers, events: Vec::new() })
    }

    /// How many hardware queues the device has.
    pub fn queue_count(&self) -> usize {
        self.readers.len()
    }

    /// Appends what came since the last time: of each queue in its order, one after the other.
    pub fn read(&mut self, items: &mut Vec<Item>) {
        for (queue, reader) in self.readers.iter_mut().enumerate() {
            let lost = reader.read(&mut self.events);
            let first_ns = self.events.first().map_or(u64::MAX, |event| event.time_ns);
            if lost > 0 {
                items.push(Item { queue, time_ns: first_ns, what: What::Lost(lost) });
            }
            let item = |event: TraceEvent| Item { queue, time_ns: event.time_ns, what: What::Event(event) };
            items.extend(self.events.drain(..).map(item));
        }
    }
}

/// Readable when the daemon has closed the connection.
impl AsFd for TraceConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Receives the reply, with the descriptor that comes with its first bytes.
fn receive(stream: &mut UnixStream) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut line = vec![0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(&*stream, &mut [IoSliceMut::new(&mut line)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    line.truncate(received.bytes);
    let mut memory = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            memory = files.last();
        }
    }
    let mut piece = [0; 4096];
    while line.last() != Some(&b'\n') && line.len() < LINE_BYTES_MAX {
        match stream.read(&mut piece)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            length => line.extend_from_slice(&piece[..length]),
        }
    }
    Ok((line, memory))
}

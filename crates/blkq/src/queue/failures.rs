//! Failed requests: a queue records the first one since the last report, and counts the others. The queue's
//! owner records a failure without allocating memory. A watcher fetches the record together with a scan for
//! hangs ([`HangScan::failures`](super::hang::HangScan)), and decides how often it reports failures.

use std::fmt::{self, Write};

use crate::bio::Operation;
use crate::error::Status;
use crate::request::Request;
use crate::sector::Sector;

/// The client of a bio that no source submitted.
pub(super) const THREAD: &str = "a thread of this process";
/// Maximum length of a recorded client name; a longer name is truncated.
const CLIENT_BYTES: usize = 128;

/// A request that failed, with its error.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct FailedIo {
    /// The operation of the request.
    pub operation: Operation,
    /// First sector of the request.
    pub sector: Sector,
    /// Length of the request in sectors of 512 bytes.
    pub sectors: u64,
    /// The error of the request.
    pub status: Status,
    /// The client that submitted the request's first bio, if it is known.
    pub client: Option<String>,
}

impl fmt::Display for FailedIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FailedIo { operation, sector, sectors, status, client } = self;
        f.write_str(operation.name())?;
        if *operation != Operation::Flush {
            let plural = if *sectors == 1 { "" } else { "s" };
            write!(f, " at sector {}, {sectors} sector{plural}", sector.0)?;
        }
        write!(f, ": {status}")?;
        client.iter().try_for_each(|client| write!(f, "; client: {client}"))
    }
}

/// Requests that failed since the last report.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Failures {
    /// The first request that failed.
    pub first: Option<FailedIo>,
    /// Number of requests that failed after the first one.
    pub more: u64,
}

impl Failures {
    /// Adds requests that failed later or in another queue.
    pub fn add(&mut self, later: Failures) {
        self.more += later.more;
        match later.first {
            Some(_) if self.first.is_some() => self.more += 1,
            Some(first) => self.first = Some(first),
            None => {}
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct ClientName {
    bytes: [u8; CLIENT_BYTES],
    length: usize,
}

impl ClientName {
    const EMPTY: ClientName = ClientName { bytes: [0; CLIENT_BYTES], length: 0 };

    fn text(&self) -> Option<String> {
        (self.length > 0).then(|| String::from_utf8_lossy(&self.bytes[..self.length]).into_owned())
    }
}

impl Write for ClientName {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = CLIENT_BYTES - self.length;
        let fitting = &text.as_bytes()[..text.floor_char_boundary(room)];
        self.bytes[self.length..][..fitting.len()].copy_from_slice(fitting);
        self.length += fitting.len();
        Ok(())
    }
}

#[derive(Debug, Default)]
pub(super) struct FailureNotes {
    /// The first failure, without its client, and the client.
    first: Option<(FailedIo, ClientName)>,
    more: u64,
    /// The `user_data` of the first request, until the source has written its client.
    unnamed: Option<u64>,
}

impl FailureNotes {
    /// Records that `request` failed. `submitter` is the `user_data` of its first bio if the queue's owner
    /// submitted it, otherwise the name of the submitter. Does not allocate.
    pub fn note(&mut self, request: &Request, status: Status, submitter: Result<u64, &str>) {
        if self.first.is_some() {
            self.more += 1;
            return;
        }
        let &Request { operation, sector, sectors, .. } = request;
        let mut client = ClientName::EMPTY;
        match submitter {
            Ok(user_data) => self.unnamed = Some(user_data),
            Err(name) => _ = client.write_str(name),
        }
        self.first = Some((FailedIo { operation, sector, sectors, status, client: None }, client));
    }

    /// Calls `name` to write the client of the first request, unless its client is known.
    pub fn name(&mut self, name: impl FnOnce(u64, &mut dyn Write)) {
        if let Some(user_data) = self.unnamed.take()
            && let Some((_, client)) = &mut self.first
        {
            name(user_data, client);
        }
    }

    pub fn take(&mut self) -> Failures {
        let FailureNotes { first, more, .. } = std::mem::take(self);
        let first = first.map(|(failed, client)| FailedIo { client: client.text(), ..failed });
        Failures { first, more }
    }
}

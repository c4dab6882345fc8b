//! Runs the server's source on a simulated engine, with clients that arrive as messages.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use super::options::NbdOptions;
use super::shared::Message;
use super::source::{Loads, NbdSource};
use super::status::Registry;

/// Creates the source of a server that listens on no socket.
pub fn source(options: NbdOptions) -> Box<dyn blkq::Source> {
    let loads: Loads = Arc::new([AtomicUsize::new(0)]);
    let registry = Arc::new(Registry::new(None, None));
    Box::new(NbdSource::new(Arc::new(options), registry, loads, 0, None))
}

/// Creates the message that brings the source a client.
pub fn client(socket: OwnedFd) -> Box<dyn Any + Send> {
    Box::new(Message::Client(socket))
}

//! Runs the server's source on a simulated engine, with clients that arrive as messages.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::options::NbdOptions;
use super::shared::Message;
use super::source::NbdSource;
use super::status::Registry;

/// Creates the source of a server that listens on no socket.
pub fn source(options: NbdOptions) -> Box<dyn blkq::Source> {
    Box::new(NbdSource::new(Arc::new(Registry::new(options, 1)), 0))
}

/// Creates the message that brings the source a client.
pub fn client(socket: OwnedFd) -> Box<dyn Any + Send> {
    Box::new(Message::Client(socket))
}

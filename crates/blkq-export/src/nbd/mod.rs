//! NBD: fixed newstyle, with structured and extended replies.
//!
//! [`proto`], [`handshake`], [`transmission`] and [`reply`] are the protocol alone, over bytes
//! in memory: no socket, no clock, no block layer. [`NbdServer`] puts it on sockets and engines.

mod budget;
mod certificates;
mod connection;
pub mod handshake;
mod listener;
mod outgoing;
mod pacing;
mod payload;
mod pending;
pub mod proto;
mod ranges;
mod receive_backoff;
mod rejections;
pub mod reply;
mod server;
mod source;
mod status;
mod stream;
mod tls;
pub mod transmission;
mod unaligned;

/// What a fuzzer reaches of TLS.
#[cfg(fuzzing)]
pub mod fuzzing {
    pub use super::outgoing::Outgoing;
    pub use super::tls::{Tls, TlsEnd};
}

pub use certificates::TlsCertificates;
pub use listener::{Listen, Listener, SocketAccess};
pub use ranges::RangeLock;
pub use rejections::{Reason, Rejection};
#[cfg(simulation)]
pub use server::simulated;
pub use server::{NbdExport, NbdOptions, NbdServer, NbdSwitches};
pub use status::{ConnectionInfo, NbdCounters, Paused};
pub use tls::TlsOptions;

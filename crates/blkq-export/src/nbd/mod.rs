//! An NBD server: the fixed newstyle handshake, and simple, structured and extended replies.
//!
//! The modules [`proto`], [`handshake`], [`transmission`] and [`reply`] contain the protocol alone, as
//! functions on bytes in memory. [`NbdServer`] connects them to sockets and engines.

mod budget;
mod certificates;
mod connection;
pub mod contexts;
pub mod handshake;
#[cfg(simulation)]
pub mod harness;
mod in_flight;
mod options;
pub mod proto;
mod ranges;
mod receive_backoff;
pub mod reply;
mod requests;
mod server;
mod shared;
mod source;
mod split;
mod status;
mod stream;
mod tls;
pub mod transmission;
mod unaligned;
mod x509;

/// The parts of TLS that the fuzz targets call.
#[cfg(fuzz_interface)]
#[doc(hidden)]
pub mod fuzzing {
    pub use super::certificates::authorities;
    pub use super::reply::Outgoing;
    pub use super::tls::{StreamEnd, Tls};
    pub use super::x509::CertificateUse;
}

pub use certificates::{PreparedCertificates, TlsCertificates};
#[cfg(simulation)]
pub use harness as simulated;
pub use options::{NbdExport, NbdOptions, NbdSwitches};
pub use ranges::RangeLock;
pub use server::{NbdServer, StoppingServer};
pub use status::{ConnectionInfo, NbdCounters, Paused, Reason, Rejection};
pub use tls::TlsOptions;

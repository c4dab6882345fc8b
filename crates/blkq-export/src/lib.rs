//! Exports: they serve a blkq disk to clients outside of the process.
//!
//! An export is a [`Source`](blkq::Source) on an [`EngineThread`](blkq::EngineThread): it parses the requests
//! of its clients, submits them as bios, and sends a reply when a bio completes. An export does not depend on
//! drivers, and the block layer does not depend on exports. There are three: [`nbd`], [`ublk`] and
//! [`vhost_user`].
//!
//! ```
//! use blkq::drivers::ram::Ram;
//! use blkq::{Disk, EngineThread};
//! use blkq_export::Listen;
//! use blkq_export::nbd::{NbdExport, NbdOptions, NbdServer};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let disk = Disk::builder(Box::new(Ram::new(64 << 20, 512, false)?)).build()?;
//! let engine = EngineThread::spawn("queue-0", vec![(disk, 0)])?;
//!
//! let export = NbdExport { name: "scratch".into(), description: "in memory".into(), queue: 0 };
//! let options = NbdOptions { exports: vec![export], ..NbdOptions::default() };
//! let listen = Listen::Tcp("127.0.0.1".into(), 0);
//! let server = NbdServer::start(listen, options, &[engine.handle().clone()])?;
//! assert!(server.uri().starts_with("nbd://127.0.0.1:"));
//! server.stop(false)?;
//! # Ok(())
//! # }
//! ```

mod buffers;
pub mod client_kind;
mod counters;
mod listener;
pub mod mapping;
pub mod nbd;
pub mod peer;
mod reports;
pub mod retry;
mod submissions;
mod sync;
pub mod ublk;
pub mod vhost_user;

pub use counters::{COUNTER_ROWS, Counted};
pub use listener::{Listen, Listener, SocketAccess};

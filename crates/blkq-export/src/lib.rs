//! Attachments: what serves a blkq disk to others.
//!
//! An attachment is a [`Source`](blkq::Source) on an [`EngineThread`](blkq::EngineThread): it
//! parses what clients sent, submits bios, and sends replies for what has completed. It knows nothing of
//! drivers, and the block layer nothing of it. There are two: [`nbd`] and [`ublk`].
//!
//! ```
//! use blkq::drivers::ram::Ram;
//! use blkq::{Disk, EngineThread};
//! use blkq_export::nbd::{Listen, NbdExport, NbdOptions, NbdServer};
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
pub mod mapping;
pub mod nbd;
pub mod peer;
mod slots;
mod sync;
pub mod ublk;
pub mod vhost_user;
mod work;

//! The drivers of blkq that need an image or wrap another driver. [`open`] opens a driver by its name.
//!
//! - `loop`: a raw image in a file or on a block device, through io_uring, with direct I/O or buffered.
//! - [`qcow2`]: an image in QEMU's qcow2 format, with its backing files.
//! - [`rbd`]: an image in a Ceph cluster.
//! - [`model`] and [`fault`], for tests: a device with configured delays, and a device that injects faults into another.
//!
//! The block layer, and the drivers [`null`](blkq::drivers::null) and [`ram`](blkq::drivers::ram), are in crate
//! [`blkq`].
//!
//! ```no_run
//! use blkq::{Disk, Driver};
//! use blkq_drivers::r#loop::{DriverOptions, LoopDevice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = LoopDevice::open(&DriverOptions::new("disk.img"))?;
//! device.warnings().iter().for_each(|warning| eprintln!("{warning}"));
//! let mut queue = Disk::builder(Box::new(device)).build()?.open_queue(0)?;
//! # Ok(())
//! # }
//! ```

mod bitmaps;
mod errors;
mod extents;
pub mod fault;
mod image_file;
pub mod r#loop;
pub mod model;
mod options;
pub mod qcow2;
pub mod rbd;
mod spec;

pub use options::{DriverOptions, ImageFormat, LOGICAL_BLOCK_SIZES};
pub use spec::{
    DriverSpec, Image, Opened, check, check_writable, detect_format, no_backing_file, no_overlay, open,
};

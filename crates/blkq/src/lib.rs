//! blkq: a multi-queue block layer in user space.
//!
//! A caller describes an I/O as a [`Bio`]: operation, flags, position, length, memory. A driver gets it as a
//! [`Request`]: one slot of a tag set, with one or more merged bios. In between are the parts of the Linux
//! block layer under their usual names: the plug, which collects a batch; the tags, which bound the number of
//! requests in flight; merging and splitting according to [`QueueLimits`]; the flush machine; a scheduler
//! ([`sched`]); freeze and quiesce; and [`stats`].
//!
//! A [`Disk`] is a [`Driver`] with hardware queues. Each queue is owned by one thread, which drives it
//! without a lock. This crate contains the drivers [`ram`](drivers::ram) and [`null`](drivers::null); copy the
//! last one to start a driver of your own. The drivers of image files, of images in a Ceph cluster, and of
//! tests are in the crate `blkq-drivers`.
//!
//! # Three ways to submit
//!
//! | submitter | through | if the disk is full | completions arrive as |
//! |---|---|---|---|
//! | the thread that owns the queue | [`LocalQueue`] | the bio is returned | [`LocalQueue::completions`] |
//! | any other thread | [`Submitter`] | the call waits at the [`gate`] | return value, or callback on the owner's thread |
//! | a server on an engine's thread | [`Source`] | the bio is returned | [`Source::on_bio`] |
//!
//! An [`EngineThread`] owns one io_uring and any number of queues and sources, and enters the kernel once per
//! turn. The NBD server of the crate `blkq-export` is a source.
//!
//! # Example
//!
//! Threads that write through an engine:
//!
//! ```
//! use blkq::drivers::ram::Ram;
//! use blkq::{Disk, EngineThread, StatGroup};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let disk = Disk::builder(Box::new(Ram::new(64 << 20, 4096, false)?)).depth(32).build()?;
//! // This thread owns queue 0. Dropped, it waits for its I/O in flight.
//! let engine = EngineThread::spawn("queue-0", vec![(disk.clone(), 0)])?;
//!
//! std::thread::scope(|scope| {
//!     for number in 0..4_u8 {
//!         let mut submitter = disk.submitter();
//!         scope.spawn(move || submitter.write_at(&[number; 8192], u64::from(number) * 8192));
//!     }
//! });
//!
//! let mut submitter = disk.submitter();
//! submitter.flush()?;
//! let mut memory = [0; 4096];
//! submitter.read_at(&mut memory, 3 * 8192)?;
//! assert_eq!(memory, [3; 4096]);
//!
//! let writes = &disk.stats()[StatGroup::Write];
//! assert_eq!(writes.ios + writes.merges, 4);
//! drop(engine);
//! # Ok(())
//! # }
//! ```
//!
//! The example of [`LocalQueue`] does the same without a second thread.
//!
//! # Guarantees
//!
//! A bio that was accepted completes exactly once, completely or with an error. A bio that was rejected is
//! returned and does not complete. All guarantees, each with its tests, are in docs/internals/contracts.md;
//! docs/durability.md says which data survives which failure.

mod bio;
pub mod bitmap;
mod budget;
mod buffer;
pub mod clock;
mod completer;
pub mod disk;
mod driver;
pub mod drivers;
pub mod engine;
mod enumeration;
mod error;
mod kick;
pub mod layout;
mod limits;
pub mod output;
mod periodic;
mod queue;
pub mod random;
mod remote;
mod request;
pub mod ring;
pub mod sched;
mod sector;
#[cfg(any(simulation, fuzz_interface))]
#[doc(hidden)]
pub mod simulation;
mod slab;
mod split;
pub mod stats;
mod submitter;
pub mod sync;
mod tags;
pub mod testing;
pub mod text;
pub mod throttle;
pub mod trace;
pub mod units;
pub mod words;
mod wrapped;

pub use queue::failures::{FailedIo, Failures};
pub use queue::hang;
pub use remote::gate;

pub use bio::{Bio, BioFlags, Completion, Operation};
pub use budget::{TURN_BUDGET, TurnBudget};
pub use buffer::{BUFFER_ALIGN, Data, IoBuffer, KernelPages, RegisteredMemory, Segment, SegmentOwner};
pub use buffer::{has_huge_pages, set_huge_pages};
pub use clock::ClockMode;
pub use completer::Callback;
pub use disk::{Disk, DiskBuilder, ErrorPolicy, Frozen, Quiesced, Resume, Setting, Settings};
pub use driver::{
    Busy, Change, DepthExtent, Driver, DriverContext, DriverQueue, DriverSetting, EXTENTS_QUERY_NS, Extent,
    OpenContext, Taken,
};
pub use engine::local::LocalQueue;
pub use engine::{EngineHandle, EngineThread, Source, SourceContext, SourceId, StoppingSource, Worker};
pub use error::{Error, ErrorKind, IoResult, Status};
pub use kick::Wake;
pub use limits::QueueLimits;
pub use periodic::{PeriodicThread, Wakeup};
pub use request::Request;
pub use ring::{Cqe, FileSlot, Registrar, Token};
pub use sched::SchedulerKind;
pub use sector::{SECTOR_BYTES, SECTOR_SHIFT, Sector};
pub use stats::{Counter, StatGroup, StatsSnapshot};
pub use submitter::Submitter;
pub use tags::Tag;
pub use wrapped::WrappedQueue;

/// The io_uring crate, whose entries [`DriverContext::push`] and [`SourceContext::push`] take.
pub use io_uring;

/// Compiles and runs the driver of the guide.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/driver.md")]
struct DriverGuide;

/// Compiles the examples of the page, which show code that must not compile.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/internals/memory-safety.md")]
struct MemorySafety;

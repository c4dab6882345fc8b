//! blkq: the multi-queue block layer in user space.

pub mod bio;
pub mod buffer;
pub mod clock;
mod completion;
mod control;
pub mod disk;
mod dispatch;
pub mod driver;
pub mod drivers;
// The checkers' twin of a kick has no descriptor to wait for.
#[cfg(not(any(loom, shuttle)))]
pub mod engine;
pub mod error;
mod flush;
pub mod gate;
mod kick;
pub mod limits;
mod local;
mod merge;
mod parts;
mod pending;
pub mod plug;
mod queue;
pub mod request;
pub mod ring;
pub mod sched;
pub mod sector;
mod software;
mod split;
pub mod stats;
mod submitter;
mod sync;
pub mod tags;

pub use bio::{Bio, BioFlags, Completion, Operation};
pub use buffer::{Data, IoBuffer, Segment, SegmentOwner};
pub use clock::ClockMode;
pub use completion::Callback;
pub use disk::{Disk, DiskBuilder, Settings};
pub use driver::{Busy, Driver, DriverContext, DriverQueue, Extent, Taken};
#[cfg(not(any(loom, shuttle)))]
pub use engine::{EngineHandle, EngineThread, Source, SourceContext};
pub use error::{Error, ErrorKind, IoResult, Status};
pub use limits::QueueLimits;
pub use local::LocalQueue;
pub use request::{Request, Tag};
pub use ring::{Cqe, FileSlot, Ring, Token};
pub use sched::SchedulerKind;
pub use sector::Sector;
pub use stats::{Counter, StatGroup, StatsSnapshot};
pub use submitter::Submitter;

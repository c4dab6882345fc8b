//! blkq: the multi-queue block layer in user space.

pub mod bio;
pub mod buffer;
pub mod clock;
mod completion;
pub mod driver;
pub mod drivers;
pub mod error;
pub mod limits;
pub mod request;
pub mod ring;
pub mod sched;
pub mod sector;
mod split;
pub mod stats;
mod sync;

pub use bio::{Bio, BioFlags, Completion, Operation};
pub use buffer::{Data, IoBuffer, Segment, SegmentOwner};
pub use driver::{Busy, Driver, DriverContext, DriverQueue, Extent, Taken};
pub use error::{Error, ErrorKind, IoResult, Status};
pub use limits::QueueLimits;
pub use request::{Request, Tag};
pub use ring::{Cqe, FileSlot, Ring, Token};
pub use sched::SchedulerKind;
pub use sector::Sector;
pub use stats::{Counter, StatGroup, StatsSnapshot};

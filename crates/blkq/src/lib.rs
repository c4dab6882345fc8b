//! blkq: the multi-queue block layer in user space.

pub mod bio;
pub mod buffer;
pub mod clock;
mod completion;
pub mod control;
pub mod driver;
pub mod error;
pub mod gate;
pub mod kick;
pub mod limits;
pub mod pending;
pub mod request;
pub mod ring;
pub mod sector;
mod sync;
pub mod tags;

pub use bio::{Bio, BioFlags, Completion, Operation};
pub use buffer::{Data, IoBuffer, Segment, SegmentOwner};
pub use driver::{Busy, Driver, DriverContext, DriverQueue, Extent, Taken};
pub use error::{Error, ErrorKind, IoResult, Status};
pub use limits::QueueLimits;
pub use request::{Request, Tag};
pub use ring::{Cqe, FileSlot, Ring, Token};
pub use sector::Sector;

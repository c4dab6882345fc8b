//! The parts of a device that its queue uses too.

use super::outcome::Losses;
use super::spec::RbdSpec;
use super::thread::ImageThread;

/// Most segments of a request: a merged one is one vectored call.
pub const SEGMENTS_MAX: u16 = 128;

/// The parts that the queue uses too.
pub struct Shared {
    /// The image's name.
    pub spec: RbdSpec,
    /// The open image.
    pub image: ImageThread,
    /// Why it is lost, if it is.
    pub losses: Losses,
}

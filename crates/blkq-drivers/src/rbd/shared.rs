use super::outcome::Losses;
use super::spec::RbdSpec;
use super::thread::ImageThread;

/// Largest number of segments of a request: each request is one vectored call of librbd.
pub const SEGMENTS_MAX: u16 = 128;

pub struct Shared {
    pub spec: RbdSpec,
    pub image: ImageThread,
    pub losses: Losses,
}

//! How the device of the tests behaves, and the settings that it has.

use blkq::DriverSetting;

/// When the device ends requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finish {
    /// Before it returns from taking them.
    AtOnce,
    /// Some of them, in any order, whenever it is polled.
    Random,
    /// Only by [`Device::release`].
    Held,
}

/// How the device behaves.
#[derive(Clone, Debug)]
pub struct Behaviour {
    pub finish: Finish,
    pub seed: u64,
    /// One of so many requests is refused; 0: none.
    pub busy_every: u64,
    /// After so many write zeroes and discards the device finds out that it cannot do them.
    pub revoke_after: Option<u32>,
    /// The first write with FUA that completes is not durable: the device finds out that it has no FUA.
    pub revoke_fua: bool,
}

impl Default for Behaviour {
    fn default() -> Behaviour {
        Behaviour { finish: Finish::AtOnce, seed: 1, busy_every: 0, revoke_after: None, revoke_fua: false }
    }
}

/// A setting of the device.
#[derive(Clone, Copy, Debug)]
pub enum DeviceSetting {
    /// Panics.
    Panic,
    /// [`QueueLimits::memory_align`].
    MemoryAlign(u32),
    /// [`QueueLimits::max_segments`].
    MaxSegments(u16),
    /// [`QueueLimits::max_request_bytes`].
    MaxRequest(u32),
}

impl DriverSetting for DeviceSetting {
    fn name(&self) -> &'static str {
        match self {
            DeviceSetting::Panic => "panic",
            DeviceSetting::MemoryAlign(_) => "memory-align",
            DeviceSetting::MaxSegments(_) => "max-segments",
            DeviceSetting::MaxRequest(_) => "max-request",
        }
    }
}

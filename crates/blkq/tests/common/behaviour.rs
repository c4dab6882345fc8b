use blkq::DriverSetting;

/// When the device completes requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finish {
    /// Immediately, before the call that hands over the requests returns.
    AtOnce,
    /// Some requests, in random order, at each poll.
    Random,
    /// Only when the test calls [`Device::release`].
    Held,
}

#[derive(Clone, Debug)]
pub struct Behaviour {
    pub finish: Finish,
    pub seed: u64,
    /// The device is busy for one request in this number; 0: never.
    pub busy_every: u64,
    /// After this number of write zeroes and discards the device finds that it does not support them.
    pub revoke_after: Option<u32>,
    /// The first write with FUA that completes is not durable, and the device finds FUA unsupported.
    pub revoke_fua: bool,
}

impl Default for Behaviour {
    fn default() -> Behaviour {
        Behaviour { finish: Finish::AtOnce, seed: 1, busy_every: 0, revoke_after: None, revoke_fua: false }
    }
}

#[derive(Clone, Copy, Debug)]
pub enum DeviceSetting {
    Panic,
    MemoryAlign(u32),
    MaxSegments(u16),
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

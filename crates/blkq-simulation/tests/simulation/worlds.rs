//! The optional parts of a world.

use blkq::random::Random;

/// The optional parts of a seed's world. They use separate random numbers, so that a seed without them behaves as it did
/// before they were added.
#[derive(Clone, Copy, Debug)]
pub struct Worlds {
    /// Number of queues of the device; each has an export.
    pub queues: usize,
    pub shared_tags: bool,
    /// One of this many lives stops with a panic of the engine; 0 means none.
    pub panics: u64,
    /// Whether the file loses an unsynced size on a power failure.
    pub loses_size: bool,
    /// Whether rules of the fault driver have a trigger file, which is created and removed.
    pub triggers: bool,
    /// Whether the device has limits, or is in a group with limits.
    pub limits: bool,
    pub holds: bool,
    pub exchanges: bool,
    /// Whether clients stop reading, for ever, with requests in flight.
    pub silence: bool,
}

impl Worlds {
    pub const NONE: Worlds = Worlds {
        queues: 1,
        shared_tags: false,
        panics: 0,
        loses_size: false,
        triggers: false,
        limits: false,
        holds: false,
        exchanges: false,
        silence: false,
    };
    /// Every life stops with a panic.
    pub const PANICS: Worlds = Worlds { panics: 1, ..Worlds::NONE };
    pub const TWO_QUEUES: Worlds = Worlds { queues: 2, ..Worlds::NONE };
    pub const TRIGGERS: Worlds = Worlds { triggers: true, ..Worlds::NONE };

    pub const fn with_limits(self) -> Worlds {
        Worlds { limits: true, ..self }
    }

    /// Adds held requests, and removes limits.
    pub const fn with_holds(self) -> Worlds {
        Worlds { holds: true, limits: false, ..self }
    }

    /// Adds exchanges of the driver, and removes limits.
    pub const fn with_exchanges(self) -> Worlds {
        Worlds { exchanges: true, limits: false, ..self }
    }

    /// Adds clients that stop reading, and removes limits.
    pub const fn with_silence(self) -> Worlds {
        Worlds { silence: true, limits: false, ..self }
    }

    /// The world of a seed whose client is a virtual machine.
    pub fn of_machine(seed: u64) -> Worlds {
        Worlds { loses_size: Random::new(!seed).one_in(2), ..Worlds::NONE }
    }

    pub fn of(seed: u64) -> Worlds {
        let mut chance = Random::new(!seed);
        Worlds {
            queues: 1 + chance.below(2) as usize,
            shared_tags: chance.one_in(2),
            panics: 2 * chance.below(2),
            loses_size: chance.one_in(2),
            triggers: chance.one_in(2),
            limits: chance.one_in(2),
            holds: false,
            exchanges: false,
            silence: false,
        }
    }
}

//! The parts of a world that not every seed has.

use blkq::random::Random;

/// The unusual parts of a seed. They have chance of its own: without all of this a seed
/// is what it was before there was any.
#[derive(Clone, Copy, Debug)]
pub struct Worlds {
    /// The device has so many queues, each with an export.
    pub queues: usize,
    /// They have one set of tags.
    pub shared_tags: bool,
    /// One life in so many stops by a panic of the engine; 0: none.
    pub panics: u64,
    /// With the power the file loses a size that was not synced.
    pub loses_size: bool,
    /// Rules of the fault driver have a trigger file, which is made and removed.
    pub triggers: bool,
    /// The device has limits, of its own or of a group with another device.
    pub limits: bool,
    /// Its requests are held after errors, now and then.
    pub holds: bool,
    /// Its driver is exchanged for one that declares FUA or does not, now and then.
    pub exchanges: bool,
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
    };
    /// Every life stops by a panic.
    pub const PANICS: Worlds = Worlds { panics: 1, ..Worlds::NONE };
    pub const TWO_QUEUES: Worlds = Worlds { queues: 2, ..Worlds::NONE };
    pub const TRIGGERS: Worlds = Worlds { triggers: true, ..Worlds::NONE };

    /// With limits besides.
    pub const fn with_limits(self) -> Worlds {
        Worlds { limits: true, ..self }
    }

    /// With requests that are held after errors, and without limits.
    pub const fn with_holds(self) -> Worlds {
        Worlds { holds: true, limits: false, ..self }
    }

    /// With drivers that are exchanged, and without limits.
    pub const fn with_exchanges(self) -> Worlds {
        Worlds { exchanges: true, limits: false, ..self }
    }

    /// Those of a seed whose client is a virtual machine.
    pub fn of_machine(seed: u64) -> Worlds {
        Worlds { loses_size: Random::new(!seed).one_in(2), ..Worlds::NONE }
    }

    /// Those of a seed.
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
        }
    }
}

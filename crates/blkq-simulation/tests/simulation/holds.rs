//! A device that holds failed requests until it is resumed. Clients must not see an error that the policy holds, a flush
//! must not overtake a held write, and after the last error a resume must complete all requests.

use std::sync::Arc;

use blkq::engine::SimulatedEngine;
use blkq::hang::Place;
use blkq::random::Random;
use blkq::{Disk, ErrorPolicy, Resume, SchedulerKind, Status};
use blkq_export::nbd::proto::NbdError;
use blkq_simulation as simulation;
use blkq_simulation::{forget_held_writes, held_writes};

use super::client::History;

/// Maximum number of resumes until nothing is held, once nothing fails: errors from before may be noticed later.
const RESUMES_MAX: u64 = 8;
/// Turns after which, if nothing fails, only held requests and those that wait for them are left.
const SETTLED_TURNS: u64 = 4_000;

/// Errors that are reported under every policy.
const REPORTED: [Status; 4] = [Status::NotSupported, Status::Invalid, Status::ReadOnly, Status::Again];

pub struct Holding {
    chance: Random,
    policy: History<ErrorPolicy>,
    /// When held requests were last failed by a resume or a stop.
    failed_at: u64,
    /// Whether the device stops and may hold writes: a flush that waits for writes that another queue holds fails.
    pub stops: bool,
    /// Since when bios of a disconnected client may be abandoned: a write that is merged with one fails.
    abandoned_since: Option<u64>,
    /// When the last such time ended.
    abandoned_until: u64,
    pub held: u64,
    pub reissued: u64,
    pub failed: u64,
    pub held_with: [bool; SchedulerKind::ALL.len()],
}

impl Holding {
    pub fn new(seed: u64) -> Holding {
        Holding {
            chance: Random::new(seed.rotate_left(16)),
            policy: History::new(0, ErrorPolicy::Report),
            failed_at: 0,
            stops: false,
            abandoned_since: None,
            abandoned_until: 0,
            held: 0,
            reissued: 0,
            failed: 0,
            held_with: Default::default(),
        }
    }

    pub fn begin(&mut self, disk: &Disk, now: u64) {
        let policy = self.any_policy();
        disk.set_error_policy(policy);
        self.policy = History::new(now, policy);
        (self.abandoned_since, self.stops) = (None, false);
        forget_held_writes();
    }

    fn any_policy(&mut self) -> ErrorPolicy {
        ErrorPolicy::ALL[self.chance.below(ErrorPolicy::ALL.len() as u64) as usize]
    }

    /// Resumes the device or changes its error policy, at random.
    pub fn step(&mut self, disk: &Disk, now: u64) {
        if self.chance.one_in(50) {
            let policy = self.any_policy();
            disk.set_error_policy(policy);
            self.policy.begin(now, policy);
        }
        match self.chance.below(60) {
            0..2 => self.reissued += disk.resume(Resume::Reissue),
            2 => self.fail(disk, now),
            _ => {}
        }
    }

    fn fail(&mut self, disk: &Disk, now: u64) {
        self.failed += disk.resume(Resume::Fail);
        self.failed_at = now;
    }

    /// The device stops: all held requests fail.
    pub fn stop(&mut self, now: u64) {
        let may_hold = self.policy.may(now, |policy| policy != ErrorPolicy::Report);
        // Includes writes that were resumed and have not completed.
        (self.failed_at, self.stops) = (now, may_hold || !held_writes().is_empty());
    }

    /// Records the state after a turn of the engine, which applies a new policy. `ghosts`: the server still has clients
    /// that disconnected.
    pub fn note(&mut self, disk: &Disk, ghosts: bool, now: u64) {
        self.policy.settle(now, disk.error_policy());
        self.held = self.held.max(disk.held());
        if disk.held() > 0 {
            self.held_with[disk.settings().scheduler as usize] = true;
        }
        match (ghosts, self.abandoned_since) {
            (true, None) => self.abandoned_since = Some(now),
            (false, Some(_)) => (self.abandoned_since, self.abandoned_until) = (None, now),
            _ => {}
        }
    }

    /// Checks the error of a request that was sent at `since`. `writes`: the request changes data.
    pub fn check_error(&self, error: u32, since: u64, writes: bool) -> Result<(), String> {
        let of = |status: &Status| NbdError::from(*status) as u32 == error;
        let held = |policy| match policy {
            ErrorPolicy::Report => false,
            ErrorPolicy::HoldNoSpace => of(&Status::NoSpace),
            ErrorPolicy::Hold => Status::ALL.iter().any(|status| of(status) && !REPORTED.contains(status)),
        };
        let may_report = self.policy.may(since, |policy| !held(policy));
        let abandoned = self.abandoned_since.is_some() || self.abandoned_until >= since;
        if may_report || self.failed_at >= since || writes && abandoned {
            return Ok(());
        }
        Err(format!("error {error} was reported instead of held"))
    }
}

/// Checks that held requests block no other requests. Nothing fails, and the engine has had enough turns.
fn check_settled(engine: &mut SimulatedEngine) {
    // Without statistics, the first scan writes the times from which the second counts.
    let scans = [1, 2].map(|after_ns| {
        let reply = engine.handle().scan_for_hangs(simulation::time_ns() + after_ns, 0);
        engine.turn();
        reply.try_recv().expect("an engine that runs scans in its turn")
    });
    for hang in scans.iter().flat_map(|scan| &scan.hangs) {
        let waits =
            matches!(hang.place, Place::Held(_) | Place::ForHeldWrites | Place::ForFlush | Place::ForTag(_));
        assert!(waits, "a request makes no progress while others are held: {hang:?}");
    }
}

/// Resumes a device on which nothing fails, after a check of what the held requests block.
#[derive(Default)]
pub struct Resumer {
    turns: u64,
    resumes: u64,
}

impl Resumer {
    /// Call this before each turn of `engine`.
    pub fn turn(&mut self, disk: &Arc<Disk>, engine: &mut SimulatedEngine) {
        self.turns += 1;
        if self.turns == SETTLED_TURNS {
            check_settled(engine);
        } else if self.turns > SETTLED_TURNS && disk.held() > 0 {
            disk.resume(Resume::Reissue);
            self.resumes += 1;
            assert!(self.resumes <= RESUMES_MAX, "requests are held again, though nothing fails");
        }
    }
}

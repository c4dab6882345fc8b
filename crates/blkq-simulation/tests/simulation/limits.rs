//! Limits of the device, and of a group with another device, that change while requests wait. No request may begin in
//! excess of a limit, and none may wait while the limits have room.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use blkq::disk::CeilingSearch;
use blkq::drivers::null::{Null, NullOptions};
use blkq::random::Random;
use blkq::throttle::{Group, LimitKey, RateLimit, RateLimits};
use blkq::{Bio, Disk, IoBuffer, LocalQueue, Operation, Sector};
use blkq_simulation as simulation;
use blkq_simulation::{Admission, take_admissions};

const NS_PER_S: u128 = 1_000_000_000;
/// How far a device may be ahead of its rate, in nanoseconds: a queue that waited makes up for 100 ms, and each of two
/// queues may have prepaid 0.25 ms.
const AHEAD_NS: u128 = 100_500_000;
/// How far a group of three queues may be ahead of its rate, in nanoseconds: as [`AHEAD_NS`] with three queues. In
/// addition, its members make up for 100 ms of their shares, whose weights they learn up to a millisecond late.
const GROUP_AHEAD_NS: u128 = 201_750_000;
/// How long requests may wait when no limit is exhausted, in nanoseconds: a queue may see a change of its group this
/// late, and does not sleep afterwards.
const IDLE_WAIT_NS: u64 = 110_000_000;
/// Interval at which a search of the ceiling samples the device, in nanoseconds.
const SEARCH_NS: u64 = 50_000_000;
const NEIGHBOUR_BYTES: u64 = 1 << 20;
/// The statistics, which take time to add up, are checked once in this many turns.
const BYPASS_TURNS: u64 = 16;

/// One rate, and the units that were admitted in excess of it.
struct Level {
    key: LimitKey,
    rate: u128,
    /// Additional units that a burst allows.
    burst: u128,
    /// Admitted units beyond the rate, times nanoseconds per second, over the window in which they are most.
    units: u128,
}

/// A set of limits, with what was admitted since it was set.
struct Account {
    limits: RateLimits,
    levels: Vec<Level>,
    ahead_ns: u128,
    /// Largest cost of a request so far.
    cost_max: u128,
    noted_ns: u64,
}

impl Account {
    fn new(limits: RateLimits, ahead_ns: u128) -> Account {
        let level = |key| {
            let RateLimit { rate, burst } = limits.get(key)?;
            let rate = u128::from(rate);
            let average = |burst| Level { key, rate, burst, units: 0 };
            let Some(burst) = burst else { return Some(vec![average(0)]) };
            let peak = u128::from(burst.rate);
            let more = (peak - rate) * u128::from(burst.length_ns) / NS_PER_S + 1;
            Some(vec![average(more), Level { key, rate: peak, burst: 0, units: 0 }])
        };
        let levels = LimitKey::ALL.into_iter().filter_map(level).flatten().collect();
        Account { limits, levels, ahead_ns, cost_max: 0, noted_ns: simulation::time_ns() }
    }

    fn cost(&self, key: LimitKey, Admission { operation, bytes, .. }: Admission) -> u128 {
        let is_read = operation == Operation::Read;
        let concerned = match key {
            LimitKey::Iops | LimitKey::Bps => true,
            LimitKey::ReadIops | LimitKey::ReadBps => is_read,
            LimitKey::WriteIops | LimitKey::WriteBps => !is_read,
        };
        let bytes = if matches!(operation, Operation::Read | Operation::Write) { bytes } else { 0 };
        u128::from(match self.limits.iops_size_bytes() {
            _ if !concerned => 0,
            _ if key.is_bytes() => bytes,
            0 => 1,
            size => bytes.div_ceil(size).max(1),
        })
    }

    fn pass(&mut self, now_ns: u64) {
        let ns = u128::from(now_ns - self.noted_ns);
        self.levels.iter_mut().for_each(|level| level.units = level.units.saturating_sub(level.rate * ns));
        self.noted_ns = now_ns;
    }

    /// Charges a request at the time at which it began. A turn of the engine may sleep for 10 ms afterwards, which
    /// counts for the next request.
    fn note(&mut self, admission: Admission) {
        self.pass(admission.at_ns);
        let costs: Vec<_> = self.levels.iter().map(|level| self.cost(level.key, admission)).collect();
        for (level, cost) in self.levels.iter_mut().zip(costs) {
            let most = level.rate * self.ahead_ns + (level.burst + 2 * self.cost_max + 4) * NS_PER_S;
            assert!(
                cost == 0 || level.units <= most,
                "more was admitted than {} allows: {} of {most} for {:?}",
                self.limits,
                level.units,
                level.key
            );
            level.units += cost * NS_PER_S;
            self.cost_max = self.cost_max.max(cost);
        }
    }

    /// Whether everything that was admitted is paid for.
    fn is_idle(&mut self) -> bool {
        self.pass(simulation::time_ns());
        self.levels.iter().all(|level| level.units == 0)
    }
}

/// The other device of the group, which submits bursts of I/O.
struct Neighbour {
    queue: LocalQueue,
    in_flight: u64,
    depth: u64,
}

impl Neighbour {
    fn new(group: &Arc<Group>, chance: &mut Random) -> Neighbour {
        let disk =
            Disk::builder(Box::new(Null::new(NullOptions::new(NEIGHBOUR_BYTES)).unwrap())).build().unwrap();
        disk.join_group(group.clone().join(1, "neighbour", 1 + chance.below(300) as u32).unwrap());
        Neighbour {
            queue: disk.open_queue(0).unwrap(),
            in_flight: 0,
            depth: [1, 4, 64][chance.below(3) as usize],
        }
    }

    fn act(&mut self, chance: &mut Random) {
        while self.in_flight < self.depth && !chance.one_in(8) {
            let sector = Sector(chance.below(NEIGHBOUR_BYTES >> 12) * 8);
            let buffer = IoBuffer::zeroed(4096);
            let bio =
                if chance.one_in(2) { Bio::read(sector, buffer, 0) } else { Bio::write(sector, buffer, 0) };
            self.queue.submit(bio).unwrap();
            self.in_flight += 1;
        }
        self.queue.poll();
        self.in_flight -=
            self.queue.completions().map(|completion| completion.result.unwrap()).count() as u64;
    }
}

pub struct Limited {
    chance: Random,
    group: Option<Arc<Group>>,
    /// Leaked if the world was killed while it submitted I/O.
    neighbour: Option<Neighbour>,
    /// The search of the device's ceiling, and the time of its next sample.
    search: Option<(CeilingSearch, u64)>,
    own: Account,
    common: Account,
    admitted_now: u64,
    turns: u64,
    /// Whether requests may have bypassed the limits in this life.
    exempt: bool,
    /// Since when requests wait although no limit is exhausted.
    idle_since_ns: Option<u64>,
    pub admitted: u64,
    pub throttled: u64,
    pub found: u64,
}

impl Limited {
    pub fn new(seed: u64) -> Limited {
        let mut chance = Random::new(seed.rotate_left(16) ^ 0x11);
        take_admissions();
        let group = chance.one_in(2).then(|| Arc::new(Group::default()));
        let neighbour = group.as_ref().map(|group| Neighbour::new(group, &mut chance));
        Limited {
            chance,
            group,
            neighbour,
            search: None,
            own: Account::new(RateLimits::default(), AHEAD_NS),
            common: Account::new(RateLimits::default(), GROUP_AHEAD_NS),
            admitted_now: 0,
            turns: 0,
            exempt: false,
            idle_since_ns: None,
            admitted: 0,
            throttled: 0,
            found: 0,
        }
    }

    pub fn begin(&mut self, disk: &Arc<Disk>) {
        (self.admitted_now, self.exempt) = (0, false);
        // A device that was killed may have recorded admissions in its unfinished turn.
        take_admissions();
        if let Some(group) = &self.group {
            disk.join_group(group.clone().join(0, "disk", 1 + self.chance.below(300) as u32).unwrap());
        }
        self.set_own(disk);
        if self.group.is_some() && self.chance.one_in(2) {
            self.set_common();
        }
    }

    /// Ends the search of the ceiling, if there is one. The search removes the limits of the device, so all requests
    /// begin from now on, also those that wait.
    fn end_search(&mut self) {
        if self.search.take().is_some() {
            self.own = Account::new(RateLimits::default(), AHEAD_NS);
        }
    }

    fn set_own(&mut self, disk: &Arc<Disk>) {
        self.end_search();
        if self.group.is_none() && self.chance.one_in(3) {
            self.search = Some((CeilingSearch::begin(disk).unwrap(), 0));
            self.own = Account::new(RateLimits::default(), AHEAD_NS);
            return;
        }
        let limits = limits(&mut self.chance);
        disk.set_rate_limits(&limits);
        self.own = Account::new(limits, AHEAD_NS);
        self.exempt |= limits.is_none() && self.group.is_none();
    }

    fn set_common(&mut self) {
        let limits = limits(&mut self.chance);
        if let Some(group) = &self.group {
            group.set_limits(&limits);
        }
        self.common = Account::new(limits, GROUP_AHEAD_NS);
    }

    /// Changes the limits of the device or of the group, or the weight, at random. Returns whether something changed.
    pub fn change(&mut self, disk: &Arc<Disk>) -> bool {
        if !self.chance.one_in(25) {
            return false;
        }
        match (self.chance.below(3), disk.group_member()) {
            (0, Some(_)) => self.set_common(),
            (1, Some(member)) => member.set_weight(1 + self.chance.below(1_000) as u32).unwrap(),
            _ => self.set_own(disk),
        }
        true
    }

    /// Samples the device, if a search is due. A life is too short to find a ceiling, so random limits are set instead.
    fn search(&mut self, disk: &Arc<Disk>) {
        let now_ns = simulation::time_ns();
        let Some((search, next_ns)) = self.search.as_mut().filter(|(_, next_ns)| *next_ns <= now_ns) else {
            return;
        };
        *next_ns = now_ns + SEARCH_NS;
        let ios = search.load().ios;
        assert!(self.exempt || ios <= self.admitted_now, "{ios} completed of {}", self.admitted_now);
        if self.chance.one_in(4) {
            let limits = limits(&mut self.chance);
            disk.set_rate_limits(&limits);
            self.own = Account::new(limits, AHEAD_NS);
            self.found += 1;
        }
    }

    /// A freeze begins: all waiting requests are admitted once.
    pub fn freeze(&mut self) {
        self.exempt = true;
    }

    pub fn note(&mut self, disk: &Arc<Disk>) {
        for admission in take_admissions() {
            (self.admitted, self.admitted_now) = (self.admitted + 1, self.admitted_now + 1);
            self.own.note(admission);
            self.common.note(admission);
            self.idle_since_ns = None;
        }
        self.search(disk);
        self.turns += 1;
        if self.turns.is_multiple_of(BYPASS_TURNS) {
            self.check_bypass(disk);
        }
        // If the world is killed while the neighbour runs, it is leaked and not closed.
        let Some(mut neighbour) = self.neighbour.take().map(ManuallyDrop::new) else { return };
        if self.chance.one_in(2) {
            neighbour.act(&mut self.chance);
            take_admissions().into_iter().for_each(|admission| self.common.note(admission));
        }
        self.neighbour = Some(ManuallyDrop::into_inner(neighbour));
    }

    /// Checks that at most the admitted requests have completed.
    fn check_bypass(&self, disk: &Disk) {
        if !self.exempt && disk.settings().iostats {
            let completed: u64 = disk.stats().groups.iter().map(|group| group.ios).sum();
            let admitted = self.admitted_now;
            assert!(completed <= admitted, "requests bypass the limits: {completed} of {admitted}");
        }
    }

    /// Checks that requests wait only for units that were admitted before; the driver accepts all requests.
    pub fn check_waits_have_a_reason(&mut self, disk: &Arc<Disk>) {
        let now_ns = simulation::time_ns();
        if !self.own.is_idle() || !self.common.is_idle() || disk.stats().throttled == 0 {
            self.idle_since_ns = None;
            return;
        }
        let since_ns = *self.idle_since_ns.get_or_insert(now_ns);
        assert!(
            now_ns - since_ns <= IDLE_WAIT_NS,
            "requests wait although there is room: {} and {}",
            self.own.limits,
            self.common.limits
        );
    }

    /// The device stops; its limits no longer apply.
    pub fn stop(&mut self, disk: &Arc<Disk>, is_killed: bool) {
        use blkq::stats::Counter;
        // A world that is killed in a turn has admissions that were not counted yet. Limits may have changed in it.
        self.admitted_now += take_admissions().len() as u64;
        self.check_bypass(disk);
        self.throttled += disk.stats().counter(Counter::ThrottledRequests);
        self.exempt = true;
        // In a daemon the search has a thread, which exits before the device does.
        self.end_search();
        if let Some(member) = disk.group_member().filter(|_| is_killed) {
            std::mem::forget(member);
        }
    }
}

/// Random limits, in the syntax of the user.
fn limits(chance: &mut Random) -> RateLimits {
    if chance.one_in(6) {
        return RateLimits::default();
    }
    let mut text: Vec<String> = Vec::new();
    let mut has_iops = false;
    for _ in 0..1 + chance.below(3) {
        let key = LimitKey::ALL[chance.below(LimitKey::COUNT as u64) as usize];
        if text.iter().any(|part| part.starts_with(&format!("{}=", key.name()))) {
            continue;
        }
        let rate = match key.is_bytes() {
            true => [1 << 20, 8 << 20, 1 << 30][chance.below(3) as usize],
            false => [50, 400, 3_000, 200_000, 10_000_000][chance.below(5) as usize],
        };
        has_iops |= !key.is_bytes();
        text.push(format!("{}={rate}", key.name()));
        if (rate < 200_000 || key.is_bytes()) && chance.one_in(3) {
            text.push(format!("burst={}x{}ms", rate * (2 + chance.below(3)), 1 + chance.below(2_000)));
        }
    }
    if has_iops && chance.one_in(4) {
        text.push(format!("iops-size={}", [4096, 16384][chance.below(2) as usize]));
    }
    text.join(",").parse().unwrap()
}

//! Live changes, as `blkq set` and `blkq resize` make them, while clients continue; and what the model must know about a
//! change.

use std::cell::RefCell;
use std::rc::Rc;

use blkq::random::Random;
use blkq::{ClockMode, ErrorKind, SchedulerKind, Setting};
use blkq_drivers::fault::FaultSpec;
use blkq_drivers::r#loop::{DirectIo, Dispatch, LoopSetting};
use blkq_simulation as simulation;

use super::life::World;

#[derive(Clone, Debug)]
enum Change {
    /// A setting of the disk, which clients do not notice.
    Disk(Setting),
    /// How the loop driver submits requests.
    Dispatch(Dispatch),
    DirectIo(DirectIo),
    ReadOnly(bool),
    /// New size in bytes; `None` for the size of the file.
    Resize(Option<u64>),
}

impl Change {
    fn by_chance(chance: &mut Random, block_sectors: u64, sectors_max: u64) -> Change {
        let mut below = |count: usize| chance.below(count as u64) as usize;
        match below(7) {
            0 => Change::Disk(Setting::Depth([1, 2, 8, 128][below(4)])),
            1 => Change::Disk(Setting::Scheduler(SchedulerKind::ALL[below(SchedulerKind::ALL.len())])),
            2 => Change::Dispatch([Dispatch::Serial, Dispatch::Concurrent][below(2)]),
            3 => {
                let (switch, on) = (below(5), below(2) == 0);
                let mode = if on { ClockMode::Cached } else { ClockMode::Precise };
                let settings = [
                    Setting::Merge(on),
                    Setting::EarlySubmission(!on),
                    Setting::Batching(on),
                    Setting::Iostats(on),
                    Setting::Clock(mode),
                ];
                Change::Disk(settings[switch])
            }
            4 => Change::DirectIo([DirectIo::On, DirectIo::Off][below(2)]),
            5 => Change::ReadOnly(below(3) == 0),
            _ => {
                let blocks = sectors_max / block_sectors;
                let size = (1 + chance.below(blocks)) * block_sectors;
                Change::Resize((!chance.one_in(4)).then_some(size << 9))
            }
        }
    }
}

/// Steps that a request in flight may take. The simulated clock may jump by seconds in a step, so a change with a time
/// limit may fail earlier.
const STEPS_PER_REQUEST: u64 = 8;
/// How long a change waits for requests in flight, in nanoseconds (`FREEZE_TIMEOUT` of blkq).
const FREEZE_NS: u64 = 30_000_000_000;

/// Makes a random change. The world keeps running meanwhile.
pub fn make_one(world: &Rc<RefCell<World>>) {
    let change = {
        let World { chance, common, sectors_max, .. } = &mut *world.borrow_mut();
        Change::by_chance(chance, common.block_sectors, *sectors_max)
    };
    make(world, change);
}

/// Whether a change that began at `begun_ns` may fail because requests in flight did not complete in time.
pub fn may_be_busy(world: &World, begun_ns: u64) -> bool {
    let is_late = simulation::time_ns() - begun_ns >= FREEZE_NS;
    world.common.slow || is_late && world.waited < STEPS_PER_REQUEST * world.requests_in_flight()
}

pub fn grow(world: &Rc<RefCell<World>>) {
    let bytes = world.borrow().sectors_max << 9;
    make(world, Change::Resize(Some(bytes)));
}

fn make(world: &Rc<RefCell<World>>, change: Change) {
    let (disk, change, begun) = {
        let mut world = world.borrow_mut();
        let throttled = world.disk().stats().throttled;
        let World { common, sectors_max, limited, seen, .. } = &mut *world;
        if let Some(limited) = limited {
            limited.freeze();
        }
        seen.limited_freezes += u64::from(throttled > 0);
        let begun = common.tick();
        common.check_read_only();
        match change {
            Change::ReadOnly(on) => common.read_only.begin(begun, on),
            Change::Resize(Some(bytes)) => common.sectors.begin(begun, bytes >> 9),
            // To the size of the file, which is at most the maximum.
            Change::Resize(None) => common.sectors.begin(begun, *sectors_max),
            _ => {}
        }
        (world.disk(), change, begun)
    };
    let begun_ns = simulation::time_ns();
    let result = match &change {
        Change::Disk(setting) => disk.set(*setting),
        Change::Dispatch(dispatch) => disk.set_driver(&LoopSetting::Dispatch(*dispatch)),
        Change::DirectIo(mode) => disk.set_driver(&LoopSetting::DirectIo(*mode)),
        Change::ReadOnly(on) => disk.set(Setting::ReadOnly(*on)),
        Change::Resize(bytes) => disk.resize(*bytes).map(drop),
    };
    let mut world = world.borrow_mut();
    let may_be_busy = may_be_busy(&world, begun_ns);
    let World { common, seen, .. } = &mut *world;
    seen.changes += 1;
    if let Err(error) = &result {
        seen.refused_changes += 1;
        let may_be = match (&change, error.kind()) {
            // Earlier writes could not be made durable.
            (Change::DirectIo(_) | Change::ReadOnly(_), ErrorKind::System | ErrorKind::Lost) => {
                common.errors_allowed
            }
            (Change::Resize(Some(_)), ErrorKind::Unsupported) => common.read_only.now(),
            (_, ErrorKind::Busy) => may_be_busy,
            (_, ErrorKind::Held) => common.holding.is_some(),
            _ => false,
        };
        assert!(may_be, "{change:?} is rejected: {error}");
    }
    let now = common.tick();
    let limits = disk.limits();
    match change {
        Change::ReadOnly(_) => common.read_only.settle(now, limits.read_only),
        Change::Resize(_) => common.sectors.settle(now, limits.capacity_bytes >> 9),
        Change::Disk(_) | Change::Dispatch(_) | Change::DirectIo(_) => {}
    }
    common.writes_seen = simulation::with_file(|file| file.writes());
    if result.is_ok() && matches!(change, Change::DirectIo(_) | Change::ReadOnly(_)) {
        // The change includes an fdatasync.
        common.model.flushed(begun);
    }
    if let (Ok(()), Change::DirectIo(mode)) = (result, change) {
        world.set_buffered(mode == DirectIo::Off);
    }
}

pub fn make_faults(world: &Rc<RefCell<World>>) {
    let mut world = world.borrow_mut();
    let (sectors_max, loud) = (world.sectors_max, world.machine.is_some() || world.common.holding.is_some());
    let mut spec =
        if world.chance.one_in(3) { "none".into() } else { faults(&mut world.chance, sectors_max, loud) };
    if let Some(file) = world.trigger().filter(|_| spec != "none") {
        // The trigger file applies to the last rule, or to all.
        let file = format!(",file={}", file.display());
        if world.extra.one_in(2) {
            spec = spec.replace(",op=", &format!("{file},op="));
        } else {
            spec += &file;
        }
    }
    world.seen.changes += 1;
    world.common.has_rules = spec != "none";
    world.disk().set_driver(&spec.parse::<FaultSpec>().unwrap()).unwrap();
}

/// Random rules for the fault driver (docs/fault.md). With `loud`, no rule changes data and reports success.
fn faults(chance: &mut Random, sectors_max: u64, loud: bool) -> String {
    let mut spec = format!("seed={}", chance.word());
    for _ in 0..1 + chance.below(3) {
        let mut number = |from: u64, to: u64| from + chance.below(to - from);
        let data = ["read", "write", "read+write"][number(0, 3) as usize];
        let changing = ["write", "discard+write-zeroes", "flush", "write+flush"][number(0, 4) as usize];
        let any = ["read", "write", "discard+write-zeroes+flush", "read+write+flush"][number(0, 4) as usize];
        let error = ["EIO", "ENOSPC", "ENOMEM", "EOPNOTSUPP", "EINVAL", "EAGAIN"][number(0, 6) as usize];
        let effect = number(0, 9);
        let (effect, operations, few) = match if loud { [0, 1, 6, 7, 8][effect as usize % 5] } else { effect }
        {
            0 => (format!("error={error}"), any, false),
            1 => (format!("short={error}"), data, false),
            2 => ("torn".into(), data, false),
            3 => ("misdirect".into(), data, false),
            4 => ("corrupt".into(), data, false),
            5 => ("lose".into(), changing, false),
            6 => (format!("delay={}ms", number(1, 50)), any, false),
            7 => (format!("delay={0}ms,p99={1}ms", number(4, 9), number(9, 50)), any, false),
            _ => (format!("stuck={}s", number(1, 40)), any, true),
        };
        spec += &format!(";{effect},op={operations}");
        match number(0, 3) {
            0 => spec += &format!(",rate={}%", number(1, 40)),
            1 => spec += &format!(",after={}", number(0, 20)),
            _ => {}
        }
        if few || number(0, 2) == 0 {
            spec += &format!(",count={}", number(1, 4));
        }
        if number(0, 4) == 0 {
            let (from, to) = (number(0, sectors_max / 2), number(sectors_max / 2, sectors_max));
            spec += &format!(",range={}-{}", from << 9, (to + 1) << 9);
        }
    }
    spec
}

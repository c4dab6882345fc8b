//! The daemons that serve a machine, one after another: how each of them runs and stops, and what remains of the machine.

use std::cell::RefCell;
use std::panic::AssertUnwindSafe;
use std::rc::Rc;

use blkq_drivers::fault::FaultSpec;
use blkq_simulation as simulation;
use blkq_simulation::{Defect, Faults, Panicked};

use super::super::change;
use super::super::life::{Server, Setup, TURNS_MAX, World, begin, finish, set_meanwhile};
use super::super::worlds::Worlds;
use super::front_end::FrontEnd;
use super::machine::Machine;
use super::wiring::{Tamper, Wiring};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stop {
    /// An orderly stop without requests in flight.
    Idle,
    /// An orderly stop with requests in flight.
    Loaded,
    /// A kill at any instant; front end and machine survive.
    Killed,
    /// A kill; in addition, the image loses unsynced writes.
    ImageLoss,
    /// A kill of daemon and machine.
    MachineKilled,
    /// A power failure of the host of daemon and machine.
    PowerLoss,
}

impl Stop {
    const ALL: [Stop; 9] = [
        Stop::Idle,
        Stop::Loaded,
        Stop::Killed,
        Stop::Killed,
        Stop::Killed,
        Stop::Killed,
        Stop::ImageLoss,
        Stop::MachineKilled,
        Stop::PowerLoss,
    ];

    fn is_orderly(self) -> bool {
        matches!(self, Stop::Idle | Stop::Loaded)
    }
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Seen {
    pub requests: u64,
    pub errors: u64,
    pub faults: u64,
    pub kills: u64,
    pub image_losses: u64,
    pub machine_kills: u64,
    pub power_losses: u64,
    /// Requests that were in flight when a daemon was killed, and completed later.
    pub recovered: u64,
    /// The part of `recovered` whose chain begins at descriptor 0.
    pub recovered_first: u64,
    pub stops: u64,
    pub resets: u64,
    pub switches: u64,
    pub bounced: u64,
    pub changes: u64,
    pub operations: u64,
    pub digest: u64,
}

impl std::ops::AddAssign for Seen {
    fn add_assign(&mut self, other: Seen) {
        self.requests += other.requests;
        self.errors += other.errors;
        self.faults += other.faults;
        self.kills += other.kills;
        self.image_losses += other.image_losses;
        self.machine_kills += other.machine_kills;
        self.power_losses += other.power_losses;
        self.recovered += other.recovered;
        self.recovered_first += other.recovered_first;
        self.stops += other.stops;
        self.resets += other.resets;
        self.switches += other.switches;
        self.bounced += other.bounced;
        self.changes += other.changes;
        self.operations += other.operations;
    }
}

impl Seen {
    /// Counts that must not be zero over a hundred seeds.
    pub fn rare(&self) -> [u64; 13] {
        [
            self.errors,
            self.faults,
            self.kills,
            self.image_losses,
            self.machine_kills,
            self.power_losses,
            self.recovered,
            self.recovered_first,
            self.stops,
            self.resets,
            self.switches,
            self.bounced,
            self.changes,
        ]
    }
}

/// Runs `seed`, on a kernel that may have a defect, or with a device that may have one.
pub fn live(seed: u64, defect: Option<Defect>, tamper: Option<Tamper>) -> Seen {
    let (setup, world) = begin(seed, defect, Worlds::of_machine(seed));
    let mut seen = Seen::default();
    let daemons = {
        let World { chance, common, machine, .. } = &mut *world.borrow_mut();
        let wiring = Wiring::new(chance);
        *machine = Some(Machine::new(wiring, chance, common.now));
        machine.as_mut().unwrap().tamper = tamper;
        1 + chance.below(4)
    };
    let mut front = FrontEnd::default();
    for _ in 0..daemons {
        let stop = {
            let World { chance, machine, .. } = &mut *world.borrow_mut();
            let stop = Stop::ALL[chance.below(Stop::ALL.len() as u64) as usize];
            // Without a record, the requests in flight of a killed daemon are unknown.
            let has_record = machine.as_ref().unwrap().wiring.inflight;
            if has_record || stop.is_orderly() || stop == Stop::PowerLoss {
                stop
            } else {
                Stop::MachineKilled
            }
        };
        life(&setup, &world, &mut front, stop, false, &mut seen);
    }
    // The last daemon runs without faults: all remaining requests complete.
    life(&setup, &world, &mut front, Stop::Idle, true, &mut seen);
    let of_world = finish(&world);
    let world = world.borrow();
    let machine = world.machine.as_ref().unwrap();
    Seen {
        requests: machine.requests,
        errors: machine.errors,
        recovered: machine.recovered[0],
        recovered_first: machine.recovered[1],
        faults: of_world.faults,
        changes: of_world.changes,
        operations: of_world.operations,
        digest: of_world.digest,
        stops: front.stops,
        resets: front.resets,
        switches: front.switches,
        bounced: front.bounced,
        ..seen
    }
}

fn life(
    setup: &Setup,
    world: &Rc<RefCell<World>>,
    front: &mut FrontEnd,
    stop: Stop,
    calm: bool,
    seen: &mut Seen,
) {
    let syncs_failed = simulation::syncs_failed();
    if !stop.is_orderly() {
        let instants = world.borrow_mut().chance.below(5000);
        simulation::panic_after(instants);
    }
    let served = std::panic::catch_unwind(AssertUnwindSafe(|| serve(setup, world, front, stop, calm)));
    match served {
        Err(payload) if stop.is_orderly() || !payload.is::<Panicked>() => {
            // No code waits for its engine any longer.
            drop(world.borrow_mut().server.take());
            std::panic::resume_unwind(payload);
        }
        _ => {}
    }
    if stop.is_orderly() {
        let World { common, machine, .. } = &mut *world.borrow_mut();
        let machine = machine.as_mut().unwrap();
        (0..machine.rings.len()).for_each(|index| machine.collect(index, common, true));
        machine.check();
        machine.rings.iter_mut().for_each(|ring| ring.served = false);
        if machine.is_idle() {
            common.now += 1;
            common.model.settle(common.now);
        }
    } else {
        kill(world, front, stop, seen);
    }
    world.borrow_mut().restart(syncs_failed);
}

fn serve(setup: &Setup, world: &Rc<RefCell<World>>, front: &mut FrontEnd, stop: Stop, calm: bool) {
    let (mut changing, mut faulty) = world.borrow_mut().begin(setup);
    if calm {
        let world = &mut *world.borrow_mut();
        (changing, faulty) = (false, false);
        (world.common.errors_allowed, world.common.slow) = (false, false);
        world.set_faults(Faults::default());
    }
    front.connect(world);
    let steps = 20 + world.borrow_mut().chance.below(150);
    for _ in 0..steps {
        world.borrow_mut().step();
        let happens = |one_in: u64| world.borrow_mut().chance.one_in(one_in);
        let (changes, faults, acts) = (changing && happens(20), faulty && happens(15), happens(25));
        if changes {
            change::make_one(world);
            front.changed(world);
        }
        if faults {
            change::make_faults(world);
        }
        if acts {
            front.act(world);
        }
    }
    if !stop.is_orderly() {
        return;
    }
    if faulty {
        world.borrow().disk().set_driver(&FaultSpec::default()).unwrap();
    }
    if stop == Stop::Idle {
        let world = &mut *world.borrow_mut();
        world.set_faults(Faults::default());
        let (server, machine) = (world.server.as_mut().unwrap(), world.machine.as_mut().unwrap());
        machine.drain(&mut world.common, &mut server.engine, TURNS_MAX);
    }
    if world.borrow_mut().chance.one_in(2) {
        front.stop_all(world);
    }
    front.disconnect();
    let Server { engine, .. } = world.borrow_mut().server.take().unwrap();
    engine.stop();
}

/// Kills the daemon, and also machine or image, as `stop` says.
fn kill(world: &Rc<RefCell<World>>, front: &mut FrontEnd, stop: Stop, seen: &mut Seen) {
    // If the daemon was not killed at an instant, it is killed now.
    simulation::kill();
    let server = world.borrow_mut().server.take();
    // Frees the memory of the daemon as it is: the engine first, because the disk would wait for it.
    if let Some(Server { disk, engine, .. }) = server {
        drop((engine, disk));
    }
    front.disconnect();
    set_meanwhile(world);
    front.killed(world);
    seen.kills += 1;
    if stop == Stop::Killed {
        return;
    }
    let survives = stop == Stop::ImageLoss;
    if !survives {
        front.forget();
        let World { chance, common, machine, .. } = &mut *world.borrow_mut();
        common.now += 1;
        common.model.settle(common.now);
        machine.as_mut().unwrap().replace(chance, common.now);
    }
    match stop {
        Stop::MachineKilled => seen.machine_kills += 1,
        Stop::ImageLoss => seen.image_losses += 1,
        _ => seen.power_losses += 1,
    }
    if stop != Stop::MachineKilled {
        let world = &mut *world.borrow_mut();
        world.cut_power();
        world.machine.as_ref().unwrap().begin_again(&mut world.common);
    }
}

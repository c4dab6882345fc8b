//! The daemons that serve a machine, one after the other: what each is like, how it stops, and what the
//! machine has left then.

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

/// How a daemon stops.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stop {
    /// In order, with nothing in flight.
    Idle,
    /// In order, with requests on their way.
    Loaded,
    /// Killed at any instant; front end and machine live on.
    Killed,
    /// The same, and what the image had not synced is lost.
    ImageLoss,
    /// The machine is killed as well.
    MachineKilled,
    /// A power loss of the host, with the machine on it.
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

/// The events of a seed.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Seen {
    pub requests: u64,
    pub errors: u64,
    pub faults: u64,
    pub kills: u64,
    pub image_losses: u64,
    pub machine_kills: u64,
    pub power_losses: u64,
    /// Requests that a killed daemon had in flight and that completed; those of descriptor 0.
    pub recovered: u64,
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
    /// Those that a hundred seeds have.
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

/// Lives through the fate of `seed`, over a kernel that may have a defect, or memory that a device with
/// one writes to.
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
            // Without a record nobody knows what a killed daemon had in flight.
            let has_record = machine.as_ref().unwrap().wiring.inflight;
            if has_record || stop.is_orderly() || stop == Stop::PowerLoss {
                stop
            } else {
                Stop::MachineKilled
            }
        };
        life(&setup, &world, &mut front, stop, false, &mut seen);
    }
    // Nothing goes wrong in the last one: all that is left completes.
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

/// One daemon, from its start until it stops.
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
            // Nobody waits for its engine any more.
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

/// The daemon is killed, and perhaps other things with it.
fn kill(world: &Rc<RefCell<World>>, front: &mut FrontEnd, stop: Stop, seen: &mut Seen) {
    // If no instant was the last one, it is now.
    simulation::kill();
    let server = world.borrow_mut().server.take();
    // Its memory is taken apart as it is: the engine first, so that nobody waits for it.
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

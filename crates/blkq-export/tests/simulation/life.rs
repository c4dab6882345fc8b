//! The lives of a device's servers, one after the other: what one of them is like, what goes
//! wrong in it, how it ends, and what is left then.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use blkq::drivers::fault::{Fault, FaultSpec};
use blkq::drivers::r#loop::{DirectIo, Dispatch, LoopDevice, LoopOptions};
use blkq::simulation::{self, Chance, Defect, Faults};
use blkq::{ClockMode, Disk, Driver, SchedulerKind, SimulatedEngine};
use blkq_export::nbd::{NbdExport, NbdOptions, simulated};

use super::change;
use super::client::{Client, Common, History};
use super::hits::KINDS;
use super::model::Model;

/// Turns within which everything must be answered once nothing goes wrong any more.
const TURNS_MAX: u64 = 200_000;

/// How the device is attached.
#[derive(Clone, Debug)]
struct Setup {
    /// What the image has in the beginning, and what it can grow to.
    sectors: u64,
    sectors_max: u64,
    options: LoopOptions,
    depth: u16,
    scheduler: SchedulerKind,
    merge: bool,
    iostats: bool,
    clock: ClockMode,
    requests_max: usize,
    buffered_bytes_max: usize,
}

impl Setup {
    fn new(image: PathBuf, chance: &mut Chance) -> Setup {
        let sectors = [64, 256, 1024][chance.below(3) as usize];
        let direct = chance.one_in(2);
        let mut options = LoopOptions::new(image);
        options.direct_io = if direct { DirectIo::On } else { DirectIo::Off };
        options.dispatch = if chance.one_in(4) { Dispatch::Serial } else { Dispatch::Concurrent };
        options.sector_size = Some([512, 512, 4096][chance.below(3) as usize]);
        Setup {
            sectors,
            sectors_max: sectors * 2,
            options,
            depth: [1, 2, 8, 128][chance.below(4) as usize],
            scheduler: SchedulerKind::ALL[chance.below(SchedulerKind::ALL.len() as u64) as usize],
            merge: !chance.one_in(4),
            iostats: !chance.one_in(4),
            clock: if chance.one_in(2) { ClockMode::Cached } else { ClockMode::Precise },
            requests_max: [1, 4, 256][chance.below(3) as usize],
            buffered_bytes_max: [4096, 1 << 26][chance.below(2) as usize],
        }
    }

    fn open(&self, faulty: bool) -> Server {
        let mut driver: Box<dyn Driver> = Box::new(LoopDevice::open(&self.options).unwrap());
        if faulty {
            driver = Box::new(Fault::new(driver, FaultSpec::default()).unwrap());
        }
        let disk: Arc<Disk> = Disk::builder(driver)
            .depth(self.depth)
            .scheduler(self.scheduler)
            .merge(self.merge)
            .iostats(self.iostats)
            .clock(self.clock)
            .build()
            .unwrap();
        let mut engine = SimulatedEngine::new(vec![(disk.clone(), 0)]).unwrap();
        let export = NbdExport { name: "disk".into(), description: String::new(), queue: 0 };
        let options = NbdOptions {
            exports: vec![export],
            requests_max: self.requests_max,
            buffered_bytes_max: self.buffered_bytes_max,
            // Clients are slow here, and time leaps.
            handshake_timeout_s: 1_000_000,
            transfer_timeout_s: 1_000_000,
            ..NbdOptions::default()
        };
        let source = engine.add_source(simulated::source(options)).unwrap();
        Server { disk, engine, source, clients: Vec::new() }
    }
}

fn faults(chance: &mut Chance) -> Faults {
    let mut rate = |one_in: u64| if chance.one_in(2) { one_in } else { 0 };
    Faults {
        short: rate(4),
        again: rate(6),
        read_error: rate(60),
        write_error: rate(60),
        sync_error: rate(20),
        allocate_error: rate(30),
        no_holes: rate(1) == 1,
        no_zero_range: rate(1) == 1,
        failed_sync_forgets: false,
    }
}

/// What a seed has seen.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Seen {
    pub replies: u64,
    pub errors: u64,
    pub faults: u64,
    pub kills: u64,
    pub power_cuts: u64,
    pub operations: u64,
    pub changes: u64,
    pub refused_changes: u64,
    pub digest: u64,
    /// Requests that the fault driver hit: error, short, torn, misdirect, corrupt, lose, stuck.
    pub hits: [u64; KINDS],
}

/// A server with its clients.
struct Server {
    disk: Arc<Disk>,
    engine: SimulatedEngine,
    source: u16,
    clients: Vec<Client>,
}

/// All that a seed is about, but for the kernel and the file.
pub struct World {
    pub chance: Chance,
    pub common: Common,
    pub sectors_max: u64,
    pub seen: Seen,
    faults: Faults,
    /// None between two lives.
    server: Option<Server>,
}

/// Lives through the fate of `seed`, over a kernel that may have a defect.
pub fn live(seed: u64, defect: Option<Defect>) -> Seen {
    let mut chance = Chance(seed);
    let image = std::env::temp_dir().join(format!(
        "blkq-simulation-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let setup = Setup::new(image.clone(), &mut chance);
    // Data everywhere, so that what block status says of it is right.
    std::fs::write(&image, vec![1; setup.sectors as usize * 512]).unwrap();
    simulation::begin(chance.word(), setup.sectors_max << 9, Faults::default());
    simulation::set_defect(defect);
    let lives = 1 + chance.below(4);
    let world = Rc::new(RefCell::new(World {
        chance,
        common: Common {
            model: Model::new(setup.sectors_max as usize),
            now: 1,
            block_sectors: u64::from(setup.options.sector_size.unwrap_or(512)) / 512,
            errors_allowed: false,
            read_only: History::new(0, false),
            sectors: History::new(0, setup.sectors),
            writes_seen: 0,
            slow: false,
            ruled: false,
            ghosts: Vec::new(),
            must_fail: BTreeSet::new(),
            astray: BTreeMap::new(),
            hits: [0; KINDS],
            replies: 0,
            errors: 0,
        },
        sectors_max: setup.sectors_max,
        seen: Seen::default(),
        faults: Faults::default(),
        server: None,
    }));
    let meanwhile = Rc::downgrade(&world);
    simulation::set_meanwhile(Some(Box::new(move || {
        meanwhile.upgrade().unwrap().borrow_mut().meanwhile();
    })));
    for _ in 0..lives {
        life(&setup, &world);
    }
    simulation::set_meanwhile(None);
    std::fs::remove_file(&image).unwrap();
    let (operations, digest) = simulation::trace();
    let world = world.borrow();
    Seen {
        replies: world.common.replies,
        errors: world.common.errors,
        hits: world.common.hits,
        faults: simulation::faults_seen(),
        operations,
        digest,
        ..world.seen
    }
}

/// One life of the server: from its start to its end, be that orderly or not.
fn life(setup: &Setup, world: &Rc<RefCell<World>>) {
    let syncs_failed = simulation::syncs_failed();
    let (changing, faulty) = world.borrow_mut().begin(setup);
    let steps = 20 + world.borrow_mut().chance.below(150);
    for _ in 0..steps {
        world.borrow_mut().step();
        if changing && world.borrow_mut().chance.one_in(20) {
            change::make_one(world);
        }
        if faulty && world.borrow_mut().chance.one_in(15) {
            change::make_faults(world);
        }
    }
    world.borrow_mut().end(syncs_failed);
}

impl World {
    /// A server begins its life. Whether it is to be changed in it, and whether the fault driver
    /// takes part.
    fn begin(&mut self, setup: &Setup) -> (bool, bool) {
        let (chance, common) = (&mut self.chance, &mut self.common);
        let calm = chance.one_in(4);
        common.errors_allowed = !calm;
        common.now += 1;
        let sectors = std::fs::metadata(&setup.options.path).unwrap().len() >> 9;
        common.sectors = History::new(common.now, sectors);
        common.read_only = History::new(common.now, false);
        let (changing, faulty) = (chance.one_in(2), chance.one_in(2));
        common.slow = faulty;
        common.ruled = false;
        common.ghosts.clear();
        common.must_fail.clear();
        common.astray.clear();
        let faults = if calm { Faults::default() } else { faults(chance) };
        self.set_faults(Faults {
            failed_sync_forgets: !calm && setup.options.direct_io == DirectIo::Off,
            ..faults
        });
        self.server = Some(setup.open(faulty));
        (changing, faulty)
    }

    fn set_faults(&mut self, faults: Faults) {
        self.faults = faults;
        simulation::set_faults(faults);
    }

    /// I/O goes through the page cache from now on, or around it.
    pub fn set_buffered(&mut self, buffered: bool) {
        let calm = !self.common.errors_allowed;
        self.set_faults(Faults { failed_sync_forgets: !calm && buffered, ..self.faults });
    }

    pub fn disk(&self) -> Arc<Disk> {
        self.server.as_ref().unwrap().disk.clone()
    }

    /// A client does something, and the server perhaps.
    fn step(&mut self) {
        let World { chance, common, server, .. } = self;
        let Some(Server { engine, source, clients, .. }) = server else { return };
        let source = *source;
        if clients.len() < 3 && chance.one_in(6) || clients.is_empty() {
            let (client, socket) = Client::new(chance);
            engine.handle().send(source, simulated::client(socket));
            clients.push(client);
        }
        let which = chance.below(clients.len() as u64) as usize;
        clients[which].act(chance, common);
        assert!(!clients[which].closed, "the server hung up");
        if chance.one_in(60) {
            // In the middle of whatever it was about.
            common.ghosts.extend(clients.swap_remove(which).reads());
        }
        for _ in 0..chance.below(4) {
            engine.turn();
            common.note(simulation::take_noted(), clients);
        }
        if chance.one_in(200) {
            simulation::pass(chance.below(9_000_000_000));
        }
    }

    /// What goes on while a change waits for requests in flight.
    fn meanwhile(&mut self) {
        self.step();
        if self.chance.one_in(4) {
            simulation::pass(self.chance.below(100_000_000));
        }
    }

    /// The server ends, one way or another, and what is left is looked at. So many syncs had
    /// failed before it began.
    fn end(&mut self, syncs_failed: u64) {
        self.common.check_read_only();
        let World { chance, common, seen, server, .. } = self;
        let Server { disk, mut engine, mut clients, .. } = server.take().unwrap();
        let how = chance.below(4);
        // In order it ends under the faults, too, which stop nothing for ever.
        if common.slow && (how != 1 || chance.one_in(2)) {
            disk.set("fault", "none").unwrap();
            common.ruled = false;
        }
        match how {
            0 => {
                drain(&mut engine, &mut clients, chance, common);
                drop(clients);
                engine.end();
            }
            1 => {
                // With requests on their way.
                engine.end();
                common.note(simulation::take_noted(), &mut clients);
                clients.iter_mut().for_each(|client| {
                    while !client.closed {
                        client.transfer(chance, common)
                    }
                });
            }
            _ => {
                simulation::kill();
                drop(clients);
                engine.end();
                common.note(simulation::take_noted(), &mut []);
                seen.kills += 1;
                if how == 3 {
                    simulation::cut_power();
                    seen.power_cuts += 1;
                    common.now += 1;
                    common.model.settle(common.now);
                    check_all(common, |model, sector, bytes| model.check_after_power_cut(sector, bytes));
                }
            }
        }
        simulation::restart();
        common.now += 1;
        common.model.settle(common.now);
        if simulation::syncs_failed() > syncs_failed {
            common.model.doubt();
        }
        common.now += 1;
        let now = common.now;
        check_all(common, |model, sector, bytes| model.check_read(sector, now, bytes));
    }
}

/// Nothing goes wrong any more: every request is answered.
fn drain(engine: &mut SimulatedEngine, clients: &mut [Client], chance: &mut Chance, common: &mut Common) {
    simulation::set_faults(Faults::default());
    for _ in 0..TURNS_MAX {
        if clients.iter().all(Client::is_idle) {
            return;
        }
        engine.turn();
        common.note(simulation::take_noted(), clients);
        for client in clients.iter_mut() {
            client.transfer(chance, common);
            assert!(!client.closed, "the server hung up");
        }
    }
    panic!("requests are not answered");
}

fn check_all(common: &mut Common, check: impl Fn(&mut Model, u64, &[u8]) -> Result<(), String>) {
    simulation::with_file(|file| {
        for sector in 0..common.model.sectors() {
            if let Err(wrong) = check(&mut common.model, sector, file.sector(sector as usize)) {
                panic!("the file holds what cannot be: {wrong}");
            }
        }
    });
}

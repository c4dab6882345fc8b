//! The lives of a device's servers, one after another: the set-up, the faults, the stop, and the checks of the file.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use blkq::engine::SimulatedEngine;
use blkq::random::Random;
use blkq::{ClockMode, Disk, Driver, SchedulerKind, SourceId};
use blkq_drivers::fault::{Fault, FaultSpec};
use blkq_drivers::r#loop::{DirectIo, Dispatch, DriverOptions, LoopDevice};
use blkq_export::nbd::{NbdExport, NbdOptions, simulated};
use blkq_simulation as simulation;
use blkq_simulation::{Defect, Faults, Panicked, take_injections};

use super::change;
use super::client::{Client, Common, History};
use super::exchange;
use super::hits::KINDS;
use super::holds::{Holding, Resumer};
use super::limits::Limited;
use super::model::Model;
use super::sockets::{close_sockets, has_ghosts, limit_send_buffers};
use super::vhost::Machine;
use super::worlds::Worlds;

/// A way to stop, in addition to the four random ways.
const PANIC: u64 = 4;
/// Number of turns within which all requests must be answered once there are no faults.
pub const TURNS_MAX: u64 = 200_000;

/// Timeout of transfers in a world with clients that do not read.
const SILENCE_TIMEOUT_S: u64 = 600;
/// How long an orderly stop may take while no storage is slow, whatever clients do.
const STOP_NS_MAX: u64 = 5 * NS_PER_SECOND;
const NS_PER_SECOND: u64 = 1_000_000_000;

/// The export of each queue.
const EXPORTS: [&str; 2] = ["disk", "second"];

#[derive(Clone, Debug)]
pub struct Setup {
    /// Initial size of the image.
    sectors: u64,
    sectors_max: u64,
    options: DriverOptions,
    depth: u16,
    scheduler: SchedulerKind,
    merge: bool,
    iostats: bool,
    clock: ClockMode,
    requests_max: usize,
    buffered_bytes_max: usize,
}

impl Setup {
    fn new(image: PathBuf, chance: &mut Random) -> Setup {
        let sectors = [64, 256, 1024][chance.below(3) as usize];
        let direct = chance.one_in(2);
        let mut options = DriverOptions::new(image);
        options.direct_io = if direct { DirectIo::On } else { DirectIo::Off };
        options.dispatch = if chance.one_in(4) { Dispatch::Serial } else { Dispatch::Concurrent };
        options.logical_block_bytes = Some([512, 512, 4096][chance.below(3) as usize]);
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

    fn open(&self, faulty: bool, worlds: Worlds) -> (Arc<Disk>, SimulatedEngine) {
        let mut driver: Box<dyn Driver> = Box::new(LoopDevice::open(&self.options).unwrap());
        if faulty {
            driver = Box::new(Fault::new(driver.into(), FaultSpec::default()).unwrap());
        }
        let disk: Arc<Disk> = Disk::builder(driver)
            .queues(worlds.queues)
            .shared_tags(worlds.shared_tags)
            .depth(self.depth)
            .scheduler(self.scheduler)
            .merge(self.merge)
            .iostats(self.iostats)
            .clock(self.clock)
            .build()
            .unwrap();
        let queues = (0..worlds.queues).map(|queue| (disk.clone(), queue)).collect();
        (disk, SimulatedEngine::new(queues).unwrap())
    }

    pub fn serve(&self, engine: &mut SimulatedEngine, worlds: Worlds) -> SourceId {
        // Clients are slow here, and the clock jumps.
        let timeout_s = if worlds.silence { SILENCE_TIMEOUT_S } else { 1_000_000 };
        let export =
            |queue: usize| NbdExport { name: EXPORTS[queue].into(), description: String::new(), queue };
        let options = NbdOptions {
            exports: (0..worlds.queues).map(export).collect(),
            requests_max: self.requests_max,
            buffered_bytes_max: self.buffered_bytes_max,
            handshake_timeout_s: timeout_s,
            transfer_timeout_s: timeout_s,
            ..NbdOptions::default()
        };
        engine.add_source(simulated::source(options)).unwrap()
    }
}

fn faults(chance: &mut Random) -> Faults {
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

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Seen {
    pub replies: u64,
    pub errors: u64,
    pub faults: u64,
    pub kills: u64,
    pub power_cuts: u64,
    pub panics: u64,
    pub lost_sizes: u64,
    pub triggered: u64,
    pub operations: u64,
    pub changes: u64,
    pub refused_changes: u64,
    /// Changes with a freeze that began while requests waited for a limit.
    pub limited_freezes: u64,
    pub exchanges: u64,
    pub admitted: u64,
    pub throttled: u64,
    /// Limits that a search of the ceiling has set.
    pub found: u64,
    pub held: u64,
    pub reissued: u64,
    pub failed: u64,
    pub held_with: [bool; SchedulerKind::ALL.len()],
    /// Clients that have stopped reading.
    pub silent: u64,
    /// Orderly stops while such clients had unanswered requests.
    pub silent_stops: u64,
    pub digest: u64,
    /// Requests that the fault driver hit, by effect: error, short, torn, misdirect, corrupt, lose, stuck.
    pub hits: [u64; KINDS],
}

pub struct Server {
    pub disk: Arc<Disk>,
    pub engine: SimulatedEngine,
    /// The driver that the disk was made with.
    pub first_driver: Arc<dyn Driver>,
    /// The NBD server; `None` if the client is a virtual machine.
    source: Option<SourceId>,
    clients: Vec<Client>,
    /// The server's ends of the clients' sockets: descriptor and inode.
    sockets: Vec<(RawFd, u64)>,
}

/// The state of a seed, without the kernel and the file.
pub struct World {
    pub chance: Random,
    pub common: Common,
    pub sectors_max: u64,
    pub seen: Seen,
    faults: Faults,
    pub worlds: Worlds,
    /// Random numbers for the optional parts of a world, so that these do not change the other choices of a seed.
    pub extra: Random,
    image: PathBuf,
    /// `None` between two lives of the device.
    pub server: Option<Server>,
    /// The only client, if the device belongs to a virtual machine.
    pub machine: Option<Machine>,
    pub limited: Option<Limited>,
    /// Number of steps for which the thread has waited for one event.
    pub waited: u64,
}

/// Runs `seed` on a kernel that may have a defect.
pub fn live(seed: u64, defect: Option<Defect>, worlds: Worlds) -> Seen {
    let (setup, world) = begin(seed, defect, worlds);
    let lives = 1 + world.borrow_mut().chance.below(4);
    for _ in 0..lives {
        life(&setup, &world);
    }
    finish(&world)
}

pub fn begin(seed: u64, defect: Option<Defect>, worlds: Worlds) -> (Setup, Rc<RefCell<World>>) {
    let mut chance = Random::new(seed);
    let image = std::env::temp_dir().join(format!(
        "blkq-simulation-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let setup = Setup::new(image.clone(), &mut chance);
    // The file has data everywhere, so that block status reports no holes.
    std::fs::write(&image, vec![1; setup.sectors as usize * 512]).unwrap();
    simulation::begin(chance.word(), setup.sectors_max << 9, Faults::default());
    simulation::set_defect(defect);
    simulation::set_durable_size(setup.sectors << 9);
    let world = Rc::new(RefCell::new(World {
        chance,
        common: Common {
            model: Model::new(setup.sectors_max as usize),
            now: 1,
            block_sectors: u64::from(setup.options.logical_block_bytes.unwrap_or(512)) / 512,
            errors_allowed: false,
            stops: false,
            read_only: History::new(0, false),
            sectors: History::new(0, setup.sectors),
            writes_seen: 0,
            slow: false,
            exchanges: worlds.exchanges,
            has_rules: false,
            ghosts: Vec::new(),
            abandoned: 0,
            must_fail: BTreeSet::new(),
            astray: BTreeMap::new(),
            hits: [0; KINDS],
            holding: worlds.holds.then(|| Holding::new(seed)),
            triggered: 0,
            trigger_removed_ns: Some(0),
            replies: 0,
            errors: 0,
        },
        sectors_max: setup.sectors_max,
        seen: Seen::default(),
        faults: Faults::default(),
        worlds,
        extra: Random::new(seed.rotate_left(32)),
        image,
        server: None,
        machine: None,
        limited: worlds.limits.then(|| Limited::new(seed)),
        waited: 0,
    }));
    set_meanwhile(&world);
    (setup, world)
}

/// Runs the world while its thread waits.
pub fn set_meanwhile(world: &Rc<RefCell<World>>) {
    let meanwhile = Rc::downgrade(world);
    simulation::set_meanwhile(Some(Box::new(move || {
        meanwhile.upgrade().unwrap().borrow_mut().meanwhile();
    })));
}

/// Removes the files of the world, and returns its counts.
pub fn finish(world: &Rc<RefCell<World>>) -> Seen {
    simulation::set_meanwhile(None);
    let world = world.borrow();
    std::fs::remove_file(&world.image).unwrap();
    if world.common.trigger_removed_ns.is_none() {
        std::fs::remove_file(world.image.with_extension("trigger")).unwrap();
    }
    let (operations, digest) = simulation::trace();
    let holding = world.common.holding.as_ref();
    Seen {
        replies: world.common.replies,
        errors: world.common.errors,
        hits: world.common.hits,
        triggered: world.common.triggered,
        admitted: world.limited.as_ref().map_or(0, |limited| limited.admitted),
        throttled: world.limited.as_ref().map_or(0, |limited| limited.throttled),
        found: world.limited.as_ref().map_or(0, |limited| limited.found),
        held: holding.map_or(0, |holding| holding.held),
        reissued: holding.map_or(0, |holding| holding.reissued),
        failed: holding.map_or(0, |holding| holding.failed),
        held_with: holding.map_or_else(Default::default, |holding| holding.held_with),
        faults: simulation::faults_seen(),
        operations,
        digest,
        ..world.seen
    }
}

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
        exchange::by_chance(world);
        world.borrow_mut().change_limits();
    }
    // The size changes shortly before a possible power failure, so that no sync makes it durable.
    let grows = |world: &mut World| world.worlds.loses_size && world.extra.one_in(2);
    if grows(&mut world.borrow_mut()) {
        change::grow(world);
    }
    world.borrow_mut().stop(syncs_failed);
}

impl World {
    pub fn begin(&mut self, setup: &Setup) -> (bool, bool) {
        let (chance, common) = (&mut self.chance, &mut self.common);
        let calm = chance.one_in(4);
        common.errors_allowed = !calm;
        common.stops = false;
        common.now += 1;
        let sectors = std::fs::metadata(&setup.options.path).unwrap().len() >> 9;
        common.sectors = History::new(common.now, sectors);
        common.read_only = History::new(common.now, false);
        let (changing, faulty) = (chance.one_in(2), chance.one_in(2));
        common.slow = faulty;
        common.has_rules = false;
        common.ghosts.clear();
        common.abandoned = 0;
        common.must_fail.clear();
        common.astray.clear();
        let faults = if calm { Faults::default() } else { faults(chance) };
        self.set_faults(Faults {
            failed_sync_forgets: !calm && setup.options.direct_io == DirectIo::Off,
            ..faults
        });
        let (disk, mut engine) = setup.open(faulty, self.worlds);
        let source = self.machine.is_none().then(|| setup.serve(&mut engine, self.worlds));
        if let Some(limited) = &mut self.limited {
            limited.begin(&disk);
        }
        if let Some(holding) = &mut self.common.holding {
            holding.begin(&disk, self.common.now);
        }
        let first_driver = disk.driver();
        let (clients, sockets) = (Vec::new(), Vec::new());
        self.server = Some(Server { disk, engine, first_driver, source, clients, sockets });
        (changing, faulty)
    }

    pub fn set_faults(&mut self, faults: Faults) {
        self.faults = faults;
        simulation::set_faults(faults);
    }

    /// Changes the limits at random; requests continue meanwhile.
    fn change_limits(&mut self) {
        let World { limited, server, seen, .. } = self;
        if let (Some(limited), Some(server)) = (limited, server) {
            seen.changes += u64::from(limited.change(&server.disk));
        }
    }

    /// Records whether I/O uses the page cache from now on.
    pub fn set_buffered(&mut self, buffered: bool) {
        let calm = !self.common.errors_allowed;
        self.set_faults(Faults { failed_sync_forgets: !calm && buffered, ..self.faults });
    }

    pub fn disk(&self) -> Arc<Disk> {
        self.server.as_ref().unwrap().disk.clone()
    }

    /// The requests in flight of the device, or an upper bound if the device does not count them.
    pub fn requests_in_flight(&self) -> u64 {
        let Some(Server { disk, clients, .. }) = &self.server else { return 0 };
        let of_clients = clients.iter().map(Client::outstanding).sum::<usize>() + self.common.abandoned;
        disk.stats().in_flight.iter().sum::<u64>().max(of_clients as u64)
    }

    /// Path of the trigger file of rules, which is created and removed at random.
    pub fn trigger(&self) -> Option<PathBuf> {
        self.worlds.triggers.then(|| self.image.with_extension("trigger"))
    }

    fn toggle_trigger(&mut self) {
        let Some(file) = self.trigger().filter(|_| self.extra.one_in(30)) else { return };
        self.common.trigger_removed_ns = match self.common.trigger_removed_ns {
            Some(_) => {
                std::fs::write(file, "").unwrap();
                None
            }
            None => {
                std::fs::remove_file(file).unwrap();
                Some(simulation::time_ns())
            }
        };
    }

    /// Lets a client act, and then the engine.
    pub fn step(&mut self) {
        self.waited = 0;
        self.toggle_trigger();
        let World { chance, common, server, extra, worlds, machine, limited, seen, .. } = self;
        let Some(Server { disk, engine, source, clients, sockets, .. }) = server else { return };
        let Some(source) = *source else {
            return machine.as_mut().unwrap().step(chance, common, engine);
        };
        let readers = clients.iter().filter(|client| !client.silent).count();
        if readers < 3 && chance.one_in(6) || readers == 0 {
            let export = if worlds.queues > 1 { EXPORTS[extra.below(2) as usize] } else { "" };
            let (client, socket) = Client::new(chance, export);
            let socket = File::from(socket);
            sockets.push((socket.as_raw_fd(), socket.metadata().unwrap().ino()));
            engine.handle().send(source, simulated::client(socket.into()));
            clients.push(client);
        }
        let which = chance.below(clients.len() as u64) as usize;
        clients[which].act(chance, common);
        if worlds.silence && !clients[which].silent && extra.one_in(20) {
            clients[which].silent = true;
            seen.silent += 1;
            limit_send_buffers(sockets);
        }
        let closed = clients[which].closed;
        assert!(!closed || clients[which].silent, "the server closed the connection");
        if chance.one_in(60) || closed {
            // The client disconnects with requests in flight.
            let client = clients.swap_remove(which);
            common.ghosts.extend(client.reads());
            common.abandoned += client.outstanding();
        }
        common.step_held(disk);
        for _ in 0..chance.below(4) {
            engine.turn_as_woken();
            common.note(take_injections(), clients);
            if let Some(limited) = limited {
                limited.note(disk);
            }
            common.note_held(disk, || has_ghosts(sockets, clients.len()));
        }
        if chance.one_in(200) {
            simulation::pass(chance.below(9_000_000_000));
        }
    }

    /// Runs the world while a change, or a ring that stops, waits for requests in flight.
    fn meanwhile(&mut self) {
        let waited = self.waited + 1;
        assert!(waited < TURNS_MAX, "the only thread waits too long");
        self.step();
        self.waited = waited;
        if self.chance.one_in(4) {
            simulation::pass(self.chance.below(100_000_000));
        }
    }

    /// Stops the server in a random way, and checks the file. `syncs_failed` is the number of failed syncs before
    /// this life.
    fn stop(&mut self, syncs_failed: u64) {
        self.common.check_read_only();
        let panicked = self.extra.one_in(self.worlds.panics);
        if panicked {
            self.panic();
        }
        let World { chance, common, seen, server, extra, limited, .. } = self;
        let Server { disk, mut engine, mut clients, mut sockets, .. } = server.take().unwrap();
        let how = if panicked { PANIC } else { chance.below(4) };
        if let Some(limited) = limited {
            // A device that is killed leaves its slot in the group as it is.
            limited.stop(&disk, how >= 2);
        }
        if let (Some(holding), 1) = (&mut common.holding, how) {
            holding.stop(common.now);
        }
        // An orderly stop also works with faults, which block nothing for ever.
        if common.slow && !panicked && (how != 1 || chance.one_in(2)) {
            disk.set_driver(&FaultSpec::default()).unwrap();
            common.has_rules = false;
        }
        match how {
            0 => {
                drain(&disk, &mut engine, &mut clients, &mut sockets, chance, common, limited);
                drop(clients);
                engine.stop();
                common.note(take_injections(), &mut []);
            }
            1 => {
                // Stops with requests in flight.
                let waits = |client: &Client| client.silent && client.outstanding() > 0;
                seen.silent_stops += u64::from(clients.iter().any(waits));
                common.stops = true;
                let begun_ns = simulation::time_ns();
                engine.stop();
                let took_ns = simulation::time_ns() - begun_ns;
                let is_slow = common.has_rules || limited.is_some();
                assert!(is_slow || took_ns <= STOP_NS_MAX, "an orderly stop took {took_ns} ns");
                common.note(take_injections(), &mut clients);
                clients.iter_mut().for_each(|client| client.read_rest(chance, common));
            }
            _ => {
                if panicked {
                    // The kernel side has stopped already. The memory of the process is freed as it is.
                    common.note(take_injections(), &mut clients);
                    drop((clients, engine));
                    close_sockets(sockets);
                    seen.panics += 1;
                } else {
                    simulation::kill();
                    drop(clients);
                    engine.stop();
                    common.note(take_injections(), &mut []);
                    seen.kills += 1;
                }
                drop(disk);
                if how == 3 || panicked && extra.one_in(2) {
                    common.now += 1;
                    common.model.settle(common.now);
                    self.cut_power();
                }
            }
        }
        self.common.now += 1;
        self.common.model.settle(self.common.now);
        self.restart(syncs_failed);
    }

    /// Simulates a power failure, and checks that the image contains what it may contain afterwards.
    pub fn cut_power(&mut self) {
        simulation::cut_power();
        self.seen.power_cuts += 1;
        if self.worlds.loses_size {
            let file = std::fs::File::options().write(true).open(&self.image).unwrap();
            let before = file.metadata().unwrap().len();
            let left = simulation::cut_size(before);
            self.seen.lost_sizes += u64::from(left < before);
            file.set_len(left).unwrap();
        }
        check_all(&mut self.common, |model, sector, bytes| model.check_after_power_cut(sector, bytes));
    }

    /// Starts a new process after the old one has exited. `syncs_failed` is the number of failed syncs before this life.
    pub fn restart(&mut self, syncs_failed: u64) {
        let common = &mut self.common;
        simulation::restart();
        if simulation::syncs_failed() > syncs_failed {
            common.model.doubt();
        }
        common.now += 1;
        let now = common.now;
        check_all(common, |model, sector, bytes| {
            model.check_read(sector, now, bytes).map_err(|wrong| wrong.to_string())
        });
    }
}

impl World {
    /// Runs until the engine panics, at a random instant of a turn.
    fn panic(&mut self) {
        simulation::panic_after(self.extra.below(400));
        loop {
            let step = AssertUnwindSafe(|| self.step());
            if let Err(payload) = std::panic::catch_unwind(step) {
                match payload.is::<Panicked>() {
                    true => return,
                    false => std::panic::resume_unwind(payload),
                }
            }
        }
    }
}

/// Runs without faults until every request is answered.
fn drain(
    disk: &Arc<Disk>,
    engine: &mut SimulatedEngine,
    clients: &mut [Client],
    sockets: &mut Vec<(RawFd, u64)>,
    chance: &mut Random,
    common: &mut Common,
    limited: &mut Option<Limited>,
) {
    simulation::set_faults(Faults::default());
    let mut resumer = Resumer::default();
    let begun_ns = simulation::time_ns();
    for _ in 0..TURNS_MAX {
        if clients.iter().all(|client| client.silent || client.is_idle()) && disk.held() == 0 {
            return;
        }
        if common.holding.is_some() {
            resumer.turn(disk, engine);
        }
        engine.turn();
        common.note(take_injections(), clients);
        common.note_held(disk, || has_ghosts(sockets, clients.len()));
        if let Some(limited) = limited {
            limited.note(disk);
            limited.check_waits_have_a_reason(disk);
        }
        for client in clients.iter_mut() {
            client.transfer(chance, common);
            assert!(!client.closed || client.silent, "the server closed the connection");
        }
        let is_late = simulation::time_ns() - begun_ns > SILENCE_TIMEOUT_S * NS_PER_SECOND / 2;
        assert!(
            !is_late || clients.iter().all(|client| !client.silent),
            "clients that do not read delay others"
        );
    }
    panic!("requests are not answered");
}

fn check_all(common: &mut Common, check: impl Fn(&mut Model, u64, &[u8]) -> Result<(), String>) {
    simulation::with_file(|file| {
        for sector in 0..common.model.sectors() {
            if let Err(wrong) = check(&mut common.model, sector, file.sector(sector as usize)) {
                panic!("the file contains impossible data: {wrong}");
            }
        }
    });
}

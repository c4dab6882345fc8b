//! The whole system in a simulated world: the block layer, the loop driver, the engine and
//! the NBD server as they run in production, on one thread, over a kernel and a file that
//! fail, lose power and take their time as a seed wants it, with clients that check every
//! read and every promise of docs/durability.md.
//!
//! Built with `--cfg simulation`; `lab/simulate` runs it. `BLKQ_SEED` runs one seed and says
//! what happens, `BLKQ_SEEDS` and `BLKQ_FIRST_SEED` run many.
#![cfg(simulation)]
#![allow(clippy::unwrap_used, reason = "a test")]

mod client;
mod model;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use blkq::drivers::r#loop::{DirectIo, Dispatch, LoopDevice, LoopOptions};
use blkq::simulation::{self, Chance, Defect, Faults};
use blkq::{ClockMode, Disk, SchedulerKind, SimulatedEngine};
use blkq_export::nbd::{NbdExport, NbdOptions, simulated};

use client::{Client, Common};
use model::Model;

/// Turns within which everything must be answered once nothing goes wrong any more.
const TURNS_MAX: u64 = 200_000;

/// How the device is attached.
#[derive(Clone, Debug)]
struct Setup {
    sectors: u64,
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

    fn open(&self) -> (SimulatedEngine, u16) {
        let driver = LoopDevice::open(&self.options).unwrap();
        let disk: Arc<Disk> = Disk::builder(Box::new(driver))
            .depth(self.depth)
            .scheduler(self.scheduler)
            .merge(self.merge)
            .iostats(self.iostats)
            .clock(self.clock)
            .build()
            .unwrap();
        let mut engine = SimulatedEngine::new(vec![(disk, 0)]).unwrap();
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
        (engine, source)
    }
}

fn faults(chance: &mut Chance, buffered: bool) -> Faults {
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
        failed_sync_forgets: buffered,
    }
}

/// What a seed has seen.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Seen {
    replies: u64,
    errors: u64,
    faults: u64,
    kills: u64,
    power_cuts: u64,
    operations: u64,
    digest: u64,
}

/// Lives through the fate of `seed`, over a kernel that may have a defect.
fn live(seed: u64, defect: Option<Defect>) -> Seen {
    let mut chance = Chance(seed);
    let image = std::env::temp_dir().join(format!(
        "blkq-simulation-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let setup = Setup::new(image.clone(), &mut chance);
    // Data everywhere, so that what block status says of it is right.
    std::fs::write(&image, vec![1; setup.sectors as usize * 512]).unwrap();
    simulation::begin(chance.word(), setup.sectors << 9, Faults::default());
    simulation::set_defect(defect);
    let block_sectors = u64::from(setup.options.sector_size.unwrap_or(512)) / 512;
    let mut common = Common {
        model: Model::new(setup.sectors as usize),
        now: 1,
        sectors: setup.sectors,
        block_sectors,
        errors_allowed: false,
        replies: 0,
        errors: 0,
    };
    let mut seen = Seen::default();
    for _ in 0..1 + chance.below(4) {
        life(&setup, &mut chance, &mut common, &mut seen);
    }
    std::fs::remove_file(&image).unwrap();
    let (operations, digest) = simulation::trace();
    Seen {
        replies: common.replies,
        errors: common.errors,
        faults: simulation::faults_seen(),
        operations,
        digest,
        ..seen
    }
}

/// One life of the server: from its start to its end, be that orderly or not.
fn life(setup: &Setup, chance: &mut Chance, common: &mut Common, seen: &mut Seen) {
    let calm = chance.one_in(4);
    let buffered = setup.options.direct_io == DirectIo::Off;
    simulation::set_faults(if calm { Faults::default() } else { faults(chance, buffered) });
    common.errors_allowed = !calm;
    let syncs_failed = simulation::syncs_failed();
    let (mut engine, source) = setup.open();
    let mut clients: Vec<Client> = Vec::new();
    for _ in 0..20 + chance.below(150) {
        if clients.len() < 3 && chance.one_in(6) || clients.is_empty() {
            let (client, server) = Client::new(chance);
            engine.handle().send(source, simulated::client(server));
            clients.push(client);
        }
        let which = chance.below(clients.len() as u64) as usize;
        clients[which].act(chance, common);
        assert!(!clients[which].closed, "the server hung up");
        if chance.one_in(60) {
            // In the middle of whatever it was about.
            clients.swap_remove(which);
        }
        for _ in 0..chance.below(4) {
            engine.turn();
        }
        if chance.one_in(200) {
            simulation::pass(chance.below(9_000_000_000));
        }
    }
    match chance.below(4) {
        0 => {
            drain(&mut engine, &mut clients, chance, common);
            drop(clients);
            engine.end();
        }
        1 => {
            // In order, with requests on their way.
            engine.end();
            clients.iter_mut().for_each(|client| {
                while !client.closed {
                    client.transfer(chance, common)
                }
            });
        }
        how => {
            simulation::kill();
            drop(clients);
            engine.end();
            simulation::restart();
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
    common.now += 1;
    common.model.settle(common.now);
    if simulation::syncs_failed() > syncs_failed {
        common.model.doubt();
    }
    common.now += 1;
    let now = common.now;
    check_all(common, |model, sector, bytes| model.check_read(sector, now, bytes));
}

/// Nothing goes wrong any more: every request is answered.
fn drain(engine: &mut SimulatedEngine, clients: &mut [Client], chance: &mut Chance, common: &mut Common) {
    simulation::set_faults(Faults::default());
    for _ in 0..TURNS_MAX {
        if clients.iter().all(Client::is_idle) {
            return;
        }
        engine.turn();
        for client in clients.iter_mut() {
            client.transfer(chance, common);
            assert!(!client.closed, "the server hung up");
        }
    }
    panic!("requests are not answered");
}

fn check_all(common: &mut Common, check: impl Fn(&mut Model, u64, &[u8]) -> Result<(), String>) {
    for sector in 0..common.sectors {
        let bytes = simulation::with_file(|file| file.sector(sector as usize).to_vec());
        if let Err(wrong) = check(&mut common.model, sector, &bytes) {
            panic!("the file holds what cannot be: {wrong}");
        }
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}: not a number")))
}

/// Runs a seed so that a failure names it.
fn run(seed: u64) -> Seen {
    let named = format!("seed {seed}");
    let thread = std::thread::Builder::new().name(named.clone()).spawn(move || live(seed, None)).unwrap();
    thread.join().unwrap_or_else(|_| panic!("{named} failed; BLKQ_SEED={seed} lab/simulate runs it again"))
}

#[test]
fn seeds() {
    if let Ok(seed) = std::env::var("BLKQ_SEED") {
        let seen = live(seed.parse().unwrap(), None);
        return println!("seed {seed}: {seen:?}");
    }
    let (first, count) = (number("BLKQ_FIRST_SEED", 0), number("BLKQ_SEEDS", 300));
    let begin = Instant::now();
    let mut all = Seen::default();
    for seed in first..first + count {
        let seen = run(seed);
        all.replies += seen.replies;
        all.errors += seen.errors;
        all.faults += seen.faults;
        all.kills += seen.kills;
        all.power_cuts += seen.power_cuts;
        all.operations += seen.operations;
    }
    let seconds = begin.elapsed().as_secs_f64();
    println!("{count} seeds from {first} in {seconds:.1} s: {all:?}");
    assert!(count < 100 || all.power_cuts > 0 && all.kills > 0 && all.faults > 0 && all.errors > 0);
}

/// Seeds that found defects.
///
/// - 50: after a failed fdatasync of the page cache the next one knew nothing of what was lost, and
///   a flush was answered well.
const FOUND: [u64; 1] = [50];

#[test]
fn seeds_that_found_defects() {
    FOUND.into_iter().for_each(|seed| _ = run(seed));
}

#[test]
fn a_seed_has_one_fate() {
    for seed in [1, 2, 3, 1 << 40] {
        assert_eq!(run(seed), run(seed));
    }
}

/// What the clients or the model say of each defect, and within how many seeds one of them does.
const NOTICED: [(Defect, &[&str], u64); 7] = [
    (Defect::LostSync, &["the file holds what cannot be"], 32),
    (Defect::LostWrite, &["a read brought what cannot be", "the file holds what cannot be"], 32),
    (Defect::MisplacedWrite, &["a read brought what cannot be", "the file holds what cannot be"], 32),
    (Defect::StaleRead, &["a read brought what cannot be"], 32),
    (Defect::IgnoredDsync, &["the file holds what cannot be"], 64),
    (Defect::EndedTwice, &["the driver completed tag"], 32),
    (Defect::NeverEnded, &["requests are not answered", "the engine does not end"], 32),
];

/// The first of `seeds` that fails with this defect, and what it says.
fn first_that_fails(defect: Defect, seeds: Range<u64>) -> Option<(u64, String)> {
    seeds.into_iter().find_map(|seed| {
        let thread = std::thread::Builder::new().name(QUIET.to_owned());
        let failed = thread.spawn(move || live(seed, Some(defect))).unwrap().join().err()?;
        let said = failed.downcast_ref::<String>().cloned();
        Some((seed, said.or_else(|| failed.downcast_ref::<&str>().map(|said| (*said).to_owned()))?))
    })
}

/// Threads of this name fail on purpose, and are not to be heard.
const QUIET: &str = "has a defect";

#[test]
fn defects_are_noticed() {
    let loud = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().name() != Some(QUIET) {
            loud(panic);
        }
    }));
    for (defect, expected, within) in NOTICED {
        let (seed, said) = first_that_fails(defect, 0..within)
            .unwrap_or_else(|| panic!("{defect:?} is not noticed in {within} seeds"));
        assert!(expected.iter().any(|begin| said.starts_with(begin)), "{defect:?}, seed {seed}: {said}");
        println!("{defect:?} is noticed by seed {seed}: {}", said.split(';').next().unwrap_or(&said));
    }
}

//! Tests the whole system in a simulated world: the block layer, the loop driver, the engine and the NBD server of
//! production run on one thread, on a simulated kernel and file. A seed determines faults, power failures and timing.
//! Clients check every read, and every guarantee of docs/durability.md.
//!
//! The tests are built with `--cfg simulation`; `lab/simulate` runs them. `BLKQ_SEED` runs one seed in each world and prints
//! its events; `BLKQ_SEEDS` and `BLKQ_FIRST_SEED` run a range. known_seeds.txt lists the seeds that failed once.
#![cfg(simulation)]
#![allow(clippy::unwrap_used, reason = "a test")]

mod change;
mod client;
mod exchange;
mod hits;
mod holds;
mod life;
mod limits;
mod model;
mod sockets;
mod vhost;
mod worlds;

use std::ops::Range;
use std::sync::Once;
use std::time::Instant;

use blkq::SchedulerKind;
use blkq_simulation::Defect;

use life::{Seen, live};
use vhost::Tamper;
use worlds::Worlds;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}: not a number")))
}

/// Names of the worlds, as in known_seeds.txt.
const PLAIN: &str = "plain";
const SEEDS: &str = "seeds";
const MACHINES: &str = "machines";
const LIMITS: &str = "limits_hold";
const HOLDS: &str = "held_requests";
const EXCHANGES: &str = "exchanged_drivers";
const SILENCE: &str = "silent_clients";
const GREEDY: &str = "greedy_machines";

/// Runs a seed. If it fails, the message names the seed and the line for known_seeds.txt.
fn run_named<T: Send + 'static>(seed: u64, world: &str, body: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::Builder::new().name(format!("{world}: seed {seed}")).spawn(body).unwrap();
    thread.join().unwrap_or_else(|_| {
        panic!(
            "{world}: seed {seed} failed; run it again with `lab/simulate --seed {seed}`, \
             and add \"{seed} {world}\" to known_seeds.txt"
        )
    })
}

fn run(seed: u64, world: &str, worlds: Worlds) -> Seen {
    run_named(seed, world, move || live(seed, None, worlds))
}

fn run_machine(seed: u64) -> vhost::Seen {
    run_named(seed, MACHINES, move || vhost::live(seed, None, None))
}

fn run_greedy(seed: u64) -> (u64, u64) {
    run_named(seed, GREEDY, move || vhost::fill_rings(seed))
}

/// The seeds to run: the seed that the user names, or a range.
fn chosen_seeds() -> Range<u64> {
    let first = number("BLKQ_FIRST_SEED", 0);
    match number("BLKQ_SEED", u64::MAX) {
        u64::MAX => first..first + number("BLKQ_SEEDS", 300),
        seed => seed..seed + 1,
    }
}

#[test]
fn seeds() {
    let Range { start: first, end } = chosen_seeds();
    let count = end - first;
    let begin = Instant::now();
    let mut all = Seen::default();
    for seed in first..end {
        let seen = run(seed, SEEDS, Worlds::of(seed));
        all.replies += seen.replies;
        all.errors += seen.errors;
        all.faults += seen.faults;
        all.kills += seen.kills;
        all.power_cuts += seen.power_cuts;
        all.panics += seen.panics;
        all.lost_sizes += seen.lost_sizes;
        all.triggered += seen.triggered;
        all.operations += seen.operations;
        all.changes += seen.changes;
        all.refused_changes += seen.refused_changes;
        all.limited_freezes += seen.limited_freezes;
        all.admitted += seen.admitted;
        all.throttled += seen.throttled;
        all.hits.iter_mut().zip(seen.hits).for_each(|(all, seen)| *all += seen);
    }
    let seconds = begin.elapsed().as_secs_f64();
    println!("{count} seeds from {first} in {seconds:.1} s: {all:?}");
    let rare = [
        all.power_cuts,
        all.panics,
        all.lost_sizes,
        all.triggered,
        all.kills,
        all.faults,
        all.errors,
        all.changes,
        all.admitted,
        all.throttled,
    ];
    assert!(count < 100 || rare.iter().chain(&all.hits).all(|count| *count > 0));
}

#[test]
fn machines() {
    let Range { start: first, end } = chosen_seeds();
    let count = end - first;
    let begin = Instant::now();
    let mut all = vhost::Seen::default();
    (first..end).for_each(|seed| all += run_machine(seed));
    let seconds = begin.elapsed().as_secs_f64();
    println!("{count} seeds of machines from {first} in {seconds:.1} s: {all:?}");
    assert!(count < 100 || all.rare().iter().all(|count| *count > 0));
}

#[test]
fn limits_hold() {
    let Range { start: first, end } = chosen_seeds();
    let count = end - first;
    let (mut admitted, mut throttled, mut found, mut freezes) = (0, 0, 0, 0);
    for seed in first..end {
        let seen = run(seed, LIMITS, Worlds::of(seed).with_limits());
        (admitted, throttled) = (admitted + seen.admitted, throttled + seen.throttled);
        found += seen.found;
        freezes += seen.limited_freezes;
    }
    println!(
        "{count} seeds with limits from {first}: {throttled} of {admitted} requests had to wait; \
         {found} limits were found; {freezes} freezes while requests waited"
    );
    assert!(count < 100 || (throttled > 0 && found > 0 && freezes > 0));
}

#[test]
fn held_requests() {
    let Range { start: first, end } = chosen_seeds();
    let count = end - first;
    let (mut held, mut reissued, mut failed) = (0, 0, 0);
    let mut held_with = [0; SchedulerKind::ALL.len()];
    for seed in first..end {
        let seen = run(seed, HOLDS, Worlds::of(seed).with_holds());
        (held, reissued, failed) = (held + seen.held, reissued + seen.reissued, failed + seen.failed);
        held_with.iter_mut().zip(seen.held_with).for_each(|(count, held)| *count += u64::from(held));
    }
    println!(
        "{count} seeds with holds from {first}: {held} held, {reissued} reissued, {failed} failed; seeds with each \
         scheduler: {held_with:?}"
    );
    assert!(count < 100 || [held, reissued, failed].iter().chain(&held_with).all(|count| *count > 0));
}

/// Exchanges the driver for one that declares FUA, or does not, while clients write with FUA.
#[test]
fn exchanged_drivers() {
    let Range { start: first, end } = chosen_seeds();
    let count = end - first;
    let mut exchanges = 0;
    for seed in first..end {
        exchanges += run(seed, EXCHANGES, Worlds::of(seed).with_exchanges()).exchanges;
    }
    println!("{count} seeds with exchanges from {first}: {exchanges} exchanges");
    assert!(count < 100 || exchanges > 0);
}

/// Clients stop reading. They delay neither the requests of others nor an orderly stop.
#[test]
fn silent_clients() {
    let Range { start: first, end } = chosen_seeds();
    let count = end - first;
    let (mut silent, mut stops) = (0, 0);
    for seed in first..end {
        let seen = run(seed, SILENCE, Worlds::of(seed).with_silence());
        (silent, stops) = (silent + seen.silent, stops + seen.silent_stops);
    }
    println!(
        "{count} seeds with silent clients from {first}: {silent} clients, {stops} stops that they may delay"
    );
    assert!(count < 100 || (silent > 0 && stops > 0));
}

/// Guests make as much work available as their rings can have. A turn does a bounded part of it.
#[test]
fn greedy_machines() {
    let Range { start: first, end } = chosen_seeds();
    let count = end - first;
    let full: u64 = (first..end).map(|seed| run_greedy(seed).0).sum();
    println!("{count} seeds with greedy machines from {first}: {full} turns did all that a turn may do");
    assert!(count < 100 || full > 0);
}

// Contract: accepted-once, durability
#[test]
fn known_seeds() {
    let lines =
        include_str!("known_seeds.txt").lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    for line in lines {
        let (seed, world) = line.split_once(' ').unwrap_or_else(|| panic!("known_seeds.txt: {line:?}"));
        let seed = seed.parse().unwrap_or_else(|_| panic!("known_seeds.txt: {line:?}"));
        let worlds = match world {
            PLAIN => Worlds::NONE,
            SEEDS => Worlds::of(seed),
            LIMITS => Worlds::of(seed).with_limits(),
            HOLDS => Worlds::of(seed).with_holds(),
            EXCHANGES => Worlds::of(seed).with_exchanges(),
            SILENCE => Worlds::of(seed).with_silence(),
            GREEDY => {
                run_greedy(seed);
                continue;
            }
            MACHINES => {
                run_machine(seed);
                continue;
            }
            _ => panic!("known_seeds.txt: {line:?}: no world is named {world:?}"),
        };
        run(seed, world, worlds);
    }
}

#[test]
fn equal_seeds_have_equal_results() {
    for seed in (0..16).chain([1 << 40]) {
        let worlds = Worlds::of(seed);
        for (world, worlds) in [
            (SEEDS, worlds),
            (LIMITS, worlds.with_limits()),
            (HOLDS, worlds.with_holds()),
            (EXCHANGES, worlds.with_exchanges()),
            (SILENCE, worlds.with_silence()),
        ] {
            assert_eq!(run(seed, world, worlds), run(seed, world, worlds));
        }
        assert_eq!(run_machine(seed), run_machine(seed));
        assert_eq!(run_greedy(seed), run_greedy(seed));
    }
}

/// For each defect: the messages with which clients or the model report it, and the number of seeds that suffice.
const NOTICED: [(Defect, &[&str], u64); 8] = [
    (Defect::LostSync, &["the file contains impossible data"], 32),
    (Defect::LostWrite, &["a read returned impossible data", "the file contains impossible data"], 32),
    (Defect::MisplacedWrite, &["a read returned impossible data", "the file contains impossible data"], 32),
    (Defect::StaleRead, &["a read returned impossible data"], 32),
    (Defect::LostSize, &["the file contains impossible data"], 128),
    (Defect::IgnoredDsync, &["the file contains impossible data"], 64),
    (Defect::CompletedTwice, &["twice"], 32),
    (
        Defect::NeverCompleted,
        &["requests are not answered", "the engine does not stop", "did not complete within"],
        32,
    ),
];

/// Defects that only one world can show.
const NOTICED_IN: [(Defect, &[&str], Worlds); 2] = [
    (Defect::PagesApart, &["a read returned impossible data"], Worlds::TWO_QUEUES),
    (Defect::GhostFile, &["hit without"], Worlds::TRIGGERS),
];
/// Number of seeds of which one shows the defect in that world, and none shows it in the plain world.
const NOTICED_IN_WITHIN: u64 = 32;

/// Returns the first of `seeds` that fails, and its message.
fn first_that_fails<T: Send + 'static>(
    seeds: Range<u64>,
    live: impl Fn(u64) -> T + Copy + Send + 'static,
) -> Option<(u64, String)> {
    seeds.into_iter().find_map(|seed| {
        let thread = std::thread::Builder::new().name(QUIET.to_owned());
        let failed = thread.spawn(move || live(seed)).unwrap().join().err()?;
        let message = failed.downcast_ref::<String>().cloned();
        Some((seed, message.or_else(|| failed.downcast_ref::<&str>().map(|message| (*message).to_owned()))?))
    })
}

/// Name of threads that are expected to fail, and print nothing.
const QUIET: &str = "has a defect";

/// Installs a panic hook that prints nothing for threads of that name.
fn quiet() {
    static QUIETENED: Once = Once::new();
    QUIETENED.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if std::thread::current().name() != Some(QUIET) {
                loud(panic);
            }
        }));
    });
}

fn check_noticed<T: Send + 'static>(
    defect: &dyn std::fmt::Debug,
    expected: &[&str],
    within: u64,
    live: impl Fn(u64) -> T + Copy + Send + 'static,
) {
    let (seed, message) = first_that_fails(0..within, live)
        .unwrap_or_else(|| panic!("{defect:?} is not noticed in {within} seeds"));
    assert!(expected.iter().any(|expected| message.contains(expected)), "{defect:?}, seed {seed}: {message}");
    println!("{defect:?} is noticed by seed {seed}: {}", message.split(';').next().unwrap_or(&message));
}

// Contract: durability
#[test]
fn defects_are_noticed() {
    quiet();
    for (defect, expected, within) in NOTICED {
        check_noticed(&defect, expected, within, move |seed| live(seed, Some(defect), Worlds::of(seed)));
    }
    // The file after a panic is checked like the file after a kill.
    for (defect, expected, within) in [NOTICED[0], NOTICED[1]] {
        check_noticed(&defect, expected, within, move |seed| live(seed, Some(defect), Worlds::PANICS));
    }
}

/// For each defect of the kernel or of a device: the messages with which a machine reports it.
const NOTICED_BY_MACHINES: [(Defect, &[&str]); 7] = [
    (Defect::LostSync, &["the file contains impossible data"]),
    (Defect::LostWrite, &["a read returned impossible data", "the file contains impossible data"]),
    (Defect::MisplacedWrite, &["a read returned impossible data", "the file contains impossible data"]),
    (Defect::StaleRead, &["a read returned impossible data"]),
    (Defect::IgnoredDsync, &["the file contains impossible data"]),
    (Defect::CompletedTwice, &["twice"]),
    (
        Defect::NeverCompleted,
        &[
            "requests are not answered",
            "the engine does not stop",
            "did not complete within",
            "waits too long",
        ],
    ),
];
const TAMPERS_NOTICED: [(Tamper, &[&str]); 5] = [
    (
        Tamper::ForgetsInFlight,
        &["requests are not answered", "in flight in a stopped ring", "made available while it is in flight"],
    ),
    (Tamper::CompletesTwice, &["used without being available", "used with status 255"]),
    (Tamper::UsedBeforeData, &["a read returned impossible data"]),
    (Tamper::StrayByte, &["memory that is not the device's has changed"]),
    (Tamper::WritesAfterStop, &["memory that is not the device's has changed"]),
];
const MACHINES_NOTICE_WITHIN: u64 = 256;

// Contract: durability
#[test]
fn machines_notice_defects() {
    quiet();
    for (defect, expected) in NOTICED_BY_MACHINES {
        let live = move |seed| vhost::live(seed, Some(defect), None);
        check_noticed(&defect, expected, MACHINES_NOTICE_WITHIN, live);
    }
    for (tamper, expected) in TAMPERS_NOTICED {
        let live = move |seed| vhost::live(seed, None, Some(tamper));
        check_noticed(&tamper, expected, MACHINES_NOTICE_WITHIN, live);
    }
}

// Contract: durability
#[test]
fn defects_of_one_world_are_noticed_only_there() {
    quiet();
    for (defect, expected, worlds) in NOTICED_IN {
        check_noticed(&defect, expected, NOTICED_IN_WITHIN, move |seed| live(seed, Some(defect), worlds));
        let without =
            first_that_fails(0..NOTICED_IN_WITHIN, move |seed| live(seed, Some(defect), Worlds::NONE));
        assert_eq!(without, None, "{defect:?} is noticed in the plain world, too");
    }
}

//! The world of the whole-system test, under `--cfg simulation`: a kernel that executes
//! what is submitted to a ring when chance wants it to, a file that can
//! lose its unflushed writes, and a clock that goes on command. Everything above
//! is what runs in production: the block layer, the loop driver, the engine, the servers.
//!
//! One world per thread; everything in it follows from its seed.

mod file;
mod hit;
mod kernel;
mod ring;

use std::cell::RefCell;
use std::path::Path;

pub use file::{SECTOR_BYTES, SimulatedFile};
pub use hit::{Hit, Noted};
pub(crate) use kernel::Kernel;
pub use kernel::{Defect, Faults};
pub(crate) use ring::Ring;

thread_local! {
    static WORLD: RefCell<World> = RefCell::new(World::new(0, 0, Faults::default()));
    static MEANWHILE: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
}

/// Chance, time, and the kernel with its file.
struct World {
    chance: Chance,
    now_ns: u64,
    kernel: Kernel,
    noted: Vec<Noted>,
    /// At how many instants more the engine is killed.
    panics_in: Option<u64>,
}

/// With what an engine unwinds that panics ([`panic_after`]).
#[derive(Debug)]
pub struct Panicked;

impl World {
    fn new(seed: u64, file_bytes: u64, faults: Faults) -> World {
        World {
            chance: Chance(seed),
            now_ns: 1_000_000_000,
            kernel: Kernel::new(file_bytes, faults),
            noted: Vec::new(),
            panics_in: None,
        }
    }
}

/// Numbers by chance, the same series for the same seed (Steele, Lea and Flood's SplitMix64).
#[derive(Clone, Debug)]
pub struct Chance(pub u64);

impl Chance {
    /// Any number.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`, or 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.word()) * u128::from(limit)) >> 64) as u64
    }

    /// True once in `times`; never for 0.
    pub fn one_in(&mut self, times: u64) -> bool {
        times != 0 && self.below(times) == 0
    }
}

fn with<R>(f: impl FnOnce(&mut World) -> R) -> R {
    WORLD.with_borrow_mut(f)
}

/// Begins this thread's world anew: an empty file of `file_bytes`, all zeroes and durable.
pub fn begin(seed: u64, file_bytes: u64, faults: Faults) {
    WORLD.set(World::new(seed, file_bytes, faults));
}

/// Nanoseconds of the world's clock.
pub(crate) fn now_ns() -> u64 {
    instant();
    time_ns()
}

/// The same for who is no part of the engine.
pub fn time_ns() -> u64 {
    with(|world| world.now_ns)
}

/// The engine panics at one of the instants to come, after so many of them: what it would do next
/// at its ring or its clock it does not. In production the process aborts there; here the world is
/// what [`kill`] leaves, and the thread unwinds with [`Panicked`].
pub fn panic_after(instants: u64) {
    with(|world| world.panics_in = Some(instants));
}

/// An instant at which the engine may panic.
pub(crate) fn instant() {
    let now = with(|world| {
        let left = world.panics_in?;
        world.panics_in = left.checked_sub(1);
        (left == 0).then(|| world.kernel.kill(&mut world.chance))
    });
    if now.is_some() {
        // Not by `panic!`, which would be heard.
        std::panic::resume_unwind(Box::new(Panicked));
    }
}

/// Lets `ns` nanoseconds pass.
pub fn pass(ns: u64) {
    with(|world| world.now_ns += ns);
}

/// The world goes on, a step at a time, while its one thread waits for something.
pub fn set_meanwhile(step: Option<Box<dyn FnMut()>>) {
    MEANWHILE.set(step);
}

/// The thread waits: a step of the rest of the world.
pub(crate) fn go_on() {
    let mut step = MEANWHILE.take().expect("the only thread of the world waits for ever");
    step();
    MEANWHILE.set(Some(step));
}

/// Makes the simulated file durable through an open file of this process.
pub(crate) fn sync(fd: i32) -> std::io::Result<()> {
    match with(|world| world.kernel.sync_now(fd, &mut world.chance)) {
        0 => Ok(()),
        error => Err(std::io::Error::from_raw_os_error(-error)),
    }
}

/// From now on other things go wrong.
pub fn set_faults(faults: Faults) {
    with(|world| world.kernel.faults = faults);
}

/// From now on the kernel has this defect.
pub fn set_defect(defect: Option<Defect>) {
    with(|world| world.kernel.defect = defect);
}

/// Whether there is this file, as far as the fault driver sees.
pub(crate) fn exists(file: &Path) -> bool {
    file.exists() || with(|world| world.kernel.defect == Some(Defect::GhostFile))
}

/// The fault driver did something.
pub(crate) fn note(noted: Noted) {
    with(|world| world.noted.push(noted));
}

/// The faults injected since the last call.
pub fn take_noted() -> Vec<Noted> {
    with(|world| std::mem::take(&mut world.noted))
}

/// How often something went wrong so far.
pub fn faults_seen() -> u64 {
    with(|world| world.kernel.faults_seen)
}

/// How many syncs of the file failed so far.
pub fn syncs_failed() -> u64 {
    with(|world| world.kernel.syncs_failed)
}

/// Operations executed so far, and a digest of them in their order: equal for equal seeds.
pub fn trace() -> (u64, u64) {
    with(|world| (world.kernel.executed, world.kernel.digest))
}

/// The process is killed: what the kernel has of it is executed or not, as chance has it,
/// and nothing it still submits is. It completes with ECANCELED, so that the process' memory can
/// be taken apart.
pub fn kill() {
    with(|world| world.kernel.kill(&mut world.chance));
}

/// A new process may submit, through files that it opens.
pub fn restart() {
    with(|world| world.kernel.restart());
}

/// The power fails: of each sector written since the last sync some version is left.
pub fn cut_power() {
    with(|world| world.kernel.file.cut_power(&mut world.chance));
}

/// The size of the file, of `bytes` now, after the power failed: that, or what it was when the file
/// was synced last. What was beyond is gone.
pub fn cut_size(bytes: u64) -> u64 {
    with(|world| world.kernel.file.cut_size(bytes, &mut world.chance))
}

/// The file has this size, for good.
pub fn set_durable_size(bytes: u64) {
    with(|world| world.kernel.file.durable_bytes = bytes);
}

/// Looks at the file.
pub fn with_file<R>(f: impl FnOnce(&SimulatedFile) -> R) -> R {
    with(|world| f(&world.kernel.file))
}

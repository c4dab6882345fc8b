//! The world of a thread, and the functions with which a test controls it.

use std::cell::RefCell;
use std::path::Path;
use std::time::Duration;

use blkq::random::Random;
use blkq::simulation::{World as Simulated, install};
use blkq_drivers::fault::observe;
use io_uring::squeue;

use crate::file::SimulatedFile;
use crate::injections::{record, take_injections};
use crate::kernel::{Cqe, Defect, Faults, Kernel};
use crate::observations;

thread_local! {
    static WORLD: RefCell<World> = RefCell::new(World::new(0, 0, Faults::default()));
    static MEANWHILE: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
}

struct World {
    chance: Random,
    now_ns: u64,
    kernel: Kernel,
    /// Number of instants until the engine panics.
    panics_in: Option<u64>,
}

/// Payload with which the engine unwinds after [`panic_after`].
#[derive(Debug)]
pub struct Panicked;

impl World {
    fn new(seed: u64, file_bytes: u64, faults: Faults) -> World {
        World {
            chance: Random::new(seed),
            now_ns: 1_000_000_000,
            kernel: Kernel::new(file_bytes, faults),
            panics_in: None,
        }
    }
}

fn with<R>(f: impl FnOnce(&mut World) -> R) -> R {
    WORLD.with_borrow_mut(f)
}

/// The world of the calling thread.
struct ThisThread;

impl Simulated for ThisThread {
    fn instant(&self) {
        let now = with(|world| {
            let left = world.panics_in?;
            world.panics_in = left.checked_sub(1);
            (left == 0).then(|| world.kernel.kill(&mut world.chance))
        });
        if now.is_some() {
            // `panic!` would print a message.
            std::panic::resume_unwind(Box::new(Panicked));
        }
    }

    fn now_ns(&self) -> u64 {
        time_ns()
    }

    fn enter(&self, entries: &mut Vec<squeue::Entry>, files: &[i32], want: usize, timeout: Option<Duration>) {
        with(|world| {
            world.kernel.submit(entries.drain(..), files);
            world.kernel.execute_some(&mut world.chance);
            if want > 0 && world.kernel.completed.is_empty() {
                // Nothing else runs while the engine sleeps, so time passes. It may wake up before its timeout.
                let most = timeout.map_or(1_000_000, |timeout| timeout.as_nanos() as u64);
                world.now_ns += world.chance.below(most.min(10_000_000) + 1);
            }
            world.now_ns += world.chance.below(20_000);
        });
    }

    fn reap(&self, reap: &mut dyn FnMut(u64, i32, u32)) {
        let completed = with(|world| std::mem::take(&mut world.kernel.completed));
        for Cqe { user_data, result, flags } in completed {
            reap(user_data, result, flags);
        }
    }

    fn close_ring(&self) {
        with(|world| world.kernel.close());
    }

    fn step(&self) {
        let mut step = MEANWHILE.take().expect("the only thread of the world waits for ever");
        step();
        MEANWHILE.set(Some(step));
    }

    fn sync(&self, fd: i32) -> std::io::Result<()> {
        match with(|world| world.kernel.sync_now(fd, &mut world.chance)) {
            0 => Ok(()),
            error => Err(std::io::Error::from_raw_os_error(-error)),
        }
    }

    fn exists(&self, file: &Path) -> bool {
        file.exists() || with(|world| world.kernel.defect == Some(Defect::GhostFile))
    }

    fn admitted(&self, operation: u8, bytes: u64) {
        observations::admitted(operation, bytes, time_ns());
    }

    fn write_held(&self, queue: usize, tag: u16) {
        observations::write_held(queue, tag);
    }

    fn request_completed(&self, queue: usize, tag: u16) {
        observations::request_completed(queue, tag);
    }
}

/// Starts a new world on this thread, with a file of `file_bytes` durable zeroes.
pub fn begin(seed: u64, file_bytes: u64, faults: Faults) {
    WORLD.set(World::new(seed, file_bytes, faults));
    take_injections();
    observe(record);
    install(&ThisThread);
}

/// Time of the world's clock, in nanoseconds.
pub fn time_ns() -> u64 {
    with(|world| world.now_ns)
}

/// Makes the engine panic after `instants` instants, each of which is a use of its ring or its clock. In production the
/// process aborts on such a panic. Here the world continues as after [`kill`], and the thread unwinds with
/// [`Panicked`].
pub fn panic_after(instants: u64) {
    with(|world| world.panics_in = Some(instants));
}

pub fn pass(ns: u64) {
    with(|world| world.now_ns += ns);
}

/// Sets the function that runs one step of the world each time its only thread waits for something.
pub fn set_meanwhile(step: Option<Box<dyn FnMut()>>) {
    MEANWHILE.set(step);
}

pub fn set_faults(faults: Faults) {
    with(|world| world.kernel.faults = faults);
}

pub fn set_defect(defect: Option<Defect>) {
    with(|world| world.kernel.defect = defect);
}

pub fn faults_seen() -> u64 {
    with(|world| world.kernel.faults_seen)
}

pub fn syncs_failed() -> u64 {
    with(|world| world.kernel.syncs_failed)
}

/// Number of operations so far, and a digest of them in their order: equal for equal seeds.
pub fn trace() -> (u64, u64) {
    with(|world| (world.kernel.executed, world.kernel.digest))
}

/// Kills the process. Each of its operations in the kernel is executed or not, at random, and later submissions are
/// not executed. All of them complete with ECANCELED, so that the memory of the process can be freed.
pub fn kill() {
    with(|world| {
        world.panics_in = None;
        world.kernel.kill(&mut world.chance);
    });
}

pub fn restart() {
    with(|world| world.kernel.restart());
}

/// Simulates a power failure: each sector contains one of its versions since the last sync.
pub fn cut_power() {
    with(|world| world.kernel.file.cut_power(&mut world.chance));
}

/// Simulates the effect of a power failure on the size of the file, which is `bytes` now. Returns the size afterwards:
/// `bytes`, or the size at the last sync. Bytes beyond it are lost.
pub fn cut_size(bytes: u64) -> u64 {
    with(|world| world.kernel.file.cut_size(bytes, &mut world.chance))
}

pub fn set_durable_size(bytes: u64) {
    with(|world| world.kernel.file.durable_bytes = bytes);
}

pub fn with_file<R>(f: impl FnOnce(&SimulatedFile) -> R) -> R {
    with(|world| f(&world.kernel.file))
}

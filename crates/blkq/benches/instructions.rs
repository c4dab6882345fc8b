//! Code paths of the block layer whose instructions `lab/instructions` counts. `instructions CASE TURNS` runs
//! a number of turns of one case. A turn submits a batch of I/Os of 4 KiB, polls, and takes the completions.
//! Only the function `counted` is measured. The turns before it bring the queue and the caches of the
//! allocator into a steady state. The printed time is meaningful only without valgrind.

use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Instant;

use blkq::drivers::null::{Null, NullOptions};
use blkq::drivers::ram::Ram;
use blkq::trace::TraceMemory;
use blkq::{Bio, ClockMode, Disk, DiskBuilder, Error, IoBuffer, LocalQueue, Sector};

const BLOCK_BYTES: usize = 4096;
const BLOCK_SECTORS: u64 = 8;
const DISK_BYTES: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

/// The distance between consecutive I/Os in blocks. If they are not adjacent, they do not merge.
const SCATTERED: u64 = 7;
const ADJACENT: u64 = 1;

type Turn = Box<dyn FnMut()>;
/// The name of a case, the number of I/Os of a turn, and a function that prepares the turn.
type Case = (&'static str, usize, fn(usize) -> Result<Turn, Error>);

const CASES: [Case; 19] = [
    ("null-32", 32, |ios| local::<DISK_BYTES>(null()?, ios, SCATTERED)),
    ("null-32-precise", 32, |ios| local::<DISK_BYTES>(null()?.clock(ClockMode::Precise), ios, SCATTERED)),
    ("null-32-no-iostats", 32, |ios| local::<DISK_BYTES>(null()?.iostats(false), ios, SCATTERED)),
    ("null-8", 8, |ios| local::<DISK_BYTES>(null()?, ios, SCATTERED)),
    ("null-1", 1, |ios| local::<DISK_BYTES>(null()?, ios, SCATTERED)),
    ("null-32-merged", 32, |ios| local::<DISK_BYTES>(null()?, ios, ADJACENT)),
    ("null-32-submitter", 32, |ios| submitter(null()?, ios)),
    ("ram-32-read", 32, |ios| {
        local::<DISK_BYTES>(Disk::builder(Box::new(Ram::new(DISK_BYTES, 512, false)?)), ios, SCATTERED)
    }),
    // The cost does not depend on the number of I/Os in flight, of disks, or on the size of the disk.
    ("null-128", 128, |ios| local::<DISK_BYTES>(null()?.depth(1024), ios, SCATTERED)),
    ("null-1024", 1024, |ios| local::<DISK_BYTES>(null()?.depth(1024), ios, SCATTERED)),
    ("null-32-8-disks", 8 * 32, |ios| several(8, ios)),
    ("null-32-64-disks", 64 * 32, |ios| several(64, ios)),
    ("null-32-1MiB", 32, |ios| local::<MIB>(null_of(MIB)?, ios, SCATTERED)),
    ("null-32-16TiB", 32, |ios| local::<{ 16 * TIB }>(null_of(16 * TIB)?, ios, SCATTERED)),
    // The load stays far below these limits.
    ("null-32-limited", 32, |ios| local::<DISK_BYTES>(limited("iops=10000000")?, ios, SCATTERED)),
    ("null-1-limited", 1, |ios| local::<DISK_BYTES>(limited("iops=10000000")?, ios, SCATTERED)),
    ("null-32-limited-bytes", 32, |ios| local::<DISK_BYTES>(limited("bps=1T")?, ios, SCATTERED)),
    ("null-32-taken", 32, |ios| taken(null()?, ios)),
    // No process reads the trace. A reader would not change the cost.
    ("null-32-traced", 32, |ios| traced(null()?, ios)),
];

fn main() -> ExitCode {
    match run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("instructions: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let [name, turns] = arguments else {
        CASES.iter().for_each(|(name, ios, _)| println!("{name} {ios}"));
        return Ok(());
    };
    let (_, ios, open) = CASES.iter().find(|case| case.0 == name).ok_or("no case of this name")?;
    let turns = turns.parse()?;
    let mut turn = open(*ios)?;
    (0..64).for_each(|_| turn());
    let begin = Instant::now();
    counted(&mut turn, turns);
    println!("{:.1} ns/IO", begin.elapsed().as_nanos() as f64 / (turns * *ios) as f64);
    Ok(())
}

#[inline(never)]
fn counted(turn: &mut Turn, turns: usize) {
    (0..turns).for_each(|_| turn());
}

fn null() -> Result<DiskBuilder, Error> {
    null_of(DISK_BYTES)
}

fn limited(limits: &str) -> Result<DiskBuilder, Error> {
    Ok(null()?.rate_limits(limits.parse()?))
}

fn null_of(bytes: u64) -> Result<DiskBuilder, Error> {
    let mut options = NullOptions::new(bytes);
    options.zero_reads = false;
    Ok(Disk::builder(Box::new(Null::new(options)?)))
}

/// The sectors of consecutive I/Os, `stride` blocks apart, wrapping around at the end of the disk.
fn places<const BYTES: u64>(stride: u64) -> impl FnMut() -> Sector {
    let mut block = 0;
    move || {
        block = (block + stride) % (BYTES / BLOCK_BYTES as u64);
        Sector(block * BLOCK_SECTORS)
    }
}

/// I/O by the thread that owns the queue.
fn local<const BYTES: u64>(disk: DiskBuilder, ios: usize, stride: u64) -> Result<Turn, Error> {
    turn_of::<BYTES>(disk.build()?.open_queue(0)?, ios, stride)
}

fn traced(disk: DiskBuilder, ios: usize) -> Result<Turn, Error> {
    let mut queue = disk.build()?.open_queue(0)?;
    queue.trace(Some(&TraceMemory::new(1, 1 << 18)?));
    turn_of::<DISK_BYTES>(queue, ios, SCATTERED)
}

fn turn_of<const BYTES: u64>(mut queue: LocalQueue, ios: usize, stride: u64) -> Result<Turn, Error> {
    let mut place = places::<BYTES>(stride);
    let mut buffers: Vec<_> = (0..ios).map(|_| IoBuffer::zeroed(BLOCK_BYTES)).collect();
    Ok(Box::new(move || {
        for buffer in buffers.drain(..) {
            queue.submit(Bio::read(place(), buffer, 0)).expect("the queue has room for a batch");
        }
        queue.poll();
        buffers.extend(queue.completions().filter_map(|completion| completion.data.into_buffer()));
        assert_eq!(buffers.len(), ios);
    }))
}

fn several(disks: usize, ios: usize) -> Result<Turn, Error> {
    let mut turns = (0..disks)
        .map(|_| local::<DISK_BYTES>(null()?, ios / disks, SCATTERED))
        .collect::<Result<Vec<_>, Error>>()?;
    Ok(Box::new(move || turns.iter_mut().for_each(|turn| turn())))
}

/// I/O by the thread that owns the queue, which takes completions one by one.
fn taken(disk: DiskBuilder, ios: usize) -> Result<Turn, Error> {
    let mut queue = disk.build()?.open_queue(0)?;
    let mut place = places::<DISK_BYTES>(SCATTERED);
    let mut buffers: Vec<_> = (0..ios).map(|_| IoBuffer::zeroed(BLOCK_BYTES)).collect();
    Ok(Box::new(move || {
        for buffer in buffers.drain(..) {
            queue.submit(Bio::read(place(), buffer, 0)).expect("the queue has room for a batch");
        }
        queue.poll();
        while let Some(completion) = queue.take_completion() {
            buffers.extend(completion.data.into_buffer());
        }
        assert_eq!(buffers.len(), ios);
    }))
}

/// I/O through the software queues, as from another thread.
fn submitter(disk: DiskBuilder, ios: usize) -> Result<Turn, Error> {
    let disk = disk.build()?;
    let mut queue = disk.open_queue(0)?;
    let mut submitter = disk.submitter();
    let mut place = places::<DISK_BYTES>(SCATTERED);
    let (completed, completions) = mpsc::channel();
    let mut buffers: Vec<_> = (0..ios).map(|_| IoBuffer::zeroed(BLOCK_BYTES)).collect();
    Ok(Box::new(move || {
        for buffer in buffers.drain(..) {
            let completed = completed.clone();
            submitter.submit(Bio::read(place(), buffer, 0), move |_, data| {
                completed.send(data.into_buffer().expect("its own buffer")).expect("still received");
            });
        }
        while buffers.len() < ios {
            queue.poll();
            buffers.extend(completions.try_iter());
        }
    }))
}

//! Measures how precisely a limit is enforced. `limits RATE DISKS SECONDS` submits I/O without pause to a
//! number of null disks, each from its own thread, and prints the I/Os of each second. A single disk has a
//! limit of its own; several disks share the limit as a group.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use blkq::drivers::null::{Null, NullOptions};
use blkq::throttle::{Group, RateLimits, WEIGHT_DEFAULT};
use blkq::{Bio, Disk, IoBuffer, LocalQueue, Sector};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const BLOCK_BYTES: usize = 4096;
const DEPTH: usize = 128;

fn main() -> ExitCode {
    match run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("limits: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<(), Failure> {
    let [rate, disks, seconds] = arguments else { return Err("usage: limits RATE DISKS SECONDS".into()) };
    let (rate, disks, seconds): (u64, usize, u32) = (rate.parse()?, disks.parse()?, seconds.parse()?);
    let limits: RateLimits = format!("iops={rate}").parse()?;
    let group = Arc::new(Group::default());
    group.set_limits(&limits);
    let counts: Arc<Vec<AtomicU64>> = Arc::new((0..disks).map(|_| AtomicU64::new(0)).collect());
    let (stop, ready) = (Arc::new(AtomicBool::new(false)), Arc::new(Barrier::new(disks + 1)));
    let floods = (0..disks).map(|index| {
        let mut builder = Disk::builder(Box::new(Null::new(NullOptions::new(1 << 30))?));
        if disks == 1 {
            builder = builder.rate_limits(limits);
        }
        let disk = builder.build()?;
        if disks > 1 {
            disk.join_group(group.clone().join(index, &format!("disk {index}"), WEIGHT_DEFAULT)?);
        }
        let (counts, stop, ready) = (counts.clone(), stop.clone(), ready.clone());
        Ok(thread::spawn(move || {
            ready.wait();
            flood(disk.open_queue(0)?, &counts[index], &stop)
        }))
    });
    let floods = floods.collect::<Result<Vec<_>, Failure>>()?;
    ready.wait();
    // After a second the credit of the idle limit is used up, and all disks are active.
    thread::sleep(Duration::from_secs(1));
    let read = || (Instant::now(), counts.iter().map(|count| count.load(Relaxed)).collect::<Vec<_>>());
    let mut before = read();
    for _ in 0..seconds {
        thread::sleep(Duration::from_secs(1));
        let now = read();
        let seconds = (now.0 - before.0).as_secs_f64();
        let rates: Vec<f64> = before.1.iter().zip(&now.1).map(|(a, b)| (b - a) as f64 / seconds).collect();
        let sum: f64 = rates.iter().sum();
        let each: Vec<String> = rates.iter().map(|rate| format!("{rate:.0}")).collect();
        println!("{sum:.1} I/Os per second, {:+.3} %: {}", (sum / rate as f64 - 1.0) * 100.0, each.join(" "));
        before = now;
    }
    stop.store(true, Relaxed);
    floods.into_iter().try_for_each(|flood| flood.join().map_err(|_| "a thread panicked")?)
}

fn flood(mut queue: LocalQueue, count: &AtomicU64, stop: &AtomicBool) -> Result<(), Failure> {
    let mut buffers: Vec<_> = (0..DEPTH).map(|_| IoBuffer::zeroed(BLOCK_BYTES)).collect();
    let mut block = 0;
    while !stop.load(Relaxed) {
        for buffer in buffers.drain(..) {
            // The reads are seven blocks apart, so that they do not merge.
            block = (block + 7) % (1 << 18);
            queue.submit(Bio::read(Sector(block * 8), buffer, 0)).map_err(|_| "the queue is full")?;
        }
        queue.wait(1);
        buffers.extend(queue.completions().filter_map(|completion| completion.data.into_buffer()));
        count.fetch_add(buffers.len() as u64, Relaxed);
    }
    Ok(())
}

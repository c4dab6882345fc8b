//! The cost of a trace: two queues of a null device, one of which is traced, execute batches of reads in
//! turn. The trace is read only if the argument `read` is given.
//!
//! cargo run --release -p blkq --example trace [read]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use blkq::drivers::null::{Null, NullOptions};
use blkq::trace::{TraceMemory, TraceReader};
use blkq::{Bio, Disk, IoBuffer, LocalQueue, Sector};

const BATCH: usize = 32;
/// The number of I/Os of a round. It is small, so that most rounds are not interrupted.
const ROUND: usize = 1 << 15;
const ROUNDS: usize = 501;
/// The default of `blkq trace --buffer`.
const RING_BYTES: u64 = 16 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let mut queues = [open()?, open()?];
    let memory = TraceMemory::new(1, RING_BYTES)?;
    queues[1].trace(Some(&memory));
    let stop = Arc::new(AtomicBool::new(false));
    let reads = std::env::args().nth(1).as_deref() == Some("read");
    let reader = reads.then(|| thread::spawn(read(memory, stop.clone())));
    let mut buffers: Vec<IoBuffer> = (0..BATCH).map(|_| IoBuffer::zeroed(4096)).collect();
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (queue, times) in queues.iter_mut().zip(&mut times) {
            times.push(ns_per_io(queue, &mut buffers)?);
        }
    }
    let mut ratios: Vec<f64> = times[0].iter().zip(&times[1]).map(|(off, on)| on / off).collect();
    let [off, on] = times.each_mut().map(|times| median(times));
    println!("untraced {off:.1}, traced {on:.1} ns per I/O; {:.3} times (medians)", median(&mut ratios));
    stop.store(true, Ordering::Relaxed);
    if let Some((events, lost)) = reader.and_then(|reader| reader.join().ok()) {
        println!("{events} events were read, {lost} lost");
    }
    Ok(())
}

fn open() -> Result<LocalQueue, Box<dyn Error>> {
    let options = NullOptions { zero_reads: false, ..NullOptions::new(1 << 30) };
    Ok(Disk::builder(Box::new(Null::new(options)?)).build()?.open_queue(0)?)
}

/// Runs a round on `queue`, with I/Os that do not merge. Returns the nanoseconds per I/O.
fn ns_per_io(queue: &mut LocalQueue, buffers: &mut Vec<IoBuffer>) -> Result<f64, Box<dyn Error>> {
    let begin = Instant::now();
    let mut block = 0;
    for _ in 0..ROUND / BATCH {
        for buffer in buffers.drain(..) {
            block = (block + 7) % (1 << 18);
            queue.submit(Bio::read(Sector(block * 8), buffer, 0)).map_err(|_| "the queue is full")?;
        }
        queue.poll();
        buffers.extend(queue.completions().filter_map(|completion| completion.data.into_buffer()));
    }
    Ok(begin.elapsed().as_nanos() as f64 / ROUND as f64)
}

/// Reads the trace as often as `blkq trace` does. Returns the numbers of events that were read and lost.
fn read(memory: Arc<TraceMemory>, stop: Arc<AtomicBool>) -> impl FnOnce() -> (u64, u64) {
    move || {
        let (mut events, mut counts) = (Vec::new(), (0, 0));
        let Some(mut reader) = TraceReader::new(&memory, 0) else { return counts };
        while !stop.load(Ordering::Relaxed) {
            let page = reader.read(&mut events);
            counts.1 += page.lost;
            counts.0 += events.drain(..).len() as u64;
            if !page.more {
                thread::sleep(Duration::from_millis(5));
            }
        }
        counts
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

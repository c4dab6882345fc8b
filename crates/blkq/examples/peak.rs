//! Peak rate of one thread with the null driver: `peak [SECONDS] [BATCH] [cached|precise] [stats|nostats]`.
use std::time::{Duration, Instant};

use blkq::drivers::null::{Null, NullOptions};
use blkq::{Bio, ClockMode, Disk, IoBuffer, Sector};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let arg = |i: usize, d: &str| args.get(i).cloned().unwrap_or(d.to_string());
    let seconds: f64 = arg(1, "2").parse()?;
    let batch: usize = arg(2, "32").parse()?;
    let clock: ClockMode = arg(3, "cached").parse()?;
    let iostats = arg(4, "stats") == "stats";
    let mut options = NullOptions::new(1 << 40);
    options.zero_reads = false;
    let disk = Disk::builder(Box::new(Null::new(options)?)).clock(clock).iostats(iostats).build()?;
    let mut queue = disk.open_queue(0)?;
    let mut buffers: Vec<IoBuffer> = (0..batch).map(|_| IoBuffer::zeroed(4096)).collect();
    let begin = Instant::now();
    let (mut done, mut random) = (0u64, 1u64);
    while begin.elapsed() < Duration::from_secs_f64(seconds) {
        for _ in 0..1000 {
            for buffer in buffers.drain(..) {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let sector = Sector((random >> 40) << 3);
                queue.submit(Bio::read(sector, buffer, done)).map_err(|_| "full")?;
            }
            queue.poll();
            for completion in queue.completions() {
                done += 1;
                buffers.extend(completion.data.into_buffer());
            }
        }
    }
    let ns = begin.elapsed().as_nanos() as f64;
    let stats = disk.stats();
    println!(
        "{:.2} M IOPS, {:.2} ns per I/O, clock reads per I/O {:.4}, ios {}",
        done as f64 * 1e3 / ns,
        ns / done as f64,
        stats.counter(blkq::Counter::ClockReads) as f64 / done as f64,
        stats.groups[0].ios
    );
    Ok(())
}

//! A client in the same process: reads and writes an image without a server or a kernel device. It overwrites
//! bytes 4096 to 24575 of the image.
//! `cargo run -p blkq --example client -- disk.img`

use blkq::{Bio, Disk, EngineThread, IoBuffer, Sector};
use blkq_drivers::r#loop::{DriverOptions, LoopDevice};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: client IMAGE")?;
    let device = LoopDevice::open(&DriverOptions::new(path))?;
    let disk = Disk::builder(Box::new(device)).depth(64).build()?;

    // A thread that owns a queue submits and polls without locks and without other threads.
    let mut queue = disk.open_queue(0)?;
    let mut buffer = IoBuffer::zeroed(4096);
    buffer.fill(7);
    queue.submit(Bio::write(Sector(8), buffer, 1)).expect("a new queue has room");
    queue.wait(1);
    let written = queue.take_completion().expect("waited for it");
    println!("bio {}: {:?}", written.user_data, written.result);
    drop(queue);

    // Other threads use a submitter, which blocks while the device is full. An engine's thread then owns the
    // queue.
    let engine = EngineThread::spawn("queue-0", vec![(disk.clone(), 0)])?;
    std::thread::scope(|threads| {
        for number in 2..6_u8 {
            let mut submitter = disk.submitter();
            threads.spawn(move || submitter.write_at(&[number; 4096], u64::from(number) * 4096));
        }
    });

    let mut submitter = disk.submitter();
    submitter.flush()?;
    let mut memory = [0; 4 * 4096];
    submitter.read_at(&mut memory, 2 * 4096)?;
    println!("first bytes of four blocks: {:?}", memory.iter().step_by(4096).collect::<Vec<_>>());
    drop(engine);
    Ok(())
}

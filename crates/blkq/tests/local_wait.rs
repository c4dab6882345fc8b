//! A thread that waits on its own queue is woken by all that it waits for: deadlines that the
//! driver sets while the plug is flushed, and other queues' writes to the same file. A batch
//! reaches the kernel in parts.
// Contract: accepted-once
#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::sync::Arc;

use blkq::drivers::fault::Fault;
use blkq::drivers::r#loop::{DirectIo, Dispatch, LoopDevice, LoopOptions};
use blkq::{Bio, Disk, Driver, IoBuffer, Sector, Setting, Status};
use common::{filled, within};

const IMAGE_BYTES: u64 = 1 << 20;

/// An image that is removed with it.
struct Image(std::path::PathBuf);

impl Image {
    fn new(name: &str) -> Image {
        let path = std::env::temp_dir().join(format!("blkq-wait-{}-{name}", std::process::id()));
        std::fs::File::create(&path).unwrap().set_len(IMAGE_BYTES).unwrap();
        Image(path)
    }

    fn open(&self, direct_io: DirectIo, dispatch: Dispatch) -> LoopDevice {
        LoopDevice::open(&LoopOptions { direct_io, dispatch, ..LoopOptions::new(&self.0) }).unwrap()
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

fn disk(driver: impl Driver, queues: usize) -> Arc<Disk> {
    Disk::builder(Box::new(driver)).queues(queues).build().unwrap()
}

#[test]
fn queues_that_take_turns_at_one_image_are_all_woken() {
    for (name, direct_io, dispatch) in [
        ("buffered", DirectIo::Off, Dispatch::Concurrent),
        ("buffered-serial", DirectIo::Off, Dispatch::Serial),
        ("direct-serial", DirectIo::On, Dispatch::Serial),
    ] {
        let image = Image::new(name);
        let disk = disk(image.open(direct_io, dispatch), 2);
        within(120, move || {
            let queues = [0, 1].map(|index| {
                let disk = disk.clone();
                std::thread::spawn(move || {
                    let mut queue = disk.open_queue(index).unwrap();
                    for n in 0..400u64 {
                        let sector = Sector((n * 8 + index as u64 * 1024) % (IMAGE_BYTES >> 9));
                        queue.submit(Bio::write(sector, filled(4096, n as u8), n)).unwrap();
                        queue.wait(1);
                        let completion = queue.take_completion().expect("waited for it");
                        assert_eq!((completion.user_data, completion.result), (n, Ok(())));
                    }
                })
            });
            queues.into_iter().for_each(|queue| queue.join().unwrap());
        });
    }
}

#[test]
fn a_deadline_that_is_set_while_the_plug_is_flushed_wakes() {
    let image = Image::new("fault");
    for (spec, result) in [("delay=2ms", Ok(())), ("stuck=2ms", Err(Status::Timeout))] {
        let device = image.open(DirectIo::Auto, Dispatch::Concurrent);
        let disk = disk(Fault::new(Box::new(device), spec.parse().unwrap()).unwrap(), 1);
        let completion = within(120, move || {
            let mut queue = disk.open_queue(0).unwrap();
            queue.submit(Bio::read(Sector(0), filled(4096, 0), 7)).unwrap();
            queue.wait(1);
            queue.take_completion().expect("waited for it").result
        });
        assert_eq!(completion, result, "{spec}");
    }
}

#[test]
fn a_batch_is_submitted_early_unless_that_is_turned_off() {
    let image = Image::new("early");
    let disk = disk(image.open(DirectIo::Off, Dispatch::Concurrent), 1);
    let mut queue = disk.open_queue(0).unwrap();
    let mut early = |count: u64| {
        let before = queue.ring_counters().early_submissions;
        for n in 0..count {
            // Apart from each other, so that none merge.
            queue.submit(Bio::read(Sector(n * 16), IoBuffer::zeroed(4096), n)).unwrap();
        }
        queue.wait(count as usize);
        assert!(queue.completions().all(|completion| completion.result.is_ok()));
        queue.ring_counters().early_submissions - before
    };
    assert_eq!((early(4), early(9)), (0, 2));
    disk.set(Setting::EarlySubmission(false)).unwrap();
    assert_eq!(early(9), 0);
    disk.set(Setting::EarlySubmission(true)).unwrap();
    assert_eq!(early(9), 2);
}

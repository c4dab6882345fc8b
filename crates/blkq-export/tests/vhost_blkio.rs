//! vhost-user-blk with the crate libblkio: a disk of a program, without a guest.

use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::vhost::{SIZE, Served, image, serve};
use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags, iovec};
use blkq::Counter;
use blkq_drivers::r#loop::DirectIo;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const BLOCK: usize = 4096;
const MEMORY: usize = 4 << 20;
/// More requests than a queue of libblkio holds.
const MANY: usize = 400;

/// A client, whose queues with an eventfd precede its polled queues.
struct Client {
    queues: Vec<Blkioq>,
    disk: Blkio,
    memory: MemoryRegion,
}

impl Client {
    fn new(served: &Served, queues: i32, poll_queues: i32) -> Client {
        let mut disk = Blkio::new("virtio-blk-vhost-user").unwrap();
        disk.set_str("path", served.path.to_str().unwrap()).unwrap();
        disk.connect().unwrap();
        disk.set_i32("num-queues", queues).unwrap();
        disk.set_i32("num-poll-queues", poll_queues).unwrap();
        let outcome = disk.start().unwrap();
        let memory = disk.alloc_mem_region(MEMORY).unwrap();
        disk.map_mem_region(&memory).unwrap();
        Client { queues: outcome.queues.into_iter().chain(outcome.poll_queues).collect(), disk, memory }
    }

    fn place(&self, at: usize) -> *mut u8 {
        assert!(at < MEMORY);
        (self.memory.addr + at) as *mut u8
    }

    #[allow(clippy::mut_from_ref, reason = "a test looks at what it does not share at that time")]
    fn bytes(&self, at: usize, bytes: usize) -> &mut [u8] {
        assert!(at + bytes <= MEMORY);
        // SAFETY: the bytes are inside the region, which is mapped as long as the client, and no request uses
        // them now.
        unsafe { std::slice::from_raw_parts_mut(self.place(at), bytes) }
    }

    fn wait(&mut self, queue: usize, count: usize) -> Vec<usize> {
        let mut completions: Vec<MaybeUninit<Completion>> =
            (0..count).map(|_| MaybeUninit::uninit()).collect();
        let mut timeout = Duration::from_secs(60);
        let done = self.queues[queue].do_io(&mut completions, count, Some(&mut timeout), None).unwrap();
        let numbers = completions[..done].iter().map(|completion| {
            // SAFETY: the queue has filled that number of completions.
            let completion = unsafe { completion.assume_init_ref() };
            assert_eq!(completion.ret, 0, "{completion:?}");
            completion.user_data
        });
        let mut numbers: Vec<usize> = numbers.collect();
        numbers.sort_unstable();
        numbers
    }

    fn run(&mut self, queue: usize, submit: impl FnOnce(&mut Blkioq)) {
        submit(&mut self.queues[queue]);
        assert_eq!(self.wait(queue, 1).len(), 1);
    }

    /// Reads `bytes` bytes from `start` on, which must all be `value`.
    fn assert_reads(&mut self, queue: usize, start: usize, bytes: usize, value: u8) {
        let (at, flags) = (MEMORY / 2, ReqFlags::empty());
        self.bytes(at, bytes).fill(!value);
        let place = self.place(at);
        self.run(queue, |queue| queue.read(start as u64, place, bytes, 0, flags));
        assert!(self.bytes(at, bytes).iter().all(|byte| *byte == value), "{start}: not all are {value}");
    }
}

fn exchange(client: &mut Client, queue: usize) {
    let (start, value, none) = (queue << 20, queue as u8 + 1, ReqFlags::empty());
    let (one, two) = (client.place(0), client.place(8 * BLOCK));
    client.bytes(0, 16 * BLOCK).fill(value);
    client.run(queue, |queue| queue.write(start as u64, one, 4 * BLOCK, 0, none));
    client.run(queue, |queue| queue.write((start + 4 * BLOCK) as u64, two, 4 * BLOCK, 0, ReqFlags::FUA));
    client.assert_reads(queue, start, 8 * BLOCK, value);
    // Data in parts, of which the second is not aligned.
    let pieces = [(one, BLOCK), (client.place(9 * BLOCK + 8), BLOCK)]
        .map(|(at, bytes)| iovec { iov_base: at.cast(), iov_len: bytes });
    client.bytes(0, 16 * BLOCK).fill(value + 100);
    client.run(queue, |queue| queue.writev((start + BLOCK) as u64, pieces.as_ptr(), 2, 0, none));
    client.assert_reads(queue, start, BLOCK, value);
    client.assert_reads(queue, start + BLOCK, 2 * BLOCK, value + 100);
    client.bytes(0, 16 * BLOCK).fill(0);
    client.run(queue, |queue| queue.readv((start + BLOCK) as u64, pieces.as_ptr(), 2, 0, none));
    assert!(client.bytes(9 * BLOCK + 8, BLOCK).iter().all(|byte| *byte == value + 100));
    client.run(queue, |queue| queue.flush(0, none));
    for flags in [none, ReqFlags::NO_UNMAP] {
        client.bytes(0, BLOCK).fill(value);
        client.run(queue, |queue| queue.write(start as u64, one, BLOCK, 0, none));
        client.run(queue, |queue| queue.write_zeroes(start as u64, BLOCK as u64, 0, flags));
        client.assert_reads(queue, start, BLOCK, 0);
    }
    // The image has a hole here.
    client.run(queue, |queue| queue.discard((start + 4 * BLOCK) as u64, 4 * BLOCK as u64, 0, none));
    client.assert_reads(queue, start + 4 * BLOCK, 4 * BLOCK, 0);
    // More requests than the queue holds.
    for number in 0..MANY {
        let at = client.place(number * BLOCK / 2);
        client.bytes(number * BLOCK / 2, 512).fill(number as u8);
        client.queues[queue].write((start + number * 512) as u64, at, 512, number, none);
    }
    assert_eq!(client.wait(queue, MANY), (0..MANY).collect::<Vec<_>>());
    for number in (0..MANY).step_by(37) {
        client.assert_reads(queue, start + number * 512, 512, number as u8);
    }
}

#[test]
fn libblkio_works_on_queues_of_both_kinds() {
    let served = serve(image(DirectIo::Auto, Some(512)), 3);
    let mut client = Client::new(&served, 2, 1);
    let asked = || served.disk.stats().counter(Counter::FlushesAsked);
    for queue in 0..3 {
        exchange(&mut client, queue);
    }
    // For FUA writes libblkio requests a flush. The test requests flushes, too.
    assert_eq!(asked(), 6);
    assert_eq!(served.device.counters().errors, 0);
    drop(client);
    served.until_idle();
}

#[test]
fn libblkio_waits_for_its_completion_descriptor() {
    let served = serve(image(DirectIo::Off, None), 1);
    let mut client = Client::new(&served, 1, 0);
    client.queues[0].set_completion_fd_enabled(true);
    let fd = client.queues[0].get_completion_fd().unwrap();
    // SAFETY: the descriptor belongs to the queue, which is dropped later.
    let event = unsafe { BorrowedFd::borrow_raw(fd) };
    for number in 0..50 {
        client.queues[0].flush(number, ReqFlags::empty());
        // Without minimum completions, this only submits.
        let mut completion = [MaybeUninit::uninit()];
        let mut done = client.queues[0].do_io(&mut completion, 0, None, None).unwrap();
        while done == 0 {
            let mut polls = [PollFd::new(&event, PollFlags::IN)];
            let timeout = Timespec { tv_sec: 20, tv_nsec: 0 };
            assert_eq!(poll(&mut polls, Some(&timeout)).unwrap(), 1, "no call");
            rustix::io::read(event, &mut [0; 8]).unwrap();
            done = client.queues[0].do_io(&mut completion, 0, None, None).unwrap();
        }
        // SAFETY: one completion was filled in.
        let completion = unsafe { completion[0].assume_init_ref() };
        assert_eq!((completion.ret, completion.user_data), (0, number));
    }
}

/// libblkio multiplies the two limits of a request in 32 bits.
#[test]
fn libblkio_has_the_limits_of_the_disk() {
    for (sector_size, queues) in [(512, 1), (4096, 3)] {
        let served = serve(image(DirectIo::Off, Some(sector_size)), queues);
        let client = Client::new(&served, 1, 0);
        let number = |name: &str| client.disk.get_i32(name).unwrap();
        assert_eq!(client.disk.get_u64("capacity").unwrap(), SIZE);
        assert_eq!(number("request-alignment"), sector_size as i32);
        assert_eq!(number("max-queues"), queues as i32);
        assert!(number("max-transfer") >= 1 << 20, "{}", number("max-transfer"));
        assert_eq!(number("max-transfer"), number("max-segments") * number("max-segment-len"));
        assert!(client.disk.get_u64("max-discard-len").unwrap() >= 1 << 20);
        assert!(client.disk.get_u64("max-write-zeroes-len").unwrap() >= 1 << 20);
        assert!(client.disk.get_bool("flush-needed").unwrap());
    }
}

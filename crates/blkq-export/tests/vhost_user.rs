//! vhost-user-blk with libblkio's front end (crate virtio-driver), compared with a model of each byte.

use std::net::TcpListener;

use blkq::engine::EngineThread;
use blkq::testing::wait_until;
use blkq::{Disk, Driver, ErrorKind};
use blkq_drivers::r#loop::DirectIo;
use blkq_export::Listen;
use blkq_export::vhost_user::{VhostUserDevice, VhostUserOptions};
use proptest::prelude::*;
use virtio_driver::{
    EventFd, VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkReqBuf,
    VirtioFeatureFlags, VirtioTransport,
};

use crate::vhost::{SIZE, Served, SharedMemory, image, ram, serve};

type Transport = Box<dyn VirtioTransport<VirtioBlkConfig, VirtioBlkReqBuf>>;

/// A request. Numbers are in blocks.
#[derive(Clone, Debug)]
enum Step {
    Read(u64, u64),
    Write(u64, u64, u8),
    Discard(u64, u64),
    WriteZeroes(u64, u64, bool),
    Flush,
    /// Writes of one block each, for consecutive blocks, submitted together.
    Row(u64, u64, u8),
    /// The driver disconnects, and another one starts with that kind of ring.
    Anew(VirtioFeatureFlags),
}

struct Client {
    transport: Transport,
    queues: Vec<VirtioBlkQueue<'static, usize>>,
    events: Vec<std::sync::Arc<EventFd>>,
    memory: SharedMemory,
}

const MEMORY: usize = 8 << 20;

impl Client {
    fn new(served: &Served, queues: usize, ring: VirtioFeatureFlags) -> Client {
        let features = (VirtioFeatureFlags::VERSION_1 | ring).bits()
            | (VirtioBlkFeatureFlags::FLUSH
                | VirtioBlkFeatureFlags::BLK_SIZE
                | VirtioBlkFeatureFlags::MQ
                | VirtioBlkFeatureFlags::DISCARD
                | VirtioBlkFeatureFlags::WRITE_ZEROES)
                .bits();
        let mut transport: Transport =
            Box::new(VhostUser::new(served.path.to_str().unwrap(), features).unwrap());
        assert_eq!(transport.get_features() & ring.bits(), ring.bits(), "it is offered");
        let memory = SharedMemory::new(MEMORY);
        transport.map_mem_region(memory.start.addr(), MEMORY, memory.fd(), 0).unwrap();
        let made = VirtioBlkQueue::setup_queues(&mut *transport, queues, 128).unwrap();
        let events = (0..queues).map(|queue| transport.get_completion_fd(queue)).collect();
        // Both live as long as the client, which drops its queues first.
        Client { queues: made, transport, events, memory }
    }

    /// Executes `steps`, together if they do not overlap, with data from offset `at` on. Returns the results.
    fn run(&mut self, steps: &[(Step, usize)], mut at: usize, block: u64) -> Vec<i32> {
        let mut results = vec![1; steps.len()];
        for (index, (step, queue)) in steps.iter().enumerate() {
            let queue_number = queue % self.queues.len();
            let queue = &mut self.queues[queue_number];
            match step {
                Step::Read(block_number, blocks) => {
                    let buffer = self.memory.slice(at, (blocks * block) as usize);
                    buffer.fill(0xee);
                    at += buffer.len();
                    queue.read(block_number * block, buffer, index).unwrap();
                }
                Step::Write(block_number, blocks, value) => {
                    let buffer = self.memory.slice(at, (blocks * block) as usize);
                    buffer.fill(*value);
                    at += buffer.len();
                    queue.write(block_number * block, buffer, index).unwrap();
                }
                Step::Discard(from, blocks) => queue.discard(from * block, blocks * block, index).unwrap(),
                Step::WriteZeroes(from, blocks, unmap) => {
                    queue.write_zeroes(from * block, blocks * block, *unmap, index).unwrap();
                }
                Step::Flush => queue.flush(index).unwrap(),
                Step::Row(..) | Step::Anew(..) => unreachable!("not one request"),
            }
            if queue.avail_notif_needed() {
                self.transport.get_submission_notifier(queue_number).notify().unwrap();
            }
        }
        let mut left = steps.len();
        while left > 0 {
            for (queue, event) in self.queues.iter_mut().zip(&self.events) {
                for completion in queue.completions() {
                    assert_eq!(results[completion.context], 1, "a request completes once");
                    results[completion.context] = completion.ret;
                    left -= 1;
                }
                // With a single queue, waits for the call, as a driver does.
                if left > 0 && self.events.len() == 1 {
                    queue.set_used_notif_enabled(true);
                    if !queue.completions().has_next() {
                        event.read().unwrap();
                    }
                }
            }
        }
        results
    }
}

fn steps(blocks: u64) -> impl Strategy<Value = Vec<(Step, usize, usize)>> {
    let range = (0..blocks, 1..16u64).prop_map(move |(from, count)| (from, count.min(blocks - from)));
    let step = prop_oneof![
        range.clone().prop_map(|(from, count)| Step::Read(from, count)),
        (range.clone(), any::<u8>()).prop_map(|((from, count), value)| Step::Write(from, count, value)),
        range.clone().prop_map(|(from, count)| Step::Discard(from, count)),
        (range.clone(), any::<bool>())
            .prop_map(|((from, count), unmap)| Step::WriteZeroes(from, count, unmap)),
        Just(Step::Flush),
        (range, any::<u8>()).prop_map(|((from, count), value)| Step::Row(from, count, value)),
        rings().prop_map(Step::Anew),
    ];
    // The queue of the step, and the offset of its memory, which may be unaligned.
    let offset = prop_oneof![4 => Just(0), 1 => Just(512), 1 => Just(8), 1 => Just(1001)];
    proptest::collection::vec((step, 0..4usize, offset), 1..140)
}

fn check(driver: Box<dyn Driver>, queues: usize, ring: VirtioFeatureFlags, steps: &[(Step, usize, usize)]) {
    let served = serve(driver, queues);
    let mut client = Client::new(&served, queues, ring);
    let block = u64::from(served.disk.limits().logical_block_bytes);
    let mut model = vec![Some(0u8); (SIZE / block) as usize];
    let mut requests = 0;
    for (step, queue, offset) in steps {
        let part = |from: u64, count: u64| from as usize..(from + count) as usize;
        let all = match *step {
            Step::Anew(ring) => {
                drop(client);
                served.until_idle();
                client = Client::new(&served, queues, ring);
                continue;
            }
            Step::Row(from, count, value) => {
                let write = |at: u64| (Step::Write(from + at, 1, value.wrapping_add(at as u8)), *queue);
                (0..count).map(write).collect()
            }
            _ => vec![(step.clone(), *queue)],
        };
        let results = client.run(&all, *offset, block);
        assert!(results.iter().all(|result| *result == 0), "{step:?}: {results:?}");
        requests += all.len() as u64;
        for (step, _) in all {
            match step {
                Step::Read(from, count) => {
                    compare(&client.memory, *offset, &model[part(from, count)], block);
                }
                Step::Write(from, count, value) => model[part(from, count)].fill(Some(value)),
                // After a discard, any content is valid.
                Step::Discard(from, count) => model[part(from, count)].fill(None),
                Step::WriteZeroes(from, count, _) => model[part(from, count)].fill(Some(0)),
                Step::Flush | Step::Row(..) | Step::Anew(..) => {}
            }
        }
    }
    let reads: Vec<(Step, usize)> = (0..32).map(|index| (Step::Read(index * 8, 8), index as usize)).collect();
    assert!(client.run(&reads, 0, block).iter().all(|result| *result == 0));
    for index in 0..32 {
        compare(&client.memory, index * 8 * block as usize, &model[index * 8..index * 8 + 8], block);
    }
    let counters = served.device.counters();
    assert_eq!((counters.requests, counters.errors), (requests + 32, 0));
    finish(served.device, client);
}

fn compare(memory: &SharedMemory, at: usize, model: &[Option<u8>], block: u64) {
    for (index, value) in model.iter().enumerate() {
        let bytes = memory.slice(at + index * block as usize, block as usize);
        assert!(
            value.is_none_or(|value| bytes.iter().all(|byte| *byte == value)),
            "block {index}: {bytes:?}"
        );
    }
}

fn finish(device: VhostUserDevice, client: Client) {
    assert!(device.stop(false).is_err(), "a front end is connected");
    drop(client);
    wait_until("it has gone", || device.connection_count() == 0);
    device.stop(false).unwrap();
}

fn rings() -> impl Strategy<Value = VirtioFeatureFlags> {
    let any_of = [
        VirtioFeatureFlags::empty(),
        VirtioFeatureFlags::RING_EVENT_IDX,
        VirtioFeatureFlags::RING_INDIRECT_DESC,
        VirtioFeatureFlags::RING_INDIRECT_DESC | VirtioFeatureFlags::RING_EVENT_IDX,
    ];
    let packed = any_of.map(|ring| ring | VirtioFeatureFlags::RING_PACKED);
    proptest::sample::select([any_of, packed].concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_guest_reads_what_was_written(
        steps in steps(256), ring in rings(), queues in 1..=3usize, kind in 0..4u8,
    ) {
        let driver = match kind {
            0 => ram(),
            1 => image(DirectIo::Off, None),
            2 => image(DirectIo::Auto, Some(512)),
            _ => image(DirectIo::Auto, Some(4096)),
        };
        check(driver, queues, ring, &steps);
    }
}

/// If rings were prepared while an engine serves, the engine could find a notifier locked and lose a call.
#[test]
fn a_device_that_serves_cannot_prepare_rings() {
    let served = serve(ram(), 1);
    assert_eq!(served.device.prepare().unwrap_err().kind(), ErrorKind::Busy);
    served.device.stop(true).unwrap();
    assert_eq!(served.device.prepare().unwrap_err().kind(), ErrorKind::Busy);
}

#[test]
fn a_tcp_socket_cannot_share_the_memory_of_a_guest() {
    let disk = Disk::builder(ram()).build().unwrap();
    let engine = EngineThread::spawn("vhost-test", vec![(disk.clone(), 0)]).unwrap();
    let inherited = TcpListener::bind("127.0.0.1:0").unwrap();
    for listen in [Listen::Tcp("127.0.0.1".into(), 0), Listen::Inherited(inherited.into())] {
        let listened =
            VhostUserDevice::listen(listen, VhostUserOptions::default(), &disk, &[engine.handle().clone()]);
        let error = listened.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("memory cannot be shared over TCP"), "{error}");
    }
}

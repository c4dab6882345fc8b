//! Tests the driver side of a ring against a device side that is written by hand.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::memory::SharedMemory;
use super::queue::{DEVICE_AT, DRIVER_AT, Queue, RING_SIZE, memory_bytes};
use super::{CONFIG_BYTES, GUEST_START, Options, parse_config};

/// A buffer: its offset in memory, its size, and whether the device writes it.
type Buffer = (usize, usize, bool);

const SOON: Duration = Duration::from_millis(200);

struct Device {
    memory: Arc<SharedMemory>,
    available: u16,
    used: u16,
}

impl Device {
    fn queue() -> (Queue, Device) {
        let options = Options { queues: 1, slots: 4, data_bytes: 4096 };
        let memory = Arc::new(SharedMemory::new(memory_bytes(&options)).unwrap());
        let queue = Queue::new(&memory, 0, &options).unwrap();
        (queue, Device { memory, available: 0, used: 0 })
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        for (byte, at) in bytes.iter_mut().zip(offset..) {
            *byte = self.memory.atomic_u8(at).load(Ordering::Relaxed);
        }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        for (byte, at) in bytes.iter().zip(offset..) {
            self.memory.atomic_u8(at).store(*byte, Ordering::Relaxed);
        }
    }

    fn u16_at(&self, offset: usize) -> u16 {
        u16::from_le(self.memory.atomic_u16(offset).load(Ordering::Acquire))
    }

    /// The next available request: its head descriptor, and its buffers.
    fn pop(&mut self) -> Option<(u16, Vec<Buffer>)> {
        if self.u16_at(DRIVER_AT + 2) == self.available {
            return None;
        }
        let head = self.u16_at(DRIVER_AT + 4 + 2 * usize::from(self.available % RING_SIZE));
        self.available = self.available.wrapping_add(1);
        let (mut table, mut at) = (0, usize::from(head));
        let mut buffers = Vec::new();
        loop {
            let mut bytes = [0; 16];
            self.read(table + 16 * at, &mut bytes);
            let address = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            let length = u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize;
            let flags = u16::from_le_bytes([bytes[12], bytes[13]]);
            let offset = (address - GUEST_START) as usize;
            if flags & 4 != 0 {
                (table, at) = (offset, 0);
                continue;
            }
            buffers.push((offset, length, flags & 2 != 0));
            if flags & 1 == 0 {
                return Some((head, buffers));
            }
            at = usize::from(u16::from_le_bytes([bytes[14], bytes[15]]));
        }
    }

    fn push(&mut self, head: u16, written: u32) {
        let at = DEVICE_AT + 4 + 8 * usize::from(self.used % RING_SIZE);
        self.memory.store_u32(at, u32::from(head));
        self.memory.store_u32(at + 4, written);
        self.used = self.used.wrapping_add(1);
        self.memory.atomic_u16(DEVICE_AT + 2).store(self.used.to_le(), Ordering::Release);
    }

    fn complete_read(&mut self, head: u16, buffers: &[Buffer], value: u8) {
        let (data, bytes, _) = buffers[1];
        self.write(data, &vec![value; bytes]);
        self.write(buffers[2].0, &[0]);
        self.push(head, bytes as u32 + 1);
    }
}

#[test]
fn requests_in_indirect_tables_complete_in_any_order() {
    let (mut queue, mut device) = Device::queue();
    for round in 0..40_u8 {
        for slot in 0..4 {
            queue.submit(slot, false, 8 * slot as u64);
        }
        queue.publish().unwrap();
        // Completes the requests in reverse order.
        let popped: Vec<_> = std::iter::from_fn(|| device.pop()).collect();
        assert_eq!(popped.len(), 4);
        let data_at: Vec<usize> = popped.iter().map(|(_, buffers)| buffers[1].0).collect();
        for (head, buffers) in popped.into_iter().rev() {
            assert_eq!(
                buffers.iter().map(|of| (of.1, of.2)).collect::<Vec<_>>(),
                [(16, false), (4096, true), (1, true)]
            );
            let mut header = [0; 16];
            device.read(buffers[0].0, &mut header);
            assert_eq!(&header[..8], &[0; 8]);
            device.complete_read(head, &buffers, round ^ header[8]);
        }
        queue.wait(SOON).unwrap();
        let mut order = Vec::new();
        queue.reap(|slot, status| order.push((slot, status))).unwrap();
        assert_eq!(order, [3, 2, 1, 0].map(|slot| (slot, 0)));
        for (slot, at) in data_at.iter().enumerate() {
            let mut data = [0; 4096];
            device.read(*at, &mut data);
            assert!(data.iter().all(|byte| *byte == round ^ (8 * slot as u8)), "round {round}, slot {slot}");
        }
    }
}

#[test]
fn a_server_is_kicked_only_when_it_requests_a_kick() {
    let (mut queue, mut device) = Device::queue();
    queue.submit(0, false, 0);
    assert!(queue.publish().unwrap(), "the server waits for index 0");
    queue.submit(1, false, 0);
    assert!(!queue.publish().unwrap(), "the server does not wait for index 1");
    device.memory.store_u16(DEVICE_AT + 4 + 8 * usize::from(RING_SIZE), 2);
    queue.submit(2, false, 0);
    assert!(queue.publish().unwrap());
    assert_eq!(std::iter::from_fn(|| device.pop()).count(), 3);
    assert!(!queue.publish().unwrap(), "nothing was submitted");
}

#[test]
fn completing_a_request_not_in_flight_is_an_error() {
    let (mut queue, mut device) = Device::queue();
    queue.submit(0, false, 0);
    queue.publish().unwrap();
    assert!(queue.wait(SOON).unwrap_err().to_string().contains("no call"));
    let (head, buffers) = device.pop().unwrap();
    device.push(head, 0);
    assert!(queue.reap(|_, _| ()).unwrap_err().to_string().contains("without a status"));
    device.complete_read(head, &buffers, 1);
    assert!(queue.reap(|_, _| ()).unwrap_err().to_string().contains("not in flight"));
    device.push(9, 0);
    assert!(queue.reap(|_, _| ()).unwrap_err().to_string().contains("descriptor 9"));
}

#[test]
fn a_configuration_is_parsed_as_virtio_specifies() {
    let mut bytes = [0; CONFIG_BYTES];
    bytes[..8].copy_from_slice(&0x1_0000_0002_u64.to_le_bytes());
    (bytes[33], bytes[34], bytes[35], bytes[36]) = (9, 2, 1, 8);
    assert_eq!(parse_config(&bytes), (0x1_0000_0002, 0x102));
}

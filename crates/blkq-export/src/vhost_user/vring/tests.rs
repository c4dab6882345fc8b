use blkq::drivers::null::{Null, NullOptions};
use blkq::testing::wait_until;
use blkq::{Disk, EngineThread};
use rustix::event::{EventfdFlags, eventfd};

use super::super::harness::{Driver, Guest, USER_OFFSET};
use super::super::simulated::Device;
use super::*;

const RING: u64 = 0x10000;
const SIZE: u16 = 16;

/// A ring with an invalid descriptor is started several times before its rejections are read.
#[test]
fn each_rejection_of_a_ring_is_reported() {
    let disk = Disk::builder(Box::new(Null::new(NullOptions::new(1 << 20)).unwrap())).build().unwrap();
    let engine = EngineThread::spawn("rejections", vec![(disk.clone(), 0)]).unwrap();
    let shared = Device::connect(&disk, engine.handle(), 1).unwrap().shared;
    let guest = Guest::new(&[(RING, Driver::BYTES)]);
    let spec = Driver::new(&guest, RING, SIZE, false, false).spec;
    // The driver makes a descriptor available that does not exist.
    let driver_area = spec.driver_area - USER_OFFSET;
    guest.put16(driver_area + 4, SIZE);
    guest.put16(driver_area + 2, 1);
    let context = || RingContext {
        memory: guest.memory.clone(),
        features: feature::VERSION_1,
        inflight: None,
        write_through: Arc::default(),
        peer: "a test".into(),
    };
    let error = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let mut vring = Vring::new(0);
    vring.set_error(&shared, Some(UntrustedFd::new(error.try_clone().unwrap()))).unwrap();
    let start = |vring: &mut Vring| {
        vring.set_size(SIZE.into()).unwrap();
        let (descriptors, used, available) = (spec.descriptors, spec.device_area, spec.driver_area);
        let addresses = VringAddresses { index: 0, flags: 0, descriptors, used, available, log: 0 };
        vring.set_addresses(addresses).unwrap();
        vring.set_kick(None).unwrap();
        vring.start(&shared, context()).unwrap();
        wait_until("it is rejected", || vring.is_rejected());
    };
    (0..2).for_each(|_| start(&mut vring));
    vring.reset();
    start(&mut vring);
    assert_eq!(vring.take_rejections(&shared).len(), 3);
    vring.stop();
    assert!(vring.take_rejections(&shared).is_empty());
    let mut count = [0; 8];
    rustix::io::read(&error, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 3);
}

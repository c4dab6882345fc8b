//! Properties of a served ring that the model checkers prove. The control thread starts and stops the ring on
//! a real engine, with different tables of memory, while the guest adds requests and another thread reads the
//! status. [`rejection_tests`] and [`wakeup_tests`] check further properties. Rings are polled, so that nothing is
//! submitted to the kernel. The engine's ring and the event of the control thread are replaced by models.

mod front_end_harness;
mod rejection_tests;
mod wakeup_tests;

use std::sync::Arc;

use blkq::drivers::null::{Null, NullOptions};
use blkq::{Disk, EngineThread};

use super::config::feature;
use super::harness::{Driver, Guest};
use super::message::VringAddresses;
use super::source::RingContext;
use super::status::Shared;
use super::vring::Vring;
#[cfg(loom)]
use loom::thread;
#[cfg(shuttle)]
use shuttle::thread;

const RING: u64 = 0x10000;
const HEADERS: u64 = 0x100000;
const REQUESTS: u32 = 2;

/// Runs `body` in different orders of its threads and prints their number. loom runs at most `most` orders
/// with at most `switches` forced switches, because a polled ring has far more; LOOM_MAX_PERMUTATIONS changes
/// that limit. shuttle runs `most` random orders.
fn model(name: &str, switches: usize, most: usize, body: impl Fn() + Send + Sync + 'static) {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = {
        let runs = runs.clone();
        move || {
            runs.fetch_add(1, Ordering::Relaxed);
            body();
        }
    };
    #[cfg(loom)]
    {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.or(Some(switches));
        builder.max_branches = 10_000;
        let orders_max = *builder.max_permutations.get_or_insert(most);
        // loom compares the number of orders with the limit only at checkpoints.
        builder.checkpoint_interval = orders_max + 1;
        builder.check(counted);
    }
    #[cfg(shuttle)]
    {
        let _ = switches;
        let mut config = shuttle::Config::new();
        config.stack_size = 256 << 10;
        shuttle::Runner::new(shuttle::scheduler::RandomScheduler::new(most), config).run(counted);
    }
    println!("{name}: {} schedules", runs.load(Ordering::Relaxed));
}

fn start_and_stop_with_new_memory() {
    let disk = Disk::builder(Box::new(Null::new(NullOptions::new(1 << 20)).unwrap())).build().unwrap();
    let engine = EngineThread::spawn("model", vec![(disk.clone(), 0)]).unwrap();
    let shared = Arc::new(Shared::new(&disk, vec![engine.handle().clone()], "model").unwrap());
    let peer: Arc<str> = "model".into();
    assert!(shared.registry.admit(&peer));
    let guest = Guest::new(&[(RING, Driver::BYTES), (HEADERS, 0x1000)]);
    let mut driver = Driver::new(&guest, RING, 16, false, false);
    let add = |driver: &mut Driver, number: u64| {
        let at = HEADERS + number * 0x400;
        guest.write(at, &[0; 16]);
        driver.add(&guest, &[(at, 16, false), (at + 0x200, 512, true), (at + 16, 1, true)], false);
    };
    let onlooker = {
        let shared = shared.clone();
        thread::spawn(move || {
            let front_end = shared.registry.front_end().unwrap();
            assert!(front_end.in_flight <= u64::from(REQUESTS));
            assert!(shared.registry.counters().requests >= front_end.counters.requests);
            assert!(!shared.registry.close_if(|it| it.is_none_or(|front_end| front_end.recorded)));
        })
    };
    let mut vring = Vring::new(0);
    let [descriptors, available, used] =
        [driver.spec.descriptors, driver.spec.driver_area, driver.spec.device_area];
    vring.set_size(16).unwrap();
    vring.set_addresses(VringAddresses { index: 0, flags: 0, descriptors, used, available, log: 0 }).unwrap();
    let mut taken = 0;
    for round in 0..2 {
        // A different table with the same memory.
        let memory = Arc::new(guest.memory.with_registrations_of(None));
        vring.set_kick(None).unwrap();
        let context = RingContext {
            memory: memory.clone(),
            features: feature::VERSION_1,
            inflight: None,
            write_through: Arc::new(std::sync::atomic::AtomicBool::new(false)),
            peer: peer.clone(),
        };
        if round == 0 {
            add(&mut driver, 0);
        }
        vring.start(&shared, context).unwrap();
        if round == 0 {
            add(&mut driver, 1);
        } else {
            while taken < REQUESTS {
                match driver.take_used(&guest) {
                    Some(_) => taken += 1,
                    None => thread::yield_now(),
                }
            }
        }
        let base = vring.stop_for_base();
        taken += std::iter::from_fn(|| driver.take_used(&guest)).count() as u32;
        assert_eq!(base, taken, "the ring continues after what it took, all of which has completed");
        assert!(vring.take_rejections(&shared).is_empty());
        assert_eq!(Arc::strong_count(&memory), 1, "the replaced table is no longer used");
    }
    assert_eq!(taken, REQUESTS);
    onlooker.join().unwrap();
    let counters = shared.registry.counters();
    assert_eq!((counters.requests, counters.errors), (u64::from(REQUESTS), 0));
    assert_eq!(shared.registry.front_end().unwrap().in_flight, 0);
    shared.registry.leave();
    assert!(shared.registry.close_if(|it| it.is_none()));
    guest.assert_intact();
    drop(engine);
}

#[cfg(loom)]
#[test]
fn loom_a_ring_that_stops_has_completed_all_it_took() {
    let name = "loom_a_ring_that_stops_has_completed_all_it_took";
    model(name, 1, 10_000, start_and_stop_with_new_memory);
}

#[cfg(shuttle)]
#[test]
fn shuttle_a_ring_that_stops_has_completed_all_it_took() {
    let name = "shuttle_a_ring_that_stops_has_completed_all_it_took";
    model(name, 1, 5_000, start_and_stop_with_new_memory);
}

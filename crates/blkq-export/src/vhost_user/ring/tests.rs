//! Tests of both kinds of ring, with a driver that was written independently and a device that may be killed.

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::vhost_user::area::crash;
use crate::vhost_user::harness::{Driver, Guest, Offer};
use crate::vhost_user::inflight::InflightRegion;

const RINGS: u64 = 0x10_0000;
const DATA: u64 = 0x20_0000;

fn guest() -> Guest {
    Guest::new(&[(RINGS, Driver::BYTES), (DATA, 0x10000)])
}

#[derive(Clone, Debug)]
enum Step {
    /// The driver adds `times` chains with this number of readable and writable buffers.
    Add {
        readable: usize,
        writable: usize,
        indirect: bool,
        times: usize,
    },
    Pop(usize),
    /// The device completes one of the chains in flight, with this number of bytes written.
    Complete(usize, u32),
    Publish,
    /// The device asks for a kick, and sleeps if no chain is available.
    Sleep,
    /// The driver takes the used chains, and then enables or disables calls.
    TakeUsed {
        calls: bool,
    },
    /// If no chain is in flight, the device stops, and starts again at the same position.
    Restart,
    /// The device is killed after this number of stores of the following steps.
    Die(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0usize..4, 0usize..4, any::<bool>(), 1usize..5)
            .prop_map(|(readable, writable, indirect, times)| Step::Add { readable, writable, indirect, times }),
        5 => (1usize..6).prop_map(Step::Pop),
        6 => (any::<usize>(), any::<u32>()).prop_map(|(which, written)| Step::Complete(which, written)),
        4 => Just(Step::Publish),
        2 => Just(Step::Sleep),
        3 => any::<bool>().prop_map(|calls| Step::TakeUsed { calls }),
        1 => Just(Step::Restart),
        1 => (0u64..40).prop_map(Step::Die),
    ]
}

struct Model {
    guest: Guest,
    driver: Driver,
    ring: Ring,
    region: Option<InflightRegion>,
    chain: Chain,
    /// Chains that are available and not taken, in order.
    waiting: VecDeque<(u16, Vec<Offer>)>,
    in_flight: Vec<(Head, Vec<Offer>)>,
    /// Chains that have completed and are not published.
    completed: Vec<(u16, u32)>,
    /// Chains that were published and not taken by the driver.
    published: VecDeque<(u16, u32)>,
    calls: bool,
    asleep: bool,
    /// For each head in flight: the order in which it was taken, and its buffers.
    taken: HashMap<u16, (u64, Vec<Offer>)>,
    takes: u64,
    salt: u32,
}

impl Model {
    fn new(size: u16, packed: bool, event_idx: bool, record: bool, start: u16) -> Model {
        crash::after(None);
        let guest = guest();
        let mut driver = Driver::new(&guest, RINGS, size, packed, event_idx);
        if !packed {
            driver.start_at(&guest, start);
        }
        driver.want_calls(&guest, true);
        let region = record.then(|| InflightRegion::create(1, size, packed).unwrap().0);
        let queue = region.as_ref().and_then(|region| region.queue(0, size, packed));
        let ring = Ring::new(Arc::clone(&guest.memory), &driver.spec, queue).unwrap();
        Model {
            guest,
            driver,
            ring,
            region,
            chain: Chain::new(),
            waiting: VecDeque::new(),
            in_flight: Vec::new(),
            completed: Vec::new(),
            published: VecDeque::new(),
            calls: true,
            asleep: false,
            taken: HashMap::new(),
            takes: 0,
            salt: 0,
        }
    }

    fn add(&mut self, readable: usize, writable: usize, indirect: bool) {
        let buffers = readable + writable;
        let descriptors = if indirect { 1 } else { buffers };
        if buffers == 0 || !self.driver.has_room(descriptors) {
            return;
        }
        let offers: Vec<Offer> = (0..buffers)
            .map(|index| {
                self.salt = self.salt.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (DATA + u64::from(self.salt >> 16), 1 + (self.salt >> 20), index >= readable)
            })
            .collect();
        let head = self.driver.add(&self.guest, &offers, indirect);
        self.waiting.push_back((head, offers));
    }

    fn kick(&mut self) {
        let added = !self.waiting.is_empty();
        let wanted = self.driver.wants_kick(&self.guest);
        if self.asleep && added {
            assert!(wanted, "the device sleeps, and gets no kick");
            self.asleep = false;
        }
    }

    fn offers(&self) -> Vec<Offer> {
        let of = |buffers: &[super::super::chain::Buffer], write| {
            buffers.iter().map(|buffer| (buffer.address, buffer.length, write)).collect::<Vec<_>>()
        };
        [of(self.chain.readable(), false), of(self.chain.writable(), true)].concat()
    }

    fn pop(&mut self) -> bool {
        let head = self.ring.pop(&mut self.chain).unwrap();
        if crash::happened() {
            return false;
        }
        let Some(head) = head else {
            assert!(self.waiting.is_empty(), "an available chain was not found");
            return false;
        };
        let (index, offers) = self.waiting.pop_front().expect("a chain that the driver did not add");
        assert_eq!((head.index, self.offers()), (index, offers.clone()));
        self.taken.insert(index, (self.takes, offers.clone()));
        self.takes += 1;
        self.in_flight.push((head, offers));
        true
    }

    fn publish(&mut self) {
        let before = self.published.len();
        let called = self.ring.publish();
        if crash::happened() {
            return;
        }
        let entered = !self.completed.is_empty();
        self.published.extend(self.completed.drain(..));
        if entered && before == 0 && self.calls {
            assert!(called, "the driver waits for a call");
        }
        assert!(entered || !called, "a call without a used chain");
    }

    fn take_used(&mut self) {
        while let Some(used) = self.driver.take_used(&self.guest) {
            let expected = self.published.pop_front().expect("used before it was published");
            assert_eq!(used, expected);
            self.taken.remove(&used.0);
        }
        assert!(self.published.is_empty(), "a published chain was not found");
    }

    fn restart(&mut self, base: u32) {
        let spec = RingSpec { base, ..self.driver.spec };
        let queue = self.region.as_ref().and_then(|region| region.queue(0, spec.size, spec.packed));
        self.ring = Ring::new(Arc::clone(&self.guest.memory), &spec, queue).unwrap();
        self.asleep = false;
    }

    fn recover(&mut self) {
        crash::after(None);
        // The driver sees either none or all of the chains that were not published yet, each at most once.
        let mut maybe: VecDeque<(u16, u32)> = std::mem::take(&mut self.published);
        let certain = maybe.len();
        maybe.extend(self.completed.drain(..));
        let mut seen = 0;
        while let Some(used) = self.driver.take_used(&self.guest) {
            assert_eq!(Some(used), maybe.pop_front());
            self.taken.remove(&used.0);
            seen += 1;
        }
        assert!(seen >= certain, "a published chain is lost");
        self.in_flight.clear();
        self.restart(self.driver.spec.base);
        // Chains in flight come in the order in which they were taken, and are followed by chains that were
        // not taken yet.
        let mut expected: Vec<(u64, u16, Vec<Offer>)> =
            self.taken.drain().map(|(head, (order, offers))| (order, head, offers)).collect();
        expected.sort();
        for (_, index, offers) in expected.into_iter().rev() {
            self.waiting.push_front((index, offers));
        }
        while self.pop() {}
        self.driver.want_calls(&self.guest, true);
        self.calls = true;
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Add { readable, writable, indirect, times } => {
                (0..times).for_each(|_| self.add(readable, writable, indirect));
                self.kick();
            }
            Step::Pop(most) => {
                self.asleep = false;
                for _ in 0..most {
                    if !self.pop() {
                        break;
                    }
                }
            }
            Step::Complete(which, written) => {
                if !self.in_flight.is_empty() {
                    let (head, _) = self.in_flight.swap_remove(which % self.in_flight.len());
                    self.ring.push_used(head, written);
                    self.completed.push((head.index, written));
                }
            }
            Step::Publish => self.publish(),
            Step::Sleep => {
                let more = self.ring.enable_kicks();
                if !crash::happened() {
                    assert_eq!(more, !self.waiting.is_empty());
                    self.asleep = !more;
                }
            }
            Step::TakeUsed { calls } => {
                self.take_used();
                self.driver.want_calls(&self.guest, calls);
                self.calls = calls;
            }
            Step::Restart => {
                if self.in_flight.is_empty() {
                    self.publish();
                    if !crash::happened() {
                        let base = self.ring.base();
                        self.driver.spec.base = base;
                        self.restart(base);
                        self.take_used();
                        self.driver.want_calls(&self.guest, true);
                        self.calls = true;
                    }
                }
            }
            Step::Die(_) => {}
        }
    }
}

fn run(size: u16, packed: bool, event_idx: bool, record: bool, start: u16, steps: &[Step]) {
    let mut model = Model::new(size, packed, event_idx, record, start);
    for step in steps {
        if let (Step::Die(stores), true) = (step, record) {
            crash::after(Some(*stores));
        }
        model.run(step);
        if crash::happened() {
            model.recover();
        }
    }
    if record {
        model.recover();
    }
    while model.pop() {}
    while let Some((head, _)) = model.in_flight.pop() {
        model.ring.push_used(head, 1);
        model.completed.push((head.index, 1));
    }
    model.publish();
    model.take_used();
    assert!(model.waiting.is_empty() && model.ring.in_flight() == 0);
    model.guest.assert_intact();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn a_split_ring_behaves_as_its_driver_expects(
        size in 0u32..6, event_idx: bool, start: u16, steps in prop::collection::vec(step(), 1..120),
    ) {
        run(1 << size, false, event_idx, false, start, &steps);
    }

    #[test]
    fn a_packed_ring_behaves_as_its_driver_expects(
        size in 1u16..20, event_idx: bool, steps in prop::collection::vec(step(), 1..120),
    ) {
        run(size, true, event_idx, false, 0, &steps);
    }

    // Contract: accepted-once
    #[test]
    fn a_killed_split_ring_completes_each_chain_once(
        size in 0u32..5, event_idx: bool, start: u16, steps in prop::collection::vec(step(), 1..120),
    ) {
        run(1 << size, false, event_idx, true, start, &steps);
    }

    // Contract: accepted-once
    #[test]
    fn a_killed_packed_ring_completes_each_chain_once(
        size in 1u16..12, event_idx: bool, steps in prop::collection::vec(step(), 1..120),
    ) {
        run(size, true, event_idx, true, 0, &steps);
    }
}

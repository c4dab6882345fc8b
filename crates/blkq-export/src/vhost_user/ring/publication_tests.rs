//! Tests the record of requests in flight after a kill at any point, also with reordered stores.
//!
//! A kill leaves what the CPU has executed, in the order of the machine code: a store with release ordering
//! comes after all accesses before it; the compiler may move other stores ahead, but not before a load with
//! acquire ordering. The tests create each allowed set of stores, and let a ring recover from it.

use std::collections::HashMap;

use super::*;
use crate::vhost_user::area::history::{self, Event};
use crate::vhost_user::harness::{Driver, Guest, Offer};
use crate::vhost_user::inflight::InflightRegion;

const RINGS: u64 = 0x10_0000;
const DATA: u64 = 0x20_0000;
/// With more stores than this that may or may not be visible, only those sets are created that contain at
/// most two of them, or all but at most two.
const ALL_SETS_MAX: usize = 6;

/// Calls `check` with each state that a kill during `events` may leave. Returns the number of states.
fn for_each_state(events: &[Event], mut check: impl FnMut()) -> usize {
    let stores = |from: usize, to: usize| {
        events[from..to].iter().filter_map(|event| match event {
            Event::Store(store) => Some(store),
            Event::Acquire => None,
        })
    };
    let all: Vec<_> = stores(0, events.len()).collect();
    history::undo(all.iter().rev().map(|store| store.before()).collect());
    let mut states = 0;
    let is_release = |event: &Event| matches!(event, Event::Store(store) if store.releases);
    let lasts = (0..events.len()).filter(|at| is_release(&events[*at])).map(|at| at + 1);
    for certain in std::iter::once(0).chain(lasts) {
        let mut early = Vec::new();
        let mut has_hidden = false;
        for event in &events[certain..] {
            match event {
                Event::Acquire if has_hidden => break,
                Event::Acquire => {}
                Event::Store(store) if store.releases => has_hidden = true,
                Event::Store(store) => early.push(store),
            }
        }
        assert!(early.len() < 32, "a window of {} stores", early.len());
        let base: Vec<_> = stores(0, certain).map(|store| store.apply()).collect();
        for set in 0_u64..1 << early.len() {
            let (visible, count) = (set.count_ones() as usize, early.len());
            if count > ALL_SETS_MAX && visible > 2 && visible < count - 2 {
                continue;
            }
            let bits = early.iter().enumerate().filter(|(bit, _)| set >> bit & 1 != 0);
            let undone: Vec<_> = bits.map(|(_, store)| store.apply()).collect();
            check();
            history::undo(undone.into_iter().rev().collect());
            states += 1;
        }
        history::undo(base.into_iter().rev().collect());
    }
    all.iter().for_each(|store| drop(store.apply()));
    states
}

struct World {
    guest: Guest,
    driver: Driver,
    region: InflightRegion,
    /// Heads that are available or in flight, in the order in which they were added.
    outstanding: Vec<u16>,
    offers: HashMap<u16, Vec<Offer>>,
}

impl World {
    fn new(size: u16, packed: bool) -> World {
        let guest = Guest::new(&[(RINGS, Driver::BYTES), (DATA, 0x10000)]);
        let driver = Driver::new(&guest, RINGS, size, packed, false);
        let region = InflightRegion::create(1, size, packed).unwrap().0;
        World { guest, driver, region, outstanding: Vec::new(), offers: HashMap::new() }
    }

    fn open(&self) -> Ring {
        let spec = &self.driver.spec;
        let queue = self.region.queue(0, spec.size, spec.packed);
        Ring::new(Arc::clone(&self.guest.memory), spec, queue).unwrap()
    }

    fn add(&mut self, number: u64, buffers: u64) {
        if self.driver.has_room(buffers as usize) {
            let offer =
                |index| (DATA + 256 * number + 16 * index, 1 + (number * 7 + index) as u32, index > 0);
            let offers: Vec<Offer> = (0..buffers).map(offer).collect();
            let head = self.driver.add(&self.guest, &offers, false);
            self.outstanding.push(head);
            self.offers.insert(head, offers);
        }
    }

    fn take_used(&mut self) {
        while let Some((head, _)) = self.driver.take_used(&self.guest) {
            self.outstanding.retain(|other| *other != head);
        }
    }

    /// Checks that the next daemon completes all chains that the driver does not see as used, each once and
    /// in order.
    fn check_recovery(&self) {
        let mut driver = self.driver.clone();
        let mut expected = self.outstanding.clone();
        while let Some((head, _)) = driver.take_used(&self.guest) {
            expected.retain(|other| *other != head);
        }
        history::begin();
        let mut ring = self.open();
        let mut chain = Chain::new();
        let mut taken = Vec::new();
        while let Some(head) = ring.pop(&mut chain).unwrap() {
            let of = |buffers: &[super::super::chain::Buffer], write| {
                buffers.iter().map(|buffer| (buffer.address, buffer.length, write)).collect::<Vec<Offer>>()
            };
            let offers = [of(chain.readable(), false), of(chain.writable(), true)].concat();
            assert_eq!(offers, self.offers[&head.index], "of {head:?}");
            taken.push(head);
        }
        assert_eq!(taken.iter().map(|head| head.index).collect::<Vec<_>>(), expected);
        taken.into_iter().for_each(|head| ring.push_used(head, 1));
        ring.publish();
        let used: Vec<u16> = std::iter::from_fn(|| driver.take_used(&self.guest)).map(|it| it.0).collect();
        assert_eq!(used, expected);
        let stores = history::take();
        history::undo(stores.iter().rev().filter_map(Event::before).collect());
    }
}

fn run(size: u16, packed: bool) {
    let mut world = World::new(size, packed);
    history::begin();
    let mut ring = world.open();
    let mut states = for_each_state(&history::take(), || world.check_recovery());
    let mut chain = Chain::new();
    let mut in_flight = Vec::new();
    for turn in 0..3 * u64::from(size) {
        (0..1 + turn % 2).for_each(|index| world.add(2 * turn + index, 1 + (turn + index) % 2));
        history::begin();
        while let Some(head) = ring.pop(&mut chain).unwrap() {
            in_flight.push(head);
        }
        // The chains complete in another order than they were taken, and one stays in flight.
        if in_flight.len() > 1 {
            let first = in_flight.remove(turn as usize % in_flight.len());
            ring.push_used(first, 1);
        }
        while in_flight.len() > 1 {
            ring.push_used(in_flight.pop().unwrap(), 1);
        }
        ring.publish();
        states += for_each_state(&history::take(), || world.check_recovery());
        world.take_used();
    }
    assert!(states > 100, "{states} states");
    println!("{states} states");
    world.guest.assert_intact();
}

// Contract: accepted-once
#[test]
fn a_split_ring_recovers_from_stores_in_any_allowed_order() {
    run(4, false);
}

// Contract: accepted-once
#[test]
fn a_packed_ring_recovers_from_stores_in_any_allowed_order() {
    run(5, true);
}

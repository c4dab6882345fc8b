//! A guest that fills its rings with as many descriptors as fit, in requests that complete at once. A turn of the engine
//! does a bounded part of them, and a client of the same engine over NBD makes progress.

use std::collections::BTreeMap;

use blkq::random::Random;
use blkq_export::nbd::simulated;
use blkq_export::vhost_user::simulated::{Guest, Offer};
use blkq_simulation::Faults;

use super::super::client::Client;
use super::super::life::{Server, TURNS_MAX, World, begin, finish};
use super::super::worlds::Worlds;
use super::front_end::FrontEnd;
use super::machine::{FREE, Machine};
use super::wiring::Wiring;

/// Number of entries of the simulated driver's indirect tables.
const TABLE: u64 = 8;
/// Items of work after which a turn begins no further request of a ring (`TURN_BUDGET` of blkq).
const TURN_ITEMS: usize = 256;
/// Size of each data buffer. All requests share their memory.
const BUFFER_BYTES: u64 = 512;
/// Addresses of the status byte, and of the data.
const STATUS: u64 = FREE + 0x100;
const DATA: u64 = FREE + 0x200;
/// Types of requests that complete at once: a read beyond the end, the serial number, and an unknown one.
const TYPES: [u32; 3] = [0, 8, 77];
/// Requests of the NBD client that must be answered.
const REPLIES: u64 = 20;

/// Runs `seed`. Returns the number of turns that did all that a turn may do for a ring, and the digest of the kernel's
/// operations.
pub fn fill_rings(seed: u64) -> (u64, u64) {
    let (setup, world) = begin(seed, None, Worlds::NONE);
    {
        let world = &mut *world.borrow_mut();
        let wiring = Wiring { size: 64, indirect: true, ..Wiring::new(&mut world.chance) };
        world.machine = Some(Machine::new(wiring, &mut world.chance, world.common.now));
        world.begin(&setup);
        world.set_faults(Faults::default());
        (world.common.errors_allowed, world.common.slow) = (false, false);
    }
    let mut front = FrontEnd::default();
    front.connect(&world);
    let full = {
        let World { chance, common, machine, server, .. } = &mut *world.borrow_mut();
        let (machine, Server { engine, .. }) = (machine.as_mut().unwrap(), server.as_mut().unwrap());
        // While the front end waited for the device, the machine sent requests as in the other worlds.
        machine.drain(common, engine, TURNS_MAX);
        let mut offered: Vec<Offered> = machine.rings.iter().map(|_| Offered::default()).collect();
        write_headers(&machine.guest);
        let source = setup.serve(engine, Worlds::NONE);
        let (mut client, socket) = Client::new(chance, "");
        engine.handle().send(source, simulated::client(socket));
        let (mut full, mut turns) = (0, 0);
        let enough = common.replies + REPLIES;
        while common.replies < enough {
            for (index, offered) in offered.iter_mut().enumerate() {
                offered.fill(machine, index, chance);
            }
            client.act(chance, common);
            engine.turn();
            for (index, offered) in offered.iter_mut().enumerate() {
                let done = offered.take_used(machine, index);
                assert!(
                    done < TURN_ITEMS + TABLE as usize,
                    "a turn processed {done} descriptors of one ring"
                );
                full += u64::from(done >= TURN_ITEMS);
            }
            turns += 1;
            assert!(turns < TURNS_MAX, "a guest keeps another client of the engine waiting");
        }
        while !(client.is_idle() && offered.iter().all(|offered| offered.descriptors.is_empty())) {
            client.transfer(chance, common);
            engine.turn();
            for (index, offered) in offered.iter_mut().enumerate() {
                offered.take_used(machine, index);
            }
            turns += 1;
            assert!(turns < 2 * TURNS_MAX, "requests are not answered");
        }
        // While the front end disconnects, the machine sends requests again, and checks which memory has changed.
        machine.guest.expect(&[(STATUS, 1), (DATA, TABLE * BUFFER_BYTES)]);
        full
    };
    front.disconnect();
    let Server { engine, .. } = world.borrow_mut().server.take().unwrap();
    engine.stop();
    (full, finish(&world).digest)
}

fn header(kind: usize) -> u64 {
    FREE + 16 * kind as u64
}

fn write_headers(guest: &Guest) {
    for (kind, code) in TYPES.iter().enumerate() {
        guest.write(header(kind), &u64::from(*code).to_le_bytes());
        guest.write(header(kind) + 8, &u64::MAX.to_le_bytes());
    }
}

/// The requests of a ring: the number of descriptors by head.
#[derive(Default)]
struct Offered {
    descriptors: BTreeMap<u16, usize>,
}

impl Offered {
    /// Makes requests available until the ring is full.
    fn fill(&mut self, machine: &mut Machine, index: usize, chance: &mut Random) {
        let Machine { guest, rings, .. } = machine;
        let ring = &mut rings[index];
        while ring.driver.has_room(1) {
            let header = header(chance.below(TYPES.len() as u64) as usize);
            let mut offers: Vec<Offer> = vec![(header, 16, false)];
            let data = 0..3 + chance.below(TABLE - 4);
            offers.extend(data.map(|place| (DATA + place * BUFFER_BYTES, BUFFER_BYTES as u32, true)));
            offers.push((STATUS, 1, true));
            let head = ring.driver.add(guest, &offers, true);
            self.descriptors.insert(head, offers.len());
        }
        rustix::io::write(&ring.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// Returns the number of descriptors of the requests that the device has used since the last call.
    fn take_used(&mut self, machine: &mut Machine, index: usize) -> usize {
        let Machine { guest, rings, .. } = machine;
        let used = std::iter::from_fn(|| rings[index].driver.take_used(guest));
        used.map(|(head, _)| self.descriptors.remove(&head).expect("a used chain was available")).sum()
    }
}

//! The driver side of a split ring (virtio 1.2, 2.7). Each request slot has a descriptor and a table of indirect
//! descriptors, so that no descriptor has to be allocated.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::connection::{self, Connection, vring_state};
use super::memory::SharedMemory;
use crate::{Result, ensure};

/// Address of the memory in the guest. It differs from the address in this process, so that a server that confuses
/// both is detected.
pub const GUEST_START: u64 = 1 << 32;
/// Entries of a ring: QEMU's default for virtio-blk.
pub const RING_SIZE: u16 = 128;

const PAGE_BYTES: usize = 4096;
const DESCRIPTOR_BYTES: usize = 16;
/// Descriptor flags: VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE and VIRTQ_DESC_F_INDIRECT.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Size of a slot, and the offsets of the status and of the table of indirect descriptors in it. The header is at 0.
const SLOT_BYTES: usize = 128;
const STATUS_AT: usize = 16;
const TABLE_AT: usize = 64;
/// Stored before a request is submitted; no device writes this status.
const NO_STATUS: u8 = 0xff;

/// Offsets of the parts of a queue in its memory, which begins with the descriptors: the driver's ring, the device's
/// ring, the slots, and their data.
pub(super) const DRIVER_AT: usize = PAGE_BYTES;
pub(super) const DEVICE_AT: usize = 2 * PAGE_BYTES;
const SLOTS_AT: usize = 3 * PAGE_BYTES;
const DATA_AT: usize = SLOTS_AT + SLOT_BYTES * RING_SIZE as usize;

/// Queues and memory of a front end.
pub struct Options {
    pub queues: usize,
    /// Maximum requests in flight on each queue, at most [`RING_SIZE`].
    pub slots: usize,
    /// Size of the data buffer of each request.
    pub data_bytes: usize,
}

/// Size of the memory of each queue.
pub(super) fn memory_bytes(options: &Options) -> usize {
    assert!(options.slots <= usize::from(RING_SIZE), "{} requests do not fit into a ring", options.slots);
    DATA_AT + options.slots * options.data_bytes.next_multiple_of(PAGE_BYTES)
}

/// A queue, used by one thread at a time.
pub struct Queue {
    memory: Arc<SharedMemory>,
    /// Offset of the queue's part of the memory.
    start: usize,
    data_bytes: usize,
    kick: OwnedFd,
    call: OwnedFd,
    /// Next entry of the available ring.
    available: u16,
    /// The index of the available ring that was last published.
    published: u16,
    /// Next entry of the used ring.
    used: u16,
    in_flight: Vec<bool>,
}

impl Queue {
    pub(super) fn new(memory: &Arc<SharedMemory>, start: usize, options: &Options) -> Result<Queue> {
        Ok(Queue {
            memory: Arc::clone(memory),
            start,
            data_bytes: options.data_bytes,
            kick: eventfd(0, EventfdFlags::CLOEXEC)?,
            call: eventfd(0, EventfdFlags::CLOEXEC)?,
            available: 0,
            published: 0,
            used: 0,
            in_flight: vec![false; options.slots],
        })
    }

    /// Describes the ring to the server as ring number `index`.
    pub(super) fn hand_over(&self, index: u32, connection: &mut Connection) -> Result {
        let user = |offset: usize| self.memory.address() + (self.start + offset) as u64;
        let number = u64::from(index);
        // struct vhost_vring_addr, without flags and without a log of dirty pages.
        let addresses = [number, user(0), user(DEVICE_AT), user(DRIVER_AT), 0];
        connection.set(connection::SET_VRING_NUM, &vring_state(index, u32::from(RING_SIZE)), None)?;
        connection.set(connection::SET_VRING_BASE, &vring_state(index, u32::from(self.used)), None)?;
        connection.set(connection::SET_VRING_ADDR, &addresses, None)?;
        connection.set(connection::SET_VRING_CALL, &[number], Some(self.call.as_fd()))?;
        connection.set(connection::SET_VRING_KICK, &[number], Some(self.kick.as_fd()))
    }

    fn slot_at(&self, slot: usize) -> usize {
        self.start + SLOTS_AT + slot * SLOT_BYTES
    }

    fn data_at(&self, slot: usize) -> usize {
        self.start + DATA_AT + slot * self.data_bytes.next_multiple_of(PAGE_BYTES)
    }

    fn descriptor(&self, at: usize, offset: usize, bytes: usize, flags: u16, next: u16) {
        self.memory.store_u64(at, GUEST_START + offset as u64);
        self.memory.store_u32(at + 8, bytes as u32);
        self.memory.store_u16(at + 12, flags);
        self.memory.store_u16(at + 14, next);
    }

    /// Fills `slot`, which must not be in flight, with a request that reads or writes the slot's whole data buffer.
    /// `sector` is the first sector, in units of 512 bytes. The server sees the request after
    /// [`publish`](Queue::publish).
    pub fn submit(&mut self, slot: usize, write: bool, sector: u64) {
        let was_in_flight = std::mem::replace(&mut self.in_flight[slot], true);
        assert!(!was_in_flight, "slot {slot} is in flight");
        let place = self.slot_at(slot);
        // VIRTIO_BLK_T_IN or VIRTIO_BLK_T_OUT.
        self.memory.store_u32(place, u32::from(write));
        self.memory.store_u32(place + 4, 0);
        self.memory.store_u64(place + 8, sector);
        self.memory.atomic_u8(place + STATUS_AT).store(NO_STATUS, Ordering::Relaxed);
        let table = place + TABLE_AT;
        let parts = [
            (place, 16, NEXT),
            (self.data_at(slot), self.data_bytes, if write { NEXT } else { NEXT | WRITE }),
            (place + STATUS_AT, 1, WRITE),
        ];
        for (index, (offset, bytes, flags)) in (0..).zip(parts) {
            self.descriptor(table + DESCRIPTOR_BYTES * index, offset, bytes, flags, (index + 1) as u16);
        }
        // The descriptor in the ring has the number of its slot.
        let at = self.start + DESCRIPTOR_BYTES * slot;
        self.descriptor(at, table, DESCRIPTOR_BYTES * parts.len(), INDIRECT, 0);
        let entry = usize::from(self.available % RING_SIZE);
        self.memory.store_u16(self.start + DRIVER_AT + 4 + 2 * entry, slot as u16);
        self.available = self.available.wrapping_add(1);
    }

    /// Makes all submitted requests visible to the server, and kicks it if it requests a kick. Returns
    /// whether it was kicked.
    pub fn publish(&mut self) -> Result<bool> {
        let before = std::mem::replace(&mut self.published, self.available);
        if before == self.available {
            return Ok(false);
        }
        let index = self.memory.atomic_u16(self.start + DRIVER_AT + 2);
        index.store(self.available.to_le(), Ordering::Release);
        // Orders the store of the index before the load of the server's event index: either the server sees the new
        // index, or this side sees that the server waits for a kick. Only SeqCst orders a store before a load.
        fence(Ordering::SeqCst);
        let event = self.memory.atomic_u16(self.start + DEVICE_AT + 4 + 8 * usize::from(RING_SIZE));
        let event = u16::from_le(event.load(Ordering::Relaxed));
        let wanted = self.available.wrapping_sub(event).wrapping_sub(1) < self.available.wrapping_sub(before);
        if wanted {
            rustix::io::write(&self.kick, &1_u64.to_ne_bytes())?;
        }
        Ok(wanted)
    }

    fn used_index(&self) -> u16 {
        u16::from_le(self.memory.atomic_u16(self.start + DEVICE_AT + 2).load(Ordering::Acquire))
    }

    /// Passes the slot and the status of each completed request to `completed`. Fails if the server completes a request
    /// that is not in flight, or writes no status.
    pub fn reap(&mut self, mut completed: impl FnMut(usize, u8)) -> Result {
        let end = self.used_index();
        while self.used != end {
            let at = self.start + DEVICE_AT + 4 + 8 * usize::from(self.used % RING_SIZE);
            self.used = self.used.wrapping_add(1);
            let slot = self.memory.load_u32(at) as usize;
            let in_flight = self.in_flight.get_mut(slot).is_some_and(std::mem::take);
            ensure(in_flight, || format!("the server completed descriptor {slot}, which is not in flight"))?;
            let status = self.memory.atomic_u8(self.slot_at(slot) + STATUS_AT).load(Ordering::Relaxed);
            let has_status = status != NO_STATUS;
            ensure(has_status, || format!("the server completed descriptor {slot} without a status"))?;
            completed(slot, status);
        }
        Ok(())
    }

    /// Sleeps until a request has completed. Returns the number of signals from the server; 0 if one had
    /// completed before. Fails if nothing completes within `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<u32> {
        let time: rustix::event::Timespec = limit.try_into()?;
        for calls in 0.. {
            self.memory.store_u16(self.start + DRIVER_AT + 4 + 2 * usize::from(RING_SIZE), self.used);
            // Orders the store of the event index before the load of the used index, as in `publish`.
            fence(Ordering::SeqCst);
            if self.used_index() != self.used {
                return Ok(calls);
            }
            if poll(&mut [PollFd::new(&self.call, PollFlags::IN)], Some(&time))? == 0 {
                break;
            }
            // This read does not block, because no other thread reads the eventfd.
            rustix::io::read(&self.call, &mut [0; 8])?;
        }
        Err(format!("no call from the server within {limit:?}").into())
    }
}

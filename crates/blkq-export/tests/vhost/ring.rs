//! The driver's side of a ring, split or packed, at its place in the memory.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use super::{F_EVENT_IDX, F_INDIRECT, F_PACKED, FrontEnd, Memory, RING, SIZE};

/// Where headers and statuses are: 32 bytes for each request of a ring.
const HEADERS: usize = 32 << 10;
/// Where tables of descriptors are: of 8 for each request.
const TABLES: usize = 40 << 10;
/// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// The same of a packed ring: which lap it was made available in, and used.
const LAPS: u16 = 0x8080;

/// A buffer of a chain: an address of the guest, bytes, and whether the device writes it.
pub type Buffer = (u64, u32, bool);

/// A ring.
pub struct Ring {
    pub index: u32,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    features: u64,
    /// Heads that are free, each with four descriptors; in a packed ring they are identifiers.
    pub free: Vec<u16>,
    /// Chains of a split ring that were made available, descriptors of a packed one; and those used.
    available: u16,
    pub used: u16,
    /// Descriptors of the chain of each identifier.
    taken: [u16; SIZE as usize],
}

impl Ring {
    /// Ring `index` of a driver that has `features`.
    pub fn new(index: u32, features: u64) -> Ring {
        let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let mut ring = Ring {
            index,
            kick: event(),
            call: event(),
            features,
            free: Vec::new(),
            available: 0,
            used: 0,
            taken: [0; SIZE as usize],
        };
        ring.forget();
        ring
    }

    fn forget(&mut self) {
        self.free = (0..SIZE / 4).rev().map(|number| number * 4).collect();
        (self.available, self.used) = (0, 0);
    }

    /// A driver begins anew: nothing is in the ring.
    pub fn clear(&mut self, memory: &Memory) {
        memory.bytes(self.base(), HEADERS).fill(0);
        self.forget();
    }

    fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    pub fn base(&self) -> usize {
        self.index as usize * RING
    }

    pub fn available_at(&self) -> usize {
        self.base() + usize::from(SIZE) * 16
    }

    pub fn used_at(&self) -> usize {
        self.base() + 4096
    }

    /// Where header and status of request `head` are.
    pub fn header(&self, head: u16) -> usize {
        self.base() + HEADERS + usize::from(head) * 32
    }

    /// A count of descriptors as a packed ring has it: a place, and the lap.
    fn position(count: u16) -> u16 {
        (count % SIZE) | (u16::from((count / SIZE).is_multiple_of(2)) << 15)
    }

    /// A count as vhost-user has it.
    pub fn vring_base(&self, count: u16) -> u32 {
        if !self.has(F_PACKED) {
            return count.into();
        }
        let position = u32::from(Ring::position(count));
        position | position << 16
    }

    /// The count of which that is the base.
    pub fn count(&self, base: u32) -> u16 {
        let is_it = |ahead: &u16| self.vring_base(self.used.wrapping_add(*ahead)) == base;
        let ahead = (0..=self.available.wrapping_sub(self.used)).find(is_it);
        self.used.wrapping_add(ahead.unwrap_or_else(|| panic!("no position of the driver: {base:#x}")))
    }

    /// Writes descriptor `index` of the table at `table`; its last word is the identifier, or the next one.
    fn put(
        memory: &Memory,
        table: usize,
        index: u16,
        (at, bytes, _): Buffer,
        flags: u16,
        last: u16,
        packed: bool,
    ) {
        let place = table + usize::from(index) * 16;
        let (flags_at, last_at) = if packed { (14, 12) } else { (12, 14) };
        memory.at::<AtomicU64>(place).store(at, Ordering::Relaxed);
        memory.at::<AtomicU32>(place + 8).store(bytes, Ordering::Relaxed);
        memory.at::<AtomicU16>(place + last_at).store(last, Ordering::Relaxed);
        memory.at::<AtomicU16>(place + flags_at).store(flags, Ordering::Release);
    }

    /// Writes descriptor `index` of a split ring.
    pub fn descriptor(&self, memory: &Memory, index: u16, buffer: Buffer, flags: u16, next: u16) {
        Ring::put(memory, self.base(), index, buffer, flags, next, false);
    }

    /// Makes a chain available. Every other one, and what is longer than four, is in a table if the driver
    /// has those.
    pub fn add(&mut self, memory: &Memory, head: u16, buffers: &[Buffer]) {
        let packed = self.has(F_PACKED);
        let own = |buffer: &Buffer| if buffer.2 { WRITE } else { 0 };
        if self.has(F_INDIRECT) && (buffers.len() > 4 || head & 4 != 0) {
            let table = self.base() + TABLES + usize::from(head) / 4 * 128;
            for (index, buffer) in (0..).zip(buffers) {
                let next = if packed || usize::from(index) + 1 == buffers.len() { 0 } else { NEXT };
                Ring::put(memory, table, index, *buffer, own(buffer) | next, index + 1, packed);
            }
            let table = (FrontEnd::guest(table), 16 * buffers.len() as u32, false);
            return self.add_direct(memory, head, &[(table, INDIRECT)]);
        }
        let flags = |buffer| own(buffer) | NEXT;
        let mut chain: Vec<(Buffer, u16)> = buffers.iter().map(|buffer| (*buffer, flags(buffer))).collect();
        chain.last_mut().unwrap().1 &= !NEXT;
        self.add_direct(memory, head, &chain);
    }

    fn add_direct(&mut self, memory: &Memory, head: u16, chain: &[(Buffer, u16)]) {
        assert!(chain.len() <= 4);
        if !self.has(F_PACKED) {
            for (index, (buffer, flags)) in (head..).zip(chain) {
                self.descriptor(memory, index, *buffer, *flags, index + 1);
            }
            return self.make_available(memory, head);
        }
        // The first one last, which makes all of them available.
        for (index, (buffer, flags)) in (0..chain.len() as u16).zip(chain).rev() {
            let position = Ring::position(self.available.wrapping_add(index));
            let lap = if position >> 15 == 1 { 0x80 } else { 0x8000 };
            Ring::put(memory, self.base(), position % SIZE, *buffer, flags | lap, head, true);
        }
        self.taken[usize::from(head)] = chain.len() as u16;
        self.available = self.available.wrapping_add(chain.len() as u16);
    }

    /// Makes the chain of a split ring available that begins with descriptor `head`.
    pub fn make_available(&mut self, memory: &Memory, head: u16) {
        let entry = self.available_at() + 4 + usize::from(self.available % SIZE) * 2;
        self.available = self.available.wrapping_add(1);
        memory.at::<AtomicU16>(entry).store(head, Ordering::Relaxed);
        memory.at::<AtomicU16>(self.available_at() + 2).store(self.available, Ordering::Release);
    }

    /// The chain at `count` that the device has used: its head, its bytes, and the count behind it.
    fn used_chain(&self, memory: &Memory, count: u16) -> Option<(u16, u32, u16)> {
        if !self.has(F_PACKED) {
            let index = memory.at::<AtomicU16>(self.used_at() + 2).load(Ordering::Acquire);
            if index == count {
                return None;
            }
            let entry = self.used_at() + 4 + usize::from(count % SIZE) * 8;
            let head = memory.at::<AtomicU32>(entry).load(Ordering::Relaxed) as u16;
            let length = memory.at::<AtomicU32>(entry + 4).load(Ordering::Relaxed);
            return Some((head, length, count.wrapping_add(1)));
        }
        let position = Ring::position(count);
        let place = self.base() + usize::from(position % SIZE) * 16;
        let laps = if position >> 15 == 1 { LAPS } else { 0 };
        let flags = memory.at::<AtomicU16>(place + 14).load(Ordering::Acquire);
        if count == self.available || flags & LAPS != laps {
            return None;
        }
        let head = memory.at::<AtomicU16>(place + 12).load(Ordering::Relaxed);
        let length = memory.at::<AtomicU32>(place + 8).load(Ordering::Relaxed);
        assert!(head < SIZE && head.is_multiple_of(4), "no identifier of the driver: {head}");
        Some((head, length, count.wrapping_add(self.taken[usize::from(head)])))
    }

    /// The next chain that the device has used: its head, and its bytes.
    pub fn take_used(&mut self, memory: &Memory) -> Option<(u16, u32)> {
        let (head, length, behind) = self.used_chain(memory, self.used)?;
        self.used = behind;
        assert!(!self.free.contains(&head), "descriptor {head} completed twice");
        self.free.push(head);
        Some((head, length))
    }

    /// How much the device has published as used.
    pub fn published(&self, memory: &Memory) -> u16 {
        let mut count = self.used;
        while let Some((_, _, behind)) = self.used_chain(memory, count) {
            count = behind;
        }
        count
    }

    /// Asks for a call at the next chain that is used, where calls are asked for.
    pub fn want_call(&self, memory: &Memory) {
        if !self.has(F_EVENT_IDX) {
            return;
        }
        if self.has(F_PACKED) {
            let event = memory.at::<AtomicU16>(self.available_at());
            event.store(Ring::position(self.used), Ordering::Relaxed);
            memory.at::<AtomicU16>(self.available_at() + 2).store(2, Ordering::Release);
        } else {
            let event = self.available_at() + 4 + usize::from(SIZE) * 2;
            memory.at::<AtomicU16>(event).store(self.used, Ordering::Relaxed);
        }
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}

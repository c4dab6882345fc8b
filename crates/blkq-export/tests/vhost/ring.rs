//! The driver's side of a ring, split or packed, at a fixed offset of the memory.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use super::{F_EVENT_IDX, F_INDIRECT, F_PACKED, FrontEnd, Memory, RING, SIZE};

/// Offset of the headers and status bytes in a ring's part of the memory: 32 bytes for each head.
const HEADERS: usize = 32 << 10;
/// Offset of the indirect tables: 8 descriptors for each request.
const TABLES: usize = 40 << 10;
// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// The flags of a packed ring that say in which lap a descriptor was made available and used.
const LAPS: u16 = 0x8080;

/// A buffer of a chain: guest address, length, and whether the device writes it.
pub type Buffer = (u64, u32, bool);

pub struct Ring {
    pub index: u32,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    features: u64,
    /// Free heads, each with four descriptors of its own. In a packed ring, heads are identifiers.
    pub free: Vec<u16>,
    /// Number of chains of a split ring, or of descriptors of a packed one, that were made available.
    available: u16,
    pub used: u16,
    /// For each identifier: the number of descriptors of its chain.
    taken: [u16; SIZE as usize],
}

impl Ring {
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

    /// Offset of the header of the request `head`, which the status byte follows.
    pub fn header(&self, head: u16) -> usize {
        self.base() + HEADERS + usize::from(head) * 32
    }

    /// The position of a packed ring after `count` descriptors: an index and the wrap counter.
    fn position(count: u16) -> u16 {
        (count % SIZE) | (u16::from((count / SIZE).is_multiple_of(2)) << 15)
    }

    /// The base after `count`, as SET_VRING_BASE encodes it.
    pub fn vring_base(&self, count: u16) -> u32 {
        if !self.has(F_PACKED) {
            return count.into();
        }
        let position = u32::from(Ring::position(count));
        position | position << 16
    }

    pub fn count(&self, base: u32) -> u16 {
        let is_it = |ahead: &u16| self.vring_base(self.used.wrapping_add(*ahead)) == base;
        let ahead = (0..=self.available.wrapping_sub(self.used)).find(is_it);
        self.used.wrapping_add(ahead.unwrap_or_else(|| panic!("no position of the driver: {base:#x}")))
    }

    /// Writes a descriptor at offset `table`. `last` is the identifier, or the next descriptor's index.
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

    pub fn descriptor(&self, memory: &Memory, index: u16, buffer: Buffer, flags: u16, next: u16) {
        Ring::put(memory, self.base(), index, buffer, flags, next, false);
    }

    /// Makes a chain available. If the driver has indirect tables, every other chain and each of more than
    /// four buffers is in one.
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
        // The first descriptor is written last, because it makes all of them available.
        for (index, (buffer, flags)) in (0..chain.len() as u16).zip(chain).rev() {
            let position = Ring::position(self.available.wrapping_add(index));
            let lap = if position >> 15 == 1 { 0x80 } else { 0x8000 };
            Ring::put(memory, self.base(), position % SIZE, *buffer, flags | lap, head, true);
        }
        self.taken[usize::from(head)] = chain.len() as u16;
        self.available = self.available.wrapping_add(chain.len() as u16);
    }

    pub fn make_available(&mut self, memory: &Memory, head: u16) {
        let entry = self.available_at() + 4 + usize::from(self.available % SIZE) * 2;
        self.available = self.available.wrapping_add(1);
        memory.at::<AtomicU16>(entry).store(head, Ordering::Relaxed);
        memory.at::<AtomicU16>(self.available_at() + 2).store(self.available, Ordering::Release);
    }

    /// The used chain at position `count`: head, number of bytes written, and next position.
    fn used_chain(&self, memory: &Memory, count: u16) -> Option<(u16, u32, u16)> {
        if !self.has(F_PACKED) {
            // Acquire: the device writes the entries of the used ring before the index.
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
        // Acquire: the device writes the flags after the rest of the descriptor.
        let flags = memory.at::<AtomicU16>(place + 14).load(Ordering::Acquire);
        if count == self.available || flags & LAPS != laps {
            return None;
        }
        let head = memory.at::<AtomicU16>(place + 12).load(Ordering::Relaxed);
        let length = memory.at::<AtomicU32>(place + 8).load(Ordering::Relaxed);
        assert!(head < SIZE && head.is_multiple_of(4), "no identifier of the driver: {head}");
        Some((head, length, count.wrapping_add(self.taken[usize::from(head)])))
    }

    pub fn take_used(&mut self, memory: &Memory) -> Option<(u16, u32)> {
        let (head, length, behind) = self.used_chain(memory, self.used)?;
        self.used = behind;
        assert!(!self.free.contains(&head), "descriptor {head} completed twice");
        self.free.push(head);
        Some((head, length))
    }

    pub fn published(&self, memory: &Memory) -> u16 {
        let mut count = self.used;
        while let Some((_, _, behind)) = self.used_chain(memory, count) {
            count = behind;
        }
        count
    }

    /// Asks for a call at the next used chain, if calls must be requested.
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
        // The device must see the request before this side reads the used ring again; otherwise a call could
        // be lost.
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}

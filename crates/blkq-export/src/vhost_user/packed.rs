//! A packed ring (virtio 1.2, 2.8): one table that both sides write, whose flags carry the turn.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::area::Area;
use super::chain::{
    Chain, DESCRIPTOR_BYTES, DESCRIPTOR_INDIRECT, DESCRIPTOR_NEXT, DESCRIPTOR_WRITE, Head, Part, RingError,
};
use super::descriptor::{Descriptor, Layout, area, indirect_entries, indirect_entry, needs_event};
use super::memory::{Cursor, GuestMemory};

/// Bits of a descriptor's flags: who made it, in which lap.
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// Where the flags are in a descriptor, and the identifier.
const LENGTH_AT: usize = 8;
const ID_AT: usize = 12;
const FLAGS_AT: usize = 14;
/// An event suppression area: a position with its lap, then one of these.
const EVENT_BYTES: usize = 4;
const EVENT_ENABLE: u16 = 0;
const EVENT_DISABLE: u16 = 1;
const EVENT_AT: u16 = 2;

/// A place in the ring, and the lap's bit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Position {
    index: u16,
    wrap: bool,
}

impl Position {
    /// Of the 16 bits that messages and event areas have.
    fn of(bits: u16) -> Position {
        Position { index: bits & 0x7fff, wrap: bits & 0x8000 != 0 }
    }

    fn bits(self) -> u16 {
        self.index | if self.wrap { 0x8000 } else { 0 }
    }

    /// `slots` further, at most a lap.
    #[inline]
    fn advance(&mut self, slots: u16, size: u16) {
        self.index += slots;
        if self.index >= size {
            self.index -= size;
            self.wrap = !self.wrap;
        }
    }
}

/// The device's side of a packed ring.
pub struct PackedRing {
    descriptors: Area,
    driver_event: Area,
    device_event: Area,
    size: u16,
    event_idx: bool,
    indirect: bool,
    /// Where the next chain will be.
    next: Position,
    /// Where the next used descriptor goes, behind what is not published.
    used: Position,
    /// Descriptors that were taken and are not used: never more than the ring has.
    in_flight: u16,
    /// The first used descriptor that the driver does not see yet: where, and its flags.
    unpublished: Option<(u16, u16)>,
    /// Descriptors since the last publication.
    entered: u16,
    /// The first time the driver is called.
    call_first: bool,
    memory: Arc<GuestMemory>,
    cursor: Cursor,
}

impl PackedRing {
    /// The ring in `memory`. `base` has the position of the next chain in its lower half, that of the
    /// next used descriptor in its upper half.
    ///
    /// # Errors
    /// A size of 0 or beyond 32768; a position beyond the ring; a part that is not inside one region.
    pub fn new(memory: &Arc<GuestMemory>, layout: &Layout, base: u32) -> Result<PackedRing, RingError> {
        let &Layout { size, event_idx, indirect, .. } = layout;
        if size == 0 || size > 1 << 15 {
            return Err(RingError::Size { size: size.into() });
        }
        let (next, used) = (Position::of(base as u16), Position::of((base >> 16) as u16));
        if next.index >= size || used.index >= size {
            return Err(RingError::Base { base });
        }
        let (descriptors, driver_event, device_event) = PackedRing::areas(memory, layout)?;
        Ok(PackedRing {
            descriptors,
            driver_event,
            device_event,
            size,
            event_idx,
            indirect,
            next,
            used,
            in_flight: 0,
            unpublished: None,
            entered: 0,
            call_first: true,
            memory: Arc::clone(memory),
            cursor: Cursor::default(),
        })
    }

    fn areas(memory: &Arc<GuestMemory>, layout: &Layout) -> Result<(Area, Area, Area), RingError> {
        Ok((
            area(
                memory,
                Part::Descriptors,
                layout.descriptors,
                usize::from(layout.size) * DESCRIPTOR_BYTES,
                16,
            )?,
            area(memory, Part::Driver, layout.driver_area, EVENT_BYTES, 4)?,
            area(memory, Part::Device, layout.device_area, EVENT_BYTES, 4)?,
        ))
    }

    /// Goes on with the same ring in another table of the memory.
    pub fn set_memory(&mut self, memory: &Arc<GuestMemory>, layout: &Layout) -> Result<(), RingError> {
        (self.descriptors, self.driver_event, self.device_event) = PackedRing::areas(memory, layout)?;
        (self.memory, self.cursor) = (Arc::clone(memory), Cursor::default());
        Ok(())
    }

    /// The flags of the next descriptor, if the driver has made it available.
    #[inline]
    fn available(&self) -> Option<u16> {
        let at = usize::from(self.next.index) * DESCRIPTOR_BYTES + FLAGS_AT;
        let flags = u16::from_le(self.descriptors.u16_at(at).load(Ordering::Acquire));
        let (available, used) = (flags & AVAILABLE != 0, flags & USED != 0);
        (available == self.next.wrap && used != self.next.wrap).then_some(flags)
    }

    /// Takes the next chain.
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<Option<Head>, RingError> {
        let Some(mut flags) = self.available() else { return Ok(None) };
        chain.clear();
        let free = self.size - self.in_flight;
        let (mut position, mut slots) = (self.next, 0);
        let id = loop {
            let at = usize::from(position.index) * DESCRIPTOR_BYTES;
            let address = u64::from_le(self.descriptors.u64_at(at).load(Ordering::Relaxed));
            let length = u32::from_le(self.descriptors.u32_at(at + LENGTH_AT).load(Ordering::Relaxed));
            let id = u16::from_le(self.descriptors.u16_at(at + ID_AT).load(Ordering::Relaxed));
            if slots >= free {
                return Err(RingError::RingOverrun { head: id });
            }
            slots += 1;
            position.advance(1, self.size);
            let descriptor = Descriptor { address, length, flags, next: 0 };
            if descriptor.has(DESCRIPTOR_INDIRECT) {
                self.read_indirect(id, &descriptor, chain)?;
                break id;
            }
            chain.push(id, descriptor.buffer(), flags)?;
            if !descriptor.has(DESCRIPTOR_NEXT) {
                break id;
            }
            let at = usize::from(position.index) * DESCRIPTOR_BYTES + FLAGS_AT;
            flags = u16::from_le(self.descriptors.u16_at(at).load(Ordering::Relaxed));
        };
        if id >= self.size {
            return Err(RingError::HeadRange { head: id, size: self.size });
        }
        self.next = position;
        self.in_flight += slots;
        Ok(Some(Head { index: id, slots, record: 0 }))
    }

    fn read_indirect(&mut self, head: u16, table: &Descriptor, chain: &mut Chain) -> Result<(), RingError> {
        for index in 0..indirect_entries(head, table, self.indirect)? {
            let entry = indirect_entry(&self.memory, &mut self.cursor, head, table, index)?;
            chain.push(head, entry.buffer(), entry.flags)?;
        }
        Ok(())
    }

    /// Enters a chain as used, with `written` bytes, not yet to be seen by the driver.
    #[inline]
    pub fn push_used(&mut self, head: Head, written: u32) {
        let at = usize::from(self.used.index) * DESCRIPTOR_BYTES;
        self.descriptors.u32_at(at + LENGTH_AT).store(written.to_le(), Ordering::Relaxed);
        self.descriptors.u16_at(at + ID_AT).store(head.index.to_le(), Ordering::Relaxed);
        let mut flags = if self.used.wrap { AVAILABLE | USED } else { 0 };
        if written > 0 {
            flags |= DESCRIPTOR_WRITE;
        }
        // The driver finds all of them once it sees the first.
        match self.unpublished {
            None => self.unpublished = Some((self.used.index, flags)),
            Some(_) => self.descriptors.u16_at(at + FLAGS_AT).store(flags.to_le(), Ordering::Release),
        }
        self.used.advance(head.slots, self.size);
        self.in_flight -= head.slots;
        self.entered += head.slots;
    }

    /// Shows the driver what was entered. Returns whether it wants to be called.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let Some((index, flags)) = self.unpublished.take() else { return false };
        let at = usize::from(index) * DESCRIPTOR_BYTES + FLAGS_AT;
        self.descriptors.u16_at(at).store(flags.to_le(), Ordering::Release);
        let entered = std::mem::take(&mut self.entered);
        // The descriptor must be seen before it is decided that the driver does not wait for it.
        fence(Ordering::SeqCst);
        if std::mem::take(&mut self.call_first) {
            return true;
        }
        let event = u32::from_le(self.driver_event.u32_at(0).load(Ordering::Relaxed));
        match (event >> 16) as u16 & 3 {
            EVENT_ENABLE => true,
            EVENT_DISABLE => false,
            EVENT_AT if self.event_idx => {
                let wanted = Position::of(event as u16);
                let lap = if wanted.wrap == self.used.wrap { 0 } else { self.size };
                let new = self.used.index;
                needs_event(wanted.index.wrapping_sub(lap), new, new.wrapping_sub(entered))
            }
            // Not a value that it may have.
            _ => true,
        }
    }

    fn set_event(&self, position: u16, flags: u16) {
        let bits = u32::from(position) | u32::from(flags) << 16;
        self.device_event.u32_at(0).store(bits.to_le(), Ordering::Release);
    }

    /// Asks the driver for no kicks: the ring is looked at anyway.
    pub fn disable_kicks(&mut self) {
        self.set_event(0, EVENT_DISABLE);
    }

    /// Asks the driver for a kick at the next chain. Returns whether there is one already.
    pub fn enable_kicks(&mut self) -> bool {
        match self.event_idx {
            true => self.set_event(self.next.bits(), EVENT_AT),
            false => self.set_event(0, EVENT_ENABLE),
        }
        // The driver must see the wish, or this side its chain.
        fence(Ordering::SeqCst);
        self.available().is_some()
    }

    /// Both positions: what GET_VRING_BASE answers.
    pub fn base(&self) -> u32 {
        u32::from(self.next.bits()) | u32::from(self.used.bits()) << 16
    }
}

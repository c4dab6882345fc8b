//! The memory of a guest: an immutable table of mapped regions. Each address that a guest or its front end
//! names is looked up here, and nothing outside of the regions is ever accessed.
//!
//! The guest continues to use its memory. So no code here creates a reference to plain bytes of it: bytes are
//! copied out, each of them once, and then checked.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use blkq::ring::REGISTERED_MEMORY_MAX_BYTES;
use blkq::{Error, ErrorKind, RegisteredMemory, Segment};

use super::area::Area;
use crate::mapping::Mapping;

/// Most regions of a table, which is the reply to GET_MAX_MEM_SLOTS.
pub const REGIONS_MAX: usize = 64;

/// A region as the front end describes it. The file is closed after it has been mapped.
pub struct RegionSpec {
    /// Guest address of the first byte.
    pub guest_start: u64,
    /// Address of the first byte in the front end, which names the parts of rings by such addresses.
    pub user_start: u64,
    pub length: u64,
    pub file: OwnedFd,
    /// Offset of the region in the file.
    pub file_offset: u64,
}

#[derive(Clone)]
struct Region {
    guest_start: u64,
    user_start: u64,
    length: u64,
    start: NonNull<u8>,
    mapping: Arc<Mapping>,
    registrations: Option<Registrations>,
}

/// The registrations of a region with one ring, one for each [`REGISTERED_MEMORY_MAX_BYTES`] of the region.
pub type Registrations = Arc<[RegisteredMemory]>;

// SAFETY: the pointer points into the mapping, which is `Send` and `Sync`.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn map(spec: RegionSpec) -> Result<Region, Error> {
        let RegionSpec { guest_start, user_start, length, file, file_offset } = spec;
        for (start, whose) in [(guest_start, "guest"), (user_start, "front end")] {
            if start.checked_add(length).is_none() {
                return Err(invalid(format!(
                    "{length} bytes at the {whose} address {start:#x} exceed the 64-bit address space"
                )));
            }
        }
        let mapping = Arc::new(Mapping::new(file.as_fd(), file_offset, length)?);
        let start = mapping.start();
        Ok(Region { guest_start, user_start, length, start, mapping, registrations: None })
    }
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::Invalid, format!("guest memory: {what}"))
}

/// The index of the region that contained the last address, because the next address is usually in the same
/// region. A cursor may be used with any table.
#[derive(Clone, Copy, Default, Debug)]
pub struct Cursor(usize);

/// A range of guest memory that is contiguous in this process.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    start: NonNull<u8>,
    bytes: u32,
    registration: Option<&'a RegisteredMemory>,
}

/// The table of a guest's memory, replaced by each change. Common regions are unmapped with the last table.
#[derive(Default)]
pub struct GuestMemory {
    /// Sorted by guest address; no two overlap.
    regions: Box<[Region]>,
}

impl GuestMemory {
    /// Maps `regions`. Fails with [`ErrorKind::Invalid`] for regions that overlap, exceed the address space
    /// or are more than [`REGIONS_MAX`], and as [`Mapping::new`] does.
    pub fn map(regions: Vec<RegionSpec>) -> Result<GuestMemory, Error> {
        if regions.len() > REGIONS_MAX {
            return Err(invalid(format!("{} regions are more than {REGIONS_MAX}", regions.len())));
        }
        let regions: Result<Vec<Region>, Error> = regions.into_iter().map(Region::map).collect();
        GuestMemory::of(regions?)
    }

    fn of(mut regions: Vec<Region>) -> Result<GuestMemory, Error> {
        let starts: [fn(&Region) -> u64; 2] = [|region| region.user_start, |region| region.guest_start];
        for start in starts {
            regions.sort_by_key(start);
            let overlap = regions.windows(2).find(|pair| start(&pair[1]) - start(&pair[0]) < pair[0].length);
            if let Some(pair) = overlap {
                let (one, other) = (start(&pair[0]), start(&pair[1]));
                return Err(invalid(format!("the regions at {one:#x} and {other:#x} overlap")));
            }
        }
        Ok(GuestMemory { regions: regions.into() })
    }

    /// The table with an additional region. Fails as [`GuestMemory::map`] does.
    pub fn with_region(&self, spec: RegionSpec) -> Result<GuestMemory, Error> {
        if self.regions.len() >= REGIONS_MAX {
            return Err(invalid(format!("there are already {REGIONS_MAX} regions, the maximum")));
        }
        let mut regions = self.regions.to_vec();
        regions.push(Region::map(spec)?);
        GuestMemory::of(regions)
    }

    /// The table without the region of exactly these values: the addresses in the guest and in the front end,
    /// and the length. Fails with [`ErrorKind::Invalid`] if there is none.
    pub fn without_region(&self, place: (u64, u64, u64)) -> Result<GuestMemory, Error> {
        let is_other = |it: &&Region| (it.guest_start, it.user_start, it.length) != place;
        let regions: Box<[Region]> = self.regions.iter().filter(is_other).cloned().collect();
        if regions.len() == self.regions.len() {
            let (start, _, bytes) = place;
            return Err(invalid(format!("there is no region of {bytes} bytes at {start:#x}")));
        }
        Ok(GuestMemory { regions })
    }

    /// The table, with the registrations that its regions have in `other`.
    pub fn with_registrations_of(&self, other: Option<&GuestMemory>) -> GuestMemory {
        let mut regions = self.regions.clone();
        for region in &mut regions {
            let is_it = |other: &&Region| Arc::ptr_eq(&other.mapping, &region.mapping);
            let same = other.and_then(|other| other.regions.iter().find(is_it));
            region.registrations = same.and_then(|same| same.registrations.clone());
        }
        GuestMemory { regions }
    }

    /// Calls `register` with the mapping and length of each unregistered region, up to the first error.
    pub fn register_missing<E>(
        &mut self,
        mut register: impl FnMut(&Arc<Mapping>, u64) -> Result<Registrations, E>,
    ) -> Result<(), E> {
        for region in self.regions.iter_mut().filter(|region| region.registrations.is_none()) {
            region.registrations = Some(register(&region.mapping, region.length)?);
        }
        Ok(())
    }

    pub fn bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.length).sum()
    }

    /// Whether the file of a mapped region was truncated. The rings that use the table must then stop.
    pub fn is_broken(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_broken())
    }

    fn find(&self, cursor: &mut Cursor, address: u64) -> Option<(&Region, u64)> {
        if let Some(region) = self.regions.get(cursor.0)
            && let Some(offset) = address.checked_sub(region.guest_start)
            && offset < region.length
        {
            return Some((region, offset));
        }
        let index = self.regions.partition_point(|region| region.guest_start <= address).checked_sub(1)?;
        let region = &self.regions[index];
        cursor.0 = index;
        let offset = address - region.guest_start;
        (offset < region.length).then_some((region, offset))
    }

    /// The first contiguous part of the `bytes` bytes (at least 1) from guest address `address` on. It ends
    /// at the latest where a region or a registration ends. `None` if the address is not guest memory.
    pub fn span(&self, cursor: &mut Cursor, address: u64, bytes: u32) -> Option<Span<'_>> {
        let (region, offset) = self.find(cursor, address)?;
        let mut bytes = u64::from(bytes).min(region.length - offset);
        let mut registration = None;
        if let Some(registrations) = &region.registrations {
            bytes = bytes.min(REGISTERED_MEMORY_MAX_BYTES - offset % REGISTERED_MEMORY_MAX_BYTES);
            registration = registrations.get((offset / REGISTERED_MEMORY_MAX_BYTES) as usize);
        }
        // SAFETY: the offset is inside the region, which is mapped as long as `self` exists.
        let start = unsafe { region.start.add(offset as usize) };
        Some(Span { start, bytes: bytes as u32, registration })
    }

    /// Copies `N` bytes from guest address `address` on. Each byte is read once.
    pub fn load<const N: usize>(&self, cursor: &mut Cursor, address: u64) -> Option<[u8; N]> {
        let span = self.span(cursor, address, N as u32)?;
        if let Some(bytes) = span.load(0) {
            return Some(bytes);
        }
        let mut bytes = [0; N];
        self.read(cursor, address, &mut bytes).then_some(bytes)
    }

    /// Returns false if a part is not guest memory; `bytes` may then be filled in part.
    pub fn read(&self, cursor: &mut Cursor, address: u64, bytes: &mut [u8]) -> bool {
        self.for_each_span(cursor, address, bytes.len(), |span, part| span.copy_to(&mut bytes[part]))
    }

    /// Returns false if a part is not guest memory; `bytes` may then be written in part.
    pub fn write(&self, cursor: &mut Cursor, address: u64, bytes: &[u8]) -> bool {
        self.for_each_span(cursor, address, bytes.len(), |span, part| span.copy_from(&bytes[part]))
    }

    /// Calls `copy` with each contiguous part of the memory from `address` on, and with its place in the
    /// `bytes` bytes. Returns false if a part is not guest memory.
    pub fn for_each_span(
        &self,
        cursor: &mut Cursor,
        address: u64,
        bytes: usize,
        mut copy: impl FnMut(Span<'_>, Range<usize>),
    ) -> bool {
        let mut at = 0;
        while at < bytes {
            let left = u32::try_from(bytes - at).unwrap_or(u32::MAX);
            // This cannot overflow, because no region contains the last address.
            let Some(span) = self.span(cursor, address + at as u64, left) else { return false };
            let end = at + span.bytes as usize;
            copy(span, at..end);
            at = end;
        }
        true
    }

    /// The part of a ring at the front end's `user_address`; `None` if misaligned or not inside one region.
    pub fn area(&self, user_address: u64, bytes: usize, align: usize) -> Option<Area> {
        self.regions.iter().find_map(|region| {
            let offset = user_address.checked_sub(region.user_start)?;
            offset.checked_add(bytes as u64).filter(|end| *end <= region.length)?;
            // SAFETY: the offset is inside the region.
            let start = unsafe { region.start.add(offset as usize) };
            let is_aligned = start.addr().get().is_multiple_of(align);
            // SAFETY: the bytes are inside the region, which stays mapped as long as its mapping exists.
            is_aligned.then(|| unsafe { Area::new(Arc::clone(&region.mapping), start, bytes) })
        })
    }
}

impl Span<'_> {
    /// # Safety
    /// The bytes must be mapped for reading and writing as long as the span is used.
    pub unsafe fn new(start: NonNull<u8>, bytes: u32) -> Self {
        Span { start, bytes, registration: None }
    }

    /// The address of the first byte. The guest may write to the memory at any time.
    pub fn start(self) -> NonNull<u8> {
        self.start
    }

    /// Length in bytes, at least 1.
    #[allow(clippy::len_without_is_empty, reason = "a span is never empty")]
    pub fn len(self) -> u32 {
        self.bytes
    }

    pub fn segment(self) -> Segment {
        match self.registration {
            Some(memory) => Segment::registered(self.start.as_ptr(), self.bytes, memory),
            None => Segment::new(self.start.as_ptr(), self.bytes),
        }
    }

    /// Copies `N` bytes from `offset` on, each once; `None` if the span does not contain all of them.
    pub fn load<const N: usize>(self, offset: u32) -> Option<[u8; N]> {
        let left = self.bytes.checked_sub(offset)?;
        if (left as usize) < N {
            return None;
        }
        let mut bytes = [0; N];
        // SAFETY: the offset is inside the span.
        let start = unsafe { self.start.add(offset as usize) };
        Span { start, bytes: left, registration: None }.copy_to(&mut bytes);
        Some(bytes)
    }

    /// Reads each byte once, so that a checked value cannot change afterwards.
    pub fn copy_to(self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.bytes as usize);
        let start = self.start.as_ptr();
        let (words, rest) = bytes.as_chunks_mut::<8>();
        let tail = size_of_val(words);
        for (index, word) in words.iter_mut().enumerate() {
            // SAFETY: the word is inside the span.
            *word = unsafe { start.cast::<Unaligned>().add(index).read_volatile() }.0.to_ne_bytes();
        }
        for (index, byte) in rest.iter_mut().enumerate() {
            // SAFETY: the byte is inside the span.
            *byte = unsafe { start.add(tail + index).read_volatile() };
        }
    }

    pub fn copy_from(self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes as usize);
        let start = self.start.as_ptr();
        let (words, rest) = bytes.as_chunks::<8>();
        for (index, word) in words.iter().enumerate() {
            let word = Unaligned(u64::from_ne_bytes(*word));
            // SAFETY: the word is inside the span.
            unsafe { start.cast::<Unaligned>().add(index).write_volatile(word) };
        }
        for (index, byte) in rest.iter().enumerate() {
            // SAFETY: the byte is inside the span.
            unsafe { start.add(size_of_val(words) + index).write_volatile(*byte) };
        }
    }
}

/// A word at an unaligned address.
#[repr(C, packed)]
#[derive(Clone, Copy)]
struct Unaligned(u64);

#[cfg(test)]
mod tests;

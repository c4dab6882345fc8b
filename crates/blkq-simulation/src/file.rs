//! A file in memory that can lose the writes since its last sync.

use std::ops::Range;

use blkq::random::Random;

/// After a power failure, each sector of this size contains either an old or a new version.
pub const SECTOR_BYTES: usize = 512;

type Sector = [u8; SECTOR_BYTES];

/// A version of a sector that is not durable.
struct Unsynced {
    /// Number of the write, counted from 1.
    written: u64,
    content: Sector,
}

/// A file with the content that reads return, the durable content, and the versions in between.
pub struct SimulatedFile {
    current: Vec<Sector>,
    durable: Vec<Sector>,
    unsynced: Vec<Vec<Unsynced>>,
    writes: u64,
    /// Size that survives a power failure; the file may have grown beyond it without a sync.
    pub(super) durable_bytes: u64,
}

impl SimulatedFile {
    pub(super) fn new(bytes: u64) -> SimulatedFile {
        let sectors = bytes as usize / SECTOR_BYTES;
        SimulatedFile {
            current: vec![[0; SECTOR_BYTES]; sectors],
            durable: vec![[0; SECTOR_BYTES]; sectors],
            unsynced: (0..sectors).map(|_| Vec::new()).collect(),
            writes: 0,
            durable_bytes: bytes,
        }
    }

    pub fn bytes(&self) -> usize {
        self.current.len() * SECTOR_BYTES
    }

    pub fn writes(&self) -> u64 {
        self.writes
    }

    /// A sector as reads return it.
    pub fn sector(&self, number: usize) -> &[u8] {
        &self.current[number]
    }

    pub(super) fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.current.as_flattened()[offset..offset + into.len()]);
    }

    pub(super) fn read_durable(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.durable.as_flattened()[offset..offset + into.len()]);
    }

    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.current.as_flattened_mut()[offset..offset + bytes.len()].copy_from_slice(bytes);
        self.writes += 1;
        for sector in offset / SECTOR_BYTES..(offset + bytes.len()).div_ceil(SECTOR_BYTES) {
            self.unsynced[sector].push(Unsynced { written: self.writes, content: self.current[sector] });
        }
    }

    /// Makes the writes up to number `upto` (see [`SimulatedFile::writes`]) durable.
    pub(super) fn sync(&mut self, upto: u64) {
        for (durable, unsynced) in self.durable.iter_mut().zip(&mut self.unsynced) {
            let synced = unsynced.iter().take_while(|version| version.written <= upto).count();
            if let Some(last) = unsynced.drain(..synced).next_back() {
                *durable = last.content;
            }
        }
    }

    /// Makes the preceding write of this range durable.
    pub(super) fn sync_range(&mut self, offset: usize, bytes: usize) {
        for sector in offset / SECTOR_BYTES..(offset + bytes).div_ceil(SECTOR_BYTES) {
            self.durable[sector] = self.current[sector];
            self.unsynced[sector].clear();
        }
    }

    /// Drops the unsynced versions of these bytes. The durable content becomes a random one of them, or stays.
    pub(super) fn forget(&mut self, bytes: Range<usize>, chance: &mut Random) {
        let sectors = bytes.start / SECTOR_BYTES..bytes.end.div_ceil(SECTOR_BYTES);
        for (durable, unsynced) in self.durable[sectors.clone()].iter_mut().zip(&mut self.unsynced[sectors]) {
            let left = chance.below(unsynced.len() as u64 + 1) as usize;
            if left > 0 {
                *durable = unsynced[left - 1].content;
            }
            unsynced.clear();
        }
    }

    pub(super) fn cut_size(&mut self, bytes: u64, chance: &mut Random) -> u64 {
        let left = if chance.one_in(2) { bytes } else { bytes.min(self.durable_bytes) };
        self.durable_bytes = left;
        let beyond = left as usize / SECTOR_BYTES..self.current.len();
        self.current[beyond.clone()].fill([0; SECTOR_BYTES]);
        self.durable[beyond.clone()].fill([0; SECTOR_BYTES]);
        self.unsynced[beyond].iter_mut().for_each(Vec::clear);
        left
    }

    pub(super) fn cut_power(&mut self, chance: &mut Random) {
        // In some power failures all unsynced writes are lost, or none.
        let rule = chance.below(4);
        for (sector, unsynced) in self.unsynced.iter_mut().enumerate() {
            let left = match rule {
                0 => 0,
                1 => unsynced.len() as u64,
                _ => chance.below(unsynced.len() as u64 + 1),
            };
            if left > 0 {
                self.durable[sector] = unsynced[left as usize - 1].content;
            }
            unsynced.clear();
            self.current[sector] = self.durable[sector];
        }
    }
}

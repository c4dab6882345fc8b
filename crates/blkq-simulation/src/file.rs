//! A file in memory, of which the writes since the last sync can be lost.

use std::ops::Range;

use blkq::random::Random;

/// The unit in which the power's failure leaves writes done or undone.
pub const SECTOR_BYTES: usize = 512;

type Sector = [u8; SECTOR_BYTES];

/// A version of a sector that is not durable yet.
struct Unsynced {
    /// The number of the write.
    written: u64,
    content: Sector,
}

/// The file: what reads see, what is durable, and what may be.
pub struct SimulatedFile {
    current: Vec<Sector>,
    durable: Vec<Sector>,
    unsynced: Vec<Vec<Unsynced>>,
    writes: u64,
    /// The size that the file has whatever happens: it grows beyond without being synced.
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

    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.current.len() * SECTOR_BYTES
    }

    /// How often it was written so far.
    pub fn writes(&self) -> u64 {
        self.writes
    }

    /// One sector as reads see it.
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

    /// The writes up to number `upto`, of [`SimulatedFile::writes`], are durable.
    pub(super) fn sync(&mut self, upto: u64) {
        for (durable, unsynced) in self.durable.iter_mut().zip(&mut self.unsynced) {
            let synced = unsynced.iter().take_while(|version| version.written <= upto).count();
            if let Some(last) = unsynced.drain(..synced).next_back() {
                *durable = last.content;
            }
        }
    }

    /// The write just done is durable, and what it wrote over with it.
    pub(super) fn sync_range(&mut self, offset: usize, bytes: usize) {
        for sector in offset / SECTOR_BYTES..(offset + bytes).div_ceil(SECTOR_BYTES) {
            self.durable[sector] = self.current[sector];
            self.unsynced[sector].clear();
        }
    }

    /// Those of these bytes that are not synced never will be; some of it may be durable by accident.
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

    /// See [`super::cut_size`].
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
        // Now and then all of it is lost, or nothing.
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

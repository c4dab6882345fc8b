//! The state of an image and its chain: tables, the cache, what is allocated. All of it is behind one
//! lock, which nobody has while it waits. A lookup that needs a table which is not in memory returns that
//! ([`Lack`]), and is tried again when it is there.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use blkq::Status;

use super::cache::{Cache, Key, Table};
use super::entry::{COPIED, Entry, OFFSET, table_offset};
use super::header::{Header, u64_at};
use super::journal::{CHANGES_MAX, CLUSTERS_MAX, Journal, Record};
use super::unlinked::Unlinked;

/// The thing that is missing for another to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lack {
    /// A slice of a table in the cache.
    Slice(Key, Table),
    /// An L2 table that may be changed, for this entry of the L1 table.
    L2(usize),
    /// The refcount block of this number.
    Block(u64),
    /// A refcount table that has a place for this block.
    Room(u64),
    /// Another task is at it: wait for a change.
    Turn,
    /// Too much is dirty: commit first.
    Commit,
    /// It takes long: let others have their turn first.
    Pause,
    /// It cannot be done.
    Failed(Status),
}

impl From<Status> for Lack {
    fn from(status: Status) -> Lack {
        Lack::Failed(status)
    }
}

/// Most clusters, and bytes of them, that are released before they are freed.
const RELEASED_MAX: usize = 1024;
const RELEASED_MAX_BYTES: usize = 64 << 20;

/// One image of the chain.
pub(super) struct Layer {
    /// The tables of a qcow2 image; `None`: raw.
    pub tables: Option<Tables>,
    /// Virtual size in bytes.
    pub size: u64,
    /// In what units the file is read and written; 1 if through the page cache.
    pub align: u64,
    /// The size that the file had once, in bytes: it may be longer, and must not be shorter.
    pub file_bytes: u64,
}

/// The parts of a qcow2 image that are always in memory.
pub(super) struct Tables {
    pub header: Header,
    pub l1: Vec<u64>,
}

/// Where the bytes of a part of the device are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    /// At this byte of the file of a layer.
    Data { layer: u8, host: u64 },
    /// Compressed, in one cluster: the bytes of it, and where the part begins in the cluster.
    Compressed { layer: u8, host: u64, bytes: u64, skip: u64 },
    /// Zeroes that the image has.
    Zero,
    /// Nowhere, which reads as zeroes.
    Nothing,
}

/// The state of the image itself that only a writer needs.
pub(super) struct Writer {
    pub refcount_table: Vec<u64>,
    /// Entries of the refcount table and of the L1 table that the file has not.
    pub refcount_table_dirty: BTreeSet<usize>,
    pub l1_dirty: BTreeSet<usize>,
    /// The first cluster of the file that may be free.
    pub next_free: u64,
    /// From this cluster of the file on, what is allocated reads as zeroes.
    pub fresh_from: u64,
    /// The bytes of the file that have their space already; `None` if none is reserved.
    pub extended_to: Option<u64>,
    pub extending: bool,
    /// The clusters that the file can have: what a block device has, or all.
    pub clusters_max: u64,
    /// Clusters, by their offset, that nothing in memory refers to, but perhaps the file's tables.
    pub released: Vec<u64>,
    /// Clusters that are allocated and that no table refers to yet, but those of dirty bitmaps.
    pub unlinked: Unlinked,
    /// Clusters of the device, by their number, that are being changed.
    pub locked: HashSet<u64>,
    /// Writes to clusters that are locked.
    pub changing: usize,
    /// Entries of the L1 table whose L2 table is being made.
    pub making_l2: HashSet<usize>,
    /// Whether refcount blocks or their table are being made.
    pub growing: bool,
    pub committing: bool,
    /// A sync failed: data that was to be durable may not be, for good.
    pub failed: bool,
}

impl Writer {
    /// Data is written up to byte `end` of the file. An image may have clusters behind the file's end, as one that was
    /// copied without its holes.
    pub fn note_written(&mut self, end: u64, cluster_bits: u32) {
        self.fresh_from = self.fresh_from.max(end.div_ceil(1 << cluster_bits));
    }
}

/// The image and its chain.
pub(super) struct State {
    /// The image itself comes first.
    pub layers: Vec<Layer>,
    pub cache: Cache,
    /// Of the device, in bytes: whole logical blocks.
    pub size: u64,
    pub writer: Writer,
    /// Commits that began: what was read from the files before may be old.
    pub commits: u64,
    /// The changes that the file has not; `None`: they are lost with the process.
    pub journal: Option<Journal>,
}

/// Slices that are not in the cache, as they are in the files.
pub(super) type Extra = Vec<(Key, Vec<u8>)>;

/// A slice of an L2 table that maps a place of the device.
struct L2Slice {
    key: Key,
    /// The entry of the place in it.
    index: usize,
}

impl Layer {
    /// The slice of the L2 table that maps byte `position`, if there is a table.
    fn l2_slice(&self, layer: usize, position: u64, slot_bytes: usize) -> Result<Option<L2Slice>, Status> {
        let Some(tables) = &self.tables else { return Err(Status::Io) };
        let bits = tables.header.cluster_bits;
        let at = (position / tables.header.l2_covers()) as usize;
        let entry = tables.l1.get(at).copied().ok_or(Status::Io)?;
        let Some(table) = table_offset(entry, bits)? else { return Ok(None) };
        let index = (position >> bits) % (tables.header.cluster_bytes() / 8);
        let in_slice = slot_bytes as u64 / 8;
        let offset = table + index / in_slice * slot_bytes as u64;
        let key = Key { layer: layer as u8, offset };
        Ok(Some(L2Slice { key, index: (index % in_slice) as usize }))
    }
}

impl State {
    /// The tables of the image itself.
    pub fn top(&self) -> Result<&Tables, Status> {
        self.layers[0].tables.as_ref().ok_or(Status::Io)
    }

    /// As [`State::top`], to be changed.
    pub fn top_mut(&mut self) -> Result<&mut Tables, Status> {
        self.layers[0].tables.as_mut().ok_or(Status::Io)
    }

    /// Bits of a cluster's size.
    pub fn cluster_bits(&self) -> u32 {
        self.layers[0].tables.as_ref().map_or(16, |tables| tables.header.cluster_bits)
    }

    /// Refcounts in a slice of a refcount block.
    pub fn refcounts_per_slice(&self) -> usize {
        let order = self.layers[0].tables.as_ref().map_or(0, |tables| tables.header.refcount_order);
        (self.cache.slice_bytes() * 8) >> order
    }

    /// Finds the bytes of the device from `position` on; returns where they are, and how many of `bytes`
    /// are there together. `extra` has slices that the cache lacks.
    pub fn find(&mut self, position: u64, bytes: u64, extra: Option<&Extra>) -> Result<(Found, u64), Lack> {
        self.find_below(0, position, bytes, extra)
    }

    /// As [`State::find`], of the chain from `first` on.
    pub fn find_below(
        &mut self,
        first: usize,
        position: u64,
        bytes: u64,
        extra: Option<&Extra>,
    ) -> Result<(Found, u64), Lack> {
        self.find_with_layer(first, position, bytes, extra).map(|(found, _, run)| (found, run))
    }

    /// As [`State::find_below`], with the number of the layer; where none has the bytes, how many there are.
    pub fn find_with_layer(
        &mut self,
        first: usize,
        position: u64,
        bytes: u64,
        extra: Option<&Extra>,
    ) -> Result<(Found, usize, u64), Lack> {
        let mut bytes = bytes;
        for layer in first..self.layers.len() {
            let size = self.layers[layer].size;
            if position >= size {
                // Beyond its end an image reads as zeroes, whatever is behind it.
                return Ok((if layer == 0 { Found::Nothing } else { Found::Zero }, layer, bytes));
            }
            bytes = bytes.min(size - position);
            let (found, run) = self.find_in(layer, position, bytes, extra)?;
            bytes = run;
            if found != Found::Nothing {
                return Ok((found, layer, bytes));
            }
        }
        Ok((Found::Nothing, self.layers.len(), bytes))
    }

    /// As [`State::find`], of the image itself: [`Found::Nothing`] is what it leaves to the one behind it.
    pub fn find_own(
        &mut self,
        position: u64,
        bytes: u64,
        extra: Option<&Extra>,
    ) -> Result<(Found, u64), Lack> {
        self.find_in(0, position, bytes, extra)
    }

    fn find_in(
        &mut self,
        layer: usize,
        position: u64,
        bytes: u64,
        extra: Option<&Extra>,
    ) -> Result<(Found, u64), Lack> {
        let number = layer as u8;
        let slot_bytes = self.cache.slice_bytes();
        let Some(tables) = &self.layers[layer].tables else {
            return Ok((Found::Data { layer: number, host: position }, bytes));
        };
        let (bits, covers) = (tables.header.cluster_bits, tables.header.l2_covers());
        let Some(slice) = self.layers[layer].l2_slice(layer, position, slot_bytes)? else {
            return Ok((Found::Nothing, bytes.min(covers - position % covers)));
        };
        let extra = extra.and_then(|extra| extra.iter().find(|(key, _)| *key == slice.key));
        let content = match (self.cache.find(slice.key), extra) {
            (Some(slot), _) => self.cache.get(slot),
            (None, Some((_, content))) => content,
            (None, None) => return Err(Lack::Slice(slice.key, Table::L2)),
        };
        let cluster = 1 << bits;
        let skip = position % cluster;
        let mut entries =
            content[slice.index * 8..].chunks_exact(8).map(|entry| Entry::parse(u64_at(entry, 0), bits));
        let first = entries.next().unwrap_or(Err(Status::Io))?;
        let mut run = cluster - skip;
        let found = match first {
            Entry::Unallocated => Found::Nothing,
            Entry::Zero { .. } => Found::Zero,
            Entry::Data { host, .. } => Found::Data { layer: number, host: host + skip },
            Entry::Compressed { host, bytes: compressed } => {
                return Ok((
                    Found::Compressed { layer: number, host, bytes: compressed, skip },
                    bytes.min(run),
                ));
            }
        };
        while run < bytes {
            let continues = match (entries.next(), first) {
                (Some(Ok(Entry::Unallocated)), Entry::Unallocated) => true,
                (Some(Ok(Entry::Zero { .. })), Entry::Zero { .. }) => true,
                (Some(Ok(Entry::Data { host, .. })), Entry::Data { host: begin, .. }) => {
                    host == begin + skip + run
                }
                _ => false,
            };
            if !continues {
                break;
            }
            run += cluster;
        }
        Ok((found, bytes.min(run)))
    }

    /// Whether `bytes` from `position` on read as zeroes without reading data, for the chain from `first`
    /// on.
    pub fn is_zero(&mut self, first: usize, position: u64, bytes: u64) -> Result<bool, Lack> {
        let end = position + bytes;
        let mut position = position;
        while position < end {
            match self.find_below(first, position, end - position, None)? {
                (Found::Zero | Found::Nothing, run) => position += run,
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// The slot and the index of the L2 entry of the image itself for byte `position`, if there is a table.
    pub fn entry_place(&mut self, position: u64) -> Result<Option<(usize, usize)>, Lack> {
        let slot_bytes = self.cache.slice_bytes();
        let Some(slice) = self.layers[0].l2_slice(0, position, slot_bytes)? else { return Ok(None) };
        match self.cache.find(slice.key) {
            Some(slot) => Ok(Some((slot, slice.index))),
            None => Err(Lack::Slice(slice.key, Table::L2)),
        }
    }

    /// As [`State::entry_place`], of a table that may be changed.
    pub fn entry_to_change(&mut self, position: u64) -> Result<(usize, usize), Lack> {
        let tables = self.top()?;
        let at = (position / tables.header.l2_covers()) as usize;
        match tables.l1.get(at) {
            Some(entry) if entry & COPIED != 0 => {
                let bits = tables.header.cluster_bits;
                let table = table_offset(*entry, bits)?.ok_or(Lack::L2(at))?;
                self.check_target(table..table + (1 << bits))?;
            }
            Some(_) => return Err(Lack::L2(at)),
            None => return Err(Lack::Failed(Status::Io)),
        }
        self.entry_place(position)?.ok_or(Lack::L2(at))
    }

    /// The bytes of the file that data at `position` of the device is written to in place, and how many
    /// of `bytes` are there together; `None` if its cluster is not for that.
    pub fn find_in_place(&mut self, position: u64, bytes: u64) -> Result<Option<(u64, u64)>, Lack> {
        let Some((slot, index)) = self.entry_place(position)? else { return Ok(None) };
        let (bits, cluster) = (self.cluster_bits(), 1u64 << self.cluster_bits());
        let entry = |index: usize| Entry::parse(self.cache.entry(slot, index), bits);
        let Entry::Data { host: begin, copied: true } = entry(index)? else { return Ok(None) };
        let skip = position % cluster;
        let mut run = cluster - skip;
        let count = self.cache.slice_bytes() / 8;
        for next in index + 1..count {
            if run >= bytes || entry(next)? != (Entry::Data { host: begin + skip + run, copied: true }) {
                break;
            }
            run += cluster;
        }
        self.check_target(begin..begin + skip + run)?;
        self.writer.note_written(begin + skip + run, bits);
        Ok(Some((begin + skip, bytes.min(run))))
    }

    /// Rejects a write to a place where the image has its header or a table: its own tables name it, and
    /// so they are wrong.
    pub fn check_target(&self, range: Range<u64>) -> Result<(), Status> {
        let tables = self.top()?;
        let header = &tables.header;
        let reserved = [
            0..header.cluster_bytes(),
            header.l1_offset..header.l1_offset + tables.l1.len() as u64 * 8,
            header.refcount_table_offset
                ..header.refcount_table_offset + self.writer.refcount_table.len() as u64 * 8,
        ];
        let overlaps = |other: &Range<u64>| range.start < other.end && other.start < range.end;
        if reserved.iter().any(overlaps) { Err(Status::Io) } else { Ok(()) }
    }

    /// Those of the clusters, by their offset, that have the header or a table, as far as the tables in memory say: a
    /// damaged directory of bitmaps may name any.
    pub fn tables_among(&self, hosts: impl Iterator<Item = u64>) -> HashSet<u64> {
        let cluster = 1 << self.cluster_bits();
        // They are few beside the tables of a large image.
        let hosts = HashSet::<u64>::from_iter(hosts);
        let l1 = self.top().map_or(&[][..], |tables| &tables.l1);
        let named = l1.iter().chain(&self.writer.refcount_table).map(|entry| entry & OFFSET);
        let mut tables: HashSet<u64> = named.filter(|host| hosts.contains(host)).collect();
        tables.extend(hosts.into_iter().filter(|host| self.check_target(*host..host + cluster).is_err()));
        tables
    }

    /// Releases what an entry of the image itself refers to; it is free after the next commit.
    pub fn release(&mut self, entry: Entry) {
        let cluster = 1u64 << self.cluster_bits();
        match entry {
            Entry::Data { host, .. } | Entry::Zero { host: Some(host), .. } => {
                self.writer.released.push(host)
            }
            Entry::Compressed { host, bytes } => {
                let first = host - host % cluster;
                self.writer.released.extend((first..host + bytes).step_by(cluster as usize));
            }
            Entry::Unallocated | Entry::Zero { host: None, .. } => {}
        }
    }

    /// Sets entries of the image itself that follow each other: the first to `entry`, the others to those of the
    /// clusters behind its own.
    pub fn set_entries(&mut self, slot: usize, index: usize, entry: u64, count: u64) {
        let bits = self.cluster_bits();
        for number in 0..count {
            self.cache.set_entry(slot, index + number as usize, entry + (number << bits));
        }
        let offset = self.cache.entry_offset(slot, index);
        self.note(Record::L2 { offset, entry, count });
        let first = (entry & OFFSET) >> bits;
        self.writer.unlinked.remove(first..first + count);
    }

    /// Sets an entry of the L1 table of the image itself.
    ///
    /// # Errors
    /// If it has no such entry.
    pub fn set_l1(&mut self, index: usize, entry: u64) -> Result<(), Status> {
        *self.top_mut()?.l1.get_mut(index).ok_or(Status::Io)? = entry;
        self.writer.l1_dirty.insert(index);
        self.note(Record::L1 { index: index as u64, entry });
        let table = (entry & OFFSET) >> self.cluster_bits();
        self.writer.unlinked.remove(table..table + 1);
        Ok(())
    }

    /// Sets an entry of the refcount table.
    ///
    /// # Errors
    /// If it has no such entry.
    pub fn set_refcount_block(&mut self, block: usize, offset: u64) -> Result<(), Status> {
        *self.writer.refcount_table.get_mut(block).ok_or(Status::Io)? = offset;
        self.writer.refcount_table_dirty.insert(block);
        self.note(Record::RefcountTable { index: block as u64, entry: offset });
        Ok(())
    }

    /// Notes a change of a table in the journal.
    pub fn note(&mut self, record: Record) {
        if let Some(journal) = &mut self.journal {
            journal.append(record);
        }
    }

    /// Notes clusters that leak if the process is killed, in the half of the journal that a commit begins with: those
    /// that no table refers to yet, and those at `released`, which are about to be counted down.
    pub fn note_pending(&mut self, released: &[u64]) {
        let Some(journal) = &mut self.journal else { return };
        for clusters in self.writer.unlinked.ranges() {
            journal.append(Record::Allocated { first: clusters.start, count: clusters.end - clusters.start });
        }
        self.note_released(released);
    }

    /// Notes clusters that no table refers to any longer, as far as the journal has room.
    pub fn note_released(&mut self, released: &[u64]) {
        let bits = self.cluster_bits();
        let Some(journal) = &mut self.journal else { return };
        let mut clusters: Vec<u64> = released.iter().map(|host| host >> bits).collect();
        clusters.sort_unstable();
        let runs = clusters.chunk_by(|one, next| next - one <= 1);
        for run in runs.flat_map(|run| run.chunks(CLUSTERS_MAX as usize)) {
            if let (Some(first), Some(last), true) =
                (run.first(), run.last(), journal.has_room_for_released())
            {
                journal.append(Record::Released { first: *first, count: last - first + 1 });
            }
        }
    }

    /// Whether so much is dirty or released that a commit should come before there is more.
    pub fn is_crowded(&self) -> bool {
        let released = self.writer.released.len();
        let most = RELEASED_MAX.min(RELEASED_MAX_BYTES >> self.cluster_bits());
        self.cache.is_crowded() || released >= most || self.journal.as_ref().is_some_and(Journal::is_crowded)
    }

    /// Whether a task may begin to change tables.
    ///
    /// # Errors
    /// [`Lack::Commit`], and [`Lack::Turn`] if too many are at it.
    pub fn may_change(&self) -> Result<(), Lack> {
        if self.is_crowded() {
            return Err(Lack::Commit);
        }
        let changing = self.writer.changing + self.writer.making_l2.len();
        if changing < CHANGES_MAX { Ok(()) } else { Err(Lack::Turn) }
    }

    /// Whether a commit may free clusters.
    pub fn may_free(&self) -> bool {
        self.writer.committing || !self.writer.released.is_empty()
    }

    /// Whether the file's tables are not those of memory.
    pub fn is_dirty(&self) -> bool {
        let writer = &self.writer;
        self.cache.is_dirty()
            || !writer.l1_dirty.is_empty()
            || !writer.refcount_table_dirty.is_empty()
            || !writer.released.is_empty()
    }
}

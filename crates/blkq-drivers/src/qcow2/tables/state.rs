//! The state of an image and its chain: the tables, the cache, and what is allocated, which the refcounts of 1 to 64 bits
//! record. One lock protects all of it; no task holds the lock while it waits. A lookup that needs a table which is not in
//! memory returns [`NotReady`]; the task provides what is missing, and repeats the lookup.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;
use std::sync::Arc;

use blkq::Status;

use crate::image_file::ImageFile;
use crate::qcow2::format::{COPIED, Entry, Header, OFFSET, table_offset, u64_at};
use crate::qcow2::journal::{CHANGES_MAX, CLUSTERS_MAX, Journal, Record};

use super::cache::{Cache, Key, Table};

/// Why an operation on the state cannot be done yet. The caller provides what is lacking, or waits, and then tries
/// again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotReady {
    /// This slice of a table is not in the cache.
    Slice(Key, Table),
    /// Entry N of the L1 table has no L2 table that may be changed: none, or one that a snapshot shares.
    L2Table(usize),
    /// The refcount block with this number does not exist, or the refcount table is too small to name it.
    RefcountBlock(u64),
    /// Another task works on it. Wait for a change.
    Busy,
    /// Too many slices are dirty, or too many clusters released: flush the metadata first.
    FlushFirst,
    /// The search takes long: let other tasks run first.
    Yield,
    /// The operation fails for good.
    Failed(Status),
}

impl From<Status> for NotReady {
    fn from(status: Status) -> NotReady {
        NotReady::Failed(status)
    }
}

/// Clusters, and bytes in them, that may be released before a flush of the metadata frees them.
const RELEASED_MAX: usize = 1024;
const RELEASED_MAX_BYTES: usize = 64 << 20;

/// An image of a chain.
pub struct Layer {
    pub file: Arc<ImageFile>,
    /// `None`: raw. The tables of a device's active image are in [`State::top`].
    pub tables: Option<Tables>,
    pub size: u64,
    /// The unit in bytes in which the file is read and written by direct I/O; 1 through the page cache.
    pub align: u64,
    /// A size in bytes that the file is known to have reached. It may be longer; if it is shorter, it was
    /// truncated, and reads beyond its end fail.
    pub file_bytes: u64,
}

#[derive(Clone)]
pub struct Tables {
    pub header: Header,
    pub l1: Vec<u64>,
}

/// Where the bytes of a part of the device are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// At byte `host` of the file of `layer`.
    Data { layer: u8, host: u64 },
    /// `bytes` is the length of the compressed data at most, and `skip` the offset in the decompressed
    /// cluster.
    Compressed { layer: u8, host: u64, bytes: u64, skip: u64 },
    /// In a zero cluster, or beyond the end of a backing file.
    Zero,
    /// No image of the chain maps the part. It reads as zeroes.
    Unallocated,
}

/// The state of the active image that only a writer needs.
#[derive(Default)]
pub struct Writer {
    pub refcount_table: Vec<u64>,
    pub refcount_table_dirty: BTreeSet<usize>,
    pub l1_dirty: BTreeSet<usize>,
    /// No cluster of the file before this one is free.
    pub next_free: u64,
    /// All clusters of the file from this one on read as zeroes until they are first written.
    pub fresh_from: u64,
    /// The file has space up to this byte; `None` if space cannot be reserved.
    pub extended_to: Option<u64>,
    pub extending: bool,
    /// The number of clusters that fit on a block device, or that the format allows.
    pub clusters_max: u64,
    /// Offsets of clusters to which no table in memory refers. Tables in the file may still do.
    pub released: Vec<u64>,
    /// While this is a list, a flush adds released clusters to it and does not free them: the overlay of a block
    /// commit reads the image by older tables.
    pub held: Option<Vec<u64>>,
    /// Clusters, by number, that are allocated and to which no table refers yet: those of writes in flight, and of new
    /// L2 tables. They leak if the process is killed, so the journal records them.
    pub unlinked: BTreeSet<u64>,
    /// Clusters of the device, by number, whose L2 entry a write in progress is about to change.
    pub locked: HashSet<u64>,
    pub changing: usize,
    /// Tables that a task creates.
    pub making: HashSet<NewTable>,
    pub flushing: bool,
    /// A sync failed, or the file's header is unknown after a failed write. Data may not be durable, so
    /// nothing more is written to the tables. Never cleared.
    pub failed: bool,
    /// A power loss may undo the change of the header that gave the image a tag.
    pub tag_is_new: bool,
}

/// A table that is created when it is first needed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum NewTable {
    /// The L2 table of this entry of the L1 table.
    L2(usize),
    /// A refcount block, or a larger refcount table.
    Refcounts,
}

impl Writer {
    /// Notes that data is written up to byte `end` of the file. In an image that was copied without its
    /// holes, allocated clusters may lie beyond the end of the file.
    pub fn note_written(&mut self, end: u64, cluster_bits: u32) {
        self.fresh_from = self.fresh_from.max(end.div_ceil(1 << cluster_bits));
    }

    /// Notes that a table refers to `count` clusters, or that they are free.
    pub fn note_linked(&mut self, first: u64, count: u64) {
        if !self.unlinked.is_empty() {
            (first..first + count).for_each(|cluster| _ = self.unlinked.remove(&cluster));
        }
    }

    /// Takes the released clusters that may be freed: all of them, or none while clusters are held.
    pub fn take_released(&mut self) -> Vec<u64> {
        match &mut self.held {
            None => std::mem::take(&mut self.released),
            Some(held) => {
                held.append(&mut self.released);
                Vec::new()
            }
        }
    }

    /// Lets the next flush of the metadata free the clusters that were held.
    pub fn release_held(&mut self) {
        self.released.extend(self.held.take().unwrap_or_default());
    }
}

pub struct State {
    /// The tables of the active image.
    pub top: Tables,
    /// The active image first.
    pub layers: Vec<Layer>,
    pub cache: Cache,
    /// The size of the device in bytes, a multiple of the logical block size.
    pub size: u64,
    pub writer: Writer,
    /// Metadata flushes that have begun. Slices that were read from a file before a flush may be outdated.
    pub flushes: u64,
    /// Changes that the file does not have yet. `None`: these changes are lost with the process.
    pub journal: Option<Journal>,
}

/// Slices that are not in the cache, with their content in the file.
pub type Extra = Vec<(Key, Vec<u8>)>;

impl Tables {
    /// The slice of `slice_bytes` with the L2 entry for byte `position`, and the index of the entry in the slice;
    /// `None` without an L2 table. `layer` is the number of the image.
    fn l2_slice(&self, layer: u8, position: u64, slice_bytes: usize) -> Result<Option<(Key, usize)>, Status> {
        let bits = self.header.cluster_bits;
        let entry = self.l1.get((position / self.header.l2_covers()) as usize).ok_or(Status::Io)?;
        let Some(table) = table_offset(*entry, bits)? else { return Ok(None) };
        let index = (position >> bits) % (self.header.cluster_bytes() / 8);
        let in_slice = slice_bytes as u64 / 8;
        let offset = table + index / in_slice * slice_bytes as u64;
        Ok(Some((Key { layer, offset }, (index % in_slice) as usize)))
    }
}

impl State {
    /// The tables of an image of the chain; `None` if the image is raw.
    pub fn tables(&self, layer: usize) -> Option<&Tables> {
        if layer == 0 { Some(&self.top) } else { self.layers[layer].tables.as_ref() }
    }

    pub fn cluster_bits(&self) -> u32 {
        self.top.header.cluster_bits
    }

    /// Notes that the file of the active image has at least `bytes` bytes.
    pub fn note_size(&mut self, bytes: u64) {
        self.layers[0].file_bytes = self.layers[0].file_bytes.max(bytes);
    }

    pub fn refcounts_per_slice(&self) -> usize {
        (self.cache.slice_bytes() * 8) >> self.top.header.refcount_order
    }

    /// Looks up the bytes of the device from `position` on in the first `depth` layers of the chain. Returns
    /// where they are stored, the number of the layer that maps them (`depth` if none does), and how many of
    /// `bytes` are stored there contiguously. `extra` has slices that are not in the cache.
    pub fn find(
        &mut self,
        depth: usize,
        position: u64,
        mut bytes: u64,
        extra: Option<&Extra>,
    ) -> Result<(Found, usize, u64), NotReady> {
        for layer in 0..depth {
            let size = self.layers[layer].size;
            if position >= size {
                // As in QEMU, an image reads as zeroes beyond its end, whatever its backing file contains
                // there.
                return Ok((if layer == 0 { Found::Unallocated } else { Found::Zero }, layer, bytes));
            }
            let (found, run) = self.find_in(layer, position, bytes.min(size - position), extra)?;
            bytes = run;
            if found != Found::Unallocated {
                return Ok((found, layer, bytes));
            }
        }
        Ok((Found::Unallocated, depth, bytes))
    }

    fn find_in(
        &mut self,
        layer: usize,
        position: u64,
        bytes: u64,
        extra: Option<&Extra>,
    ) -> Result<(Found, u64), NotReady> {
        let number = layer as u8;
        let Some(tables) = self.tables(layer) else {
            return Ok((Found::Data { layer: number, host: position }, bytes));
        };
        let (bits, covers) = (tables.header.cluster_bits, tables.header.l2_covers());
        let Some((key, index)) = tables.l2_slice(number, position, self.cache.slice_bytes())? else {
            return Ok((Found::Unallocated, bytes.min(covers - position % covers)));
        };
        let extra = extra.and_then(|extra| extra.iter().find(|(other, _)| *other == key));
        let content = match (self.cache.find(key), extra) {
            (Some(slot), _) => self.cache.get(slot),
            (None, Some((_, content))) => content,
            (None, None) => return Err(NotReady::Slice(key, Table::L2)),
        };
        let cluster = 1 << bits;
        let skip = position % cluster;
        let mut entries = content[index * 8..].chunks_exact(8).map(|entry| {
            Entry::parse(u64_at(entry, 0), bits).map(|entry| match entry {
                Entry::Unallocated => Found::Unallocated,
                Entry::Zero { .. } => Found::Zero,
                Entry::Data { host, .. } => Found::Data { layer: number, host: host + skip },
                Entry::Compressed { host, bytes } => Found::Compressed { layer: number, host, bytes, skip },
            })
        });
        let found = entries.next().unwrap_or(Err(Status::Io))?;
        let (mut next, mut run) = (found, cluster - skip);
        while run < bytes && !matches!(found, Found::Compressed { .. }) {
            if let Found::Data { host, .. } = &mut next {
                *host += cluster;
            }
            if entries.next() != Some(Ok(next)) {
                break;
            }
            run += cluster;
        }
        Ok((found, bytes.min(run)))
    }

    /// Whether the bytes read as zeroes, according to the tables alone.
    pub fn is_zero(&mut self, mut position: u64, bytes: u64) -> Result<bool, NotReady> {
        let end = position + bytes;
        while position < end {
            match self.find(self.layers.len(), position, end - position, None)? {
                (Found::Zero | Found::Unallocated, _, run) => position += run,
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// The cache slot and index of the active image's L2 entry for byte `position`; `None` without an L2
    /// table.
    pub fn entry_place(&mut self, position: u64) -> Result<Option<(usize, usize)>, NotReady> {
        let slice = self.top.l2_slice(0, position, self.cache.slice_bytes())?;
        let Some((key, index)) = slice else { return Ok(None) };
        let slot = self.cache.find(key).ok_or(NotReady::Slice(key, Table::L2))?;
        Ok(Some((slot, index)))
    }

    /// As [`State::entry_place`], for an entry that may be changed.
    pub fn entry_to_change(&mut self, position: u64) -> Result<(usize, usize), NotReady> {
        let (at, bits) = ((position / self.top.header.l2_covers()) as usize, self.cluster_bits());
        let entry = *self.top.l1.get(at).ok_or(Status::Io)?;
        let table = table_offset(entry, bits)?.filter(|_| entry & COPIED != 0);
        let table = table.ok_or(NotReady::L2Table(at))?;
        self.check_target(table..table + (1 << bits))?;
        // The table itself may lie beyond the end of the file, too.
        self.writer.note_written(table + (1 << bits), bits);
        self.entry_place(position)?.ok_or(NotReady::L2Table(at))
    }

    /// The byte of the file at which data for `position` is overwritten in place, and how many of `bytes`
    /// follow contiguously. `None` if the cluster cannot be overwritten: it is not allocated, compressed, a
    /// zero cluster, or shared with a snapshot.
    pub fn find_in_place(&mut self, position: u64, bytes: u64) -> Result<Option<(u64, u64)>, NotReady> {
        let Some((slot, index)) = self.entry_place(position)? else { return Ok(None) };
        let (bits, cluster) = (self.cluster_bits(), 1u64 << self.cluster_bits());
        let entry = |index: usize| Entry::parse(self.cache.entry(slot, index), bits);
        let Entry::Data { host: begin, copied: true } = entry(index)? else { return Ok(None) };
        let skip = position % cluster;
        let mut run = cluster - skip;
        for next in index + 1..self.cache.slice_bytes() / 8 {
            if run >= bytes || entry(next)? != (Entry::Data { host: begin + skip + run, copied: true }) {
                break;
            }
            run += cluster;
        }
        self.check_target(begin..begin + skip + run)?;
        self.writer.note_written(begin + skip + run, bits);
        Ok(Some((begin + skip, bytes.min(run))))
    }

    /// Rejects a write that would overwrite the header, the L1 table or the refcount table. Only a damaged
    /// image has tables that refer to these places.
    pub fn check_target(&self, range: Range<u64>) -> Result<(), Status> {
        let Tables { header, l1 } = &self.top;
        let reserved = [
            0..header.cluster_bytes(),
            header.l1_offset..header.l1_offset + l1.len() as u64 * 8,
            header.refcount_table_offset
                ..header.refcount_table_offset + self.writer.refcount_table.len() as u64 * 8,
        ];
        let overlaps = |other: &Range<u64>| range.start < other.end && other.start < range.end;
        if reserved.iter().any(overlaps) { Err(Status::Io) } else { Ok(()) }
    }

    /// The clusters among `hosts` with the header or a table, as far as the tables in memory say. Needed
    /// because a damaged bitmap directory may name any cluster.
    pub fn tables_among(&self, hosts: impl Iterator<Item = u64>) -> HashSet<u64> {
        let cluster = 1 << self.cluster_bits();
        // The offsets are few compared to the tables of a large image, so they are the ones to hash.
        let hosts = HashSet::<u64>::from_iter(hosts);
        let named = self.top.l1.iter().chain(&self.writer.refcount_table).map(|entry| entry & OFFSET);
        let mut tables: HashSet<u64> = named.filter(|host| hosts.contains(host)).collect();
        tables.extend(hosts.into_iter().filter(|host| self.check_target(*host..host + cluster).is_err()));
        tables
    }

    /// Sets consecutive L2 entries of the active image. The first becomes `entry`; each further one refers to
    /// the cluster after that of the one before.
    pub fn set_entries(&mut self, slot: usize, index: usize, entry: u64, count: u64) {
        let bits = self.cluster_bits();
        for number in 0..count {
            self.cache.set_entry(slot, index + number as usize, entry + (number << bits));
        }
        self.note(Record::L2 { offset: self.cache.entry_offset(slot, index), entry, count });
        self.writer.note_linked((entry & OFFSET) >> bits, count);
    }

    /// Fails with [`Status::Io`] if the table has no such entry.
    pub fn set_l1(&mut self, index: usize, entry: u64) -> Result<(), Status> {
        *self.top.l1.get_mut(index).ok_or(Status::Io)? = entry;
        self.writer.l1_dirty.insert(index);
        self.note(Record::L1 { index: index as u64, entry });
        self.writer.note_linked((entry & OFFSET) >> self.cluster_bits(), 1);
        Ok(())
    }

    /// Fails with [`Status::Io`] if the table has no such entry.
    pub fn set_refcount_block(&mut self, block: usize, offset: u64) -> Result<(), Status> {
        *self.writer.refcount_table.get_mut(block).ok_or(Status::Io)? = offset;
        self.writer.refcount_table_dirty.insert(block);
        self.note(Record::RefcountTable { index: block as u64, entry: offset });
        Ok(())
    }

    pub fn note(&mut self, record: Record) {
        if let Some(journal) = &mut self.journal {
            journal.append(record);
        }
    }

    /// Appends to the journal the clusters that leak if the process is killed: those to which no table refers
    /// yet, and those at `released`, whose refcounts are about to be decremented. A flush calls this after it
    /// has switched the halves of the journal, because the other half, with the earlier records of these
    /// clusters, is emptied at its end.
    pub fn note_pending(&mut self, released: &[u64]) {
        let Some(journal) = &mut self.journal else { return };
        for (first, count) in runs(self.writer.unlinked.iter().copied().collect()) {
            journal.append(Record::Allocated { first, count });
        }
        self.note_released(released);
    }

    /// Appends to the journal the clusters to which no table refers any longer, as far as there is room.
    pub fn note_released(&mut self, released: &[u64]) {
        let bits = self.cluster_bits();
        let Some(journal) = &mut self.journal else { return };
        for (first, count) in runs(released.iter().map(|host| host >> bits).collect()) {
            if journal.has_room_for_released() {
                journal.append(Record::Released { first, count });
            }
        }
    }

    /// Whether the metadata should be flushed before more tables are changed.
    pub fn is_crowded(&self) -> bool {
        let released = self.writer.released.len();
        let most = RELEASED_MAX.min(RELEASED_MAX_BYTES >> self.cluster_bits());
        self.cache.is_crowded() || released >= most || self.journal.as_ref().is_some_and(Journal::is_crowded)
    }

    /// Fails with [`NotReady::FlushFirst`] if the metadata should be flushed first, and with
    /// [`NotReady::Busy`] if too many tasks are changing tables.
    pub fn may_change(&self) -> Result<(), NotReady> {
        if self.is_crowded() {
            return Err(NotReady::FlushFirst);
        }
        let changing = self.writer.changing + self.writer.making.len();
        if changing < CHANGES_MAX { Ok(()) } else { Err(NotReady::Busy) }
    }

    pub fn may_free(&self) -> bool {
        self.writer.flushing || !self.writer.released.is_empty()
    }

    /// Whether tables in memory are newer than in the file.
    pub fn is_dirty(&self) -> bool {
        let writer = &self.writer;
        self.cache.is_dirty()
            || !writer.l1_dirty.is_empty()
            || !writer.refcount_table_dirty.is_empty()
            || !writer.released.is_empty()
    }
}

/// The runs of `clusters`, each as its first cluster and the number of clusters, which one record of the journal can
/// name.
fn runs(mut clusters: Vec<u64>) -> Vec<(u64, u64)> {
    clusters.sort_unstable();
    let runs = clusters.chunk_by(|one, next| next - one <= 1);
    let runs = runs.flat_map(|run| run.chunks(CLUSTERS_MAX as usize));
    runs.map(|run| (run[0], run[run.len() - 1] - run[0] + 1)).collect()
}

/// Refcount `index` of a slice, with refcounts of `1 << order` bits.
pub fn refcount(slice: &[u8], index: usize, order: u32) -> u64 {
    if order < 3 {
        let bits = 1 << order;
        let shift = index * bits % 8;
        return u64::from(slice[index * bits / 8] >> shift) & ((1 << bits) - 1);
    }
    let bytes = 1 << (order - 3);
    slice[index * bytes..][..bytes].iter().fold(0, |count, byte| count << 8 | u64::from(*byte))
}

pub fn set_refcount(slice: &mut [u8], index: usize, order: u32, count: u64) {
    if order < 3 {
        let bits = 1 << order;
        let shift = index * bits % 8;
        let mask = (((1u16 << bits) - 1) << shift) as u8;
        let byte = &mut slice[index * bits / 8];
        *byte = *byte & !mask | (count << shift) as u8 & mask;
        return;
    }
    let bytes = 1 << (order - 3);
    slice[index * bytes..][..bytes].copy_from_slice(&count.to_be_bytes()[8 - bytes..]);
}

/// `place` is the slot and the index of the first of `count` clusters; all must be in one slice.
pub fn set_refcounts(state: &mut State, place: (usize, usize), first: u64, count: u64, refcount: u64) {
    change(state, place, count, refcount);
    state.writer.note_linked(first, count);
    state.note(Record::Refcounts { first, count, refcount });
}

/// Sets the refcounts of the clusters in `range` that are in the slice of the first, and returns their number.
pub fn set_refcounts_in_slice(state: &mut State, range: Range<u64>, refcount: u64) -> Result<u64, NotReady> {
    let (slot, index) = refcount_place(state, range.start)?;
    let count = (range.end - range.start).min((state.refcounts_per_slice() - index) as u64);
    set_refcounts(state, (slot, index), range.start, count, refcount);
    Ok(count)
}

/// As [`set_refcounts`], for clusters that were free: sets the refcounts to 1. A table is about to refer to
/// the clusters; until then they are unlinked.
pub fn allocate_refcounts(state: &mut State, place: (usize, usize), first: u64, count: u64) {
    change(state, place, count, 1);
    state.writer.unlinked.extend(first..first + count);
    state.note(Record::Allocated { first, count });
}

fn change(state: &mut State, (slot, index): (usize, usize), count: u64, refcount: u64) {
    let order = state.top.header.refcount_order;
    let slice = state.cache.change(slot);
    (index..index + count as usize).for_each(|at| set_refcount(slice, at, order, refcount));
}

pub fn refcount_place(state: &mut State, cluster: u64) -> Result<(usize, usize), NotReady> {
    let (slice_bytes, in_slice) = (state.cache.slice_bytes() as u64, state.refcounts_per_slice() as u64);
    let (bits, per_block) = (state.cluster_bits(), state.top.header.refcounts_per_block());
    let (block, index) = (cluster / per_block, cluster % per_block);
    let entry = state.writer.refcount_table.get(block as usize).copied().unwrap_or(0);
    let offset = table_offset(entry, bits)?.ok_or(NotReady::RefcountBlock(block))?;
    state.check_target(offset..offset + (1 << bits))?;
    let key = Key { layer: 0, offset: offset + index / in_slice * slice_bytes };
    let slot = state.cache.find(key).ok_or(NotReady::Slice(key, Table::Refcounts))?;
    Ok((slot, (index % in_slice) as usize))
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn setting_a_refcount_of_any_width_changes_no_other() {
        for order in 0..=6 {
            let most = u64::MAX >> (64 - (1u32 << order));
            let mut slice = [0; 64];
            let count = (64 * 8) >> order;
            for index in 0..count {
                set_refcount(&mut slice, index, order, most);
                assert_eq!(refcount(&slice, index, order), most);
                assert!((0..count).all(|other| (refcount(&slice, other, order) > 0) == (other <= index)));
            }
            set_refcount(&mut slice, 1, order, 0);
            assert_eq!([0, 1, 2].map(|index| refcount(&slice, index, order)), [most, 0, most]);
        }
    }
}

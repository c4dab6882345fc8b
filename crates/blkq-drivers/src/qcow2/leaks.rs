//! Clusters that a killed process leaked: it had allocated them for writes that did not complete, or released them and
//! not counted their refcounts down yet. Both follow from the journal, as it is replayed.

use std::collections::{BTreeMap, BTreeSet};

use super::entry::{Entry, OFFSET};
use super::journal::Record;

/// Most clusters and most entries that are noted. There are fewer: memory has no more changes of tables.
const NOTED_MAX: usize = 1 << 20;

/// The clusters that the changes of a journal leave without a reference, by their number.
#[derive(Default)]
pub(super) struct Leaks {
    cluster_bits: u32,
    /// Clusters that were allocated since the first change: a reference to one of them is a later change.
    allocated: BTreeSet<u64>,
    /// Clusters that were released, and whose refcounts do not say so yet.
    released: BTreeSet<u64>,
    /// By their place in the file, L2 entries that changed: as the file has them, and as they are to be.
    entries: BTreeMap<u64, (u64, u64)>,
    /// The same of L1 entries, by their index.
    l1: BTreeMap<u64, (u64, u64)>,
    blocks: BTreeSet<u64>,
    /// There are too many changes for a journal that a process has written: nothing is freed.
    is_damaged: bool,
}

impl Leaks {
    pub fn new(cluster_bits: u32) -> Leaks {
        Leaks { cluster_bits, ..Leaks::default() }
    }

    /// Notes a record, before later ones.
    pub fn note(&mut self, record: Record) {
        self.is_damaged |= self.allocated.len() + self.released.len() > NOTED_MAX;
        match record {
            Record::Allocated { .. } | Record::Released { .. } if self.is_damaged => {}
            Record::Allocated { first, count } => {
                for cluster in first..first + count {
                    self.released.remove(&cluster);
                    self.allocated.insert(cluster);
                }
            }
            Record::Released { first, count } => self.released.extend(first..first + count),
            Record::Refcounts { first, count, .. } => {
                for cluster in first..first + count {
                    self.allocated.remove(&cluster);
                    self.released.remove(&cluster);
                }
            }
            Record::RefcountTable { entry, .. } => {
                self.blocks.insert(entry & OFFSET);
            }
            Record::L1 { .. } | Record::L2 { .. } => {}
        }
    }

    /// Notes that the L2 entry at byte `offset` of the file becomes `new`.
    pub fn note_entry(&mut self, offset: u64, old: u64, new: u64) {
        self.is_damaged |= self.entries.len() > NOTED_MAX;
        if !self.is_damaged {
            self.entries.entry(offset).or_insert((old, new)).1 = new;
        }
    }

    /// Notes that an L1 entry becomes `new`.
    pub fn note_l1(&mut self, index: u64, old: u64, new: u64) {
        self.l1.entry(index).or_insert((old, new)).1 = new;
    }

    /// The clusters, by their offset in the file, each of which has one reference fewer than its refcount says.
    pub fn find(self) -> BTreeSet<u64> {
        if self.is_damaged {
            return BTreeSet::new();
        }
        let bits = self.cluster_bits;
        let (mut used, mut unused) = (self.blocks, BTreeSet::new());
        for (old, new) in self.entries.values() {
            used.extend(hosts(*new, bits));
            // As long as a journal has a change of a table, the cluster that the file's table names is not counted
            // down.
            unused.extend(hosts(*old, bits).filter(|_| old != new));
        }
        for (old, new) in self.l1.values() {
            used.insert(new & OFFSET);
            unused.extend(Some(old & OFFSET).filter(|old| *old != 0));
        }
        unused.extend(self.allocated.iter().chain(&self.released).map(|cluster| cluster << bits));
        unused.retain(|host| !used.contains(host));
        unused
    }
}

/// The clusters that an L2 entry refers to, by their offset.
fn hosts(entry: u64, cluster_bits: u32) -> impl Iterator<Item = u64> {
    let cluster = 1u64 << cluster_bits;
    let range = match Entry::parse(entry, cluster_bits) {
        Ok(Entry::Data { host, .. } | Entry::Zero { host: Some(host), .. }) => host..host + cluster,
        Ok(Entry::Compressed { host, bytes }) => host - host % cluster..host + bytes,
        Ok(Entry::Unallocated | Entry::Zero { host: None, .. }) | Err(_) => 0..0,
    };
    range.step_by(cluster as usize)
}

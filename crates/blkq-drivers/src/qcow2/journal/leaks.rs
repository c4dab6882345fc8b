//! Finds the clusters that a killed process leaked: it had allocated them for writes that did not complete,
//! or had released them without decrementing their refcounts. Both follow from the records of the journal.

use std::collections::{BTreeMap, BTreeSet};

use crate::qcow2::format::entry::{Entry, OFFSET};

use super::file::Record;

/// Most clusters and most entries that are tracked. An intact journal has fewer: no more changed tables fit
/// into memory.
const NOTED_MAX: usize = 1 << 20;

/// Tracks clusters, by number, while the records of a journal are applied.
#[derive(Default)]
pub struct Leaks {
    cluster_bits: u32,
    /// Clusters that were allocated since the first record, so that any reference to them is in a later record, and
    /// clusters that were released and whose refcounts were not decremented yet.
    unused: BTreeSet<u64>,
    /// The L2 entries that changed, by their offset in the file: the value in the file and the new value.
    entries: BTreeMap<u64, (u64, u64)>,
    /// The L1 entries that changed, by their index: the value in the file and the new value.
    l1: BTreeMap<u64, (u64, u64)>,
    blocks: BTreeSet<u64>,
    /// There are more changes than an intact journal has. Nothing is freed then.
    is_damaged: bool,
}

impl Leaks {
    pub fn new(cluster_bits: u32) -> Leaks {
        Leaks { cluster_bits, ..Leaks::default() }
    }

    /// Must be called in the order of the journal.
    pub fn note(&mut self, record: Record) {
        self.is_damaged |= self.unused.len() > NOTED_MAX;
        match record {
            Record::Allocated { .. } | Record::Released { .. } if self.is_damaged => {}
            Record::Allocated { first, count } | Record::Released { first, count } => {
                self.unused.extend(first..first + count)
            }
            Record::Refcounts { first, count, .. } => {
                (first..first + count).for_each(|cluster| _ = self.unused.remove(&cluster));
            }
            Record::RefcountTable { entry, .. } => _ = self.blocks.insert(entry & OFFSET),
            Record::L1 { .. } | Record::L2 { .. } => {}
        }
    }

    pub fn note_entry(&mut self, offset: u64, old: u64, new: u64) {
        self.is_damaged |= self.entries.len() > NOTED_MAX;
        if !self.is_damaged {
            self.entries.entry(offset).or_insert((old, new)).1 = new;
        }
    }

    pub fn note_l1(&mut self, index: u64, old: u64, new: u64) {
        self.l1.entry(index).or_insert((old, new)).1 = new;
    }

    /// The offsets of the leaked clusters, whose refcounts are by one too high.
    pub fn find(self) -> BTreeSet<u64> {
        if self.is_damaged {
            return BTreeSet::new();
        }
        let bits = self.cluster_bits;
        let hosts = |entry| Entry::parse(entry, bits).into_iter().flat_map(move |entry| entry.hosts(bits));
        let (mut used, mut unused) = (self.blocks, BTreeSet::new());
        for (old, new) in self.entries.values() {
            used.extend(hosts(*new));
            // The old cluster of a changed entry still counts that reference: refcounts are decremented only
            // after the file has the new entry, and the record of the change is dropped by then.
            unused.extend(hosts(*old).filter(|_| old != new));
        }
        for (old, new) in self.l1.values() {
            used.insert(new & OFFSET);
            unused.extend(Some(old & OFFSET).filter(|old| *old != 0));
        }
        unused.extend(self.unused.iter().map(|cluster| cluster << bits));
        unused.retain(|host| !used.contains(host));
        unused
    }
}

//! Entries of L1 and L2 tables.

use blkq::Status;

/// Only this entry refers to the cluster (its refcount is 1), so it may be overwritten in place.
pub const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeroes, whether one is allocated or not.
pub const ZERO: u64 = 1;
pub const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Most bytes of an L2 table or a refcount block that are read, changed and written together.
pub const SLICE_MAX_BYTES: u64 = 4096;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// The backing file has the bytes. Without one they read as zeroes.
    Unallocated,
    /// Zeroes. `host` is the cluster that is allocated for them, if there is one.
    Zero { host: Option<u64>, copied: bool },
    /// Data at byte `host` of the file.
    Data { host: u64, copied: bool },
    /// At most `bytes` bytes of compressed data at byte `host` of the file.
    Compressed { host: u64, bytes: u64 },
}

impl Entry {
    /// Clusters have `1 << cluster_bits` bytes. Fails with [`Status::Io`] if `entry` breaks the format.
    pub fn parse(entry: u64, cluster_bits: u32) -> Result<Entry, Status> {
        if entry & COMPRESSED != 0 {
            let shift = 62 - (cluster_bits - 8);
            let host = entry & ((1 << shift) - 1);
            let sectors = ((entry & !(COPIED | COMPRESSED)) >> shift) + 1;
            return Ok(Entry::Compressed { host, bytes: sectors * 512 - host % 512 });
        }
        let (host, copied) = (entry & OFFSET, entry & COPIED != 0);
        if !host.is_multiple_of(1 << cluster_bits) {
            return Err(Status::Io);
        }
        Ok(match (host, entry & ZERO != 0) {
            (0, true) => Entry::Zero { host: None, copied },
            (_, true) => Entry::Zero { host: Some(host), copied },
            (0, false) => Entry::Unallocated,
            (_, false) => Entry::Data { host, copied },
        })
    }

    /// The offsets of the clusters of the file to which the entry refers.
    pub fn hosts(self, cluster_bits: u32) -> impl Iterator<Item = u64> {
        let cluster = 1u64 << cluster_bits;
        let range = match self {
            Entry::Data { host, .. } | Entry::Zero { host: Some(host), .. } => host..host + cluster,
            Entry::Compressed { host, bytes } => host - host % cluster..host + bytes,
            Entry::Unallocated | Entry::Zero { host: None, .. } => 0..0,
        };
        range.step_by(cluster as usize)
    }
}

/// The offset of the table that an entry of the L1 table or of the refcount table names. Fails with
/// [`Status::Io`] if the offset is not the start of a cluster.
pub fn table_offset(entry: u64, cluster_bits: u32) -> Result<Option<u64>, Status> {
    match entry & OFFSET {
        0 => Ok(None),
        offset if offset.is_multiple_of(1 << cluster_bits) => Ok(Some(offset)),
        _ => Err(Status::Io),
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn l2_entries_are_decoded_as_the_format_defines() {
        let of = |entry| Entry::parse(entry, 16);
        assert_eq!(of(0), Ok(Entry::Unallocated));
        assert_eq!(of(1), Ok(Entry::Zero { host: None, copied: false }));
        assert_eq!(of(COPIED | 0x10000), Ok(Entry::Data { host: 0x10000, copied: true }));
        assert_eq!(of(0x20001), Ok(Entry::Zero { host: Some(0x20000), copied: false }));
        assert_eq!(of(0x10200), Err(Status::Io));
        // Bits 54 to 61 are the number of 512-byte sectors after the first.
        let compressed = COMPRESSED | 2 << 54 | 0x12345;
        assert_eq!(of(compressed), Ok(Entry::Compressed { host: 0x12345, bytes: 3 * 512 - 0x145 }));
    }
}

//! The structures of the format, as QEMU's docs/interop/qcow2.rst specifies them: the header with its extensions, and the
//! entries of L1 and L2 tables. They are parsed and built in memory. All numbers are big-endian. Names no other module of
//! the driver, and no file.

use std::borrow::Cow;

use blkq::{Error, Status};

use crate::errors::{malformed, unsupported};

pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Bytes of the largest header that blkq knows, without extensions. They contain the size of a cluster.
pub const FIXED_BYTES: usize = 112;
/// Offsets in the header: the refcount table's offset and number of clusters.
pub const REFCOUNT_TABLE_AT: usize = 48;
pub const NAME_OFFSET_AT: usize = 8;
pub const SIZE_AT: usize = 24;
/// The number of L1 entries and the L1 table's offset.
pub const L1_AT: usize = 36;
/// The autoclear features: a program that does not know one of them clears it when it opens the image for
/// writing.
pub const AUTOCLEAR_AT: usize = 92;
/// The journal's tag. It is the upper half of the autoclear features, in which QEMU defines none, so QEMU
/// clears the tag when it opens the image for writing.
pub const TAG_AT: usize = 88;

/// Largest L1 table and refcount table, the same as in QEMU.
pub const L1_MAX_BYTES: u64 = 32 << 20;
pub const REFCOUNT_TABLE_MAX_BYTES: u64 = 8 << 20;
/// Longest name of a backing file, by the specification.
pub const NAME_MAX_BYTES: usize = 1023;
const SNAPSHOTS_MAX: u32 = 65536;
/// Bytes of an entry of the snapshot table without its variable-length fields.
pub const SNAPSHOT_BYTES: u64 = 40;
/// Most bytes of the extra data of a snapshot that the specification defines.
pub const SNAPSHOT_EXTRA_MAX_BYTES: u64 = 24;

const INCOMPATIBLE_DIRTY: u64 = 1;
const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;

pub const AUTOCLEAR_BITMAPS: u32 = 1;

pub const EXTENSION_BITMAPS: u32 = 0x2385_2875;
/// Bytes of a header extension before its data: the type and the length of the data.
pub const EXTENSION_HEAD_BYTES: usize = 8;
const BITMAPS_EXTENSION_BYTES: usize = 24;
pub const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
pub const EXTENSION_FEATURE_NAMES: u32 = 0x6803_f857;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackingName {
    pub name: Vec<u8>,
    /// The recorded format, `raw` or `qcow2` for example; `None` if the header does not record it.
    pub format: Option<String>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BitmapsExtension {
    pub count: u32,
    pub directory_bytes: u64,
    pub directory: u64,
}

impl BitmapsExtension {
    pub fn to_bytes(&self) -> Vec<u8> {
        let count = u64::from(self.count) << 32;
        [count, self.directory_bytes, self.directory].iter().flat_map(|number| number.to_be_bytes()).collect()
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    pub version: u32,
    pub cluster_bits: u32,
    /// Virtual size in bytes.
    pub size: u64,
    pub l1_entries: u32,
    pub l1_offset: u64,
    pub refcount_table_offset: u64,
    pub refcount_table_clusters: u32,
    /// A refcount has `1 << refcount_order` bits.
    pub refcount_order: u32,
    pub snapshots: u32,
    pub snapshots_offset: u64,
    /// The lower half of the autoclear features.
    pub autoclear: u32,
    /// The tag of the image's journal ([`TAG_AT`]); 0 if it has no journal.
    pub tag: u32,
    /// The refcounts may be wrong, because a program with lazy refcounts did not close the image.
    pub dirty: bool,
    pub corrupt: bool,
    /// Compressed clusters are zstd frames, else deflate streams.
    pub zstd: bool,
    pub backing: Option<BackingName>,
    pub bitmaps: Option<BitmapsExtension>,
}

/// The size of a cluster, from the first bytes of an image. Errors are as for [`Header::parse`].
pub fn cluster_bytes(fixed: &[u8]) -> Result<usize, Error> {
    if fixed.len() < FIXED_BYTES || fixed[..4] != MAGIC {
        return Err(malformed("it has no qcow2 header"));
    }
    match u32_at(fixed, 20) {
        bits @ 9..=21 => Ok(1 << bits),
        bits => Err(malformed(format!("its clusters have 2^{bits} bytes, not 512 bytes to 2 MiB"))),
    }
}

impl Header {
    /// Parses a header from the image's first cluster, or from as much of it as the file has. Fails with
    /// [`blkq::ErrorKind::Format`] for an invalid header, and with [`blkq::ErrorKind::Unsupported`] for features that
    /// blkq does not support.
    pub fn parse(bytes: &[u8]) -> Result<Header, Error> {
        let cluster_bytes = cluster_bytes(bytes)? as u64;
        let bytes = &bytes[..bytes.len().min(cluster_bytes as usize)];
        let version = u32_at(bytes, 4);
        if !matches!(version, 2 | 3) {
            return Err(unsupported(format!("qcow2 version {version} is not supported")));
        }
        if u32_at(bytes, 32) != 0 {
            return Err(unsupported("it is encrypted, which is not supported"));
        }
        let v3 = version == 3;
        let v3_u64 = |at| if v3 { u64_at(bytes, at) } else { 0 };
        let incompatible = v3_u64(72);
        check_features(incompatible)?;
        let header_bytes = if v3 { u32_at(bytes, 100) as usize } else { 72 };
        if v3 && (header_bytes < 104 || !header_bytes.is_multiple_of(8) || header_bytes > bytes.len()) {
            let message = format!("its header has {header_bytes} bytes, which the format does not allow");
            return Err(malformed(message));
        }
        let compression_type = if header_bytes > 104 { bytes[104] } else { 0 };
        let zstd = incompatible & INCOMPATIBLE_COMPRESSION != 0;
        if zstd && compression_type != 1 {
            return Err(unsupported("its compression type is unknown"));
        }
        if !zstd && compression_type != 0 {
            return Err(malformed("its compression type contradicts its feature bits"));
        }
        let backing = backing_name(bytes, header_bytes)?;
        let extensions = extensions(bytes, header_bytes)?;
        let bitmaps = if v3 { bitmaps_extension(&extensions)? } else { None };
        let header = Header {
            version,
            cluster_bits: u32_at(bytes, 20),
            size: u64_at(bytes, SIZE_AT),
            l1_entries: u32_at(bytes, L1_AT),
            l1_offset: u64_at(bytes, L1_AT + 4),
            refcount_table_offset: u64_at(bytes, REFCOUNT_TABLE_AT),
            refcount_table_clusters: u32_at(bytes, REFCOUNT_TABLE_AT + 8),
            refcount_order: if v3 { u32_at(bytes, 96) } else { 4 },
            snapshots: u32_at(bytes, 60),
            snapshots_offset: u64_at(bytes, 64),
            autoclear: v3_u64(TAG_AT) as u32,
            tag: (v3_u64(TAG_AT) >> 32) as u32,
            dirty: incompatible & INCOMPATIBLE_DIRTY != 0,
            corrupt: incompatible & INCOMPATIBLE_CORRUPT != 0,
            zstd,
            backing: backing.map(|name| with_format(name, &extensions)).transpose()?,
            bitmaps: bitmaps.map(|Extension { data, .. }| BitmapsExtension {
                count: u32_at(data, 0),
                directory_bytes: u64_at(data, 8),
                directory: u64_at(data, 16),
            }),
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), Error> {
        let cluster = self.cluster_bytes();
        let [(_, _, l1_bytes), (_, _, table_bytes), _] = self.tables();
        let is_misplaced = |(_, offset, bytes): &(&str, u64, u64)| {
            let is_beyond = offset.checked_add(*bytes).is_none_or(|end| end > 1 << 56);
            // As in QEMU, the offset of an empty table is checked too.
            (*offset == 0 && *bytes > 0) || !offset.is_multiple_of(cluster) || is_beyond
        };
        Err(malformed(if self.size > i64::MAX as u64 {
            format!("its size is {} bytes, more than {}", self.size, i64::MAX)
        } else if l1_bytes > L1_MAX_BYTES || u64::from(self.l1_entries) < self.l1_entries_for(self.size) {
            let (entries, size) = (self.l1_entries, self.size);
            format!("its L1 table has {entries} entries for {size} bytes, which is too few or too many")
        } else if table_bytes == 0 || table_bytes > REFCOUNT_TABLE_MAX_BYTES.max(cluster) {
            format!("its refcount table has {table_bytes} bytes, not one cluster to 8 MiB")
        } else if self.refcount_order > 6 {
            format!("its refcounts have 2^{} bits, more than 64", self.refcount_order)
        } else if self.snapshots > SNAPSHOTS_MAX {
            format!("it has {} snapshots, more than {SNAPSHOTS_MAX}", self.snapshots)
        } else if let Some((name, offset, _)) = self.tables().into_iter().find(is_misplaced) {
            format!("its {name} table is at byte {offset}, where no table can be")
        } else {
            return Ok(());
        }))
    }

    /// The name, the offset and the size in bytes of the L1 table, the refcount table and the snapshot table. The size
    /// of the snapshot table does not include the fields of variable length.
    pub fn tables(&self) -> [(&'static str, u64, u64); 3] {
        let refcount_table_bytes = u64::from(self.refcount_table_clusters) * self.cluster_bytes();
        [
            ("L1", self.l1_offset, u64::from(self.l1_entries) * 8),
            ("refcount", self.refcount_table_offset, refcount_table_bytes),
            ("snapshot", self.snapshots_offset, u64::from(self.snapshots) * SNAPSHOT_BYTES),
        ]
    }

    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of the device that one L2 table maps.
    pub fn l2_covers(&self) -> u64 {
        self.cluster_bytes() << (self.cluster_bits - 3)
    }

    pub fn l1_entries_for(&self, size: u64) -> u64 {
        size.div_ceil(self.l2_covers())
    }

    pub fn refcounts_per_block(&self) -> u64 {
        (self.cluster_bytes() * 8) >> self.refcount_order
    }
}

fn check_features(incompatible: u64) -> Result<(), Error> {
    const KNOWN: u64 = INCOMPATIBLE_DIRTY | INCOMPATIBLE_CORRUPT | INCOMPATIBLE_COMPRESSION;
    Err(unsupported(match incompatible & !KNOWN {
        0 => return Ok(()),
        other if other & INCOMPATIBLE_DATA_FILE != 0 => {
            "it has an external data file, which is not supported".to_owned()
        }
        other if other & INCOMPATIBLE_EXTENDED_L2 != 0 => {
            "it has extended L2 entries (subclusters), which are not supported".to_owned()
        }
        other => format!("it has an unknown incompatible feature, bit {}", other.trailing_zeros()),
    }))
}

fn backing_name(bytes: &[u8], header_bytes: usize) -> Result<Option<&[u8]>, Error> {
    let (offset, length) = (u64_at(bytes, 8), u32_at(bytes, 16) as usize);
    if offset == 0 {
        return Ok(None);
    }
    let start = usize::try_from(offset).ok().filter(|start| *start >= header_bytes);
    let name = start.and_then(|start| bytes.get(start..)?.get(..length));
    let is_name = |name: &&[u8]| name.len() <= NAME_MAX_BYTES && !name.contains(&0);
    match name.filter(is_name) {
        Some(name) => Ok(Some(name).filter(|name| !name.is_empty())),
        None => Err(malformed("the name of its backing file is not in its header")),
    }
}

fn with_format(name: &[u8], extensions: &[Extension<'_>]) -> Result<BackingName, Error> {
    let format = extensions.iter().find(|extension| extension.kind == EXTENSION_BACKING_FORMAT);
    let format = format.map(|format| String::from_utf8_lossy(format.data).into_owned());
    // Both appear on terminals and in log lines, where control characters could forge output.
    let names = [Some(String::from_utf8_lossy(name)), format.as_deref().map(Cow::from)];
    if names.iter().flatten().any(|name| name.contains(char::is_control)) {
        return Err(malformed("the name or the format of its backing file contains control characters"));
    }
    Ok(BackingName { name: name.to_vec(), format })
}

/// The extension for bitmaps. Fails with [`blkq::ErrorKind::Format`] if it is damaged or there are several.
pub fn bitmaps_extension<'a>(extensions: &'a [Extension<'a>]) -> Result<Option<&'a Extension<'a>>, Error> {
    let mut all = extensions.iter().filter(|extension| extension.kind == EXTENSION_BITMAPS);
    let found = all.next();
    if found.is_some_and(|found| found.data.len() != BITMAPS_EXTENSION_BYTES) || all.next().is_some() {
        return Err(malformed("the header extension of its bitmaps is damaged"));
    }
    Ok(found)
}

pub struct Extension<'a> {
    pub kind: u32,
    pub at: usize,
    pub data: &'a [u8],
}

impl Extension<'_> {
    pub fn end(&self) -> usize {
        self.at + EXTENSION_HEAD_BYTES + self.data.len().next_multiple_of(8)
    }
}

/// The extensions of a header of `header_bytes`, up to their end marker or to the name of the backing file.
/// Fails with [`blkq::ErrorKind::Format`] if an extension does not end before that.
pub fn extensions(bytes: &[u8], header_bytes: usize) -> Result<Vec<Extension<'_>>, Error> {
    let end = match u64_at(bytes, 8) {
        0 => bytes.len(),
        name => usize::try_from(name).map_or(bytes.len(), |name| name.min(bytes.len())),
    };
    let mut found = Vec::new();
    let mut at = header_bytes;
    while let Some((head, data)) =
        bytes.get(at..end).and_then(|rest| rest.split_at_checked(EXTENSION_HEAD_BYTES))
    {
        let (kind, length) = (u32_at(head, 0), u32_at(head, 4) as usize);
        if kind == 0 {
            break;
        }
        let Some(data) = data.get(..length) else {
            return Err(malformed("an extension of its header is longer than the header"));
        };
        let extension = Extension { kind, at, data };
        at = extension.end();
        found.push(extension);
    }
    Ok(found)
}

pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_be_bytes(number)
}

pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_be_bytes(number)
}

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

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    /// A header of version 3 for an image of 1 GiB with clusters of 64 KiB.
    fn header() -> Vec<u8> {
        let mut bytes = vec![0; 65536];
        bytes[..4].copy_from_slice(&MAGIC);
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(4, &3u32.to_be_bytes());
        put(20, &16u32.to_be_bytes());
        put(24, &(1u64 << 30).to_be_bytes());
        put(36, &2u32.to_be_bytes());
        put(40, &(3u64 << 16).to_be_bytes());
        put(48, &(1u64 << 16).to_be_bytes());
        put(56, &1u32.to_be_bytes());
        put(96, &4u32.to_be_bytes());
        put(100, &104u32.to_be_bytes());
        bytes
    }

    fn error(at: usize, value: &[u8]) -> String {
        let mut bytes = header();
        bytes[at..at + value.len()].copy_from_slice(value);
        Header::parse(&bytes).unwrap_err().to_string()
    }

    #[test]
    fn a_header_is_parsed() {
        let parsed = Header::parse(&header()).unwrap();
        assert_eq!((parsed.cluster_bytes(), parsed.size, parsed.l1_entries), (65536, 1 << 30, 2));
        assert_eq!((parsed.l2_covers(), parsed.refcounts_per_block()), (512 << 20, 32768));
        assert!(parsed.backing.is_none());
    }

    #[test]
    fn a_backing_file_is_parsed_with_its_format() {
        let mut bytes = header();
        bytes[104..112].copy_from_slice(&[0xe2, 0x79, 0x2a, 0xca, 0, 0, 0, 3]);
        bytes[112..115].copy_from_slice(b"raw");
        bytes[8..16].copy_from_slice(&128u64.to_be_bytes());
        bytes[16..20].copy_from_slice(&5u32.to_be_bytes());
        bytes[128..133].copy_from_slice(b"b.img");
        let backing = Header::parse(&bytes).unwrap().backing.unwrap();
        assert_eq!((&backing.name[..], backing.format.as_deref()), (&b"b.img"[..], Some("raw")));
        for at in [112, 128] {
            let mut bytes = bytes.clone();
            bytes[at] = b'\n';
            assert!(Header::parse(&bytes).unwrap_err().to_string().contains("control characters"));
        }
        for (offset, length) in [(128u64, 70000u32), (1, 2), (1 << 40, 0), (u64::MAX, 0), (65535, 2)] {
            bytes[8..16].copy_from_slice(&offset.to_be_bytes());
            bytes[16..20].copy_from_slice(&length.to_be_bytes());
            let error = Header::parse(&bytes).unwrap_err().to_string();
            assert!(error.contains("is not in its header"), "{offset} {length}: {error}");
        }
    }

    #[test]
    fn damaged_and_unsupported_headers_are_rejected() {
        for (at, value, why) in [
            (0, &b"QFI\0"[..], "no qcow2 header"),
            (7, &[4], "version 4"),
            (23, &[8], "2^8 bytes"),
            (23, &[22], "2^22 bytes"),
            (35, &[1], "encrypted"),
            (79, &[4], "external data file"),
            (79, &[16], "subclusters"),
            (72, &[0x80], "bit 63"),
            (39, &[1], "1 entries for"),
            (36, &[0xff], "entries for"),
            (47, &[1], "L1 table is at"),
            (55, &[1], "refcount table is at"),
            (59, &[0], "refcount table has 0"),
            (56, &[1], "refcount table has"),
            (99, &[7], "2^7 bits"),
            (103, &[100], "header has 100 bytes"),
            (60, &[1], "snapshots"),
            (71, &[1], "snapshot table is at"),
            (60, &[0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0], "snapshot table is at"),
            (104, &[0x12, 0x34, 0x56, 0x78, 0x7f, 0xff, 0xff, 0xff], "an extension of its header is longer"),
            (104, &[0x23, 0x85, 0x28, 0x75, 0, 0, 0, 16], "extension of its bitmaps is damaged"),
            (24, &[0x80], "its size is"),
        ] {
            let error = error(at, value);
            assert!(error.contains(why), "{at}: {error}");
        }
        assert!(Header::parse(&header()[..100]).is_err());
    }

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

//! Persistent dirty bitmaps, as QEMU's docs/interop/qcow2.rst specifies them. A header extension has the
//! offset of the bitmap directory, the directory names a table for each bitmap, and the table names the
//! clusters with the bits.

use std::ops::Range;

use blkq::bitmap::{BITMAPS_MAX, Bitmap, BitmapState, MEMORY_MAX_BYTES, NAME_MAX_BYTES, bytes_for};
use blkq::{Error, ErrorKind, IoBuffer};

use crate::bitmaps::Loaded;
use crate::errors::{malformed, unsupported};
use crate::image_file::ImageFile;
use crate::qcow2::format::{
    AUTOCLEAR_AT, AUTOCLEAR_BITMAPS, BitmapsExtension, EXTENSION_BITMAPS, EXTENSION_HEAD_BYTES, Extension,
    Header, NAME_OFFSET_AT, OFFSET, bitmaps_extension, extensions, u32_at, u64_at,
};

/// Largest bitmap directory in bytes, over ten times what the most bitmaps of a device need. QEMU's limit of
/// 64 MiB would let a hole in a small file become millions of entries in memory.
const DIRECTORY_MAX_BYTES: u64 = 1 << 20;
/// Bytes of a directory entry without extra data and name.
const ENTRY_BYTES: usize = 24;
/// Offsets in an entry of the flags and of the length of the extra data.
const FLAGS_AT: usize = 12;
const EXTRA_BYTES_AT: usize = 20;
/// Flags of an entry: writes may be missing; new writes set bits; unknown extra data may be ignored.
const FLAG_IN_USE: u32 = 1;
const FLAG_AUTO: u32 = 1 << 1;
const FLAG_EXTRA_COMPATIBLE: u32 = 1 << 2;
/// The only type of bitmap that the specification defines.
const TYPE_DIRTY: u8 = 1;
/// An entry of a bitmap table without a cluster that means: all bits are set.
const ALL_ONES: u64 = 1;
/// Bytes that a disk writes completely or not at all, even if the power fails.
const SECTOR_BYTES: usize = 512;
const END_MARKER: [u8; EXTENSION_HEAD_BYTES] = [0; EXTENSION_HEAD_BYTES];

/// Where bitmaps are stored.
#[derive(Default)]
pub struct Layout {
    /// Offset of the directory in the file.
    pub directory: u64,
    /// The content of the directory with all bitmaps marked as in use.
    pub marked: Vec<u8>,
    /// For each bitmap the offset of its table, and the offsets of the clusters in the table, 0 for none.
    pub tables: Vec<(u64, Vec<u64>)>,
    /// The offsets of all clusters of the directory, the tables and the bits.
    pub clusters: Vec<u64>,
    /// Entries that blkq does not know or that are too large, marked as in use; written back unchanged.
    pub others: Vec<Vec<u8>>,
}

struct Entry {
    name: String,
    granularity: u64,
    flags: u32,
    table: u64,
    clusters: u64,
    /// The bytes of the entry in the directory.
    place: Range<usize>,
}

/// Reads the bitmaps of an image with a device of `size` bytes. Fails with [`ErrorKind::Format`] if the
/// extension is damaged.
pub fn read(file: &ImageFile, header: &Header, size: u64) -> Result<Loaded<Layout>, Error> {
    let Some(extension) = &header.bitmaps else { return Ok(Loaded::nothing(None)) };
    let cluster = header.cluster_bytes();
    let file_bytes = file.size()?;
    let read = |range: Range<u64>| {
        if range.end > file_bytes {
            return Err(malformed("a part of them lies beyond the end of the file"));
        }
        // The buffer suits direct I/O.
        let length = (range.end - range.start) as usize;
        let mut buffer = IoBuffer::zeroed(length.next_multiple_of(4096));
        file.read_padded_at(&mut buffer, range.start, range.end).map_err(|e| file.failed("read", e))?;
        Ok(buffer[..length].to_vec())
    };
    if extension.directory_bytes > DIRECTORY_MAX_BYTES {
        return Err(malformed(format!("their directory has {} bytes", extension.directory_bytes)));
    }
    let place = place(extension.directory, extension.directory_bytes, cluster)?;
    let (mut bitmaps, mut warnings, mut layout) = (Vec::new(), Vec::new(), Layout::default());
    (layout.directory, layout.marked) = (place.start, read(place.clone())?);
    let (entries, mut others) = entries(&layout.marked, extension.count, cluster)?;
    layout.clusters.extend(place.step_by(cluster as usize));
    for entry in entries {
        let range = entry.table..entry.table + entry.clusters * 8;
        let table = match read(range.clone()) {
            Err(error) if error.kind() == ErrorKind::Format => {
                others.push((entry.place, error));
                continue;
            }
            read => read?,
        };
        mark(&mut layout.marked, &entry.place);
        let table: Vec<u64> = table.chunks_exact(8).map(|number| u64_at(number, 0)).collect();
        layout.clusters.extend(range.step_by(cluster as usize));
        let offset_of = |number: &u64| Some(number & OFFSET).filter(|offset| offset.is_multiple_of(cluster));
        let offsets: Vec<u64> = table.iter().map(|number| offset_of(number).unwrap_or(0)).collect();
        layout.clusters.extend(offsets.iter().filter(|offset| **offset != 0));
        layout.tables.push((entry.table, offsets));
        let bitmap = match entry.flags & FLAG_IN_USE != 0 {
            true => entry.inconsistent(),
            false => entry.load(&table, size, cluster, read).or_else(|error| {
                warnings.push(format!("the bitmap {} cannot be kept up to date: {error}", entry.name));
                entry.inconsistent()
            }),
        };
        bitmaps.push(bitmap?);
    }
    if let Some((_, error)) = others.first() {
        let (count, shown) = (others.len(), file.path.display());
        warnings.push(match count {
            1 => format!("a bitmap in {shown} cannot be kept up to date: {error}"),
            _ => format!("{count} bitmaps in {shown} cannot be kept up to date; for the first: {error}"),
        });
    }
    for (place, _) in others {
        mark(&mut layout.marked, &place);
        let other = layout.marked[place].to_vec();
        // If two bitmaps have the same name, only the known one stays.
        if bitmaps.iter().all(|bitmap| Some(bitmap.name().as_bytes()) != entry_name(&other)) {
            layout.others.push(other);
        }
    }
    Ok(Loaded { bitmaps, warnings, place: Some(layout) })
}

fn mark(directory: &mut [u8], place: &Range<usize>) {
    directory[place.start + FLAGS_AT + 3] |= FLAG_IN_USE as u8;
}

/// An entry that blkq does not know or that is too large: its bytes in the directory, and why.
type Other = (Range<usize>, Error);

/// Parses the entries of a directory, of which there must be exactly `count`. A bad entry does not affect the
/// others.
fn entries(directory: &[u8], count: u32, cluster: u64) -> Result<(Vec<Entry>, Vec<Other>), Error> {
    let (mut entries, mut others) = (Vec::<Entry>::new(), Vec::new());
    let mut clusters_left = MEMORY_MAX_BYTES / cluster + BITMAPS_MAX as u64;
    let mut end = 0;
    for _ in 0..count {
        let place = entry_place(directory, end)?;
        end = place.end;
        let entry = Entry::parse(&directory[place.clone()], place.clone(), cluster).and_then(|entry| {
            if entries.len() == BITMAPS_MAX {
                let message = format!("there are more than {BITMAPS_MAX}; one of them is {}", entry.name);
                return Err(malformed(message));
            }
            if entries.iter().any(|other| other.name == entry.name) {
                return Err(malformed(format!("two bitmaps have the name {}", entry.name)));
            }
            clusters_left = clusters_left.checked_sub(entry.clusters).ok_or_else(|| {
                malformed(format!("{} and the bitmaps before it need too much memory", entry.name))
            })?;
            Ok(entry)
        });
        match entry {
            Ok(entry) => entries.push(entry),
            Err(error) => others.push((place, error)),
        }
    }
    if end != directory.len() {
        return Err(malformed(format!("their directory does not have exactly {count} entries")));
    }
    Ok((entries, others))
}

fn entry_place(directory: &[u8], at: usize) -> Result<Range<usize>, Error> {
    let entry = directory.get(at..).filter(|entry| entry.len() >= ENTRY_BYTES);
    let bytes = entry.and_then(|entry| {
        let (extra, name) = (u32_at(entry, EXTRA_BYTES_AT) as usize, name_bytes(entry));
        let bytes = ENTRY_BYTES.checked_add(extra)?.checked_add(name)?.checked_next_multiple_of(8)?;
        (bytes <= entry.len()).then_some(bytes)
    });
    bytes.map(|bytes| at..at + bytes).ok_or_else(|| malformed("their directory is truncated"))
}

fn name_bytes(entry: &[u8]) -> usize {
    usize::from(u16::from_be_bytes([entry[18], entry[19]]))
}

/// The name in a directory entry; `None` if it is not within the entry.
pub fn entry_name(entry: &[u8]) -> Option<&[u8]> {
    let at = ENTRY_BYTES.checked_add(u32_at(entry, EXTRA_BYTES_AT) as usize)?;
    entry.get(at..)?.get(..name_bytes(entry))
}

impl Entry {
    fn parse(bytes: &[u8], in_directory: Range<usize>, cluster: u64) -> Result<Entry, Error> {
        let (table, clusters) = (u64_at(bytes, 0), u64::from(u32_at(bytes, 8)));
        let (kind, granularity_bits) = (bytes[16], bytes[17]);
        let (flags, extra_bytes) = (u32_at(bytes, FLAGS_AT), u32_at(bytes, EXTRA_BYTES_AT));
        let name = entry_name(bytes).filter(|name| (1..=NAME_MAX_BYTES).contains(&name.len()));
        let name = name.and_then(|name| String::from_utf8(name.to_vec()).ok());
        let name = name.filter(|name| !name.contains(char::is_control));
        let Some(name) = name else { return Err(malformed("its name is not printable text")) };
        let known = FLAG_IN_USE | FLAG_AUTO | FLAG_EXTRA_COMPATIBLE;
        // blkq does not keep extra data, so it would be lost.
        if kind != TYPE_DIRTY || flags & !known != 0 || extra_bytes > 0 {
            let message = format!("{name} has a type, a flag or extra data that blkq does not know");
            return Err(malformed(message));
        }
        if !(9..=31).contains(&granularity_bits) || clusters == 0 {
            return Err(malformed(format!(
                "{name} has a granularity of 2^{granularity_bits} bytes and a table of {clusters} \
                 entries, which is not valid"
            )));
        }
        place(table, clusters * 8, cluster)?;
        Ok(Entry { name, granularity: 1 << granularity_bits, flags, table, clusters, place: in_directory })
    }

    fn inconsistent(&self) -> Result<Bitmap, Error> {
        Bitmap::new(&self.name, self.granularity, 0, BitmapState::Inconsistent)
    }

    fn load(
        &self,
        table: &[u64],
        size: u64,
        cluster: u64,
        read: impl Fn(Range<u64>) -> Result<Vec<u8>, Error>,
    ) -> Result<Bitmap, Error> {
        let state = if self.flags & FLAG_AUTO != 0 { BitmapState::Recording } else { BitmapState::Disabled };
        if bytes_for(size, self.granularity).div_ceil(cluster) != self.clusters {
            return Err(malformed("it belongs to a device of another size"));
        }
        let mut bitmap = Bitmap::new(&self.name, self.granularity, size, state)?;
        for (number, entry) in table.iter().enumerate() {
            let at = number as u64 * cluster;
            match (entry & OFFSET, entry & !OFFSET) {
                (0, 0) => {}
                (0, ALL_ONES) => bitmap.load(at, &vec![0xff; cluster as usize]),
                (offset, 0) => bitmap.load(at, &read(place(offset, cluster, cluster)?)?),
                _ => return Err(malformed("its table has an invalid entry")),
            }
        }
        Ok(bitmap)
    }
}

#[derive(Clone)]
pub struct BitmapEntry {
    pub name: String,
    granularity: u64,
    state: BitmapState,
    /// Size of the bits in bytes.
    pub bytes: u64,
}

impl BitmapEntry {
    pub fn of(bitmap: &Bitmap, size: u64) -> BitmapEntry {
        let (name, granularity) = (bitmap.name().to_owned(), bitmap.granularity());
        let bytes = match bitmap.state() {
            // The format requires a table even without bits. One of full size could take any amount of
            // memory.
            BitmapState::Inconsistent => 1,
            _ => bytes_for(size, granularity),
        };
        BitmapEntry { name, granularity, state: bitmap.state(), bytes }
    }

    pub fn in_place_of(self, old: &BitmapEntry) -> BitmapEntry {
        BitmapEntry { bytes: if self.has_bits() { self.bytes } else { old.bytes }, ..self }
    }

    pub fn has_bits(&self) -> bool {
        self.state != BitmapState::Inconsistent
    }

    /// Whether the directory entries are equal, apart from flags without a meaning while marked as in use.
    pub fn is_like(&self, other: &BitmapEntry) -> bool {
        self.name == other.name && self.granularity == other.granularity && self.has_place_of(other, 1)
    }

    /// Whether the clusters of one suit the other, with clusters of `cluster` bytes. The table of a bitmap
    /// without bits may have any size.
    pub fn has_place_of(&self, other: &BitmapEntry, cluster: u64) -> bool {
        let clusters = |named: &BitmapEntry| named.has_bits().then(|| named.bytes.div_ceil(cluster));
        clusters(self) == clusters(other)
    }

    /// The directory entry of the bitmap, whose table is at byte `table` and names clusters of `cluster` bytes.
    /// `in_use`: writes may be missing in the bits of the file.
    pub fn to_bytes(&self, table: u64, cluster: u64, in_use: bool) -> Vec<u8> {
        let flags = match self.state {
            BitmapState::Inconsistent => FLAG_IN_USE,
            BitmapState::Recording => FLAG_AUTO,
            BitmapState::Disabled => 0,
        };
        let flags = if in_use { flags | FLAG_IN_USE } else { flags };
        let name = self.name.as_bytes();
        let mut bytes = table.to_be_bytes().to_vec();
        bytes.extend((self.bytes.div_ceil(cluster) as u32).to_be_bytes());
        bytes.extend(flags.to_be_bytes());
        bytes.extend([TYPE_DIRTY, self.granularity.trailing_zeros() as u8]);
        bytes.extend((name.len() as u16).to_be_bytes());
        bytes.extend(0u32.to_be_bytes());
        bytes.extend(name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }
}

/// A change in the header cluster: the offset and the new bytes. It must be durable before the next change is written.
pub type HeaderChange = (usize, Vec<u8>);

/// Plans the changes of the header cluster `old` that replace its bitmaps extension by `extension`, or remove
/// it. Fails with [`ErrorKind::Unsupported`] for an image of version 2 or a header without room.
///
/// A power loss may leave any sectors of a change unwritten. So each change either fits into one sector, or
/// writes only bytes that no program reads yet: those after the end marker of the extensions, and beside the
/// backing file's name. While the autoclear bit of the bitmaps is clear, programs ignore the extension.
pub fn plan_extension(old: &[u8], extension: Option<&BitmapsExtension>) -> Result<Vec<HeaderChange>, Error> {
    if u32_at(old, 4) < 3 {
        return Err(unsupported(
            "it is of version 2, which has no bitmaps; convert it with `qemu-img amend -o compat=v3`",
        ));
    }
    let header_bytes = u32_at(old, 100) as usize;
    let (name_at, name_bytes) = (u64_at(old, 8) as usize, u32_at(old, 16) as usize);
    let name = name_at.checked_add(name_bytes).and_then(|end| old.get(name_at..end));
    let has_name = name_at != 0 && name_bytes != 0;
    // Checked again, because another program may have changed the header since it was parsed.
    if !(104..=old.len()).contains(&header_bytes)
        || !header_bytes.is_multiple_of(8)
        || has_name && (name.is_none() || name_at < header_bytes)
    {
        return Err(malformed("the fields of its header contradict each other"));
    }
    let extensions = extensions(old, header_bytes)?;
    let present = bitmaps_extension(&extensions)?;
    let end = extensions.last().map_or(header_bytes, Extension::end);
    let mut plan = HeaderPlan { cluster: old.to_vec(), changes: Vec::new() };
    let Some(extension) = extension else {
        plan.change(AUTOCLEAR_AT, &[0; 4]);
        if let Some(present) = present.filter(|present| present.end() == end) {
            plan.change(present.at, &END_MARKER);
        }
        // An extension with others after it stays: removing it would move those. The clear autoclear bit
        // disables it.
        return Ok(plan.finish());
    };
    let mut data = extension.to_bytes();
    if let Some(present) = present {
        let at = present.at + EXTENSION_HEAD_BYTES;
        if at / SECTOR_BYTES != (at + data.len() - 1) / SECTOR_BYTES {
            plan.change(AUTOCLEAR_AT, &[0; 4]);
        }
        plan.change(at, &data);
    } else {
        if old.get(end..end + END_MARKER.len()).is_none_or(|marker| marker[..4] != END_MARKER[..4])
            || name_at != 0 && name_at < end + END_MARKER.len()
        {
            return Err(unsupported("its header has no room for bitmaps: its extensions have no end marker"));
        }
        let new_end = end + EXTENSION_HEAD_BYTES + data.len() + END_MARKER.len();
        let mut used = new_end;
        if name_at != 0 && name_at < new_end {
            let name = name.filter(|_| has_name).unwrap_or_default();
            let place = new_end.max(name_at + name.len()).next_multiple_of(8);
            used = place + name.len();
            if used <= old.len() {
                plan.change(place, name);
                plan.change(NAME_OFFSET_AT, &(if has_name { place as u64 } else { 0 }).to_be_bytes());
            }
        }
        if used > old.len() {
            return Err(unsupported(
                "its header has no room for bitmaps, because its clusters are too small",
            ));
        }
        let mut head = EXTENSION_BITMAPS.to_be_bytes().to_vec();
        head.extend((data.len() as u32).to_be_bytes());
        data.extend(END_MARKER);
        plan.change(end + EXTENSION_HEAD_BYTES, &data);
        plan.change(end, &head);
    }
    plan.change(AUTOCLEAR_AT, &AUTOCLEAR_BITMAPS.to_be_bytes());
    Ok(plan.finish())
}

struct HeaderPlan {
    /// The cluster with all planned changes applied.
    cluster: Vec<u8>,
    changes: Vec<HeaderChange>,
}

impl HeaderPlan {
    fn change(&mut self, at: usize, bytes: &[u8]) {
        let place = &mut self.cluster[at..at + bytes.len()];
        if place != bytes {
            place.copy_from_slice(bytes);
            self.changes.push((at, bytes.to_vec()));
        }
    }

    /// The changes, as a single one if the first sector contains them all.
    fn finish(self) -> Vec<HeaderChange> {
        let end = self.changes.iter().map(|(at, bytes)| at + bytes.len()).max();
        match end {
            Some(end) if end <= SECTOR_BYTES => vec![(0, self.cluster[..end].to_vec())],
            _ => self.changes,
        }
    }
}

/// The byte range of a table or cluster at `offset` of the file, checked against the format.
fn place(offset: u64, bytes: u64, cluster: u64) -> Result<Range<u64>, Error> {
    let end = offset.checked_add(bytes).filter(|end| *end <= 1 << 56);
    match end {
        Some(end) if offset >= cluster && offset.is_multiple_of(cluster) => Ok(offset..end),
        _ => Err(malformed(format!("a part of them is at byte {offset}, where no cluster can be"))),
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;
    use crate::qcow2::format::{BackingName, MAGIC};

    fn entry(name: &[u8], clusters: u32, extra: &[u8]) -> Vec<u8> {
        let mut bytes = (1u64 << 16).to_be_bytes().to_vec();
        bytes.extend(clusters.to_be_bytes());
        bytes.extend(FLAG_AUTO.to_be_bytes());
        bytes.extend([TYPE_DIRTY, 16]);
        bytes.extend((name.len() as u16).to_be_bytes());
        bytes.extend((extra.len() as u32).to_be_bytes());
        bytes.extend(extra);
        bytes.extend(name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    #[test]
    fn an_unknown_bitmap_entry_leaves_the_others_usable() {
        let mut unknown = entry(b"flag", 1, &[]);
        unknown[FLAGS_AT] = 0x80;
        let strange = [
            entry(b"\xff", 1, &[]),
            entry(b"extra", 1, &[1, 2, 3]),
            entry(b"large", 1 << 20, &[]),
            entry(b"a", 1, &[]),
            unknown,
        ];
        let directory = [&entry(b"a", 1, &[])[..], &strange.concat(), &entry(b"b", 1, &[])].concat();
        let (known, others) = entries(&directory, 7, 65536).unwrap();
        assert_eq!(known.iter().map(|entry| &entry.name[..]).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(others.into_iter().map(|(place, _)| &directory[place]).collect::<Vec<_>>(), strange);
        let many: Vec<u8> = (0..70u8).flat_map(|number| entry(&[b'0' + number], 1, &[])).collect();
        let (known, others) = entries(&many, 70, 65536).unwrap();
        assert_eq!((known.len(), others.len()), (BITMAPS_MAX, 70 - BITMAPS_MAX));
        for (bytes, count) in [(directory.len() - 8, 7), (directory.len(), 6), (directory.len(), 8)] {
            assert!(entries(&directory[..bytes], count, 65536).is_err());
        }
    }

    #[test]
    fn an_inconsistent_header_is_not_changed() {
        let mut old = vec![0; 512];
        let put = |old: &mut Vec<u8>, name: u64, name_bytes: u32, header: u32| {
            old[4..8].copy_from_slice(&3u32.to_be_bytes());
            old[8..16].copy_from_slice(&name.to_be_bytes());
            old[16..20].copy_from_slice(&name_bytes.to_be_bytes());
            old[100..104].copy_from_slice(&header.to_be_bytes());
        };
        let extension = BitmapsExtension { count: 1, directory_bytes: 32, directory: 512 };
        for (name, name_bytes, header, is_sound) in [
            (0, 0, 104, true),
            (1 << 40, 0, 104, true),
            (112, 5, 104, true),
            (1, 2, 104, false),
            (1 << 40, 2, 104, false),
            (u64::MAX, u32::MAX, 104, false),
            (510, 3, 104, false),
            (0, 0, 513, false),
        ] {
            put(&mut old, name, name_bytes, header);
            let changed = plan_extension(&old, Some(&extension));
            assert_eq!(changed.is_ok(), is_sound, "{name} {name_bytes} {header}");
        }
    }

    /// A header of version 3 with an unknown extension and a backing file's name, each of the given size.
    fn header_cluster(other: usize, name: usize) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &MAGIC);
        put(4, &3u32.to_be_bytes());
        put(20, &12u32.to_be_bytes());
        put(48, &4096u64.to_be_bytes());
        put(56, &1u32.to_be_bytes());
        put(96, &4u32.to_be_bytes());
        put(100, &104u32.to_be_bytes());
        put(104, &0x1234_5678u32.to_be_bytes());
        put(108, &(other as u32).to_be_bytes());
        if name > 0 {
            let at = 112 + other.next_multiple_of(8) + 8;
            put(8, &(at as u64).to_be_bytes());
            put(16, &(name as u32).to_be_bytes());
            put(at, &vec![b'n'; name]);
        }
        bytes
    }

    fn trusted(cluster: &[u8]) -> (Option<BackingName>, Option<BitmapsExtension>) {
        let Header { backing, bitmaps, autoclear, .. } = Header::parse(cluster).unwrap();
        (backing, bitmaps.filter(|_| autoclear & AUTOCLEAR_BITMAPS != 0))
    }

    // Contract: durability
    #[test]
    fn a_torn_change_of_the_header_keeps_the_backing_file() {
        let extension = |count| BitmapsExtension { count, directory_bytes: 32, directory: 4096 };
        for (other, name) in (300..480).step_by(8).flat_map(|other| [0, 5, 700].map(|name| (other, name))) {
            let mut cluster = header_cluster(other, name);
            let backing = trusted(&cluster).0;
            for next in [Some(extension(1)), Some(extension(2)), None, Some(extension(3)), None] {
                let before = trusted(&cluster).1;
                for (at, bytes) in plan_extension(&cluster, next.as_ref()).unwrap() {
                    let changed = [&cluster[..at], &bytes, &cluster[at + bytes.len()..]].concat();
                    // Each sector is written or not.
                    for written in 0..1 << 8 {
                        let mut torn = cluster.clone();
                        for sector in (0..8).filter(|sector| written >> sector & 1 == 1) {
                            let sector = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
                            torn[sector.clone()].copy_from_slice(&changed[sector]);
                        }
                        let (name_now, bitmaps) = trusted(&torn);
                        assert_eq!(name_now, backing, "{other} {name}");
                        assert!(
                            bitmaps.is_none() || bitmaps == before || bitmaps == next,
                            "{other} {name}: {bitmaps:?}"
                        );
                    }
                    cluster = changed;
                }
                assert_eq!(trusted(&cluster), (backing.clone(), next));
            }
        }
    }
}

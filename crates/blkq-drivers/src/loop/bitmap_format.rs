//! The format of the file with the dirty bitmaps of a raw image.
//!
//! The file has two slots with the names of the bitmaps, which are written in turn. The valid slot with the higher number
//! is the current one. So a power loss during a write leaves at least one valid slot, and with it the names.
//!
//! The bits follow the slots. They are written while the current slot is marked as in use, which means that it has no
//! bits. The next slot contains their checksums, so that bits which a power loss has damaged are detected.
//!
//! All numbers are little-endian. The slots begin at bytes 0 and 73,728. A slot consists of:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `blkqbmap` |
//! | 4, 4 | version, 3; flags: 1 while the image is open for writing, and then there are no bits |
//! | 8 | number of the slot |
//! | 8, 8, 8, 8 | the fingerprint: size of the device in bytes; modification time in seconds and nanoseconds; inode |
//! | 4, 4, 8 | number of bitmaps; bytes of the slot; 64-bit FNV-1a checksum of the slot with zeroes in this field |
//! | 2, 1, 1, 4 | for each bitmap: bytes of its name, base-2 logarithm of its granularity, state, zeroes |
//! | 8, 8 | bytes of its bits; their checksum |
//! | | its name |
//!
//! The bits of the bitmaps begin at byte 147,456, one bitmap after the other, the lowest bit of each byte first.

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use blkq::Error;
use blkq::bitmap::{BITMAPS_MAX, Bitmap, BitmapState, MEMORY_MAX_BYTES, NAME_MAX_BYTES, bytes_for};

use crate::image_file::ImageFile;

pub(super) const MAGIC: &[u8; 8] = b"blkqbmap";
pub(super) const VERSION: u32 = 3;
const FLAG_IN_USE: u32 = 1;
const HEADER_BYTES: usize = 72;
const CHECKSUM_AT: usize = 64;
const ENTRY_BYTES: usize = 24;
/// Distance between the slots, in bytes: room for the largest number of bitmaps with the longest names.
const SLOT_BYTES: usize = 72 << 10;
const _: () = assert!(HEADER_BYTES + BITMAPS_MAX * (ENTRY_BYTES + NAME_MAX_BYTES) <= SLOT_BYTES);
const BITS_AT: usize = 2 * SLOT_BYTES;
/// A longer file is damaged, and is not read into memory.
pub(super) const FILE_MAX_BYTES: u64 = BITS_AT as u64 + MEMORY_MAX_BYTES;
/// The states of a bitmap, indexed by their number in the file.
const STATES: [BitmapState; 3] = [BitmapState::Recording, BitmapState::Disabled, BitmapState::Inconsistent];

/// Limit of [`ImageFingerprint::wait_until_older`]: a little more than the coarsest time stamp, 2 s on FAT.
const WAIT_MAX: Duration = Duration::from_millis(2500);

/// Facts that change whenever a program writes to the image or replaces it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ImageFingerprint {
    pub size: u64,
    /// The modification time of the file, in seconds and nanoseconds.
    pub modified: (i64, i64),
    /// Distinguishes a copy or a restored backup with the same modification time.
    pub inode: u64,
}

impl ImageFingerprint {
    pub fn of(image: &ImageFile, size: u64) -> Result<ImageFingerprint, Error> {
        let metadata = image.file.metadata().map_err(|e| image.failed("read", e))?;
        Ok(ImageFingerprint {
            size,
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            inode: metadata.ino(),
        })
    }

    /// Waits until a new write would change the modification time. File systems record it in ticks of the kernel or
    /// in seconds, FAT in units of two seconds. A modification time without nanoseconds is taken as one of these.
    pub fn wait_until_older(&self) {
        let tick = Duration::from_secs(if self.modified.1 == 0 { 2 } else { 0 });
        let modified = Duration::new(self.modified.0.max(0) as u64, self.modified.1 as u32) + tick;
        let now = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
            Duration::new(now.tv_sec.max(0) as u64, now.tv_nsec as u32)
        };
        // A modification time in the far future was set by hand, so a write changes it in any case.
        let until = now() + WAIT_MAX;
        while (now() <= modified) && modified < until && now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The bytes to write at an offset of the file.
pub(super) type Write = (u64, Vec<u8>);

pub(super) fn file_bytes<'a>(bitmaps: impl Iterator<Item = &'a Bitmap>) -> u64 {
    BITS_AT as u64 + bitmaps.map(|bitmap| bytes_for(bitmap.size(), bitmap.granularity())).sum::<u64>()
}

/// Writes the slot after `last`, with `bitmaps` marked as in use.
pub(super) fn mark(bitmaps: &[&Bitmap], fingerprint: ImageFingerprint, last: u64) -> Vec<Write> {
    let entries: Vec<(&Bitmap, Vec<u8>)> = bitmaps.iter().map(|bitmap| (*bitmap, Vec::new())).collect();
    vec![slot(&entries, fingerprint, FLAG_IN_USE, last + 1)]
}

/// Writes the bits of `bitmaps`, and then the slot after `last` with their checksums. In the slot `last` the bitmaps are
/// marked as in use.
pub(super) fn store(bitmaps: &[&Bitmap], fingerprint: ImageFingerprint, last: u64) -> Vec<Write> {
    let entries: Vec<_> = bitmaps.iter().map(|bitmap| (*bitmap, bitmap.to_bytes())).collect();
    let slot = slot(&entries, fingerprint, 0, last + 1);
    let mut end = BITS_AT as u64;
    let mut writes = Vec::with_capacity(entries.len() + 1);
    for (_, bits) in entries {
        let at = end;
        end += bits.len() as u64;
        writes.push((at, bits));
    }
    writes.push(slot);
    writes
}

/// Slots with odd numbers are at byte 0, those with even numbers are the other slot.
fn slot(entries: &[(&Bitmap, Vec<u8>)], fingerprint: ImageFingerprint, flags: u32, number: u64) -> Write {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    let ImageFingerprint { size, modified: (seconds, nanoseconds), inode } = fingerprint;
    for word in [number, size, seconds as u64, nanoseconds as u64, inode] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend((entries.len() as u32).to_le_bytes());
    bytes.extend([0; 12]);
    for (bitmap, bits) in entries {
        let state = STATES.iter().position(|state| *state == bitmap.state()).unwrap_or(STATES.len());
        bytes.extend((bitmap.name().len() as u16).to_le_bytes());
        bytes.extend([bitmap.granularity().trailing_zeros() as u8, state as u8, 0, 0, 0, 0]);
        bytes.extend((bits.len() as u64).to_le_bytes());
        bytes.extend(checksum(bits).to_le_bytes());
        bytes.extend(bitmap.name().as_bytes());
    }
    let length = bytes.len() as u32;
    bytes[CHECKSUM_AT - 4..CHECKSUM_AT].copy_from_slice(&length.to_le_bytes());
    let checksum = checksum(&bytes);
    bytes[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    ((1 - number % 2) * SLOT_BYTES as u64, bytes)
}

/// Parses the content of a bitmap file. `now` is the present fingerprint of the image. Returns the bitmaps and the number
/// of the current slot, or `None` if the file is damaged.
///
/// All bitmaps are inconsistent if the image has another fingerprint than when they were saved, or if they are marked as
/// in use. A bitmap whose bits are missing or have another checksum is inconsistent, too.
pub(super) fn parse(bytes: &[u8], now: ImageFingerprint) -> Option<(Vec<Bitmap>, u64)> {
    let slots = [0, SLOT_BYTES].map(|at| Slot::parse(bytes.get(at..)?));
    let slot = slots.into_iter().flatten().max_by_key(|slot| slot.number)?;
    let is_consistent = slot.flags & FLAG_IN_USE == 0 && slot.fingerprint == now;
    let (mut bitmaps, mut rest, mut bits_at) = (Vec::new(), slot.entries, BITS_AT as u64);
    for _ in 0..slot.count {
        let (entry, after) = rest.split_at_checked(ENTRY_BYTES)?;
        let (name, after) = after.split_at_checked(usize::from(u16::from_le_bytes(*entry.first_chunk()?)))?;
        rest = after;
        let (name, granularity) = (std::str::from_utf8(name).ok()?, 1u64.checked_shl(u32::from(entry[2]))?);
        let state = *STATES.get(usize::from(entry[3]))?;
        let (bits_bytes, expected) = (number(entry, 8)?, number(entry, 16)?);
        let end = bits_at.checked_add(bits_bytes)?;
        let bits = bytes.get(usize::try_from(bits_at).ok()?..usize::try_from(end).ok()?);
        bits_at = end;
        let is_whole = |bits: &&[u8]| {
            bits_bytes == bytes_for(now.size, granularity.max(1)) && checksum(bits) == expected
        };
        let is_loaded = is_consistent && state != BitmapState::Inconsistent;
        bitmaps.push(match bits.filter(|_| is_loaded).filter(is_whole) {
            Some(bits) => {
                let mut bitmap = Bitmap::new(name, granularity, now.size, state).ok()?;
                bitmap.load(0, bits);
                bitmap
            }
            None => Bitmap::new(name, granularity, 0, BitmapState::Inconsistent).ok()?,
        });
    }
    rest.is_empty().then_some((bitmaps, slot.number))
}

/// A complete slot with a valid checksum.
struct Slot<'a> {
    number: u64,
    flags: u32,
    fingerprint: ImageFingerprint,
    count: u32,
    entries: &'a [u8],
}

impl Slot<'_> {
    fn parse(bytes: &[u8]) -> Option<Slot<'_>> {
        let header = bytes.first_chunk::<HEADER_BYTES>()?;
        let half = |at: usize| header[at..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let length = half(CHECKSUM_AT - 4)? as usize;
        let slot = bytes.get(..length).filter(|slot| (HEADER_BYTES..=SLOT_BYTES).contains(&slot.len()))?;
        let mut zeroed = slot.to_vec();
        zeroed[CHECKSUM_AT..HEADER_BYTES].fill(0);
        let is_sound = checksum(&zeroed) == number(header, CHECKSUM_AT)?;
        if header[..8] != *MAGIC || half(8)? != VERSION || !is_sound || half(56)? > BITMAPS_MAX as u32 {
            return None;
        }
        // The next slot needs a higher number.
        number(header, 16)?.checked_add(1)?;
        let modified = (number(header, 32)? as i64, number(header, 40)? as i64);
        Some(Slot {
            number: number(header, 16)?,
            flags: half(12)?,
            fingerprint: ImageFingerprint { size: number(header, 24)?, modified, inode: number(header, 48)? },
            count: half(56)?,
            entries: &slot[HEADER_BYTES..],
        })
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

/// The 64-bit FNV-1a hash.
fn checksum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use blkq::random::Random;

    const FINGERPRINT: ImageFingerprint = ImageFingerprint { size: 1 << 20, modified: (7, 8), inode: 9 };
    const SECTOR: usize = 512;

    fn bitmaps() -> Vec<Bitmap> {
        let bitmap = |name: &str, state| Bitmap::new(name, 512, FINGERPRINT.size, state).unwrap();
        let bitmaps = vec![bitmap("a", BitmapState::Recording), bitmap("b c", BitmapState::Disabled)];
        bitmaps[0].mark(4096..8192);
        bitmaps
    }

    fn put(file: &mut Vec<u8>, at: usize, bytes: &[u8]) {
        file.resize(file.len().max(at + bytes.len()), 0);
        file[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn run(file: &mut Vec<u8>, writes: Vec<Write>) {
        writes.iter().for_each(|(at, bytes)| put(file, *at as usize, bytes));
    }

    fn saved_file(in_use: bool) -> Vec<u8> {
        let bitmaps = bitmaps();
        let all: Vec<&Bitmap> = bitmaps.iter().collect();
        let mut file = Vec::new();
        run(&mut file, mark(&all, FINGERPRINT, 0));
        if !in_use {
            run(&mut file, store(&all, FINGERPRINT, 1));
        }
        file
    }

    fn facts(bitmaps: &[Bitmap]) -> Vec<(&str, BitmapState, Vec<u8>)> {
        bitmaps.iter().map(|bitmap| (bitmap.name(), bitmap.state(), bitmap.to_bytes())).collect()
    }

    #[test]
    fn bitmaps_are_read_as_they_were_written() {
        let (read, slot) = parse(&saved_file(false), FINGERPRINT).unwrap();
        assert_eq!((facts(&read), slot), (facts(&bitmaps()), 2));
        for (in_use, fingerprint) in [
            (true, FINGERPRINT),
            (false, ImageFingerprint { size: 2 << 20, ..FINGERPRINT }),
            (false, ImageFingerprint { modified: (7, 9), ..FINGERPRINT }),
            (false, ImageFingerprint { inode: 10, ..FINGERPRINT }),
        ] {
            let (read, _) = parse(&saved_file(in_use), fingerprint).unwrap();
            let found: Vec<_> = read.iter().map(|bitmap| (bitmap.name(), bitmap.state())).collect();
            assert_eq!(found, [("a", BitmapState::Inconsistent), ("b c", BitmapState::Inconsistent)]);
        }
    }

    #[test]
    fn a_damaged_file_never_has_wrong_bits() {
        let file = saved_file(false);
        let sound = bitmaps();
        for at in (0..300).chain(SLOT_BYTES - 8..SLOT_BYTES + 300).chain(BITS_AT - 8..file.len()) {
            let mut changed = file.clone();
            changed[at] ^= 0x10;
            for bytes in [&file[..at], &changed] {
                // The current slot may be the one before, in which the bitmaps are marked as in use.
                let Some((read, _)) = parse(bytes, FINGERPRINT) else { continue };
                assert_eq!(read.len(), sound.len(), "at {at}");
                for (read, sound) in read.iter().zip(&sound) {
                    let is_as_it_was = read.to_bytes() == sound.to_bytes();
                    assert_eq!((read.name(), read.granularity()), (sound.name(), sound.granularity()));
                    assert!(read.state() == BitmapState::Inconsistent || is_as_it_was, "at {at}");
                }
            }
        }
        assert!(parse(&file[..HEADER_BYTES], FINGERPRINT).is_none());
    }

    // Contract: bitmaps
    #[test]
    fn a_power_loss_leaves_names_and_whole_bits() {
        for seed in 0..300 {
            let mut random = Random::new(seed);
            let (mut durable, mut slot) = (Vec::new(), 0);
            let mut before: Vec<Bitmap> = Vec::new();
            for round in 0..6 {
                // Up to 40 bitmaps, so that a slot takes several sectors.
                let count = random.below(40) as usize;
                let bitmaps: Vec<Bitmap> = (0..count)
                    .map(|number| {
                        let name =
                            format!("round {round} {number} {}", "n".repeat(random.below(60) as usize));
                        let bitmap =
                            Bitmap::new(&name, 512, FINGERPRINT.size, BitmapState::Recording).unwrap();
                        let at = random.below(FINGERPRINT.size);
                        bitmap.mark(at..at + random.below(FINGERPRINT.size) + 1);
                        bitmap
                    })
                    .collect();
                let all: Vec<&Bitmap> = bitmaps.iter().collect();
                // Each list of writes is followed by a sync, represented as `None`.
                let mut steps: Vec<Option<Write>> =
                    mark(&all, FINGERPRINT, slot).into_iter().map(Some).collect();
                steps.push(None);
                let marked = steps.len();
                steps.extend(store(&all, FINGERPRINT, slot + 1).into_iter().map(Some));
                steps.push(None);
                let lost_at = random.below(steps.len() as u64 + 1) as usize;
                let is_last = random.below(3) == 0;
                let mut volatile = Vec::new();
                for (number, step) in steps.into_iter().enumerate() {
                    if is_last && number == lost_at {
                        break;
                    }
                    match step {
                        Some((at, bytes)) => volatile.push((at as usize, bytes)),
                        None => {
                            volatile.drain(..).for_each(|(at, bytes)| put(&mut durable, at, &bytes));
                        }
                    }
                }
                if !is_last {
                    slot += 2;
                    before = bitmaps;
                    continue;
                }
                for (at, bytes) in volatile {
                    for (number, sector) in bytes.chunks(SECTOR).enumerate() {
                        if random.below(2) == 0 {
                            put(&mut durable, at + number * SECTOR, sector);
                        }
                    }
                }
                let Some((read, _)) = parse(&durable, FINGERPRINT) else {
                    assert!(slot == 0 && lost_at < marked, "seed {seed}: damaged after step {lost_at}");
                    break;
                };
                let read = facts(&read);
                let names = |bitmaps: &[Bitmap]| -> Vec<String> {
                    bitmaps.iter().map(|bitmap| bitmap.name().to_owned()).collect()
                };
                let found: Vec<String> = read.iter().map(|(name, ..)| (*name).to_owned()).collect();
                let now = if lost_at < marked && found != names(&bitmaps) { &before } else { &bitmaps };
                assert_eq!(found, names(now), "seed {seed}: after step {lost_at}");
                for ((_, state, bits), kept) in read.iter().zip(now) {
                    let is_as_kept = *state == BitmapState::Recording && *bits == kept.to_bytes();
                    assert!(is_as_kept || *state == BitmapState::Inconsistent, "seed {seed}");
                }
                break;
            }
        }
    }

    #[test]
    fn a_write_after_the_wait_gives_another_fingerprint() {
        let path = std::env::temp_dir().join(format!("blkq-fingerprint-{}", std::process::id()));
        std::fs::write(&path, []).unwrap();
        let image = ImageFile::open(&path, false).unwrap();
        for byte in 0..50 {
            image.file.write_all_at(&[byte], 0).unwrap();
            let fingerprint = ImageFingerprint::of(&image, 1).unwrap();
            fingerprint.wait_until_older();
            image.file.write_all_at(&[byte], 0).unwrap();
            assert_ne!(ImageFingerprint::of(&image, 1).unwrap(), fingerprint);
        }
        std::fs::remove_file(path).unwrap();
    }
}

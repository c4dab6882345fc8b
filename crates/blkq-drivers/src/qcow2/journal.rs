//! A journal of table changes that the image file does not have yet. If the process is killed, the next
//! process that opens the image applies the journal, so that no completed write is lost. A journal is a file
//! in a directory on tmpfs (`/run`), mapped into memory. A power loss destroys the journal; the image then
//! has everything that was flushed.
//!
//! A record has the new content of a table entry, not a difference, so applying one that the file already has
//! changes nothing. The journal has two halves, and records are appended to one of them. A flush of the
//! metadata switches to the other half; when the file has all changes from before the switch, the first half
//! is emptied.
//!
//! The image's header has the tag of its journal in autoclear features, which QEMU clears when it opens the
//! image for writing. So a journal is not applied after another program has written to the image.

use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use blkq::words::MappedWords;
use blkq::{Error, ErrorKind};
use rustix::fs::{CWD, FallocateFlags, Mode, OFlags, fallocate, ftruncate, openat};
use rustix::io::Errno;
use rustix::mm::ProtFlags;

use crate::errors::{invalid, unsupported};
use crate::image_file::ImageFile;
use crate::options::Journals;
use crate::qcow2::format::SLICE_MAX_BYTES;

/// The bytes `blkqjnl` and the version of the format.
const MAGIC: u64 = u64::from_be_bytes(*b"blkqjnl\x01");
/// Words before the first half.
const HEADER_WORDS: usize = 16;
const RECORD_WORDS: usize = 3;
/// Records in a half. A write to new clusters takes two. In tests there are few, so that halves fill up.
const RECORDS: usize = if cfg!(test) { 1 << 10 } else { 16 << 10 };
const WORDS: usize = HEADER_WORDS + 2 * RECORDS * RECORD_WORDS;
/// Records in a half from which on no task may begin to change tables. Tasks that have begun need fewer
/// records than the rest of the half has.
const CROWDED: usize = RECORDS / 4;

/// Most clusters in a record: the refcounts in a slice of a refcount block, at one bit each.
pub const CLUSTERS_MAX: u64 = SLICE_MAX_BYTES * 8;

/// Tasks that may change tables at the same time. Each appends a few records. The limit leaves room for their
/// records and the refcount blocks that they need, beyond what [`Journal::has_room`] allows others.
pub const CHANGES_MAX: usize = RECORDS / 32;

/// Indices of the words in the header.
const MAGIC_AT: usize = 0;
const TAG_AT: usize = 1;
const BOOT_AT: usize = 2;
const IDENTITY_AT: usize = 4;
const HALF_AT: usize = 6;
const OVERFLOW_AT: usize = 7;
const COUNTS_AT: usize = 8;
const OVERLAY_AT: usize = 10;
/// The tag that the image is about to get. Until then, the image may still have the one in [`TAG_AT`].
const NEXT_TAG_AT: usize = 12;
/// When the image's file was created, or 0 if unknown.
const BIRTH_AT: usize = 13;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Record {
    /// `count` entries of an L2 table, the first at byte `offset` of the file. The first becomes `entry`;
    /// each further one refers to the cluster after that of the one before.
    L2 { offset: u64, entry: u64, count: u64 },
    /// `count` refcounts become `refcount`; the first is that of cluster `first`.
    Refcounts { first: u64, count: u64, refcount: u64 },
    /// An entry of the L1 table.
    L1 { index: u64, entry: u64 },
    /// An entry of the refcount table.
    RefcountTable { index: u64, entry: u64 },
    /// `count` free clusters were allocated, and no table refers to them yet. Applied like
    /// [`Record::Refcounts`] with a refcount of 1.
    Allocated { first: u64, count: u64 },
    /// No table refers to `count` clusters any longer. Each refcount is to be decremented by 1.
    Released { first: u64, count: u64 },
}

impl Record {
    fn words(self) -> [u64; RECORD_WORDS] {
        match self {
            Record::L2 { offset, entry, count } => [count << 8 | 1, offset, entry],
            Record::Refcounts { first, count, refcount } => [count << 8 | 2, first, refcount],
            Record::L1 { index, entry } => [3, index, entry],
            Record::RefcountTable { index, entry } => [4, index, entry],
            Record::Allocated { first, count } => [count << 8 | 5, first, 0],
            Record::Released { first, count } => [count << 8 | 6, first, 0],
        }
    }

    /// Returns `None` for words that blkq does not write; a large count could take forever to apply.
    fn parse([kind, place, value]: [u64; RECORD_WORDS]) -> Option<Record> {
        let count = kind >> 8;
        // blkq changes at most one slice of a table with a record.
        let count_max = if kind & 0xff == 1 { SLICE_MAX_BYTES / 8 } else { CLUSTERS_MAX };
        if count > count_max || place > 1 << 56 {
            return None;
        }
        Some(match kind & 0xff {
            1 => Record::L2 { offset: place, entry: value, count },
            2 => Record::Refcounts { first: place, count, refcount: value },
            3 => Record::L1 { index: place, entry: value },
            4 => Record::RefcountTable { index: place, entry: value },
            5 => Record::Allocated { first: place, count },
            6 => Record::Released { first: place, count },
            _ => return None,
        })
    }
}

/// The changes that a killed process left for an image.
#[derive(PartialEq, Eq, Debug)]
pub enum Left {
    /// The journal does not belong to the image, or does not exist.
    Nothing,
    Records(Vec<Record>),
    /// The journal overflowed or is damaged, so that changes are missing.
    Incomplete,
}

impl Left {
    fn have_data(&self) -> bool {
        let is_data = |record: &Record| matches!(record, Record::L2 { .. } | Record::L1 { .. });
        match self {
            Left::Nothing => false,
            Left::Records(records) => records.iter().any(is_data),
            Left::Incomplete => true,
        }
    }
}

pub struct Journal {
    words: MappedWords,
    pub path: PathBuf,
    boot: (u64, u64),
    identity: (u64, u64),
    half: usize,
    counts: [usize; 2],
}

impl Journal {
    /// Opens the journal of the image with the given device number and inode, and creates it if `make` is set. No other
    /// process may write to it. Fails with [`ErrorKind::Invalid`] if another user owns the file.
    pub fn open(journals: &Journals, identity: (u64, u64), make: bool) -> Result<Journal, Error> {
        let path = journals.directory.join(format!("{:x}-{:x}", identity.0, identity.1));
        let failed = |e: Errno| Error::system(format!("cannot open the journal {}", path.display()), e);
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let flags = if make { flags | OFlags::CREATE } else { flags };
        let file = File::from(openat(CWD, &path, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?);
        let metadata =
            file.metadata().map_err(|e| Error::system(format!("cannot read {}", path.display()), e))?;
        if !metadata.is_file() || metadata.uid() != journals.user {
            let message = format!("the journal {} is not a regular file of this user", path.display());
            return Err(invalid(message));
        }
        let bytes = (WORDS * 8) as u64;
        if metadata.len() > bytes {
            ftruncate(&file, bytes).map_err(failed)?;
        }
        // Allocates the memory now. Otherwise a store into the mapping would kill the process when memory
        // runs out.
        if let Err(error) = fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            // A file of length 0 was just created and has no records.
            let _ = (metadata.len() == 0).then(|| std::fs::remove_file(&path));
            return Err(failed(error));
        }
        // SAFETY: only this user can truncate the file, which has space for all words, and blkq never does. Other
        // processes of blkq access the words as atomics.
        let words = unsafe { MappedWords::map(&file, 0, WORDS, ProtFlags::READ | ProtFlags::WRITE) }
            .map_err(failed)?;
        Ok(Journal { words, path, boot: journals.boot, identity, half: 0, counts: [0; 2] })
    }

    /// Loads are `Acquire` and stores `Release`, so that the next process sees the stores of a killed one in
    /// their order. A comment gives the reason for each exception.
    fn word(&self, at: usize) -> &AtomicU64 {
        &self.words.all()[at]
    }

    fn load(&self, at: usize) -> u64 {
        self.word(at).load(Acquire)
    }

    fn pair(&self, at: usize) -> (u64, u64) {
        (self.load(at), self.load(at + 1))
    }

    fn set_pair(&self, at: usize, (first, second): (u64, u64)) {
        self.word(at).store(first, Release);
        self.word(at + 1).store(second, Release);
    }

    /// The changes of a killed process that had the image open with `tag`.
    pub fn left(&self, tag: u32) -> Left {
        let tags = [TAG_AT, NEXT_TAG_AT].map(|at| self.load(at));
        if tag == 0 || !tags.contains(&tag.into()) || !self.is_of_image() {
            return Left::Nothing;
        }
        self.records()
    }

    /// Whether this journal has writes that an image without a tag lacks. The image's file was created at
    /// `birth`. Journals for a base of a block commit do not count: their overlay has the data.
    pub fn has_ignored_writes(&self, birth: u64) -> bool {
        let has_tag = self.load(TAG_AT) != 0 || self.load(NEXT_TAG_AT) != 0;
        // A new file may have the inode of a removed one.
        let is_same_file = [0, birth].contains(&self.load(BIRTH_AT)) || birth == 0;
        let is_for_clients = is_same_file && self.is_of_image() && self.overlay() == (0, 0);
        has_tag && is_for_clients && self.records().have_data()
    }

    pub fn set_birth(&self, birth: u64) {
        self.word(BIRTH_AT).store(birth, Release);
    }

    fn records(&self) -> Left {
        let mut records = Vec::new();
        let now = (self.load(HALF_AT) & 1) as usize;
        for half in [1 - now, now] {
            let count = self.load(COUNTS_AT + half) as usize;
            if count > RECORDS || self.load(OVERFLOW_AT) != 0 {
                return Left::Incomplete;
            }
            for number in 0..count {
                let at = record_at(half, number);
                let record = Record::parse([at, at + 1, at + 2].map(|at| self.load(at)));
                let Some(record) = record else { return Left::Incomplete };
                records.push(record);
            }
        }
        Left::Records(records)
    }

    /// Device number and inode of the overlay that is being committed into this image, or zeroes. As long as
    /// the image is read through that overlay, it lacks nothing.
    fn overlay(&self) -> (u64, u64) {
        self.pair(OVERLAY_AT)
    }

    /// Records the overlay that is being committed into the image. `None`: the journal is for writes of clients, whose
    /// data no overlay has.
    pub fn set_overlay(&mut self, overlay: Option<(u64, u64)>) {
        self.set_pair(OVERLAY_AT, overlay.unwrap_or_default());
    }

    /// Whether the journal was begun for this image since the system was booted.
    fn is_of_image(&self) -> bool {
        let (boot, identity) = (self.pair(BOOT_AT), self.pair(IDENTITY_AT));
        self.load(MAGIC_AT) == MAGIC && boot == self.boot && identity == self.identity
    }

    /// Empties the journal of an image whose file has all changes, and returns the tag that the image must
    /// get before [`Journal::began`]. Until then it has `tag`. If the process is killed in between, the
    /// journal is empty, whichever of the two tags the image has. `overlay` is the overlay that is committed
    /// into this image.
    pub fn begin(&mut self, tag: u32, overlay: Option<(u64, u64)>) -> u32 {
        if !self.is_of_image() {
            self.set_tags(0, 0);
            self.set_pair(BOOT_AT, self.boot);
            self.set_pair(IDENTITY_AT, self.identity);
            self.word(MAGIC_AT).store(MAGIC, Release);
        }
        if self.load(NEXT_TAG_AT) == u64::from(tag) {
            // The process before was killed between the change of the image and its call of `began`.
            self.began();
        }
        self.set_overlay(overlay);
        // Each `RandomState` has different keys, so the tag is random.
        let next = (RandomState::new().build_hasher().finish() as u32).max(1);
        for (at, value) in stores_to_begin(self.load(HALF_AT), next.into()) {
            self.word(at).store(value, Release);
        }
        (self.half, self.counts) = (0, [0; 2]);
        next
    }

    /// The image has the tag that [`Journal::begin`] returned.
    pub fn began(&mut self) {
        // Relaxed: no other process writes to the journal while this one has it open.
        self.set_tags(self.word(NEXT_TAG_AT).load(Relaxed), 0);
    }

    fn set_tags(&self, tag: u64, next: u64) {
        self.word(TAG_AT).store(tag, Release);
        self.word(NEXT_TAG_AT).store(next, Release);
    }

    /// Appends a change. It must also be made in memory before anything that depends on it completes.
    pub fn append(&mut self, record: Record) {
        let number = self.counts[self.half];
        if number == RECORDS {
            // The journal is incomplete until the next flush has written the change.
            return self.word(OVERFLOW_AT).store(1, Release);
        }
        let at = record_at(self.half, number);
        for (place, word) in record.words().into_iter().enumerate() {
            // Relaxed: `COUNTS_AT` below publishes the record.
            self.word(at + place).store(word, Relaxed);
        }
        self.counts[self.half] = number + 1;
        // Release: a process that reads the count also reads the record. The order matters even for a process
        // that is killed, which stops between two stores.
        self.word(COUNTS_AT + self.half).store((number + 1) as u64, Release);
    }

    /// Whether the metadata should be flushed before tasks begin more changes.
    pub fn is_crowded(&self) -> bool {
        self.counts[self.half] >= CROWDED
    }

    /// Whether there is room for a flush to free clusters.
    pub fn has_room(&self) -> bool {
        self.counts[self.half] < RECORDS - CROWDED
    }

    /// Whether there is room for records of released clusters. Without a record they leak if the process is
    /// killed: space is wasted, but nothing is damaged.
    pub fn has_room_for_released(&self) -> bool {
        self.counts[self.half] < CROWDED / 2
    }

    /// Switches to the other half, at the beginning of a flush that writes all changes so far. Returns false,
    /// without a switch, if the other half still has records because the last flush failed.
    pub fn turn(&mut self) -> bool {
        let other = 1 - self.half;
        if self.counts[other] > 0 {
            return false;
        }
        self.half = other;
        self.word(HALF_AT).store(other as u64, Release);
        true
    }

    pub fn finish(&mut self) {
        let other = 1 - self.half;
        self.counts[other] = 0;
        self.word(COUNTS_AT + other).store(0, Release);
        if self.counts[self.half] < RECORDS {
            self.word(OVERFLOW_AT).store(0, Release);
        }
    }

    pub fn remove(&self) {
        self.set_tags(0, 0);
        // If the file cannot be removed, it stays without a tag and is ignored.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Opens the journal of `image`, if one exists. If that fails and the header of the image has a tag, the journal may
/// contain writes that the image lacks.
pub fn find(journals: &Journals, image: &ImageFile) -> Result<Option<Journal>, Error> {
    Journal::open(journals, image.identity, false).map(Some).or_else(|error| {
        if error.kind() == ErrorKind::NotFound {
            return Ok(None);
        }
        let message = format!(
            "cannot open the journal of {}, which may contain writes that the image lacks: {error}; repair \
             this, or delete the journal to continue without these writes",
            image.path.display()
        );
        Err(Error::new(error.kind(), message))
    })
}

/// The warning that `image`, whose header has no tag, lacks writes that its journal has.
pub fn find_ignored(journals: &Journals, image: &ImageFile) -> Option<String> {
    let journal = find(journals, image).ok().flatten()?;
    journal.has_ignored_writes(image.birth()).then(|| {
        format!(
            "the journal of {} is ignored, because another program opened the image for writing after the \
             daemon was killed; writes that were not flushed by then are lost",
            image.path.display()
        )
    })
}

/// Rejects `image` as the backing file of the image `overlay` if it lacks writes that its journal
/// has: applying them later would change the backing file under the overlay. Writes of a commit of `overlay`
/// itself are no reason, because the overlay still has their data. `tag` is the tag in the image's header.
pub fn check_base(all: &Journals, image: &ImageFile, tag: u32, overlay: (u64, u64)) -> Result<(), Error> {
    if tag == 0 {
        return Ok(());
    }
    let Some(journal) = find(all, image)? else { return Ok(()) };
    let lacks = journal.left(tag).have_data();
    if lacks && journal.overlay() != overlay { Err(lacking(&image.path)) } else { Ok(()) }
}

/// The error for an image that lacks the writes of its journal and is not opened for writing.
pub fn lacking(path: &Path) -> Error {
    unsupported(format!(
        "{} lacks writes that a killed process left in its journal; open it for writing once to apply them",
        path.display()
    ))
}

/// The stores that empty a journal, whose half `now` was written last, and give it the tag `next`. The
/// process may be killed after each of them, so the order matters: the older half is emptied first, because
/// its records without the later ones of the newer half would undo changes.
fn stores_to_begin(now: u64, next: u64) -> [(usize, u64); 5] {
    let now = (now & 1) as usize;
    [(COUNTS_AT + 1 - now, 0), (COUNTS_AT + now, 0), (OVERFLOW_AT, 0), (HALF_AT, 0), (NEXT_TAG_AT, next)]
}

fn record_at(half: usize, number: usize) -> usize {
    HEADER_WORDS + (half * RECORDS + number) * RECORD_WORDS
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    // Contract: durability
    #[test]
    fn a_kill_between_two_stores_undoes_no_change() {
        let place = std::env::temp_dir().join(format!("blkq-journal-{}", std::process::id()));
        let journals = Journals::open(&place).unwrap();
        let entry = |entry| Record::L1 { index: 1, entry };
        for halves in 1..3 {
            for stores in 0..=5 {
                let mut journal = Journal::open(&journals, (1, 2), true).unwrap();
                let tag = journal.begin(0, None);
                journal.began();
                for half in 1..=halves {
                    journal.append(entry(half));
                    assert!(journal.turn());
                    journal.finish();
                }
                journal.append(entry(3));
                assert!(journal.turn());
                journal.append(entry(4));
                assert_eq!(journal.left(tag), Left::Records(vec![entry(3), entry(4)]));
                let next = tag ^ 1;
                let all = stores_to_begin(journal.half as u64, next.into());
                for (at, value) in all.into_iter().take(stores) {
                    journal.word(at).store(value, Release);
                }
                let left = [vec![entry(3), entry(4)], vec![entry(4)], vec![]];
                let expected = Left::Records(left.into_iter().nth(stores.min(2)).unwrap());
                assert_eq!(journal.left(tag), expected, "{stores}");
                let expected = if stores < 5 { Left::Nothing } else { Left::Records(Vec::new()) };
                assert_eq!(journal.left(next), expected, "{stores}");
            }
        }
        std::fs::remove_dir_all(&place).unwrap();
    }
}

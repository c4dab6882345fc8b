//! The changes of an image's tables that its file has not, in memory that outlives the process: a file in a directory
//! of the system's memory (`/run`), mapped. After a process was killed the next one to open the image applies them,
//! so that nothing is lost that completed. A power loss loses both, and the image has what was flushed.
//!
//! A change has the new content, not the difference: to apply one that the file has already changes nothing. There
//! are two halves, of which one is written. A commit begins with the other, and when the file has all that came before
//! it, the first is empty again.
//!
//! The image has the tag of its journal in the features of its header that a program clears if it does not know them
//! (autoclear): so a journal is not applied after another program wrote to the image.

use std::fs::{DirBuilder, File, Permissions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use blkq::text::shell_word;
use blkq::{Error, ErrorKind};
use rustix::fs::{CWD, FallocateFlags, Mode, OFlags, fallocate, ftruncate, openat};
use rustix::io::Errno;

use super::cache::SLICE_MAX_BYTES;
use super::mapping::Words;

/// "blkqjnl" and the version of the format.
const MAGIC: u64 = u64::from_be_bytes(*b"blkqjnl\x01");
/// Words before the halves.
const HEADER_WORDS: usize = 16;
const RECORD_WORDS: usize = 3;
/// Records of a half: two for each write to new clusters. Few in tests, so that it is crowded there.
const RECORDS: usize = if cfg!(test) { 1 << 10 } else { 16 << 10 };
const WORDS: usize = HEADER_WORDS + 2 * RECORDS * RECORD_WORDS;
/// Records that a half has when no task should begin to change more: those that have begun need fewer than the rest.
const CROWDED: usize = RECORDS / 4;

/// Most clusters of a record: those that a slice of a table has refcounts of.
pub(super) const CLUSTERS_MAX: u64 = SLICE_MAX_BYTES * 8;

/// Tasks that may be changing tables at once, of which each adds a few records: so that there is room for those of all,
/// and of the refcount blocks that they need, behind the last that the others leave ([`Journal::has_room`]).
pub(super) const CHANGES_MAX: usize = RECORDS / 32;

/// The words of the header.
const MAGIC_AT: usize = 0;
const TAG_AT: usize = 1;
const BOOT_AT: usize = 2;
const IDENTITY_AT: usize = 4;
const HALF_AT: usize = 6;
const OVERFLOW_AT: usize = 7;
const COUNTS_AT: usize = 8;
const FRONT_AT: usize = 10;
/// The tag that is about to be the image's, while [`TAG_AT`] may still be.
const NEXT_TAG_AT: usize = 12;
/// When the image's file was created.
const BIRTH_AT: usize = 13;

/// The directory in which the journals of images are.
#[derive(Debug)]
pub struct Journals {
    directory: PathBuf,
    /// Of the kernel: what another one left is void.
    boot: [u64; 2],
    /// Whose they are.
    user: u32,
}

impl Journals {
    /// The journals in `directory`, which should be in memory, and is made if it is not there.
    ///
    /// # Errors
    /// If it cannot be made, or the kernel has no `boot_id`.
    pub fn open(directory: &Path) -> Result<Arc<Journals>, Error> {
        let failed = |e| Error::system(format!("cannot make the directory {}", directory.display()), e);
        match DirBuilder::new().mode(0o700).create(directory) {
            // Whatever the process's umask.
            Ok(()) => std::fs::set_permissions(directory, Permissions::from_mode(0o700)).map_err(failed)?,
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && directory.is_dir() => {}
            Err(e) => return Err(failed(e)),
        }
        let path = "/proc/sys/kernel/random/boot_id";
        let text =
            std::fs::read_to_string(path).map_err(|e| Error::system(format!("cannot read {path}"), e))?;
        let id = u128::from_str_radix(&text.trim().replace('-', ""), 16)
            .map_err(|_| Error::new(ErrorKind::System, format!("{path} has no number")))?;
        let user = rustix::process::geteuid().as_raw();
        Ok(Arc::new(Journals { directory: directory.to_owned(), boot: [(id >> 64) as u64, id as u64], user }))
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

/// A change of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Record {
    /// `count` entries of an L2 table, the first at this byte of the file: `entry`, and those of the clusters that
    /// follow its own.
    L2 { offset: u64, entry: u64, count: u64 },
    /// The refcounts of `count` clusters.
    Refcounts { first: u64, count: u64, refcount: u64 },
    /// An entry of the L1 table.
    L1 { index: u64, entry: u64 },
    /// An entry of the refcount table.
    RefcountTable { index: u64, entry: u64 },
    /// `count` clusters that were free are allocated, and no table refers to them yet: as [`Record::Refcounts`] with a
    /// refcount of 1.
    Allocated { first: u64, count: u64 },
    /// No table refers to `count` clusters any longer, each of which is to be counted down by 1.
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

    /// The record of these words; `None` for words that no process has written, which could take any time to apply.
    fn parse([kind, place, value]: [u64; RECORD_WORDS]) -> Option<Record> {
        let count = kind >> 8;
        // A change is within a slice of a table.
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

/// The changes that a process which was killed left for an image.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Left {
    /// Nothing that belongs to it.
    Nothing,
    /// All changes, in order.
    Records(Vec<Record>),
    /// Only a part of the changes, or none that can be read.
    Incomplete,
}

impl Left {
    /// Whether the image lacks data without them.
    fn have_data(&self) -> bool {
        match self {
            Left::Nothing => false,
            Left::Records(records) => {
                records.iter().any(|record| matches!(record, Record::L2 { .. } | Record::L1 { .. }))
            }
            Left::Incomplete => true,
        }
    }
}

/// The journal of an image.
pub(super) struct Journal {
    words: Words,
    path: PathBuf,
    boot: [u64; 2],
    /// Device and inode of the image.
    identity: (u64, u64),
    half: usize,
    counts: [usize; 2],
}

impl Journal {
    /// Opens the journal of the image with that device and inode, which no other process writes, if there is one.
    ///
    /// # Errors
    /// If there is no memory for it, or the file is another user's.
    pub fn find(journals: &Journals, identity: (u64, u64)) -> Result<Option<Journal>, Error> {
        match Journal::open(journals, identity, OFlags::empty()) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            found => found.map(Some),
        }
    }

    /// As [`Journal::find`], or makes one.
    ///
    /// # Errors
    /// As there.
    pub fn find_or_make(journals: &Journals, identity: (u64, u64)) -> Result<Journal, Error> {
        Journal::open(journals, identity, OFlags::CREATE)
    }

    fn open(journals: &Journals, identity: (u64, u64), make: OFlags) -> Result<Journal, Error> {
        let path = journals.directory.join(format!("{:x}-{:x}", identity.0, identity.1));
        let failed = |e: Errno| Error::system(format!("cannot open the journal {}", path.display()), e);
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | make;
        let file = File::from(openat(CWD, &path, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?);
        let metadata =
            file.metadata().map_err(|e| Error::system(format!("cannot read {}", path.display()), e))?;
        if !metadata.is_file() || metadata.uid() != journals.user {
            let message = format!("the journal {} is no file of this user", path.display());
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        let bytes = (WORDS * 8) as u64;
        if metadata.len() > bytes {
            ftruncate(&file, bytes).map_err(failed)?;
        }
        // Else a store would kill the process when memory runs out.
        if let Err(error) = fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            // Nothing is in it that was not there before.
            let _ = (metadata.len() == 0).then(|| std::fs::remove_file(&path));
            return Err(failed(error));
        }
        let words = Words::map(file.as_fd(), WORDS).map_err(failed)?;
        Ok(Journal { words, path, boot: journals.boot, identity, half: 0, counts: [0; 2] })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.words.all()[at]
    }

    /// The changes that are left of a process which had the image open with that tag.
    pub fn left(&self, tag: u32) -> Left {
        let tags = [TAG_AT, NEXT_TAG_AT].map(|at| self.word(at).load(Acquire));
        if tag == 0 || !tags.contains(&tag.into()) || !self.is_of_image() {
            return Left::Nothing;
        }
        self.records()
    }

    /// Whether a process was killed that had written to the image's own device, and its writes are only in this
    /// journal, which an image without a tag does not belong to. The image's file was created at `birth`.
    fn has_ignored_writes(&self, birth: u64) -> bool {
        let word = |at: usize| self.word(at).load(Acquire);
        let has_tag = word(TAG_AT) != 0 || word(NEXT_TAG_AT) != 0;
        // A new file may have the inode of one that was removed.
        let is_same_file = [0, birth].contains(&word(BIRTH_AT)) || birth == 0;
        has_tag && is_same_file && self.is_of_image() && self.front() == (0, 0) && self.records().have_data()
    }

    /// Notes when the image's file was created.
    pub fn set_birth(&self, birth: u64) {
        self.word(BIRTH_AT).store(birth, Release);
    }

    fn records(&self) -> Left {
        let word = |at: usize| self.word(at).load(Acquire);
        let mut records = Vec::new();
        let now = (word(HALF_AT) & 1) as usize;
        for half in [1 - now, now] {
            let count = word(COUNTS_AT + half) as usize;
            if count > RECORDS || word(OVERFLOW_AT) != 0 {
                return Left::Incomplete;
            }
            for number in 0..count {
                let at = record_at(half, number);
                match Record::parse([word(at), word(at + 1), word(at + 2)]) {
                    Some(record) => records.push(record),
                    None => return Left::Incomplete,
                }
            }
        }
        Left::Records(records)
    }

    /// The image of which this one gets the data, so that it lacks nothing as long as it is behind that; 0 for none.
    fn front(&self) -> (u64, u64) {
        let word = |at: usize| self.word(at).load(Acquire);
        (word(FRONT_AT), word(FRONT_AT + 1))
    }

    /// From now on it is for writes of the image's own device.
    pub fn set_own(&mut self) {
        self.set_front((0, 0));
    }

    fn set_front(&mut self, (dev, inode): (u64, u64)) {
        self.word(FRONT_AT).store(dev, Release);
        self.word(FRONT_AT + 1).store(inode, Release);
    }

    /// Whether it was begun for this image, since the system was booted.
    fn is_of_image(&self) -> bool {
        let word = |at: usize| self.word(at).load(Acquire);
        let identity = (word(IDENTITY_AT), word(IDENTITY_AT + 1));
        word(MAGIC_AT) == MAGIC
            && [word(BOOT_AT), word(BOOT_AT + 1)] == self.boot
            && identity == self.identity
    }

    /// Empties the journal of an image whose file has all of it, and which has `tag` until it has that which is returned,
    /// before [`Journal::began`]. A process that is killed in between leaves an empty journal, whichever of these the
    /// image has by then. The image gets the data of the image `front`, if there is one.
    pub fn begin(&mut self, tag: u32, front: Option<(u64, u64)>) -> u32 {
        if !self.is_of_image() {
            self.set_tags(0, 0);
            let ((dev, inode), [high, low]) = (self.identity, self.boot);
            let words = [(BOOT_AT, high), (BOOT_AT + 1, low), (IDENTITY_AT, dev), (IDENTITY_AT + 1, inode)];
            for (at, value) in words.into_iter().chain([(MAGIC_AT, MAGIC)]) {
                self.word(at).store(value, Release);
            }
        }
        if self.word(NEXT_TAG_AT).load(Acquire) == u64::from(tag) {
            // The process before was killed before it called that.
            self.began();
        }
        self.set_front(front.unwrap_or_default());
        // Each has another seed.
        let next = (RandomState::new().build_hasher().finish() as u32).max(1);
        for (at, value) in stores_to_begin(self.word(HALF_AT).load(Acquire), next) {
            self.word(at).store(value, Release);
        }
        (self.half, self.counts) = (0, [0; 2]);
        next
    }

    /// The image has the tag that [`Journal::begin`] has returned.
    pub fn began(&mut self) {
        self.set_tags(self.word(NEXT_TAG_AT).load(Relaxed), 0);
    }

    fn set_tags(&self, tag: u64, next: u64) {
        self.word(TAG_AT).store(tag, Release);
        self.word(NEXT_TAG_AT).store(next, Release);
    }

    /// Notes a change, which was or will be made in memory before anything that depends on it completes.
    pub fn append(&mut self, record: Record) {
        let number = self.counts[self.half];
        if number == RECORDS {
            // Until the next commit the journal is of no use.
            return self.word(OVERFLOW_AT).store(1, Release);
        }
        let at = record_at(self.half, number);
        for (place, word) in record.words().into_iter().enumerate() {
            self.word(at + place).store(word, Relaxed);
        }
        self.counts[self.half] = number + 1;
        // Not seen before the record itself.
        self.word(COUNTS_AT + self.half).store((number + 1) as u64, Release);
    }

    /// Whether a commit should come before there are more changes.
    pub fn is_crowded(&self) -> bool {
        self.counts[self.half] >= CROWDED
    }

    /// Whether there is room for a commit to free clusters.
    pub fn has_room(&self) -> bool {
        self.counts[self.half] < RECORDS - CROWDED
    }

    /// The file that has it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether there is room for clusters that were released. Those that are not noted are leaked if the process is
    /// killed, which harms nobody.
    pub fn has_room_for_released(&self) -> bool {
        self.counts[self.half] < CROWDED / 2
    }

    /// A commit begins, which writes all that was changed so far: from now on the other half is written. Returns
    /// whether it is; not if there is something in it yet, because the last commit failed.
    pub fn turn(&mut self) -> bool {
        let other = 1 - self.half;
        if self.counts[other] > 0 {
            return false;
        }
        self.half = other;
        self.word(HALF_AT).store(other as u64, Release);
        true
    }

    /// The file has all that was changed before the last [`Journal::turn`].
    pub fn finish(&mut self) {
        let other = 1 - self.half;
        self.counts[other] = 0;
        self.word(COUNTS_AT + other).store(0, Release);
        if self.counts[self.half] < RECORDS {
            self.word(OVERFLOW_AT).store(0, Release);
        }
    }

    /// Removes the journal, of an image whose file has all of it.
    pub fn remove(&self) {
        self.set_tags(0, 0);
        // At worst it stays, without a meaning.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The journal of the image at `path`, which has the tag of one.
///
/// # Errors
/// If there is one that cannot be opened: it may have writes that the image lacks.
pub(super) fn find(journals: &Journals, path: &Path, identity: (u64, u64)) -> Result<Option<Journal>, Error> {
    Journal::find(journals, identity).map_err(|error| {
        let message = format!(
            "{} was not closed, and its journal may have writes that it lacks: {error}; cure that, or remove the \
             journal to go on without them",
            path.display()
        );
        Error::new(error.kind(), message)
    })
}

/// The warning that the image at `path`, which has no tag, has a journal with writes that it lacks.
pub(super) fn find_ignored(
    journals: &Journals,
    path: &Path,
    (identity, birth): ((u64, u64), u64),
) -> Option<String> {
    let journal = Journal::find(journals, identity).ok().flatten()?;
    journal.has_ignored_writes(birth).then(|| {
        format!(
            "the journal of {} is ignored, because another program opened the image for writing after its process was \
             killed: writes that were not flushed then are lost",
            path.display()
        )
    })
}

/// Rejects an image at `path` behind the image `front`, if it lacks writes in its journal, which has that tag: a later
/// commit would bring them back under what the other has by then.
///
/// # Errors
/// As [`find`], and [`lacking`].
pub(super) fn check_behind(
    journals: &Journals,
    path: &Path,
    (identity, tag): ((u64, u64), u32),
    front: (u64, u64),
) -> Result<(), Error> {
    if tag == 0 {
        return Ok(());
    }
    let Some(journal) = find(journals, path, identity)? else { return Ok(()) };
    let lacks = journal.left(tag).have_data();
    if lacks && journal.front() != front { Err(lacking(path)) } else { Ok(()) }
}

/// The warning of an image that can have no journal.
pub(super) fn none_in_version_2(path: &Path) -> String {
    format!(
        "what is not flushed is lost if this process is killed: {} is of version 2; `qemu-img amend -o compat=1.1 {}` \
         changes that",
        path.display(),
        shell_word(path)
    )
}

/// Why an image is not read that has a journal.
pub(super) fn lacking(path: &Path) -> Error {
    let message = format!(
        "{} lacks writes of a process that was killed; open it for writing once, so that it gets them",
        path.display()
    );
    Error::new(ErrorKind::Unsupported, message)
}

/// The stores that empty a journal, of which the half `now` was written last, and give it the tag `next`: in this order,
/// as the process may be killed after each. The older half without the other would take changes back.
fn stores_to_begin(now: u64, next: u32) -> [(usize, u64); 5] {
    let now = (now & 1) as usize;
    let emptied = [COUNTS_AT + 1 - now, COUNTS_AT + now, OVERFLOW_AT, HALF_AT].map(|at| (at, 0));
    let [older, newer, overflow, half] = emptied;
    [older, newer, overflow, half, (NEXT_TAG_AT, next.into())]
}

fn record_at(half: usize, number: usize) -> usize {
    HEADER_WORDS + (half * RECORDS + number) * RECORD_WORDS
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    // Contract: durability
    #[test]
    fn a_death_between_two_stores_takes_no_change_back() {
        let place = std::env::temp_dir().join(format!("blkq-journal-{}", std::process::id()));
        let journals = Journals::open(&place).unwrap();
        let entry = |entry| Record::L1 { index: 1, entry };
        for halves in 1..3 {
            for stores in 0..=5 {
                let mut journal = Journal::find_or_make(&journals, (1, 2)).unwrap();
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
                let all = stores_to_begin(journal.half as u64, next);
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

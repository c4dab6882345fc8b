//! Recovery: applies the journal that a killed process left for an image, or frees leaked clusters if the journal is
//! lost, and begins a new one.

use std::collections::{BTreeMap, BTreeSet};

use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::lock as locked;
use blkq::text::shell_word;
use blkq::{Error, ErrorKind, Status};

use crate::errors::{malformed, unsupported};
use crate::options::Journals;
use crate::qcow2::format::{Entry, OFFSET, TAG_AT};
use crate::qcow2::io::allocate::{self, until_ready};
use crate::qcow2::io::env::Env;
use crate::qcow2::journal::{self, Journal, Left, Record};
use crate::qcow2::tables::cache::{Key, Table};
use crate::qcow2::tables::state::{NotReady, State, set_refcounts_in_slice};
use crate::qcow2::{Qcow2, repair_hint};

/// Most clusters and most entries that are tracked. An intact journal has fewer: no more changed tables fit
/// into memory.
const NOTED_MAX: usize = 1 << 20;

impl Qcow2 {
    /// Applies the journal that a killed process left, and begins a new one if there are `journals`.
    /// `overlay` is the overlay that a block commit commits into this image. Unless the device is `in_use`, frees
    /// leaked clusters if the journal is lost. Fails with [`blkq::ErrorKind::Unsupported`] if the image has a journal
    /// and is opened for writing without `journals`.
    pub(in crate::qcow2) fn begin_journal(
        mut self,
        journals: Option<&Journals>,
        overlay: Option<(u64, u64)>,
        in_use: bool,
    ) -> Result<Qcow2, Error> {
        let (identity, tag, shown) = (self.file().identity, self.tag(), self.path().display().to_string());
        let word = shell_word(self.path());
        if journals.is_none() && self.writable && tag != 0 {
            return Err(unsupported(format!(
                "{shown} was not closed, and its journal may contain writes that the image lacks; open it with \
                 the directory of the journal, or read-only"
            )));
        }
        // A header of version 2 has no autoclear features, and so no place for the tag.
        let has_tags = locked(&self.shared.state).top.header.version >= 3;
        if journals.is_some() && !has_tags && self.writable {
            self.warnings.push(format!(
                "writes that are not flushed are lost if this process is killed, because {shown} is of version 2; \
                 to convert the image, run `qemu-img amend -o compat=1.1 {word}`"
            ));
        }
        let journals = journals.filter(|_| has_tags);
        let tagged = journals.filter(|_| tag != 0);
        let found = tagged.map(|all| journal::find(all, self.file())).transpose()?.flatten();
        let mut leaked = BTreeSet::new();
        let left = found.as_ref().map_or(Left::Nothing, |journal| journal.left(tag));
        let is_lost = tag != 0 && !matches!(left, Left::Records(_));
        match left {
            Left::Nothing if tag != 0 => {
                let place =
                    journals.map(|all| format!(" in {}", all.directory().display())).unwrap_or_default();
                self.warnings.push(format!(
                    "{shown} was not closed, and its journal does not exist{place}; writes that were not \
                     flushed when the daemon was killed, or the machine stopped, are lost"
                ));
            }
            Left::Nothing => {
                self.warnings.extend(journals.and_then(|all| journal::find_ignored(all, self.file())))
            }
            Left::Records(records) if records.is_empty() => {}
            _ if !self.writable => return Err(journal::lacking(self.path())),
            Left::Records(records) => {
                let path = found.as_ref().map(|file| file.path.display().to_string()).unwrap_or_default();
                let done = self.shared.run("apply the journal", async move |env| replay(env, records).await);
                leaked = done.map_err(|error| {
                    // Drops the driver without writing its tables: the image would get a part of the changes.
                    self.superseded.store(true, Relaxed);
                    let message =
                        format!("{error}; to continue without the writes in its journal, delete {path}");
                    Error::new(error.kind(), message)
                })?;
                self.flush_all_metadata()?;
            }
            Left::Incomplete => self.warnings.push(format!(
                "the journal of {shown} is damaged; writes that were not flushed when the daemon was killed \
                 may be lost"
            )),
        }
        if !self.writable {
            return Ok(self);
        }
        // The image has no journal meanwhile, so if this process is killed, the next one searches again.
        if is_lost {
            let freed = if in_use { Err(unsupported("its clients wait")) } else { self.free_leaked() };
            match freed {
                Ok(0) => {}
                Ok(freed) => self
                    .warnings
                    .push(format!("{shown} was not closed; {freed} clusters that leaked were freed")),
                Err(error) if error.kind() == ErrorKind::Mismatch => {
                    return Err(malformed(format!("{shown} was not closed, and {error}"))
                        .with_hint(repair_hint(self.path()))
                        .or_read_only());
                }
                Err(error) => self.warnings.push(format!(
                    "{shown} was not closed, and clusters that leaked stay allocated: {error}; to find them, \
                     detach the image and run `qemu-img check {word}`"
                )),
            }
        }
        let journal = match (found, journals) {
            (None, Some(all)) => Journal::open(all, identity, true).map(Some),
            (found, _) => Ok(found),
        };
        let journal = journal.unwrap_or_else(|error| {
            self.warnings.push(format!(
                "writes that are not flushed are lost if this process is killed, because there is no \
                 journal: {error}"
            ));
            None
        });
        match &journal {
            Some(journal) => journal.set_birth(self.file().birth()),
            None => self.set_tag(0)?,
        }
        locked(&self.shared.state).journal = journal;
        self.empty_journal(overlay)?;
        // The overlay reads this image by the tables from before, so its clusters must not be reused.
        if overlay.is_none() {
            // The next flush of the metadata frees the leaked clusters. This must follow `empty_journal`: replaying the
            // old journal again would decrement the refcounts twice.
            let mut state = locked(&self.shared.state);
            // A damaged journal could name any cluster.
            let tables = state.tables_among(leaked.iter().copied());
            let leaked: Vec<u64> = leaked.into_iter().filter(|host| !tables.contains(host)).collect();
            state.note_released(&leaked);
            state.writer.released.extend(leaked);
        }
        Ok(self)
    }

    pub(in crate::qcow2) fn end_journal(&self) {
        let journal = locked(&self.shared.state).journal.take();
        // The tag is removed first. Without it the journal is ignored, even if the process is killed here.
        if let Some(journal) = journal.filter(|_| self.set_tag(0).is_ok()) {
            journal.remove();
        }
    }

    /// Must be called when the file has all changes. `overlay` is the overlay that is committed into this
    /// image.
    pub(in crate::qcow2) fn empty_journal(&self, overlay: Option<(u64, u64)>) -> Result<(), Error> {
        let tag = self.tag();
        let next = locked(&self.shared.state).journal.as_mut().map(|journal| journal.begin(tag, overlay));
        let Some(next) = next else { return Ok(()) };
        self.set_tag(next)?;
        if let Some(journal) = &mut locked(&self.shared.state).journal {
            journal.began();
        }
        Ok(())
    }

    pub(in crate::qcow2) fn tag(&self) -> u32 {
        locked(&self.shared.state).top.header.tag
    }

    /// Changes the tag in the header, without a sync. A power loss may undo this, but it destroys the journal
    /// too. The next flush of the metadata makes a new tag durable.
    pub(in crate::qcow2) fn set_tag(&self, tag: u32) -> Result<(), Error> {
        if self.tag() == tag {
            return Ok(());
        }
        self.shared.run("change its header", async move |env| {
            allocate::write_header(env, TAG_AT, &tag.to_be_bytes()).await
        })?;
        let mut state = locked(&self.shared.state);
        // The old tag may not be durable either.
        state.writer.tag_is_new = true;
        state.top.header.tag = tag;
        Ok(())
    }
}

/// Applies the records, in order. The image has no journal meanwhile, so if this process is killed, the image
/// has a part of the changes, as after a power loss. Returns the offsets of the clusters that the killed
/// process leaked. Fails with [`Status::Io`] for a record that does not fit the image.
async fn replay(env: &Env, records: Vec<Record>) -> Result<BTreeSet<u64>, Status> {
    let mut leaks = Leaks::new(env.state().cluster_bits());
    for record in records {
        leaks.note(record);
        match record {
            Record::Released { .. } => {}
            Record::RefcountTable { index, entry } => {
                env.state().set_refcount_block(index as usize, entry)?;
            }
            Record::L1 { index, entry } => {
                let mut state = env.state();
                // An index beyond the table belongs to a resize that the killed process did not finish.
                if let Some(old) = state.top.l1.get(index as usize).copied() {
                    leaks.note_l1(index, old, entry);
                    state.set_l1(index as usize, entry)?;
                }
            }
            Record::Refcounts { first, count, .. } | Record::Allocated { first, count } => {
                let refcount = if let Record::Refcounts { refcount, .. } = record { refcount } else { 1 };
                let mut left = first..first + count;
                while !left.is_empty() {
                    let set = |state: &mut State| set_refcounts_in_slice(state, left.clone(), refcount);
                    left.start += apply(env, set).await?;
                }
            }
            Record::L2 { offset, entry, count } => {
                let bits = env.state().cluster_bits();
                for (number, offset) in (0..count).zip((offset..).step_by(8)) {
                    let entry = entry.wrapping_add(number << bits);
                    let old = apply(env, |state| set_entry(state, offset, entry)).await?;
                    leaks.note_entry(offset, old, entry);
                }
            }
        }
    }
    Ok(leaks.find())
}

fn set_entry(state: &mut State, offset: u64, entry: u64) -> Result<u64, NotReady> {
    let slice_bytes = state.cache.slice_bytes() as u64;
    state.check_target(offset..offset + 8)?;
    let key = Key { layer: 0, offset: offset - offset % slice_bytes };
    let slot = state.cache.find(key).ok_or(NotReady::Slice(key, Table::L2))?;
    let index = (offset % slice_bytes / 8) as usize;
    let old = state.cache.entry(slot, index);
    state.set_entries(slot, index, entry, 1);
    Ok(old)
}

async fn apply<T>(env: &Env, mut change: impl FnMut(&mut State) -> Result<T, NotReady>) -> Result<T, Status> {
    // A record for a new refcount block precedes those for refcounts in it. A missing block means a damaged
    // journal.
    let damaged = |reason| match reason {
        NotReady::RefcountBlock(_) => NotReady::Failed(Status::Io),
        reason => reason,
    };
    until_ready(env, |state| change(state).map_err(damaged)).await
}

/// Finds the clusters that a killed process leaked: it had allocated them for writes that did not complete, or had released
/// them without decrementing their refcounts. Tracks clusters, by number, while the records of a journal are applied.
#[derive(Default)]
struct Leaks {
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
    fn new(cluster_bits: u32) -> Leaks {
        Leaks { cluster_bits, ..Leaks::default() }
    }

    /// Must be called in the order of the journal.
    fn note(&mut self, record: Record) {
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

    fn note_entry(&mut self, offset: u64, old: u64, new: u64) {
        self.is_damaged |= self.entries.len() > NOTED_MAX;
        if !self.is_damaged {
            self.entries.entry(offset).or_insert((old, new)).1 = new;
        }
    }

    fn note_l1(&mut self, index: u64, old: u64, new: u64) {
        self.l1.entry(index).or_insert((old, new)).1 = new;
    }

    /// The offsets of the leaked clusters, whose refcounts are by one too high.
    fn find(self) -> BTreeSet<u64> {
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

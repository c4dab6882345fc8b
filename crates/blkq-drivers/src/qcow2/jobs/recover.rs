//! Recovery: applies the journal that a killed process left for an image, or frees leaked clusters if the journal is
//! lost, and begins a new one.

use std::collections::BTreeSet;

use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::lock as locked;
use blkq::text::shell_word;
use blkq::{Error, ErrorKind};

use crate::errors::{malformed, unsupported};
use crate::qcow2::format::header::TAG_AT;
use crate::qcow2::io::allocate;
use crate::qcow2::journal::{self, Journal, Journals, Left};
use crate::qcow2::{Qcow2, repair_hint};

use super::replay::replay;

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
        let (identity, tag) = (self.identity(), self.tag());
        if journals.is_none() && self.writable && tag != 0 {
            return Err(unsupported(format!(
                "{} was not closed, and its journal may contain writes that the image lacks; open it with \
                 the directory of the journal, or read-only",
                self.path().display()
            )));
        }
        // A header of version 2 has no autoclear features, and so no place for the tag.
        let able = journals.filter(|_| locked(&self.shared.state).top.header.version >= 3);
        if journals.is_some() && able.is_none() && self.writable {
            self.warnings.push(journal::none_in_version_2(self.path()));
        }
        let journals = able;
        let found = match journals {
            Some(all) if tag != 0 => journal::find(all, self.file())?,
            _ => None,
        };
        let mut leaked = BTreeSet::new();
        let left = found.as_ref().map_or(Left::Nothing, |journal| journal.left(tag));
        let is_lost = tag != 0 && !matches!(left, Left::Records(_));
        match left {
            Left::Nothing if tag != 0 => {
                let place =
                    journals.map(|all| format!(" in {}", all.directory().display())).unwrap_or_default();
                self.warnings.push(format!(
                    "{} was not closed, and its journal does not exist{place}; writes that were not \
                     flushed when the daemon was killed, or the machine stopped, are lost",
                    self.path().display()
                ));
            }
            Left::Nothing => {
                let ignored = journals.and_then(|all| journal::find_ignored(all, self.file()));
                self.warnings.extend(ignored);
            }
            Left::Records(records) if records.is_empty() => {}
            _ if !self.writable => return Err(journal::lacking(self.path())),
            Left::Records(records) => {
                let path =
                    found.as_ref().map(|journal| journal.path().display().to_string()).unwrap_or_default();
                let replayed =
                    self.shared.run("apply the journal", async move |env| replay(&env, records).await);
                leaked = replayed.map_err(|error| {
                    // Drops the driver without writing its tables: the image would get a part of the changes.
                    self.superseded.store(true, Relaxed);
                    let message =
                        format!("{error}; to continue without the writes in its journal, delete {path}");
                    Error::new(error.kind(), message)
                })?;
                self.flush_all_metadata()?;
            }
            Left::Incomplete => self.warnings.push(format!(
                "the journal of {} is damaged; writes that were not flushed when the daemon was killed \
                 may be lost",
                self.path().display()
            )),
        }
        if !self.writable {
            return Ok(self);
        }
        // The image has no journal meanwhile, so if this process is killed, the next one searches again.
        if is_lost {
            let (shown, word) = (self.path().display(), shell_word(self.path()));
            let freed = if in_use { Err(unsupported("its clients wait")) } else { self.free_leaked() };
            let warning = match freed {
                Ok(0) => None,
                Ok(freed) => Some(format!("{shown} was not closed; {freed} clusters that leaked were freed")),
                Err(error) if error.kind() == ErrorKind::Mismatch => {
                    return Err(malformed(format!(
                        "{shown} was not closed, and {error}; {}",
                        repair_hint(self.path())
                    )));
                }
                Err(error) => Some(format!(
                    "{shown} was not closed, and clusters that leaked stay allocated: {error}; to find them, \
                     detach the image and run `qemu-img check {word}`"
                )),
            };
            self.warnings.extend(warning);
        }
        let journal = match found {
            None => journals.map(|all| Journal::find_or_make(all, identity)).transpose(),
            found => Ok(found),
        };
        if let Err(error) = &journal {
            self.warnings.push(format!(
                "writes that are not flushed are lost if this process is killed, because there is no \
                 journal: {error}"
            ));
        }
        let journal = journal.unwrap_or_default();
        match &journal {
            Some(journal) => journal.set_birth(self.file().birth()),
            None => self.set_tag(0)?,
        }
        locked(&self.shared.state).journal = journal;
        self.empty_journal(overlay)?;
        // The overlay reads this image by the tables from before, so its clusters must not be reused.
        if overlay.is_none() {
            // This must follow `empty_journal`: replaying the old journal again would decrement the refcounts
            // twice.
            self.release_leaked(leaked);
        }
        Ok(self)
    }

    /// Releases the clusters that a killed process leaked. The next flush of the metadata frees them.
    fn release_leaked(&self, mut leaked: BTreeSet<u64>) {
        let mut state = locked(&self.shared.state);
        // A damaged journal could name any cluster.
        let tables = state.tables_among(leaked.iter().copied());
        leaked.retain(|host| !tables.contains(host));
        let leaked: Vec<u64> = leaked.into_iter().collect();
        state.note_released(&leaked);
        state.writer.released.extend(leaked);
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
        let old = self.tag();
        if old == tag {
            return Ok(());
        }
        self.shared.run("change its header", async move |env| {
            allocate::write_header(&env, TAG_AT, &tag.to_be_bytes()).await
        })?;
        let mut state = locked(&self.shared.state);
        // The old tag may not be durable either.
        state.writer.tag_is_new = true;
        state.top.header.tag = tag;
        Ok(())
    }
}

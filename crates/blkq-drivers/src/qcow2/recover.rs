//! The journal of an image that is open: what a process that was killed left is applied, and another is begun.

use std::collections::BTreeSet;
use std::sync::Arc;

use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::{Mutex, lock as locked};
use blkq::{Error, ErrorKind};

use crate::r#loop::backing;

use super::header::TAG_AT;
use super::journal::{self, Journal, Journals, Left, Record};
use super::{Qcow2, allocate, replay};

impl Qcow2 {
    /// Applies the journal that a killed process left, and begins another if there are `journals`. The image gets the
    /// data of the image `front`, if there is one, until it has a queue.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for an image that has the tag of a journal and is open for writing without
    /// `journals`; those of the files.
    pub(super) fn begin_journal(
        mut self,
        journals: Option<&Journals>,
        front: Option<(u64, u64)>,
    ) -> Result<Qcow2, Error> {
        let (identity, tag) = (self.identity, self.tag());
        if journals.is_none() && self.writable && tag != 0 {
            let message = format!(
                "{} was not closed, and the journal of its process may contain writes that it lacks; open it once with \
                 the directory of that journal, or read-only",
                self.path.display()
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        // A header of version 2 has no place for the tag.
        let able = journals.filter(|_| self.version >= 3);
        if journals.is_some() && able.is_none() && self.writable {
            self.warnings.push(journal::none_in_version_2(&self.path));
        }
        let journals = able;
        let found = journals.filter(|_| tag != 0).map(|all| journal::find(all, &self.path, identity));
        let found = found.transpose()?.flatten();
        let mut leaked = BTreeSet::new();
        match found.as_ref().map_or(Left::Nothing, |journal| journal.left(tag)) {
            Left::Nothing if tag != 0 => {
                let place = journals.map(|all| format!(" in {}", all.directory().display())).unwrap_or_default();
                self.warnings.push(format!(
                    "{} was not closed, and its journal is not there{place}: what was not flushed when its process was \
                     killed, or the machine stopped, is lost",
                    self.path.display()
                ));
            }
            Left::Nothing => {
                let file = (identity, self.birth());
                let ignored = journals.and_then(|all| journal::find_ignored(all, &self.path, file));
                self.warnings.extend(ignored);
            }
            Left::Records(records) if records.is_empty() => {}
            _ if !self.writable => return Err(journal::lacking(&self.path)),
            Left::Records(records) => {
                let path = found.as_ref().map(|journal| journal.path().display().to_string()).unwrap_or_default();
                leaked = self.replay(records).map_err(|error| {
                    // The image stays as it is: a part of the changes would be written with the tables.
                    self.superseded.store(true, Relaxed);
                    let message = format!("{error}; to go on without the writes in its journal, remove {path}");
                    Error::new(error.kind(), message)
                })?;
                self.write_back()?;
            }
            Left::Incomplete => self.warnings.push(format!(
                "the journal of {} is damaged: writes may be lost that were not flushed when its process was killed",
                self.path.display()
            )),
        }
        if !self.writable {
            return Ok(self);
        }
        let journal = match found {
            None => journals.map(|all| Journal::find_or_make(all, identity)).transpose(),
            found => Ok(found),
        };
        if let Err(error) = &journal {
            self.warnings.push(format!("what is not flushed is lost if this process is killed: {error}"));
        }
        let journal = journal.unwrap_or_default();
        match &journal {
            Some(journal) => journal.set_birth(self.birth()),
            None => self.set_tag(0)?,
        }
        locked(&self.shared.state).journal = journal;
        self.empty_journal(front)?;
        // The image `front` reads this one by the tables that it had before.
        if front.is_none() {
            // Not before: the old journal would have them counted down again.
            self.release_leaked(leaked);
        }
        Ok(self)
    }

    fn birth(&self) -> u64 {
        self.files.first().map_or(0, |file| backing::birth(file))
    }

    /// Makes the changes of a journal in memory. Returns the clusters that the killed process leaked.
    fn replay(&self, records: Vec<Record>) -> Result<BTreeSet<u64>, Error> {
        let leaked = Arc::new(Mutex::new(BTreeSet::new()));
        let found = Arc::clone(&leaked);
        self.run("apply the journal", async move |env| {
            let leaked = replay::replay(&env, records).await?;
            *locked(&found) = leaked;
            Ok(())
        })?;
        Ok(std::mem::take(&mut *locked(&leaked)))
    }

    /// Has the next flush of the tables free clusters that a killed process leaked.
    fn release_leaked(&self, mut leaked: BTreeSet<u64>) {
        let mut state = locked(&self.shared.state);
        // A damaged journal could name any cluster.
        let tables = state.tables_among(leaked.iter().copied());
        leaked.retain(|host| !tables.contains(host));
        let leaked: Vec<u64> = leaked.into_iter().collect();
        state.note_released(&leaked);
        state.writer.released.extend(leaked);
    }

    /// Ends the journal of an image whose file has all.
    pub(super) fn end_journal(&self) {
        let journal = locked(&self.shared.state).journal.take();
        // Without a tag in the image it has no meaning any more.
        if let Some(journal) = journal.filter(|_| self.set_tag(0).is_ok()) {
            journal.remove();
        }
    }

    /// Empties the journal, if there is one, as the file has all of it. The image gets the data of the image `front`,
    /// if there is one.
    pub(super) fn empty_journal(&self, front: Option<(u64, u64)>) -> Result<(), Error> {
        let tag = self.tag();
        let next = locked(&self.shared.state).journal.as_mut().map(|journal| journal.begin(tag, front));
        let Some(next) = next else { return Ok(()) };
        self.set_tag(next)?;
        if let Some(journal) = &mut locked(&self.shared.state).journal {
            journal.began();
        }
        Ok(())
    }

    /// The tag of its journal that the image has; 0 for none.
    pub(super) fn tag(&self) -> u32 {
        locked(&self.shared.state).top().map_or(0, |tables| tables.header.tag)
    }

    /// Sets the tag in the image. A power loss may undo it.
    pub(super) fn set_tag(&self, tag: u32) -> Result<(), Error> {
        if self.tag() == tag {
            return Ok(());
        }
        self.run("change its header", async move |env| {
            allocate::write_header(&env, TAG_AT, &tag.to_be_bytes()).await
        })?;
        if let Ok(tables) = locked(&self.shared.state).top_mut() {
            tables.header.tag = tag;
        }
        Ok(())
    }
}

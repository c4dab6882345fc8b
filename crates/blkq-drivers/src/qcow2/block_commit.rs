//! A block commit: what an image has goes to the one behind it, while it is served; then that one is served in its
//! place.
//!
//! The image behind is written only where the tables of the image itself, as they are in its file, have data or
//! zeroes of its own. With another image behind it an entry of them never becomes unallocated again. So the two read
//! as the device does wherever this is interrupted, and nothing that the copies get wrong is seen: what clients write
//! meanwhile is noted ([`Changes`](super::changes::Changes)) and copied again, the last of it while the disk is
//! frozen.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::lock as locked;
use blkq::{Driver, Error, ErrorKind};
use rustix::fs::{OFlags, fcntl_getfl};

use crate::r#loop::backing;
use crate::r#loop::lock::{self, LockKind};

use super::Qcow2;
use super::block_commit_base::{BaseFiles, Target};
use super::chain::LOCKED;
use super::changes::Map;
use super::commit::commit;
use super::journal::Journals;
use super::over::path_of;
use super::own::Piece;
use super::slices::Slices;

/// Most parts of the device that are found before the device is flushed and they are copied.
const BATCH_MAX: usize = 16384;
/// Most bytes of the device that are looked up before it is asked again whether to go on.
const LOOKUP_MAX_BYTES: u64 = 1 << 30;
/// How often it is asked whether to go on, while a sync takes long.
const ASK_INTERVAL: Duration = Duration::from_millis(50);

/// The image behind the one that is served.
#[derive(Debug)]
pub struct BaseImage {
    /// Absolute, without symbolic links.
    pub path: PathBuf,
    /// Whether it is a qcow2 image; else it is raw.
    pub qcow2: bool,
}

/// An image that can be committed into the one behind it.
pub struct CommitSource {
    top: Arc<Qcow2>,
    base: BaseImage,
}

impl CommitSource {
    /// The image of `top`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if there is none behind it, or that cannot take what the other has.
    pub(crate) fn new(top: Arc<Qcow2>) -> Result<CommitSource, Error> {
        let path = path_of(top.check_committable()?, &top.behind[0])?;
        let qcow2 = locked(&top.shared.state).layers[1].tables.is_some();
        Ok(CommitSource { top, base: BaseImage { path, qcow2 } })
    }

    /// The image behind it.
    pub fn base(&self) -> &BaseImage {
        &self.base
    }

    /// Begins with the image, and the one behind it as [`open_base`](super::open_base) has opened it: nobody
    /// else may use that. It is made longer if it is shorter than the device. Its own dirty bitmaps are marked as in
    /// use: those of the device take their place. If it is a qcow2 image it has one of `journals`.
    ///
    /// # Errors
    /// As [`Image::commit_source`](crate::Image::commit_source); [`ErrorKind::Busy`] if somebody else uses the image
    /// behind, [`ErrorKind::Mismatch`] if it is longer than the device; those of the files.
    pub fn begin(self, files: BaseFiles, journals: Option<&Journals>) -> Result<BlockCommit, Error> {
        let device = self.top;
        let size = device.limits().size_bytes();
        // Before the lock: a failure after it would have to restore the lock of the chain.
        let cannot = |e| Error::system("cannot duplicate a descriptor of the backing file", e);
        let base = files.image.try_clone().map_err(cannot)?;
        let synced = files.synced.try_clone().map_err(cannot)?;
        let path = device.lock_base(&files)?;
        let target =
            device.open_target(files, path, journals).map_err(|error| device.after_unlock(&base, error))?;
        device.shared.changes.track(size);
        Ok(BlockCommit {
            top: device,
            target: Some(target),
            base,
            synced,
            slices: Slices::default(),
            pass: Map::full(size),
            position: 0,
            found: VecDeque::new(),
            copied_bytes: 0,
            data_bytes: 0,
            total_bytes: 0,
        })
    }
}

/// A block commit that is under way. It stops ([`BlockCommit::stop`]) if this is dropped.
pub struct BlockCommit {
    top: Arc<Qcow2>,
    /// `None` once it is served.
    target: Option<Target>,
    /// The image behind once more, for its lock.
    base: File,
    /// The open file description that the syncs of a raw target use, too.
    synced: File,
    slices: Slices,
    /// The parts of the device that are to be copied in this pass, of which those before `position` were found.
    pass: Map,
    position: u64,
    /// Parts that were found, whose entries are durable once the device was flushed.
    found: VecDeque<Range<u64>>,
    copied_bytes: u64,
    /// Of these, bytes that were not zeroes of the tables.
    data_bytes: u64,
    total_bytes: u64,
}

impl BlockCommit {
    /// Counts the bytes of this pass, for [`BlockCommit::progress`]. `stop` is asked again and again whether to go on.
    ///
    /// # Errors
    /// That of reading the tables, and that of `stop`.
    pub fn count<E: From<Error>>(&mut self, stop: &dyn Fn() -> Result<(), E>) -> Result<(), E> {
        let mut bytes = 0;
        while let Some(range) = self.next_own(stop)? {
            bytes += range.end - range.start;
        }
        self.position = 0;
        self.total_bytes = self.copied_bytes + bytes;
        Ok(())
    }

    /// The driver that is to take the other's place.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] once it has.
    pub fn driver(&self) -> Result<&dyn Driver, Error> {
        self.target().map(Target::driver)
    }

    /// Bytes that were copied, and those of all passes so far.
    pub fn progress(&self) -> (u64, u64) {
        (self.copied_bytes, self.total_bytes.max(self.copied_bytes))
    }

    /// Bytes of data that were copied: zeroes, which take no time, are none.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Makes what was copied durable, and begins another pass, over what was written to meanwhile.
    ///
    /// # Errors
    /// That of the image behind, and as [`BlockCommit::count`].
    pub fn next_pass<E: From<Error>>(&mut self, stop: &dyn Fn() -> Result<(), E>) -> Result<(), E> {
        self.write_out(stop)?;
        self.target()?.sync()?;
        self.take_changes()?;
        self.count(stop)
    }

    /// Writes the copied data from the page cache to the backing file, so that the sync which follows takes no time.
    /// If `stop` fails, the thread that syncs is not waited for.
    ///
    /// # Errors
    /// The error of the sync, and that of `stop`.
    fn write_out<E: From<Error>>(&self, stop: &dyn Fn() -> Result<(), E>) -> Result<(), E> {
        let cannot = |e| Error::system("cannot sync the backing file", e);
        let file = self.synced.try_clone().map_err(cannot)?;
        let (sender, synced) = channel();
        let sync = move || _ = sender.send(backing::sync(&file));
        thread::Builder::new().name("blkq-sync".to_owned()).spawn(sync).map_err(cannot)?;
        loop {
            match synced.recv_timeout(ASK_INTERVAL) {
                // The kernel reports a write-back error once to each open file description. The descriptors of a raw
                // target share theirs with `file`, so that the target's own sync would not report the error again.
                Ok(result) => return Ok(result.map_err(cannot)?),
                Err(RecvTimeoutError::Timeout) => stop()?,
                Err(RecvTimeoutError::Disconnected) => {
                    let message = "the thread that syncs the backing file has panicked";
                    return Err(Error::new(ErrorKind::System, message).into());
                }
            }
        }
    }

    /// Finds parts that are to be copied in this pass, and has `flush` make the device durable, with it that these
    /// parts are the image's own. Returns whether there are some. `stop` is asked again and again whether to go on.
    ///
    /// # Errors
    /// That of reading the tables, and those of `stop` and `flush`.
    pub fn find<E: From<Error>>(
        &mut self,
        stop: &dyn Fn() -> Result<(), E>,
        flush: impl FnOnce() -> Result<(), E>,
    ) -> Result<bool, E> {
        while self.found.len() < BATCH_MAX {
            let Some(range) = self.next_own(stop)? else { break };
            self.found.push_back(range);
        }
        if self.found.is_empty() {
            return Ok(false);
        }
        flush().map(|()| true)
    }

    /// Copies the next piece of what was found, 1 MiB at most. Returns whether there was one.
    ///
    /// # Errors
    /// That of one of the two images.
    pub fn copy(&mut self) -> Result<bool, Error> {
        let Some(range) = self.found.front().cloned() else { return Ok(false) };
        let device = &*self.top;
        let piece = device.read_piece(&mut self.slices, &range).map_err(|e| cannot_read(device, e))?;
        let bytes = piece.bytes();
        match piece {
            Piece::Data(data) => {
                self.target()?.write(range.start, data)?;
                self.data_bytes += bytes;
            }
            Piece::Zeroes(_) => self.target()?.zero(range.start..range.start + bytes)?,
            Piece::Behind(_) => {}
        }
        self.copied_bytes += bytes;
        match range.start + bytes {
            end if end < range.end => self.found[0].start = end,
            _ => drop(self.found.pop_front()),
        }
        Ok(true)
    }

    /// Copies the rest, as long as `go_on` says so, which is asked before each piece. The disk must be frozen, and
    /// may go on afterwards. Returns whether that was all of it.
    ///
    /// # Errors
    /// Those of the files, and that of `go_on`.
    pub fn catch_up<E: From<Error>>(&mut self, go_on: &dyn Fn() -> Result<bool, E>) -> Result<bool, E> {
        let device = &*self.top;
        device.run("make the data durable", async |env| commit(&env, true).await)?;
        device.write_back()?;
        if !self.copy_all(go_on)? {
            return Ok(false);
        }
        self.take_changes()?;
        if !self.copy_all(go_on)? {
            return Ok(false);
        }
        self.target()?.sync()?;
        Ok(true)
    }

    /// Copies the rest, makes it durable, and empties the image, in its file: then the two images read the same for
    /// good, whatever is written to the one behind. Its disk must be frozen. `keep` is called last, to record that
    /// the image behind is to be served.
    ///
    /// # Errors
    /// Those of the files, and that of `keep`; the device goes on in its image then, as if nothing had happened.
    pub fn finish<E: From<Error>>(&mut self, keep: impl FnOnce() -> Result<(), E>) -> Result<Target, E> {
        self.catch_up(&|| Ok::<_, E>(true))?;
        let device = &*self.top;
        // The file has all of it, and none of it may be applied to an image that was emptied.
        device.empty_journal(None)?;
        let emptied = device.empty().map_err(E::from).and_then(|()| keep());
        // Before the disk goes on.
        emptied.inspect_err(|_| device.refill())?;
        if let Some(journal) = locked(&device.shared.state).journal.take() {
            journal.remove();
        }
        device.shared.changes.stop();
        device.superseded.store(true, Relaxed);
        let invalid = || Error::new(ErrorKind::Invalid, "the image behind is served already");
        let target = self.target.take().ok_or_else(invalid)?;
        match &target {
            Target::Raw(_) => {
                let size = device.limits().size_bytes();
                lock::release(&self.base, &(size..LOCKED.end));
            }
            Target::Qcow2(qcow2) => qcow2.shared.release_held(),
        }
        Ok(target)
    }

    /// Frees the space of an image that was emptied, and its lock, when no queue uses it any more. Where that fails it
    /// has clusters that nothing refers to. Does nothing before [`BlockCommit::finish`].
    pub fn free(&self) {
        let top = &self.top;
        if !top.superseded.load(Relaxed) {
            return;
        }
        // First: they are among what nothing refers to then.
        let _ = top.image().remove_bitmaps().and_then(|()| top.free_unreferenced());
        // Its journal was removed.
        let _ = top.set_tag(0);
        lock::release(&top.files[0], &LOCKED);
    }

    /// Stops it: the device goes on in its image, and what the one behind has by now is hidden by that. Does nothing
    /// once that is served.
    ///
    /// # Errors
    /// If the image behind cannot be locked for readers again.
    pub fn stop(&mut self) -> Result<(), Error> {
        let Some(target) = self.target.take() else { return Ok(()) };
        let device = &*self.top;
        device.shared.changes.stop();
        target.close();
        device.unlock_base(&self.base)
    }

    fn copy_all<E: From<Error>>(&mut self, go_on: &dyn Fn() -> Result<bool, E>) -> Result<bool, E> {
        while self.find(&|| Ok::<_, Error>(()), || Ok(()))? {
            while go_on()? {
                if !self.copy()? {
                    break;
                }
            }
            if !self.found.is_empty() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn take_changes(&mut self) -> Result<(), Error> {
        self.pass = self.top.shared.changes.take();
        self.position = 0;
        Ok(())
    }

    /// The next part of this pass that the image itself has.
    fn next_own<E: From<Error>>(
        &mut self,
        stop: &dyn Fn() -> Result<(), E>,
    ) -> Result<Option<Range<u64>>, E> {
        let device = &*self.top;
        while let Some(range) = self.pass.next(self.position) {
            stop()?;
            let end = range.end.min(range.start + LOOKUP_MAX_BYTES);
            let own =
                device.next_own(&mut self.slices, range.start..end).map_err(|e| cannot_read(device, e))?;
            self.position = own.as_ref().map_or(end, |own| own.end);
            if own.is_some() {
                return Ok(own);
            }
        }
        Ok(None)
    }

    fn target(&self) -> Result<&Target, Error> {
        let invalid = || Error::new(ErrorKind::Invalid, "the image behind is served already");
        self.target.as_ref().ok_or_else(invalid)
    }
}

impl Drop for BlockCommit {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}

fn cannot_read(device: &Qcow2, error: std::io::Error) -> Error {
    Error::system(format!("cannot read {}", device.path.display()), error)
}

impl Qcow2 {
    /// The file of the image behind, if a block commit can be.
    fn check_committable(&self) -> Result<&Arc<File>, Error> {
        let (snapshots, has_base) = {
            let state = locked(&self.shared.state);
            (state.top().map_or(0, |tables| tables.header.snapshots), state.layers.len() > 1)
        };
        let refused = [
            (!has_base, "it has no backing file"),
            (!self.writable || self.read_only.load(Relaxed), "it is read-only"),
            (snapshots > 0, "it has internal snapshots, which the one behind would not have"),
        ];
        if let Some((_, why)) = refused.iter().find(|(is, _)| *is) {
            let message = format!("{} cannot be committed: {why}", self.path.display());
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        Ok(&self.files[1])
    }

    /// Makes the lock on the image behind one for writing, of `base`. Returns its path.
    fn lock_base(&self, BaseFiles { image: base, synced, .. }: &BaseFiles) -> Result<PathBuf, Error> {
        let file = self.check_committable()?;
        let path = path_of(file, &self.behind[0])?;
        let identity = |file: &File| file.metadata().ok().map(|data| (data.dev(), data.ino()));
        let is_same = |opened: &File, access: OFlags| {
            let flags = fcntl_getfl(opened);
            identity(opened).is_some_and(|mine| Some(mine) == identity(file))
                && flags.is_ok_and(|flags| flags & (OFlags::RWMODE | OFlags::APPEND | OFlags::PATH) == access)
        };
        if !is_same(base, OFlags::RDWR) || !is_same(synced, OFlags::RDONLY) {
            let message = format!("what was opened is not {}, or not as it is to be", path.display());
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        // One after the other, so that it is locked against writers all the time.
        lock::acquire(base, &path, &LOCKED, LockKind::Shared, false)?;
        lock::release(file, &LOCKED);
        if let Err(error) = lock::acquire(base, &path, &LOCKED, LockKind::Exclusive, false) {
            return Err(self.after_unlock(base, error));
        }
        Ok(path)
    }

    /// Makes the lock of `base` one for reading again, of this chain.
    ///
    /// # Errors
    /// That of the lock: at worst others are kept from reading it until it is closed, or may write to it from then on.
    fn unlock_base(&self, base: &File) -> Result<(), Error> {
        lock::downgrade(base, &LOCKED);
        lock::acquire(&self.files[1], &self.behind[0], &LOCKED, LockKind::Shared, false).map(drop)
    }

    /// As [`Qcow2::unlock_base`], after `error`.
    fn after_unlock(&self, base: &File, error: Error) -> Error {
        match self.unlock_base(base) {
            Ok(()) => error,
            Err(other) => Error::new(error.kind(), format!("{error}; {other}")),
        }
    }
}

#[cfg(all(test, not(model_check)))]
impl BlockCommit {
    /// Commits of the qcow2 image behind that began.
    pub(super) fn commits_behind(&self) -> u64 {
        match &self.target {
            Some(Target::Qcow2(qcow2)) => locked(&qcow2.shared.state).commits,
            _ => 0,
        }
    }
}

//! A block commit: what an image has goes to the one behind it, while it is served; then that one is served in its
//! place.
//!
//! The image behind is written only where the tables of the image itself, as they are in its file, have data or zeroes
//! of its own. With another image behind it an entry of them never becomes unallocated again. So the two read as the
//! device does wherever this is interrupted, and nothing that the copies get wrong is seen: what clients write meanwhile
//! is noted ([`Changes`](super::changes::Changes)) and copied again, the last of it while the disk is frozen.

use std::any::Any;
use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl};

use crate::buffer::IoBuffer;
use crate::driver::Driver;
use crate::drivers::r#loop::backing::{self, Backing};
use crate::drivers::r#loop::base::{DeviceTerms, check_not_longer};
use crate::drivers::r#loop::lock::{self, LockKind};
use crate::drivers::r#loop::{LoopDevice, claim};
use crate::error::{Error, ErrorKind};
use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::lock as locked;

use super::Qcow2;
use super::blocking::write_data;
use super::chain::LOCKED;
use super::changes::Map;
use super::commit::commit;
use super::journal::Journals;
use super::over::path_of;
use super::own::Piece;
use super::slices::Slices;
use super::zero::{Wanted, clear};

/// Most parts of the device that are found before the device is flushed and they are copied.
const BATCH_MAX: usize = 16384;
/// Most bytes of the device that are looked up before it is asked again whether to go on.
const LOOKUP_MAX_BYTES: u64 = 1 << 30;

/// The image behind the one that is served.
#[derive(Debug)]
pub struct BaseImage {
    /// It, open for reading.
    pub file: Arc<File>,
    /// Absolute, without symbolic links.
    pub path: PathBuf,
    /// Whether it is a qcow2 image; else it is raw.
    pub qcow2: bool,
}

/// The image behind that of `driver`.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if there is none, or it cannot take what the other has.
pub fn base_of(driver: &dyn Driver) -> Result<BaseImage, Error> {
    let top = of_driver(driver)?;
    let file = top.check_committable()?;
    let path = path_of(file, &top.behind[0])?;
    let qcow2 = locked(&top.shared.state).layers[1].tables.is_some();
    Ok(BaseImage { file: Arc::clone(file), path, qcow2 })
}

/// Opens the image that `file` has open for writing, and once more for syncs: for [`BlockCommit::begin`], in a process
/// that may.
///
/// # Errors
/// That of opening it; [`ErrorKind::Claimed`] if the kernel uses it.
pub fn open_base(file: &File) -> Result<[File; 2], Error> {
    let path = PathBuf::from(backing::name_now(file).unwrap_or_default());
    let writable = backing::reopen(file, &path, true)?;
    let backing = Backing::of_open(writable, path)?;
    claim::check(&backing, &LOCKED, false)?;
    let synced = backing::reopen(file, &backing.path, false)?;
    Ok([backing.file, synced])
}

/// Frees the space of an image that a block commit has emptied, and its lock, when no queue uses it any more. Where that
/// fails it has clusters that nothing refers to.
pub fn free(driver: &dyn Driver) {
    if let Ok(top) = of_driver(driver) {
        let _ = top.free_unreferenced();
        // Its journal was removed.
        let _ = top.set_tag(0);
        lock::release(&top.files[0], &LOCKED);
    }
}

fn of_driver(driver: &dyn Driver) -> Result<&Qcow2, Error> {
    (driver as &dyn Any).downcast_ref::<Qcow2>().ok_or_else(|| {
        let message = format!("a {} device has no image behind its own", driver.name());
        Error::new(ErrorKind::Unsupported, message)
    })
}

/// The image behind, as it will be served.
enum Target {
    Raw(LoopDevice),
    Qcow2(Box<Qcow2>),
}

impl Target {
    fn driver(&self) -> &dyn Driver {
        match self {
            Target::Raw(raw) => raw,
            Target::Qcow2(qcow2) => &**qcow2,
        }
    }

    fn into_driver(self) -> Box<dyn Driver> {
        match self {
            Target::Raw(raw) => Box::new(raw),
            Target::Qcow2(qcow2) => qcow2,
        }
    }

    fn write(&self, position: u64, data: IoBuffer) -> Result<(), Error> {
        match self {
            Target::Raw(raw) => raw.write_now(position, &data),
            Target::Qcow2(qcow2) => qcow2.write_now(position, data),
        }
    }

    fn zero(&self, range: Range<u64>) -> Result<(), Error> {
        match self {
            Target::Raw(raw) => raw.zero_now(range),
            Target::Qcow2(qcow2) => qcow2.zero_now(range),
        }
    }

    fn sync(&self) -> Result<(), Error> {
        match self {
            Target::Raw(raw) => raw.sync(),
            Target::Qcow2(qcow2) => {
                // Also where no table is dirty: data in place may be.
                qcow2.run("make the data durable", async |env| commit(&env, true).await)?;
                qcow2.write_back()
            }
        }
    }

    /// Writes what is in memory of it, as far as that can be, and nothing more.
    fn close(self) {
        match self {
            Target::Raw(raw) => raw.supersede(),
            Target::Qcow2(qcow2) => {
                let _ = qcow2.write_back();
                qcow2.supersede();
            }
        }
    }
}

/// A block commit that is under way. If this is dropped the device goes on in its image; what the one behind has by then
/// is hidden by that.
pub struct BlockCommit {
    top: Arc<dyn Driver>,
    /// `None` once it is served.
    target: Option<Target>,
    /// The image behind once more, for its lock.
    base: File,
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
    /// Begins with the image of `top`, and the one behind it as [`open_base`] has opened it: nobody else may use that.
    /// It is made longer if it is shorter than the device. If it is a qcow2 image it has one of `journals`.
    ///
    /// # Errors
    /// As [`base_of`]; [`ErrorKind::Busy`] if somebody else uses the image behind, [`ErrorKind::Mismatch`] if it is longer
    /// than the device; those of the files.
    pub fn begin(
        top: Arc<dyn Driver>,
        [base, synced]: [File; 2],
        journals: Option<&Journals>,
    ) -> Result<BlockCommit, Error> {
        let device = of_driver(&*top)?;
        let size = device.limits().size_bytes();
        let path = device.lock_base(&base, &synced)?;
        let cannot = |e| Error::system(format!("cannot use {} twice", path.display()), e);
        let lock = base.try_clone().map_err(cannot)?;
        let target =
            device.open_target([base, synced], path, journals).inspect_err(|_| device.unlock_base(&lock))?;
        device.shared.changes.track(size);
        Ok(BlockCommit {
            top,
            target: Some(target),
            base: lock,
            slices: Slices::default(),
            pass: Map::full(size),
            position: 0,
            found: VecDeque::new(),
            copied_bytes: 0,
            data_bytes: 0,
            total_bytes: 0,
        })
    }

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

    /// Bytes that were written to since the pass began, at most.
    ///
    /// # Errors
    /// None of a device that is served.
    pub fn changed_bytes(&self) -> Result<u64, Error> {
        Ok(self.device()?.shared.changes.bytes())
    }

    /// Makes what was copied durable, and begins another pass, over what was written to meanwhile.
    ///
    /// # Errors
    /// That of the image behind, and as [`BlockCommit::count`].
    pub fn next_pass<E: From<Error>>(&mut self, stop: &dyn Fn() -> Result<(), E>) -> Result<(), E> {
        self.target()?.sync()?;
        self.take_changes()?;
        self.count(stop)
    }

    /// Finds parts that are to be copied in this pass, and has `flush` make the device durable, with it that these parts
    /// are the image's own. Returns whether there are some. `stop` is asked again and again whether to go on.
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
        let device = of_driver(&*self.top)?;
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

    /// Copies the rest, as long as `go_on` says so, which is asked before each piece. The disk must be frozen, and may go
    /// on afterwards. Returns whether that was all of it.
    ///
    /// # Errors
    /// Those of the files, and that of `go_on`.
    pub fn catch_up<E: From<Error>>(&mut self, go_on: &dyn Fn() -> Result<bool, E>) -> Result<bool, E> {
        let device = of_driver(&*self.top)?;
        device.run("make the data durable", async |env| commit(&env, true).await)?;
        device.write_back()?;
        if !self.copy_all(go_on)? {
            return Ok(false);
        }
        self.take_changes()?;
        self.copy_all(go_on)
    }

    /// Copies the rest, makes it durable, and empties the image, in its file: then the two images read the same for good,
    /// whatever is written to the one behind. Its disk must be frozen. `keep` is called last, to record that the image
    /// behind is to be served.
    ///
    /// # Errors
    /// Those of the files, and that of `keep`; the device goes on in its image then, as if nothing had happened.
    pub fn finish<E: From<Error>>(
        mut self,
        keep: impl FnOnce() -> Result<(), E>,
    ) -> Result<Box<dyn Driver>, E> {
        self.catch_up(&|| Ok::<_, E>(true))?;
        self.target()?.sync()?;
        let device = of_driver(&*self.top)?;
        // The file has all of it, and none of it may be applied to an image that was emptied.
        device.empty_journal()?;
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
        Ok(target.into_driver())
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
        self.pass = self.device()?.shared.changes.take();
        self.position = 0;
        Ok(())
    }

    /// The next part of this pass that the image itself has.
    fn next_own<E: From<Error>>(
        &mut self,
        stop: &dyn Fn() -> Result<(), E>,
    ) -> Result<Option<Range<u64>>, E> {
        let device = of_driver(&*self.top)?;
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

    fn device(&self) -> Result<&Qcow2, Error> {
        of_driver(&*self.top)
    }

    fn target(&self) -> Result<&Target, Error> {
        let invalid = || Error::new(ErrorKind::Invalid, "the image behind is served already");
        self.target.as_ref().ok_or_else(invalid)
    }
}

impl Drop for BlockCommit {
    fn drop(&mut self) {
        if let (Some(target), Ok(device)) = (self.target.take(), of_driver(&*self.top)) {
            device.shared.changes.stop();
            target.close();
            device.unlock_base(&self.base);
        }
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
            (!has_base, "there is no image behind it"),
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
    fn lock_base(&self, base: &File, synced: &File) -> Result<PathBuf, Error> {
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
            self.unlock_base(base);
            return Err(error);
        }
        Ok(path)
    }

    /// Makes the lock of `base` one for reading again, of this chain.
    fn unlock_base(&self, base: &File) {
        let path = &self.behind[0];
        for file in [base, &*self.files[1]] {
            // At worst others are kept from reading it until it is closed.
            let _ = lock::acquire(file, path, &LOCKED, LockKind::Shared, false);
        }
    }

    /// Writes to the device while no queue does.
    fn write_now(&self, position: u64, data: IoBuffer) -> Result<(), Error> {
        let what = format!("write to {}", self.path.display());
        write_data(&self.shared, &self.files, &what, position, data)
    }

    /// As [`Qcow2::write_now`], zeroes.
    fn zero_now(&self, range: Range<u64>) -> Result<(), Error> {
        self.run("write zeroes", move |env| async move {
            clear(&env, range.start, range.end - range.start, Wanted::Zeroes).await
        })
    }

    fn open_target(
        &self,
        [base, synced]: [File; 2],
        path: PathBuf,
        journals: Option<&Journals>,
    ) -> Result<Target, Error> {
        let size = self.limits().size_bytes();
        let is_raw = locked(&self.shared.state).layers[1].tables.is_none();
        if is_raw {
            let terms = DeviceTerms {
                size,
                logical_block_bytes: self.logical_block_bytes,
                memory_align: self.memory_align,
                requested: self.requested,
                buffered: self.buffered.clone(),
            };
            return LoopDevice::of_base(base, synced, path, terms).map(Target::Raw);
        }
        let qcow2 = self.of_base(base, &path, journals)?;
        // The device over it reads it by the tables that it had when that was opened.
        qcow2.shared.hold();
        let now = qcow2.limits().size_bytes();
        let mut fits = check_not_longer(&path, now, size);
        if fits.is_ok() && now < size {
            fits = qcow2.resize(Some(size)).map(drop);
        }
        let target = Target::Qcow2(Box::new(qcow2));
        match fits {
            Ok(()) => Ok(target),
            Err(error) => {
                // It is locked all the time.
                target.close();
                Err(error)
            }
        }
    }
}

#[cfg(test)]
impl BlockCommit {
    /// Commits of the qcow2 image behind that began.
    pub(super) fn commits_behind(&self) -> u64 {
        match &self.target {
            Some(Target::Qcow2(qcow2)) => locked(&qcow2.shared.state).commits,
            _ => 0,
        }
    }
}

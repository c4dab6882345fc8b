//! Live block commit. Copies the clusters allocated in the active overlay into its backing file (the base)
//! while clients use the device, then pivots the device to the base.
//!
//! # Interruption
//!
//! A commit may be cancelled, killed, or cut off by a power loss at any point without changing what the
//! device reads. Two rules make this so:
//!
//! 1. The base is written only at offsets that the overlay's *on-disk* L2 tables map, as data or as zeroes.
//!    Reads of these offsets never reach the base. Therefore each batch of extents is looked up
//!    ([`BlockCommit::find`]), the overlay's metadata is flushed, and only then are the extents copied
//!    ([`BlockCommit::copy`]).
//! 2. An offset that the overlay maps stays mapped. In an image with a backing file, a discard turns an L2
//!    entry into a zero entry, and never into an unallocated one.
//!
//! These rules also allow a copy to race with a client's write. No client can read the result, and the region
//! is copied again, because the write is recorded in [`Changes`](crate::qcow2::io::env::Changes).
//!
//! # Passes
//!
//! The first pass covers the whole device, and each further pass the regions written during the pass before
//! it. The last pass runs with the disk frozen ([`BlockCommit::finish`]), so that no write is missed.
//!
//! The base is opened by a process that has the permission, then written by the daemon of the device, and served
//! after the pivot.

use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use blkq::bitmap::Bitmap;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::lock as locked;
use blkq::{Driver, Error, ErrorKind, IoBuffer, Segment, Tag};
use rustix::fs::{OFlags, fcntl_getfl};

use super::overlay::path_of;
use crate::errors::{invalid, unsupported};
use crate::image_file::lock::{self, LockKind, WHOLE_FILE};
use crate::image_file::{self, ImageFile};
use crate::r#loop::LoopDevice;
use crate::options::{BackingChain, Journals};
use crate::qcow2::Qcow2;
use crate::qcow2::chain::{BackingFile, open_one, read_header};
use crate::qcow2::io::blocking_reader::BlockingReader;
use crate::qcow2::io::env::{self, map_for, next_changed};
use crate::qcow2::io::flush_metadata::{flush_metadata, sync};
use crate::qcow2::io::operations::{Memory, Op};
use crate::qcow2::io::write::{Source, write};
use crate::qcow2::io::zero::{Wanted, clear};
use crate::qcow2::tables::state::{Found, set_refcount};

/// Extents that are looked up before the overlay's metadata is flushed and they are copied. One flush serves
/// them all; the list takes at most 256 KiB.
const BATCH_EXTENTS_MAX: usize = 16384;
/// Bytes of the device that are looked up between two checks for cancellation.
const LOOKUP_MAX_BYTES: u64 = 1 << 30;
/// How often a thread that waits for a sync checks for cancellation.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// An image that can be committed into its backing file.
pub struct CommitSource {
    overlay: Arc<Qcow2>,
    base: BackingFile,
}

impl CommitSource {
    /// Fails with [`ErrorKind::Unsupported`] if the image has no backing file, contains internal snapshots or
    /// is read-only, or if the backing file was deleted.
    pub(crate) fn new(overlay: Arc<Qcow2>) -> Result<CommitSource, Error> {
        let file = overlay.check_committable()?;
        let (path, identity) = (path_of(file)?, file.identity);
        let qcow2 = locked(&overlay.shared.state).layers[1].tables.is_some();
        Ok(CommitSource { overlay, base: BackingFile { path, identity, qcow2 } })
    }

    /// The backing file, into which the image is committed.
    pub fn base(&self) -> &BackingFile {
        &self.base
    }

    /// Starts the commit. `files` must be the backing file, opened as by
    /// [`open_base`](crate::qcow2::open_base).
    ///
    /// Locks the base exclusively. Extends the base if it is shorter than the device. Marks the persistent
    /// bitmaps of the base as in use, because those of the device will replace them. A qcow2 base gets a
    /// journal in `journals`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] as for [`Image::commit_source`](crate::Image::commit_source), or if the
    /// device cannot be served from the base; [`ErrorKind::Invalid`] if `files` are not the backing file, or
    /// not opened as they must be; [`ErrorKind::Busy`] if another open file description has a lock on the
    /// base; [`ErrorKind::Mismatch`] if the base is longer than the device; the I/O error of a file.
    pub fn begin(self, files: BaseFiles, journals: Option<&Journals>) -> Result<BlockCommit, Error> {
        let device = self.overlay;
        let size = device.limits().size_bytes();
        // The maps are made and the descriptors duplicated before the lock is taken, because a failure after it
        // would have to restore the lock of the chain.
        let too_large = format!("{} cannot be committed: it has more than 512 PiB", device.path().display());
        let map = map_for(size).map_err(|_| unsupported(too_large))?;
        let pass = map.cleared()?;
        pass.mark(0..size);
        let cannot = |e| Error::system("cannot duplicate a descriptor of the backing file", e);
        let base = files.image.try_clone().map_err(cannot)?;
        let synced = files.synced.try_clone().map_err(cannot)?;
        let path = device.lock_base(&files)?;
        let target =
            device.open_target(files, path, journals).map_err(|error| device.after_unlock(&base, error))?;
        // Tracking begins before the first lookup: the first pass sees every write that has completed by
        // then, and all other writes are recorded.
        device.shared.changes.track(map);
        let reader = BlockingReader::new(&device.shared);
        Ok(BlockCommit {
            overlay: device,
            target: Some(target),
            base,
            synced,
            reader,
            pass,
            lookup_position: 0,
            extents: VecDeque::new(),
            copied_bytes: 0,
            data_bytes: 0,
            total_bytes: 0,
        })
    }
}

/// A block commit in progress. Dropping it cancels the commit ([`BlockCommit::stop`]).
pub struct BlockCommit {
    overlay: Arc<Qcow2>,
    /// `None` after the pivot and after a cancellation.
    pub(in crate::qcow2) target: Option<Target>,
    /// A second descriptor of the base's open file description, which holds the lock. The lock can be changed
    /// after `target` is closed.
    base: File,
    /// The open file description that `LoopDevice::sync` of a raw target uses, too.
    synced: File,
    reader: BlockingReader,
    /// The regions to copy in this pass.
    pass: Bitmap,
    /// Where the lookup of this pass continues.
    lookup_position: u64,
    /// Extents that the lookup has found and that are not copied yet. Their L2 entries are on disk once the
    /// device has been flushed after the lookup.
    extents: VecDeque<Range<u64>>,
    copied_bytes: u64,
    /// The part of `copied_bytes` that was data. Zero clusters are not in it.
    data_bytes: u64,
    total_bytes: u64,
}

impl BlockCommit {
    /// Counts the bytes to copy in this pass, for [`BlockCommit::progress`]. Copies nothing.
    ///
    /// # Errors
    /// The I/O error of an overlay's table, or the error of `check`, called before each lookup.
    pub fn count<E: From<Error>>(&mut self, check: &dyn Fn() -> Result<(), E>) -> Result<(), E> {
        let mut bytes = 0;
        while let Some(range) = self.next_allocated(check)? {
            bytes += range.end - range.start;
        }
        self.lookup_position = 0;
        self.total_bytes = self.copied_bytes + bytes;
        Ok(())
    }

    /// The driver of the base, to which the device will pivot.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] after the pivot and after a cancellation.
    pub fn driver(&self) -> Result<&dyn Driver, Error> {
        self.target().map(Target::driver)
    }

    /// The bytes copied so far and the bytes to copy, of all passes. Each pass adds to both.
    pub fn progress(&self) -> (u64, u64) {
        (self.copied_bytes, self.total_bytes.max(self.copied_bytes))
    }

    /// The bytes of data copied so far. Estimate the copy rate from this number: zeroes are usually copied
    /// without I/O, and would inflate the rate.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Makes the copies durable, then begins another pass, over the regions that were written since the last
    /// pass began.
    ///
    /// # Errors
    /// The I/O error of the base, and as [`BlockCommit::count`].
    pub fn next_pass<E: From<Error>>(&mut self, check: &dyn Fn() -> Result<(), E>) -> Result<(), E> {
        self.sync_base(check)?;
        self.target()?.sync()?;
        self.take_changes()?;
        self.count(check)
    }

    /// Syncs the base on a helper thread, and checks for cancellation while it runs; a cancellation leaves
    /// the thread running. The sync of the target, which follows and cannot be cancelled, then has little to
    /// write.
    fn sync_base<E: From<Error>>(&self, check: &dyn Fn() -> Result<(), E>) -> Result<(), E> {
        let cannot = |e| Error::system("cannot sync the backing file", e);
        let file = self.synced.try_clone().map_err(cannot)?;
        let (sender, synced) = channel();
        let sync = move || _ = sender.send(image_file::sync(&file));
        thread::Builder::new().name("blkq-sync".to_owned()).spawn(sync).map_err(cannot)?;
        loop {
            match synced.recv_timeout(CANCEL_POLL_INTERVAL) {
                // The kernel reports a write-back error once to each open file description. The sync of a raw
                // target uses that of `file`, so it would not report the error again.
                Ok(result) => return Ok(result.map_err(cannot)?),
                Err(RecvTimeoutError::Timeout) => check()?,
                Err(RecvTimeoutError::Disconnected) => {
                    let message = "the thread that syncs the backing file has panicked";
                    return Err(Error::new(ErrorKind::System, message).into());
                }
            }
        }
    }

    /// Looks up the next extents to copy in this pass, at most 16384, and calls `flush`, which must flush the
    /// device: only then are the L2 entries of these extents on disk (rule 1 above). Returns false, without a
    /// flush, if the pass has nothing left to copy.
    ///
    /// # Errors
    /// The I/O error of a table of the overlay, or the error of `check` or `flush`.
    pub fn find<E: From<Error>>(
        &mut self,
        check: &dyn Fn() -> Result<(), E>,
        flush: impl FnOnce() -> Result<(), E>,
    ) -> Result<bool, E> {
        while self.extents.len() < BATCH_EXTENTS_MAX {
            let Some(range) = self.next_allocated(check)? else { break };
            self.extents.push_back(range);
        }
        if self.extents.is_empty() { Ok(false) } else { flush().map(|()| true) }
    }

    /// Copies from the first extent: at most 1 MiB of data, one compressed cluster, or one run of zeroes.
    /// Returns false if no extent is left.
    ///
    /// # Errors
    /// The I/O error of one of the two images.
    pub fn copy(&mut self) -> Result<bool, Error> {
        let Some(range) = self.extents.front().cloned() else { return Ok(false) };
        let read = self.reader.read(&range).map_err(|e| self.overlay.file().failed("read", e));
        let (found, bytes, data) = read?;
        if let Some(data) = data {
            self.target()?.write(range.start, data)?;
            self.data_bytes += bytes;
        } else if found == Found::Zero {
            self.target()?.zero(range.start..range.start + bytes)?;
        }
        // Rule 2 excludes the third case, an unallocated part. There would be nothing to copy: the base has the bytes.
        self.copied_bytes += bytes;
        match range.start + bytes {
            end if end < range.end => self.extents[0].start = end,
            _ => drop(self.extents.pop_front()),
        }
        Ok(true)
    }

    /// Copies all that is left, syncs the base, and returns true: until the disk thaws, the base reads as the
    /// device does. Returns false as soon as `proceed` does, which is called before each copy. The disk
    /// must be frozen. It may thaw afterwards, and this may be called again.
    ///
    /// # Errors
    /// The I/O error of one of the two images, or the error of `proceed`.
    pub fn catch_up<E: From<Error>>(&mut self, proceed: &dyn Fn() -> Result<bool, E>) -> Result<bool, E> {
        let device = &*self.overlay;
        // From here until the disk thaws, the tables on disk match those in memory, and rule 1 is met without
        // further flushes.
        device.sync()?;
        // First the rest of this pass, then the regions written since the pass began.
        if !self.copy_all(proceed)? {
            return Ok(false);
        }
        self.take_changes()?;
        if !self.copy_all(proceed)? {
            return Ok(false);
        }
        self.target()?.sync()?;
        Ok(true)
    }

    /// Copies all that is left and empties the overlay on disk: from then on both images read the same,
    /// whatever is written to the base. Then calls `save`, to record that the device uses the base, and
    /// returns the base. The disk must be frozen.
    ///
    /// # Errors
    /// The I/O error of one of the two images, or the error of `save`. The device keeps using the
    /// overlay, whose tables are restored.
    pub fn finish<E: From<Error>>(&mut self, save: impl FnOnce() -> Result<(), E>) -> Result<Target, E> {
        self.catch_up(&|| Ok::<_, E>(true))?;
        let device = &*self.overlay;
        // The overlay's file is complete. A journal that is replayed after the overlay was emptied would
        // bring stale mappings back.
        device.empty_journal(None)?;
        let emptied = device.empty().map_err(E::from).and_then(|()| save());
        // The tables in memory are still those of the full overlay. They are written back before the disk
        // thaws.
        emptied.inspect_err(|_| device.refill())?;
        if let Some(journal) = locked(&device.shared.state).journal.take() {
            journal.remove();
        }
        device.shared.changes.stop();
        device.superseded.store(true, Relaxed);
        let target = self.target.take().ok_or_else(already_ended)?;
        match &target {
            Target::Raw(_) => {
                // A raw device locks only the bytes that it serves.
                lock::release(&self.base, &(device.limits().size_bytes()..WHOLE_FILE.end));
            }
            // The overlay read the base by tables from before the commit. It no longer does, so clusters that
            // the copies released can be freed.
            Target::Qcow2(qcow2) => locked(&qcow2.shared.state).writer.release_held(),
        }
        Ok(target)
    }

    /// Frees the clusters of an overlay that [`BlockCommit::finish`] has emptied, and releases its lock. Call
    /// this when no queue uses the overlay any longer. Does nothing before the pivot. Errors are ignored: the
    /// overlay is empty in any case, and at worst keeps clusters that nothing refers to.
    pub fn free(&self) {
        let overlay = &self.overlay;
        if !overlay.superseded.load(Relaxed) {
            return;
        }
        // `free_unreferenced` frees the clusters of bitmaps too, so the header must not name them then.
        let _ = overlay.bitmaps.0.remove_bitmaps().and_then(|()| overlay.free_unreferenced());
        // `finish` has removed the journal. With its tag still in the header, the next attach would warn that
        // the journal is missing.
        let _ = overlay.set_tag(0);
        overlay.file().unlock(&WHOLE_FILE);
    }

    /// Cancels the commit. The device keeps using the overlay, which hides all that was copied. Does nothing
    /// after the pivot.
    ///
    /// # Errors
    /// The error of restoring the shared lock on the base.
    pub fn stop(&mut self) -> Result<(), Error> {
        let Some(target) = self.target.take() else { return Ok(()) };
        let device = &*self.overlay;
        device.shared.changes.stop();
        target.close();
        device.unlock_base(&self.base)
    }

    fn copy_all<E: From<Error>>(&mut self, proceed: &dyn Fn() -> Result<bool, E>) -> Result<bool, E> {
        // The caller has flushed all metadata, so no flush is needed here.
        while self.find(&|| Ok::<_, Error>(()), || Ok(()))? {
            while proceed()? && self.copy()? {}
            if !self.extents.is_empty() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn take_changes(&mut self) -> Result<(), Error> {
        // Made before the engine's lock is taken.
        let empty = self.pass.cleared()?;
        self.pass = self.overlay.shared.changes.take(empty).ok_or_else(already_ended)?;
        self.lookup_position = 0;
        Ok(())
    }

    fn next_allocated<E: From<Error>>(
        &mut self,
        check: &dyn Fn() -> Result<(), E>,
    ) -> Result<Option<Range<u64>>, E> {
        let device = &*self.overlay;
        while let Some(range) = next_changed(&self.pass, self.lookup_position) {
            check()?;
            let end = range.end.min(range.start + LOOKUP_MAX_BYTES);
            let extent =
                self.reader.next_allocated(range.start..end).map_err(|e| device.file().failed("read", e))?;
            self.lookup_position = extent.as_ref().map_or(end, |extent| extent.end);
            if extent.is_some() {
                return Ok(extent);
            }
        }
        Ok(None)
    }

    fn target(&self) -> Result<&Target, Error> {
        self.target.as_ref().ok_or_else(already_ended)
    }
}

impl Drop for BlockCommit {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}

fn already_ended() -> Error {
    invalid("the commit has already ended")
}

impl Qcow2 {
    fn check_committable(&self) -> Result<&ImageFile, Error> {
        let snapshots = locked(&self.shared.state).top.header.snapshots;
        let refused = [
            (self.shared.files.len() == 1, "it has no backing file"),
            (!self.writable || self.read_only.load(Relaxed), "it is read-only"),
            (snapshots > 0, "it contains internal snapshots, which the backing file cannot take over"),
        ];
        if let Some((_, why)) = refused.iter().find(|(is, _)| *is) {
            return Err(unsupported(format!("{} cannot be committed: {why}", self.path().display())));
        }
        Ok(&self.shared.files[1])
    }

    /// Replaces the chain's shared lock on the base by an exclusive lock of the file in `files`. Returns the
    /// path of the base.
    fn lock_base(&self, BaseFiles { image: base, synced, .. }: &BaseFiles) -> Result<PathBuf, Error> {
        let file = self.check_committable()?;
        let path = path_of(file)?;
        let is_same = |opened: &File, access: OFlags| {
            let flags = fcntl_getfl(opened);
            opened.metadata().is_ok_and(|data| (data.dev(), data.ino()) == file.identity)
                && flags.is_ok_and(|flags| flags & (OFlags::RWMODE | OFlags::APPEND | OFlags::PATH) == access)
        };
        if !is_same(base, OFlags::RDWR) || !is_same(synced, OFlags::RDONLY) {
            return Err(invalid(format!(
                "cannot commit into {}: the file that was opened does not match the backing file in use; \
                 it must be opened once read-write and once read-only",
                path.display()
            )));
        }
        // The locks overlap, so that no writer can lock the base in between.
        lock::acquire(base, &path, &WHOLE_FILE, LockKind::Reader)?;
        file.unlock(&WHOLE_FILE);
        if let Err(error) = lock::acquire(base, &path, &WHOLE_FILE, LockKind::Writer) {
            return Err(self.after_unlock(base, error));
        }
        Ok(path)
    }

    /// Turns the exclusive lock of `base` into a shared one, and takes the chain's shared lock again. If that
    /// fails, writers may lock the base as soon as `base` is closed.
    fn unlock_base(&self, base: &File) -> Result<(), Error> {
        lock::downgrade(base, &WHOLE_FILE);
        self.shared.files[1].lock(&WHOLE_FILE, LockKind::Reader).map(drop)
    }

    /// Restores the shared locks because of `error`, and returns `error`. If a lock cannot be restored, that
    /// error is appended.
    fn after_unlock(&self, base: &File, error: Error) -> Error {
        match self.unlock_base(base) {
            Ok(()) => error,
            Err(other) => Error::new(error.kind(), format!("{error}; {other}")),
        }
    }

    /// Overwrites the L1 table in the file with zeroes, durably. The tables in memory do not change. A power
    /// loss meanwhile may leave some of the old entries.
    fn empty(&self) -> Result<(), Error> {
        self.shared.run("empty its tables", async |env| {
            let (offset, bytes) = {
                let state = env.state();
                let align = state.layers[0].align.max(512) as usize;
                (state.top.header.l1_offset, (state.top.l1.len() * 8).next_multiple_of(align))
            };
            env.io.submit(env.write_op(offset).with_buffer(IoBuffer::zeroed(bytes))).await?;
            sync(env).await
        })
    }

    /// Writes the L1 table in memory back, to undo [`Qcow2::empty`]. If this fails, the next flush writes it.
    fn refill(&self) {
        {
            let mut state = locked(&self.shared.state);
            let entries = state.top.l1.len();
            state.writer.l1_dirty.extend(0..entries);
        }
        let _ = self.shared.run("fill its tables again", async |env| flush_metadata(env, true).await);
    }

    /// Frees all clusters of an emptied overlay except those of its header and tables. After an error,
    /// clusters to which nothing refers are left.
    fn free_unreferenced(&self) -> Result<(), Error> {
        let (header, blocks) = {
            let state = locked(&self.shared.state);
            (state.top.header.clone(), state.writer.refcount_table.clone())
        };
        let (cluster, order) = (header.cluster_bytes(), header.refcount_order);
        let per_block = header.refcounts_per_block();
        let clusters = |offset: u64, bytes: u64| offset / cluster..(offset + bytes).div_ceil(cluster);
        let mut kept: BTreeSet<u64> = clusters(0, cluster).collect();
        // The snapshot table is empty, because an image with snapshots is not committed.
        kept.extend(header.tables().into_iter().flat_map(|(_, offset, bytes)| clusters(offset, bytes)));
        kept.extend(blocks.iter().filter(|block| **block != 0).map(|block| block / cluster));
        let end = self.file().size()?.div_ceil(cluster);
        let ends = kept.iter().map(|number| number + 1);
        let holes: Vec<_> = std::iter::once(0).chain(ends).zip(kept.iter().copied().chain([end])).collect();
        let table = move |number: usize| {
            let first = number as u64 * per_block;
            let mut content = IoBuffer::zeroed(cluster as usize);
            for other in kept.range(first..first + per_block) {
                set_refcount(&mut content, (other - first) as usize, order, 1);
            }
            content
        };
        self.shared.run("free its clusters", async move |env| {
            for (number, block) in blocks.iter().enumerate().filter(|(_, block)| **block != 0) {
                env.io.submit(env.write_op(*block).with_buffer(table(number))).await?;
            }
            for (from, to) in holes.into_iter().filter(|(from, to)| from < to) {
                env.io.submit(Op::punch(from * cluster, (to - from) * cluster)).await?;
            }
            Ok(())
        })
    }
}

/// The files of the base, opened by a process that has the permission.
#[derive(Debug)]
pub struct BaseFiles {
    /// The base, open for reading and writing.
    pub image: File,
    /// The base in a second open file description, read-only, for syncs.
    pub synced: File,
    /// The file `IMAGE.bitmaps` with the dirty bitmaps of a raw base.
    pub bitmaps: Option<File>,
}

/// A base that was opened.
#[derive(Debug)]
pub struct OpenedBase {
    /// Absolute, with all symbolic links resolved unless the image is found through a link that must be kept.
    pub path: PathBuf,
    /// Whether the base is a qcow2 image; else it is raw.
    pub qcow2: bool,
    /// Whether the dirty bitmaps of the base belong into a file of their own: a raw image in a regular file.
    pub has_bitmap_file: bool,
    /// The files of the base, without the bitmap file.
    pub files: BaseFiles,
}

/// Opens the backing file of `image` for [`CommitSource::begin`](crate::qcow2::CommitSource::begin), as the header
/// of `image` names it. The daemon that serves the image may lack the permission for this.
///
/// # Errors
/// [`blkq::ErrorKind::Unsupported`] if the image has no backing file; [`blkq::ErrorKind::BackingFile`] if
/// `allowed` does not admit it; [`blkq::ErrorKind::Claimed`] if the kernel uses it; [`blkq::ErrorKind::Busy`] if
/// another process writes to it; the error of opening one of the files.
pub fn open_base(image: &Path, allowed: BackingChain) -> Result<OpenedBase, Error> {
    let mut top = ImageFile::open(image, true)?;
    let Some(name) = read_header(&mut top)?.backing else {
        let message = format!("{} cannot be committed: it has no backing file", top.path.display());
        return Err(unsupported(message));
    };
    let mut found = open_one(&top.path, &name, allowed)?;
    let qcow2 = name.format.as_deref() == Some("qcow2");
    if qcow2 {
        read_header(&mut found)?;
    }
    let base = found.reopen(true)?;
    let synced = found.reopen(false)?.file;
    base.check_unclaimed(&WHOLE_FILE, false)?;
    base.lock(&WHOLE_FILE, LockKind::Reader)?;
    Ok(OpenedBase {
        path: base.path.clone(),
        qcow2,
        has_bitmap_file: !qcow2 && !base.block_device,
        files: BaseFiles { image: base.file, synced, bitmaps: None },
    })
}

/// The driver of an image, such as the base of a commit, which is served after the pivot.
#[derive(Clone)]
pub enum Target {
    /// A raw image.
    Raw(Arc<LoopDevice>),
    /// A qcow2 image.
    Qcow2(Arc<Qcow2>),
}

impl Target {
    pub(in crate::qcow2) fn driver(&self) -> &dyn Driver {
        match self {
            Target::Raw(raw) => &**raw,
            Target::Qcow2(qcow2) => &**qcow2,
        }
    }

    pub(in crate::qcow2) fn write(&self, position: u64, data: IoBuffer) -> Result<(), Error> {
        match self {
            Target::Raw(raw) => raw.write_now(position, &data),
            Target::Qcow2(qcow2) => qcow2.write_now(position, data),
        }
    }

    pub(in crate::qcow2) fn zero(&self, range: Range<u64>) -> Result<(), Error> {
        match self {
            Target::Raw(raw) => raw.zero_now(range),
            Target::Qcow2(qcow2) => qcow2.shared.run("write zeroes", async move |env| {
                clear(env, range.start, range.end - range.start, Wanted::Zeroes).await
            }),
        }
    }

    pub(in crate::qcow2) fn sync(&self) -> Result<(), Error> {
        match self {
            Target::Raw(raw) => raw.sync(),
            Target::Qcow2(qcow2) => qcow2.sync(),
        }
    }

    /// Writes back what is in memory, as far as possible. The overlay hides the base, so errors are ignored.
    pub(in crate::qcow2) fn close(self) {
        match self {
            Target::Raw(raw) => raw.supersede(),
            Target::Qcow2(qcow2) => _ = qcow2.supersede(),
        }
    }
}

impl Qcow2 {
    /// Writes `data` at `position` of the device, while no queue does I/O.
    fn write_now(&self, position: u64, mut data: IoBuffer) -> Result<(), Error> {
        let (bytes, segment) = (data.len() as u64, Segment::new(data.as_mut_ptr(), data.len() as u32));
        // SAFETY: the buffer outlives `run`, which performs all operations before it returns, and no other
        // request in this environment has the tag.
        let memory = unsafe { Memory::new(Tag(0), vec![segment]) };
        env::run(&self.shared, &format!("write to {}", self.path().display()), async move |env| {
            write(env, position, bytes, Source::Memory(&memory)).await
        })
    }

    /// Opens `files` as the target of a block commit. They are those of the backing file at `path`, and
    /// locked. Extends the base if it is shorter than the device, and marks its persistent bitmaps as in use.
    /// Fails with [`blkq::ErrorKind::Mismatch`] if the base is longer than the device, or was truncated.
    pub(in crate::qcow2) fn open_target(
        &self,
        files: BaseFiles,
        path: PathBuf,
        journals: Option<&Journals>,
    ) -> Result<Target, Error> {
        let size = self.limits().size_bytes();
        let (is_raw, bytes) = {
            let base = &locked(&self.shared.state).layers[1];
            (base.tables.is_none(), base.file_bytes)
        };
        self.shared.files[1].check_not_truncated(bytes)?;
        if is_raw {
            let terms = self.terms.clone();
            // The queue needs an open file description that nothing else uses for syncs, such as that of the overlay. A
            // confined process cannot open another.
            let cannot = |e| Error::system("cannot duplicate a descriptor of the backing file", e);
            let own = self.shared.files[1].file.try_clone().map_err(cannot)?;
            let synced = (files.synced, own);
            return LoopDevice::of_base(files.image, synced, files.bitmaps, path, size, terms)
                .map(|raw| Target::Raw(Arc::new(raw)));
        }
        let qcow2 = self.of_base(files.image, &path, journals)?;
        // The overlay reads the base by the tables that the base had when the overlay was opened, so no
        // cluster of them may be reused.
        locked(&qcow2.shared.state).writer.held = Some(Vec::new());
        if qcow2.limits().size_bytes() < size {
            // After an error, this writes the tables back and ends the journal. The base stays locked meanwhile.
            qcow2.resize(Some(size)).inspect_err(|_| _ = qcow2.supersede())?;
        }
        Ok(Target::Qcow2(Arc::new(qcow2)))
    }
}

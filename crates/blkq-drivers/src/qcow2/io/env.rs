//! State and operations that the tasks of an image share.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use blkq::bitmap::{Bitmap, BitmapState, GRANULARITY_MAX};
use blkq::sync::atomic::AtomicBool;
use blkq::sync::atomic::Ordering::SeqCst;
use blkq::sync::{Mutex, MutexGuard, lock};
use blkq::{Error, ErrorKind, IoBuffer, Status, Wake};

use crate::image_file::ImageFile;
use crate::qcow2::tables::cache::{Key, Table};
use crate::qcow2::tables::state::State;

use super::inflate::{Inflater, Job, Place};
use super::operations::{Action, Epochs, Executor, Io, Op};

/// Memory for copies and decompressed clusters at a time, in bytes.
pub const BOUNCE_MAX_BYTES: u64 = 64 << 20;
/// The smallest region that a bit represents, in bytes.
const REGION_MIN_BYTES: u64 = 1 << 16;
/// With more bits than this, each bit represents a larger region, so that a map takes at most 4 MiB. The size of a
/// region is limited too, so the maps of the largest devices take more.
const BITS_MAX: u64 = 1 << 25;

pub struct Shared {
    pub state: Mutex<State>,
    /// The files of the chain, the active image first.
    pub files: Vec<Arc<ImageFile>>,
    pub epochs: Arc<Epochs>,
    pub changes: Changes,
}

impl Shared {
    pub fn new(state: State, files: Vec<Arc<ImageFile>>) -> Arc<Shared> {
        let (state, changes) = (Mutex::new(state), Changes::default());
        Arc::new(Shared { state, files, epochs: Arc::default(), changes })
    }

    /// The path of the active image.
    pub fn path(&self) -> &Path {
        &self.files[0].path
    }

    /// As [`run`]. `what` is completed by the path of the image.
    pub fn run<T: 'static>(
        self: &Arc<Self>,
        what: &str,
        task: impl AsyncFnOnce(&Env) -> Result<T, Status> + 'static,
    ) -> Result<T, Error> {
        run(self, &format!("{what} in {}", self.path().display()), task)
    }
}

/// Runs `task` to completion on the calling thread with plain system calls, for changes while no queue does I/O, and for
/// the last flush. The thread may be forbidden to create a ring. `what` completes the message "cannot ...".
pub fn run<T: 'static>(
    shared: &Arc<Shared>,
    what: &str,
    task: impl AsyncFnOnce(&Env) -> Result<T, Status> + 'static,
) -> Result<T, Error> {
    let env = Env::new(Arc::clone(shared), None);
    let mut executor = Executor::default();
    let result = Rc::new(RefCell::new(Err(Status::Io)));
    let (own, kept) = (Rc::clone(&env), Rc::clone(&result));
    executor.spawn(&env.io, async move { drop(kept.replace(task(&own).await)) });
    while !executor.is_idle() {
        executor.run(&env.io);
        let mut idle = !env.io.has_paused();
        while let Some((place, done)) = env.io.next(|op| op.perform(&shared.files)) {
            idle = false;
            env.io.complete(place, done);
        }
        if idle && !executor.is_idle() {
            // The task waits for a change by another task, and no other task exists.
            let message = format!("cannot {what}: another change of the image is in progress");
            return Err(Error::new(ErrorKind::System, message));
        }
    }
    result.replace(Err(Status::Io)).map_err(|status| Error::system(format!("cannot {what}"), status))
}

pub struct Env {
    pub shared: Arc<Shared>,
    pub io: Io,
    loading: RefCell<HashSet<Key>>,
    /// Memory for copies that is reserved, in bytes.
    pub bounce: Cell<u64>,
    pub decompressed: RefCell<Option<(Place, Rc<Vec<u8>>)>>,
    pub decompressing: RefCell<HashSet<Place>>,
    inflater: RefCell<Inflater>,
    inflated: RefCell<HashMap<Place, Result<Vec<u8>, Status>>>,
}

impl Env {
    /// For the tasks of the queue that `wake` wakes, or for tasks on a thread that may block.
    pub fn new(shared: Arc<Shared>, wake: Option<Arc<dyn Wake>>) -> Rc<Env> {
        let epochs = Arc::clone(&shared.epochs);
        Rc::new(Env {
            shared,
            io: Io::new(epochs),
            loading: RefCell::default(),
            bounce: Cell::new(0),
            decompressed: RefCell::default(),
            decompressing: RefCell::default(),
            inflater: RefCell::new(Inflater::new(wake)),
            inflated: RefCell::default(),
        })
    }

    /// Decompresses a cluster. No other task may be decompressing it. Fails with [`Status::Io`] if the bytes are not
    /// the compressed data of a cluster.
    pub async fn inflate(&self, job: Job) -> Result<Vec<u8>, Status> {
        let place = job.0;
        let started = self.inflater.borrow_mut().start(job);
        if let Err((_, compressed, read)) = started {
            return compressed.inflate(&read);
        }
        loop {
            self.io.wait().await;
            if let Some(inflated) = self.inflated.borrow_mut().remove(&place) {
                return inflated;
            }
        }
    }

    /// Hands results of the decompressing thread to the tasks that wait for them.
    pub fn take_inflated(&self) {
        while let Some((place, content)) = self.inflater.borrow().next() {
            self.inflated.borrow_mut().insert(place, content);
            self.io.changed();
        }
    }

    /// A task must not hold the lock while it waits: another task on the same thread would deadlock.
    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared.state)
    }

    pub fn read_op(&self, layer: u8, offset: u64) -> Op {
        Op::transfer(Action::Read, layer, &self.state().layers[usize::from(layer)], offset)
    }

    pub fn write_op(&self, offset: u64) -> Op {
        Op::transfer(Action::Write, 0, &self.state().layers[0], offset)
    }

    /// Reads `bytes` of the file of `layer`, within an epoch.
    pub async fn read(&self, layer: u8, offset: u64, bytes: u64) -> Result<IoBuffer, Status> {
        let op = self.read_op(layer, offset).with_buffer(IoBuffer::zeroed(bytes as usize));
        self.io.submit(op.in_epoch(&self.shared.epochs)).await?.buffers.pop().ok_or(Status::Io)
    }

    /// Waits until [`BOUNCE_MAX_BYTES`] allow copies of `bytes`; a task may exceed the limit if no other has
    /// memory reserved. A task that has memory reserved or an operation in an epoch must not wait for more,
    /// because others may be waiting for it.
    pub async fn reserve(&self, bytes: u64) -> Bounce<'_> {
        loop {
            let used = self.bounce.get();
            if bytes == 0 || used == 0 || used + bytes <= BOUNCE_MAX_BYTES {
                self.bounce.set(used + bytes);
                return Bounce { env: self, bytes };
            }
            self.io.wait().await;
        }
    }

    /// Reads a slice into the cache. Returns false if no slice could be evicted.
    pub async fn load(&self, key: Key, table: Table) -> Result<bool, Status> {
        if !self.loading.borrow_mut().insert(key) {
            self.io.wait().await;
            return Ok(true);
        }
        let bytes = self.state().cache.slice_bytes();
        // The read is in an epoch, so that the cluster of the slice cannot be reused before the slice is in
        // the cache.
        let read = self.read(key.layer, key.offset, bytes as u64).await;
        self.loading.borrow_mut().remove(&key);
        self.io.changed();
        Ok(self.state().cache.insert(key, table, &read?).is_some())
    }
}

/// Memory for copies that is reserved until this is dropped.
pub struct Bounce<'a> {
    env: &'a Env,
    bytes: u64,
}

impl Drop for Bounce<'_> {
    fn drop(&mut self) {
        self.env.bounce.set(self.env.bounce.get() - self.bytes);
        if self.bytes > 0 {
            self.env.io.changed();
        }
    }
}

/// The regions of the device that are written while a block commit copies the overlay.
#[derive(Default)]
pub struct Changes {
    tracked: AtomicBool,
    /// `None` unless changes are tracked.
    map: Mutex<Option<Bitmap>>,
}

impl Changes {
    /// Begins to track changes, in `map`. A write must be recorded unless it has completed before this call.
    pub fn track(&self, map: Bitmap) {
        *lock(&self.map) = Some(map);
        self.tracked.store(true, SeqCst);
    }

    pub fn stop(&self) {
        self.tracked.store(false, SeqCst);
        *lock(&self.map) = None;
    }

    /// Records that `bytes` from `position` on may have changed. Must be called after the change was made and
    /// before its request completes.
    pub fn note(&self, position: u64, bytes: u64) {
        if bytes > 0
            && self.tracked.load(SeqCst)
            && let Some(map) = &*lock(&self.map)
        {
            map.mark(position..position + bytes);
        }
    }

    /// Takes the changes so far, and continues with `empty`. Returns `None` if changes are not tracked.
    pub fn take(&self, empty: Bitmap) -> Option<Bitmap> {
        lock(&self.map).as_mut().map(|map| std::mem::replace(map, empty))
    }
}

/// An empty map for a device of `size` bytes. Fails for a device that is too large for a bitmap, more than 512 PiB.
pub fn map_for(size: u64) -> Result<Bitmap, Error> {
    let region_bytes = size.div_ceil(BITS_MAX).next_power_of_two().clamp(REGION_MIN_BYTES, GRANULARITY_MAX);
    Bitmap::new("changes", region_bytes, size, BitmapState::Recording)
}

/// The first run of changed bytes from byte `at` on.
pub fn next_changed(map: &Bitmap, mut at: u64) -> Option<Range<u64>> {
    // One extent at a time: what follows the first changed run may be long, and is not searched.
    loop {
        let extent = map.extents(at..map.size(), 1).pop()?;
        let range = at..at + extent.length;
        if extent.dirty {
            return Some(range);
        }
        at = range.end;
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    fn runs(map: &Bitmap) -> Vec<Range<u64>> {
        let (mut runs, mut at) = (Vec::new(), 0);
        while let Some(run) = next_changed(map, at) {
            at = run.end;
            runs.push(run);
        }
        runs
    }

    #[test]
    fn changes_are_reported_in_whole_regions() {
        let changes = Changes::default();
        changes.note(0, 1 << 20);
        changes.track(map_for((100 << 16) + 512).unwrap());
        let take = || changes.take(map_for((100 << 16) + 512).unwrap()).map(|map| runs(&map));
        assert_eq!(take(), Some(Vec::new()));
        for (position, bytes) in [(65535, 2), (70 << 16, 1), (63 << 16, 65 << 10), (100 << 16, 512), (9, 0)] {
            changes.note(position, bytes);
        }
        let found = take().unwrap();
        let whole = [(0, 2), (63, 65), (70, 71), (100, 101)].map(|(from, to)| from << 16..to << 16);
        assert_eq!(found[..3], whole[..3]);
        assert_eq!((found.len(), &found[3]), (4, &(100 << 16..(100 << 16) + 512)));
        assert_eq!(take(), Some(Vec::new()));
        changes.stop();
        changes.note(0, 512);
        assert_eq!(take(), None);
    }

    #[test]
    fn a_large_device_has_larger_regions() {
        for (size, granularity) in [(1 << 40, 1 << 16), (1 << 50, 1 << 25), (1 << 59, GRANULARITY_MAX)] {
            let map = map_for(size).unwrap();
            assert_eq!(map.granularity(), granularity);
            map.mark(0..size);
            assert_eq!(next_changed(&map, 0), Some(0..size));
        }
        assert!(map_for(1 << 60).is_err());
    }
}

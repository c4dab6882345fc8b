//! State and operations that the tasks of an image share.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use blkq::sync::{Mutex, MutexGuard, lock};
use blkq::{IoBuffer, Status, Wake};

use crate::image_file::ImageFile;
use crate::qcow2::tables::cache::{Key, Table};
use crate::qcow2::tables::state::State;

use super::changes::Changes;
use super::epochs::Epochs;
use super::inflate::{Inflater, Job, Place};
use super::operations::{Action, Io, Op};

/// Memory for copies and decompressed clusters at a time, in bytes.
pub const BOUNCE_MAX_BYTES: u64 = 64 << 20;

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
}

pub type Decompressed = (Place, Rc<Vec<u8>>);

pub struct Env {
    pub shared: Arc<Shared>,
    pub io: Io,
    loading: RefCell<HashSet<Key>>,
    /// Memory for copies that is reserved, in bytes.
    pub bounce: Cell<u64>,
    pub decompressed: RefCell<Option<Decompressed>>,
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
        let read = read?;
        Ok(self.state().cache.insert(key, table, &read).is_some())
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

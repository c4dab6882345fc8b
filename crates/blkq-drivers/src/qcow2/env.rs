//! The things that all tasks of an image share on one thread.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;

use blkq::sync::{Mutex, MutexGuard, lock};
use blkq::{IoBuffer, Status, Wake};

use super::cache::{Key, Table};
use super::changes::Changes;
use super::epochs::Epochs;
use super::inflate::{Compressed, Inflater, Place};
use super::io::{Io, Op};
use super::state::State;

/// Memory of all copies and decompressed clusters at a time, in bytes.
pub(super) const BOUNCE_MAX_BYTES: u64 = 64 << 20;

/// The state that the device shares with its queue.
pub(super) struct Shared {
    pub state: Mutex<State>,
    pub epochs: Arc<Epochs>,
    pub changes: Changes,
    /// Clusters that were released, and are not freed as long as this has a list: another device reads the image by
    /// tables from before.
    held: Mutex<Option<Vec<u64>>>,
}

impl Shared {
    pub fn new(state: State) -> Arc<Shared> {
        let changes = Changes::default();
        Arc::new(Shared { state: Mutex::new(state), epochs: Arc::default(), changes, held: Mutex::default() })
    }

    /// Has no cluster freed that is released from now on.
    pub fn hold(&self) {
        *lock(&self.held) = Some(Vec::new());
    }

    /// Has those that were released meanwhile freed, with the next commit.
    pub fn release_held(&self) {
        let held = lock(&self.held).take();
        lock(&self.state).writer.released.extend(held.into_iter().flatten());
    }

    /// The clusters of `released` that may be freed: all or none.
    pub fn without_held(&self, released: Vec<u64>) -> Vec<u64> {
        match &mut *lock(&self.held) {
            None => released,
            Some(held) => {
                held.extend(released);
                Vec::new()
            }
        }
    }
}

/// A cluster that was decompressed, and where it was compressed.
pub(super) type Decompressed = (Place, Rc<Vec<u8>>);

/// The state and the operations that the tasks of one thread share.
pub(super) struct Env {
    pub shared: Arc<Shared>,
    pub io: Io,
    loading: RefCell<HashSet<Key>>,
    /// Bytes that are reserved for copies.
    bounce: Cell<u64>,
    pub decompressed: RefCell<Option<Decompressed>>,
    /// Clusters that tasks decompress now.
    pub decompressing: RefCell<HashSet<Place>>,
    /// `None`: on this thread.
    inflater: Option<RefCell<Inflater>>,
    inflated: RefCell<HashMap<Place, Result<Vec<u8>, Status>>>,
}

impl Env {
    /// For tasks on a thread that may take its time.
    pub fn new(shared: Arc<Shared>) -> Rc<Env> {
        Env::with_inflater(shared, None)
    }

    /// For the tasks of a queue, which `wake` wakes.
    pub fn of_queue(shared: Arc<Shared>, wake: Arc<dyn Wake>) -> Rc<Env> {
        Env::with_inflater(shared, Some(RefCell::new(Inflater::new(wake))))
    }

    fn with_inflater(shared: Arc<Shared>, inflater: Option<RefCell<Inflater>>) -> Rc<Env> {
        Rc::new(Env {
            shared,
            io: Io::default(),
            loading: RefCell::default(),
            bounce: Cell::new(0),
            decompressed: RefCell::default(),
            decompressing: RefCell::default(),
            inflater,
            inflated: RefCell::default(),
        })
    }

    /// The content of the compressed cluster at `place`, which no other task decompresses.
    ///
    /// # Errors
    /// [`Status::Io`] for bytes that are no cluster.
    pub async fn inflate(&self, place: Place, compressed: Compressed) -> Result<Vec<u8>, Status> {
        let started = match &self.inflater {
            Some(inflater) => inflater.borrow_mut().start(place, compressed),
            None => Err(compressed),
        };
        if let Err(compressed) = started {
            return compressed.inflate();
        }
        loop {
            self.io.wait().await;
            if let Some(inflated) = self.inflated.borrow_mut().remove(&place) {
                return inflated;
            }
        }
    }

    /// Takes what was decompressed on the other thread, for the tasks that wait for it.
    pub fn take_inflated(&self) {
        let Some(inflater) = &self.inflater else { return };
        let mut any = false;
        while let Some((place, content)) = inflater.borrow().next() {
            self.inflated.borrow_mut().insert(place, content);
            any = true;
        }
        if any {
            self.io.changed();
        }
    }

    /// The state of the image, never to be kept over a wait.
    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared.state)
    }

    /// An operation that reads from a layer.
    pub fn read_op(&self, layer: u8, offset: u64) -> Op {
        let state = self.state();
        let from = &state.layers[usize::from(layer)];
        Op::read(layer, offset).aligned(from.align).of_file(from.file_bytes)
    }

    /// An operation that writes to the image itself.
    pub fn write_op(&self, offset: u64) -> Op {
        let align = self.state().layers[0].align;
        Op::write(offset).aligned(align)
    }

    /// Waits until there is memory for copies of `bytes`, of which there are [`BOUNCE_MAX_BYTES`], or more for
    /// one task alone. A task that has some reserved, or is in an epoch, must not wait for more.
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

    /// Bytes that are reserved.
    #[cfg(test)]
    #[cfg(not(model_check))]
    pub fn reserved(&self) -> u64 {
        self.bounce.get()
    }

    /// Brings a slice into the cache; returns whether there was room for it.
    ///
    /// # Errors
    /// That of reading it.
    pub async fn load(&self, key: Key, table: Table) -> Result<bool, Status> {
        if !self.loading.borrow_mut().insert(key) {
            self.io.wait().await;
            return Ok(true);
        }
        let bytes = self.state().cache.slice_bytes();
        // In an epoch, so that its cluster has no other use before the slice is in the cache.
        let op = self.read_op(key.layer, key.offset).with_buffer(IoBuffer::zeroed(bytes));
        let read = self.io.run(op.in_epoch(&self.shared.epochs)).await;
        self.loading.borrow_mut().remove(&key);
        self.io.changed();
        let read = read?;
        Ok(self.state().cache.insert(key, table, &read.buffers[0]).is_some())
    }
}

/// Memory for copies that is reserved until this is dropped.
pub(super) struct Bounce<'a> {
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

//! The RBD driver: an image in a Ceph cluster, accessed through librbd, Ceph's own library.
//!
//! - `library`: the functions of Ceph's libraries, which are loaded when they are needed.
//! - `image`: the name of an image; opens, inspects and closes an image. Its calls may block without a limit, so they run
//!   on a thread of their own, in `thread`.
//! - `queue`: the data path.

mod image;
mod library;
mod queue;

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::atomic::{AtomicBool, AtomicU64};
use blkq::{Driver, DriverQueue, Error, ErrorKind, Extent, OpenContext, QueueLimits};
use rustix::event::{EventfdFlags, eventfd};

use crate::errors::invalid;
use crate::extents::{all_data, describe};
use crate::options::{DriverOptions, check_logical_block};

pub use image::RbdSpec;
use image::{Facts, Image, ImageThread, Lock, client, reads_only};
use library::Library;
use queue::{Losses, RbdQueue, SEGMENTS_MAX, Shared};

/// Largest read or write, and largest write zeroes that must not deallocate, in bytes: the default size of an
/// object.
const REQUEST_MAX_BYTES: u64 = 4 << 20;
/// Largest discard and write zeroes in bytes.
const DISCARD_MAX_BYTES: u64 = 1 << 30;
/// The default allocation unit of an OSD, in bytes.
const PHYSICAL_BLOCK_BYTES: u32 = 4096;
/// How long a resize or a query of the sizes waits for the cluster.
const SIZE_TIMEOUT: Duration = Duration::from_secs(10);

/// Largest range of one query of extents, in bytes. Without `fast-diff`, each object in it is queried.
const EXTENTS_WINDOW_BYTES: u64 = 1 << 30;
/// How long a query of extents waits for the cluster. After that the range counts as data. The limit is not
/// [`EXTENTS_QUERY_NS`](blkq::EXTENTS_QUERY_NS): the cluster reports no part of a range, so that an image without
/// `fast-diff`, each object of which is queried, would have no holes.
const EXTENTS_TIMEOUT: Duration = Duration::from_secs(2);

/// Loads Ceph's libraries. A process calls this before it is confined, because it cannot load them
/// afterwards. Fails with [`ErrorKind::Unsupported`] if they are missing or too old.
pub fn load() -> Result<(), Error> {
    Library::get().map(|_| ())
}

/// A device backed by an image in a Ceph cluster.
pub struct Rbd {
    shared: Arc<Shared>,
    options: DriverOptions,
    read_only: bool,
    facts: Facts,
    logical_block_bytes: u32,
    /// Size of the device in bytes, a multiple of the logical block size.
    capacity: AtomicU64,
    /// An eventfd. librbd's watch makes it readable when the size of the image may have changed.
    changed: Arc<OwnedFd>,
    /// A query of extents has not been answered yet. Only one may be pending: each is a job of the image's
    /// thread, and the jobs would pile up while the cluster does not respond.
    querying: Arc<AtomicBool>,
}

impl Rbd {
    /// Opens an image. Waits at most one minute for the cluster. Fails with [`ErrorKind::Unsupported`]
    /// without Ceph's libraries, [`ErrorKind::Busy`] if another client has the exclusive lock of the image,
    /// [`ErrorKind::System`] if the cluster does not answer, and the errors that the cluster reports.
    pub fn open(spec: &RbdSpec, options: &DriverOptions) -> Result<Rbd, Error> {
        let logical_block_bytes = check_logical_block(options.logical_block_bytes.unwrap_or(512))?;
        load()?;
        let changed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::system("cannot create an eventfd", e))
            .map(Arc::new)?;
        let (image, facts) = ImageThread::open(spec, options, changed.clone())?;
        let capacity = AtomicU64::new(facts.size - facts.size % u64::from(logical_block_bytes));
        let losses = Losses::new(facts.lock == Lock::Held);
        let shared = Arc::new(Shared { spec: spec.clone(), image, losses });
        Ok(Rbd {
            shared,
            read_only: reads_only(spec, options),
            options: options.clone(),
            facts,
            logical_block_bytes,
            capacity,
            changed,
            querying: Arc::default(),
        })
    }

    /// The current size of the image, rounded down to whole logical blocks.
    fn size_now(&self) -> Result<u64, Error> {
        let changed = self.changed.clone();
        // If the cluster answers too late, the eventfd announces the change again, so that it is not missed.
        let late = move || image::notify(&changed);
        let size = self.shared.image.call(SIZE_TIMEOUT, |image| image.size(), late)?;
        Ok(size - size % u64::from(self.logical_block_bytes))
    }
}

impl Driver for Rbd {
    fn name(&self) -> &'static str {
        "rbd"
    }

    fn limits(&self) -> QueueLimits {
        let Facts { object_size, stripe_unit, stripe_count, discard_granularity, .. } = self.facts;
        let writes = !self.read_only;
        let max_bytes = |bytes: u64| if writes { bytes } else { 0 };
        let block = self.logical_block_bytes;
        // Requests are split at objects: a request within one object is a single operation of one OSD, and does not wait
        // for others.
        let chunk = u32::try_from(object_size).unwrap_or(0);
        let chunk_bytes = if stripe_count <= 1 && chunk.is_multiple_of(block) { chunk } else { 0 };
        QueueLimits {
            capacity_bytes: self.capacity.load(Relaxed),
            logical_block_bytes: block,
            physical_block_bytes: PHYSICAL_BLOCK_BYTES.max(block),
            io_opt_bytes: u32::try_from(stripe_unit.saturating_mul(stripe_count.max(1))).unwrap_or(0),
            max_request_bytes: REQUEST_MAX_BYTES as u32,
            max_segments: SEGMENTS_MAX,
            chunk_bytes,
            max_discard_bytes: max_bytes(DISCARD_MAX_BYTES),
            discard_granularity: discard_granularity.max(block),
            max_write_zeroes_bytes: max_bytes(DISCARD_MAX_BYTES),
            max_write_zeroes_no_unmap_bytes: max_bytes(REQUEST_MAX_BYTES),
            // librbd has a write-back cache, and completes writes that are only in this cache.
            write_cache: writes,
            read_only: !writes,
            ..QueueLimits::default()
        }
    }

    fn uses_ring(&self) -> bool {
        true
    }

    /// One queue: librbd delivers the completions of an image to any thread that fetches them.
    fn queues_max(&self) -> usize {
        1
    }

    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(RbdQueue::open(self.shared.clone(), cx.tags, cx.ring)?))
    }

    /// If the cluster does not answer in time, the range is reported as data, which is always correct.
    fn extents(&self, range: Range<u64>, max: usize) -> Result<Vec<Extent>, Error> {
        let window = range.start..range.end.min(range.start.saturating_add(EXTENTS_WINDOW_BYTES));
        if self.querying.swap(true, Relaxed) {
            // The previous query has not been answered.
            return Ok(all_data(&range));
        }
        let (asked, querying) = (window.clone(), self.querying.clone());
        let query = move |image: &Image| {
            let allocated = image.allocated(asked);
            querying.store(false, Relaxed);
            allocated
        };
        match self.shared.image.call(EXTENTS_TIMEOUT, query, || {}) {
            Ok(allocated) => Ok(describe(window, allocated, max)),
            Err(_) => Ok(all_data(&range)),
        }
    }

    fn prepare_resize(&self, bytes: Option<u64>) -> Result<u64, Error> {
        let now = self.size_now()?;
        let bytes = bytes.unwrap_or(now);
        if bytes <= now && bytes.is_multiple_of(u64::from(self.logical_block_bytes)) {
            return Ok(bytes);
        }
        Err(invalid(format!(
            "rbd:{} has {now} bytes; to change the size of the device, resize the image with `rbd resize`",
            self.shared.spec
        )))
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), Error> {
        self.capacity.store(self.prepare_resize(bytes)?, Relaxed);
        Ok(())
    }

    fn size_event(&self) -> Option<BorrowedFd<'_>> {
        Some(self.changed.as_fd())
    }

    fn owner(&self) -> Option<String> {
        self.facts.owner.clone()
    }

    unsafe fn release(&self) -> Result<(), Error> {
        // SAFETY: the caller promises that no request is in flight or will follow, so the queue calls no function of
        // the image.
        if unsafe { self.shared.image.close() } {
            return Ok(());
        }
        let message = "the cluster did not answer in time, so the image is still open";
        Err(Error::new(ErrorKind::System, message))
    }

    fn warnings(&self) -> Vec<String> {
        let is_cached = self.options.write_through && !self.read_only && self.facts.cached == Some(true);
        let settings = [
            (
                self.facts.lock == Lock::Missing,
                "the feature exclusive-lock is not enabled on the image, so other clients can write to it at the same time; run `rbd feature enable POOL/IMAGE exclusive-lock` and attach again",
            ),
            (
                is_cached,
                "settings in the cluster enable librbd's cache, so a killed daemon loses writes that it has acknowledged; run `rbd config image set POOL/IMAGE rbd_cache false` and attach again",
            ),
        ];
        let settings = settings.into_iter().filter(|(is, _)| *is).map(|(_, warning)| warning);
        self.shared.losses.describe().chain(settings).map(str::to_owned).collect()
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let Facts { object_size, stripe_unit, stripe_count, lock, cached, .. } = &self.facts;
        let spec = &self.shared.spec;
        let lock = match lock {
            Lock::None => "not taken",
            Lock::Missing => "not enabled on the image",
            Lock::Held if self.shared.losses.describe().next().is_some() => "lost",
            Lock::Held => "held",
        };
        let cached = match cached {
            Some(true) => "on",
            Some(false) => "off",
            None => "unknown",
        };
        let facts = [
            ("pool", Some(spec.pool.clone())),
            ("namespace", spec.namespace.clone()),
            ("rbd-image", Some(spec.image.clone())),
            ("snapshot", spec.snapshot.clone()),
            ("ceph-user", Some(client(&self.options))),
            ("ceph-client", self.facts.owner.clone()),
            ("object-size", Some(object_size.to_string())),
            ("stripe-unit", Some(stripe_unit.to_string())),
            ("stripe-count", Some(stripe_count.to_string())),
            ("exclusive-lock", Some(lock.to_owned())),
            ("rbd-cache", Some(cached.to_owned())),
            ("librbd", Some(self.shared.image.submission.library.version())),
        ];
        facts.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests;

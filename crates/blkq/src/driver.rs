use std::any::Any;
use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use io_uring::{squeue, types};

use crate::bitmap::BitmapStore;
use crate::buffer::{KernelPages, Segment};
use crate::clock::Clock;
use crate::error::{Error, ErrorKind, IoResult};
use crate::kick::Wake;
use crate::limits::{QUEUES_MAX, QueueLimits};
use crate::request::Request;
use crate::ring::{Cqe, FileSlot, Registrar, Ring, Token};
use crate::slab::InFlight;
use crate::tags::Tag;

/// Time limit of a query of extents, in nanoseconds: see [`Driver::extents`].
pub const EXTENTS_QUERY_NS: u64 = 100_000_000;

/// A device: its size and limits, and how its queues are opened.
#[allow(unused_variables, reason = "parameters of default methods")]
pub trait Driver: Send + Sync {
    /// The driver's name: `loop`, `null`, `ram`, `rbd`.
    fn name(&self) -> &'static str;

    /// The current limits of the device. Read when the disk is built, and again after [`Driver::set`],
    /// [`Driver::resize`] and [`DriverContext::limits_changed`].
    fn limits(&self) -> QueueLimits;

    /// Whether the queues of the device need an io_uring.
    fn uses_ring(&self) -> bool {
        false
    }

    /// The largest number of queues that the device supports, at least 1.
    fn queues_max(&self) -> usize {
        QUEUES_MAX
    }

    /// Prepares for `queues` queues, for example opens a file for each. Called before these queues are opened, on
    /// the thread that builds the disk or exchanges its driver. The threads of the queues may not be permitted to
    /// open files. The default does nothing. If this fails, the disk is not built, or keeps its driver.
    fn prepare_queues(&self, queues: usize) -> Result<(), Error> {
        Ok(())
    }

    /// Opens a queue on the thread that will use it. If this fails, the disk is not opened.
    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error>;

    /// The state (data, zero, hole) of the bytes in `range`: at most `max` extents, from the beginning of the
    /// range. May block; never called on an engine thread. After [`EXTENTS_QUERY_NS`] the query should return
    /// the extents found until then, at least one, because other clients and a forced stop wait for it. The
    /// default reports data. Fails with the I/O error of the device.
    fn extents(&self, range: Range<u64>, max: usize) -> Result<Vec<Extent>, Error> {
        Ok(vec![Extent { length: range.end - range.start, hole: false, zero: false }])
    }

    /// How deep in the backing chain the bytes of `range` are allocated: at most `max` runs, from the
    /// beginning of the range. May block, with the time limit of [`Driver::extents`]; never called on an engine
    /// thread. The default is depth 1, for devices without a backing file. Fails with the I/O error of the
    /// device.
    fn allocation_depths(&self, range: Range<u64>, max: usize) -> Result<Vec<DepthExtent>, Error> {
        Ok(vec![DepthExtent { length: range.end - range.start, depth: 1 }])
    }

    /// Prepares a change of a driver setting while I/O continues, and returns whether [`Driver::set`] needs a
    /// freeze. Invalid values are rejected here, and work that takes long is done here as far as possible, so
    /// that the freeze is short. The default has no settings.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for a setting of another driver
    /// ([`unknown_to`](trait@DriverSetting#method.unknown_to)), [`ErrorKind::Invalid`] or [`ErrorKind::Unsupported`]
    /// for a value that the device cannot have.
    fn prepare_set(&self, setting: &dyn DriverSetting) -> Result<Change, Error> {
        Err(setting.unknown_to(self.name()))
    }

    /// Changes a driver setting after [`Driver::prepare_set`]. After a change under a freeze,
    /// [`DriverQueue::reload`] is called for each queue, and the limits must be valid. Fails as
    /// [`Driver::prepare_set`] does, or if the change itself fails.
    fn set(&self, setting: &dyn DriverSetting) -> Result<(), Error> {
        self.prepare_set(setting).map(|_| ())
    }

    /// Prepares [`Driver::set_read_only`], as [`Driver::prepare_set`] does for settings. Fails with the
    /// reason why the device cannot be changed.
    fn prepare_read_only(&self, read_only: bool) -> Result<(), Error> {
        Ok(())
    }

    /// Makes the device read-only or writable, under a freeze. The disk itself rejects writes; the driver
    /// only does what else is needed, such as opening its file in another mode or changing its locks. The
    /// default does nothing. Fails with the reason why the device cannot be changed.
    fn set_read_only(&self, read_only: bool) -> Result<(), Error> {
        Ok(())
    }

    /// The size in bytes that [`Driver::resize`] would give the device now. Changes nothing. I/O continues
    /// meanwhile. Fails with [`ErrorKind::Unsupported`] if the driver cannot resize, and
    /// [`ErrorKind::Invalid`] if the device cannot have this size.
    fn prepare_resize(&self, bytes: Option<u64>) -> Result<u64, Error> {
        Err(Error::new(ErrorKind::Unsupported, format!("a {} device cannot be resized", self.name())))
    }

    /// Resizes the device to that number of bytes, or, for `None`, to the current size of the backing store.
    /// Called under a freeze. Fails as [`Driver::prepare_resize`] does, or if the change itself fails.
    fn resize(&self, bytes: Option<u64>) -> Result<(), Error> {
        self.prepare_resize(bytes).map(|_| ())
    }

    /// A descriptor that becomes readable when the size of the backing store may have changed. The owner of
    /// the disk must drain it and call [`Disk::resize`](crate::Disk::resize). The default is `None`.
    fn size_event(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The name under which this process holds the store's lock for a single writer, if the store has such a
    /// lock. The next process passes the name when it opens the store, and then need not wait until the lock
    /// of its predecessor expires. The default is `None`.
    fn owner(&self) -> Option<String> {
        None
    }

    /// Whether completed writes are lost if the process is killed: all of them, or those that were not
    /// flushed. Clients that reconnect to the next process would not notice the loss. The default is false.
    fn is_lost_with_process(&self) -> bool {
        false
    }

    /// Releases locks that keep other processes from opening the backing store. Called by
    /// [`Disk::release`](crate::Disk::release). The default does nothing. Fails with the reason why a lock
    /// cannot be released.
    ///
    /// # Safety
    /// The disk must be frozen and stay frozen: its queues have no request and get none.
    unsafe fn release(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Where dirty bitmaps are saved with the image. The default has no such place.
    fn bitmap_store(&self) -> Option<&dyn BitmapStore> {
        None
    }

    /// Warnings for the user about the current settings of the device, one line each.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }

    /// Properties of the device for its users, as names and values in order, such as `direct-io`.
    fn describe(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }
}

impl dyn Driver + '_ {
    /// The device's store for dirty bitmaps. Fails with [`ErrorKind::Unsupported`] if the device has none.
    pub fn require_bitmap_store(&self) -> Result<&dyn BitmapStore, Error> {
        self.bitmap_store().ok_or_else(|| {
            let message =
                format!("a {} device has no place for bitmaps: it has no image in a file", self.name());
            Error::new(ErrorKind::Unsupported, message)
        })
    }
}

/// The arguments with which a driver opens a queue.
#[non_exhaustive]
pub struct OpenContext<'a> {
    /// Index of the queue, from 0 to one below the disk's number of queues.
    pub index: u16,
    /// Number of tags of the queue. Each tag is below it.
    pub tags: usize,
    /// Registers files with the queue's ring. `Some` if [`Driver::uses_ring`].
    pub ring: Option<Registrar<'a>>,
    /// Lets any thread wake the owner of the queue, which then calls [`DriverQueue::poll`].
    pub wake: Arc<dyn Wake>,
}

/// A setting of a driver with its new value. The driver defines the type, and recognises it by
/// [`downcast_ref`](trait@DriverSetting#method.downcast_ref).
///
/// ```
/// use blkq::DriverSetting;
///
/// #[derive(Clone, Copy, Debug)]
/// enum CacheSetting {
///     WriteBack(bool),
/// }
///
/// impl DriverSetting for CacheSetting {
///     fn name(&self) -> &'static str {
///         match self {
///             CacheSetting::WriteBack(_) => "write-back",
///         }
///     }
/// }
///
/// let setting: &dyn DriverSetting = &CacheSetting::WriteBack(true);
/// assert!(matches!(setting.downcast_ref(), Some(CacheSetting::WriteBack(true))));
/// ```
pub trait DriverSetting: Any + Debug + Send + Sync {
    /// The setting's name without its value: `direct-io`.
    fn name(&self) -> &'static str;
}

impl dyn DriverSetting {
    /// The setting, if it is of type `T`. Otherwise it belongs to another driver.
    pub fn downcast_ref<T: DriverSetting>(&self) -> Option<&T> {
        (self as &dyn Any).downcast_ref()
    }

    /// The error, of kind [`ErrorKind::NotFound`], with which the driver named `driver` rejects a setting
    /// that it does not have.
    pub fn unknown_to(&self, driver: &str) -> Error {
        Error::new(ErrorKind::NotFound, format!("the {driver} driver has no setting {}", self.name()))
    }
}

/// Whether a change of a driver setting needs a freeze.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// The setting changes while requests are in flight.
    Live,
    /// The setting changes while the disk is frozen.
    Frozen,
}

/// A range of bytes in one state, as in NBD's block status and SEEK_HOLE.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Length of the range in bytes.
    pub length: u64,
    /// The range is not allocated.
    pub hole: bool,
    /// The range reads as zeroes.
    pub zero: bool,
}

/// A range of bytes that is allocated in the same image of a backing chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DepthExtent {
    /// Length of the range in bytes.
    pub length: u64,
    /// 1 for the image itself, 2 for its backing file, and so on; 0 if no image of the chain maps the range.
    pub depth: u32,
}

/// Why a driver did not take a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Busy {
    /// The device has no room until one of its own requests completes (BLK_STS_DEV_RESOURCE).
    UntilCompletion,
    /// A resource outside of the device is exhausted. The queue tries again after 3 ms (BLK_STS_RESOURCE).
    Resource,
}

/// How many of the offered requests a driver took.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taken {
    /// All of the offered requests.
    All,
    /// The first N requests. The others are requeued in order.
    First(usize, Busy),
}

/// One queue of a device, used by one thread.
///
/// A queue completes each request that it takes exactly once through [`DriverContext::complete`], immediately
/// or later, with success only if all of its bytes were transferred. A driver resubmits the rest of a short
/// transfer itself.
///
/// # Safety
/// When a request completes, its memory is returned to the submitter. Therefore an implementation completes
/// only requests that it has taken and not completed, and each only when neither the kernel nor another
/// thread uses its memory. A wrapper of another queue passes on exactly what it was passed: its own context,
/// requests that it was offered, and each completion of the ring once, to the queue that submitted it.
#[allow(unused_variables, reason = "parameters of default methods")]
pub unsafe trait DriverQueue {
    /// Starts requests in the order of `tags`. More calls may follow before [`DriverQueue::commit`].
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken;

    /// Issues what the driver has collected since the last call: the batch is complete (`commit_rqs`).
    fn commit(&mut self, cx: &mut DriverContext<'_>) {}

    /// Handles the completion of a submission of this queue.
    fn complete_cqe(&mut self, cx: &mut DriverContext<'_>, cqe: Cqe) {}

    /// Polls for completions that arrive without the ring, such as those of timers or other threads. Called
    /// once in each turn in which the driver has requests or another thread has woken the queue
    /// ([`OpenContext::wake`]).
    fn poll(&mut self, cx: &mut DriverContext<'_>) {}

    /// The state of `request`, which the driver has under `tag`. Reported to users if the request hangs.
    fn state(&self, tag: Tag, request: &Request) -> Cow<'static, str> {
        Cow::Borrowed("in the driver")
    }

    /// The latest time at which [`DriverQueue::poll`] must be called, in nanoseconds of the monotonic clock.
    /// `None`: the driver has no deadline.
    fn deadline_ns(&self) -> Option<u64> {
        None
    }

    /// Settings, size or backing store have changed. No request is in flight.
    fn reload(&mut self, cx: &mut DriverContext<'_>) {}

    /// Unregisters what the queue has registered with the ring, which may outlive the queue. Called before
    /// the queue is dropped, while no request is in flight.
    fn close(&mut self, cx: &mut DriverContext<'_>) {}
}

/// The parts of the block layer that a driver queue may use during one call.
pub struct DriverContext<'a> {
    pub(crate) in_flight: &'a mut InFlight,
    pub(crate) completed: &'a mut Vec<(Tag, IoResult)>,
    pub(crate) clock: &'a mut Clock,
    pub(crate) ring: Option<&'a mut Ring>,
    pub(crate) owner: u16,
    pub(crate) early_submission: bool,
    pub(crate) limits_changed: &'a mut bool,
}

impl DriverContext<'_> {
    /// The request with this tag.
    pub fn request(&self, tag: Tag) -> &Request {
        &self.in_flight[tag]
    }

    /// Two words of the request for the driver's own use (the kernel's `pdu`).
    pub fn pdu(&mut self, tag: Tag) -> &mut [u64; 2] {
        &mut self.in_flight[tag].pdu
    }

    /// The memory of a request whose data only the kernel can access. This is the request's whole memory,
    /// because such a request never merges. Only drivers that declare [`QueueLimits::kernel_pages`] get such
    /// requests.
    #[inline]
    pub fn kernel_pages(&self, tag: Tag) -> Option<KernelPages> {
        self.in_flight.bios_of(tag).next().and_then(|bio| self.in_flight.kernel_pages(bio))
    }

    /// Calls `each` with every memory segment of the request, in the order of its bytes. Memory that
    /// [`DriverContext::kernel_pages`] returns is not included.
    pub fn for_each_segment(&self, tag: Tag, each: impl FnMut(Segment)) {
        self.in_flight.for_each_segment(tag, each);
    }

    /// Completes a request that the driver has taken. The submitter is notified after the driver has returned
    /// to the block layer.
    pub fn complete(&mut self, tag: Tag, result: IoResult) {
        self.completed.push((tag, result));
    }

    /// Completes all of these requests successfully.
    pub fn complete_all(&mut self, tags: &[Tag]) {
        self.completed.extend(tags.iter().map(|tag| (*tag, Ok(()))));
    }

    /// The monotonic time in nanoseconds, read or cached according to [`ClockMode`](crate::ClockMode).
    pub fn now_ns(&mut self) -> u64 {
        self.clock.now_ns()
    }

    /// The index of the registered buffer that contains `segment`, for READ_FIXED and WRITE_FIXED. `None` if
    /// the queue's ring has no such buffer.
    pub fn registered_buffer(&self, segment: &Segment) -> Option<u16> {
        self.ring.as_ref()?.registered_buffer(segment)
    }

    /// Submits `entry` to the ring; panics if [`Driver::uses_ring`] is false. Its completion is passed to
    /// [`DriverQueue::complete_cqe`] with the low 48 bits of `payload`.
    ///
    /// # Safety
    /// Memory and descriptors of the entry must stay valid until the completion. Registered files and buffers
    /// in the entry must be registered with the ring of this queue, by this queue.
    #[inline]
    pub unsafe fn push(&mut self, entry: squeue::Entry, payload: u64) {
        let token = Token::new(self.owner, payload);
        let ring = self.ring.as_mut().expect("a driver that pushes declares uses_ring");
        // SAFETY: the caller's promise.
        unsafe { if self.early_submission { ring.push_early(entry, token) } else { ring.push(entry, token) } }
    }

    /// The registrar of files with the queue's ring. `None` if [`Driver::uses_ring`] is false.
    pub fn registrar(&mut self) -> Option<Registrar<'_>> {
        self.ring.as_deref_mut().map(Registrar::new)
    }

    /// The registered file in the form that an entry needs. Panics if this queue's ring has no such file.
    pub fn file(&self, slot: &FileSlot) -> types::Fixed {
        self.ring.as_ref().expect("a driver with a registered file declares uses_ring").file(slot)
    }

    /// The number by which the ring knows the queue.
    #[cfg(simulation)]
    pub fn owner(&self) -> u16 {
        self.owner
    }

    /// Lets the disk read [`Driver::limits`] again, because an operation has turned out to be unsupported.
    /// Only capabilities may be lost this way; the capacity must not change. If [`QueueLimits::fua`] is lost,
    /// a write with FUA that the driver has taken may complete without being durable: the queue sends a flush
    /// after it.
    pub fn limits_changed(&mut self) {
        *self.limits_changed = true;
    }
}

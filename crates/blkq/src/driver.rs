//! The parts of a driver: a device ([`Driver`], shared by all threads) and its queues
//! ([`DriverQueue`], each used by one thread only). `drivers/null.rs` is the one to copy.

use std::any::Any;
use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use io_uring::{squeue, types};

use crate::buffer::{IoBuffer, KernelPages, Segment};
use crate::clock::Clock;
use crate::error::{Error, ErrorKind, IoResult};
use crate::kick::Wake;
use crate::limits::{QUEUES_MAX, QueueLimits};
use crate::request::NIL;
use crate::request::Request;
use crate::ring::{Cqe, FileSlot, Registrar, Ring, Token};
use crate::slab::BioSlab;
use crate::tags::Tag;

/// A device: what it is, how large, what it can do, and how its queues are opened.
pub trait Driver: Any + Send + Sync {
    /// The driver's name: `loop`, `null`, `ram`, `rbd`.
    fn name(&self) -> &'static str;

    /// The device's present limits. Read when the disk is made, and again after
    /// [`Driver::set`], [`Driver::resize`] and a driver's own [`DriverContext::limits_changed`].
    fn limits(&self) -> QueueLimits;

    /// Whether its queues need an io_uring.
    fn uses_ring(&self) -> bool {
        false
    }

    /// How many queues it can have, 1 or more.
    fn queues_max(&self) -> usize {
        QUEUES_MAX
    }

    /// Opens a queue on the thread that will use it.
    ///
    /// # Errors
    /// Whatever keeps the queue from working; the disk then is not opened.
    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error>;

    /// The state of the bytes of `range` (data, zero, hole), up to `max` extents from its
    /// beginning. May block; never called on an engine thread. The default reports data.
    ///
    /// # Errors
    /// The device's error.
    fn extents(&self, range: Range<u64>, max: usize) -> Result<Vec<Extent>, Error> {
        let _ = max;
        Ok(vec![Extent { length: range.end - range.start, hole: false, zero: false }])
    }

    /// How deep in the chain of images the bytes of `range` are allocated, up to `max` runs from its beginning. May
    /// block; never called on an engine thread. The default, of a device without images behind it, is 1.
    ///
    /// # Errors
    /// The device's error.
    fn allocation_depths(&self, range: Range<u64>, max: usize) -> Result<Vec<DepthExtent>, Error> {
        let _ = max;
        Ok(vec![DepthExtent { length: range.end - range.start, depth: 1 }])
    }

    /// Prepares a change of a setting of the driver's own, and returns how [`Driver::set`] is to be
    /// called. I/O runs meanwhile: what is wrong with the setting is found here, and what takes
    /// long is done here as far as it can be, so that a freeze is short. The default has no settings.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for a setting of another driver
    /// ([`unknown_to`](trait@DriverSetting#method.unknown_to)), [`ErrorKind::Invalid`] or [`ErrorKind::Unsupported`]
    /// for a value that the device cannot have.
    fn prepare_set(&self, setting: &dyn DriverSetting) -> Result<Change, Error> {
        Err(setting.unknown_to(self.name()))
    }

    /// Changes a setting of the driver's own, after [`Driver::prepare_set`]. After a change under
    /// a freeze each queue is called through [`DriverQueue::reload`], and the limits must be valid.
    ///
    /// # Errors
    /// As [`Driver::prepare_set`], and what keeps it from being changed.
    fn set(&self, setting: &dyn DriverSetting) -> Result<(), Error> {
        self.prepare_set(setting).map(|_| ())
    }

    /// Prepares [`Driver::set_read_only`], as [`Driver::prepare_set`] does for other changes.
    ///
    /// # Errors
    /// Whatever keeps it from being changed.
    fn prepare_read_only(&self, read_only: bool) -> Result<(), Error> {
        let _ = read_only;
        Ok(())
    }

    /// Changes whether the device is written to, under a freeze. It is the disk that refuses the
    /// writes: a driver does here what there is to do besides, such as how its file is open, and its
    /// locks. The default does nothing.
    ///
    /// # Errors
    /// Whatever keeps it from being changed.
    fn set_read_only(&self, read_only: bool) -> Result<(), Error> {
        let _ = read_only;
        Ok(())
    }

    /// The size in bytes that [`Driver::resize`] would give the device now. Changes nothing; I/O goes
    /// on meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] unless the driver can; [`ErrorKind::Invalid`] for a size that it
    /// cannot have.
    fn prepare_resize(&self, bytes: Option<u64>) -> Result<u64, Error> {
        let _ = bytes;
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("a {} device keeps the size that it was opened with", self.name()),
        ))
    }

    /// Takes over a new size: `Some` asks for that many bytes, `None` for what the
    /// backing store now has. Called while the disk is frozen.
    ///
    /// # Errors
    /// As [`Driver::prepare_resize`], and what keeps it from being changed.
    fn resize(&self, bytes: Option<u64>) -> Result<(), Error> {
        self.prepare_resize(bytes).map(|_| ())
    }

    /// Readable when the backing store may have changed its size by itself. The owner of the disk empties it,
    /// and has [`Disk::resize`](crate::Disk::resize) take the size over. The default has none.
    fn size_event(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The name by which the backing store knows this process as the one that may write, if it keeps others away: the
    /// next process that opens it names its predecessor, and need not wait until that counts as dead. The default has
    /// none.
    fn owner(&self) -> Option<String> {
        None
    }

    /// Whether a process that is killed takes with it what completed writes changed: all of it, or what was not
    /// flushed. Clients that go on with the next process do not notice. The default loses nothing.
    fn is_lost_with_process(&self) -> bool {
        false
    }

    /// Closes what keeps other processes from opening the backing store. Called by
    /// [`Disk::release`](crate::Disk::release). The default does nothing.
    ///
    /// # Errors
    /// Whatever keeps it from being closed.
    ///
    /// # Safety
    /// The disk is frozen, and stays so: its queues have no request and get none.
    unsafe fn release(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Warnings for the user about the device's present settings; each one line.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }

    /// Facts for `show`, in order: name and value (`direct-io`, `backing-file`, ...).
    fn describe(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }
}

/// The arguments with which a driver opens a queue.
#[non_exhaustive]
pub struct OpenContext<'a> {
    /// The queue's number: 0 to one below the disk's number of queues.
    pub index: u16,
    /// How many requests the queue has at most: their tags are below that.
    pub tags: usize,
    /// Registers files with the queue's ring; present if [`Driver::uses_ring`].
    pub ring: Option<Registrar<'a>>,
    /// Through this any thread can have an engine's queue polled.
    pub wake: Arc<dyn Wake>,
}

/// A setting of a driver's own, with its new value: of a type that the driver defines, and finds
/// again by [`downcast_ref`](trait@DriverSetting#method.downcast_ref).
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
    /// The setting's name, without its value: `direct-io`.
    fn name(&self) -> &'static str;
}

impl dyn DriverSetting {
    /// The setting, if it is of type `T`: else it belongs to another driver.
    pub fn downcast_ref<T: DriverSetting>(&self) -> Option<&T> {
        (self as &dyn Any).downcast_ref()
    }

    /// The error, of kind [`ErrorKind::NotFound`], with which a driver called `driver` rejects a setting
    /// that it does not have.
    pub fn unknown_to(&self, driver: &str) -> Error {
        Error::new(ErrorKind::NotFound, format!("the {driver} driver has no setting {}", self.name()))
    }
}

/// How a setting of a driver is changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// While requests are in flight.
    Live,
    /// While the disk is frozen.
    Frozen,
}

/// A run of bytes in one state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Length in bytes.
    pub length: u64,
    /// Not allocated.
    pub hole: bool,
    /// Reads as zeroes.
    pub zero: bool,
}

/// A run of bytes that the same image of a chain has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DepthExtent {
    /// Length in bytes.
    pub length: u64,
    /// 1 for the image itself, 2 for the one behind it, and so on; 0 if none of them has it.
    pub depth: u32,
}

/// Why a driver did not take a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Busy {
    /// A resource of the driver ran out; one of its own completions will make room
    /// (BLK_STS_DEV_RESOURCE).
    UntilCompletion,
    /// Something outside ran out; the layer tries again after 3 ms (BLK_STS_RESOURCE).
    Resource,
}

/// How many of the requests offered a driver took.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taken {
    /// All of them.
    All,
    /// The first so many; the rest are requeued, in order.
    First(usize, Busy),
}

/// One queue of a device, used by one thread.
///
/// Every request it takes it completes exactly once through [`DriverContext::complete`],
/// at once or later, fully or with an error: a driver resubmits short transfers itself.
///
/// # Safety
/// The memory of a request is returned to its submitter when the request completes. An
/// implementation therefore completes only requests that it took and has not completed, and each
/// only when neither the kernel nor another thread uses its memory any more. If it wraps another
/// queue, it passes on what it was passed itself: its own context, requests that it was offered,
/// and each completion of the ring once, to the queue that submitted it.
pub unsafe trait DriverQueue {
    /// Starts `tags`, in order. More may follow before [`DriverQueue::commit`].
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken;

    /// The batch is over: what was put aside for it is issued now.
    fn commit(&mut self, cx: &mut DriverContext<'_>) {
        let _ = cx;
    }

    /// A submission of this queue completed.
    fn complete_cqe(&mut self, cx: &mut DriverContext<'_>, cqe: Cqe) {
        let _ = (cx, cqe);
    }

    /// Polls for completions that no ring announces: timers, hand-overs of other threads. Once per turn in
    /// which the driver has requests, or another thread woke the queue ([`OpenContext::wake`]).
    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        let _ = cx;
    }

    /// The progress of `request`, which the driver has under `tag`: reported to
    /// people when it is in flight for too long.
    fn state(&self, tag: Tag, request: &Request) -> Cow<'static, str> {
        let _ = (tag, request);
        Cow::Borrowed("in the driver")
    }

    /// When [`DriverQueue::poll`] wants to be called at the latest, in nanoseconds of
    /// the monotonic clock; `None` without requests.
    fn deadline_ns(&self) -> Option<u64> {
        None
    }

    /// Settings, size or backing changed; no request is in flight.
    fn reload(&mut self, cx: &mut DriverContext<'_>) {
        let _ = cx;
    }

    /// The queue is about to be dropped; no request is in flight. It unregisters here what
    /// it registered with the ring, which may live on.
    fn close(&mut self, cx: &mut DriverContext<'_>) {
        let _ = cx;
    }
}

/// The block layer as a driver's queue sees it.
pub struct DriverContext<'a> {
    pub(crate) requests: &'a mut [Request],
    pub(crate) bios: &'a BioSlab,
    pub(crate) zeroes: &'a IoBuffer,
    pub(crate) completed: &'a mut Vec<(Tag, IoResult)>,
    pub(crate) clock: &'a mut Clock,
    pub(crate) ring: Option<&'a mut Ring>,
    pub(crate) owner: u16,
    /// [`Settings::early_submission`](crate::Settings::early_submission).
    pub(crate) early_submission: bool,
    pub(crate) limits_changed: &'a mut bool,
}

impl DriverContext<'_> {
    /// The request with this tag.
    #[inline]
    pub fn request(&self, tag: Tag) -> &Request {
        &self.requests[tag.index()]
    }

    /// The driver's own words of the request.
    #[inline]
    pub fn pdu(&mut self, tag: Tag) -> &mut [u64; 2] {
        &mut self.requests[tag.index()].pdu
    }

    /// The memory of a request whose data no thread reaches: all of it, for such a request is
    /// never merged. A driver meets one only if it declares
    /// [`QueueLimits::kernel_pages`].
    #[inline]
    pub fn kernel_pages(&self, tag: Tag) -> Option<KernelPages> {
        match self.requests[tag.index()].first_bio {
            NIL => None,
            bio => self.bios.kernel_pages(bio),
        }
    }

    /// Calls `each` with every piece of memory of the request, in the order of its bytes; with
    /// none of [`DriverContext::kernel_pages`].
    #[inline]
    pub fn for_each_segment(&self, tag: Tag, mut each: impl FnMut(Segment)) {
        let request = &self.requests[tag.index()];
        if request.is_plain() {
            return self.bios.plain_segment(request).into_iter().for_each(each);
        }
        let mut bio = request.first_bio;
        while bio != NIL {
            self.bios.for_each_segment(bio, self.zeroes, &mut each);
            bio = self.bios[bio].next;
        }
    }

    /// Completes a request that the driver took. It completes for its submitter when the driver
    /// has returned to the block layer.
    #[inline]
    pub fn complete(&mut self, tag: Tag, result: IoResult) {
        self.completed.push((tag, result));
    }

    /// Completes all of these without an error.
    #[inline]
    pub fn complete_all(&mut self, tags: &[Tag]) {
        self.completed.extend(tags.iter().map(|tag| (*tag, Ok(()))));
    }

    /// Nanoseconds of the monotonic clock, read anew or cached as the queue is set to.
    #[inline]
    pub fn now_ns(&mut self) -> u64 {
        self.clock.now_ns()
    }

    /// The place of the registered buffer that `segment` lies in, for READ_FIXED and WRITE_FIXED;
    /// none if the queue's ring has none.
    #[inline]
    pub fn registered_buffer(&self, segment: &Segment) -> Option<u16> {
        self.ring.as_ref()?.registered_buffer(segment)
    }

    /// Submits `entry` to the ring; its completion comes to
    /// [`DriverQueue::complete_cqe`] with the low 48 bits of `payload`.
    ///
    /// # Safety
    /// Memory and descriptors of the entry must stay valid until then. Registered files and
    /// buffers that it names must be registered with this queue's ring, for this queue.
    ///
    /// # Panics
    /// If the driver did not declare that it uses a ring.
    #[inline]
    pub unsafe fn push(&mut self, entry: squeue::Entry, payload: u64) {
        let token = Token::new(self.owner, payload);
        let ring = self.ring.as_mut().expect("a driver that pushes declares uses_ring");
        // SAFETY: the caller's promise.
        unsafe { if self.early_submission { ring.push_early(entry, token) } else { ring.push(entry, token) } }
    }

    /// The registrar of files with the queue's ring; `None` if the driver did not declare that it uses one.
    pub fn registrar(&mut self) -> Option<Registrar<'_>> {
        self.ring.as_deref_mut().map(Registrar::new)
    }

    /// A registered file, to be named in an entry.
    ///
    /// # Panics
    /// If it is not registered with the queue's ring.
    #[inline]
    pub fn file(&self, slot: &FileSlot) -> types::Fixed {
        self.ring.as_ref().expect("a driver with a registered file declares uses_ring").file(slot)
    }

    /// Has the disk read [`Driver::limits`] again: an operation turned out not to
    /// be supported. Only capabilities may shrink this way, never the capacity. A write with FUA that the driver has
    /// taken may complete without being durable if [`QueueLimits::fua`] is lost: the layer sends a flush after it.
    pub fn limits_changed(&mut self) {
        *self.limits_changed = true;
    }
}

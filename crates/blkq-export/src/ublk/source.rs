//! Serves a queue of a device on an engine, or every nth tag of the queue if several engines share it. One
//! turn of the engine takes all requests that have arrived, submits them under one plug, and commits them as
//! they complete. A turn makes one io_uring_enter call.
//!
//! While the command of a tag is in flight, the tag belongs to the kernel. Its completion hands over a
//! request, and the next command commits that request. With [`CopyMode::Kernel`], the kernel accesses the
//! tag's buffer only while the command is in flight, on the thread that serves the tag, inside
//! io_uring_enter. With [`CopyMode::None`], the kernel registers the pages of the request in the ring's
//! buffer table before it completes the command, and unregisters them at the commit.

#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use blkq::trace::TraceClient;
use blkq::words::MappedWords;
use blkq::{
    Bio, BioFlags, Completion, Cqe, Data, Error, ErrorKind, FileSlot, IoBuffer, KernelPages, Operation,
    Sector, Source, SourceContext,
};
use io_uring::{opcode, types};
use rustix::mm::ProtFlags;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::buffers::BufferPool;
use crate::client_kind;
use crate::mapping::page_bytes;
use crate::reports::signal;
use crate::submissions::Submissions;

use super::abi::{self, IoCommand, IoDescriptor, QUEUE_DEPTH_MAX};
use super::copy::CopyMode;

/// Interval of the check for idleness, which releases the memory of the buffers.
static IDLE_INTERVAL: types::Timespec = types::Timespec::new().sec(1);
/// Token payloads of the interval's timeout, and of its cancellation. Payloads of slots are smaller.
const IDLE: u64 = 1 << 16;
const CANCELLED: u64 = IDLE + 1;
/// With [`CopyMode::Kernel`]: the bytes of a tag's buffer that are registered with the ring, so that small
/// direct I/O need not pin pages. Registered memory is locked: 512 KiB for 128 tags.
const FRONT_BYTES: u32 = 4096;
/// Flag of a token payload: the submission copies the data of the slot's request.
const COPY: u64 = 1 << 17;

const DESCRIPTOR_WORDS: usize = size_of::<IoDescriptor>() / size_of::<u64>();

pub(super) struct Shared {
    /// The character device. The kernel completes the removal of the device when it is closed.
    pub file: File,
    /// The queue, tag and errno of the first refused command. Requests of its tag wait until another server takes
    /// the device over.
    pub refused: OnceLock<(u16, u16, i32)>,
    /// A non-blocking eventfd that is written when `refused` is set.
    pub failure_event: Arc<OwnedFd>,
}

/// Why the kernel refused a command with this result, which is not `UBLK_IO_RES_OK`, as an errno. `None` for
/// `UBLK_IO_RES_ABORT`: the device was stopped, or waits for another server.
fn refusal(result: i32) -> Option<i32> {
    // No device here has NEED_GET_DATA, so the kernel never returns the positive UBLK_IO_RES_NEED_GET_DATA.
    (result != -libc::ENODEV).then_some(if result < 0 { -result } else { libc::EPROTO })
}

pub(super) struct QueueOptions {
    pub shared: Arc<Shared>,
    pub queue: u16,
    /// Number of tags of the queue, those of other threads included.
    pub depth: u16,
    pub thread: u16,
    /// Number of threads of the queue: this one serves the tags `thread`, `thread + threads`, and so on.
    pub threads: u16,
    pub copy: CopyMode,
    pub request_max_bytes: u32,
    /// CPUs on which the thread should run; empty for any CPU.
    pub processors: CpuSet,
}

impl QueueOptions {
    fn tags(&self) -> impl ExactSizeIterator<Item = u16> + use<> {
        (self.thread..self.depth).step_by(usize::from(self.threads))
    }
}

/// A tag of this thread. The slot's index is the payload of its tokens, and the `user_data` of its bios.
struct Slot {
    tag: u16,
    /// With [`CopyMode::Kernel`]: the tag's buffer, `None` while a bio owns it.
    buffer: Option<IoBuffer>,
    /// Requests of at most [`FRONT_BYTES`] since the memory was released, up to 2. Only the second one
    /// registers the front of the buffer, because that costs as much as several requests.
    front_requests: u8,
    /// Address of the data for the kernel; with [`CopyMode::None`] an index in the ring's table of buffers.
    place: u64,
    /// How the data of the current request moves.
    copy: CopyMode,
    /// With [`CopyMode::User`], while this process copies: what to do with the buffer afterwards.
    copying: Option<Copying>,
    reads: bool,
    /// The result for the kernel if the current request succeeds: its length in bytes, or 0 without data.
    good_result: i32,
}

impl Slot {
    /// Counts a request of at most [`FRONT_BYTES`], and registers the front of the buffer at the second one.
    fn register_front(&mut self, cx: &mut SourceContext<'_>) {
        match (self.front_requests, &mut self.buffer) {
            (0, _) => self.front_requests = 1,
            (1, Some(buffer)) => {
                self.front_requests = 2;
                cx.registrar().register_front(buffer, FRONT_BYTES as usize);
            }
            _ => {}
        }
    }

    /// Unregisters the buffer and returns it. No bio may own the buffer.
    fn unregister_buffer(&mut self, cx: &mut SourceContext<'_>) -> Option<&mut IoBuffer> {
        let buffer = self.buffer.as_mut()?;
        cx.registrar().unregister_buffer(buffer);
        self.front_requests = 0;
        Some(buffer)
    }
}

/// Size of the descriptors of a queue, rounded up to pages of `page_bytes` as the kernel does.
fn queue_bytes(depth: u16, page_bytes: u64) -> u64 {
    (u64::from(depth) * size_of::<IoDescriptor>() as u64).next_multiple_of(page_bytes)
}

/// Maps the request descriptors of a queue: an array that the kernel writes.
fn map_descriptors(file: &File, queue: u16, depth: u16) -> Result<MappedWords, Error> {
    // UBLKSRV_CMD_BUF_OFFSET is 0, and the kernel reserves room for the largest depth for each queue.
    let offset = u64::from(queue) * queue_bytes(QUEUE_DEPTH_MAX, page_bytes());
    // SAFETY: the device has descriptors for `depth` tags there, of which only words are read. The kernel writes a
    // descriptor only while it has the command of the tag, when `read_descriptor` does not read it.
    unsafe { MappedWords::map(file, offset, usize::from(depth) * DESCRIPTOR_WORDS, ProtFlags::READ) }
        .map_err(|e| Error::system("cannot map a queue of the ublk device", e))
}

/// Reads the request of `tag`. The command of the tag must have completed: the kernel wrote the descriptor
/// before that, and the ring read the completion with acquire ordering. The kernel writes the descriptor again
/// only after the next command of the tag.
fn read_descriptor(descriptors: &MappedWords, tag: u16) -> IoDescriptor {
    let first = usize::from(tag) * DESCRIPTOR_WORDS;
    let words = &descriptors.all()[first..first + DESCRIPTOR_WORDS];
    let words: [u64; DESCRIPTOR_WORDS] = std::array::from_fn(|index| words[index].load(Relaxed));
    zerocopy::transmute!(words)
}

struct Copying {
    buffer: IoBuffer,
    /// The write to submit, without its data; `None` for a read.
    write: Option<Bio>,
}

pub(super) struct QueueSource {
    options: QueueOptions,
    /// The character device, registered with the ring until the ring is closed, which waits for all its I/O,
    /// including file I/O. Only then the kernel lets another server take the device over.
    file: Option<FileSlot>,
    descriptors: Option<MappedWords>,
    slots: Vec<Slot>,
    /// With [`CopyMode::User`]: the buffers of requests in flight.
    pool: BufferPool,
    /// Slots whose request has arrived and is not submitted yet.
    arrived: Vec<u16>,
    submissions: Submissions,
    /// Number of commands in flight, the timeout of [`IDLE_INTERVAL`] and its cancellation included.
    armed: usize,
    in_flight: usize,
    /// Buffers may have memory to release, and the timeout of [`IDLE_INTERVAL`] is in flight, not cancelled.
    timer_runs: bool,
    /// A request used a buffer in the current interval.
    used_buffers: bool,
    stopping: bool,
    /// The engine exits: commands in flight are no longer waited for.
    forced: bool,
}

impl QueueSource {
    pub fn new(options: QueueOptions) -> QueueSource {
        let tags = options.tags().len();
        let submissions = Submissions::new(TraceClient::new(client_kind::UBLK, options.queue.into()));
        QueueSource {
            options,
            file: None,
            descriptors: None,
            slots: Vec::with_capacity(tags),
            pool: BufferPool::default(),
            arrived: Vec::with_capacity(tags),
            submissions,
            armed: 0,
            in_flight: 0,
            timer_runs: false,
            used_buffers: false,
            stopping: false,
            forced: false,
        }
    }

    fn open_slots(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        let QueueOptions { copy, request_max_bytes, .. } = self.options;
        let tags = self.options.tags();
        let count = tags.len();
        let first =
            if copy == CopyMode::None { cx.registrar().keep_kernel_buffers(count as u16)? } else { 0 };
        for (tag, index) in tags.zip(0..) {
            let (buffer, place) = match copy {
                CopyMode::Kernel => {
                    let bytes = request_max_bytes as usize;
                    let Some(mut buffer) = IoBuffer::try_zeroed(bytes) else {
                        let message = format!(
                            "ublk: no memory for the buffers of a queue ({} MiB); use a smaller depth or fewer queues",
                            (count * bytes) >> 20
                        );
                        return Err(Error::new(ErrorKind::System, message));
                    };
                    let address = buffer.as_mut_ptr().expose_provenance() as u64;
                    (Some(buffer), address)
                }
                CopyMode::User => (None, 0),
                CopyMode::None => (None, u64::from(first + index)),
            };
            let (copying, reads, good_result, front_requests) = (None, false, 0, 0);
            self.slots.push(Slot { tag, buffer, front_requests, place, copy, copying, reads, good_result });
        }
        Ok(())
    }

    /// Submits a command. `result` is that of the request that it commits.
    fn command(&mut self, cx: &mut SourceContext<'_>, operation: u32, index: u16, result: i32) {
        let Some(file) = self.file.as_ref().map(|slot| cx.file(slot)) else { return };
        let Slot { tag, place, .. } = self.slots[usize::from(index)];
        let copy = self.options.copy;
        let addr = if copy == CopyMode::Kernel { place } else { 0 };
        let command = IoCommand { q_id: self.options.queue, tag, result, addr };
        let pages = (copy == CopyMode::None).then(|| abi::register_address(place as u16));
        let entry = opcode::UringCmd16::new(file, operation).cmd(zerocopy::transmute!(command)).addr(pages);
        self.armed += 1;
        // SAFETY: the file and the buffers stay until all commands have completed, or until the ring is
        // closed.
        unsafe { cx.push(entry.build(), u64::from(index)) }
    }

    fn commit(&mut self, cx: &mut SourceContext<'_>, index: u16, result: Result<(), i32>) {
        self.in_flight -= 1;
        let good_result = self.slots[usize::from(index)].good_result;
        self.command(cx, abi::COMMIT_AND_FETCH, index, result.map_or_else(|errno| -errno, |()| good_result));
    }

    fn begin(&mut self, cx: &mut SourceContext<'_>, index: u16) {
        let Some(descriptors) = &self.descriptors else { return };
        let slot = &mut self.slots[usize::from(index)];
        let descriptor = read_descriptor(descriptors, slot.tag);
        self.in_flight += 1;
        let bio = match bio_of(&descriptor, self.options.request_max_bytes) {
            Ok(bio) => Bio { user_data: u64::from(index), ..bio },
            Err(errno) => return self.commit(cx, index, Err(errno)),
        };
        if !bio.operation.has_data() {
            slot.good_result = 0;
            return self.submissions.submit(cx, bio);
        }
        let bytes = (bio.sectors << 9) as u32;
        slot.good_result = bytes as i32;
        slot.reads = bio.operation == Operation::Read;
        slot.copy = copy_of(&descriptor, self.options.copy);
        match slot.copy {
            CopyMode::Kernel => {
                if bytes <= FRONT_BYTES {
                    slot.register_front(cx);
                }
                let data = slot.buffer.take().map_or(Data::None, Data::Buffer);
                self.use_memory(cx);
                self.submissions.submit(cx, Bio { data, ..bio });
            }
            CopyMode::None => {
                // SAFETY: the request arrived without an error and without `IO_NEED_REGISTER`, so the kernel
                // has registered its pages in this ring. They stay registered until the command that commits
                // the request, which follows the completion of the bio.
                let pages = unsafe { KernelPages::new(slot.place as u16, bytes) };
                self.submissions.submit(cx, Bio { data: Data::Kernel(pages), ..bio });
            }
            CopyMode::User => {
                let Some(buffer) = self.pool.take(bytes, cx.registrar()) else {
                    return self.commit(cx, index, Err(libc::ENOMEM));
                };
                self.use_memory(cx);
                match bio.operation {
                    Operation::Write => self.copy(cx, index, Copying { buffer, write: Some(bio) }),
                    _ => self.submissions.submit(cx, Bio { data: Data::Buffer(buffer), ..bio }),
                }
            }
        }
    }

    fn copy(&mut self, cx: &mut SourceContext<'_>, index: u16, mut copying: Copying) {
        let Some(file) = self.file.as_ref().map(|slot| cx.file(slot)) else { return };
        let slot = &mut self.slots[usize::from(index)];
        let offset = abi::data_offset(self.options.queue, slot.tag);
        let bytes = slot.good_result as u32;
        let address = copying.buffer.as_mut_ptr();
        let entry = match copying.write {
            Some(_) => opcode::Read::new(file, address, bytes).offset(offset).build(),
            None => opcode::Write::new(file, address, bytes).offset(offset).build(),
        };
        slot.copying = Some(copying);
        // SAFETY: the buffer has at least that length (see `BufferPool::take`), and stays in the slot until
        // the copy has completed, or until the ring is closed.
        unsafe { cx.push(entry, COPY | u64::from(index)) }
    }

    /// `result` is the number of bytes, or a negative errno.
    fn copied(&mut self, cx: &mut SourceContext<'_>, index: u16, result: i32) {
        let slot = &mut self.slots[usize::from(index)];
        let whole = result == slot.good_result;
        let errno = if result < 0 { -result } else { libc::EIO };
        let Some(Copying { buffer, write }) = slot.copying.take() else { return };
        match write {
            Some(bio) if whole => self.submissions.submit(cx, Bio { data: Data::Buffer(buffer), ..bio }),
            _ => {
                self.pool.put(buffer);
                self.commit(cx, index, if whole { Ok(()) } else { Err(errno) });
            }
        }
    }

    /// Notes that a request uses a buffer, and starts the check for idleness.
    fn use_memory(&mut self, cx: &mut SourceContext<'_>) {
        self.used_buffers = true;
        if !self.timer_runs && !self.stopping {
            self.timer_runs = true;
            self.start_interval(cx);
        }
    }

    fn start_interval(&mut self, cx: &mut SourceContext<'_>) {
        self.used_buffers = false;
        self.armed += 1;
        let entry = opcode::Timeout::new(&raw const IDLE_INTERVAL).build();
        // SAFETY: the kernel reads the interval, which is static.
        unsafe { cx.push(entry, IDLE) }
    }

    /// Cancels the timeout. Its completion must not reach a later source with the same tokens.
    fn cancel_interval(&mut self, cx: &mut SourceContext<'_>) {
        if std::mem::take(&mut self.timer_runs) {
            self.armed += 1;
            let timeout = cx.token(IDLE).0;
            // SAFETY: the cancellation has no memory and no descriptor.
            unsafe { cx.push(opcode::AsyncCancel::new(timeout).build(), CANCELLED) }
        }
    }

    fn trim(&mut self, cx: &mut SourceContext<'_>) {
        if self.used_buffers || self.in_flight > 0 || !self.arrived.is_empty() {
            return self.start_interval(cx);
        }
        // No request is in flight, so each slot owns its buffer; and the kernel accesses a buffer only inside
        // io_uring_enter of this thread.
        IoBuffer::release_all_pages(self.slots.iter_mut().filter_map(|slot| slot.unregister_buffer(cx)));
        if self.pool.is_idle() {
            self.pool.trim(cx.registrar());
        }
        self.timer_runs = false;
    }

    /// The kernel sends no further requests for the tag.
    fn fail_tag(&mut self, index: u16, errno: i32) {
        let QueueOptions { shared, queue, .. } = &self.options;
        let tag = self.slots[usize::from(index)].tag;
        if shared.refused.set((*queue, tag, errno)).is_ok() {
            signal(&shared.failure_event);
        }
    }

    fn is_drained(&self) -> bool {
        self.in_flight == 0 && (self.armed == 0 || self.forced)
    }

    /// Closes the device and releases the memory when this source has stopped and no request is left.
    fn release(&mut self, cx: &mut SourceContext<'_>) {
        // If the engine exits, the ring is closed soon, and until then the kernel may access the buffers.
        if self.stopping && !self.forced && self.is_drained() {
            if let Some(mut file) = self.file.take() {
                cx.registrar().unregister_file(&mut file);
            }
            self.descriptors = None;
            self.pool.trim(cx.registrar());
        }
    }
}

/// The bio for `descriptor`, without its data. Fails with `EOPNOTSUPP` for an unknown operation, and with
/// `EINVAL` for data of no sector or of more than `request_max_bytes`.
pub fn bio_of(descriptor: &IoDescriptor, request_max_bytes: u32) -> Result<Bio, i32> {
    let (sector, sectors) = (Sector(descriptor.start_sector), u64::from(descriptor.nr_sectors));
    let operation = match descriptor.op_flags & 0xff {
        abi::OP_READ => Operation::Read,
        abi::OP_WRITE => Operation::Write,
        abi::OP_FLUSH => return Ok(Bio::flush(0)),
        abi::OP_DISCARD => Operation::Discard,
        abi::OP_WRITE_ZEROES => Operation::WriteZeroes,
        _ => return Err(libc::EOPNOTSUPP),
    };
    if operation.has_data() && !(1..=u64::from(request_max_bytes)).contains(&(sectors << 9)) {
        return Err(libc::EINVAL);
    }
    let mut flags = BioFlags::empty();
    if operation.is_write() {
        flags.set(BioFlags::FUA, descriptor.op_flags & abi::IO_FUA != 0);
    }
    if operation == Operation::WriteZeroes {
        flags.set(BioFlags::NO_UNMAP, descriptor.op_flags & abi::IO_NO_UNMAP != 0);
    }
    Ok(Bio { operation, flags, sector, sectors, data: Data::None, user_data: 0 })
}

/// If the kernel could not register the pages of a request, this process copies the data.
fn copy_of(descriptor: &IoDescriptor, copy: CopyMode) -> CopyMode {
    match copy {
        CopyMode::None if descriptor.op_flags & abi::IO_NEED_REGISTER != 0 => CopyMode::User,
        copy => copy,
    }
}

fn bind(processors: &CpuSet) {
    let Ok(mut set) = sched_getaffinity(None) else { return };
    (0..CpuSet::MAX_CPU).filter(|cpu| !processors.is_set(*cpu)).for_each(|cpu| set.unset(cpu));
    if set.count() > 0 {
        // An error is harmless: the thread is only faster there.
        let _ = sched_setaffinity(None, &set);
    }
}

// SAFETY: it has stopped when all commands and bios have completed, or, if the engine exits, when all bios
// have completed: the buffers then stay until the ring is closed.
unsafe impl Source for QueueSource {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        cx.registrar().require(&[("IORING_OP_URING_CMD", opcode::UringCmd16::CODE)])?;
        bind(&self.options.processors);
        let QueueOptions { shared, queue, depth, .. } = &self.options;
        self.descriptors = Some(map_descriptors(&shared.file, *queue, *depth)?);
        let shared = shared.clone();
        self.open_slots(cx)?;
        // This is the last step that can fail, because the device cannot be removed while the ring has the
        // file.
        self.file = Some(cx.registrar().register_file(shared.file.as_fd())?);
        (0..self.slots.len() as u16).for_each(|index| self.command(cx, abi::FETCH, index, 0));
        Ok(())
    }

    fn on_cqe(&mut self, cx: &mut SourceContext<'_>, cqe: Cqe) {
        let payload = cqe.token.payload();
        if payload & COPY != 0 {
            return self.copied(cx, payload as u16, cqe.result);
        }
        self.armed -= 1;
        match payload {
            IDLE if !self.stopping => return self.trim(cx),
            IDLE | CANCELLED => {}
            // UBLK_IO_RES_OK: a request has arrived.
            index if cqe.result == 0 => return self.arrived.push(index as u16),
            // When the source is stopping, the device was removed or is left to another server: no request is
            // lost.
            _ if self.stopping => {}
            index => {
                if let Some(errno) = refusal(cqe.result) {
                    self.fail_tag(index as u16, errno);
                }
            }
        }
        self.release(cx);
    }

    fn on_bio(&mut self, cx: &mut SourceContext<'_>, completion: Completion) {
        let index = completion.user_data as u16;
        let slot = &mut self.slots[usize::from(index)];
        if let Some(buffer) = completion.data.into_buffer() {
            match (slot.copy, completion.result) {
                (CopyMode::User, Ok(())) if slot.reads => {
                    return self.copy(cx, index, Copying { buffer, write: None });
                }
                (CopyMode::User, _) => self.pool.put(buffer),
                _ => slot.buffer = Some(buffer),
            }
        }
        self.commit(cx, index, completion.result.map_err(|status| status.errno()));
    }

    fn on_turn(&mut self, cx: &mut SourceContext<'_>) {
        // If the engine exits, the next server gets the remaining requests.
        if !self.forced {
            self.submissions.resubmit(cx);
            let mut arrived = std::mem::take(&mut self.arrived);
            arrived.drain(..).for_each(|index| self.begin(cx, index));
            self.arrived = arrived;
        }
    }

    fn write_client(&self, user_data: u64, text: &mut dyn fmt::Write) -> fmt::Result {
        let slot = usize::try_from(user_data).ok().and_then(|index| self.slots.get(index));
        let Some(Slot { tag, .. }) = slot else { return Ok(()) };
        write!(text, "the kernel's block device (queue {}, tag {tag})", self.options.queue)
    }

    fn is_abandoned(&self, _user_data: u64) -> bool {
        self.stopping && !self.forced
    }

    /// Unless the engine exits, the device has been stopped, and the kernel completes all commands. They must
    /// be waited for, because the kernel may write to their buffers until then. An engine that exits leaves
    /// the device to another server.
    fn stop(&mut self, cx: &mut SourceContext<'_>, _force: bool) {
        self.stopping = true;
        self.cancel_interval(cx);
        if cx.engine_exits() && !self.forced {
            self.forced = true;
            cx.registrar().abandon();
            // Requeued bios are not in flight any longer, but their slots stay: the kernel may still access
            // the buffers. The next server gets their requests with all others.
            self.in_flight -= self.submissions.requeued();
        }
        self.release(cx);
    }

    fn is_stopped(&self) -> bool {
        self.stopping && self.is_drained()
    }
}

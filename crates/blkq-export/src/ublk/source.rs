//! The tags of a queue of a device that one engine serves, all of them or every nth: takes all
//! requests that have arrived, submits them under one plug, and commits them as they complete. One
//! turn is one io_uring_enter.
//!
//! A tag belongs to the kernel while its command is in flight, and to this side from the
//! command's completion, which brings a request, to the command that commits it. Where the kernel
//! copies, it writes and reads the tag's buffer on this very thread, inside io_uring_enter, and
//! only while the command is in flight; where nobody does, it has put the request's pages into
//! the ring's table when the request comes, and takes them out as it is committed.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use blkq::trace::TraceClient;
use blkq::{
    Bio, BioFlags, Completion, Cqe, Data, Error, ErrorKind, FileSlot, IoBuffer, KernelPages, Operation,
    Sector, Source, SourceContext,
};
use io_uring::{opcode, types};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use zerocopy::IntoBytes;

use crate::buffers::BufferPool;
use crate::client_kind;

use super::abi::{self, IoCommand, IoDescriptor};
use super::copy::CopyMode;
use super::descriptors::Descriptors;

/// The engine's queue of the disk: each engine has one.
const ENGINE_QUEUE: usize = 0;
/// How often idleness is checked: then the memory of the buffers is released.
static IDLE_INTERVAL: types::Timespec = types::Timespec::new().sec(1);
/// The token of that, beyond those of the slots.
const IDLE: u64 = 1 << 16;
/// Where the kernel copies: the front of a tag's buffer that is registered with the ring while the
/// tag is in use, so that direct I/O of small requests need not pin its pages each time. All tags
/// together may lock some hundred KiB.
const FRONT_BYTES: u32 = 4096;
/// In the token of reading or writing the data of a slot's request.
const COPY: u64 = 1 << 17;

/// The state that the queues of a device share.
pub(super) struct Shared {
    /// The character device. Removing the device waits until it is closed.
    pub file: File,
    /// The first command that the kernel refused: its tag is lost, and a caller that waits for a
    /// request of it waits for another server.
    pub refused: OnceLock<RefusedCommand>,
    /// An eventfd that does not block, written when there is one.
    pub failure_event: Arc<OwnedFd>,
}

/// A command that the kernel refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RefusedCommand {
    pub queue: u16,
    pub tag: u16,
    pub errno: i32,
}

/// The outcome of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CommandResult {
    Request,
    /// `UBLK_IO_RES_ABORT`: the device stops, or waits for another server.
    Aborted,
    Refused {
        errno: i32,
    },
}

fn command_result(result: i32) -> CommandResult {
    match result {
        // UBLK_IO_RES_OK
        0 => CommandResult::Request,
        abort if abort == -libc::ENODEV => CommandResult::Aborted,
        // UBLK_IO_RES_NEED_GET_DATA, which no device here asks for, would be a positive number.
        other => CommandResult::Refused { errno: if other < 0 { -other } else { libc::EPROTO } },
    }
}

/// Options of a queue, as one thread serves it.
pub(super) struct QueueOptions {
    pub shared: Arc<Shared>,
    pub queue: u16,
    /// Tags of the queue, of all its threads.
    pub depth: u16,
    /// Which of the queue's threads this one is, from 0.
    pub thread: u16,
    /// Threads of the queue: this one serves the tags `thread`, `thread + threads` and so on.
    pub threads: u16,
    /// How data moves.
    pub copy: CopyMode,
    /// Largest request.
    pub request_max_bytes: u32,
    /// Where its thread shall run.
    pub processors: CpuSet,
}

impl QueueOptions {
    /// The tags that this thread serves.
    fn tags(&self) -> impl ExactSizeIterator<Item = u16> + use<> {
        (self.thread..self.depth).step_by(usize::from(self.threads))
    }
}

/// A tag that this thread serves. Its index is the payload of the tag's tokens and bios.
struct Slot {
    /// The kernel's number of it.
    tag: u16,
    /// Where the kernel copies: the tag's own, away while a bio has it.
    buffer: Option<IoBuffer>,
    /// The requests for its front since its memory was released, as far as they matter: with the
    /// second one the front is registered, which costs as much as several requests.
    front_requests: u8,
    /// The data's place for the kernel: the address of that buffer, or the index in the ring's
    /// table.
    place: u64,
    /// How the data of its request moves.
    copy: CopyMode,
    /// While this process copies: the next step.
    copying: Option<Copying>,
    /// Its request reads.
    reads: bool,
    /// The result for the kernel if the request succeeds.
    good_result: i32,
}

impl Slot {
    /// A request for the front of the buffer has arrived.
    #[inline]
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

    /// Unregisters the buffer, which is here, and returns it.
    fn unregister_buffer(&mut self, cx: &mut SourceContext<'_>) -> Option<&mut IoBuffer> {
        let buffer = self.buffer.as_mut()?;
        cx.registrar().unregister_buffer(buffer);
        self.front_requests = 0;
        Some(buffer)
    }
}

/// The next step when the data of a request has been copied.
enum Copying {
    /// It is written to the disk.
    Write(Bio),
    /// It has been read from the disk: the request is done.
    Read(IoBuffer),
}

/// A queue of a device, as far as one thread serves it.
pub(super) struct QueueSource {
    options: QueueOptions,
    /// The character device in the ring's table. It stays there for as long as the ring: so nobody
    /// can take the device over before all I/O of this ring, file I/O too, has completed.
    file: Option<FileSlot>,
    descriptors: Option<Descriptors>,
    slots: Vec<Slot>,
    /// Buffers for what this process copies.
    pool: BufferPool,
    /// Slots whose request has arrived.
    arrived: Vec<u16>,
    /// Bios for which the queue had no room.
    requeued: VecDeque<Bio>,
    /// Commands that the kernel has.
    armed: usize,
    /// Requests that have begun and are not committed.
    in_flight: usize,
    /// Buffers may have taken memory, and the interval runs.
    used: bool,
    /// A request came in this interval.
    asked: bool,
    stopping: bool,
    /// Not even the kernel's commands are waited for.
    forced: bool,
}

/// There is none for the data of `requests` of up to `bytes`.
fn no_memory(requests: usize, bytes: u32) -> Error {
    let mib = (requests as u64 * u64::from(bytes)) >> 20;
    let message = format!(
        "ublk: no memory for the data of a queue's requests ({mib} MiB): use a smaller depth, or fewer queues"
    );
    Error::new(ErrorKind::System, message)
}

impl QueueSource {
    pub fn new(options: QueueOptions) -> QueueSource {
        let tags = options.tags().len();
        QueueSource {
            options,
            file: None,
            descriptors: None,
            slots: Vec::with_capacity(tags),
            pool: BufferPool::new(),
            arrived: Vec::with_capacity(tags),
            requeued: VecDeque::new(),
            armed: 0,
            in_flight: 0,
            used: false,
            asked: false,
            stopping: false,
            forced: false,
        }
    }

    /// Makes what each tag needs for its data.
    fn open_slots(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        let QueueOptions { copy, request_max_bytes, .. } = self.options;
        let tags = self.options.tags();
        let count = tags.len();
        let first =
            if copy == CopyMode::None { cx.registrar().keep_kernel_buffers(count as u16)? } else { 0 };
        for (tag, index) in tags.zip(0..) {
            let (buffer, place) = match copy {
                CopyMode::Kernel => {
                    let mut buffer = IoBuffer::try_zeroed(request_max_bytes as usize)
                        .ok_or_else(|| no_memory(count, request_max_bytes))?;
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

    /// Gives the kernel the command `operation` for the tag of slot `index`.
    fn command(&mut self, cx: &mut SourceContext<'_>, operation: u32, index: u16, result: i32) {
        let Some(file) = self.file.as_ref().map(|slot| cx.file(slot)) else { return };
        let Slot { tag, place, .. } = self.slots[usize::from(index)];
        let copy = self.options.copy;
        let addr = if copy == CopyMode::Kernel { place } else { 0 };
        let command = IoCommand { q_id: self.options.queue, tag, result, addr };
        let mut bytes = [0; 16];
        bytes.copy_from_slice(command.as_bytes());
        let entry = opcode::UringCmd16::new(file, operation).cmd(bytes);
        let entry = match copy {
            CopyMode::None => entry.addr(Some(abi::register_address(place as u16))).build(),
            _ => entry.build(),
        };
        self.armed += 1;
        // SAFETY: the file and the buffers stay until all commands are back, or the ring is closed.
        unsafe { cx.push(entry, u64::from(index)) }
    }

    /// The request of slot `index` is done.
    fn commit(&mut self, cx: &mut SourceContext<'_>, index: u16, result: Result<(), i32>) {
        self.in_flight -= 1;
        let result = match result {
            Ok(()) => self.slots[usize::from(index)].good_result,
            Err(errno) => -errno,
        };
        self.command(cx, abi::COMMIT_AND_FETCH, index, result);
    }

    /// Begins the request that has arrived in slot `index`.
    fn begin(&mut self, cx: &mut SourceContext<'_>, index: u16) {
        let Some(descriptors) = &self.descriptors else { return };
        let slot = &mut self.slots[usize::from(index)];
        let descriptor = descriptors.read(slot.tag);
        self.in_flight += 1;
        let bio = match bio_of(&descriptor, self.options.request_max_bytes) {
            Ok(bio) => Bio { user_data: u64::from(index), ..bio },
            Err(errno) => return self.commit(cx, index, Err(errno)),
        };
        if !bio.operation.has_data() {
            slot.good_result = 0;
            return self.submit(cx, bio);
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
                self.submit(cx, Bio { data, ..bio });
            }
            CopyMode::None => {
                // SAFETY: the request came without an error and without the mark that its pages are
                // not registered: they are, in this ring, until the command that commits it, which
                // follows the completion of the bio.
                let pages = unsafe { KernelPages::new(slot.place as u16, bytes) };
                self.submit(cx, Bio { data: Data::Kernel(pages), ..bio });
            }
            CopyMode::User => {
                let Some(buffer) = self.pool.take(bytes, cx.registrar()) else {
                    return self.commit(cx, index, Err(libc::ENOMEM));
                };
                self.use_memory(cx);
                let bio = Bio { data: Data::Buffer(buffer), ..bio };
                match bio.operation {
                    Operation::Write => self.copy(cx, index, Copying::Write(bio)),
                    _ => self.submit(cx, bio),
                }
            }
        }
    }

    /// Copies the data of the request of slot `index`, to or from the buffer in `copying`.
    fn copy(&mut self, cx: &mut SourceContext<'_>, index: u16, mut copying: Copying) {
        let Some(file) = self.file.as_ref().map(|slot| cx.file(slot)) else { return };
        let slot = &mut self.slots[usize::from(index)];
        let offset = abi::data_offset(self.options.queue, slot.tag);
        let bytes = slot.good_result as u32;
        let entry = match &mut copying {
            Copying::Write(Bio { data: Data::Buffer(buffer), .. }) => {
                opcode::Read::new(file, buffer.as_mut_ptr(), bytes).offset(offset).build()
            }
            Copying::Read(buffer) => opcode::Write::new(file, buffer.as_ptr(), bytes).offset(offset).build(),
            // Such a request has a buffer.
            Copying::Write(_) => return,
        };
        slot.copying = Some(copying);
        // SAFETY: the buffer is at least as long (see `BufferPool::take`), and stays in the slot
        // until this has completed, or the ring is closed.
        unsafe { cx.push(entry, COPY | u64::from(index)) }
    }

    /// The data of the request of slot `index` was copied, `result` bytes of it or an error.
    fn copied(&mut self, cx: &mut SourceContext<'_>, index: u16, result: i32) {
        let slot = &mut self.slots[usize::from(index)];
        let whole = result == slot.good_result;
        let errno = if result < 0 { -result } else { libc::EIO };
        match slot.copying.take() {
            Some(Copying::Write(bio)) if whole => self.submit(cx, bio),
            Some(copying) => {
                let buffer = match copying {
                    Copying::Read(buffer) => Some(buffer),
                    Copying::Write(bio) => bio.data.into_buffer(),
                };
                if let Some(buffer) = buffer {
                    self.pool.put(buffer);
                }
                self.commit(cx, index, if whole { Ok(()) } else { Err(errno) });
            }
            None => {}
        }
    }

    fn submit(&mut self, cx: &mut SourceContext<'_>, bio: Bio) {
        // Those that wait go first.
        let result = if self.requeued.is_empty() { self.submit_now(cx, bio) } else { Err(bio) };
        if let Err(bio) = result {
            self.requeued.push_back(bio);
        }
    }

    #[inline]
    fn submit_now(&self, cx: &mut SourceContext<'_>, bio: Bio) -> Result<(), Bio> {
        let queue = self.options.queue;
        cx.set_trace_client(ENGINE_QUEUE, || TraceClient::new(client_kind::UBLK, queue.into()));
        cx.submit(ENGINE_QUEUE, bio)
    }

    fn resubmit_requeued(&mut self, cx: &mut SourceContext<'_>) {
        while let Some(bio) = self.requeued.pop_front() {
            if let Err(bio) = self.submit_now(cx, bio) {
                return self.requeued.push_front(bio);
            }
        }
    }

    /// A buffer is about to be used.
    fn use_memory(&mut self, cx: &mut SourceContext<'_>) {
        self.asked = true;
        if !self.used {
            self.used = true;
            self.watch(cx);
        }
    }

    /// Begins an interval; when it expires, idleness is checked.
    fn watch(&mut self, cx: &mut SourceContext<'_>) {
        self.asked = false;
        let entry = opcode::Timeout::new(&raw const IDLE_INTERVAL).build();
        // SAFETY: the interval is static.
        unsafe { cx.push(entry, IDLE) }
    }

    /// Releases the memory of idle tags if no request came in the interval that is over.
    fn trim(&mut self, cx: &mut SourceContext<'_>) {
        if self.stopping {
            return;
        }
        if self.asked || self.in_flight > 0 || !self.arrived.is_empty() {
            return self.watch(cx);
        }
        // Nothing is in flight, so all are here; and the kernel is not in them (see above).
        IoBuffer::release_all_pages(self.slots.iter_mut().filter_map(|slot| slot.unregister_buffer(cx)));
        if self.pool.is_idle() {
            self.pool.trim(cx.registrar());
        }
        self.used = false;
    }

    /// The kernel refused the command of the tag of slot `index`, which never completes again: reports
    /// that.
    fn lose(&mut self, index: u16, errno: i32) {
        let QueueOptions { shared, queue, .. } = &self.options;
        let tag = self.slots[usize::from(index)].tag;
        if shared.refused.set(RefusedCommand { queue: *queue, tag, errno }).is_ok() {
            let _ = rustix::io::write(&shared.failure_event, &1u64.to_ne_bytes());
        }
    }

    fn is_drained(&self) -> bool {
        self.in_flight == 0 && (self.armed == 0 || self.forced)
    }

    /// Lets go of the device when all is done.
    fn release(&mut self, cx: &mut SourceContext<'_>) {
        // Forced, the ring closes soon, and the kernel may still be in the buffers until then.
        if self.stopping && !self.forced && self.is_drained() {
            if let Some(mut file) = self.file.take() {
                cx.registrar().unregister_file(&mut file);
            }
            self.descriptors = None;
            self.pool.trim(cx.registrar());
        }
    }
}

/// The bio that `descriptor` asks for, without its data.
///
/// # Errors
/// The errno of what is not known, or larger than a request may be.
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

/// How the data of `descriptor` moves on a queue with this `copy` mode: pages that the
/// kernel could not register this process copies.
fn copy_of(descriptor: &IoDescriptor, copy: CopyMode) -> CopyMode {
    match copy {
        CopyMode::None if descriptor.op_flags & abi::IO_NEED_REGISTER != 0 => CopyMode::User,
        copy => copy,
    }
}

/// Binds this thread to those of `processors` on which it may run.
fn bind(processors: &CpuSet) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let mut set = CpuSet::new();
    (0..CpuSet::MAX_CPU)
        .filter(|cpu| processors.is_set(*cpu) && allowed.is_set(*cpu))
        .for_each(|cpu| set.set(cpu));
    if set.count() > 0 {
        // It is faster there, and works elsewhere.
        let _ = sched_setaffinity(None, &set);
    }
}

// SAFETY: it is stopped when all commands and bios are back, or, forced, when the engine exits.
unsafe impl Source for QueueSource {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        cx.registrar().require(&[("IORING_OP_URING_CMD", opcode::UringCmd16::CODE)])?;
        bind(&self.options.processors);
        let QueueOptions { shared, queue, depth, .. } = &self.options;
        self.descriptors = Some(Descriptors::map(&shared.file, *queue, *depth)?);
        let shared = shared.clone();
        self.open_slots(cx)?;
        // Last, as what the ring has keeps the device from being removed.
        self.file = Some(cx.registrar().register_file(shared.file.as_fd())?);
        (0..self.slots.len() as u16).for_each(|index| self.command(cx, abi::FETCH, index, 0));
        Ok(())
    }

    fn on_cqe(&mut self, cx: &mut SourceContext<'_>, cqe: Cqe) {
        match cqe.token.payload() {
            IDLE => return self.trim(cx),
            payload if payload & COPY != 0 => return self.copied(cx, payload as u16, cqe.result),
            _ => {}
        }
        self.armed -= 1;
        let index = cqe.token.payload() as u16;
        match command_result(cqe.result) {
            CommandResult::Request => return self.arrived.push(index),
            // A device that was removed, or left to another server, loses nothing.
            CommandResult::Refused { errno } if !self.stopping => self.lose(index, errno),
            CommandResult::Refused { .. } | CommandResult::Aborted => {}
        }
        self.release(cx);
    }

    fn on_bio(&mut self, cx: &mut SourceContext<'_>, completion: Completion) {
        let index = completion.user_data as u16;
        let slot = &mut self.slots[usize::from(index)];
        if let Some(buffer) = completion.data.into_buffer() {
            match (slot.copy, completion.result) {
                (CopyMode::User, Ok(())) if slot.reads => return self.copy(cx, index, Copying::Read(buffer)),
                (CopyMode::User, _) => self.pool.put(buffer),
                _ => slot.buffer = Some(buffer),
            }
        }
        self.commit(cx, index, completion.result.map_err(|status| status.errno()));
    }

    fn on_turn(&mut self, cx: &mut SourceContext<'_>) {
        // A server that exits leaves the rest to the next one.
        if !self.forced {
            self.resubmit_requeued(cx);
            let mut arrived = std::mem::take(&mut self.arrived);
            arrived.drain(..).for_each(|index| self.begin(cx, index));
            self.arrived = arrived;
        }
    }

    fn client_of(&self, user_data: u64) -> Option<String> {
        let Slot { tag, .. } = self.slots.get(usize::try_from(user_data).ok()?)?;
        Some(format!("the kernel's block device, tag {tag} of its queue {}", self.options.queue))
    }

    fn is_abandoned(&self, _user_data: u64) -> bool {
        self.stopping && !self.forced
    }

    /// While the engine lives, the device has been stopped, and all commands come back: the kernel
    /// would write to the buffers of those that do not. An engine that exits leaves the device to
    /// another server.
    fn stop(&mut self, cx: &mut SourceContext<'_>, _force: bool) {
        self.stopping = true;
        if cx.engine_exits() && !self.forced {
            self.forced = true;
            cx.registrar().abandon();
            // They are not in flight, and the next server gets them with the rest. The kernel may
            // still be in their buffers.
            self.in_flight -= self.requeued.len();
        }
        self.release(cx);
    }

    fn is_stopped(&self) -> bool {
        self.stopping && self.is_drained()
    }
}

//! One queue of a device on its engine: takes all requests that have arrived, submits them
//! under one plug, and commits them as they end. One turn is one io_uring_enter.
//!
//! A tag belongs to the kernel while its command is in flight, and to this side from the
//! command's completion, which brings a request, to the command that commits it. Its buffer is
//! written and read by the kernel on this very thread, inside io_uring_enter, and only while
//! the command is in flight.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use blkq::{
    Bio, BioFlags, Completion, Cqe, Data, Error, FileSlot, IoBuffer, Operation, Sector, Source, SourceContext,
};
use io_uring::{opcode, types};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use zerocopy::IntoBytes;

use super::abi::{self, IoCommand, IoDescriptor};
use super::descriptors::Descriptors;

/// The engine's queue behind a queue of the device: each engine has one.
const ENGINE_QUEUE: usize = 0;
/// How often it is seen whether anything was asked; if not, the buffers' memory is given back.
static IDLE_INTERVAL: types::Timespec = types::Timespec::new().sec(1);
/// The token of that, beyond those of the tags.
const IDLE: u64 = 1 << 16;

/// What the queues of a device share.
pub(super) struct Shared {
    /// The character device. Removing the device waits until it is closed.
    pub file: File,
    /// The negative errno with which the kernel refused a command, 0 if it did not.
    pub refused: AtomicI32,
}

/// What a queue is.
pub(super) struct QueueOptions {
    pub shared: Arc<Shared>,
    pub queue: u16,
    pub depth: u16,
    /// Size of each tag's buffer.
    pub buffer_bytes: usize,
    /// Where its thread shall run.
    pub processors: CpuSet,
}

/// A tag.
struct Slot {
    /// Away while a bio has it.
    buffer: Option<IoBuffer>,
    address: u64,
    /// What to tell the kernel if the request goes well.
    good_result: i32,
}

/// A queue of a device.
pub(super) struct QueueSource {
    options: QueueOptions,
    /// The character device in the ring's table. It stays there for as long as the ring: so nobody
    /// can take the device over before all I/O of this ring, file I/O too, has ended.
    file: Option<FileSlot>,
    descriptors: Option<Descriptors>,
    slots: Vec<Slot>,
    /// Tags whose request has arrived.
    arrived: Vec<u16>,
    /// Bios for which the queue had no room.
    refused: VecDeque<Bio>,
    /// Commands that the kernel has.
    armed: usize,
    /// Bios that the block layer has.
    in_flight: usize,
    /// Buffers may have taken memory, and the interval runs.
    used: bool,
    /// Something was asked in this interval.
    asked: bool,
    stopping: bool,
    /// Not even the kernel's commands are waited for.
    forced: bool,
}

impl QueueSource {
    pub fn new(options: QueueOptions) -> QueueSource {
        let depth = usize::from(options.depth);
        QueueSource {
            options,
            file: None,
            descriptors: None,
            slots: Vec::with_capacity(depth),
            arrived: Vec::with_capacity(depth),
            refused: VecDeque::new(),
            armed: 0,
            in_flight: 0,
            used: false,
            asked: false,
            stopping: false,
            forced: false,
        }
    }

    /// Gives the kernel the command `operation` for `tag`.
    fn command(&mut self, cx: &mut SourceContext<'_>, operation: u32, tag: u16, result: i32) {
        let Some(FileSlot(file)) = self.file else { return };
        let address = self.slots[usize::from(tag)].address;
        let command = IoCommand { q_id: self.options.queue, tag, result, addr: address };
        let mut bytes = [0; 16];
        bytes.copy_from_slice(command.as_bytes());
        let entry = opcode::UringCmd16::new(types::Fixed(file), operation).cmd(bytes).build();
        self.armed += 1;
        // SAFETY: the file and the buffers stay until all commands are back, or the ring is gone.
        unsafe { cx.push(entry, u64::from(tag)) }
    }

    fn commit(&mut self, cx: &mut SourceContext<'_>, tag: u16, result: i32) {
        self.command(cx, abi::COMMIT_AND_FETCH, tag, result);
    }

    /// Submits the request that has arrived for `tag`.
    fn begin(&mut self, cx: &mut SourceContext<'_>, tag: u16) {
        let Some(descriptors) = &self.descriptors else { return };
        let descriptor = descriptors.read(tag);
        let slot = &mut self.slots[usize::from(tag)];
        match bio_of(&descriptor, &mut slot.buffer) {
            Ok(bio) => {
                slot.good_result = if bio.operation.has_data() { (bio.sectors << 9) as i32 } else { 0 };
                self.asked |= bio.operation.has_data();
                self.in_flight += 1;
                if self.asked && !self.used {
                    self.used = true;
                    self.watch(cx);
                }
                self.submit(cx, Bio { user_data: u64::from(tag), ..bio });
            }
            Err(errno) => self.commit(cx, tag, -errno),
        }
    }

    fn submit(&mut self, cx: &mut SourceContext<'_>, bio: Bio) {
        // Those that wait go first.
        let refused = if self.refused.is_empty() { cx.submit(ENGINE_QUEUE, bio) } else { Err(bio) };
        if let Err(bio) = refused {
            self.refused.push_back(bio);
        }
    }

    fn retry_refused(&mut self, cx: &mut SourceContext<'_>) {
        while let Some(bio) = self.refused.pop_front() {
            if let Err(bio) = cx.submit(ENGINE_QUEUE, bio) {
                return self.refused.push_front(bio);
            }
        }
    }

    /// Begins an interval at whose end it is seen whether anything was asked in it.
    fn watch(&mut self, cx: &mut SourceContext<'_>) {
        self.asked = false;
        let entry = opcode::Timeout::new(&raw const IDLE_INTERVAL).build();
        // SAFETY: the interval is static.
        unsafe { cx.push(entry, IDLE) }
    }

    /// Gives the memory of idle tags back if nothing was asked in the interval that is over.
    fn trim(&mut self, cx: &mut SourceContext<'_>) {
        if self.stopping {
            return;
        }
        if self.asked || self.in_flight > 0 || !self.arrived.is_empty() {
            return self.watch(cx);
        }
        // Nothing is in flight, so all are here; and the kernel is not in them (see above).
        self.slots.iter_mut().filter_map(|slot| slot.buffer.as_mut()).for_each(IoBuffer::give_back_pages);
        self.used = false;
    }

    fn is_drained(&self) -> bool {
        self.in_flight == 0 && (self.armed == 0 || self.forced)
    }

    /// Lets go of the device when all is done.
    fn release(&mut self, cx: &mut SourceContext<'_>) {
        // Forced, the ring goes soon, and the kernel may still be in the buffers until then.
        if self.stopping && !self.forced && self.is_drained() {
            if let Some(file) = self.file.take() {
                cx.ring().unregister_file(file);
            }
            self.descriptors = None;
        }
    }
}

/// What `descriptor` asks for. The buffer goes with a request that has data.
fn bio_of(descriptor: &IoDescriptor, buffer: &mut Option<IoBuffer>) -> Result<Bio, i32> {
    let (sector, sectors) = (Sector(descriptor.start_sector), u64::from(descriptor.nr_sectors));
    let operation = match descriptor.op_flags & 0xff {
        abi::OP_READ => Operation::Read,
        abi::OP_WRITE => Operation::Write,
        abi::OP_FLUSH => return Ok(Bio::flush(0)),
        abi::OP_DISCARD => Operation::Discard,
        abi::OP_WRITE_ZEROES => Operation::WriteZeroes,
        _ => return Err(libc::EOPNOTSUPP),
    };
    let mut flags = BioFlags::empty();
    if operation.is_write() {
        flags.set(BioFlags::FUA, descriptor.op_flags & abi::IO_FUA != 0);
    }
    if operation == Operation::WriteZeroes {
        flags.set(BioFlags::NO_UNMAP, descriptor.op_flags & abi::IO_NO_UNMAP != 0);
    }
    let data = if operation.has_data() {
        match buffer.take_if(|buffer| sectors << 9 <= buffer.len() as u64) {
            Some(buffer) => Data::Buffer(buffer),
            None => return Err(libc::EINVAL),
        }
    } else {
        Data::None
    };
    Ok(Bio { operation, flags, sector, sectors, data, user_data: 0 })
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

impl Source for QueueSource {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        cx.ring().require(&[("IORING_OP_URING_CMD", opcode::UringCmd16::CODE)])?;
        bind(&self.options.processors);
        let QueueOptions { shared, queue, depth, buffer_bytes, .. } = &self.options;
        self.descriptors = Some(Descriptors::map(&shared.file, *queue, *depth)?);
        self.file = Some(cx.ring().register_file(shared.file.as_fd())?);
        let slot = |_| {
            let mut buffer = IoBuffer::zeroed(*buffer_bytes);
            let address = buffer.as_mut_ptr().expose_provenance() as u64;
            Slot { buffer: Some(buffer), address, good_result: 0 }
        };
        self.slots.extend((0..*depth).map(slot));
        (0..self.options.depth).for_each(|tag| self.command(cx, abi::FETCH, tag, 0));
        Ok(())
    }

    fn on_cqe(&mut self, cx: &mut SourceContext<'_>, cqe: Cqe) {
        if cqe.token.payload() == IDLE {
            return self.trim(cx);
        }
        self.armed -= 1;
        match cqe.result {
            0 => self.arrived.push(cqe.token.payload() as u16),
            // UBLK_IO_RES_ABORT: the device stops.
            result => {
                if result != -libc::ENODEV {
                    self.options.shared.refused.store(result, Ordering::Relaxed);
                }
                self.release(cx);
            }
        }
    }

    fn on_bio(&mut self, cx: &mut SourceContext<'_>, completion: Completion) {
        let tag = completion.user_data as u16;
        let slot = &mut self.slots[usize::from(tag)];
        if let Some(buffer) = completion.data.into_buffer() {
            slot.buffer = Some(buffer);
        }
        self.in_flight -= 1;
        let result = match completion.result {
            Ok(()) => slot.good_result,
            Err(status) => -status.errno(),
        };
        self.commit(cx, tag, result);
    }

    fn on_turn(&mut self, cx: &mut SourceContext<'_>) {
        // A server that goes leaves the rest to the next one.
        if !self.forced {
            self.retry_refused(cx);
            let mut arrived = std::mem::take(&mut self.arrived);
            arrived.drain(..).for_each(|tag| self.begin(cx, tag));
            self.arrived = arrived;
        }
    }

    /// Without `force` the device has been stopped, and all commands come back. With it, this
    /// server goes and leaves the device to another.
    fn stop(&mut self, cx: &mut SourceContext<'_>, force: bool) {
        self.stopping = true;
        if force && !self.forced {
            self.forced = true;
            cx.ring().abandon();
            // They are not in flight, and go to the next server with the rest. The kernel may
            // still be in their buffers.
            self.in_flight -= self.refused.len();
        }
        self.release(cx);
    }

    fn is_stopped(&self) -> bool {
        self.stopping && self.is_drained()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(op_flags: u32, nr_sectors: u32) -> IoDescriptor {
        IoDescriptor { op_flags, nr_sectors, start_sector: 8, addr: 0 }
    }

    #[test]
    fn flags_are_read_where_the_kernel_puts_them() {
        let mut buffer = Some(IoBuffer::zeroed(4096));
        let write = bio_of(&descriptor(abi::OP_WRITE | 1 << 13, 8), &mut buffer).unwrap();
        assert_eq!((write.operation, write.flags), (Operation::Write, BioFlags::FUA));
        assert_eq!((write.sector, write.sectors), (Sector(8), 8));
        assert!(buffer.is_none() && write.data.into_buffer().is_some());
        let zeroes = |flags| bio_of(&descriptor(abi::OP_WRITE_ZEROES | flags, 1 << 21), &mut None).unwrap();
        assert_eq!(zeroes(1 << 15).flags, BioFlags::NO_UNMAP);
        // Where it would be if the word were shifted, there is another flag.
        assert_eq!(zeroes(1 << 23).flags, BioFlags::empty());
        let flush = bio_of(&descriptor(abi::OP_FLUSH | 1 << 13, 0), &mut None).unwrap();
        assert_eq!(
            (flush.operation, flush.flags, flush.sector),
            (Operation::Flush, BioFlags::empty(), Sector(0))
        );
    }

    #[test]
    fn a_request_that_does_not_fit_its_buffer_is_refused_and_the_buffer_kept() {
        let mut buffer = Some(IoBuffer::zeroed(4096));
        assert_eq!(bio_of(&descriptor(abi::OP_READ, 9), &mut buffer).unwrap_err(), libc::EINVAL);
        assert_eq!(bio_of(&descriptor(abi::OP_READ, u32::MAX), &mut buffer).unwrap_err(), libc::EINVAL);
        assert!(buffer.is_some());
        assert_eq!(bio_of(&descriptor(13, 8), &mut buffer).unwrap_err(), libc::EOPNOTSUPP);
    }
}

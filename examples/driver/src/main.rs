//! A driver in a separate package that depends only on `blkq`: it serves a file through io_uring. docs/driver.md explains
//! it step by step. To run it: `cargo run -p blkq-example-driver`

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use blkq::io_uring::{opcode, types};
use blkq::{
    Bio, BioFlags, Cqe, Disk, Driver, DriverContext, DriverQueue, Error, ErrorKind, FileSlot, IoBuffer,
    OpenContext, Operation, QueueLimits, Sector, Status, Tag, Taken,
};

struct FileDevice {
    file: Arc<File>,
    capacity_bytes: u64,
}

impl Driver for FileDevice {
    fn name(&self) -> &'static str {
        "file"
    }

    // The queue receives only requests that fit the limits declared here.
    fn limits(&self) -> QueueLimits {
        QueueLimits {
            capacity_bytes: self.capacity_bytes,
            max_segments: 1,   // no vectored calls, and therefore no merging
            write_cache: true, // a write may be lost until a flush, so the device needs flushes
            fua: false,        // the layer sends a flush after each write with FUA instead
            ..QueueLimits::default()
        }
    }

    fn uses_ring(&self) -> bool {
        true
    }

    // Called on the thread that will use the queue.
    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        let mut ring =
            cx.ring.ok_or_else(|| Error::new(ErrorKind::Invalid, "the file driver needs a ring"))?;
        ring.require(&[
            ("IORING_OP_READ", opcode::Read::CODE),
            ("IORING_OP_WRITE", opcode::Write::CODE),
            ("IORING_OP_FSYNC", opcode::Fsync::CODE),
        ])?;
        let slot = ring.register_file(self.file.as_fd())?;
        Ok(Box::new(FileQueue { slot }))
    }
}

struct FileQueue {
    slot: FileSlot,
}

impl FileQueue {
    /// Submits the rest of the request. Its first driver word counts the bytes already transferred.
    fn submit(&self, cx: &mut DriverContext<'_>, tag: Tag) {
        let done = cx.pdu(tag)[0];
        let mut memory = std::ptr::null_mut();
        cx.for_each_segment(tag, |segment| memory = segment.ptr.wrapping_add(done as usize));
        let request = cx.request(tag);
        let (offset, left) = (request.offset() + done, (request.bytes() - done) as u32);
        let file = cx.file(&self.slot);
        let entry = match request.operation() {
            Operation::Read => opcode::Read::new(file, memory, left).offset(offset).build(),
            Operation::Write => opcode::Write::new(file, memory, left).offset(offset).build(),
            // Only a flush is left, because the limits declare no discards and no write zeroes.
            _ => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
        };
        // SAFETY: the block layer keeps the memory of a request valid until the request completes,
        // and the file stays registered until `close`.
        unsafe { cx.push(entry, u64::from(tag.0)) }
    }
}

// SAFETY: a request completes when the ring has completed the one entry in flight for it.
unsafe impl DriverQueue for FileQueue {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        tags.iter().for_each(|&tag| self.submit(cx, tag));
        Taken::All
    }

    fn complete_cqe(&mut self, cx: &mut DriverContext<'_>, cqe: Cqe) {
        let tag = Tag(cqe.token.payload() as u16);
        let done = cx.pdu(tag)[0] + cqe.result.max(0) as u64;
        let request = cx.request(tag);
        let result = match (cqe.result, request.operation()) {
            (errno, _) if errno < 0 => Err(Status::from_errno(-errno)),
            _ if done == request.bytes() => Ok(()),
            (0, Operation::Read) => Err(Status::Io), // the file has become shorter
            (0, _) => Err(Status::NoSpace),
            _ => {
                // After a short transfer the driver continues: a submitter never sees one.
                cx.pdu(tag)[0] = done;
                return self.submit(cx, tag);
            }
        };
        cx.complete(tag, result);
    }

    fn close(&mut self, cx: &mut DriverContext<'_>) {
        if let Some(mut ring) = cx.registrar() {
            ring.unregister_file(&mut self.slot);
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::temp_dir().join(format!("blkq-driver-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    file.set_len(1 << 20)?;

    let device = FileDevice { file: Arc::new(file), capacity_bytes: 1 << 20 };
    let mut queue = Disk::builder(Box::new(device)).build()?.open_queue(0)?;
    let mut buffer = IoBuffer::zeroed(4096);
    buffer.fill(7);
    queue.submit(Bio::write(Sector(8), buffer, 1).with_flags(BioFlags::FUA)).expect("room");
    queue.wait(1);
    assert_eq!(queue.take_completion().map(|completion| completion.result), Some(Ok(())));

    let content = std::fs::read(&path)?;
    std::fs::remove_file(&path)?;
    assert!(content[4096..8192].iter().all(|byte| *byte == 7));
    println!("4096 bytes at 4096: written, durable, and in the file");
    Ok(())
}

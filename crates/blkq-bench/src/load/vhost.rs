//! The load of a virtual machine: requests to a vhost-user-blk server. The front end, crate `virtio-driver`, shares no code
//! with blkq's server, so that both cannot have the same defect. Each queue has a thread, which sleeps on the call eventfd
//! until the server signals a completion, and does not poll.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioBlkQueue,
    VirtioBlkReqBuf, VirtioBlkTransport, VirtioFeatureFlags,
};

use crate::load::{Load, Offsets};
use crate::measurement::{Run, Stopwatch, together};
use crate::metric::Metric;
use crate::{Error, Result, ensure};

pub const IS_POSSIBLE: bool = true;
const COMPLETION_WAIT: Duration = Duration::from_secs(30);
/// Entries of a ring. A request uses three: for its header, its data and its status.
const RING_SIZE: u16 = 256;
/// All servers that are measured offer these features.
const REQUIRED: VirtioFeatureFlags = VirtioFeatureFlags::RING_EVENT_IDX.union(VirtioFeatureFlags::VERSION_1);
/// Features that the front end accepts in addition, as a guest's driver does (virtio 1.2, 5.2.3).
const ACCEPTED: VirtioBlkFeatureFlags = VirtioBlkFeatureFlags::RO
    .union(VirtioBlkFeatureFlags::BLK_SIZE)
    .union(VirtioBlkFeatureFlags::FLUSH)
    .union(VirtioBlkFeatureFlags::MQ)
    .union(VirtioBlkFeatureFlags::DISCARD)
    .union(VirtioBlkFeatureFlags::WRITE_ZEROES);

/// A connected front end. Dropping it closes the connection, which stops its queues.
pub struct FrontEnd {
    queues: Vec<Queue>,
    /// Size of the device.
    bytes: u64,
    /// The data buffers of all queues, which the server maps.
    pub memory: MmapMut,
    /// Contains the memory of the rings.
    _transport: Box<VirtioBlkTransport>,
}

struct Queue {
    /// The context of a request is the number of its buffer.
    ring: VirtioBlkQueue<'static, usize>,
    kick: Box<dyn QueueNotifier>,
    call: Arc<EventFd>,
}

impl FrontEnd {
    /// Connects to the server at `socket`, with `count` queues that have buffers for `load`. Fails with a
    /// [`std::io::Error`] if no server listens, and with another error if the server lacks a required feature, rejects a
    /// message, or offers fewer queues.
    pub fn connect(socket: &Path, load: &Load, count: usize) -> Result<FrontEnd> {
        let features = REQUIRED.bits() | ACCEPTED.bits();
        let connected =
            VhostUser::<VirtioBlkConfig, VirtioBlkReqBuf>::new(&socket.to_string_lossy(), features);
        let mut transport: Box<VirtioBlkTransport> = Box::new(connected.map_err(|e| match e.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => Error::from(e),
            _ => rejected(e),
        })?);
        let offered = transport.get_features();
        ensure(offered & REQUIRED.bits() == REQUIRED.bits(), || {
            format!("the server offers the features {offered:#x}; {:#x} are required", REQUIRED.bits())
        })?;
        let sectors = u64::from(transport.get_config().map_err(rejected)?.capacity);
        let bytes =
            sectors.checked_mul(512).ok_or_else(|| format!("the server reports {sectors} sectors"))?;
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        file.set_len((count * load.depth * load.block_bytes as usize) as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK)?;
        // SAFETY: the file cannot shrink. The server writes a buffer only while a request on it is in flight.
        let memory = unsafe { MmapMut::map_mut(&file)? };
        let address = memory.as_ptr().addr();
        transport.map_mem_region(address, memory.len(), file.as_raw_fd(), 0).map_err(rejected)?;
        let rings = VirtioBlkQueue::setup_queues(&mut *transport, count, RING_SIZE).map_err(rejected)?;
        let queue = |(index, ring)| Queue {
            ring,
            kick: transport.get_submission_notifier(index),
            call: transport.get_completion_fd(index),
        };
        let queues = rings.into_iter().enumerate().map(queue).collect();
        Ok(FrontEnd { queues, bytes, memory, _transport: transport })
    }
}

fn rejected(error: std::io::Error) -> Error {
    format!("the server and the front end cannot agree: {error}").into()
}

struct Done {
    latencies_ns: Vec<u32>,
    kicks: u64,
    waits: u64,
}

/// Runs `load` on each queue for `length`, and waits until all requests have completed. `load` must have the depth and the
/// block size that were passed to [`FrontEnd::connect`], and no [`Load::ios_max`].
pub fn run(front_end: &mut FrontEnd, load: &Load, length: Duration) -> Result<Run> {
    assert!(load.ios_max.is_none(), "the load of a virtual machine has no maximum number of I/Os");
    let FrontEnd { queues, bytes, memory, .. } = front_end;
    let buffers = memory.chunks_exact_mut(load.depth * load.block_bytes as usize);
    let (stopwatch, done) = together(queues.iter_mut().zip(buffers), |(queue, buffers)| {
        queue.run(buffers, load, load.offsets(*bytes), length)
    })?;
    report(done, &stopwatch)
}

/// Merges the figures of all queues, under the metrics of a client.
fn report(done: Vec<Done>, stopwatch: &Stopwatch) -> Result<Run> {
    let (kicks, waits) = done.iter().fold((0, 0), |(kicks, waits), of| (kicks + of.kicks, waits + of.waits));
    let mut latencies_ns: Vec<u32> = done.into_iter().flat_map(|of| of.latencies_ns).collect();
    let ios = latencies_ns.len() as u64;
    let run = stopwatch.run_of(ios)?;
    let mean_us = latencies_ns.iter().map(|ns| u64::from(*ns)).sum::<u64>() as f64 / ios as f64 / 1e3;
    latencies_ns.sort_unstable();
    let percentile = |share: f64| {
        f64::from(latencies_ns[((ios as f64 * share) as usize).min(latencies_ns.len() - 1)]) / 1e3
    };
    Ok(Run::new(ios)
        .with(Metric::Iops, run.value(Metric::Iops))
        .with(Metric::LatencyMeanUs, mean_us)
        .with(Metric::LatencyP50Us, percentile(0.5))
        .with(Metric::LatencyP99Us, percentile(0.99))
        .with(Metric::LatencyP999Us, percentile(0.999))
        .with(Metric::ClientCpuNsPerIo, run.value(Metric::CpuNsPerIo))
        .with(Metric::ClientSwitchesPerIo, run.value(Metric::ContextSwitchesPerIo))
        .per_io(Metric::KicksPerIo, kicks)
        .per_io(Metric::CallsPerIo, waits))
}

impl Queue {
    /// Reads the clock once per turn: all completions of a turn complete at that time, and all requests submitted in
    /// the next turn start at that time.
    fn run(
        &mut self,
        buffers: &mut [u8],
        load: &Load,
        mut offsets: Offsets,
        length: Duration,
    ) -> Result<Done> {
        let began = Instant::now();
        let mut now = began;
        let mut begun = vec![began; load.depth];
        let mut free: Vec<usize> = (0..load.depth).collect();
        let mut done = Done { latencies_ns: Vec::with_capacity(1 << 20), kicks: 0, waits: 0 };
        let block_bytes = load.block_bytes as usize;
        loop {
            if now - began < length {
                for slot in free.drain(..) {
                    let (offset, buffer) =
                        (offsets.next_bytes(), &mut buffers[slot * block_bytes..][..block_bytes]);
                    if load.write {
                        self.ring.write(offset, buffer, slot)?;
                    } else {
                        self.ring.read(offset, buffer, slot)?;
                    }
                    begun[slot] = now;
                }
                if self.ring.avail_notif_needed() {
                    self.kick.notify()?;
                    done.kicks += 1;
                }
            }
            if free.len() == load.depth {
                return Ok(done);
            }
            done.waits += self.wait()?;
            now = Instant::now();
            for completion in self.ring.completions() {
                let (slot, error) = (completion.context, -completion.ret);
                ensure(error == 0, || {
                    let error = std::io::Error::from_raw_os_error(error);
                    format!("vhost-user-blk: a request completed with an error: {error}")
                })?;
                done.latencies_ns.push(u32::try_from((now - begun[slot]).as_nanos()).unwrap_or(u32::MAX));
                free.push(slot);
            }
        }
    }

    /// Sleeps until a request has completed. Returns the number of signals from the server; 0 if one had
    /// completed before. Fails if nothing completes within [`COMPLETION_WAIT`].
    fn wait(&mut self) -> Result<u64> {
        let time: Timespec = COMPLETION_WAIT.try_into()?;
        let mut calls = 0;
        self.ring.set_used_notif_enabled(true);
        while !self.ring.completions().has_next() {
            let ready = poll(&mut [PollFd::new(&self.call, PollFlags::IN)], Some(&time))?;
            ensure(ready > 0, || format!("no call from the server within {COMPLETION_WAIT:?}"))?;
            // This read does not block, because no other thread reads the eventfd.
            self.call.read()?;
            calls += 1;
        }
        // Completions that are reaped request no further signal.
        self.ring.set_used_notif_enabled(false);
        Ok(calls)
    }
}

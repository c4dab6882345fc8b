use std::time::Duration;

use blkq::drivers::null::{Null, NullOptions};
use blkq::testing::{assert_stays, assert_stays_for};
use blkq::{Disk, EngineThread};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::*;

fn descriptor(op_flags: u32, nr_sectors: u32) -> IoDescriptor {
    IoDescriptor { op_flags, nr_sectors, start_sector: 8, addr: 0 }
}

// Contract: no-unmap
#[test]
fn flags_are_read_where_the_kernel_puts_them() {
    let write = bio_of(&descriptor(abi::OP_WRITE | 1 << 13, 8), 4096).unwrap();
    assert_eq!((write.operation, write.flags), (Operation::Write, BioFlags::FUA));
    assert_eq!((write.sector, write.sectors), (Sector(8), 8));
    let zeroes = |flags| bio_of(&descriptor(abi::OP_WRITE_ZEROES | flags, 1 << 21), 4096).unwrap();
    assert_eq!(zeroes(1 << 15).flags, BioFlags::NO_UNMAP);
    // Shifted by 8, as the header has it, the flag would be this bit, which has another meaning.
    assert_eq!(zeroes(1 << 23).flags, BioFlags::empty());
    let flush = bio_of(&descriptor(abi::OP_FLUSH | 1 << 13, 0), 4096).unwrap();
    assert_eq!(
        (flush.operation, flush.flags, flush.sector),
        (Operation::Flush, BioFlags::empty(), Sector(0))
    );
}

#[test]
fn a_request_too_large_or_of_an_unknown_kind_is_rejected() {
    for sectors in [0, 9, u32::MAX] {
        assert_eq!(bio_of(&descriptor(abi::OP_READ, sectors), 4096).unwrap_err(), libc::EINVAL);
    }
    assert_eq!(bio_of(&descriptor(13, 8), 4096).unwrap_err(), libc::EOPNOTSUPP);
}

// Contract: errors
#[test]
fn a_tag_is_lost_unless_its_command_succeeds_or_is_aborted() {
    assert_eq!(refusal(-libc::ENODEV), None, "aborted");
    assert_eq!(refusal(-libc::EINVAL), Some(libc::EINVAL));
    assert_eq!(refusal(1), Some(libc::EPROTO));
}

fn engine_and_options() -> (EngineThread, QueueOptions) {
    let disk = Disk::builder(Box::new(Null::new(NullOptions::new(1 << 20)).unwrap())).build().unwrap();
    (EngineThread::spawn("ublk", vec![(disk, 0)]).unwrap(), options())
}

fn options() -> QueueOptions {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let (refused, failure_event) = (OnceLock::new(), Arc::new(event));
    QueueOptions {
        shared: Arc::new(Shared { file: File::open("/dev/zero").unwrap(), refused, failure_event }),
        queue: 0,
        depth: 2,
        thread: 0,
        threads: 1,
        copy: CopyMode::Kernel,
        request_max_bytes: 4096,
        processors: CpuSet::new(),
    }
}

fn wait_for_failure(shared: &Shared) {
    let minute = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
    let mut fds = [PollFd::new(&shared.failure_event, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&minute)), Ok(1));
}

/// /dev/zero acts as a device whose commands the kernel refuses.
// Contract: errors
#[test]
fn a_refused_command_is_reported() {
    let (engine, options) = engine_and_options();
    let shared = options.shared.clone();
    engine.handle().add_source(move || Box::new(QueueSource::new(options)) as Box<dyn Source>).unwrap();
    wait_for_failure(&shared);
    let (queue, tag, errno) = *shared.refused.get().unwrap();
    assert_eq!((queue, errno), (0, libc::EOPNOTSUPP));
    assert!(tag < 2);
}

#[test]
fn every_tag_is_served_by_exactly_one_thread() {
    for (depth, threads) in [(1, 1), (1, 3), (7, 2), (128, 5), (4096, 64)] {
        let mut tags: Vec<u16> = (0..threads)
            .flat_map(|thread| {
                let tags = QueueOptions { depth, thread, threads, ..options() }.tags();
                assert!(tags.len() <= usize::from(depth.div_ceil(threads)));
                tags
            })
            .collect();
        tags.sort_unstable();
        assert_eq!(tags, (0..depth).collect::<Vec<u16>>(), "{threads} threads");
    }
    let (engine, options) = engine_and_options();
    let options = QueueOptions { depth: 6, thread: 1, threads: 3, ..options };
    assert_eq!(options.tags().collect::<Vec<u16>>(), [1, 4]);
    let shared = options.shared.clone();
    engine.handle().add_source(move || Box::new(QueueSource::new(options)) as Box<dyn Source>).unwrap();
    wait_for_failure(&shared);
    assert!([1, 4].contains(&shared.refused.get().unwrap().1));
}

/// A queue with one command that the kernel never completes.
struct Armed(QueueSource);

// SAFETY: the source has submitted nothing that could be in flight.
unsafe impl Source for Armed {
    fn start(&mut self, _: &mut SourceContext<'_>) -> Result<(), Error> {
        self.0.armed = 1;
        Ok(())
    }

    fn on_cqe(&mut self, _: &mut SourceContext<'_>, _: Cqe) {}
    fn on_bio(&mut self, _: &mut SourceContext<'_>, _: Completion) {}
    fn on_turn(&mut self, _: &mut SourceContext<'_>) {}

    fn stop(&mut self, cx: &mut SourceContext<'_>, force: bool) {
        self.0.stop(cx, force);
    }

    fn is_stopped(&self) -> bool {
        self.0.is_stopped()
    }
}

#[test]
fn buffers_of_unfinished_commands_stay_until_the_engine_exits() {
    let (engine, options) = engine_and_options();
    let handle = engine.handle().clone();
    let source = handle.add_source(move || Box::new(Armed(QueueSource::new(options)))).unwrap();
    let stop = std::thread::spawn(move || handle.stop_source(source, true));
    assert_stays("the source is kept", || !stop.is_finished());
    drop(engine);
    stop.join().unwrap();
}

/// A queue whose buffers were just used.
struct Used(QueueSource);

// SAFETY: all notifications are passed on.
unsafe impl Source for Used {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        self.0.use_memory(cx);
        Ok(())
    }

    fn on_cqe(&mut self, cx: &mut SourceContext<'_>, cqe: Cqe) {
        self.0.on_cqe(cx, cqe);
    }

    fn on_bio(&mut self, _: &mut SourceContext<'_>, _: Completion) {}
    fn on_turn(&mut self, _: &mut SourceContext<'_>) {}

    fn stop(&mut self, cx: &mut SourceContext<'_>, force: bool) {
        self.0.stop(cx, force);
    }

    fn is_stopped(&self) -> bool {
        self.0.is_stopped()
    }
}

/// A source that submits nothing, and notes completions.
struct Silent(Arc<OnceLock<i32>>);

// SAFETY: the source submits nothing.
unsafe impl Source for Silent {
    fn start(&mut self, _: &mut SourceContext<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn on_cqe(&mut self, _: &mut SourceContext<'_>, cqe: Cqe) {
        let _ = self.0.set(cqe.result);
    }

    fn on_bio(&mut self, _: &mut SourceContext<'_>, _: Completion) {}
    fn on_turn(&mut self, _: &mut SourceContext<'_>) {}
    fn stop(&mut self, _: &mut SourceContext<'_>, _: bool) {}

    fn is_stopped(&self) -> bool {
        true
    }
}

#[test]
fn the_timeout_of_a_stopped_queue_reaches_no_other_source() {
    let (engine, options) = engine_and_options();
    let handle = engine.handle();
    let queue = handle.add_source(move || Box::new(Used(QueueSource::new(options)))).unwrap();
    handle.stop_source(queue, false);
    let completion = Arc::new(OnceLock::new());
    let noted = completion.clone();
    handle.add_source(move || Box::new(Silent(noted))).unwrap();
    // Longer than the timeout.
    let time = Duration::from_millis(1200);
    assert_stays_for(time, "the next source has no completion", || completion.get().is_none());
}

#[test]
fn pages_that_are_not_registered_are_copied() {
    let (plain, marked) = (descriptor(abi::OP_READ, 8), descriptor(abi::OP_READ | 1 << 17, 8));
    assert_eq!(copy_of(&plain, CopyMode::None), CopyMode::None);
    assert_eq!(copy_of(&marked, CopyMode::None), CopyMode::User);
    for mode in [CopyMode::Kernel, CopyMode::User] {
        assert_eq!(copy_of(&marked, mode), mode, "the mark has a meaning for copy mode none only");
    }
}

#[test]
fn queues_are_as_far_apart_as_the_kernel_rounds() {
    assert_eq!(queue_bytes(QUEUE_DEPTH_MAX, 4096), 96 << 10);
    assert_eq!(queue_bytes(QUEUE_DEPTH_MAX, 65536), 128 << 10);
    assert_eq!((queue_bytes(1, 4096), queue_bytes(171, 4096), queue_bytes(1, 65536)), (4096, 8192, 65536));
}

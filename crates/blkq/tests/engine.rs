//! Engines and their sources: load from the engine's thread, messages, offloaded work, stopping.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{Behaviour, Device, Finish, filled, plain_limits};
use blkq::drivers::null::{Null, NullOptions};
use blkq::testing::{assert_stays, wait_until};
use blkq::{
    Bio, BioFlags, Completion, Cqe, Disk, Driver, DriverContext, DriverQueue, EngineThread, Error, ErrorKind,
    OpenContext, QueueLimits, Sector, Source, SourceContext, Tag, Taken, Wake,
};

#[derive(Default)]
struct Seen {
    done: AtomicU64,
    turns: AtomicU64,
    cqes: AtomicU64,
    stops: Mutex<Vec<bool>>,
    dropped: AtomicBool,
    /// The threads on which a method of the source ran.
    threads: Mutex<Vec<String>>,
}

/// Keeps `wanted` reads in flight, over all queues of the engine.
struct Load {
    seen: Arc<Seen>,
    wanted: u64,
    in_flight: u64,
    next: u64,
    stopping: bool,
    refuse_start: bool,
}

impl Load {
    fn new(seen: &Arc<Seen>, wanted: u64) -> Load {
        Load { seen: seen.clone(), wanted, in_flight: 0, next: 0, stopping: false, refuse_start: false }
    }

    fn note_thread(&self) {
        let name = std::thread::current().name().unwrap_or("").to_string();
        let mut threads = self.seen.threads.lock().unwrap();
        if !threads.contains(&name) {
            threads.push(name);
        }
    }
}

struct Ask(Sender<u64>);

/// Offloads a job that waits for a message on the receiver, and then sends one on the sender.
struct Wait(Receiver<()>, Sender<u64>);

struct Panic;

/// Submits operations with all 64 bits of `user_data` set, and sends the values that come back.
struct Marks(Sender<(&'static str, u64)>);

// SAFETY: its engine has no other source.
unsafe impl Source for Marks {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        // SAFETY: the operation uses no memory.
        unsafe { cx.push(io_uring_nop(), u64::MAX - 1) };
        let bio = Bio { user_data: u64::MAX - 2, ..Bio::read(Sector(0), filled(512, 0), 0) };
        cx.submit(0, bio).map_err(|_| Error::new(ErrorKind::Busy, "no room"))
    }

    fn on_cqe(&mut self, _: &mut SourceContext<'_>, cqe: Cqe) {
        self.0.send(("cqe", cqe.token.payload())).unwrap();
    }

    fn on_bio(&mut self, _: &mut SourceContext<'_>, completion: Completion) {
        self.0.send(("bio", completion.user_data)).unwrap();
    }

    fn on_turn(&mut self, _: &mut SourceContext<'_>) {}
    fn stop(&mut self, _: &mut SourceContext<'_>, _: bool) {}

    fn is_stopped(&self) -> bool {
        true
    }
}

#[test]
fn user_data_of_a_source_reaches_no_other_owner() {
    const LOW_BITS: u64 = (1 << 48) - 1;
    let engine = EngineThread::spawn("test-engine", vec![(null_disk(1), 0)]).unwrap();
    let (sender, received) = channel();
    engine.handle().add_source(move || Box::new(Marks(sender))).unwrap();
    let wait = || received.recv_timeout(Duration::from_secs(60)).expect("another owner has it");
    let mut seen = [wait(), wait()];
    seen.sort();
    assert_eq!(seen, [("bio", LOW_BITS - 2), ("cqe", LOW_BITS - 1)]);
}

// SAFETY: the source reports that it is stopped only when no bio is in flight, and the operation that it
// pushes uses no memory.
unsafe impl Source for Load {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        self.note_thread();
        if self.refuse_start {
            return Err(Error::new(ErrorKind::Invalid, "no"));
        }
        assert!(cx.queue_count() > 0 && cx.limits(0).capacity_bytes == cx.disk(0).limits().capacity_bytes);
        let entry = io_uring_nop();
        // SAFETY: the operation uses no memory.
        unsafe { cx.push(entry, 42) };
        Ok(())
    }

    fn on_cqe(&mut self, _: &mut SourceContext<'_>, cqe: Cqe) {
        assert_eq!((cqe.token.payload(), cqe.result), (42, 0));
        self.seen.cqes.fetch_add(1, Ordering::Relaxed);
    }

    fn on_bio(&mut self, _: &mut SourceContext<'_>, completion: Completion) {
        assert!(completion.user_data < self.next && completion.data.into_buffer().is_some());
        self.in_flight -= 1;
        self.seen.done.fetch_add(1, Ordering::Relaxed);
    }

    fn on_message(&mut self, cx: &mut SourceContext<'_>, message: Box<dyn Any + Send>) {
        self.note_thread();
        if message.is::<Panic>() {
            return cx.offload(|| panic!("a panic for the test"));
        }
        let message = match message.downcast::<Wait>() {
            Ok(wait) => {
                return cx.offload(move || {
                    let Wait(go, reply) = *wait;
                    go.recv().unwrap();
                    Box::new((reply, 1u64))
                });
            }
            Err(other) => other,
        };
        match message.downcast::<Ask>() {
            Ok(ask) => cx.offload(move || {
                // Reports whether the job runs on the worker thread.
                let is_worker = std::thread::current().name() == Some("blkq-worker");
                Box::new((ask.0, u64::from(is_worker)))
            }),
            Err(other) => {
                let (reply, value) = *other.downcast::<(Sender<u64>, u64)>().unwrap();
                reply.send(value).unwrap();
            }
        }
    }

    fn on_turn(&mut self, cx: &mut SourceContext<'_>) {
        self.seen.turns.fetch_add(1, Ordering::Relaxed);
        while !self.stopping && self.in_flight < self.wanted {
            let queue = self.next as usize % cx.queue_count();
            if cx.submit(queue, Bio::read(Sector(self.next % 500 * 4), filled(512, 0), self.next)).is_err() {
                return;
            }
            self.next += 1;
            self.in_flight += 1;
        }
    }

    fn stop(&mut self, _: &mut SourceContext<'_>, force: bool) {
        self.stopping = true;
        self.seen.stops.lock().unwrap().push(force);
    }

    fn is_stopped(&self) -> bool {
        self.stopping && self.in_flight == 0
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.note_thread();
        assert_eq!(self.in_flight, 0, "dropped with I/O in flight");
        self.seen.dropped.store(true, Ordering::SeqCst);
    }
}

fn io_uring_nop() -> io_uring::squeue::Entry {
    io_uring::opcode::Nop::new().build()
}

fn null_disk(queues: usize) -> Arc<Disk> {
    Disk::builder(Box::new(Null::new(NullOptions::new(1 << 30)).unwrap())).queues(queues).build().unwrap()
}

// Contract: non-blocking
#[test]
fn a_source_whose_bios_complete_at_once_does_not_starve_others() {
    let (disk, other) = (null_disk(2), null_disk(1));
    let queues = vec![(disk.clone(), 0), (disk.clone(), 1), (other, 0)];
    let engine = EngineThread::spawn("test-engine", queues).unwrap();
    assert!(engine.handle().kernel_buffers() > 0, "its ring has a table for the kernel to fill");
    let seen = Arc::new(Seen::default());
    let source = seen.clone();
    let id = engine.handle().add_source(move || Box::new(Load::new(&source, 64))).unwrap();
    wait_until("the load runs", || {
        seen.done.load(Ordering::Relaxed) > 10_000 && seen.cqes.load(Ordering::Relaxed) == 1
    });
    // Messages, freezes and I/O of other threads are not delayed by the load.
    let (reply, answer) = channel();
    engine.handle().send(id, Box::new(Ask(reply)));
    assert_eq!(answer.recv_timeout(Duration::from_secs(60)).unwrap(), 1);
    disk.submitter().read_at(&mut [0; 512], 0).unwrap();
    drop(disk.freeze());
    let before = seen.done.load(Ordering::Relaxed);
    wait_until("the load still runs", || seen.done.load(Ordering::Relaxed) > before + 1000);
    engine.handle().stop_source(id, false);
    assert!(seen.dropped.load(Ordering::SeqCst));
    assert_eq!(*seen.stops.lock().unwrap(), [false]);
    assert_eq!(*seen.threads.lock().unwrap(), ["test-engine"]);
    // The number of the stopped source is free, and messages to it are dropped.
    engine.handle().send(id, Box::new(()));
    engine.handle().stop_source(id, true);
    let seen = Arc::new(Seen::default());
    let source = seen.clone();
    assert_ne!(engine.handle().add_source(move || Box::new(Load::new(&source, 1))).unwrap(), id);
    drop(engine);
    assert!(seen.dropped.load(Ordering::SeqCst));
    assert_eq!(*seen.stops.lock().unwrap(), [true]);
}

// Contract: detach
#[test]
fn stopping_waits_for_the_io_in_flight() {
    let device = Device::held();
    let disk = device.builder().build().unwrap();
    let engine = EngineThread::spawn("test-engine", vec![(disk, 0)]).unwrap();
    let seen = Arc::new(Seen::default());
    let source = seen.clone();
    let id = engine.handle().add_source(move || Box::new(Load::new(&source, 8))).unwrap();
    wait_until("the device has 8 reads", || device.state().held == 8);
    std::thread::scope(|scope| {
        let stop = scope.spawn(|| engine.handle().stop_source(id, true));
        wait_until("the source is asked to stop", || !seen.stops.lock().unwrap().is_empty());
        assert_stays("the source waits for its I/O", || {
            !stop.is_finished() && !seen.dropped.load(Ordering::SeqCst)
        });
        device.release(8);
        stop.join().unwrap();
    });
    assert!(seen.dropped.load(Ordering::SeqCst));
    assert_eq!(seen.done.load(Ordering::Relaxed), 8);
}

#[test]
fn a_source_that_does_not_start_is_removed() {
    let engine = EngineThread::spawn("test-engine", vec![(null_disk(1), 0)]).unwrap();
    let seen = Arc::new(Seen::default());
    let source = seen.clone();
    let error = engine.handle().add_source(move || {
        let mut load = Load::new(&source, 1);
        load.refuse_start = true;
        Box::new(load)
    });
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Invalid);
    wait_until("the source is dropped", || seen.dropped.load(Ordering::SeqCst));
}

/// Pushes an operation that uses its memory, and fails to start.
struct Failing {
    time: Box<io_uring::types::Timespec>,
    in_flight: bool,
    stopping: bool,
    events: Sender<&'static str>,
}

// SAFETY: the source reports that it is stopped only when the operation that it pushed has completed.
unsafe impl Source for Failing {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        let entry = io_uring::opcode::Timeout::new(&raw const *self.time).build();
        // SAFETY: the time is dropped with the source, after the operation has completed.
        unsafe { cx.push(entry, 1) };
        self.in_flight = true;
        Err(Error::new(ErrorKind::Invalid, "no"))
    }

    fn on_cqe(&mut self, _: &mut SourceContext<'_>, _: Cqe) {
        self.in_flight = false;
        self.events.send("completed").unwrap();
    }

    fn on_bio(&mut self, _: &mut SourceContext<'_>, _: Completion) {}
    fn on_turn(&mut self, _: &mut SourceContext<'_>) {}

    fn stop(&mut self, _: &mut SourceContext<'_>, force: bool) {
        assert!(!force, "the engine keeps running");
        self.stopping = true;
    }

    fn is_stopped(&self) -> bool {
        self.stopping && !self.in_flight
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        self.events.send("dropped").unwrap();
    }
}

#[test]
fn a_source_that_fails_to_start_is_dropped_once_it_is_idle() {
    let engine = EngineThread::spawn("test-engine", vec![(null_disk(1), 0)]).unwrap();
    let (events, happened) = channel();
    let error = engine.handle().add_source(move || {
        let time = Box::new(io_uring::types::Timespec::from(Duration::from_millis(50)));
        Box::new(Failing { time, in_flight: false, stopping: false, events })
    });
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Invalid);
    let next = || happened.recv_timeout(Duration::from_secs(60));
    assert_eq!([next(), next()], [Ok("completed"), Ok("dropped")]);
}

#[test]
fn a_handle_reports_that_its_engine_has_exited() {
    let engine = EngineThread::spawn("test-engine", vec![(null_disk(1), 0)]).unwrap();
    let handle = engine.handle().clone();
    let seen = Arc::new(Seen::default());
    let source = seen.clone();
    let id = handle.add_source(move || Box::new(Load::new(&source, 4))).unwrap();
    drop(engine);
    assert!(seen.dropped.load(Ordering::SeqCst));
    let (done, completed) = channel();
    std::thread::spawn(move || {
        let late = seen.clone();
        let error = handle.add_source(move || Box::new(Load::new(&late, 4)));
        handle.stop_source(id, false);
        handle.send(id, Box::new(()));
        done.send(error.is_err()).unwrap();
    });
    assert_eq!(completed.recv_timeout(Duration::from_secs(60)), Ok(true));
}

#[test]
fn an_idle_engine_sleeps() {
    let engine = EngineThread::spawn("test-engine", vec![(null_disk(1), 0)]).unwrap();
    let seen = Arc::new(Seen::default());
    let source = seen.clone();
    engine.handle().add_source(move || Box::new(Load::new(&source, 0))).unwrap();
    wait_until("its one operation completes", || seen.cqes.load(Ordering::Relaxed) == 1);
    let before = seen.turns.load(Ordering::Relaxed);
    // A few turns may still follow from the start.
    assert_stays("no turns without work", || seen.turns.load(Ordering::Relaxed) - before < 10);
}

/// A device whose requests complete on another thread at the worst moment: its queue is woken after it was
/// polled, and before its engine sleeps.
struct Late;

struct LateQueue {
    wake: Arc<dyn Wake>,
    tags: Vec<Tag>,
    completed: bool,
}

impl Driver for Late {
    fn name(&self) -> &'static str {
        "late"
    }

    fn limits(&self) -> QueueLimits {
        QueueLimits { capacity_bytes: 1 << 20, ..QueueLimits::default() }
    }

    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(LateQueue { wake: cx.wake, tags: Vec::new(), completed: false }))
    }
}

// SAFETY: nothing uses the memory of a request.
unsafe impl DriverQueue for LateQueue {
    fn queue_requests(&mut self, _cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        self.tags.extend_from_slice(tags);
        self.complete_elsewhere();
        Taken::All
    }

    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        if std::mem::take(&mut self.completed) {
            cx.complete_all(&self.tags);
            self.tags.clear();
        }
    }
}

impl LateQueue {
    fn complete_elsewhere(&mut self) {
        self.completed = true;
        let wake = self.wake.clone();
        std::thread::spawn(move || wake.wake()).join().unwrap();
    }
}

// Contract: accepted-once
#[test]
fn a_wake_up_between_the_last_check_and_the_sleep_is_not_lost() {
    let disk = Disk::builder(Box::new(Late)).build().unwrap();
    let engine = EngineThread::spawn("test-engine", vec![(disk.clone(), 0)]).unwrap();
    let (done, completed) = channel();
    std::thread::spawn(move || done.send(disk.submitter().write_at(&[0; 512], 0)));
    assert!(completed.recv_timeout(Duration::from_secs(60)).expect("the engine sleeps").is_ok());
    drop(engine);
}

#[test]
fn queues_that_do_not_exist_or_are_taken_are_rejected() {
    let disk = null_disk(2);
    let kind = |queues| EngineThread::spawn("test-engine", queues).err().map(|error: Error| error.kind());
    assert_eq!(kind(vec![(disk.clone(), 2)]), Some(ErrorKind::NotFound));
    assert_eq!(kind(vec![(disk.clone(), 0), (disk.clone(), 0)]), Some(ErrorKind::Busy));
    assert!(disk.open_queue(7).is_err());
    let engine = EngineThread::spawn("test-engine", vec![(disk.clone(), 0)]).unwrap();
    assert_eq!(kind(vec![(disk.clone(), 0)]), Some(ErrorKind::Busy));
    drop(engine);
    assert_eq!(kind(vec![(disk, 0)]), None);
}

/// Submits a write with FUA to a device without FUA, so that a flush must follow it, and a flush. Then waits.
struct Durable {
    seen: Arc<Seen>,
    left: usize,
    stopping: bool,
}

// SAFETY: the source reports that it is stopped only when no bio is in flight.
unsafe impl Source for Durable {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        let write = Bio::write(Sector(0), filled(512, 1), 0).with_flags(BioFlags::FUA);
        for bio in [write, Bio::flush(1)] {
            assert!(cx.submit(0, bio).is_ok());
        }
        Ok(())
    }

    fn on_cqe(&mut self, _: &mut SourceContext<'_>, _: Cqe) {}

    fn on_bio(&mut self, _: &mut SourceContext<'_>, completion: Completion) {
        assert_eq!(completion.result, Ok(()));
        self.left -= 1;
        self.seen.done.fetch_add(1, Ordering::Relaxed);
    }

    fn on_turn(&mut self, _: &mut SourceContext<'_>) {
        self.seen.turns.fetch_add(1, Ordering::Relaxed);
    }

    fn stop(&mut self, _: &mut SourceContext<'_>, _: bool) {
        self.stopping = true;
    }

    fn is_stopped(&self) -> bool {
        self.stopping && self.left == 0
    }
}

#[test]
fn a_flush_behind_data_without_a_tag_lets_the_engine_sleep() {
    let limits = QueueLimits { write_cache: true, ..plain_limits() };
    let behaviour = Behaviour { finish: Finish::Held, ..Behaviour::default() };
    let device = Device::new(limits, behaviour).with_shared_tags();
    let disk = device.builder().queues(2).shared_tags(true).depth(1).build().unwrap();
    let engines = [0, 1].map(|index| EngineThread::spawn("test", vec![(disk.clone(), index)]).unwrap());
    let mut holder = disk.submitter();
    // Uses the only tag.
    let (sender, receiver) = channel();
    holder.submit(Bio::read(Sector(8), filled(512, 0), 0), move |result, _| sender.send(result).unwrap());
    wait_until("the device has the read", || device.state().held > 0);
    let seen = Arc::new(Seen::default());
    let source = seen.clone();
    engines[1]
        .handle()
        .add_source(move || Box::new(Durable { seen: source, left: 2, stopping: false }))
        .unwrap();
    let before = seen.turns.load(Ordering::Relaxed);
    assert_stays("no turns while there is nothing to do", || {
        seen.turns.load(Ordering::Relaxed) - before < 50
    });
    device.release_all();
    assert_eq!(receiver.recv_timeout(Duration::from_secs(60)), Ok(Ok(())));
    wait_until("the write and the flush complete", || seen.done.load(Ordering::Relaxed) == 2);
    drop(engines);
    device.assert_legal();
}

/// A thread submits a write that makes the driver panic, and waits for it.
#[test]
#[ignore = "aborts the process: run by a_panic_on_an_engine_aborts_the_process"]
fn an_engine_panics() {
    let ram = blkq::drivers::ram::Ram::new(1 << 20, 512, false).unwrap();
    let fault = blkq_drivers::fault::Fault::new(Arc::new(ram), "panic,op=write".parse().unwrap()).unwrap();
    let disk = Disk::builder(Box::new(fault)).build().unwrap();
    let _engine = EngineThread::spawn("engine-that-panics", vec![(disk.clone(), 0)]).unwrap();
    let _ = disk.submitter().write_at(&[1; 4096], 0);
    // A process that survives the panic exits with this code, and not with a signal.
    std::process::exit(0);
}

#[test]
fn a_panic_on_an_engine_aborts_the_process() {
    use std::os::unix::process::ExitStatusExt;
    let mut program = std::process::Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", "engine::an_engine_panics", "--ignored", "--nocapture"]);
    let output = program.output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{output:?}");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(
        printed.contains("engine-that-panics") && printed.contains("a fault rule injected this panic"),
        "{printed}"
    );
}

#[test]
fn late_messages_for_a_source_reach_no_later_source() {
    let engine = EngineThread::spawn("test", vec![(null_disk(1), 0)]).unwrap();
    let handle = engine.handle();
    let add = || {
        let seen = Arc::new(Seen::default());
        let its = seen.clone();
        (handle.add_source(move || Box::new(Load::new(&its, 0))).unwrap(), seen)
    };
    let (first, _) = add();
    let (go, waits) = channel();
    let (reply, answer) = channel();
    handle.send(first, Box::new(Wait(waits, reply)));
    handle.stop_source(first, false);
    let (second, seen) = add();
    assert_ne!(first, second);
    go.send(()).unwrap();
    assert!(answer.recv_timeout(Duration::from_secs(60)).is_err(), "another source answered");
    // The second source is not stopped instead of the first one either.
    handle.stop_source(first, true);
    assert!(seen.stops.lock().unwrap().is_empty());
    handle.stop_source(second, false);
    assert_eq!(*seen.stops.lock().unwrap(), [false]);
}

#[test]
fn a_panic_of_a_job_does_not_stop_later_jobs() {
    let engine = EngineThread::spawn("test", vec![(null_disk(1), 0)]).unwrap();
    let seen = Arc::new(Seen::default());
    let source = engine.handle().add_source(move || Box::new(Load::new(&seen, 0))).unwrap();
    let (go, waits) = channel();
    let (reply, answers) = channel();
    engine.handle().send(source, Box::new(Wait(waits, reply.clone())));
    engine.handle().send(source, Box::new(Panic));
    engine.handle().send(source, Box::new(Ask(reply)));
    go.send(()).unwrap();
    assert_eq!(answers.recv_timeout(Duration::from_secs(60)), Ok(1));
    assert_eq!(answers.recv_timeout(Duration::from_secs(60)), Ok(1), "lost, or not on the worker's thread");
}

//! Properties of a whole disk that the model checkers verify. Real queues run on real engine threads, with
//! their sleep, mailbox, plug, software queues, tags, gate, freeze and stop; only the ring and its wake-up
//! are replaced by models. The device is a thread that completes requests whenever it is scheduled.
//!
//! Anything that is lost, such as a wake-up, a bio, a tag or an answer, leaves a thread waiting, which the
//! checkers report as a deadlock. Completions are counted, so that a second one is found too.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32 as Plain, Ordering::SeqCst};

use super::*;
use crate::bio::{Bio, Completion};
use crate::buffer::IoBuffer;
use crate::driver::{DriverContext, DriverQueue, OpenContext, Taken};
use crate::engine::{EngineThread, Source, SourceContext};
use crate::kick::Wake;
use crate::remote::gate::Direction;
use crate::ring::Cqe;
#[cfg(shuttle)]
use crate::sched::SchedulerKind;
use crate::sector::Sector;
#[cfg(loom)]
use crate::sync::model_within;
use crate::sync::{WaitQueue, model, thread};
use crate::tags::Tag;

const BLOCK_BYTES: usize = 512;

/// Requests on their way to the device's thread, each with the inbox for its completion.
#[derive(Default)]
struct Device {
    jobs: Mutex<VecDeque<(Arc<Inbox>, Tag)>>,
    notified: WaitQueue,
    in_driver: Plain,
    frozen: Plain,
    quiesced: Plain,
}

/// Completions on their way back to the owner of a queue.
struct Inbox {
    completed: Mutex<Vec<Tag>>,
    wake: Arc<dyn Wake>,
}

impl Device {
    fn serve(&self, count: usize) {
        for _ in 0..count {
            let mut job = None;
            self.notified.wait_until(|| {
                job = lock(&self.jobs).pop_front();
                job.is_some()
            });
            let Some((inbox, tag)) = job else { return };
            lock(&inbox.completed).push(tag);
            inbox.wake.wake();
        }
    }
}

/// The driver. Its requests are completed by the device's thread, or immediately if there is no such thread.
struct Remote {
    device: Option<Arc<Device>>,
    own: Arc<Device>,
}

struct RemoteQueue {
    device: Option<Arc<Device>>,
    own: Arc<Device>,
    inbox: Arc<Inbox>,
}

impl Driver for Remote {
    fn name(&self) -> &'static str {
        "remote"
    }

    fn limits(&self) -> QueueLimits {
        QueueLimits { capacity_bytes: 1 << 30, ..QueueLimits::default() }
    }

    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        let inbox = Arc::new(Inbox { completed: Mutex::new(Vec::new()), wake: cx.wake });
        Ok(Box::new(RemoteQueue { device: self.device.clone(), own: self.own.clone(), inbox }))
    }
}

// SAFETY: no thread uses the memory of a request.
unsafe impl DriverQueue for RemoteQueue {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        assert_eq!(self.own.frozen.load(SeqCst), 0, "a request in a frozen disk");
        assert_eq!(self.own.quiesced.load(SeqCst), 0, "a request in a quiesced disk");
        self.own.in_driver.fetch_add(tags.len() as u32, SeqCst);
        match &self.device {
            None => {
                self.own.in_driver.fetch_sub(tags.len() as u32, SeqCst);
                cx.complete_all(tags);
            }
            Some(device) => {
                lock(&device.jobs).extend(tags.iter().map(|tag| (self.inbox.clone(), *tag)));
                device.notified.wake_all();
            }
        }
        Taken::All
    }

    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        let completed = std::mem::take(&mut *lock(&self.inbox.completed));
        self.own.in_driver.fetch_sub(completed.len() as u32, SeqCst);
        cx.complete_all(&completed);
    }
}

struct World {
    disk: Arc<Disk>,
    device: Arc<Device>,
    engines: Vec<EngineThread>,
    completed: Arc<Plain>,
}

#[derive(Clone, Copy)]
struct Shape {
    queues: usize,
    depth: u16,
    shared_tags: bool,
    batching: bool,
    at_once: bool,
}

impl World {
    fn new(shape: Shape) -> World {
        let device = Arc::new(Device::default());
        let remote = Remote { device: (!shape.at_once).then(|| device.clone()), own: device.clone() };
        let disk = Disk::builder(Box::new(remote))
            .queues(shape.queues)
            .depth(shape.depth)
            .shared_tags(shape.shared_tags)
            .batching(shape.batching)
            .iostats(false)
            .build()
            .expect("a valid disk");
        let engine = |queue| EngineThread::spawn("engine", vec![(disk.clone(), queue)]).expect("an engine");
        let engines = (0..shape.queues).map(engine).collect();
        World { disk, device, engines, completed: Arc::default() }
    }

    /// A thread that submits blocks. They are neighbours in pairs, so that some merge, and the thread waits
    /// for every other one. Only a disk that closes (`closes`) may complete them with an error.
    fn submitter(&self, number: usize, count: usize, closes: bool) -> thread::JoinHandle<()> {
        let (mut submitter, completed) = (self.disk.submitter(), self.completed.clone());
        thread::spawn(move || {
            for round in 0..count {
                let sector = Sector(((number as u64) << 16) + round as u64 / 2 * 8 + round as u64 % 2);
                let bio = Bio::write(sector, IoBuffer::zeroed(BLOCK_BYTES), 0);
                let completed = completed.clone();
                let check = move |result| {
                    assert!(result == Ok(()) || closes && result == Err(Status::Offline), "{result:?}");
                    completed.fetch_add(1, SeqCst);
                };
                if round % 2 == 0 && round + 1 < count {
                    submitter.submit(bio, move |result, _| check(result));
                } else {
                    check(submitter.submit_and_wait(bio).0);
                }
            }
        })
    }

    fn device(&self, count: usize) -> thread::JoinHandle<()> {
        let device = self.device.clone();
        thread::spawn(move || device.serve(count))
    }

    fn freezer(&self, rounds: usize) -> thread::JoinHandle<()> {
        let (disk, device) = (self.disk.clone(), self.device.clone());
        thread::spawn(move || {
            for _ in 0..rounds {
                let frozen = disk.freeze();
                assert_eq!(device.in_driver.load(SeqCst), 0, "frozen with requests in the driver");
                device.frozen.fetch_add(1, SeqCst);
                thread::yield_now();
                device.frozen.fetch_sub(1, SeqCst);
                drop(frozen);
            }
        })
    }

    /// A thread that lets engine 0 scan for hangs, with a limit that all I/O in flight exceeds, and once more
    /// when all other threads have exited. Each hang, and its completion, must be reported once.
    fn watcher(&self, rounds: usize) -> thread::JoinHandle<()> {
        let handle = self.engines[0].handle().clone();
        let scan = move |hangs: &mut Vec<u64>, completions: &mut Vec<u64>| {
            let scan = handle.scan_for_hangs(u64::MAX, 0).recv().expect("the engine lives");
            hangs.extend(scan.hangs.iter().map(|hang| hang.io.number));
            completions.extend(scan.completed.iter().map(|completion| completion.io.number));
            assert_eq!(scan.more, 0);
            scan.hung
        };
        thread::spawn(move || {
            let (mut hangs, mut completions) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                scan(&mut hangs, &mut completions);
            }
            while scan(&mut hangs, &mut completions) > 0 {
                thread::yield_now();
            }
            // Completions during the last scan.
            scan(&mut hangs, &mut completions);
            completions.sort_unstable();
            let all: Vec<u64> = (1..=hangs.len() as u64).collect();
            assert_eq!((&hangs, &completions), (&all, &all), "reported once, and its completion once");
        })
    }

    fn quiescer(&self, rounds: usize) -> thread::JoinHandle<()> {
        let (disk, device) = (self.disk.clone(), self.device.clone());
        thread::spawn(move || {
            for _ in 0..rounds {
                let quiesced = disk.quiesce();
                device.quiesced.fetch_add(1, SeqCst);
                thread::yield_now();
                device.quiesced.fetch_sub(1, SeqCst);
                drop(quiesced);
            }
        })
    }

    #[cfg(shuttle)]
    fn changer(&self) -> thread::JoinHandle<()> {
        let disk = self.disk.clone();
        thread::spawn(move || {
            let deadline = Setting::Scheduler(SchedulerKind::MqDeadline);
            for setting in [Setting::Depth(1), deadline, Setting::Depth(3)] {
                disk.set(setting).expect("a change");
            }
        })
    }

    /// Checks that nothing is left anywhere, and that each submitted bio has completed once.
    fn finish(self, submitted: usize) {
        let World { disk, device, engines, completed } = self;
        drop(engines);
        assert_eq!(completed.load(SeqCst) as usize, submitted, "each bio completes once");
        assert_eq!(device.in_driver.load(SeqCst), 0);
        for direction in [Direction::Read, Direction::Write] {
            assert_eq!((disk.gate.in_flight(direction), disk.gate.waiting(direction)), (0, 0));
        }
        for queue in &disk.queues {
            // Owners of tags of their own check them when they close their queues.
            assert_eq!(queue.tags.as_ref().map_or(0, |tags| tags.in_use()), 0, "a tag was lost");
            assert!(queue.software.take_all().is_empty(), "a bio stayed behind");
        }
    }
}

fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    for thread in threads {
        thread.join().expect("a thread panicked");
    }
}

/// Submitters, and an engine that sleeps in between and merges what it can.
fn all_complete_once(shape: Shape, submitters: usize, count: usize) {
    let world = World::new(shape);
    let threads: Vec<_> = (0..submitters).map(|number| world.submitter(number, count, false)).collect();
    join(threads);
    world.finish(submitters * count);
}

/// As `all_complete_once`, with a device on a thread of its own. Each submitter's blocks are too far apart to
/// merge, so that the number of requests is known.
fn completions_come_from_another_thread(shape: Shape, submitters: usize, freezes: usize, quiesces: usize) {
    let world = World::new(shape);
    let mut threads: Vec<_> = (0..submitters).map(|number| world.submitter(number, 1, false)).collect();
    threads.push(world.device(submitters));
    threads.extend((freezes > 0).then(|| world.freezer(freezes)));
    threads.extend((quiesces > 0).then(|| world.quiescer(quiesces)));
    join(threads);
    world.finish(submitters);
}

fn hangs_are_reported_once(shape: Shape, submitters: usize, freezes: usize, scans: usize) {
    let world = World::new(shape);
    let mut threads: Vec<_> = (0..submitters).map(|number| world.submitter(number, 1, false)).collect();
    threads.push(world.device(submitters));
    threads.extend((freezes > 0).then(|| world.freezer(freezes)));
    threads.push(world.watcher(scans));
    join(threads);
    world.finish(submitters);
}

/// Settings change under load. This has too many schedules for loom.
#[cfg(shuttle)]
fn changes_lose_nothing(shape: Shape, submitters: usize, count: usize) {
    let world = World::new(shape);
    let mut threads: Vec<_> = (0..submitters).map(|number| world.submitter(number, count, false)).collect();
    threads.push(world.changer());
    threads.push(world.freezer(2));
    threads.push(world.quiescer(2));
    join(threads);
    world.finish(submitters * count);
}

/// The engines exit while others submit: bios that are staged too late must complete too.
fn an_exiting_engine_leaves_no_submitter_waiting(shape: Shape, submitters: usize, count: usize) {
    let mut world = World::new(shape);
    let threads: Vec<_> = (0..submitters).map(|number| world.submitter(number, count, true)).collect();
    world.engines.clear();
    join(threads);
    world.finish(submitters * count);
}

/// A client on the engine's thread, like an attachment. Messages contain the number of bios to submit.
struct Client {
    wanted: u64,
    in_flight: u32,
    completed: Arc<Plain>,
    stopping: bool,
}

// SAFETY: the source reports that it is stopped only when no bio is in flight.
unsafe impl Source for Client {
    fn start(&mut self, _cx: &mut SourceContext<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn on_cqe(&mut self, _cx: &mut SourceContext<'_>, _cqe: Cqe) {}

    fn on_bio(&mut self, _cx: &mut SourceContext<'_>, completion: Completion) {
        assert_eq!(completion.result, Ok(()));
        self.in_flight -= 1;
        self.completed.fetch_add(1, SeqCst);
    }

    fn on_message(&mut self, _cx: &mut SourceContext<'_>, message: Box<dyn Any + Send>) {
        self.wanted += message.downcast::<u64>().map(|count| *count).expect("a number");
    }

    fn on_turn(&mut self, cx: &mut SourceContext<'_>) {
        while self.wanted > 0 {
            let bio = Bio::write(Sector(self.wanted * 64), IoBuffer::zeroed(BLOCK_BYTES), 0);
            if cx.submit(0, bio).is_err() {
                return;
            }
            self.wanted -= 1;
            self.in_flight += 1;
        }
    }

    fn stop(&mut self, _cx: &mut SourceContext<'_>, _force: bool) {
        self.stopping = true;
    }

    fn is_stopped(&self) -> bool {
        self.stopping && self.wanted == 0 && self.in_flight == 0
    }
}

/// Messages to sources, sources that stop while the device still completes their I/O, submitters and a
/// freeze, with the tags of all queues in one set: a queue may wait for tags that another has in its plug.
fn plugs_share_tags(shape: Shape, per_client: u64, submitters: usize, freezes: usize) {
    let world = World::new(shape);
    let mut threads: Vec<_> = (0..submitters).map(|number| world.submitter(number, 1, false)).collect();
    threads.extend((freezes > 0).then(|| world.freezer(freezes)));
    for engine in &world.engines {
        let (handle, completed) = (engine.handle().clone(), world.completed.clone());
        threads.push(thread::spawn(move || {
            let own: Arc<Plain> = Arc::default();
            let its = own.clone();
            let client = move || {
                Box::new(Client { wanted: 0, in_flight: 0, completed: its, stopping: false })
                    as Box<dyn Source>
            };
            let id = handle.add_source(client).expect("the engine lives");
            handle.send(id, Box::new(per_client));
            handle.stop_source(id, false);
            assert_eq!(u64::from(own.load(SeqCst)), per_client, "stopped with I/O in flight");
            completed.fetch_add(per_client as u32, SeqCst);
        }));
    }
    let total = per_client as usize * world.engines.len() + submitters;
    threads.extend((!shape.at_once).then(|| world.device(total)));
    join(threads);
    world.finish(total);
}

#[cfg(loom)]
mod loom_disk {
    use super::*;

    const SMALL: Shape = Shape { queues: 1, depth: 1, shared_tags: false, batching: false, at_once: true };

    const REMOTE: Shape = Shape { at_once: false, ..SMALL };
    const SHARED: Shape = Shape { queues: 2, shared_tags: true, ..SMALL };

    // Contract: accepted-once
    #[test]
    fn loom_all_complete_once() {
        model("an engine, one submitter, two blocks", 0, || all_complete_once(SMALL, 1, 2));
        model_within(1, "an engine, two submitters", 0, || all_complete_once(SMALL, 2, 1));
        model_within(1, "two engines that share a tag", 0, || all_complete_once(SHARED, 2, 1));
    }

    #[test]
    fn loom_completions_come_from_another_thread() {
        model("one submitter", 0, || completions_come_from_another_thread(REMOTE, 1, 0, 0));
        model_within(1, "one submitter, a freeze", 0, || {
            completions_come_from_another_thread(REMOTE, 1, 1, 0)
        });
        model_within(1, "one submitter, a quiesce", 0, || {
            completions_come_from_another_thread(REMOTE, 1, 0, 1)
        });
    }

    // Contract: accepted-once
    #[test]
    fn loom_an_exiting_engine_leaves_no_submitter_waiting() {
        model("an engine that exits, one submitter", 0, || {
            an_exiting_engine_leaves_no_submitter_waiting(SMALL, 1, 1)
        });
        model_within(1, "an engine that exits, two submitters", 0, || {
            an_exiting_engine_leaves_no_submitter_waiting(SMALL, 2, 1)
        });
    }

    #[test]
    fn loom_hangs_are_reported_once() {
        model_within(1, "one submitter", 0, || hangs_are_reported_once(REMOTE, 1, 0, 0));
    }

    #[test]
    fn loom_plugs_share_tags() {
        model_within(1, "a client on the engine", 0, || plugs_share_tags(SMALL, 1, 0, 0));
    }
}

#[cfg(shuttle)]
mod shuttle_disk {
    use super::*;

    const FEW: Shape = Shape { queues: 1, depth: 2, shared_tags: false, batching: true, at_once: true };
    const REMOTE: Shape = Shape { at_once: false, ..FEW };
    const SHARED: Shape = Shape { queues: 2, depth: 1, shared_tags: true, ..FEW };

    #[test]
    fn shuttle_all_complete_once() {
        model("one engine, four submitters", 6_000, || all_complete_once(FEW, 4, 4));
        model("two engines that share two tags", 6_000, || {
            all_complete_once(Shape { depth: 2, ..SHARED }, 4, 4)
        });
    }

    // Contract: accepted-once
    #[test]
    fn shuttle_completions_come_from_another_thread() {
        model("completions against freeze and quiesce", 6_000, || {
            completions_come_from_another_thread(REMOTE, 4, 2, 2)
        });
        model("without batching", 3_000, || {
            completions_come_from_another_thread(Shape { batching: false, depth: 1, ..REMOTE }, 4, 2, 0)
        });
    }

    #[test]
    fn shuttle_hangs_are_reported_once() {
        model("four submitters, a freeze, three scans", 6_000, || hangs_are_reported_once(REMOTE, 4, 1, 3));
    }

    // Contract: live-changes
    #[test]
    fn shuttle_changes_lose_nothing() {
        model("depth and scheduler change under load", 6_000, || changes_lose_nothing(FEW, 3, 4));
    }

    #[test]
    fn shuttle_an_exiting_engine_leaves_no_submitter_waiting() {
        model("an engine exits under load", 6_000, || {
            an_exiting_engine_leaves_no_submitter_waiting(FEW, 4, 4)
        });
        model("two engines stop under load", 6_000, || {
            an_exiting_engine_leaves_no_submitter_waiting(SHARED, 4, 3)
        });
    }

    #[test]
    fn shuttle_plugs_share_tags() {
        model("two clients, one tag", 6_000, || plugs_share_tags(SHARED, 3, 2, 0));
        model("two clients, two tags, a device thread, freezes", 6_000, || {
            plugs_share_tags(Shape { depth: 2, at_once: false, ..SHARED }, 3, 2, 2)
        });
    }
}

//! `--hang-warning`: logs requests that are in flight for too long and engines that do not answer, once each,
//! and again when they complete or answer. The same thread logs held requests and failed I/O.

use std::fmt::Write;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use blkq::clock::monotonic_ns;
use blkq::engine::HangScanReply;
use blkq::hang::{Hang, HangCompletion, HangScan, Place};
use blkq::{Disk, EngineHandle, Failures, PeriodicThread, Wakeup};
use blkq_protocol::failure::Outcome;

/// Number of scans within the time that a request may take. The interval is limited by the two constants
/// below.
const SCANS: u32 = 8;
const INTERVAL_MIN: Duration = Duration::from_millis(50);
/// Maximum time between two checks for held and failed requests.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum time between two lines about held requests, and between two lines about failed I/O.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// How long the watcher waits for an engine's answer before it continues with the next engine.
const ANSWER_WAIT: Duration = Duration::from_millis(100);
const STACK_BYTES: usize = 256 << 10;

/// The limit, and a counter, shared with the watcher's thread.
#[derive(Default)]
pub struct HangCounters {
    limit_ns: AtomicU64,
    stalls: AtomicU64,
}

impl HangCounters {
    pub fn limit(&self) -> Duration {
        Duration::from_nanos(self.limit_ns.load(Ordering::Relaxed))
    }

    /// How often a queue's thread did not answer in time.
    pub fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::Relaxed)
    }

    fn set_limit(&self, limit: Duration) {
        self.limit_ns.store(limit.as_nanos() as u64, Ordering::Relaxed);
    }
}

/// Owns the watcher's thread, which runs until this is dropped.
pub struct HangWatch {
    /// May be cloned and kept after this is dropped.
    pub counters: Arc<HangCounters>,
    /// Moved to the thread when it starts.
    watcher: Option<Watcher>,
    thread: Option<PeriodicThread>,
}

impl HangWatch {
    /// Prepares to watch the queues of `disk`. `engines[n]` must own queue `n`.
    pub fn new(disk: Arc<Disk>, engines: Vec<EngineHandle>, limit: Duration) -> HangWatch {
        let counters = Arc::new(HangCounters::default());
        counters.set_limit(limit);
        let watcher = Watcher::new(disk, engines, counters.clone(), Box::new(monotonic_ns));
        HangWatch { counters, watcher: Some(watcher), thread: None }
    }

    /// Starts the thread, which passes its lines to `log`.
    pub fn start(&mut self, log: impl Fn(&str) + Send + 'static) -> Outcome {
        let Some(mut watcher) = self.watcher.take() else { return Ok(()) };
        let first = watcher.interval();
        let watch = move |wakeup| watcher.watch(wakeup, &log);
        self.thread = Some(PeriodicThread::start("blkq-watch", STACK_BYTES, first, watch)?);
        Ok(())
    }

    /// Changes how long a request may take, starting with the next scan.
    pub fn set(&self, limit: Duration) {
        self.counters.set_limit(limit);
        self.thread.iter().for_each(PeriodicThread::wake);
    }
}

struct Watcher {
    disk: Arc<Disk>,
    queues: Vec<Watched>,
    counters: Arc<HangCounters>,
    now_ns: Clock,
    /// Whether the last line about held requests said that some are held.
    logged_held: bool,
    /// Earliest time of the next line about held requests.
    log_held_from_ns: u64,
    io_errors: IoErrorLog,
}

/// Returns the time in nanoseconds: the monotonic clock, or a clock that a test controls.
type Clock = Box<dyn Fn() -> u64 + Send>;

struct Watched {
    queue: usize,
    engine: EngineHandle,
    /// `/proc/self/task/TID/status` of the engine's thread, if it could be opened (proc_pid_status(5)).
    status: Option<File>,
    /// The scan that the engine has not answered yet, and the time of the request.
    asked: Option<(HangScanReply, u64)>,
    /// Whether it was logged that the engine does not answer.
    stalled: bool,
    /// Number of hung requests in the engine's last answer.
    hung: u64,
    /// Number of failed requests of the queue when the last scan was requested.
    failed: u64,
}

impl Watcher {
    fn new(disk: Arc<Disk>, engines: Vec<EngineHandle>, counters: Arc<HangCounters>, now_ns: Clock) -> Self {
        let watched = |(queue, engine)| {
            let status = thread_status(&format!("blkq-queue-{queue}"));
            Watched { queue, engine, status, asked: None, stalled: false, hung: 0, failed: 0 }
        };
        let queues = engines.into_iter().enumerate().map(watched).collect();
        let io_errors = IoErrorLog::default();
        Watcher { disk, queues, counters, now_ns, logged_held: false, log_held_from_ns: 0, io_errors }
    }

    fn interval(&self) -> Duration {
        match self.counters.limit() {
            Duration::ZERO => CHECK_INTERVAL,
            limit => (limit / SCANS).clamp(INTERVAL_MIN, CHECK_INTERVAL),
        }
    }

    /// Scans if a scan is due, or applies a changed limit. Returns the time until the next scan.
    fn watch(&mut self, wakeup: Wakeup, log: &dyn Fn(&str)) -> Duration {
        let limit = self.counters.limit();
        match wakeup {
            // Hang warnings were switched off. A scan with an infinite limit resets the count of hung
            // requests.
            Wakeup::Called if limit.is_zero() => self.scan(u64::MAX, log),
            Wakeup::Called => {}
            Wakeup::Due => {
                self.check_held(log);
                self.scan(if limit.is_zero() { u64::MAX } else { limit.as_nanos() as u64 }, log);
                self.io_errors.write((self.now_ns)(), log);
            }
        }
        self.interval()
    }

    /// Logs when requests are held and when none are held again. Lines that say that requests are held are at
    /// least [`LOG_INTERVAL`] apart.
    fn check_held(&mut self, log: &dyn Fn(&str)) {
        let held = self.disk.held();
        match (held, self.logged_held) {
            (0, true) => {
                log("resumed: no held requests are left");
                self.logged_held = false;
            }
            (1.., false) if (self.now_ns)() >= self.log_held_from_ns => {
                let (requests, verb) =
                    if held == 1 { ("request has", "is") } else { ("requests have", "are") };
                let hint = resume_hint(&self.disk);
                log(&format!("held: {held} {requests} failed and {verb} held, and the clients wait; {hint}"));
                self.logged_held = true;
                self.log_held_from_ns = (self.now_ns)() + LOG_INTERVAL.as_nanos() as u64;
            }
            _ => {}
        }
    }

    fn scan(&mut self, limit_ns: u64, log: &dyn Fn(&str)) {
        let Watcher { disk, queues, counters, now_ns: clock, io_errors, .. } = self;
        for watched in queues.iter_mut() {
            if watched.asked.is_none() {
                let failed = disk.failed_requests(watched.queue);
                let may_hang = limit_ns < u64::MAX && !disk.has_nothing_to_scan(watched.queue);
                if watched.hung == 0 && watched.failed == failed && !may_hang {
                    continue;
                }
                watched.failed = failed;
                let now_ns = clock();
                watched.asked = Some((watched.engine.scan_for_hangs(now_ns, limit_ns), now_ns));
            }
            let Some((reply, asked_ns)) = &watched.asked else { continue };
            // An earlier scan has already waited for the answer of a stalled engine.
            let answer = reply.recv_timeout(if watched.stalled { Duration::ZERO } else { ANSWER_WAIT });
            let age_ns = clock().saturating_sub(*asked_ns);
            let (queue, age) = (watched.queue, seconds(age_ns));
            match answer {
                Ok(scan) => {
                    if std::mem::take(&mut watched.stalled) {
                        log(&format!("hang over: queue {queue}: the thread answers again after {age}"));
                    }
                    (watched.asked, watched.hung) = (None, scan.hung);
                    log_scan(disk, queue, &scan, limit_ns, log);
                    io_errors.failures.add(scan.failures);
                }
                Err(RecvTimeoutError::Timeout) if age_ns > limit_ns && !watched.stalled => {
                    watched.stalled = true;
                    counters.stalls.fetch_add(1, Ordering::Relaxed);
                    let state = watched.status.as_ref().and_then(state_in);
                    let state = state.map(|state| format!("; its state is {state}")).unwrap_or_default();
                    log(&format!("hang: queue {queue}: the thread has not answered for {age}{state}"));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => (watched.asked, watched.hung) = (None, 0),
            }
        }
    }
}

/// Failed I/O that is not in the log yet. The log gets at most one line per device and interval, with the number of
/// failures that were not logged.
#[derive(Default)]
struct IoErrorLog {
    failures: Failures,
    /// Earliest time of the next line.
    next_ns: u64,
}

impl IoErrorLog {
    /// Writes a line if there are failures and the previous line was written long enough before `now_ns`.
    fn write(&mut self, now_ns: u64, log: &dyn Fn(&str)) {
        if now_ns < self.next_ns {
            return;
        }
        let Failures { first, more, .. } = std::mem::take(&mut self.failures);
        let Some(first) = first else { return };
        let others = match more {
            0 => String::new(),
            1 => " (1 more error was not logged)".to_owned(),
            _ => format!(" ({more} more errors were not logged)"),
        };
        log(&format!("I/O error: {first}{others}"));
        self.next_ns = now_ns + LOG_INTERVAL.as_nanos() as u64;
    }
}

fn log_scan(disk: &Disk, queue: usize, scan: &HangScan, limit_ns: u64, log: &dyn Fn(&str)) {
    // Hangs that have ended come first: they were logged before the new ones.
    scan.completed.iter().for_each(|completion| log(&completion_line(completion)));
    scan.hangs.iter().for_each(|hang| log(&format!("{}{}", hang_line(hang), hint_for(hang, disk))));
    if scan.more > 0 {
        let HangScan { more, hung, .. } = scan;
        log(&format!(
            "hang: {more} more; queue {queue} has {hung} requests in flight for more than {}",
            seconds(limit_ns)
        ));
    }
}

fn hang_line(hang: &Hang) -> String {
    let Hang { io, age_ns, bios, place, client, .. } = hang;
    let mut line = format!("hang: {io}: in flight for {}, {}", seconds(*age_ns), place);
    if *bios != 1 {
        let _ = write!(line, ", {bios} bios");
    }
    if let Some(client) = client {
        let _ = write!(line, ", submitted by {client}");
    }
    line
}

/// The hint for a hang that held requests cause.
fn hint_for(hang: &Hang, disk: &Disk) -> String {
    match (&hang.place, disk.held()) {
        (Place::Held(_) | Place::ForHeldWrites, _) => format!("; {}", resume_hint(disk)),
        (Place::ForTag(_), held @ 1..) => {
            format!("; all tags are in use, {held} of them by held requests; {}", resume_hint(disk))
        }
        _ => String::new(),
    }
}

fn resume_hint(disk: &Disk) -> String {
    format!("`blkq resume {}` reissues them", disk.name())
}

fn completion_line(completion: &HangCompletion) -> String {
    let how = match completion.result {
        Some(Ok(())) => "completed".to_owned(),
        Some(Err(status)) => format!("completed with an error: {status},"),
        None => "disappeared".to_owned(),
    };
    format!("hang over: {}: {how} after {}", completion.io, seconds(completion.age_ns))
}

fn seconds(ns: u64) -> String {
    format!("{:.1} s", ns as f64 / 1e9)
}

/// Opens the kernel's status file of this process's thread `name`. This must happen before the daemon is
/// confined and can no longer open files.
fn thread_status(name: &str) -> Option<File> {
    let mut tasks = std::fs::read_dir("/proc/self/task").ok()?.flatten().map(|task| task.path());
    let of_name =
        |task: &PathBuf| std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim_end() == name);
    File::open(tasks.find(of_name)?.join("status")).ok()
}

/// The state in a status file, for example `D (disk sleep)`.
fn state_in(status: &File) -> Option<String> {
    let mut text = [0; 512];
    let length = status.read_at(&mut text, 0).ok()?;
    let text = String::from_utf8_lossy(&text[..length]);
    let state = text.lines().find_map(|line| line.strip_prefix("State:"))?;
    Some(state.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::JoinHandle;

    use blkq::testing::{assert_stays, wait_for, wait_until};
    use blkq::{
        Bio, Completion, Cqe, EngineThread, Error, ErrorPolicy, IoBuffer, LocalQueue, Resume, Sector, Source,
        SourceContext,
    };
    use blkq_drivers::fault::FaultSpec;
    use blkq_drivers::{DriverOptions, DriverSpec, open};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<String>>>);

    impl Lines {
        fn log(&self) -> impl Fn(&str) + Send + 'static {
            let lines = self.clone();
            move |line| lines.0.lock().unwrap().push(line.to_owned())
        }

        fn with(&self, what: &str) -> Vec<String> {
            self.0.lock().unwrap().iter().filter(|line| line.contains(what)).cloned().collect()
        }

        fn wait(&self, what: &str) -> String {
            wait_for(what, || self.with(what).pop())
        }
    }

    /// Creates a device on which the requests that `fault` selects do not complete.
    fn device(fault: &str) -> (Arc<Disk>, EngineThread) {
        let options = DriverOptions { fault: Some(fault.parse().unwrap()), ..DriverOptions::default() };
        let opened = open(&DriverSpec::Ram(1 << 20), &options).unwrap();
        let disk = Disk::builder_shared(opened.driver).build().unwrap();
        let engine = EngineThread::spawn("blkq-queue-0", vec![(disk.clone(), 0)]).unwrap();
        (disk, engine)
    }

    fn watch(disk: &Arc<Disk>, engine: &EngineThread, limit: Duration) -> (HangWatch, Lines) {
        let lines = Lines::default();
        let mut watch = HangWatch::new(disk.clone(), vec![engine.handle().clone()], limit);
        watch.start(lines.log()).unwrap();
        (watch, lines)
    }

    /// A watcher that scans when the test calls [`Scans::scan`]. Its clock stands still, except for the time
    /// that the test adds.
    struct Scans {
        watcher: Watcher,
        lines: Lines,
        added_ns: Arc<AtomicU64>,
    }

    impl Scans {
        fn new(disk: &Arc<Disk>, engine: &EngineThread, limit: Duration) -> Scans {
            let counters = Arc::new(HangCounters::default());
            counters.set_limit(limit);
            let (begin_ns, added_ns) = (monotonic_ns(), Arc::new(AtomicU64::new(0)));
            let added = added_ns.clone();
            let clock = Box::new(move || begin_ns + added.load(Ordering::SeqCst));
            let watcher = Watcher::new(disk.clone(), vec![engine.handle().clone()], counters, clock);
            Scans { watcher, lines: Lines::default(), added_ns }
        }

        fn add(&self, time: Duration) {
            self.added_ns.fetch_add(time.as_nanos() as u64, Ordering::SeqCst);
        }

        fn scan(&mut self) {
            self.watcher.watch(Wakeup::Due, &self.lines.log());
        }

        /// Scans until there is such a line. One scan may not be enough: an engine may answer later than a
        /// scan waits.
        fn wait(&mut self, what: &str) -> String {
            wait_for(what, || {
                self.scan();
                self.lines.with(what).pop()
            })
        }
    }

    /// Submits a write, which completes when the fault is removed.
    fn write(disk: &Arc<Disk>) -> JoinHandle<std::io::Result<()>> {
        let mut submitter = disk.submitter();
        std::thread::spawn(move || submitter.write_at(&[1; 4096], 8192))
    }

    const LIMIT: Duration = Duration::from_secs(30);
    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_stuck_request_is_logged_once_and_its_completion_too() {
        let (disk, engine) = device("stuck,op=write,count=1");
        let mut scans = Scans::new(&disk, &engine, LIMIT);
        let writer = write(&disk);
        wait_until("the write is in flight", || !disk.has_nothing_to_scan(0));
        scans.scan();
        assert!(scans.lines.with("hang").is_empty(), "the write is not in flight for too long");
        scans.add(HOUR);
        let hang = scans.wait("hang: #");
        for part in
            ["write sector 16 + 8, queue 0, tag ", "stuck by a fault rule", "a thread of this process"]
        {
            assert!(hang.contains(part), "{hang}");
        }
        (0..5).for_each(|_| scans.scan());
        assert_eq!(scans.lines.with("hang: #").len(), 1, "once");
        assert_eq!(disk.stats().hung, 1);
        disk.set_driver(&FaultSpec::default()).unwrap();
        assert!(writer.join().unwrap().is_ok());
        let over = scans.wait("hang over: #");
        assert!(over.contains("write sector 16 + 8") && over.contains("completed after "), "{over}");
        assert_eq!(disk.stats().hung, 0);
    }

    #[test]
    fn held_requests_are_logged_immediately_with_a_hint() {
        let (disk, engine) = device("error=ENOSPC,op=write");
        let (watch, lines) = watch(&disk, &engine, Duration::from_secs(3));
        disk.set_error_policy(ErrorPolicy::HoldNoSpace);
        let writer = write(&disk);
        let hint = format!("; `blkq resume {}` reissues them", disk.name());
        let held = lines.wait("held: 1 request has failed and is held");
        assert!(held.ends_with(&hint), "{held}");
        let hang = lines.wait("hang: #");
        assert!(hang.contains("held: no space left") && hang.ends_with(&hint), "{hang}");
        disk.set_driver(&FaultSpec::default()).unwrap();
        assert_eq!(disk.resume(Resume::Reissue), 1);
        assert!(writer.join().unwrap().is_ok());
        lines.wait("hang over: #");
        lines.wait("resumed: no held requests are left");
        drop((watch, engine));
    }

    #[test]
    fn held_requests_are_logged_even_without_hang_warnings() {
        let (disk, engine) = device("error=ENOSPC,op=write");
        let mut scans = Scans::new(&disk, &engine, Duration::ZERO);
        disk.set_error_policy(ErrorPolicy::Hold);
        let hold = || {
            let writer = write(&disk);
            wait_until("the write is held", || disk.held() == 1);
            writer
        };
        let fail = |writer: JoinHandle<std::io::Result<()>>| {
            disk.resume(Resume::Fail);
            assert!(writer.join().unwrap().is_err());
        };
        let count = |scans: &Scans| scans.lines.with("held").len();
        let writer = hold();
        let error = scans.wait("I/O error: write at sector 16, 8 sectors: no space left");
        assert!(error.ends_with("; client: a thread of this process"), "{error}");
        assert_eq!(scans.lines.with("held: 1 request has failed and is held").len(), 1);
        fail(writer);
        scans.scan();
        assert_eq!((scans.lines.with("resumed: no held requests are left").len(), count(&scans)), (1, 2));
        // Requests that are held soon after that line are not logged yet; later they are.
        let writer = hold();
        scans.scan();
        assert_eq!(count(&scans), 2);
        scans.add(LOG_INTERVAL);
        scans.scan();
        assert_eq!(count(&scans), 3);
        fail(writer);
        assert!(scans.lines.with("hang").is_empty());
    }

    #[test]
    fn the_warning_can_be_changed_and_switched_off() {
        let (disk, engine) = device("stuck,op=read");
        let (watch, lines) = watch(&disk, &engine, Duration::ZERO);
        let reader = std::thread::spawn({
            let mut submitter = disk.submitter();
            move || submitter.read_at(&mut [0; 512], 0)
        });
        assert_stays("it is off", || lines.with("hang").is_empty());
        watch.set(Duration::from_millis(100));
        assert_eq!(watch.counters.limit(), Duration::from_millis(100));
        lines.wait("hang: #");
        watch.set(Duration::ZERO);
        wait_until("nothing counts as hung without scans", || disk.stats().hung == 0);
        disk.set_driver(&FaultSpec::default()).unwrap();
        assert!(reader.join().unwrap().is_ok());
        drop((watch, engine));
    }

    /// A source that submits a read. A message to it holds two ends of channels: the source drops the first
    /// one, and blocks the engine's thread until the other end of the second one is dropped.
    struct Sleeper;

    // SAFETY: the engine has no other source.
    unsafe impl Source for Sleeper {
        fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
            let _ = cx.submit(0, Bio::read(blkq::Sector(0), blkq::IoBuffer::zeroed(512), 0));
            Ok(())
        }
        fn on_cqe(&mut self, _: &mut SourceContext<'_>, _: Cqe) {}
        fn on_bio(&mut self, _: &mut SourceContext<'_>, _: Completion) {}
        fn on_message(&mut self, _: &mut SourceContext<'_>, wait: Box<dyn std::any::Any + Send>) {
            let (begun, end) = *wait.downcast::<(Sender<()>, Receiver<()>)>().unwrap();
            drop(begun);
            assert!(end.recv().is_err());
        }
        fn on_turn(&mut self, _: &mut SourceContext<'_>) {}
        fn stop(&mut self, _: &mut SourceContext<'_>, _: bool) {}
        fn is_stopped(&self) -> bool {
            true
        }
    }

    // Contract: errors
    #[test]
    fn an_engine_that_does_not_answer_is_logged() {
        let (disk, engine) = device("stuck");
        let mut scans = Scans::new(&disk, &engine, LIMIT);
        let source = engine.handle().add_source(|| Box::new(Sleeper)).unwrap();
        wait_until("the read is in flight", || !disk.has_nothing_to_scan(0));
        let ((begun, begins), (wake, end)) = (channel::<()>(), channel::<()>());
        engine.handle().send(source, Box::new((begun, end)));
        assert!(begins.recv().is_err());
        let status = thread_status("blkq-queue-0").unwrap();
        wait_until("its thread sleeps", || state_in(&status).is_some_and(|state| state.starts_with('S')));
        scans.scan();
        assert!(scans.lines.with("hang").is_empty(), "the limit has not passed");
        scans.add(HOUR);
        scans.scan();
        let line = scans.lines.with("the thread has not answered").pop().unwrap();
        assert!(line.contains("queue 0") && line.contains("; its state is S (sleeping)"), "{line}");
        drop(wake);
        scans.wait("answers again");
        assert_eq!((scans.watcher.counters.stalls(), scans.lines.with("not answered").len()), (1, 1));
        disk.set_driver(&FaultSpec::default()).unwrap();
    }
    /// Submits a write at each of these sectors, which fails, and returns the failures that the queue recorded.
    fn fail(queue: &mut LocalQueue, sectors: &[u64]) -> Failures {
        for sector in sectors {
            queue.submit(Bio::write(Sector(*sector), IoBuffer::zeroed(4096), *sector)).unwrap();
            queue.wait(1);
            assert!(queue.completions().all(|completion| completion.result.is_err()));
        }
        queue.scan_for_hangs(0, u64::MAX).failures
    }

    // Contract: errors
    #[test]
    fn one_line_has_the_first_failure_and_the_number_of_the_others() {
        let fault = Some("error=ENOSPC,op=write".parse().unwrap());
        let opened = open(&DriverSpec::Ram(1 << 20), &DriverOptions { fault, ..DriverOptions::default() });
        let disk: Arc<Disk> = Disk::builder_shared(opened.unwrap().driver).build().unwrap();
        let mut queue = disk.open_queue(0).unwrap();
        let (mut errors, lines) = (IoErrorLog::default(), RefCell::new(Vec::new()));
        let log = |line: &str| lines.borrow_mut().push(line.to_owned());
        let second = 1_000_000_000;
        errors.write(second, &log);
        assert!(lines.borrow().is_empty(), "nothing has failed");
        errors.failures.add(fail(&mut queue, &[8, 16, 24]));
        errors.write(second, &log);
        errors.failures.add(fail(&mut queue, &[32]));
        errors.failures.add(fail(&mut queue, &[40]));
        errors.write(10 * second, &log);
        let line = |sector: u64, others: &str| {
            let why = "no space left on the backing store";
            format!(
                "I/O error: write at sector {sector}, 8 sectors: {why}; client: user_data {sector} ({others})"
            )
        };
        let first = line(8, "2 more errors were not logged");
        assert_eq!(*lines.borrow(), [first], "the next line is not due");
        errors.write(11 * second, &log);
        assert_eq!(lines.borrow()[1..], [line(32, "1 more error was not logged")]);
        errors.write(30 * second, &log);
        assert_eq!((lines.borrow().len(), disk.failed_requests(0)), (2, 5));
    }
}

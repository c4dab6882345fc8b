//! `--hang-warning`: requests that are in flight for too long, and engines that do not answer,
//! are logged once, and their completion too.

use std::fmt::Write;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use blkq::clock::monotonic_ns;
use blkq::engine::HangScanReply;
use blkq::hang::{Hang, HangCompletion, HangScan, Place};
use blkq::{Disk, EngineHandle, PeriodicThread, Wakeup};

use crate::failure::Outcome;

/// The default of `--hang-warning`.
pub const DEFAULT: &str = "30";
/// The longest and the shortest times, in seconds.
const SECONDS_MAX: f64 = 86_400.0;
const SECONDS_MIN: f64 = 0.1;
/// Scans in the time that a request may take, and how far they are apart.
const SCANS: u32 = 8;
const INTERVAL_MIN: Duration = Duration::from_millis(50);
const INTERVAL_MAX: Duration = Duration::from_secs(5);
/// How often held requests are looked for where there are no scans; and how far apart the lines about them are.
const HELD_INTERVAL: Duration = Duration::from_secs(2);
const HELD_LOG_INTERVAL: Duration = Duration::from_secs(10);
/// How long an engine's answer is waited for before another one is asked.
const ANSWER_WAIT: Duration = Duration::from_millis(100);
/// Stack of the thread.
const STACK_BYTES: usize = 256 << 10;

/// Reads a value of `--hang-warning`: seconds; zero is off.
///
/// # Errors
/// The rule that it breaks.
pub fn parse(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(0.0) => Ok(Duration::ZERO),
        Ok(seconds) if (SECONDS_MIN..=SECONDS_MAX).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("give seconds from {SECONDS_MIN} to {SECONDS_MAX}, or 0 for no warning")),
    }
}

/// The counters and the limit, shared with the thread.
#[derive(Clone, Default)]
pub struct HangCounters {
    limit_ns: Arc<AtomicU64>,
    stalls: Arc<AtomicU64>,
}

impl HangCounters {
    /// How long a request may take; zero for no scans.
    pub fn limit(&self) -> Duration {
        Duration::from_nanos(self.limit_ns.load(Ordering::Relaxed))
    }

    /// How often the thread of a queue did not answer in time.
    pub fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::Relaxed)
    }

    fn set_limit(&self, limit: Duration) {
        self.limit_ns.store(limit.as_nanos() as u64, Ordering::Relaxed);
    }
}

/// The thread that scans, until this is dropped.
pub struct HangWatch {
    counters: HangCounters,
    /// The state that the thread will own.
    watcher: Option<Watcher>,
    thread: Option<PeriodicThread>,
}

impl HangWatch {
    /// To watch the queues of `disk`, of which each engine has the one of its number.
    pub fn new(disk: Arc<Disk>, engines: Vec<EngineHandle>, limit: Duration) -> HangWatch {
        let counters = HangCounters::default();
        counters.set_limit(limit);
        let watched = engines.into_iter().enumerate().map(|(queue, engine)| Watched::new(queue, engine));
        let watcher = Watcher {
            disk,
            queues: watched.collect(),
            counters: counters.clone(),
            logged_held: false,
            log_held_from: Instant::now(),
        };
        HangWatch { counters, watcher: Some(watcher), thread: None }
    }

    /// Begins to scan, and passes lines to `log`.
    ///
    /// # Errors
    /// If there can be no more threads.
    pub fn start(&mut self, log: impl Fn(&str) + Send + 'static) -> Outcome {
        let Some(mut watcher) = self.watcher.take() else { return Ok(()) };
        let first = watcher.interval();
        let watch = move |wakeup| watcher.watch(wakeup, &log);
        self.thread = Some(PeriodicThread::start("blkq-watch", STACK_BYTES, first, watch)?);
        Ok(())
    }

    /// How long a request may take; zero for no scans.
    pub fn limit(&self) -> Duration {
        self.counters.limit()
    }

    /// A handle to the counters that outlives this.
    pub fn counters(&self) -> HangCounters {
        self.counters.clone()
    }

    /// Changes how long a request may take, from the next scan on.
    pub fn set(&self, limit: Duration) {
        self.counters.set_limit(limit);
        self.thread.iter().for_each(PeriodicThread::wake);
    }
}

/// The state of the thread.
struct Watcher {
    disk: Arc<Disk>,
    queues: Vec<Watched>,
    counters: HangCounters,
    /// It was logged that requests are held.
    logged_held: bool,
    /// When that may be logged next.
    log_held_from: Instant,
}

/// One queue, and the engine that owns it.
struct Watched {
    queue: usize,
    engine: EngineHandle,
    /// The kernel's status of its thread (proc_pid_status(5)), if it can be read.
    status: Option<File>,
    /// The scan that it was asked for and has not answered, and when.
    asked: Option<(HangScanReply, u64)>,
    /// It was logged that it does not answer.
    stalled: bool,
    /// How much hung when it last answered.
    hung: u64,
}

impl Watcher {
    /// How long until the next scan.
    fn interval(&self) -> Duration {
        match self.counters.limit() {
            // Requests that are held are reported also if none is too long in flight.
            Duration::ZERO => HELD_INTERVAL,
            limit => (limit / SCANS).clamp(INTERVAL_MIN, INTERVAL_MAX),
        }
    }

    /// Scans, or takes over another limit. Returns the time until the next scan.
    fn watch(&mut self, wakeup: Wakeup, log: &dyn Fn(&str)) -> Duration {
        let limit = self.counters.limit();
        match wakeup {
            // Nothing is too long now: what was counted as hanging no longer is.
            Wakeup::Called if limit.is_zero() => self.scan(u64::MAX, log),
            Wakeup::Called => {}
            Wakeup::Due => {
                self.check_held(log);
                if !limit.is_zero() {
                    self.scan(limit.as_nanos() as u64, log);
                }
            }
        }
        self.interval()
    }

    /// Logs that requests are held, and that none is any more; at most once in a while, however often that changes.
    fn check_held(&mut self, log: &dyn Fn(&str)) {
        let held = self.disk.held();
        match (held, self.logged_held) {
            (0, true) => {
                log("held: no request is held any more");
                self.logged_held = false;
            }
            (1.., false) if Instant::now() >= self.log_held_from => {
                let requests = if held == 1 { "request is" } else { "requests are" };
                let cure = cure(&self.disk);
                log(&format!("held: {held} {requests} held after I/O errors, and clients wait; {cure}"));
                self.logged_held = true;
                self.log_held_from = Instant::now() + HELD_LOG_INTERVAL;
            }
            _ => {}
        }
    }

    fn scan(&mut self, limit_ns: u64, log: &dyn Fn(&str)) {
        let Watcher { disk, queues, counters, .. } = self;
        for watched in queues.iter_mut() {
            if watched.asked.is_none() {
                if watched.hung == 0 && disk.has_nothing_to_scan(watched.queue) {
                    continue;
                }
                let now_ns = monotonic_ns();
                watched.asked = Some((watched.engine.scan_for_hangs(now_ns, limit_ns), now_ns));
            }
            watched.take_reply(disk, limit_ns, &counters.stalls, log);
        }
    }
}

impl Watched {
    fn new(queue: usize, engine: EngineHandle) -> Watched {
        let status = thread_status(&format!("blkq-queue-{queue}"));
        Watched { queue, engine, status, asked: None, stalled: false, hung: 0 }
    }

    /// Takes the answer of the engine, if there is one by now.
    fn take_reply(&mut self, disk: &Disk, limit_ns: u64, stalls: &AtomicU64, log: &dyn Fn(&str)) {
        let Some((reply, asked_ns)) = &self.asked else { return };
        let answer = match self.stalled {
            // It has been waited for.
            true => reply.try_recv(),
            false => reply.recv_timeout(ANSWER_WAIT).map_err(|e| match e {
                RecvTimeoutError::Timeout => TryRecvError::Empty,
                RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
            }),
        };
        let age_ns = monotonic_ns().saturating_sub(*asked_ns);
        let (queue, age) = (self.queue, seconds(age_ns));
        match answer {
            Ok(scan) => {
                if std::mem::take(&mut self.stalled) {
                    log(&format!("hang over: queue {queue}: its thread answers again, after {age}"));
                }
                self.hung = scan.hung;
                self.asked = None;
                log_scan(disk, queue, &scan, limit_ns, log);
            }
            Err(TryRecvError::Empty) if age_ns > limit_ns && !self.stalled => {
                self.stalled = true;
                stalls.fetch_add(1, Ordering::Relaxed);
                let state = self.status.as_ref().and_then(state_in);
                let state = state.map(|state| format!("; it is {state}")).unwrap_or_default();
                log(&format!("hang: queue {queue}: its thread has not answered for {age}{state}"));
            }
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => (self.asked, self.hung) = (None, 0),
        }
    }
}

/// Logs what an engine found in `queue`.
fn log_scan(disk: &Disk, queue: usize, scan: &HangScan, limit_ns: u64, log: &dyn Fn(&str)) {
    // First the hangs that are over: they were logged before.
    scan.completed.iter().for_each(|completion| log(&completion_line(completion)));
    scan.hangs.iter().for_each(|hang| log(&format!("{}{}", hang_line(hang), cure_of(hang, disk))));
    if scan.more > 0 {
        let HangScan { more, hung, .. } = scan;
        log(&format!(
            "hang: and {more} more; queue {queue} has {hung} in flight for more than {}",
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
        let _ = write!(line, ", asked for by {client}");
    }
    line
}

/// The command that ends a hang because of held requests.
fn cure_of(hang: &Hang, disk: &Disk) -> String {
    match (&hang.place, disk.held()) {
        (Place::Held(_) | Place::ForHeldWrites, _) => format!("; {}", cure(disk)),
        (Place::ForTag(_), held @ 1..) => {
            format!("; nothing else can begin while {held} held requests have tags; {}", cure(disk))
        }
        _ => String::new(),
    }
}

fn cure(disk: &Disk) -> String {
    format!("blkq resume {} reissues them", disk.name())
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

/// The file with the kernel's stack of the thread of that name. It is opened before the daemon
/// may no longer open files.
fn thread_status(name: &str) -> Option<File> {
    let mut tasks = std::fs::read_dir("/proc/self/task").ok()?.flatten().map(|task| task.path());
    let of_name =
        |task: &PathBuf| std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim_end() == name);
    File::open(tasks.find(of_name)?.join("status")).ok()
}

/// The state in such a file, such as `D (disk sleep)`.
fn state_in(status: &File) -> Option<String> {
    let mut text = [0; 512];
    let length = status.read_at(&mut text, 0).ok()?;
    let text = String::from_utf8_lossy(&text[..length]);
    let state = text.lines().find_map(|line| line.strip_prefix("State:"))?;
    Some(state.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use blkq::drivers::fault::FaultSpec;
    use blkq::drivers::{DriverOptions, DriverSpec, open};
    use blkq::{Bio, Completion, Cqe, EngineThread, Error, ErrorPolicy, Resume, Source, SourceContext};

    use super::*;

    /// Lines that a watcher logged.
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

        fn wait(&self, what: &str, count: usize) -> Vec<String> {
            let until = Instant::now() + Duration::from_secs(60);
            while self.with(what).len() < count {
                assert!(Instant::now() < until, "{count} x {what:?} in {:?}", self.0.lock().unwrap());
                std::thread::sleep(Duration::from_millis(5));
            }
            self.with(what)
        }
    }

    /// A watched device, on which nothing completes while `fault` is in force.
    fn device(fault: &str, limit: Duration) -> (Arc<Disk>, EngineThread, HangWatch, Lines) {
        let options = DriverOptions { fault: Some(fault.parse().unwrap()), ..DriverOptions::default() };
        let opened = open(&DriverSpec::Ram(1 << 20), &options).unwrap();
        let disk = Disk::builder(opened).build().unwrap();
        let engine = EngineThread::spawn("blkq-queue-0", vec![(disk.clone(), 0)]).unwrap();
        let lines = Lines::default();
        let handles = vec![engine.handle().clone()];
        let mut watch = HangWatch::new(disk.clone(), handles, limit);
        watch.start(lines.log()).unwrap();
        (disk, engine, watch, lines)
    }

    #[test]
    fn a_stuck_request_is_logged_once_and_its_completion_too() {
        let (disk, engine, watch, lines) = device("stuck,op=write,count=1", Duration::from_millis(100));
        let writer = std::thread::spawn({
            let mut submitter = disk.submitter();
            move || submitter.write_at(&[1; 4096], 8192)
        });
        let hang = &lines.wait("hang: #", 1)[0];
        for part in
            ["write sector 16 + 8, queue 0, tag ", "stuck by a fault rule", "a thread of this process"]
        {
            assert!(hang.contains(part), "{hang}");
        }
        std::thread::sleep(Duration::from_millis(400));
        assert_eq!(lines.with("hang: #").len(), 1, "once");
        assert_eq!(disk.stats().hung, 1);
        disk.set_driver(&FaultSpec::default()).unwrap();
        assert!(writer.join().unwrap().is_ok());
        let over = &lines.wait("hang over: #", 1)[0];
        assert!(over.contains("write sector 16 + 8") && over.contains("completed after "), "{over}");
        assert_eq!(disk.stats().hung, 0);
        drop((watch, engine));
    }

    #[test]
    fn held_requests_are_logged_at_once_and_with_their_cure() {
        let (disk, engine, watch, lines) = device("error=ENOSPC,op=write", Duration::from_secs(3));
        disk.set_error_policy(ErrorPolicy::HoldNoSpace);
        let name = disk.name().to_owned();
        let writer = std::thread::spawn({
            let mut submitter = disk.submitter();
            move || submitter.write_at(&[1; 4096], 8192)
        });
        let cure = format!("; blkq resume {name} reissues them");
        let held = &lines.wait("held: 1 request is held after I/O errors", 1)[0];
        assert!(held.ends_with(&cure), "{held}");
        let hang = &lines.wait("hang: #", 1)[0];
        assert!(hang.contains("held: no space left") && hang.ends_with(&cure), "{hang}");
        disk.set_driver(&FaultSpec::default()).unwrap();
        assert_eq!(disk.resume(Resume::Reissue), 1);
        assert!(writer.join().unwrap().is_ok());
        lines.wait("hang over: #", 1);
        lines.wait("held: no request is held any more", 1);
        drop((watch, engine));
    }

    #[test]
    fn held_requests_are_logged_without_hang_warnings_too() {
        let (disk, engine, watch, lines) = device("error=ENOSPC,op=write", Duration::ZERO);
        disk.set_error_policy(ErrorPolicy::Hold);
        let hold = || {
            let mut submitter = disk.submitter();
            std::thread::spawn(move || submitter.write_at(&[1; 4096], 8192))
        };
        let writer = hold();
        lines.wait("held: 1 request is held after I/O errors", 1);
        disk.resume(Resume::Fail);
        assert!(writer.join().unwrap().is_err());
        lines.wait("held: no request is held any more", 1);
        // The next ones are within the time of that line.
        let writer = hold();
        let until = Instant::now() + HELD_INTERVAL * 3 / 2;
        while Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        disk.resume(Resume::Fail);
        assert!(writer.join().unwrap().is_err());
        assert_eq!(lines.with("held: ").len(), 2, "{:?}", lines.with("held: "));
        assert!(lines.with("hang").is_empty());
        drop((watch, engine));
    }

    #[test]
    fn the_warning_can_be_changed_and_switched_off() {
        let (disk, engine, watch, lines) = device("stuck,op=read", Duration::ZERO);
        let reader = std::thread::spawn({
            let mut submitter = disk.submitter();
            move || submitter.read_at(&mut [0; 512], 0)
        });
        std::thread::sleep(Duration::from_millis(250));
        assert!(lines.with("hang").is_empty(), "it is off");
        watch.set(Duration::from_millis(100));
        assert_eq!(watch.limit(), Duration::from_millis(100));
        lines.wait("hang: #", 1);
        watch.set(Duration::ZERO);
        let until = Instant::now() + Duration::from_secs(60);
        while disk.stats().hung != 0 {
            assert!(Instant::now() < until, "nothing counts as hung without scans");
            std::thread::sleep(Duration::from_millis(5));
        }
        for bad in ["", "-1", "x", "0.01", "inf", "NaN", "1e9"] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
        disk.set_driver(&FaultSpec::default()).unwrap();
        assert!(reader.join().unwrap().is_ok());
        drop((watch, engine));
    }

    /// Submits a read, and sleeps on the engine's thread for the time that a message has.
    struct Sleeper;

    // SAFETY: it is the only source of its engine.
    unsafe impl Source for Sleeper {
        fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
            let _ = cx.submit(0, Bio::read(blkq::Sector(0), blkq::IoBuffer::zeroed(512), 0));
            Ok(())
        }
        fn on_cqe(&mut self, _: &mut SourceContext<'_>, _: Cqe) {}
        fn on_bio(&mut self, _: &mut SourceContext<'_>, _: Completion) {}
        fn on_message(&mut self, _: &mut SourceContext<'_>, time: Box<dyn std::any::Any + Send>) {
            std::thread::sleep(*time.downcast::<Duration>().unwrap());
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
        let (disk, engine, watch, lines) = device("stuck", Duration::from_millis(200));
        let source = engine.handle().add_source(|| Box::new(Sleeper)).unwrap();
        engine.handle().send(source, Box::new(Duration::from_millis(900)));
        let line = &lines.wait("its thread has not answered", 1)[0];
        assert!(line.contains("queue 0") && line.contains("; it is S (sleeping)"), "{line}");
        lines.wait("answers again", 1);
        assert_eq!((watch.counters().stalls(), lines.with("not answered").len()), (1, 1));
        disk.set_driver(&FaultSpec::default()).unwrap();
        drop((watch, engine));
    }
}

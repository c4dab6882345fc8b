use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use blkq::sync::{lock, try_lock};
use blkq::units::format_bytes;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::DaemonState;
use blkq_protocol::options::{Setting, parse_new_group_name};
use blkq_protocol::state::overwrite_state;
use blkq_protocol::system::signals::Signal;
use rustix::process::Uid;

use crate::device::{Change, Device, Permit};
use crate::log;

/// How long a daemon that leaves its device to the next daemon waits until commands have been answered, and how long a
/// daemon waits for the command of a client that has connected before the client counts as silent.
pub(super) const LEAVE_WAIT: Duration = Duration::from_millis(100);
/// How long a daemon whose device has stopped waits until commands have been answered. None waits for I/O then.
pub(super) const STOP_WAIT: Duration = Duration::from_secs(5);
/// Delay before another attempt to adopt a changed size of the image, if I/O in flight prevented it. Doubles
/// with each attempt up to [`SIZE_RETRY_MAX`], because each attempt makes new I/O wait for a while.
const SIZE_RETRY: Duration = Duration::from_secs(15);
const SIZE_RETRY_MAX: Duration = Duration::from_secs(600);
const ANSWER_STACK_BYTES: usize = 256 << 10;

/// The socket of the service manager, if it requests notifications (sd_notify(3)).
static MANAGER: LazyLock<Option<UnixDatagram>> =
    LazyLock::new(|| connect(&std::env::var_os("NOTIFY_SOCKET")?).ok());

pub(super) struct Shared {
    /// The user who runs the daemon.
    pub(super) owner: Uid,
    pub(super) device: Device,
    /// Locked while a change of the stage is decided, and while the state file is written together with it.
    stage: Mutex<Stage>,
    /// Open for writing, because a confined daemon cannot open files in its directory.
    state_file: File,
    answering: AtomicUsize,
    /// Threads in `answering` that have no command or have already answered it.
    answered: AtomicUsize,
    /// Changes of the image's size that are not handled yet. While this is not zero, a thread handles them.
    size_changes: AtomicUsize,
    /// Disconnects of the last client that are not handled yet, as in `size_changes`.
    departures: AtomicUsize,
    /// A signal has been received, and a thread stops the device.
    signalled: AtomicBool,
    stopped: Sender<Stopped>,
    waker: UnixStream,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Serving,
    /// The next daemon reads the state file that this daemon wrote.
    Leaving,
    /// The device is closed, and stops or has stopped.
    Stopping,
}

impl Stage {
    /// Fails if the device can no longer be changed.
    pub(super) fn check(self) -> Outcome {
        match self {
            Stage::Serving => Ok(()),
            Stage::Leaving => Err(Failure::new("the device is being handed over to a new daemon; try again")),
            Stage::Stopping => Err(Failure::new("the device is stopping")),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Termination {
    /// A thread stops the device.
    Begun,
    /// No thread could be started; the caller must try again.
    NoThread,
    /// The device was already stopping, so this signal ends the process without waiting for I/O.
    ExitAtOnce,
}

/// Selects a counter of events.
type Counter = fn(&Shared) -> &AtomicUsize;

/// Sent to the main thread when the device has stopped.
pub(super) struct Stopped {
    /// The result of the last flush.
    pub(super) flushed: Outcome,
    /// The client that requested the stop and waits for the answer.
    pub(super) asker: Option<Arc<UnixStream>>,
}

impl Shared {
    /// The user `owner` runs the daemon. When the device has stopped, `stopped` gets a message, `waker` a
    /// byte.
    pub(super) fn new(
        owner: Uid,
        device: Device,
        stopped: Sender<Stopped>,
        waker: UnixStream,
        state_file: File,
    ) -> Arc<Shared> {
        Arc::new(Shared {
            owner,
            device,
            stage: Mutex::new(Stage::Serving),
            state_file,
            answering: AtomicUsize::new(0),
            answered: AtomicUsize::new(0),
            size_changes: AtomicUsize::new(0),
            departures: AtomicUsize::new(0),
            signalled: AtomicBool::new(false),
            stopped,
            waker,
        })
    }

    /// Threads that [`Shared::spawn`] started and that have not ended.
    pub(super) fn answering(&self) -> usize {
        self.answering.load(Ordering::Relaxed)
    }

    pub(super) fn stage(&self) -> MutexGuard<'_, Stage> {
        lock(&self.stage)
    }

    /// Fails if the device can no longer be changed.
    pub(super) fn check_stage(&self) -> Outcome {
        self.stage().check()
    }

    /// `None` if another thread holds the lock.
    pub(super) fn try_stage(&self) -> Option<MutexGuard<'_, Stage>> {
        try_lock(&self.stage)
    }

    /// On success the stage becomes `next`, and the caller must stop or leave the device. Fails if the device
    /// is already stopping, or if `close` refuses because the device is in use.
    pub(super) fn close(&self, next: Stage, close: impl FnOnce(&Device) -> Outcome) -> Outcome {
        let mut stage = self.stage();
        if *stage != Stage::Serving {
            let why = "the device is already stopping; `blkq list` shows when it is detached";
            return Err(Failure::new(why));
        }
        close(&self.device)?;
        *stage = next;
        Ok(())
    }

    /// Fails if earlier writes could not be made durable: the next daemon would not know, and would answer
    /// flushes without an error. Also fails if requests are held, or as [`Shared::close`] does.
    pub(super) fn leave(&self) -> Outcome {
        // Without the lock: a flush may take long or hang, and a forced stop must not wait for it.
        self.device.flush()?;
        self.close(Stage::Leaving, Device::leave)
    }

    /// Starts a thread that detaches the device if its last client has disconnected. Returns `false` if no
    /// thread can be started; then the caller must try again.
    pub(super) fn clients_left(self: &Arc<Shared>) -> bool {
        // Clients can connect and disconnect at any rate. Most devices do not detach with the last one, and
        // need no thread.
        if !self.device.is_autoclear() {
            return true;
        }
        let detach = |shared: &Shared| {
            let close = |device: &Device| match device.is_autoclear() {
                true => device.close(false),
                false => Err(Failure::new("the device stays")),
            };
            if shared.close(Stage::Stopping, close).is_ok() {
                log::line("stopping: the last client has disconnected");
                shared.stop(None);
            }
        };
        self.run_once(|shared| &shared.departures, detach)
    }

    /// Returns `false` if no thread can be started; then the caller must try again.
    pub(super) fn size_changed(self: &Arc<Shared>) -> bool {
        let follow = |shared: &Shared| {
            let (mut waiting, mut pause) = (None, SIZE_RETRY);
            while !shared.follow_size(&mut waiting) {
                std::thread::sleep(pause);
                pause = (pause * 2).min(SIZE_RETRY_MAX);
            }
        };
        self.run_once(|shared| &shared.size_changes, follow)
    }

    /// Runs `job` for an event that clients cause, on one thread for all events of this kind, which runs it
    /// again for each event that arrives meanwhile. With a thread per event, threads that wait for the stage
    /// would leave none for commands. `events` counts the events that are not handled yet. Returns whether a
    /// thread runs.
    fn run_once(self: &Arc<Shared>, events: Counter, job: impl Fn(&Shared) + Send + 'static) -> bool {
        if events(self).fetch_add(1, Ordering::SeqCst) > 0 {
            return true;
        }
        let run = move |shared: &Shared| loop {
            let seen = events(shared).load(Ordering::SeqCst);
            job(shared);
            if events(shared).compare_exchange(seen, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                return;
            }
        };
        let spawned = self.spawn(move |shared| shared.without_answer(|| run(shared)));
        if !spawned {
            events(self).store(0, Ordering::SeqCst);
        }
        spawned
    }

    /// Returns `false` if I/O in flight prevented this and the caller must try again. `waiting` holds the
    /// last failure, so that it is logged only once.
    fn follow_size(&self, waiting: &mut Option<Failure>) -> bool {
        let open = self.check_stage();
        match open.and_then(|()| self.device.follow_size()) {
            Ok(None) => true,
            Ok(Some(bytes)) => {
                log::line(&format!("the size of the image is now {} ({bytes} bytes)", format_bytes(bytes)));
                true
            }
            Err(failure) => {
                let busy = failure.is_busy();
                if waiting.as_ref() != Some(&failure) {
                    log::line(&format!("cannot adopt the new size of the image: {failure}"));
                    *waiting = Some(failure);
                }
                !busy
            }
        }
    }

    /// The device must be closed.
    pub(super) fn stop(&self, asker: Option<Arc<UnixStream>>) {
        notify("STOPPING=1\nSTATUS=Flushing and stopping");
        let flushed = self.device.stop();
        // The receivers belong to the main thread, which ends last.
        let _ = self.stopped.send(Stopped { flushed, asker });
        let _ = (&self.waker).write_all(&[0]);
    }

    /// Waits for up to `wait` until at most `own` commands have no answer: a command that gets none reports an error.
    pub(super) fn wait_for_answers(&self, own: usize, wait: Duration) {
        let until = Instant::now() + wait;
        while self.unanswered() > own && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Threads that still have to answer a command.
    fn unanswered(&self) -> usize {
        self.answering().saturating_sub(self.answered.load(Ordering::Relaxed))
    }

    /// Runs `wait` on a thread that owes no answer: [`Shared::wait_for_answers`] does not wait for it.
    pub(super) fn without_answer(&self, wait: impl FnOnce()) {
        self.answered.fetch_add(1, Ordering::Relaxed);
        wait();
        self.answered.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns whether a thread could be started.
    pub(super) fn spawn(self: &Arc<Shared>, job: impl FnOnce(&Shared) + Send + 'static) -> bool {
        let count = self.clone();
        self.answering.fetch_add(1, Ordering::Relaxed);
        let thread = std::thread::Builder::new().name("blkq-control".into()).stack_size(ANSWER_STACK_BYTES);
        let spawned = thread.spawn(move || {
            job(&count);
            count.answering.fetch_sub(1, Ordering::Relaxed);
        });
        if let Err(e) = &spawned {
            self.answering.fetch_sub(1, Ordering::Relaxed);
            log::line(&format!("cannot start a thread: {e}"));
        }
        spawned.is_ok()
    }

    pub(super) fn terminate(self: &Arc<Shared>, signal: Signal) -> Termination {
        let stop = move |shared: &Shared| {
            match shared.close(Stage::Stopping, |device| device.close(true)) {
                Ok(()) => {
                    log::line(&format!("stopping: received {}", signal.name()));
                    shared.stop(None);
                }
                Err(failure) => {
                    log::line(&format!("not stopping: {failure}"));
                    // The next signal must try again, instead of ending the process.
                    shared.signalled.store(false, Ordering::SeqCst);
                }
            }
        };
        self.begin_termination(|| self.spawn(stop))
    }

    /// `start` starts the thread that stops the device. Not called if that thread already runs.
    fn begin_termination(&self, start: impl FnOnce() -> bool) -> Termination {
        if self.signalled.swap(true, Ordering::SeqCst) {
            log::line("exiting immediately after a second signal; requests in flight may be lost");
            return Termination::ExitAtOnce;
        }
        if start() {
            return Termination::Begun;
        }
        // The device has not begun to stop, so the next signal must not skip the last flush.
        self.signalled.store(false, Ordering::SeqCst);
        Termination::NoThread
    }

    pub(super) fn set(&self, settings: &[(String, String)], permit: Permit) -> Outcome {
        self.check_stage()?;
        self.save(self.change(settings, permit), "set, but not saved")
    }

    pub(super) fn join_group(&self, group: &str, file: File, permit: Permit) -> Outcome {
        self.check_stage()?;
        let group = parse_new_group_name(group).map_err(Failure::new)?;
        self.save(self.device.join_group(&group, file, permit), "joined, but not saved")
    }

    /// Changes all settings whose value differs, and reloads the certificates: all of it, or nothing.
    pub(super) fn apply(&self, settings: &[(String, String)], permit: Permit) -> Outcome {
        self.check_stage()?;
        let changes = self.device.prepare_changes(settings)?;
        let certificates = self.device.prepare_certificates()?;
        let mut done = Vec::new();
        let set = changes.iter().try_for_each(|change| {
            let (key, value) = change.to.to_text();
            log::line(&format!("set {key}={value}"));
            self.change_to(&change.to, permit).map_err(|e| e.during(format_args!("{key}={value}")))?;
            done.push(change);
            Ok(())
        });
        // If nothing changed, a state file that cannot be written is no reason to fail.
        let kept =
            set.and_then(|()| if changes.is_empty() { Ok(()) } else { self.save(Ok(()), "cannot be saved") });
        kept.map_err(|failure| self.undo(&done, failure))?;
        if let Some((directory, certificates)) = certificates {
            certificates.install();
            log::line(&format!("reloaded the certificates in {}", directory.display()));
        }
        Ok(())
    }

    /// Returns `failure`, with the changes that could not be undone.
    fn undo(&self, done: &[&Change], mut failure: Failure) -> Failure {
        for change in done.iter().rev() {
            log::line(&format!("undo {}", change.to.name()));
            if let Err(e) = self.device.undo(change) {
                let (key, value) = change.to.to_text();
                failure = Failure::new(format!("{failure} ({key}={value} could not be undone: {e})"));
            }
        }
        failure
    }

    /// Saves the settings after they were `changed`. A failure to save begins with `otherwise`.
    fn save(&self, changed: Outcome, otherwise: &str) -> Outcome {
        let stage = self.stage();
        match *stage {
            // If one of several settings could not be set, those before it were set, and are saved.
            Stage::Serving => {
                let written = self.device.state().and_then(|state| self.write_state(&state));
                changed.and(written.map_err(|e| e.during(format_args!("{otherwise} for the next daemon"))))
            }
            // The next daemon has already read the state file, so the change would be lost.
            Stage::Leaving => stage.check(),
            // The state file is about to be removed.
            Stage::Stopping => changed,
        }
    }

    fn change(&self, settings: &[(String, String)], permit: Permit) -> Outcome {
        let settings = self.device.translate(settings)?;
        for (done, (key, value)) in settings.iter().enumerate() {
            log::line(&format!("set {key}={value}"));
            let set = || self.change_to(&self.device.read_setting(key, value)?, permit);
            set().map_err(|e| {
                let before: Vec<&str> = settings[..done].iter().map(|(key, _)| key.as_str()).collect();
                let note =
                    if done > 0 { format!(" (already set: {})", before.join(", ")) } else { String::new() };
                Failure::new(format!("{key}={value}: {e}{note}"))
            })?;
        }
        Ok(())
    }

    fn change_to(&self, setting: &Setting, permit: Permit) -> Outcome {
        // After `autoclear=off` has succeeded, the device must not detach. So the stage must not change before
        // the setting has.
        let staying = matches!(setting, Setting::Autoclear(_)).then(|| self.stage());
        staying.as_ref().map_or(Ok(()), |stage| stage.check())?;
        self.device.set(setting, permit)
    }

    pub(super) fn write_state(&self, state: &DaemonState) -> Outcome {
        overwrite_state(&self.state_file, state)
    }
}

/// Connects to the socket of the service manager. Must be called early: later this process may lack the mount
/// of its path, and the privilege to create a socket. If there is no service manager, nothing happens.
pub(super) fn connect_manager() {
    LazyLock::force(&MANAGER);
}

/// Sends the service manager lines such as `READY=1`, after [`connect_manager`]. Errors are ignored: a lost
/// notification must not stop the daemon.
pub(super) fn notify(lines: &str) {
    if let Some(manager) = &*MANAGER {
        let _ = manager.send(lines.as_bytes());
    }
}

fn connect(address: &OsStr) -> std::io::Result<UnixDatagram> {
    let address = match address.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        path => SocketAddr::from_pathname(OsStr::from_bytes(path))?,
    };
    let socket = UnixDatagram::unbound()?;
    // A service manager that does not read must not block the daemon.
    socket.set_nonblocking(true)?;
    socket.connect_addr(&address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::{BufRead, BufReader, Read};
    use std::os::unix::net::UnixListener;
    use std::sync::Barrier;
    use std::sync::mpsc::{Receiver, channel};

    use blkq::testing::wait_until;
    use blkq_protocol::harness::{options, scratch};
    use blkq_protocol::state::{Claim, StateDir};

    use rustix::process::geteuid;

    use super::*;
    use crate::device::open;
    use crate::process::commands::{ANSWERING_MAX, accept, accept_all};

    struct Served {
        dir: StateDir,
        claim: Claim,
        shared: Arc<Shared>,
        _woken: (UnixStream, Receiver<Stopped>),
    }

    impl Served {
        fn new(name: &str, words: &[&str]) -> Served {
            let dir = scratch(name);
            let claim = dir.claim("a").unwrap();
            let options = options(&[words, &["--export", "nbd", "--no-sandbox"]].concat());
            let device = open(&options, Vec::new(), &claim, Vec::new()).unwrap();
            let ((wake, waker), (sender, stopped)) = (UnixStream::pair().unwrap(), channel());
            let shared = Shared::new(geteuid(), device, sender, waker, claim.write_state(&"").unwrap());
            Served { dir, claim, shared, _woken: (wake, stopped) }
        }

        fn stop(self) {
            let Served { dir, claim, shared, .. } = self;
            shared.device.close(true).unwrap();
            shared.device.stop().unwrap();
            drop((shared, claim));
            std::fs::remove_dir_all(dir.path()).unwrap();
        }
    }

    #[test]
    fn a_change_that_the_next_daemon_would_miss_is_refused() {
        let served = Served::new("handover", &["ram:1M"]);
        let shared = &served.shared;
        let depth = || {
            let settings = shared.device.info().unwrap().settings;
            settings.into_iter().find(|(key, _)| key == "depth").unwrap().1
        };
        let set = |value: &str| shared.set(&[("depth".to_owned(), value.to_owned())], &|| Ok(()));
        set("64").unwrap();
        // The device has no block device to leave, so it keeps running.
        assert!(shared.close(Stage::Leaving, Device::leave).is_err());
        set("32").unwrap();

        *shared.stage() = Stage::Leaving;
        let refused = set("16").unwrap_err().to_string();
        assert!(refused.contains("handed over") && refused.contains("try again"), "{refused}");
        assert_eq!(depth(), "32");
        // The handover began while the change was made.
        shared.change(&[("depth".to_owned(), "16".to_owned())], &|| Ok(())).unwrap();
        assert_eq!(shared.save(Ok(()), ""), Err(Failure::new(refused)));
        *shared.stage() = Stage::Stopping;
        assert_eq!(shared.save(Ok(()), ""), Ok(()));
        assert!(set("8").unwrap_err().to_string().contains("stopping"));

        served.stop();
    }

    #[test]
    fn settings_are_applied_all_or_none() {
        let Served { dir, claim, shared, _woken } = Served::new("apply", &["ram:1M"]);
        let apply_if = |shared: &Shared, settings: &[(&str, &str)], permit: Permit| {
            let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
            shared.apply(&settings.iter().map(owned).collect::<Vec<_>>(), permit)
        };
        let apply = |shared: &Shared, settings: &[(&str, &str)]| apply_if(shared, settings, &|| Ok(()));
        let now = |device: &Device| (device.info().unwrap().settings, device.state().unwrap().settings);
        apply(&shared, &[("depth", "64"), ("read-only", "off")]).unwrap();
        let before = now(&shared.device);
        assert_eq!(
            before.1,
            [("depth".to_owned(), "64".to_owned())],
            "a setting that has the value already is not changed"
        );
        let changed = [("scheduler", "kyber"), ("limit", "iops=9"), ("depth", "32")];
        let late = apply(&shared, &[&changed[..], &[("depth", "10240")]].concat()).unwrap_err().to_string();
        assert!(late.starts_with("depth=10240: "), "{late}");
        assert_eq!(now(&shared.device), before);
        let permitted = Cell::new(2);
        let permit = || match permitted.replace(permitted.get() - 1) {
            0 => Err(Failure::new("the client exited")),
            _ => Ok(()),
        };
        assert!(apply_if(&shared, &changed, &permit).unwrap_err().to_string().contains("the client exited"));
        assert_eq!(now(&shared.device), before);
        // Each setting can be changed, but the state file cannot be written.
        let read_only = File::open(dir.file("a", ".json")).unwrap();
        let device = Arc::into_inner(shared).unwrap().device;
        let ((_wake, waker), (sender, _stopped)) = (UnixStream::pair().unwrap(), channel());
        let shared = Shared::new(geteuid(), device, sender, waker, read_only);
        let unsaved = apply(&shared, &changed).unwrap_err().to_string();
        assert!(unsaved.starts_with("cannot be saved for the next daemon: "), "{unsaved}");
        assert_eq!(now(&shared.device), before);
        Served { dir, claim, shared, _woken }.stop();
    }

    #[test]
    fn a_client_that_exited_sets_no_bitmap_file() {
        let served = Served::new("bitmap-permit", &["ram:1M"]);
        let exited = || Err(Failure::new("the client exited"));
        let file = File::open("/dev/null").unwrap();
        assert_eq!(served.shared.device.set_bitmap_file(file, &exited), exited());
        served.stop();
    }

    // Contract: detach
    #[test]
    fn each_command_gets_an_answer_of_a_device_that_stops() {
        let served = Served::new("answers", &["ram:1M"]);
        let shared = &served.shared;
        let path = served.claim.file(".control");
        let control = UnixListener::bind(&path).unwrap();
        control.set_nonblocking(true).unwrap();
        let end = Arc::new(Barrier::new(ANSWERING_MAX + 1));
        for _ in 0..ANSWERING_MAX {
            let end = end.clone();
            assert!(shared.spawn(move |_| {
                end.wait();
            }));
        }
        let ask = |command: &str| {
            let mut stream = UnixStream::connect(&path).unwrap();
            stream.write_all(format!("{command}\n").as_bytes()).unwrap();
            stream
        };
        let stat = r#"{"command":"stat"}"#;
        let waiting = [stat, stat, r#"{"command":"set","settings":[["depth","9"]]}"#, stat].map(ask);
        accept(shared, control.accept().unwrap().0, None);
        *shared.stage() = Stage::Stopping;
        accept_all(shared, &control);
        let [first, second, third, last] = waiting.map(|stream| {
            let mut answer = String::new();
            BufReader::new(stream).read_line(&mut answer).unwrap();
            answer
        });
        assert!(first.contains("too many commands"), "{first}");
        assert!(third.contains("the device is stopping"), "{third}");
        assert!([second, last].iter().all(|answer| answer.starts_with(r#"{"ok":"#)));
        end.wait();
        wait_until("the threads have exited", || shared.answering() == 0);
        served.stop();
    }

    // Contract: detach
    #[test]
    fn a_signal_that_starts_no_thread_is_not_the_first_one() {
        let served = Served::new("no-thread", &["ram:1M"]);
        let shared = &served.shared;
        for _ in 0..2 {
            assert_eq!(shared.begin_termination(|| false), Termination::NoThread);
        }
        assert_eq!(shared.begin_termination(|| true), Termination::Begun);
        assert_eq!(shared.begin_termination(|| unreachable!()), Termination::ExitAtOnce);
        served.stop();
    }

    #[test]
    fn one_thread_follows_all_changes_of_a_size() {
        events_share_one_thread("sizes", &["ram:1M"], Shared::size_changed, |shared| &shared.size_changes);
    }

    #[test]
    fn one_thread_checks_all_departures_of_clients() {
        let words = ["ram:1M", "--autoclear"];
        events_share_one_thread("departures", &words, Shared::clients_left, |shared| &shared.departures);
    }

    #[test]
    fn a_device_that_stays_starts_no_thread_when_clients_leave() {
        let served = Served::new("stays", &["ram:1M"]);
        let shared = &served.shared;
        let stage = shared.stage();
        assert!(shared.clients_left());
        assert_eq!(shared.answering(), 0);
        drop(stage);
        served.stop();
    }

    fn events_share_one_thread(
        name: &str,
        words: &[&str],
        announce: fn(&Arc<Shared>) -> bool,
        events: fn(&Shared) -> &AtomicUsize,
    ) {
        let served = Served::new(name, words);
        let shared = &served.shared;
        // A connected client prevents the device from detaching.
        let mut client = UnixStream::connect(served.claim.file(".nbd")).unwrap();
        client.read_exact(&mut [0; 18]).unwrap();
        for _ in 0..2 {
            let stage = shared.stage();
            for _ in 0..20 {
                assert!(announce(shared));
            }
            assert_eq!(shared.answering(), 1, "the thread waits for the stage");
            wait_until("nothing is left to answer", || shared.unanswered() == 0);
            drop(stage);
            wait_until("the thread is done", || shared.answering() == 0);
            assert_eq!(events(shared).load(Ordering::SeqCst), 0);
        }
        served.stop();
    }

    #[test]
    fn the_manager_is_notified_though_its_path_was_removed() {
        let name = format!("blkq-notify-{}", std::process::id());
        let path = std::env::temp_dir().join(&name);
        let _ = std::fs::remove_file(&path);
        let by_path = UnixDatagram::bind(&path).unwrap();
        let by_name = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let to_path = connect(path.as_os_str()).unwrap();
        let to_name = connect(OsStr::new(&format!("@{name}"))).unwrap();
        // This happens if the daemon detaches the mount of the path.
        std::fs::remove_file(&path).unwrap();
        to_path.send(b"READY=1").unwrap();
        to_name.send(b"STOPPING=1").unwrap();
        let mut buffer = [0; 32];
        let length = by_path.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"READY=1");
        let length = by_name.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"STOPPING=1");
    }
}

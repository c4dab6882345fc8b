//! The state that the threads of a daemon share, and the changes that they make to it.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::process::Uid;

use crate::failure::{Failure, Outcome};
use crate::info::DaemonState;
use crate::serve::{Change, Device};
use crate::settings::{Setting, is_removed};
use crate::signals::Signal;
use crate::state::overwrite_state;
use crate::{log, systemd};
use blkq::units::format_bytes;

/// How long a daemon that leaves its device to the next one waits for other commands' answers.
const LEAVE_WAIT: Duration = Duration::from_millis(100);
/// How long to wait before the size of an image is taken over, where I/O in flight kept that from being done; then
/// twice as long each time, up to the other. Each attempt keeps new I/O waiting for a while, which may not stall.
const SIZE_RETRY: Duration = Duration::from_secs(15);
const SIZE_RETRY_MAX: Duration = Duration::from_secs(600);
/// Stack of a thread that answers a command.
const ANSWER_STACK_BYTES: usize = 256 << 10;

/// The state that the threads that answer commands share.
pub(super) struct Shared {
    /// The user that runs it.
    owner: Uid,
    device: Device,
    /// Locked while its change is decided, and while the state file is written along with it.
    stage: Mutex<Stage>,
    /// Open for writing: a confined daemon may open nothing in its directory.
    state_file: File,
    answering: AtomicUsize,
    /// Threads of those that have no command, or have answered it.
    answered: AtomicUsize,
    /// Changes of the image's size that a thread takes over, and those that came meanwhile.
    size_changes: AtomicUsize,
    /// Departures of last clients that a thread checks, and those that came meanwhile.
    departures: AtomicUsize,
    /// A signal has asked to stop, which is on its way.
    signalled: AtomicBool,
    stopped: Sender<Stopped>,
    waker: UnixStream,
}

/// Where a device is in its life.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Serving,
    /// It is left to the next daemon, which reads what this one has written.
    Leaving,
    /// It is closed and stops, or has stopped.
    Stopping,
}

impl Stage {
    /// Whether the device can still be changed, and why not.
    pub(super) fn check(self) -> Outcome {
        match self {
            Stage::Serving => Ok(()),
            Stage::Leaving => Err(Failure::new("the device is being handed over to a new daemon; try again")),
            Stage::Stopping => Err(Failure::new("the device is stopping")),
        }
    }
}

/// The outcome of a signal to stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Termination {
    /// A thread stops the device.
    Begun,
    /// No thread could be started: the caller has to try again.
    NoThread,
    /// The device was stopping already, and another signal does not wait for that.
    ExitAtOnce,
}

/// The device has stopped.
pub(super) struct Stopped {
    /// How its last flush went.
    pub(super) flushed: Outcome,
    /// The client that asked for it and waits for the answer.
    pub(super) asker: Option<UnixStream>,
}

impl Shared {
    /// A device that is served, by the user `owner`. When it has stopped, `stopped` gets that, and `waker`
    /// a byte.
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

    /// The user that the daemon runs as.
    pub(super) fn owner(&self) -> Uid {
        self.owner
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// How many threads answer commands.
    pub(super) fn answering(&self) -> usize {
        self.answering.load(Ordering::Relaxed)
    }

    pub(super) fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stage, unless somebody else has it now.
    pub(super) fn try_stage(&self) -> Option<MutexGuard<'_, Stage>> {
        match self.stage.try_lock() {
            Ok(stage) => Some(stage),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Closes the device by `close`, for a caller that then stops or leaves it, depending on `next`.
    ///
    /// # Errors
    /// If it is in use and that is to be respected, or it is stopping already.
    pub(super) fn close(&self, next: Stage, close: impl FnOnce(&Device) -> Outcome) -> Outcome {
        let mut stage = self.stage();
        if *stage != Stage::Serving {
            return Err(Failure::new("it is stopping already; blkq list shows when it is detached"));
        }
        close(&self.device)?;
        *stage = next;
        Ok(())
    }

    /// Closes the device for the next daemon. Not if writes could not be made durable: that one
    /// would not know, and answer flushes without an error.
    ///
    /// # Errors
    /// As [`Shared::close`], and that.
    pub(super) fn leave(&self) -> Outcome {
        // The flush would wait for them.
        self.device.check_not_held()?;
        // Not under the lock: a flush may take long, or hang, and a forced stop does not wait for it.
        self.device.flush()?;
        self.close(Stage::Leaving, Device::leave)
    }

    /// Has a thread detach a device that detaches with its last client, which has disconnected. Returns `false` if no
    /// thread can be started: then the caller has to try again.
    pub(super) fn clients_left(self: &Arc<Shared>) -> bool {
        // Clients come and go as they like. Most devices stay, and need no thread.
        if !self.device.autoclear().is_on() {
            return true;
        }
        self.run_once(
            |shared| &shared.departures,
            |shared| {
                if shared.close_idle() {
                    log::line("stopping: the last client has disconnected");
                    shared.stop(None);
                }
            },
        )
    }

    /// Closes a device that detaches with its last client, if no client is connected.
    fn close_idle(&self) -> bool {
        let close = |device: &Device| match device.autoclear().is_on() {
            true => device.close(false),
            false => Err(Failure::new("it stays")),
        };
        self.close(Stage::Stopping, close).is_ok()
    }

    /// Has a thread take over the size of an image that may have changed it. Returns `false` if no thread can be
    /// started: then the caller has to try again.
    pub(super) fn size_changed(self: &Arc<Shared>) -> bool {
        self.run_once(
            |shared| &shared.size_changes,
            |shared| {
                let (mut waiting, mut pause) = (None, SIZE_RETRY);
                while !shared.follow_size(&mut waiting) {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(SIZE_RETRY_MAX);
                }
            },
        )
    }

    /// Runs `job` for an event that clients cause, on one thread for all events of its kind: an event that arrives
    /// while `job` runs has that thread run it again. A thread per event would leave none for commands, while the
    /// first one waits for the stage. `events` has the events since the thread started; returns whether there is a
    /// thread.
    fn run_once(
        self: &Arc<Shared>,
        events: fn(&Shared) -> &AtomicUsize,
        job: impl Fn(&Shared) + Send + 'static,
    ) -> bool {
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

    /// Takes the size of the image over; returns `false` if it is to be tried again, with the reason, once logged, in
    /// `waiting`: I/O that stalls keeps the device from changing.
    fn follow_size(&self, waiting: &mut Option<Failure>) -> bool {
        let open = self.stage().check();
        match open.and_then(|()| self.device.follow_size()) {
            Ok(None) => true,
            Ok(Some(bytes)) => {
                log::line(&format!("the image has {} now ({bytes} bytes)", format_bytes(bytes)));
                true
            }
            Err(failure) => {
                let busy = failure.is_busy();
                if waiting.as_ref() != Some(&failure) {
                    log::line(&format!("the size of the image was not taken over: {failure}"));
                    *waiting = Some(failure);
                }
                !busy
            }
        }
    }

    /// Stops the device, which is closed.
    pub(super) fn stop(&self, asker: Option<UnixStream>) {
        systemd::notify("STOPPING=1\nSTATUS=Flushing and stopping");
        let flushed = self.device.stop();
        // The receivers are in the first thread, which outlives all others.
        let _ = self.stopped.send(Stopped { flushed, asker });
        let _ = (&self.waker).write_all(&[0]);
    }

    /// Gives other commands a moment to be answered: one without an answer reports that.
    pub(super) fn wait_for_answers(&self) {
        let until = Instant::now() + LEAVE_WAIT;
        while self.unanswered() > 1 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// How many threads are to answer yet.
    fn unanswered(&self) -> usize {
        self.answering().saturating_sub(self.answered.load(Ordering::Relaxed))
    }

    /// Runs `wait` on a thread that has nothing to answer any more, and that an upgrade need not wait for.
    pub(super) fn without_answer(&self, wait: impl FnOnce()) {
        self.answered.fetch_add(1, Ordering::Relaxed);
        wait();
        self.answered.fetch_sub(1, Ordering::Relaxed);
    }

    /// Runs `job` on a thread of its own; returns whether there is one.
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

    /// Has a thread detach the device because of a signal.
    pub(super) fn terminate(self: &Arc<Shared>, signal: Signal) -> Termination {
        let stop = move |shared: &Shared| {
            match shared.close(Stage::Stopping, |device| device.close(true)) {
                Ok(()) => {
                    log::line(&format!("stopping: {} asked for it", signal.name()));
                    shared.stop(None);
                }
                Err(failure) => {
                    log::line(&format!("not stopping: {failure}"));
                    // The next signal tries again.
                    shared.signalled.store(false, Ordering::SeqCst);
                }
            }
        };
        self.begin_termination(|| self.spawn(stop))
    }

    /// Has `start` start the thread that stops the device, unless that runs already.
    fn begin_termination(&self, start: impl FnOnce() -> bool) -> Termination {
        if self.signalled.swap(true, Ordering::SeqCst) {
            log::line("exiting at once: another signal asked for it; what was in flight may be lost");
            return Termination::ExitAtOnce;
        }
        if start() {
            return Termination::Begun;
        }
        // The device has not begun to stop: another signal must not skip the last flush.
        self.signalled.store(false, Ordering::SeqCst);
        Termination::NoThread
    }

    pub(super) fn set(&self, settings: &[(String, String)]) -> Outcome {
        self.stage().check()?;
        self.keep(self.change(settings), "set, but not kept")
    }

    /// Changes all of the settings, and reads the certificates anew, for a device that does not have these values
    /// yet: all of it, or nothing.
    pub(super) fn apply(&self, settings: &[(String, String)]) -> Outcome {
        self.stage().check()?;
        let changes = self.device.prepare_changes(settings)?;
        let certificates = self.device.prepare_certificates()?;
        let mut done = Vec::new();
        let set = changes.iter().try_for_each(|change| {
            let (key, value) = change.to.to_text();
            log::line(&format!("set {key}={value}"));
            self.change_to(&change.to).map_err(|e| e.during(format_args!("{key}={value}")))?;
            done.push(change);
            Ok(())
        });
        // Nothing to write down is no reason to fail where the state file cannot be written.
        let kept = set
            .and_then(|()| if changes.is_empty() { Ok(()) } else { self.keep(Ok(()), "it cannot be kept") });
        kept.map_err(|failure| self.undo(&done, failure))?;
        if let Some((directory, certificates)) = certificates {
            certificates.install();
            log::line(&format!("reloaded the certificates in {}", directory.display()));
        }
        Ok(())
    }

    /// Undoes changes because of a failure; returns that, with what could not be undone.
    fn undo(&self, done: &[&Change], mut failure: Failure) -> Failure {
        for change in done.iter().rev() {
            log::line(&format!("undo {}", change.to.key()));
            if let Err(e) = self.device.undo(change) {
                let (key, value) = change.to.to_text();
                failure = Failure::new(format!("{failure} ({key}={value} stays: {e})"));
            }
        }
        failure
    }

    /// Writes the settings that were `changed` down, for the next daemon of the device; `otherwise` is what they are if
    /// that fails.
    fn keep(&self, changed: Outcome, otherwise: &str) -> Outcome {
        let stage = self.stage();
        match *stage {
            // Of several that were set, those before the one that failed are kept too.
            Stage::Serving => {
                let written = self.write_settings();
                changed.and(written.map_err(|e| e.during(format_args!("{otherwise} for the next daemon"))))
            }
            // The next daemon does not learn of it.
            Stage::Leaving => stage.check(),
            // Nothing of it is to be left.
            Stage::Stopping => changed,
        }
    }

    /// Writes the state file.
    ///
    /// # Errors
    /// That of the file.
    pub(super) fn write_state(&self, state: &DaemonState) -> Outcome {
        overwrite_state(&self.state_file, state)
    }

    fn write_settings(&self) -> Outcome {
        self.write_state(&self.device.state()?)
    }

    fn change(&self, settings: &[(String, String)]) -> Outcome {
        for (done, (key, value)) in settings.iter().enumerate() {
            log::line(&format!("set {key}={value}"));
            self.set_one(key, value).map_err(|e| {
                let before: Vec<&str> = settings[..done].iter().map(|(key, _)| key.as_str()).collect();
                let note =
                    if done > 0 { format!(" (done before: {})", before.join(", ")) } else { String::new() };
                Failure::new(format!("{key}={value}: {e}{note}"))
            })?;
        }
        Ok(())
    }

    fn set_one(&self, key: &str, value: &str) -> Outcome {
        if is_removed(key) {
            return Ok(());
        }
        self.change_to(&self.device.read_setting(key, value)?)
    }

    fn change_to(&self, setting: &Setting) -> Outcome {
        // A client that was promised that it stays can rely on it.
        let staying = matches!(setting, Setting::Autoclear(_)).then(|| self.stage());
        staying.as_ref().map_or(Ok(()), |stage| stage.check())?;
        self.device.set(setting)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::mpsc::{Receiver, channel};

    use blkq::testing::wait_until;
    use rustix::process::geteuid;

    use super::*;
    use crate::options::tests::options;
    use crate::state::tests::scratch;
    use crate::state::{Claim, StateDir};

    /// A device that is served.
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
            let device = Device::open(&options, Vec::new(), &claim, Vec::new()).unwrap();
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
        let set = |value: &str| shared.set(&[("depth".to_owned(), value.to_owned())]);
        set("64").unwrap();
        // There is no block device to leave: it keeps running.
        assert!(shared.close(Stage::Leaving, Device::leave).is_err());
        set("32").unwrap();

        *shared.stage() = Stage::Leaving;
        let refused = set("16").unwrap_err().to_string();
        assert!(refused.contains("handed over") && refused.contains("try again"), "{refused}");
        assert_eq!(depth(), "32");
        // It began to leave while the change was made.
        shared.change(&[("depth".to_owned(), "16".to_owned())]).unwrap();
        assert_eq!(shared.keep(Ok(()), ""), Err(Failure::new(refused)));
        *shared.stage() = Stage::Stopping;
        assert_eq!(shared.keep(Ok(()), ""), Ok(()));
        assert!(set("8").unwrap_err().to_string().contains("stopping"));

        served.stop();
    }

    #[test]
    fn settings_are_applied_all_or_none() {
        let Served { dir, claim, shared, _woken } = Served::new("apply", &["ram:1M"]);
        let apply = |shared: &Shared, settings: &[(&str, &str)]| {
            let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
            shared.apply(&settings.iter().map(owned).collect::<Vec<_>>())
        };
        let now = |device: &Device| (device.info().unwrap().settings, device.state().unwrap().settings);
        apply(&shared, &[("depth", "64"), ("read-only", "off")]).unwrap();
        let before = now(&shared.device);
        assert_eq!(before.1, [("depth".to_owned(), "64".to_owned())], "what it is already is not set");
        let changed = [("scheduler", "kyber"), ("limit", "iops=9"), ("depth", "32")];
        let late = apply(&shared, &[&changed[..], &[("depth", "10240")]].concat()).unwrap_err().to_string();
        assert!(late.starts_with("depth=10240: "), "{late}");
        assert_eq!(now(&shared.device), before);
        // Each can be set, and none can be written down.
        let read_only = File::open(dir.file("a", ".json")).unwrap();
        let device = Arc::into_inner(shared).unwrap().device;
        let ((_wake, waker), (sender, _stopped)) = (UnixStream::pair().unwrap(), channel());
        let shared = Shared::new(geteuid(), device, sender, waker, read_only);
        let unkept = apply(&shared, &changed).unwrap_err().to_string();
        assert!(unkept.starts_with("it cannot be kept for the next daemon: "), "{unkept}");
        assert_eq!(now(&shared.device), before);
        Served { dir, claim, shared, _woken }.stop();
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
        // A client keeps a device that would detach.
        let mut client = UnixStream::connect(served.claim.file(".nbd")).unwrap();
        client.read_exact(&mut [0; 18]).unwrap();
        for _ in 0..2 {
            let stage = shared.stage();
            for _ in 0..20 {
                assert!(announce(shared));
            }
            assert_eq!(shared.answering(), 1, "it waits for the stage");
            wait_until("nothing is left to answer", || shared.unanswered() == 0);
            drop(stage);
            wait_until("the thread is done", || shared.answering() == 0);
            assert_eq!(events(shared).load(Ordering::SeqCst), 0);
        }
        served.stop();
    }
}

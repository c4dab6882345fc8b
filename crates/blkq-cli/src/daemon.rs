//! The daemon of one device: its life from start to end, and its control socket.
//!
//! The first thread waits for commands and signals. Each command is answered on a
//! short-lived thread of its own, because a change may have to wait for I/O; the
//! device's I/O runs on the engine's threads, where nothing of this happens.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blkq_export::peer::Peer;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, Uid, geteuid, getrlimit, setrlimit, setsid, umask};

use crate::control::{LINE_BYTES_MAX, LINE_TIMEOUT, Request, parse_request, reply_line};
use crate::failure::{EXIT_FAILED, Failure, Outcome};
use crate::info::DeviceInfo;
use crate::options::AttachOptions;
use crate::pid_file::PidFile;
use crate::serve::Device;
use crate::signals::{Signal, Signals};
use crate::size::format_size;
use crate::state::{Claim, Orphan, StateDir};
use crate::{log, systemd};

/// Commands answered at a time; the next ones are turned away.
const ANSWERING_MAX: usize = 16;
/// How long to wait when a connection cannot be taken, or waited for.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// How long a daemon that leaves its device to the next one waits for other commands' answers.
const LEAVE_WAIT: Duration = Duration::from_millis(100);
/// Stack of a thread that answers a command.
const ANSWER_STACK_BYTES: usize = 256 << 10;

/// The process that started this daemon and waits for word from it, on standard output.
#[derive(Debug)]
pub struct Parent {
    /// What standard input and output become when it has been notified; `None` if nobody waits.
    null: Option<std::fs::File>,
}

impl Parent {
    /// Nobody: this process was not started by `attach`.
    pub fn none() -> Parent {
        Parent { null: None }
    }

    /// The parent of a daemon, which leaves the parent's session.
    ///
    /// # Errors
    /// If it cannot.
    pub fn new() -> Outcome<Parent> {
        setsid().map_err(|e| Failure::new(format!("setsid: {e}")))?;
        let null = std::fs::File::options().write(true).open("/dev/null");
        Ok(Parent { null: Some(null.map_err(|e| Failure::new(format!("/dev/null: {e}")))?) })
    }

    /// Sends the parent its one message, and releases standard input and output.
    ///
    /// # Errors
    /// If the parent is gone.
    pub fn notify(&mut self, reply: &[u8]) -> Outcome {
        let Some(null) = self.null.take() else { return Ok(()) };
        let mut stdout = std::io::stdout().lock();
        let written = stdout.write_all(reply).and_then(|()| stdout.flush());
        written
            .and_then(|()| Ok(rustix::stdio::dup2_stdin(&null)?))
            .and_then(|()| Ok(rustix::stdio::dup2_stdout(null)?))
            .map_err(|e| Failure::new(format!("the command that started the daemon is gone: {e}")))
    }
}

/// A device being served, and all that belongs to it.
pub struct Daemon {
    shared: Arc<Shared>,
    control: UnixListener,
    signals: Signals,
    ended: Receiver<Ended>,
    /// A byte when there is something in `ended`.
    wake: UnixStream,
    pid_file: Option<PidFile>,
    /// Last, so that the name is free after everything else is gone.
    claim: Claim,
}

/// What the threads that answer commands share.
struct Shared {
    /// Who runs it.
    owner: Uid,
    device: Device,
    /// Locked while its change is decided, and while the state file is written, which goes with it.
    stage: Mutex<Stage>,
    dir: StateDir,
    name: String,
    answering: AtomicUsize,
    /// A signal has asked for the end, which is on its way.
    signalled: AtomicBool,
    ended: Sender<Ended>,
    waker: UnixStream,
}

/// Where a device is in its life.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Serving,
    /// It is left to the next daemon, which reads what this one has written.
    Leaving,
    /// It is closed and ends, or has ended.
    Ending,
}

impl Stage {
    /// Whether the device can still be changed, and why not.
    fn check(self) -> Outcome {
        match self {
            Stage::Serving => Ok(()),
            Stage::Leaving => Err(Failure::new("the device is being handed over to a new daemon; try again")),
            Stage::Ending => Err(Failure::new("the device is ending")),
        }
    }
}

/// The device has ended.
struct Ended {
    /// How its last flush went.
    flushed: Outcome,
    /// Who asked for it and waits for the answer.
    asker: Option<UnixStream>,
}

impl Daemon {
    /// Takes the name, opens the device, and listens; when it returns, the device is
    /// usable and `parent` knows.
    ///
    /// # Errors
    /// Whatever keeps the device from being usable; nothing is left of it then.
    pub fn start(options: &AttachOptions, parent: &mut Parent) -> Outcome<Daemon> {
        let inherited = systemd::take_listeners()?;
        let (dir, signals) = Daemon::begin()?;
        let claim = match &options.name {
            Some(name) => dir.claim(name)?,
            None => dir.claim_unique(&options.default_name())?,
        };
        let open = |claim: &Claim| Device::open(options, claim, inherited);
        Daemon::ready(claim, signals, options.pid_file.as_deref(), open, parent)
    }

    /// As [`Daemon::start`], for the block device of a daemon that is gone.
    ///
    /// # Errors
    /// Whatever keeps the device from being taken over; it stays an orphan then.
    pub fn recover(options: &AttachOptions, orphan: Orphan, parent: &mut Parent) -> Outcome<Daemon> {
        let (_, signals) = Daemon::begin()?;
        let Orphan { claim, state } = orphan;
        for ending in [".control", ".nbd"] {
            claim.remove_socket(ending)?;
        }
        let open = |claim: &Claim| Device::recover(options, claim, state);
        Daemon::ready(claim, signals, options.pid_file.as_deref(), open, parent)
    }

    /// What a daemon does first.
    fn begin() -> Outcome<(StateDir, Signals)> {
        // It is run by way of /proc/self/exe, and would be called `exe`.
        let _ = rustix::thread::set_name(c"blkq");
        log::abort_on_panic();
        let signals = Signals::install()?;
        systemd::connect_manager();
        raise_limits();
        let dir = StateDir::locate()?;
        dir.create()?;
        // Sockets and files are for their owner alone, from the moment that they exist.
        umask(Mode::from_bits_truncate(0o177));
        Ok((dir, signals))
    }

    /// Listens, opens the device, and tells `parent`.
    fn ready(
        mut claim: Claim,
        signals: Signals,
        pid_file: Option<&Path>,
        open: impl FnOnce(&Claim) -> Outcome<Device>,
        parent: &mut Parent,
    ) -> Outcome<Daemon> {
        let system = |what: &'static str| move |e: std::io::Error| Failure::new(format!("{what}: {e}"));
        let control = UnixListener::bind(claim.file(".control")).map_err(system("control socket"))?;
        control.set_nonblocking(true).map_err(system("control socket"))?;
        let (wake, waker) = UnixStream::pair().map_err(system("socket pair"))?;
        let (sender, ended) = channel();
        let owner = geteuid();
        let orphaned = claim.is_kept();
        let mut device = match open(&claim) {
            Ok(device) => device,
            Err(failure) => {
                // The kernel may have refused to remove what was made.
                if !orphaned && claim.has_orphan() {
                    claim.keep(true);
                }
                return Err(failure);
            }
        };
        // From here on the name lives as long as the block device, however this process exits.
        if device.leaves_block_device() {
            claim.keep(true);
        }
        let mut tell = || -> Outcome<Option<PidFile>> {
            claim.write_state(&device.state_file()?)?;
            let pid_file = pid_file.map(PidFile::write).transpose()?;
            if parent.null.is_some() {
                log::redirect(&claim.file(".log"))?;
                // Not to keep a file system busy that has nothing to do with the device.
                std::env::set_current_dir("/").map_err(system("chdir"))?;
            }
            // Nothing below opens a file, or needs a privilege that is not kept.
            let removed = pid_file.iter().map(|file| file.path().to_owned());
            device.confine(removed.chain([claim.file(".lock")]))?;
            device.attend()?;
            let info = device.info_at_attach()?;
            let status = format!("Serving {} as {}", info.image, info.exports.join(" ")).replace('\n', " ");
            if log::path().is_some() {
                log::line(&format!("{status} (process {}, blkq {})", info.pid, env!("CARGO_PKG_VERSION")));
            }
            parent.notify(&reply_line(Ok(&info)))?;
            systemd::notify(&format!("READY=1\nSTATUS={status}"));
            Ok(pid_file)
        };
        let pid_file = match tell() {
            Ok(pid_file) => pid_file,
            Err(failure) => {
                // Nobody knows of it yet; an orphan stays one.
                if !orphaned {
                    let closed = device.close(true);
                    if claim.is_kept() {
                        claim.keep(device.leaves_block_device());
                    }
                    closed.map_err(|e| Failure::new(format!("{failure}; and what was made is left: {e}")))?;
                }
                return Err(failure);
            }
        };
        let shared = Shared {
            owner,
            device,
            stage: Mutex::new(Stage::Serving),
            dir: claim.dir().clone(),
            name: claim.name().to_owned(),
            answering: AtomicUsize::new(0),
            signalled: AtomicBool::new(false),
            ended: sender,
            waker,
        };
        Ok(Daemon { shared: Arc::new(shared), control, signals, ended, wake, pid_file, claim })
    }

    /// The device as it is now, with what its user should know first.
    ///
    /// # Errors
    /// If it has ended.
    pub fn info(&self) -> Outcome<DeviceInfo> {
        self.shared.device.info_at_attach()
    }

    /// Serves until the device is detached or a signal ends it.
    pub fn run(mut self) -> ExitCode {
        loop {
            let mut fds = [
                PollFd::new(&self.control, PollFlags::IN),
                PollFd::new(&self.signals, PollFlags::IN),
                PollFd::new(&self.wake, PollFlags::IN),
                PollFd::new(self.shared.device.autoclear().idle_event(), PollFlags::IN),
                PollFd::new(self.shared.device.rejection_event(), PollFlags::IN),
                PollFd::new(self.shared.device.failure_event(), PollFlags::IN),
            ];
            // Interrupted, or out of memory: look again. The signal is in its pipe.
            if poll(&mut fds, None).is_err_and(|e| e != Errno::INTR) {
                std::thread::sleep(ACCEPT_PAUSE);
            }
            let [commands, signals, ended, idle, rejections, failed] = fds.map(|fd| !fd.revents().is_empty());
            if signals {
                for signal in self.signals.take() {
                    if self.on_signal(signal) {
                        return self.exit_at_once();
                    }
                }
            }
            if failed && let Some(failure) = self.shared.device.take_failure() {
                log::line(&format!(
                    "exiting at once: {failure}; what it had in flight waits for blkq recover"
                ));
                return self.exit_at_once();
            }
            if ended && let Ok(ended) = self.ended.try_recv() {
                return self.finish(ended);
            }
            if rejections {
                self.shared.device.log_rejections();
            }
            if idle {
                self.shared.device.autoclear().take_event();
                spawn_answer(&self.shared, |shared| {
                    if shared.close_idle() {
                        log::line("ending: the last client has gone");
                        shared.end(None);
                    }
                });
            }
            if commands {
                match self.control.accept() {
                    Ok((stream, _)) => accept(&self.shared, stream),
                    // Out of descriptors, say: others may give some back.
                    Err(_) => std::thread::sleep(ACCEPT_PAUSE),
                }
            }
        }
    }

    /// Does what a signal asks for; returns whether the process is to exit at once.
    fn on_signal(&mut self, signal: Signal) -> bool {
        match signal {
            Signal::Hangup => {
                spawn_answer(&self.shared, |shared| log::line(&shared.device.reload_certificates()));
                false
            }
            Signal::Terminate | Signal::Interrupt => {
                if self.shared.signalled.swap(true, Ordering::SeqCst) {
                    log::line("ending at once: another signal asked for it; what was in flight may be lost");
                    return true;
                }
                spawn_answer(&self.shared, move |shared| {
                    match shared.close(Stage::Ending, |device| device.close(true)) {
                        Ok(()) => {
                            log::line(&format!("ending: {} asked for it", signal.name()));
                            shared.end(None);
                        }
                        Err(failure) => {
                            log::line(&format!("not ending: {failure}"));
                            // The next signal tries again.
                            shared.signalled.store(false, Ordering::SeqCst);
                        }
                    }
                });
                false
            }
        }
    }

    /// Detaches the device at once, with whoever has connected: its user could not be told of it.
    pub fn give_up(self) {
        if self.shared.close(Stage::Ending, |device| device.close(true)).is_ok() {
            self.shared.end(None);
        }
        if let Ok(ended) = self.ended.try_recv() {
            self.finish(ended);
        }
    }

    /// Exits with what is in flight. A block device that is left keeps its files, by which `recover`
    /// and `detach` find it.
    fn exit_at_once(self) -> ExitCode {
        let Daemon { shared, mut claim, .. } = self;
        claim.keep(shared.device.leaves_block_device());
        // The engines may have I/O that never completes.
        std::mem::forget(shared);
        match claim.is_kept() {
            // Locked until the process, which the kernel still takes for its server, is gone.
            true => std::mem::forget(claim),
            false => drop(claim),
        }
        ExitCode::from(EXIT_FAILED)
    }

    /// Removes what is left of the device, and then says so to who asked for it.
    fn finish(self, ended: Ended) -> ExitCode {
        let Daemon { shared, control, pid_file, mut claim, .. } = self;
        drop((control, pid_file));
        claim.keep(shared.device.leaves_block_device());
        drop(claim);
        drop(shared);
        let outcome = ended.flushed.map_err(|e| e.during("detached, but data may be lost"));
        let code = match &outcome {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => {
                log::line(&failure.to_string());
                ExitCode::from(EXIT_FAILED)
            }
        };
        if let Some(asker) = ended.asker {
            answer(&asker, &reply_line(outcome));
        }
        code
    }
}

impl Shared {
    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the device in the way of `close`, for who then ends it or leaves it, as `next` says.
    ///
    /// # Errors
    /// If it is in use and that is to be respected, or it is ending already.
    fn close(&self, next: Stage, close: impl FnOnce(&Device) -> Outcome) -> Outcome {
        let mut stage = self.stage();
        if *stage != Stage::Serving {
            return Err(Failure::new("it is ending already; blkq list tells when it is gone"));
        }
        close(&self.device)?;
        *stage = next;
        Ok(())
    }

    /// Closes the device for the next daemon. Not if writes could not be made durable: that one
    /// would know nothing of it, and answer flushes well.
    ///
    /// # Errors
    /// As [`Shared::close`], and that.
    fn leave(&self) -> Outcome {
        // Not under the lock: a flush may take long, or hang, and a forced end does not wait for it.
        self.device.flush()?;
        self.close(Stage::Leaving, Device::leave)
    }

    /// Closes a device that is to end with its last client, if that has gone.
    fn close_idle(&self) -> bool {
        let close = |device: &Device| match device.autoclear().is_on() {
            true => device.close(false),
            false => Err(Failure::new("it stays")),
        };
        self.close(Stage::Ending, close).is_ok()
    }

    /// Ends the device, which is closed.
    fn end(&self, asker: Option<UnixStream>) {
        systemd::notify("STOPPING=1\nSTATUS=Flushing and ending");
        let flushed = self.device.end();
        // The other ends are in the first thread, which lives longer than any other.
        let _ = self.ended.send(Ended { flushed, asker });
        let _ = (&self.waker).write_all(&[0]);
    }

    /// Does what a client asks, and answers.
    fn serve(&self, stream: UnixStream) {
        let request = match read_request(&stream) {
            Ok(request) => request,
            Err(failure) => return answer(&stream, &reply_line::<()>(Err(failure))),
        };
        let refused = |failure: &Failure| log::line(&format!("refused: {failure}"));
        let reply = match request {
            Request::Ping {} => reply_line(Ok(())),
            Request::Show {} => reply_line(self.device.info()),
            Request::Stat {} => reply_line(Ok(self.device.statistics())),
            Request::Set { settings } => reply_line(self.set(&settings).inspect_err(refused)),
            Request::Resize { size, force, user } => {
                log::line(&size.map_or("resize to the size of the image".to_owned(), |bytes| {
                    format!("resize to {} ({bytes} bytes)", format_size(bytes))
                }));
                let open = self.stage().check();
                let resize = || self.device.resize(size, force, user);
                reply_line(open.and_then(|()| resize()).inspect_err(refused))
            }
            Request::Leave {} => match self.leave() {
                Ok(()) => {
                    log::line("ending: the device goes to another daemon");
                    answer(&stream, &reply_line(Ok(())));
                    self.wait_for_answers();
                    // As if killed: the kernel takes back what it has given out when the task ends,
                    // and may wait for it for ever when only the ring goes.
                    std::process::exit(0);
                }
                Err(failure) => reply_line::<()>(Err(failure)),
            },
            Request::Detach { force } => match self.close(Stage::Ending, |device| device.close(force)) {
                Ok(()) => {
                    log::line("ending: detach asked for it");
                    return self.end(Some(stream));
                }
                Err(failure) => reply_line::<()>(Err(failure)),
            },
        };
        answer(&stream, &reply);
    }

    /// Gives other commands a moment to be answered: one that is lost is refused, and says so.
    fn wait_for_answers(&self) {
        let until = Instant::now() + LEAVE_WAIT;
        while self.answering.load(Ordering::Relaxed) > 1 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn set(&self, settings: &[(String, String)]) -> Outcome {
        self.stage().check()?;
        self.keep(self.change(settings))
    }

    /// Writes the settings that were `changed` down, for the next daemon of the block device.
    fn keep(&self, changed: Outcome) -> Outcome {
        let stage = self.stage();
        match *stage {
            // Of several that were set, those before the one that was refused are kept too.
            Stage::Serving => changed.and(self.write_settings()),
            // The next daemon does not hear of it.
            Stage::Leaving => stage.check(),
            // Nothing of it is to be left.
            Stage::Ending => changed,
        }
    }

    fn write_settings(&self) -> Outcome {
        let state = self.device.state_file()?;
        if state.ublk.is_none() {
            return Ok(());
        }
        self.dir.write_state(&self.name, &state).map_err(|e| e.during("set, but not kept for blkq recover"))
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
        match key {
            "autoclear" => {}
            "hang-warning" => return self.device.set_hang_warning(value),
            _ => return self.device.set(key, value),
        }
        // Who is told that it stays can rely on it.
        let stage = self.stage();
        stage.check()?;
        self.device.set_autoclear(value)
    }
}

/// Looks who is there and has a thread listen to it.
fn accept(shared: &Arc<Shared>, stream: UnixStream) {
    let turn_away = |why: &str| answer(&stream, &reply_line::<()>(Err(Failure::new(why))));
    // The socket's mode says the same; this holds wherever somebody moves the socket.
    match Peer::of(&stream) {
        Ok(peer) if peer.uid == shared.owner || peer.uid.is_root() => {}
        _ => return turn_away("only the owner of the daemon may talk to it"),
    }
    if shared.answering.load(Ordering::Relaxed) >= ANSWERING_MAX {
        return turn_away("too many commands at a time; try again");
    }
    spawn_answer(shared, |shared| shared.serve(stream));
}

/// Runs `job` on a thread of its own.
fn spawn_answer(shared: &Arc<Shared>, job: impl FnOnce(&Shared) + Send + 'static) {
    let count = shared.clone();
    shared.answering.fetch_add(1, Ordering::Relaxed);
    let thread = std::thread::Builder::new().name("blkq-control".into()).stack_size(ANSWER_STACK_BYTES);
    let spawned = thread.spawn(move || {
        job(&count);
        count.answering.fetch_sub(1, Ordering::Relaxed);
    });
    if let Err(e) = spawned {
        shared.answering.fetch_sub(1, Ordering::Relaxed);
        log::line(&format!("cannot start a thread: {e}"));
    }
}

/// Reads one line, bounded in length and time.
fn read_request(mut stream: &UnixStream) -> Outcome<Request> {
    let until = Instant::now() + LINE_TIMEOUT;
    let mut line = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Failure::new("no request came in time"));
        }
        let read = stream.set_read_timeout(Some(left)).and_then(|()| stream.read(&mut piece));
        match read {
            Ok(0) => return Err(Failure::new("malformed request: the line has no end")),
            Ok(length) => line.extend_from_slice(&piece[..length]),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(Failure::new(format!("cannot read the request: {e}"))),
        }
        if let Some(end) = line.iter().position(|byte| *byte == b'\n') {
            return parse_request(&line[..end]);
        }
        if line.len() >= LINE_BYTES_MAX {
            return Err(Failure::new(format!("malformed request: longer than {LINE_BYTES_MAX} bytes")));
        }
    }
}

/// Sends the reply; a client that does not take it goes without.
fn answer(mut stream: &UnixStream, reply: &[u8]) {
    let _ = stream.set_write_timeout(Some(LINE_TIMEOUT));
    let _ = stream.write_all(reply);
}

/// Takes what the user is allowed: descriptors for connections, locked memory for
/// registered buffers. What is refused is missed where it is needed, not here.
fn raise_limits() {
    for resource in [Resource::Nofile, Resource::Memlock] {
        let maximum = getrlimit(resource).maximum;
        let _ = setrlimit(resource, Rlimit { current: maximum, maximum });
    }
    // Root needs no limit raised to lock memory, until it is no longer privileged.
    let _ = setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::options;
    use crate::state::tests::scratch;

    #[test]
    fn what_the_next_daemon_would_not_hear_of_is_not_set_well() {
        let dir = scratch("handover");
        let claim = dir.claim("a").unwrap();
        let options = options(&["ram:1M", "--export", "nbd", "--no-sandbox"]);
        let device = Device::open(&options, &claim, Vec::new()).unwrap();
        let ((_wake, waker), (sender, _ended)) = (UnixStream::pair().unwrap(), channel());
        let shared = Shared {
            owner: geteuid(),
            device,
            stage: Mutex::new(Stage::Serving),
            dir: dir.clone(),
            name: "a".to_owned(),
            answering: AtomicUsize::new(0),
            signalled: AtomicBool::new(false),
            ended: sender,
            waker,
        };
        let depth = || {
            let settings = shared.device.info().unwrap().settings;
            settings.into_iter().find(|(key, _)| key == "depth").unwrap().1
        };
        let set = |value: &str| shared.set(&[("depth".to_owned(), value.to_owned())]);
        set("64").unwrap();
        // There is no block device to leave: it goes on.
        assert!(shared.close(Stage::Leaving, Device::leave).is_err());
        set("32").unwrap();

        *shared.stage() = Stage::Leaving;
        let refused = set("16").unwrap_err().to_string();
        assert!(refused.contains("handed over") && refused.contains("try again"), "{refused}");
        assert_eq!(depth(), "32");
        // It began to leave while the change was made.
        shared.change(&[("depth".to_owned(), "16".to_owned())]).unwrap();
        assert_eq!(shared.keep(Ok(())), Err(Failure::new(refused)));
        *shared.stage() = Stage::Ending;
        assert_eq!(shared.keep(Ok(())), Ok(()));
        assert!(set("8").unwrap_err().to_string().contains("ending"));

        shared.device.close(true).unwrap();
        shared.device.end().unwrap();
        drop((shared, claim));
        std::fs::remove_dir_all(dir.path()).unwrap();
    }
}

//! The daemon of one device: its life from start to exit, and its control socket.
//!
//! The first thread waits for commands and signals. Each command is answered on a
//! short-lived thread of its own, because a change may have to wait for I/O; the
//! device's I/O runs on the engine's threads, where nothing of this happens.

mod answer;
mod commit;
mod parent;
mod shared;
mod snapshot;
mod trace;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit, umask};

use crate::control::{Reply, line_of, reply_line};
use crate::failure::{EXIT_FAILED, EXIT_UNFLUSHED, Failure, Outcome};
use crate::info::DeviceInfo;
use crate::options::AttachOptions;
use crate::pid_file::PidFile;
use crate::serve::{Device, FLUSHES_IGNORED};
use crate::signals::{self, Signal, Signals};
use crate::state::{Claim, Orphan, StateDir};
use crate::{log, systemd};

use answer::{accept, answer};
pub use parent::Parent;
use shared::{Shared, Stage, Stopped, Termination};

/// How long to wait when a connection cannot be taken, or waited for.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// How long to wait before an event is handled again for which no thread could be started.
const THREAD_PAUSE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A device being served, and all that belongs to it.
pub struct Daemon {
    shared: Arc<Shared>,
    control: UnixListener,
    signals: Signals,
    stopped: Receiver<Stopped>,
    /// A byte when there is something in `stopped`.
    wake: UnixStream,
    pid_file: Option<PidFile>,
    /// Last, so that the name is free after everything else is released.
    claim: Claim,
}

impl Daemon {
    /// Takes the name, opens the device and listens, for NBD on the sockets `inherited` if the options have no
    /// address; when it returns, the device is usable and `parent` knows.
    ///
    /// # Errors
    /// Whatever keeps the device from being usable; nothing is left of it then.
    pub fn start(options: &AttachOptions, inherited: Vec<OwnedFd>, parent: &mut Parent) -> Outcome<Daemon> {
        let (dir, signals) = Daemon::begin()?;
        let claim = match &options.name {
            Some(name) => dir.claim(name)?,
            None => dir.claim_unique(&options.default_name())?,
        };
        Daemon::attach(claim, signals, options, Vec::new(), inherited, parent)
    }

    /// As [`Daemon::start`], for the device `name`, which is no block device, of a daemon that has exited and had
    /// `settings`.
    ///
    /// # Errors
    /// Whatever keeps the device from being usable; its state file stays for another attempt.
    pub fn succeed(
        name: &str,
        options: &AttachOptions,
        settings: Vec<(String, String)>,
        inherited: Vec<OwnedFd>,
        parent: &mut Parent,
    ) -> Outcome<Daemon> {
        let (dir, signals) = Daemon::begin()?;
        let claim = dir.claim_for_successor(name)?;
        Daemon::attach(claim, signals, options, settings, inherited, parent)
    }

    fn attach(
        claim: Claim,
        signals: Signals,
        options: &AttachOptions,
        settings: Vec<(String, String)>,
        inherited: Vec<OwnedFd>,
        parent: &mut Parent,
    ) -> Outcome<Daemon> {
        let open = |claim: &Claim| Device::open(options, settings, claim, inherited);
        Daemon::ready(claim, signals, options, open, false, parent)
    }

    /// As [`Daemon::start`], for the block device of a daemon that has exited.
    ///
    /// # Errors
    /// Whatever keeps the device from being taken over; it stays an orphan then.
    pub fn recover(
        options: &AttachOptions,
        orphan: Orphan,
        inherited: Vec<OwnedFd>,
        parent: &mut Parent,
    ) -> Outcome<Daemon> {
        let (_, signals) = Daemon::begin()?;
        let Orphan { claim, state } = orphan;
        for suffix in [".control", ".nbd", ".vhost"] {
            claim.remove_socket(suffix)?;
        }
        let open = |claim: &Claim| Device::recover(options, claim, state, inherited);
        Daemon::ready(claim, signals, options, open, true, parent)
    }

    /// The first steps of a daemon.
    fn begin() -> Outcome<(StateDir, Signals)> {
        // It is run by way of /proc/self/exe, and would be called `exe`.
        let _ = rustix::thread::set_name(c"blkq");
        log::abort_on_panic();
        let signals = Signals::install(&signals::DAEMON)?;
        systemd::connect_manager();
        raise_limits();
        let dir = StateDir::locate()?;
        dir.create()?;
        // Sockets and files are for their owner alone, from the moment that they exist.
        umask(Mode::from_bits_truncate(0o177));
        Ok((dir, signals))
    }

    /// Listens, opens the device, which may be an orphan, and notifies `parent`.
    fn ready(
        mut claim: Claim,
        signals: Signals,
        options: &AttachOptions,
        open: impl FnOnce(&Claim) -> Outcome<Device>,
        is_orphan: bool,
        parent: &mut Parent,
    ) -> Outcome<Daemon> {
        let system = |what: &'static str| move |e: std::io::Error| Failure::new(format!("{what}: {e}"));
        let control = UnixListener::bind(claim.file(".control")).map_err(system("control socket"))?;
        control.set_nonblocking(true).map_err(system("control socket"))?;
        let (wake, waker) = UnixStream::pair().map_err(system("socket pair"))?;
        let (sender, stopped) = channel();
        let owner = geteuid();
        // The device had a daemon before, for whose clients this one starts, whether the command still runs or not.
        let is_successor = claim.is_kept();
        let mut device = match open(&claim) {
            Ok(device) => device,
            Err(failure) => {
                // The kernel may have refused to remove what was made.
                if !is_successor && claim.has_orphan() {
                    claim.keep(true);
                }
                return Err(failure);
            }
        };
        // From here on the name lives as long as the block device, however this process exits.
        if device.leaves_block_device() {
            claim.keep(true);
        }
        let mut announce = || -> Outcome<(Option<PidFile>, File)> {
            let pid_file = PidFile::write(options)?;
            if parent.waits() {
                log::redirect(&claim.file(".log"))?;
                // Not to keep a file system busy that has nothing to do with the device.
                std::env::set_current_dir("/").map_err(system("chdir"))?;
            }
            // As late as can be: if an older program serves a device again that this one could not take over, it reads
            // its own state file.
            let state_file = claim.write_state(&device.state()?)?;
            // Nothing below opens a file, or needs a privilege that is not kept.
            let removed = pid_file.iter().map(|file| file.path().to_owned());
            device.confine(removed.chain([claim.file(".lock")]))?;
            device.start_background()?;
            let info = device.info_at_attach()?;
            let status = format!("Serving {} as {}", info.image, info.exports.join(" ")).replace('\n', " ");
            if log::path().is_some() {
                log::line(&format!("{status} (process {}, blkq {})", info.pid, env!("CARGO_PKG_VERSION")));
            }
            if info.unsafe_flush_ignore {
                log::line(&format!("warning: {FLUSHES_IGNORED}"));
            }
            let notified = parent.notify(&line_of(&Reply::Ok(&info))?);
            if !is_successor {
                notified?;
            }
            systemd::notify(&format!("READY=1\nSTATUS={status}"));
            Ok((pid_file, state_file))
        };
        let (pid_file, state_file) = match announce() {
            Ok(announced) => announced,
            Err(failure) => {
                // Nobody knows of it yet; an orphan stays one.
                if !is_orphan {
                    let closed = device.close(true);
                    if claim.is_kept() && !is_successor {
                        claim.keep(device.leaves_block_device());
                    }
                    closed.map_err(|e| Failure::new(format!("{failure}; and what was made is left: {e}")))?;
                }
                return Err(failure);
            }
        };
        let shared = Shared::new(owner, device, sender, waker, state_file);
        Ok(Daemon { shared, control, signals, stopped, wake, pid_file, claim })
    }

    /// The device as it is now, with what its user should know first.
    ///
    /// # Errors
    /// If it has stopped.
    pub fn info(&self) -> Outcome<DeviceInfo> {
        self.shared.device().info_at_attach()
    }

    /// Serves until the device is detached or a signal stops it.
    pub fn run(mut self) -> ExitCode {
        // Events for which no thread could be started.
        let (mut resize_due, mut idle_due, mut signal_due) = (false, false, None);
        loop {
            let mut fds = [
                PollFd::new(&self.control, PollFlags::IN),
                PollFd::new(&self.signals, PollFlags::IN),
                PollFd::new(&self.wake, PollFlags::IN),
                PollFd::new(self.shared.device().autoclear().idle_event(), PollFlags::IN),
                PollFd::new(self.shared.device().rejection_event(), PollFlags::IN),
                PollFd::new(self.shared.device().failure_event(), PollFlags::IN),
                PollFd::new(self.shared.device().size_event(), PollFlags::IN),
            ];
            // Interrupted, or out of memory: poll again. The signal is in its pipe.
            let until = (resize_due || idle_due || signal_due.is_some()).then_some(&THREAD_PAUSE);
            if poll(&mut fds, until).is_err_and(|e| e != Errno::INTR) {
                std::thread::sleep(ACCEPT_PAUSE);
            }
            let [commands, signals, stopped, idle, rejections, failed, resized] =
                fds.map(|fd| !fd.revents().is_empty());
            let mut arrived = if signals { self.signals.take() } else { Vec::new() };
            if arrived.is_empty() {
                arrived.extend(signal_due);
            }
            for signal in arrived {
                match self.on_signal(signal) {
                    None => {}
                    Some(Termination::Begun) => signal_due = None,
                    Some(Termination::NoThread) => signal_due = Some(signal),
                    Some(Termination::ExitAtOnce) => return self.exit_at_once(),
                }
            }
            if failed && let Some(failure) = self.shared.device().take_failure() {
                log::line(&format!(
                    "exiting at once: {failure}; what it had in flight waits for blkq recover"
                ));
                return self.exit_at_once();
            }
            if stopped && let Ok(stopped) = self.stopped.try_recv() {
                return self.finish(stopped);
            }
            if resized {
                let _ = rustix::io::read(self.shared.device().size_event(), &mut [0; 8]);
            }
            if resized || resize_due {
                resize_due = !self.shared.size_changed();
            }
            if rejections {
                self.shared.device().log_rejections();
            }
            if idle {
                self.shared.device().autoclear().take_event();
            }
            if idle || idle_due {
                idle_due = !self.shared.clients_left();
            }
            if commands {
                match self.control.accept() {
                    Ok((stream, _)) => accept(&self.shared, stream),
                    // Out of descriptors, for one: others may be closed.
                    Err(_) => std::thread::sleep(ACCEPT_PAUSE),
                }
            }
        }
    }

    /// Does what a signal asks for.
    fn on_signal(&self, signal: Signal) -> Option<Termination> {
        match signal {
            Signal::Hangup => {
                self.shared.spawn(move |shared| {
                    let done = match shared.device().reload_certificates() {
                        Ok(None) => "nothing to do, as there are no certificates to reload".to_owned(),
                        Ok(Some(directory)) => {
                            format!("reloaded the certificates in {}", directory.display())
                        }
                        Err(failure) => failure.to_string(),
                    };
                    log::line(&format!("{}: {done}", signal.name()));
                });
                None
            }
            Signal::Terminate | Signal::Interrupt => Some(self.shared.terminate(signal)),
            // They have no handlers here.
            Signal::Quit | Signal::Stop | Signal::Continue | Signal::Resize => None,
        }
    }

    /// Detaches the device at once, even with clients: its user could not be notified.
    pub fn give_up(self) {
        if self.shared.close(Stage::Stopping, |device| device.close(true)).is_ok() {
            self.shared.stop(None);
        }
        if let Ok(stopped) = self.stopped.try_recv() {
            self.finish(stopped);
        }
    }

    /// Exits with what is in flight. A block device that is left keeps its files, by which `recover`
    /// and `detach` find it.
    fn exit_at_once(self) -> ExitCode {
        let Daemon { shared, mut claim, .. } = self;
        claim.keep(shared.device().leaves_block_device());
        // The engines may have I/O that never completes.
        std::mem::forget(shared);
        match claim.is_kept() {
            // Locked until the process, which the kernel still takes for its server, has exited.
            true => std::mem::forget(claim),
            false => drop(claim),
        }
        ExitCode::from(EXIT_FAILED)
    }

    /// Removes what is left of the device, and then replies to the client that asked for it.
    fn finish(self, stopped: Stopped) -> ExitCode {
        let Daemon { shared, control, pid_file, mut claim, .. } = self;
        drop((control, pid_file));
        claim.keep(shared.device().leaves_block_device());
        drop(claim);
        drop(shared);
        let outcome = stopped.flushed.map_err(|e| e.during("detached"));
        let code = match &outcome {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => {
                log::line(&failure.to_string());
                ExitCode::from(EXIT_UNFLUSHED)
            }
        };
        if let Some(asker) = stopped.asker {
            answer(&asker, &reply_line(outcome));
        }
        code
    }
}

/// Takes what the user is allowed: descriptors for connections, locked memory for
/// registered buffers. A limit that cannot be raised fails where it is needed, not here.
pub fn raise_limits() {
    for resource in [Resource::Nofile, Resource::Memlock] {
        let maximum = getrlimit(resource).maximum;
        let _ = setrlimit(resource, Rlimit { current: maximum, maximum });
    }
    // Root needs no limit raised to lock memory, until it is no longer privileged.
    let _ = setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None });
}

//! The daemon of one device. The main thread waits for commands and signals. Each command is executed on a
//! short-lived thread of its own, because a change may have to wait for I/O. Engine threads do the I/O.

mod commands;
mod shared;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use blkq_protocol::control::{Reply, line_of, reply_line};
use blkq_protocol::daemon::{Obstacle, Operation, Parent, Serve, Start};
use blkq_protocol::failure::{EXIT_FAILED, EXIT_UNFLUSHED, Failure, Outcome};
use blkq_protocol::info::{BlockDevice, DeviceInfo, StateFile};
use blkq_protocol::options::{AttachOptions, with_write_access};
use blkq_protocol::state::{Claim, Orphan, StateDir};
use blkq_protocol::system::raise_limits;
use blkq_protocol::system::signals::{self, Signal, Signals};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::process::{geteuid, umask};

use crate::device::{self, FLUSHES_IGNORED, take};
use crate::log;
use crate::pid_file::{self, PidFile};
use crate::sandbox::OPERATIONS;

use commands::{accept, accept_all, answer};
use shared::{STOP_WAIT, Shared, Stage, Stopped, Termination, connect_manager, notify};

/// How long to pause after accept or poll has failed, for example because no file descriptor is free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// How long to wait before an event is handled again for which no thread could be started.
const THREAD_PAUSE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

pub struct Daemon {
    shared: Arc<Shared>,
    control: UnixListener,
    signals: Signals,
    stopped: Receiver<Stopped>,
    /// Receives a byte when `stopped` has a message.
    wake: UnixStream,
    pid_file: Option<PidFile>,
    /// The last field, because fields are dropped in order: the name must become free after everything else
    /// is released.
    claim: Claim,
}

impl Serve for Daemon {
    const OPERATIONS: &'static [Operation] = &OPERATIONS;

    fn start(start: Start<'_>, inherited: Vec<OwnedFd>, parent: &mut Parent) -> Outcome<Daemon> {
        // The program was executed as /proc/self/exe, so the kernel would call the process `exe`.
        let _ = rustix::thread::set_name(c"blkq");
        log::abort_on_panic();
        let signals = Signals::install(&signals::DAEMON)?;
        connect_manager();
        raise_limits();
        let dir = StateDir::locate()?;
        dir.create()?;
        // Sockets and files must be private to their owner from the moment they are created.
        umask(Mode::from_bits_truncate(0o177));
        let is_new = matches!(start, Start::New(_));
        let (mut claim, options, settings, orphan) = claim(&dir, start)?;
        // Then the clients wait for this daemon even if the command has been interrupted.
        let is_successor = claim.is_kept() && !is_new;
        let is_orphan = orphan.is_some();
        let system =
            |what: &'static str| move |e: std::io::Error| Failure::new(format!("cannot {what}: {e}"));
        let control =
            UnixListener::bind(claim.file(".control")).map_err(system("create the control socket"))?;
        control.set_nonblocking(true).map_err(system("create the control socket"))?;
        let (wake, waker) = UnixStream::pair().map_err(system("create a socket pair"))?;
        let (sender, stopped) = channel();
        // The confined process may not call geteuid(2).
        let owner = geteuid();
        // The device had a daemon before, and its clients wait for the next one, which finds it by its files.
        let has_files = claim.is_kept();
        let opened = match orphan {
            Some(state) => device::recover(options, &claim, state, inherited),
            None => device::open(options, settings, &claim, inherited),
        };
        let mut device = match opened {
            Ok(device) => device,
            Err(failure) => {
                // If the kernel refused to remove a new block device, its files must stay, so that it can be
                // recovered.
                if !has_files && claim.has_orphan() {
                    claim.keep(true);
                }
                return Err(failure);
            }
        };
        // A block device survives this process, however it exits. From here on its files must, too.
        if device.leaves_block_device() {
            claim.keep(true);
        }
        let mut announce = || -> Outcome<(Option<PidFile>, File)> {
            let pid_file = match PidFile::write(options) {
                // The clients of the device wait for it, and no pid file is worth their I/O.
                Err(failure) if is_successor => {
                    device.warnings.push(pid_file::warning(&failure));
                    None
                }
                written => written?,
            };
            if parent.waits() {
                log::redirect(&claim.file(".log"))?;
                // Otherwise the daemon would keep an unrelated file system busy.
                std::env::set_current_dir("/").map_err(system("change to the directory /"))?;
            }
            // This must be the last step that can fail for a reason of its own: if this program cannot take
            // over a device, the older program serves it again, and reads its own state file.
            let state_file = claim.write_state(&device.state()?)?;
            // Nothing below may open a file, or needs a privilege that confinement removes.
            let removed = pid_file.iter().map(|file| file.path.clone());
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
            notify(&format!("READY=1\nSTATUS={status}"));
            Ok((pid_file, state_file))
        };
        let (pid_file, state_file) = match announce() {
            Ok(announced) => announced,
            Err(failure) => {
                // No client knows this device yet, so it is removed. An orphan remains an orphan.
                if !is_orphan {
                    let closed = device.close(true);
                    if claim.is_kept() && !has_files {
                        claim.keep(device.leaves_block_device());
                    }
                    closed
                        .map_err(|e| Failure::new(format!("{failure}; the clean-up failed as well: {e}")))?;
                }
                return Err(failure);
            }
        };
        let shared = Shared::new(owner, device, sender, waker, state_file);
        Ok(Daemon { shared, control, signals, stopped, wake, pid_file, claim })
    }

    fn info(&self) -> Outcome<DeviceInfo> {
        self.shared.device.info_at_attach()
    }

    fn run(mut self) -> ExitCode {
        // Set for events for which no thread could be started; they are tried again after THREAD_PAUSE.
        let (mut resize_due, mut idle_due, mut signal_due) = (false, false, None);
        loop {
            let events = &self.shared.device.events;
            let mut fds = [
                PollFd::new(&self.control, PollFlags::IN),
                PollFd::new(&self.signals, PollFlags::IN),
                PollFd::new(&self.wake, PollFlags::IN),
                PollFd::new(&events.idle, PollFlags::IN),
                PollFd::new(&events.rejection, PollFlags::IN),
                PollFd::new(&events.failure, PollFlags::IN),
                PollFd::new(&events.size, PollFlags::IN),
            ];
            // After an interruption or ENOMEM, poll again. Signals are not lost: they are in their pipe.
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
                if signal == Signal::Hangup {
                    self.shared.spawn(reload_certificates);
                    continue;
                }
                // The other signals of `signals::DAEMON` stop the daemon.
                match self.shared.terminate(signal) {
                    Termination::Begun => signal_due = None,
                    Termination::NoThread => signal_due = Some(signal),
                    Termination::ExitAtOnce => return self.exit_at_once(),
                }
            }
            if failed && let Some(failure) = self.shared.device.take_failure() {
                log::line(&format!(
                    "exiting immediately: {failure}; requests in flight wait for `blkq recover`"
                ));
                return self.exit_at_once();
            }
            if stopped && let Ok(stopped) = self.stopped.try_recv() {
                return self.finish(stopped);
            }
            if resized {
                take(&events.size);
            }
            if resized || resize_due {
                resize_due = !self.shared.size_changed();
            }
            if rejections {
                self.shared.device.log_rejections();
            }
            if idle {
                take(&events.idle);
            }
            if idle || idle_due {
                idle_due = !self.shared.clients_left();
            }
            if commands {
                match self.control.accept() {
                    Ok((stream, _)) => accept(&self.shared, stream, None),
                    // Most likely no file descriptor is free; others may be closed soon.
                    Err(_) => std::thread::sleep(ACCEPT_PAUSE),
                }
            }
        }
    }

    fn give_up(self) {
        if self.shared.close(Stage::Stopping, |device| device.close(true)).is_ok() {
            self.shared.stop(None);
        }
        if let Ok(stopped) = self.stopped.try_recv() {
            self.finish(stopped);
        }
    }

    fn obstacles(options: &AttachOptions) -> Vec<Obstacle> {
        device::obstacles(options)
    }

    fn check_take_over(options: &AttachOptions, block_device: &BlockDevice) -> Outcome {
        device::check_take_over(options, device::size_of(block_device.identity())?)
    }

    fn check_successor(dir: &StateDir, options: &AttachOptions, bytes: u64) -> Outcome {
        device::check_successor(dir, options, bytes)
    }
}

impl Daemon {
    /// Does not wait for I/O in flight. The files of a remaining block device stay, so that `blkq recover`
    /// and `blkq detach` find it.
    fn exit_at_once(self) -> ExitCode {
        let Daemon { shared, mut claim, .. } = self;
        claim.keep(shared.device.leaves_block_device());
        // Dropping this would wait for the engines, which may have I/O that never completes.
        std::mem::forget(shared);
        if claim.is_kept() {
            // The lock must be held until the process has exited: until then, the kernel treats it as the
            // server of the block device, and another daemon cannot recover it.
            std::mem::forget(claim);
        }
        ExitCode::from(EXIT_FAILED)
    }

    /// The client that requested the stop gets its reply last.
    fn finish(self, stopped: Stopped) -> ExitCode {
        let Daemon { shared, control, pid_file, mut claim, .. } = self;
        accept_all(&shared, &control);
        shared.wait_for_answers(0, STOP_WAIT);
        drop((control, pid_file));
        claim.keep(shared.device.leaves_block_device());
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

fn reload_certificates(shared: &Shared) {
    let done = match shared.device.reload_certificates() {
        Ok(None) => "no certificates to reload".to_owned(),
        Ok(Some(directory)) => format!("reloaded the certificates in {}", directory.display()),
        Err(failure) => failure.to_string(),
    };
    log::line(&format!("{}: {done}", Signal::Hangup.name()));
}

/// The options of the device, and what its last daemon left: the settings that were changed, and the state of a block
/// device.
type Left<'a> = (Claim, &'a AttachOptions, Vec<(String, String)>, Option<StateFile>);

/// Claims the name of the device that this daemon begins to serve.
fn claim<'a>(dir: &StateDir, start: Start<'a>) -> Outcome<Left<'a>> {
    let resolved = |options: &AttachOptions| device::absolute(&device::with_ceph_files(options));
    Ok(match start {
        Start::New(options) => {
            let resolved = resolved(options)?;
            let claim = match &options.name {
                Some(name) => dir.claim(name)?,
                None => dir.claim_unique(&options.default_name(), &resolved)?,
            };
            claim.check_attach(&resolved)?;
            (claim, options, Vec::new(), None)
        }
        Start::Successor { name, options, settings } => {
            let claim = dir.claim_for_successor(name)?;
            // The options of a service are those of its file now.
            claim.check_continues(&resolved(&with_write_access(options, &settings))?)?;
            (claim, options, settings, None)
        }
        Start::Recovery { options, orphan } => {
            let Orphan { claim, state } = *orphan;
            [".control", ".nbd", ".vhost"].iter().try_for_each(|suffix| claim.remove_socket(suffix))?;
            (claim, options, Vec::new(), Some(state))
        }
    })
}

//! `attach --run CMD`: attaches a device, runs a command that uses it, and detaches the device.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use blkq_export::retry::retry;
use blkq_protocol::failure::{EXIT_FAILED, Failure, Outcome, print_error};
use blkq_protocol::info::DeviceInfo;
use blkq_protocol::options::{AttachOptions, Tls};
use blkq_protocol::state::StateDir;

use crate::commands::detach::{self, Detached};
use crate::launch::Launched;
use crate::launch::unescape;

/// A command that was killed by signal N makes this process exit with 128 + N, as shells do.
const EXIT_SIGNALLED: i32 = 128;
/// The time in which the clients of an exited command may disconnect by themselves, before they are
/// disconnected by force.
const HANG_UP_WAIT: Duration = Duration::from_secs(1);
const HANG_UP_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Returns the exit code of the shell; 1 if the command succeeded but the device failed. The device is
/// detached even if the shell cannot be started.
pub fn run(options: &AttachOptions, command: &str, launched: Launched) -> Outcome<ExitCode> {
    let Launched { info, mut daemon } = launched;
    let mut device = Device { name: &info.name, daemon: &mut daemon, exited: None, failed: false };
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", command]);
    for (name, value) in variables(options, &info) {
        // A variable without a value is removed: one that this process inherited would describe another
        // device.
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let exited = wait(&mut shell, &mut device);
    if let Err(failure) = device.detach() {
        print_error(&failure);
        device.failed = true;
    }
    let status = exited.map_err(|e| Failure::new(format!("cannot run the command of --run: {e}")))?;
    let code = status.code().unwrap_or_else(|| EXIT_SIGNALLED + status.signal().unwrap_or(0));
    let code = u8::try_from(code).ok().filter(|code| *code > 0 || !device.failed);
    Ok(ExitCode::from(code.unwrap_or(EXIT_FAILED)))
}

struct Device<'a> {
    name: &'a str,
    daemon: &'a mut Child,
    exited: Option<ExitStatus>,
    /// The daemon was killed or failed, or the device could not be detached cleanly.
    failed: bool,
}

impl Device<'_> {
    fn check(&mut self) {
        let Ok(Some(status)) = self.daemon.try_wait() else { return };
        if self.exited.replace(status).is_some() {
            return;
        }
        self.failed = !status.success();
        let what = match self.failed {
            true => format!("the daemon was killed or failed ({status})"),
            false => "the device was detached".to_owned(),
        };
        print_error(&Failure::new(format!("{}: {what} before the command of --run exited", self.name)));
    }

    fn detach(&mut self) -> Outcome {
        let dir = StateDir::locate()?;
        // A daemon that is being killed may not have exited yet, and `check` would not notice its death.
        dir.wait_for_dying(self.name);
        self.check();
        // If the daemon has exited, another device may have its name now, which must not be detached.
        if let Some(status) = self.exited {
            return if status.success() { Ok(()) } else { detach::clear_dead(&dir, self.name) };
        }
        let until = Instant::now() + HANG_UP_WAIT;
        let politely = || detach::detach(&dir, self.name, false);
        let detached = retry(until, HANG_UP_POLL_INTERVAL, politely, |_| true).or_else(|busy| {
            print_error(&Failure::new(format!("{busy}; --run detaches the device nevertheless")));
            detach::detach(&dir, self.name, true)
        });
        self.failed |= matches!(detached?, Detached::WasDead(_));
        Ok(())
    }
}

/// Runs the command and waits until it has exited. Forwards signals that another process sends to this
/// process. A signal of the terminal, such as that of Ctrl-C, is not forwarded: the command receives it, too.
fn wait(command: &mut Command, device: &mut Device<'_>) -> io::Result<ExitStatus> {
    let [blocked, before] = block_signals()?;
    // SAFETY: one system call between fork and exec, which allocates nothing.
    unsafe { command.pre_exec(move || change_mask(libc::SIG_SETMASK, &before).map(drop)) };
    let exited = command.spawn().and_then(|mut child| {
        loop {
            device.check();
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            // The signals are blocked: a signal that arrives between `try_wait` and `next_signal` stays pending and is
            // not missed.
            let (signal, is_sent) = next_signal(&blocked);
            if is_sent && signal != libc::SIGCHLD {
                // SAFETY: the child has not been waited for, so no other process can have its number.
                unsafe { libc::kill(child.id() as libc::pid_t, signal) };
            }
        }
    });
    let _ = change_mask(libc::SIG_SETMASK, &before);
    exited
}

/// Blocks signals that would kill this process, for [`next_signal`]. Returns them, and the mask before.
fn block_signals() -> io::Result<[libc::sigset_t; 2]> {
    // If this process was started with SIGCHLD ignored, the kernel would discard the exit status of the
    // command. SAFETY: zeroes are a valid, empty sigset_t, to which sigaddset writes; signal takes no pointer.
    let blocked = unsafe {
        let mut blocked: libc::sigset_t = std::mem::zeroed();
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGHUP, libc::SIGCHLD] {
            libc::sigaddset(&mut blocked, signal);
        }
        blocked
    };
    change_mask(libc::SIG_BLOCK, &blocked).map(|before| [blocked, before])
}

/// Returns the number of the next of the `blocked` signals, and whether a process sent it, not the kernel.
fn next_signal(blocked: &libc::sigset_t) -> (libc::c_int, bool) {
    loop {
        // SAFETY: the set is initialized, and zeroes are a valid siginfo_t, which the call overwrites.
        let (signal, info) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            (libc::sigwaitinfo(blocked, &mut info), info)
        };
        // -1: a signal that is not blocked has interrupted the call (EINTR). A code of at most 0 marks signals of
        // processes (sigaction(2)); the signals of the terminal come from the kernel.
        if signal > 0 {
            return (signal, info.si_code <= 0);
        }
    }
}

/// Changes the signal mask of this thread, which is the only one, as `how` says. Returns the mask before.
fn change_mask(how: libc::c_int, mask: &libc::sigset_t) -> io::Result<libc::sigset_t> {
    // SAFETY: zeroes are a valid sigset_t, which the call overwrites. It reads `mask`.
    let (error, before) = unsafe {
        let mut before: libc::sigset_t = std::mem::zeroed();
        (libc::pthread_sigmask(how, mask, &mut before), before)
    };
    if error == 0 { Ok(before) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// The environment variables that describe the device: those of `nbdkit --run`, and `name` and `device`.
fn variables(options: &AttachOptions, info: &DeviceInfo) -> [(&'static str, Option<OsString>); 8] {
    let uri = info.exports.iter().find(|export| export.starts_with("nbd"));
    let node = info.exports.iter().find(|export| export.starts_with("/dev/"));
    let socket = uri.and_then(|uri| uri.split_once("?socket=")).map(|(_, path)| unescape(path, "%"));
    let address = uri.and_then(|uri| uri.strip_prefix("nbd://").or(uri.strip_prefix("nbds://")));
    let address = address.map(|address| address.split('/').next().unwrap_or(address));
    let port = address.and_then(|address| address.rsplit_once(':')).map(|(_, port)| port.into());
    let export = options.export_name.clone().unwrap_or_default();
    let suffix = if export.is_empty() { String::new() } else { format!(":exportname={export}") };
    let old_style = |place: OsString| ["nbd:".into(), place, suffix.into()].into_iter().collect();
    let place = socket.clone().map(|path| [OsString::from("unix:"), path].into_iter().collect());
    let tls = match (options.tls, &options.tls_certificates) {
        (Some(Tls::Off), _) | (_, None) => "0",
        (Some(Tls::On), _) => "1",
        _ => "2",
    };
    [
        ("uri", uri.map(Into::into)),
        ("nbd", place.or(address.map(OsString::from)).map(old_style)),
        ("unixsocket", socket),
        ("port", port),
        ("exportname", Some(export.clone().into())),
        ("tls", Some(tls.into())),
        ("device", node.map(Into::into)),
        ("name", Some((&info.name).into())),
    ]
}

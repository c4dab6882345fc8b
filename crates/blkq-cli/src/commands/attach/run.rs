//! `attach --run CMD`: a device for as long as a command runs.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use crate::commands::detach::{self, Detached};
use crate::complain;
use crate::failure::{EXIT_FAILED, Failure, Outcome};
use crate::info::DeviceInfo;
use crate::launch::Launched;
use crate::options::{AttachOptions, Tls};
use crate::state::StateDir;

/// Added to the number of the signal that killed the command, as shells do.
const EXIT_SIGNALLED: i32 = 128;
/// Clients of a command that has exited may take so long to hang up before they are disconnected.
const HANG_UP_WAIT: Duration = Duration::from_secs(1);
const HANG_UP_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Runs `command` in a shell with the device in its environment, and detaches the device when that
/// has exited. Returns its exit code; 1 if it succeeded and the device did not.
///
/// # Errors
/// If it cannot be started; the device is detached then.
pub fn run(options: &AttachOptions, command: &str, launched: Launched) -> Outcome<ExitCode> {
    let Launched { info, mut daemon } = launched;
    let mut device = Device { name: &info.name, daemon: &mut daemon, exited: None, failed: false };
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", command]);
    for (name, value) in variables(options, &info) {
        // One of that name from elsewhere is of another device.
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let exited = wait(&mut shell, &mut device);
    device.detach();
    let status = exited.map_err(|e| Failure::new(format!("--run: {e}")))?;
    let code = status.code().unwrap_or_else(|| EXIT_SIGNALLED + status.signal().unwrap_or(0));
    Ok(match u8::try_from(code) {
        Ok(0) if device.failed => ExitCode::from(EXIT_FAILED),
        Ok(code) => ExitCode::from(code),
        Err(_) => ExitCode::from(EXIT_FAILED),
    })
}

/// The device, while the command runs.
struct Device<'a> {
    name: &'a str,
    daemon: &'a mut Child,
    exited: Option<ExitStatus>,
    /// Whether its daemon died, or it was not detached well.
    failed: bool,
}

impl Device<'_> {
    /// Reports it, once, if its daemon has exited.
    fn check(&mut self) {
        let Ok(Some(status)) = self.daemon.try_wait() else { return };
        if self.exited.replace(status).is_some() {
            return;
        }
        self.failed = !status.success();
        let what = match self.failed {
            true => format!("its daemon died ({status})"),
            false => "it was detached".to_owned(),
        };
        complain(&Failure::new(format!("{}: {what} before the command of --run exited", self.name)));
    }

    /// Detaches it, even if it is still in use.
    fn detach(&mut self) {
        let dir = match StateDir::locate() {
            Ok(dir) => dir,
            Err(failure) => return self.fail(&failure),
        };
        // A daemon that is being killed is no child to be waited for yet.
        dir.wait_for_dying(self.name);
        self.check();
        // It has exited meanwhile; the name may be another device's by now.
        if let Some(status) = self.exited {
            if !status.success()
                && let Err(failure) = detach::clear_dead(&dir, self.name)
            {
                complain(&failure);
            }
            return;
        }
        let until = Instant::now() + HANG_UP_WAIT;
        let detached = loop {
            match detach::detach(&dir, self.name, false) {
                Err(_) if Instant::now() < until => std::thread::sleep(HANG_UP_POLL_INTERVAL),
                Err(busy) => {
                    complain(&Failure::new(format!("{busy}; --run detaches it all the same")));
                    break detach::detach(&dir, self.name, true);
                }
                detached => break detached,
            }
        };
        match detached {
            Ok(Detached::Done | Detached::NotThere) => {}
            Ok(Detached::Died(_)) => self.failed = true,
            Err(failure) => self.fail(&failure),
        }
    }

    fn fail(&mut self, failure: &Failure) {
        complain(failure);
        self.failed = true;
    }
}

/// Runs the command. Signals that other processes send here are forwarded to it; it gets
/// those of the terminal itself. Either way this process stays until it has exited.
fn wait(command: &mut Command, device: &mut Device<'_>) -> io::Result<ExitStatus> {
    let signals = Signals::block()?;
    let before = signals.before;
    // SAFETY: one system call between fork and exec, which allocates nothing.
    unsafe { command.pre_exec(move || set_mask(&before)) };
    let mut child = command.spawn()?;
    loop {
        device.check();
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        // One that arrives from here on stays pending, so that none is missed.
        let (signal, is_sent) = signals.wait();
        if is_sent && signal != libc::SIGCHLD {
            // SAFETY: the child is not waited for yet, so that the number is still its own.
            unsafe { libc::kill(child.id() as libc::pid_t, signal) };
        }
    }
}

/// Signals that wait for [`Signals::wait`] instead of killing this process.
struct Signals {
    blocked: libc::sigset_t,
    before: libc::sigset_t,
}

impl Signals {
    fn block() -> io::Result<Signals> {
        // SAFETY: zeroes are a sigset_t; the calls write to it and change the mask of this thread,
        // the only one. A SIGCHLD that is ignored would discard the exit status.
        unsafe {
            let (mut blocked, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            libc::sigemptyset(&mut blocked);
            for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGHUP, libc::SIGCHLD] {
                libc::sigaddset(&mut blocked, signal);
            }
            match libc::pthread_sigmask(libc::SIG_BLOCK, &blocked, &mut before) {
                0 => Ok(Signals { blocked, before }),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }

    /// The next signal, and whether a process sent it (and not the terminal).
    fn wait(&self) -> (libc::c_int, bool) {
        loop {
            // SAFETY: a set of ours, and zeroes are a siginfo_t, which is written.
            let (signal, info) = unsafe {
                let mut info: libc::siginfo_t = std::mem::zeroed();
                (libc::sigwaitinfo(&self.blocked, &mut info), info)
            };
            // Interrupted by another signal: again.
            if signal > 0 {
                return (signal, info.si_code <= 0);
            }
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        let _ = set_mask(&self.before);
    }
}

fn set_mask(mask: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: changes the mask of this thread.
    match unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// The device in the variables that nbdkit --run has, and its name and node.
fn variables(options: &AttachOptions, info: &DeviceInfo) -> [(&'static str, Option<OsString>); 8] {
    let uri = info.exports.iter().find(|export| export.starts_with("nbd"));
    let node = info.exports.iter().find(|export| export.starts_with("/dev/"));
    let socket = uri.and_then(|uri| uri.split_once("?socket=")).map(|(_, path)| unescaped(path));
    let address = uri.and_then(|uri| uri.strip_prefix("nbd://").or(uri.strip_prefix("nbds://")));
    let address = address.map(|address| address.split('/').next().unwrap_or(address));
    let port = address.and_then(|address| address.rsplit_once(':')).map(|(_, port)| port.into());
    let export = options.export_name.clone().unwrap_or_default();
    let old_style = |place: OsString| {
        let mut text = OsString::from("nbd:");
        text.push(place);
        if !export.is_empty() {
            text.push(format!(":exportname={export}"));
        }
        text
    };
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

/// The path in a URI, without its `%XX`.
fn unescaped(text: &str) -> OsString {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let digits =
            after.get(..2).filter(|_| *first == b'%').and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => (bytes.push(byte), rest = &after[2..]),
            None => (bytes.push(*first), rest = after),
        };
    }
    OsString::from_vec(bytes)
}

//! Starts a daemon: runs this program again, which sends its reply on standard output and continues in the
//! background. Also runs other work in processes of its own, and exits together with the process that started this one.
//! Takes over what a service manager passes to this process at its start: sockets (sd_listen_fds(3)), and the name
//! of a device, escaped as the instance of a unit.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use blkq::text::escape;
use blkq_export::retry::retry;
use blkq_protocol::control::{REPLY_BYTES_MAX, Reply, reply_line};
use blkq_protocol::daemon::LaunchMessage;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::DeviceInfo;
use blkq_protocol::options::{AttachOptions, Record};
use blkq_protocol::system::signals;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, getppid, set_parent_process_death_signal, setsid, waitpid,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::output::{print_line, warn};

/// How long to wait for the exit of a daemon that failed to start.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(1);

const SUBCOMMAND: &str = "daemon";

/// The parent of this process when it began.
static STARTED_BY: OnceLock<Option<Pid>> = OnceLock::new();

pub struct Launched {
    pub info: DeviceInfo,
    pub daemon: Child,
}

/// The program that runs as the daemon.
pub enum Program {
    This,
    /// The program of another process. Its file may have been replaced or removed since that process started.
    Running(File),
}

impl Program {
    /// Fails if this process may not inspect the process `pid`.
    pub fn of_process(pid: u32) -> io::Result<Program> {
        File::open(format!("/proc/{pid}/exe")).map(Program::Running)
    }

    /// Starts a daemon that attaches a device, and waits until the device is ready. With `exit_with_parent`,
    /// the device is detached when this process exits.
    pub fn launch_attach(&self, options: &AttachOptions, exit_with_parent: bool) -> Outcome<Launched> {
        let flags: &[_] = if exit_with_parent { &["--exit-with-parent"] } else { &[] };
        let name = options.name.clone().unwrap_or_else(|| options.default_name());
        let options = Record::new(options)?;
        self.launch(flags, &name, Some(LaunchMessage { options, settings: Vec::new(), succeeds: false }))
    }

    /// As [`Program::launch_attach`], for the device `name`, which its last daemon has handed over. `settings` are
    /// those that were changed while that daemon served the device.
    pub fn launch_successor(
        &self,
        name: &str,
        options: &AttachOptions,
        settings: Vec<(String, String)>,
    ) -> Outcome<Launched> {
        let options = Record::new(options)?;
        self.launch(&[], name, Some(LaunchMessage { options, settings, succeeds: true }))
    }

    /// As [`Program::launch_attach`], for the device `name`, which the new daemon recovers because the last
    /// one has exited. With `allow_replaced`, the daemon also serves files that replaced those of the device.
    pub fn launch_recover(&self, name: &str, allow_replaced: bool) -> Outcome<Launched> {
        let flags: &[_] = if allow_replaced { &["--recover", "--allow-replaced"] } else { &["--recover"] };
        self.launch(flags, name, None)
    }

    /// Runs the program as a daemon. Its arguments show in process lists, so they contain no options.
    fn launch(&self, flags: &[&str], name: &str, message: Option<LaunchMessage>) -> Outcome<Launched> {
        let input = message.map(|message| serde_json::to_vec(&message)).transpose();
        let input = input.map_err(|e| failure(e.into()))?.unwrap_or_default();
        let mut command = Command::new(match self {
            Program::This => "/proc/self/exe".to_owned(),
            Program::Running(file) => format!("/proc/self/fd/{}", file.as_raw_fd()),
        });
        command.arg0("blkq").arg(SUBCOMMAND).args(flags).arg("--").arg(name);
        // Any descriptor but standard input, output and error would keep a lock or a pipe of the caller open while the
        // daemon runs. SAFETY: between fork and exec, this makes one system call, which closes nothing before the exec,
        // and allocates nothing.
        unsafe { command.pre_exec(|| close_range(3, libc::CLOSE_RANGE_CLOEXEC)) };
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(failure)?;
        if let Some(mut stdin) = child.stdin.take() {
            // A daemon that does not read its input reports why.
            let _ = stdin.write_all(&input);
        }
        let mut line = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            stdout.take(REPLY_BYTES_MAX as u64).read_to_end(&mut line).map_err(failure)?;
        }
        let (printed, reply) = last_line(&line);
        let _ = io::stderr().write_all(printed);
        match serde_json::from_slice(reply) {
            Ok(Reply::Ok(info)) => Ok(Launched { info, daemon: child }),
            Ok(Reply::Error(message)) => {
                // Wait for the exit, so that nothing of the daemon is left when this command returns. The time is
                // limited, because a kernel bug could keep the process.
                let exited = || if matches!(child.try_wait(), Ok(None)) { Err(()) } else { Ok(()) };
                let _ = retry(Instant::now() + EXIT_TIMEOUT, EXIT_POLL_INTERVAL, exited, |()| true);
                Err(Failure::new(message))
            }
            Err(_) => {
                let status = child.wait().map_err(failure)?;
                Err(Failure::new(format!("the daemon exited before it was ready ({status})")))
            }
        }
    }
}

/// Splits the output into the reply, which is the last line, and the text before it: libraries may print to
/// standard output, too.
fn last_line(text: &[u8]) -> (&[u8], &[u8]) {
    let text = text.trim_ascii_end();
    text.split_at(text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1))
}

/// Prints the warnings about a new device, and its exports, one per line.
pub fn report(info: &DeviceInfo) -> Outcome {
    warn(&info.name, &info.warnings);
    info.exports.iter().try_for_each(|export| print_line(export))
}

/// Closes all descriptors from `first` on, or sets a flag of them (close_range(2)).
///
/// # Safety
/// Nothing in this process may own a descriptor that is closed.
pub unsafe fn close_range(first: u32, flags: u32) -> io::Result<()> {
    // SAFETY: the call accesses no memory; the callers are responsible for the descriptors.
    match unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn failure(error: io::Error) -> Failure {
    let hint = if Path::new("/proc/self").exists() { "" } else { "; mount a proc file system on /proc" };
    Failure::new(format!("cannot start the daemon: {error}{hint}"))
}

/// Runs `work` in a child process and returns its result. Ctrl-C, the end of the terminal session, SIGTERM
/// and even SIGKILL of this process do not stop `work`. Fails if `work` fails, or if the child process cannot
/// be started or was killed.
pub fn in_own_session<T: Serialize + DeserializeOwned>(work: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    let failed = |e: io::Error| Failure::new(format!("cannot start a process: {e}"));
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
    // SAFETY: a command has no other threads, so the child inherits no lock that another thread held.
    match unsafe { libc::fork() } {
        -1 => Err(failed(io::Error::last_os_error())),
        0 => {
            drop(reader);
            // setsid fails only for the leader of a process group, which a new process is not.
            let _ = setsid();
            let done = signals::ignore(&signals::DAEMON).and_then(|()| work());
            // The parent, which waits for the reply, may have been killed. The work is done all the same.
            let _ = File::from(writer).write_all(&reply_line(done));
            std::process::exit(0)
        }
        pid => {
            drop(writer);
            let mut line = Vec::new();
            File::from(reader).take(REPLY_BYTES_MAX as u64).read_to_end(&mut line).map_err(failed)?;
            // The child has replied or was killed, so this does not wait long.
            let _ = waitpid(Pid::from_raw(pid), WaitOptions::empty());
            match serde_json::from_slice(&line) {
                Ok(Reply::Ok(value)) => Ok(value),
                Ok(Reply::Error(message)) => Err(Failure::new(message)),
                Err(_) => Err(Failure::new(
                    "the process that made the change was killed; `blkq list` shows whether the change was made",
                )),
            }
        }
    }
}

/// Records the parent. Must be called first, because the parent may exit at any time.
pub fn note_parent() {
    STARTED_BY.get_or_init(getppid);
}

/// Makes the kernel send SIGTERM to this process when the thread that started it exits. Fails if the parent
/// has already exited; the kernel would send no signal then.
pub fn exit_with_parent() -> Outcome {
    set_parent_process_death_signal(Some(Signal::TERM))
        .map_err(|e| Failure::new(format!("cannot exit with the parent process: {e}")))?;
    let parent = getppid();
    if STARTED_BY.get().is_some_and(|pid| *pid != parent) || was_adopted(parent) {
        return Err(Failure::new("the process that started blkq has already exited"));
    }
    Ok(())
}

/// Whether the parent exited before this process recorded it. A process inherits the session of its parent,
/// unless it leads a session. So a parent with another session has adopted this process.
fn was_adopted(parent: Option<Pid>) -> bool {
    let session = session_of(0);
    let (Some(parent), true) = (parent, session != Some(getpid().as_raw_pid())) else { return false };
    session_of(parent.as_raw_pid()).is_some_and(|of_parent| Some(of_parent) != session)
}

/// The session of `process`, or of this process if 0. The session is 0 if its leader is outside of this PID
/// namespace, as in many containers; rustix does not support that value.
fn session_of(process: libc::pid_t) -> Option<libc::pid_t> {
    // SAFETY: the call has no pointer.
    let session = unsafe { libc::getsid(process) };
    (session >= 0).then_some(session)
}

/// The first descriptor that a service manager passes: `SD_LISTEN_FDS_START`.
const LISTEN_FDS_START: RawFd = 3;
/// Maximum number of sockets that are accepted; real units pass far fewer.
const LISTEN_FDS_MAX: RawFd = 64;

/// Whether listening sockets were passed to this process itself, and not to one of its ancestors.
pub fn is_activated() -> bool {
    let pid = std::env::var("LISTEN_PID").ok().and_then(|pid| pid.parse::<u32>().ok());
    pid == Some(std::process::id()) && std::env::var_os("LISTEN_FDS").is_some()
}

/// Takes the sockets that were passed to this process, and closes all other descriptors except the standard
/// ones, which nothing in this process uses. Must be called once, before any descriptor is opened or closed.
/// Fails if `LISTEN_FDS` is not a number, or if one of its descriptors is not open.
pub fn take_listeners() -> Outcome<Vec<OwnedFd>> {
    if !is_activated() {
        return Ok(Vec::new());
    }
    let failed = |why: String| Failure::new(why).during("socket activation");
    let refuse = |what: String| failed(format!("{what}; start blkq from a .socket unit"));
    let count = std::env::var("LISTEN_FDS").ok().and_then(|count| count.parse::<RawFd>().ok());
    let count = count
        .filter(|count| (0..=LISTEN_FDS_MAX).contains(count))
        .ok_or_else(|| refuse(format!("LISTEN_FDS is not a number from 0 to {LISTEN_FDS_MAX}")))?;
    let fds = LISTEN_FDS_START..LISTEN_FDS_START + count;
    // SAFETY: F_GETFD only reads the descriptor table.
    let is_closed = |fd: &RawFd| unsafe { libc::fcntl(*fd, libc::F_GETFD) < 0 };
    if let Some(fd) = fds.clone().find(is_closed) {
        return Err(refuse(format!("descriptor {fd} of LISTEN_FDS is not open")));
    }
    // SAFETY: this process has opened no descriptor yet, and those of the protocol precede the closed ones.
    unsafe { close_range(fds.end as u32, 0) }.map_err(|e| failed(e.to_string()))?;
    fds.map(|fd| {
        // SAFETY: the descriptor is open. According to LISTEN_PID it was opened for this process to own, and
        // this process has opened no descriptor yet.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        fcntl_setfd(&fd, FdFlags::CLOEXEC).map(|()| fd).map_err(|e| failed(e.to_string()))
    })
    .collect()
}

/// The instance of a template unit for the device `name`, escaped as systemctl does (systemd.unit(5)).
pub fn escape_instance(name: &str) -> String {
    escape(name, |c| !c.is_ascii_alphanumeric() && !":-_.@".contains(c))
}

/// The name of the device of an instance (`%i`). Names contain no backslash, so an instance that is not
/// escaped is returned unchanged.
pub fn unescape_instance(instance: &str) -> String {
    unescape(instance, "\\x").into_string().unwrap_or_else(|_| instance.to_owned())
}

/// Decodes the bytes that `text` escapes, each as `mark` and two hexadecimal digits: `\x2f` in the names of units, `%2f`
/// in URIs.
pub fn unescape(text: &str, mark: &str) -> OsString {
    let mut parts = text.split(mark);
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let digits = part.get(..2).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => bytes.extend([&[byte], &part.as_bytes()[2..]].concat()),
            None => bytes.extend([mark.as_bytes(), part.as_bytes()].concat()),
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reply_is_found_after_the_output_of_libraries() {
        assert_eq!(last_line(b"{}\n"), (&b""[..], &b"{}"[..]));
        assert_eq!(last_line(b"no such host\n\n{}\n"), (&b"no such host\n\n"[..], &b"{}"[..]));
        assert_eq!(last_line(b""), (&b""[..], &b""[..]));
    }

    #[test]
    fn instances_are_escaped_as_systemctl_does() {
        for (name, instance) in [
            ("a+b", "a\\x2bb"),
            ("ü", "\\xc3\\xbc"),
            ("a-b", "a-b"),
            ("a@b.c_d", "a@b.c_d"),
            ("data", "data"),
        ] {
            assert_eq!(escape_instance(name), instance);
            assert_eq!(
                (unescape_instance(instance), unescape_instance(name)),
                (name.to_owned(), name.to_owned())
            );
        }
        for other in ["\\x", "\\xzz", "a\\x2", "\\xff"] {
            assert_eq!(unescape_instance(other), other);
        }
    }
}

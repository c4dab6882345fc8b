//! Runs work that must complete even if the command is interrupted, in a process with a session of its own.

use std::fs::File;
use std::io::{Read, Write};

use blkq_protocol::control::{REPLY_BYTES_MAX, Reply, reply_line};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::system::signals;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions, setsid, waitpid};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Runs `work` in a child process and returns its result. Ctrl-C, the end of the terminal session, SIGTERM
/// and even SIGKILL of this process do not stop `work`. Fails if `work` fails, or if the child process cannot
/// be started or was killed.
pub fn in_own_session<T: Serialize + DeserializeOwned>(work: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    let failed = |e: std::io::Error| Failure::new(format!("cannot start a process: {e}"));
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
    // SAFETY: a command has no other threads, so the child inherits no lock that another thread held.
    match unsafe { libc::fork() } {
        -1 => Err(failed(std::io::Error::last_os_error())),
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

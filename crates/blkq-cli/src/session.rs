//! Work that a command begins and that must not end with it: it runs in a process of a session of its own.

use std::fs::File;
use std::io::{Read, Write};

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions, setsid, waitpid};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::control::{REPLY_BYTES_MAX, Reply, reply_line};
use crate::failure::{Failure, Outcome};
use crate::signals;

/// Does `work` in a process of its own, and returns the outcome. Ctrl-C, the end of a terminal's session, SIGTERM and
/// even SIGKILL of this process do not stop it.
///
/// # Errors
/// That of `work`, or that there is no such process, or that it was killed.
pub fn in_own_session<T: Serialize + DeserializeOwned>(work: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    let failed = |e: std::io::Error| Failure::new(format!("cannot start a process: {e}"));
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
    // SAFETY: a command has no other threads, so the new process finds no lock taken.
    match unsafe { libc::fork() } {
        -1 => Err(failed(std::io::Error::last_os_error())),
        0 => {
            drop(reader);
            // It fails only for the leader of a group, which a new process is not.
            let _ = setsid();
            let done = signals::ignore(&signals::DAEMON).and_then(|()| work());
            // The process that waits for the reply may have been killed.
            let _ = File::from(writer).write_all(&reply_line(done));
            std::process::exit(0)
        }
        pid => {
            drop(writer);
            let mut line = Vec::new();
            File::from(reader).take(REPLY_BYTES_MAX as u64).read_to_end(&mut line).map_err(failed)?;
            // It has replied, or was killed.
            let _ = waitpid(Pid::from_raw(pid), WaitOptions::empty());
            match serde_json::from_slice(&line) {
                Ok(Reply::Ok(value)) => Ok(value),
                Ok(Reply::Error(message)) => Err(Failure::new(message)),
                Err(_) => {
                    Err(Failure::new("the process that does it was killed; blkq list shows the device"))
                }
            }
        }
    }
}

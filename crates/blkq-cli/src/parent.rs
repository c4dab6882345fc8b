//! Exiting with the process that started this one: `--exit-with-parent`, and the daemon of `--run`.

use std::sync::OnceLock;

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

use crate::failure::{Failure, Outcome};

/// The process that started this one, as this one began.
static STARTED_BY: OnceLock<Option<Pid>> = OnceLock::new();

/// Notes the parent of this process: the first thing that it does.
pub fn note() {
    STARTED_BY.get_or_init(getppid);
}

/// From here on the kernel sends this process SIGTERM when the thread exits that started it.
///
/// # Errors
/// If its process has exited already, of which the kernel reports nothing any more.
pub fn exit_with_it() -> Outcome {
    set_parent_process_death_signal(Some(Signal::TERM))
        .map_err(|e| Failure::new(format!("cannot exit with the parent process: {e}")))?;
    let parent = getppid();
    if STARTED_BY.get().is_some_and(|pid| *pid != parent) || was_adopted(parent) {
        return Err(Failure::new(
            "the process that started blkq has exited already; there is nobody to serve",
        ));
    }
    Ok(())
}

/// Whether this process lost its parent before it began: it has its parent's session, unless
/// it leads one, and so a process that adopted it is of another one.
fn was_adopted(parent: Option<Pid>) -> bool {
    let session = session_of(0);
    let (Some(parent), true) = (parent, session != Some(getpid().as_raw_pid())) else { return false };
    session_of(parent.as_raw_pid()).is_some_and(|of_parent| Some(of_parent) != session)
}

/// The session of `process`, 0 for this one. It is 0 where its leader is outside of this PID namespace,
/// as in many a container: rustix takes no session for that.
fn session_of(process: libc::pid_t) -> Option<libc::pid_t> {
    // SAFETY: the call has no pointer.
    let session = unsafe { libc::getsid(process) };
    (session >= 0).then_some(session)
}

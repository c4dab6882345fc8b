//! Exits together with the process that started this one: `--exit-with-parent`, and the daemon of `--run`.

use std::sync::OnceLock;

use blkq_protocol::failure::{Failure, Outcome};
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

static STARTED_BY: OnceLock<Option<Pid>> = OnceLock::new();

/// Records the parent. Must be called first, because the parent may exit at any time.
pub fn note() {
    STARTED_BY.get_or_init(getppid);
}

/// Makes the kernel send SIGTERM to this process when the thread that started it exits. Fails if the parent
/// has already exited; the kernel would send no signal then.
pub fn exit_with_it() -> Outcome {
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

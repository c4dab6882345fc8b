//! Forks processes for work that a server must not do in its own process. The server forks them before it
//! starts threads. They share no memory with the server, and keep only the descriptors that they need.

use std::ffi::CStr;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use rustix::process::getppid;

/// Name of the process of [`IdleWatch`](super::IdleWatch). [`usage`](super::usage) recognizes the process by
/// it.
pub(super) const IDLE_NAME: &CStr = c"blkq-idle";

/// Forks a process called `name` that runs `body` with the descriptors `kept`. It ignores the signals that a
/// terminal or a service manager sends to all processes of a server, because it must still be running when
/// the server stops its device; so `body` must return when the server has exited. Fails as fork(2) does.
///
/// # Safety
/// This process must have only one thread: the new process contains only a copy of the forking thread, and a
/// lock that another thread holds would stay locked in it.
pub(super) unsafe fn fork<const N: usize>(
    name: &CStr,
    kept: [OwnedFd; N],
    body: impl FnOnce([OwnedFd; N]) -> io::Result<()>,
) -> io::Result<()> {
    // Signals are blocked until the child ignores them: a handler of the server, run in the child, would
    // report the signal to the server a second time.
    let before = signals(libc::SIG_BLOCK, &all_signals())?;
    // SAFETY: the caller guarantees that there are no other threads.
    let forked = unsafe { libc::fork() };
    let error = io::Error::last_os_error();
    if forked == 0 {
        for signal in IGNORED {
            // SAFETY: SIG_IGN installs no handler, so no code of this program runs.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
    }
    signals(libc::SIG_SETMASK, &before)?;
    match forked {
        -1 => Err(error),
        0 => {
            let _ = rustix::thread::set_name(name);
            let done = keep_only(kept).and_then(body);
            // SAFETY: _exit runs no destructor and no exit handler, which in this copy would act for the
            // server.
            unsafe { libc::_exit(i32::from(done.is_err())) }
        }
        _ => Ok(()),
    }
}

/// Whether the process `server` is the parent of this one. If the server has exited, another process is.
pub(super) fn is_child_of(server: u32) -> bool {
    getppid().is_some_and(|parent| parent.as_raw_nonzero().get() as u32 == server)
}

/// Sent to all processes of a server by a terminal or a service manager.
const IGNORED: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

fn all_signals() -> libc::sigset_t {
    // SAFETY: all zeroes are a valid sigset_t, and sigfillset writes a valid pointer.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        all
    }
}

fn signals(how: libc::c_int, set: &libc::sigset_t) -> io::Result<libc::sigset_t> {
    // SAFETY: all zeroes are a valid sigset_t, and both pointers are valid.
    unsafe {
        let mut before: libc::sigset_t = std::mem::zeroed();
        match libc::pthread_sigmask(how, set, &mut before) {
            0 => Ok(before),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Closes all descriptors but `kept` and the standard streams, which become /dev/null. An open file
/// description of the image, for one, would keep the locks of the image.
fn keep_only<const N: usize>(kept: [OwnedFd; N]) -> io::Result<[OwnedFd; N]> {
    std::env::set_current_dir("/")?;
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    std::mem::forget(null);
    let mut numbers = kept.each_ref().map(AsRawFd::as_raw_fd);
    numbers.sort_unstable();
    let mut first = libc::STDERR_FILENO + 1;
    for number in numbers {
        close_range(first, number - 1)?;
        first = number + 1;
    }
    close_range(first, RawFd::MAX)?;
    Ok(kept)
}

fn close_range(first: RawFd, last: RawFd) -> io::Result<()> {
    // SAFETY: this process uses no descriptors but `kept`, which the caller leaves out of the range, and the
    // standard streams, which are below the range.
    if first <= last && unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

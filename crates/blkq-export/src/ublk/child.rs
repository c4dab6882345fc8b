//! Processes that a server forks before it has threads, each for what the server itself must not do.
//! They share no memory with it, and no descriptor but those that they keep.

use std::ffi::CStr;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// The name of the process that watches the users of a device.
pub(super) const IDLE_NAME: &CStr = c"blkq-idle";

/// Forks a process called `name` that runs `body` and exits. It keeps the descriptors of `kept` and
/// ignores the signals that a terminal or a service manager sends to all processes of a server:
/// `body` returns when the server has exited.
///
/// # Errors
/// If there can be no more processes.
///
/// # Safety
/// This process must have one thread only: the new one has but that, and what others had
/// locked would stay so in it.
pub(super) unsafe fn fork<const N: usize>(
    name: &CStr,
    kept: [OwnedFd; N],
    body: impl FnOnce([OwnedFd; N]) -> io::Result<()>,
) -> io::Result<()> {
    // A handler of the server, run in the child too, would report one signal to the server twice.
    let before = signals(libc::SIG_BLOCK, &all_signals())?;
    // SAFETY: the caller guarantees that there are no other threads.
    let forked = unsafe { libc::fork() };
    let error = io::Error::last_os_error();
    if forked == 0 {
        for signal in IGNORED {
            // SAFETY: no code of this program is run.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
    }
    signals(libc::SIG_SETMASK, &before)?;
    match forked {
        -1 => Err(error),
        0 => {
            let _ = rustix::thread::set_name(name);
            let done = keep_only(kept).and_then(body);
            // SAFETY: nothing of the process that this one was copied from shall run in it any more.
            unsafe { libc::_exit(i32::from(done.is_err())) }
        }
        _ => Ok(()),
    }
}

/// The signals that a terminal or a service manager sends to all processes of a server.
const IGNORED: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

fn all_signals() -> libc::sigset_t {
    // SAFETY: zeroes are a sigset_t, which is written.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        all
    }
}

/// Changes the signal mask of this thread; returns the one before.
fn signals(how: libc::c_int, set: &libc::sigset_t) -> io::Result<libc::sigset_t> {
    // SAFETY: zeroes are a sigset_t, and both are.
    unsafe {
        let mut before: libc::sigset_t = std::mem::zeroed();
        match libc::pthread_sigmask(how, set, &mut before) {
            0 => Ok(before),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Closes all other descriptors: of the image with its locks first of all.
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
    // SAFETY: nothing of this process uses its descriptors any more, but those that it keeps, which
    // are left out, and the standard ones.
    if first <= last && unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

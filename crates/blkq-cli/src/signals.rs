//! The signals that a process acts on, as bytes in a pipe that its first thread polls.
//!
//! Every thread has them unblocked, and the handler only writes a byte: whichever thread the kernel
//! or a sender chooses, the signal arrives. A blocked signal sent to one thread (tgkill(2)) would
//! stay pending there for ever. Hence every system call list of [`seccomp`](crate::confine::seccomp)
//! has `write` and `rt_sigreturn`. A program that is run from here starts with no handlers, and with
//! nothing blocked or ignored but SIGXFSZ.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::pipe::{PipeFlags, pipe_with};

use crate::failure::{Failure, Outcome};

/// A signal that arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// SIGTERM
    Terminate,
    /// SIGINT
    Interrupt,
    /// SIGHUP
    Hangup,
    /// SIGQUIT
    Quit,
    /// SIGTSTP
    Stop,
    /// SIGCONT
    Continue,
    /// SIGWINCH
    Resize,
}

impl Signal {
    /// As in signal(7).
    pub fn name(self) -> &'static str {
        match self {
            Signal::Terminate => "SIGTERM",
            Signal::Interrupt => "SIGINT",
            Signal::Hangup => "SIGHUP",
            Signal::Quit => "SIGQUIT",
            Signal::Stop => "SIGTSTP",
            Signal::Continue => "SIGCONT",
            Signal::Resize => "SIGWINCH",
        }
    }

    fn number(self) -> libc::c_int {
        match self {
            Signal::Terminate => libc::SIGTERM,
            Signal::Interrupt => libc::SIGINT,
            Signal::Hangup => libc::SIGHUP,
            Signal::Quit => libc::SIGQUIT,
            Signal::Stop => libc::SIGTSTP,
            Signal::Continue => libc::SIGCONT,
            Signal::Resize => libc::SIGWINCH,
        }
    }

    /// Has the kernel do with this process what the signal does without a handler: it exits, or stops
    /// until it is continued. The handler is there again when this returns.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn act(self) -> Outcome {
        set_action(self.number(), libc::SIG_DFL).map_err(failure)?;
        // SAFETY: a signal that there is, for this thread, which handles it before the call returns.
        unsafe { libc::raise(self.number()) };
        set_action(self.number(), FORWARD as libc::sighandler_t).map_err(failure)
    }
}

/// Those of a daemon.
pub const DAEMON: [Signal; 3] = [Signal::Terminate, Signal::Interrupt, Signal::Hangup];
/// Those of a program that has the terminal.
pub const TERMINAL: [Signal; 7] = [
    Signal::Terminate,
    Signal::Interrupt,
    Signal::Hangup,
    Signal::Quit,
    Signal::Stop,
    Signal::Continue,
    Signal::Resize,
];

const FORWARD: extern "C" fn(libc::c_int) = forward;

fn failure(error: std::io::Error) -> Failure {
    Failure::new(format!("signals: {error}"))
}

/// The pipe's other side. It stays open as long as the process, as the handlers do.
static PIPE: AtomicI32 = AtomicI32::new(-1);

/// Where the signals of this process arrive.
#[derive(Debug)]
pub struct Signals {
    pipe: std::fs::File,
}

impl Signals {
    /// Installs handlers of the `handled`, whatever was inherited: blocked or ignored. Writes beyond the file size
    /// limit fail from here on, and send no signal. Called once, before there are other threads.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn install(handled: &[Signal]) -> Outcome<Signals> {
        let (pipe, sender) =
            pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(|e| failure(e.into()))?;
        PIPE.store(sender.into_raw_fd(), Ordering::Relaxed);
        // SAFETY: zeroes are an empty sigset_t.
        let mut unblocked: libc::sigset_t = unsafe { std::mem::zeroed() };
        for number in handled.iter().map(|signal| signal.number()) {
            set_action(number, FORWARD as libc::sighandler_t).map_err(failure)?;
            // SAFETY: a set of our own, and a number that there is.
            unsafe { libc::sigaddset(&mut unblocked, number) };
        }
        set_action(libc::SIGXFSZ, libc::SIG_IGN).map_err(failure)?;
        // SAFETY: changes the mask of this thread, which those that it makes get.
        match unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &unblocked, std::ptr::null_mut()) } {
            0 => Ok(Signals { pipe: std::fs::File::from(pipe) }),
            error => Err(failure(std::io::Error::from_raw_os_error(error))),
        }
    }

    /// Those that arrived since, in their order.
    pub fn take(&mut self) -> Vec<Signal> {
        let mut numbers = [0; 16];
        // None, if it would block.
        let count = self.pipe.read(&mut numbers).unwrap_or(0);
        let signal = |number: &u8| TERMINAL.into_iter().find(|it| it.number() == libc::c_int::from(*number));
        numbers[..count].iter().filter_map(signal).collect()
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

/// Has the kernel discard the `ignored`, for a process that must finish its work. A daemon that it starts installs
/// handlers.
///
/// # Errors
/// The error of the kernel.
pub fn ignore(ignored: &[Signal]) -> Outcome {
    ignored.iter().try_for_each(|signal| set_action(signal.number(), libc::SIG_IGN).map_err(failure))
}

fn set_action(signal: libc::c_int, handler: libc::sighandler_t) -> std::io::Result<()> {
    // SAFETY: zeroes are a sigaction with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: `handler` is SIG_IGN, or a function that does only what a handler may.
    match unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// The handler, on whatever thread.
extern "C" fn forward(signal: libc::c_int) {
    let pipe: RawFd = PIPE.load(Ordering::Relaxed);
    let number = signal as u8;
    // SAFETY: errno belongs to this thread, and the code that was interrupted may be about to read
    // it; write(2) may be called in a handler. A full pipe has enough to read.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::write(pipe, (&raw const number).cast(), 1);
        *errno = before;
    }
}

//! Delivers the signals that a process handles as bytes in a pipe, which its main thread polls.
//!
//! The signals are unblocked in every thread, and the handler only writes a byte. So a signal arrives no
//! matter which thread the kernel or the sender chooses. If a thread blocked a signal, tgkill(2) to that
//! thread would leave the signal pending for ever. For this reason, every list of system calls of a daemon's
//! sandbox contains `write` and `rt_sigreturn`. A program that this process executes starts without handlers, and
//! with no signal blocked or ignored except SIGXFSZ.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::pipe::{PipeFlags, pipe_with};

use crate::failure::{Failure, Outcome};

/// Declares the signals. The constant's name in libc is also the name that users see.
macro_rules! signals {
    ($($Signal:ident = $number:ident),*) => {
        /// A signal, with its number.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(i32)]
        pub enum Signal {
            $($Signal = libc::$number,)*
        }

        /// All signals that processes of blkq handle.
        pub const ALL: [Signal; [$(Signal::$Signal),*].len()] = [$(Signal::$Signal),*];

        impl Signal {
            pub fn name(self) -> &'static str {
                match self {
                    $(Signal::$Signal => stringify!($number),)*
                }
            }
        }
    };
}

signals! {
    Terminate = SIGTERM, Interrupt = SIGINT, Hangup = SIGHUP, Quit = SIGQUIT, Stop = SIGTSTP, Continue = SIGCONT,
    Resize = SIGWINCH
}

impl Signal {
    fn number(self) -> libc::c_int {
        self as libc::c_int
    }

    /// Performs the signal's default action: the process exits, or stops until it is continued. The handler
    /// is installed again when this returns.
    pub fn act(self) -> Outcome {
        set_action(self.number(), libc::SIG_DFL).map_err(failure)?;
        // SAFETY: the signal number is valid. The signal is sent to this thread, which handles it before the
        // call returns.
        unsafe { libc::raise(self.number()) };
        set_action(self.number(), FORWARD as libc::sighandler_t).map_err(failure)
    }
}

pub const DAEMON: [Signal; 3] = [Signal::Terminate, Signal::Interrupt, Signal::Hangup];

const FORWARD: extern "C" fn(libc::c_int) = forward;

fn failure(error: std::io::Error) -> Failure {
    Failure::new(format!("signals: {error}"))
}

/// The write end of the pipe. It is never closed, because the handlers use it until the process exits.
static PIPE: AtomicI32 = AtomicI32::new(-1);

/// The read end of the pipe, from which the signals of this process are taken.
#[derive(Debug)]
pub struct Signals {
    pipe: std::fs::File,
}

impl Signals {
    /// Installs handlers for the signals `handled`, even if this process inherited them blocked or ignored.
    /// Also ignores SIGXFSZ, so that writes beyond the file size limit fail instead. Must be called once,
    /// before there are other threads.
    pub fn install(handled: &[Signal]) -> Outcome<Signals> {
        let (pipe, sender) =
            pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(|e| failure(e.into()))?;
        // Relaxed is enough: the handlers are installed later, by this thread, and the store is visible to
        // threads that it creates.
        PIPE.store(sender.into_raw_fd(), Ordering::Relaxed);
        // SAFETY: an all-zero sigset_t is an empty set.
        let mut unblocked: libc::sigset_t = unsafe { std::mem::zeroed() };
        for number in handled.iter().map(|signal| signal.number()) {
            set_action(number, FORWARD as libc::sighandler_t).map_err(failure)?;
            // SAFETY: the set is initialized, and the signal number is valid.
            unsafe { libc::sigaddset(&mut unblocked, number) };
        }
        set_action(libc::SIGXFSZ, libc::SIG_IGN).map_err(failure)?;
        // SAFETY: the call changes only the signal mask of this thread, which new threads inherit.
        match unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &unblocked, std::ptr::null_mut()) } {
            0 => Ok(Signals { pipe: std::fs::File::from(pipe) }),
            error => Err(failure(std::io::Error::from_raw_os_error(error))),
        }
    }

    /// The signals that arrived since the last call, in order.
    pub fn take(&mut self) -> Vec<Signal> {
        let mut numbers = [0; 16];
        // A read that would block returns no signals.
        let count = self.pipe.read(&mut numbers).unwrap_or(0);
        let signal = |number: &u8| ALL.into_iter().find(|it| it.number() == libc::c_int::from(*number));
        numbers[..count].iter().filter_map(signal).collect()
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

/// Makes the kernel discard the signals `ignored`, for a process that must complete its work. A daemon that
/// this process starts installs handlers of its own.
pub fn ignore(ignored: &[Signal]) -> Outcome {
    ignored.iter().try_for_each(|signal| set_action(signal.number(), libc::SIG_IGN).map_err(failure))
}

fn set_action(signal: libc::c_int, handler: libc::sighandler_t) -> std::io::Result<()> {
    // SAFETY: an all-zero sigaction has an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: `handler` is SIG_DFL, SIG_IGN or a function that is async-signal-safe.
    match unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// The handler. It may run on any thread.
extern "C" fn forward(signal: libc::c_int) {
    let pipe: RawFd = PIPE.load(Ordering::Relaxed);
    let number = signal as u8;
    // SAFETY: write(2) is async-signal-safe, and errno is restored for the interrupted code of this thread.
    // If the pipe is full, the main thread already has enough to read.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::write(pipe, (&raw const number).cast(), 1);
        *errno = before;
    }
}

//! The terminal, which is always restored, even after a panic.
//!
//! The terminal is opened again through /dev/tty, because O_NONBLOCK belongs to the open file: on standard
//! output it would affect the processes that share it. A terminal that takes no output, such as that of a
//! hanging SSH connection, must not keep this process from acting on signals.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Mutex;
use std::time::Duration;

use blkq_protocol::failure::{Failure, Outcome};
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier, Style};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Alternate screen, hide the cursor, reset the style, clear (xterm's control sequences).
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[0m\x1b[2J";
const LEAVE: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?1049l";
/// The longest wait for a terminal that does not take [`LEAVE`].
const LEAVE_WAIT: Duration = Duration::from_millis(500);

/// The terminal and its original modes. A static, because the panic hook runs on any thread.
static BEFORE: Mutex<Option<(File, Termios)>> = Mutex::new(None);

pub struct Screen {
    tty: File,
    raw: Termios,
    output: Vec<u8>,
    /// The cells that the terminal shows when it has taken `output`.
    shown: Buffer,
}

impl Screen {
    /// Records the modes of the terminal without changing them. From now on, a panic on any thread restores
    /// the modes and exits the process. Fails if the terminal does not support control sequences.
    pub fn open() -> Outcome<Screen> {
        let refuse = |why: &str| Failure::new(format!("top: {why}; use `blkq top --once`"));
        if !io::stdout().is_terminal() {
            return Err(refuse("standard output is not a terminal"));
        }
        if std::env::var("TERM").map_or(true, |term| term.is_empty() || term == "dumb") {
            return Err(refuse("the terminal has no control sequences (TERM is dumb or not set)"));
        }
        let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
        let tty = OpenOptions::new().read(true).write(true).custom_flags(flags).open("/dev/tty");
        let tty = tty.map_err(|e| refuse(&format!("cannot open /dev/tty: {e}")))?;
        let before =
            tcgetattr(&tty).map_err(|e| refuse(&format!("cannot read the modes of /dev/tty: {e}")))?;
        let mut raw = before.clone();
        raw.make_raw();
        let kept =
            tty.try_clone().map_err(|e| Failure::new(format!("top: cannot duplicate /dev/tty: {e}")))?;
        *lock() = Some((kept, before));
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            leave();
            report(info);
            // Without this, the other threads would continue to draw on a terminal that has been restored.
            // 101 is the exit code of a Rust program whose main thread panics.
            std::process::exit(101);
        }));
        Ok(Screen { tty, raw, output: Vec::new(), shown: Buffer::default() })
    }

    pub fn enter(&mut self) -> io::Result<()> {
        tcsetattr(&self.tty, OptionalActions::Now, &self.raw)?;
        self.output = ENTER.to_vec();
        self.shown = Buffer::default();
        Ok(())
    }

    pub fn is_behind(&self) -> bool {
        !self.output.is_empty()
    }

    /// Shows what `draw` draws into a buffer of the size of the terminal. Never blocks. Fails if the terminal is
    /// closed.
    pub fn show(&mut self, draw: impl FnOnce(&mut Buffer)) -> io::Result<()> {
        // A terminal that does not know its size, such as a serial line, reports 0.
        let size = tcgetwinsize(&self.tty)?;
        let (columns, rows) =
            if size.ws_col == 0 || size.ws_row == 0 { (80, 24) } else { (size.ws_col, size.ws_row) };
        let mut next = Buffer::empty(Rect::new(0, 0, columns, rows));
        draw(&mut next);
        if self.shown.area != next.area {
            self.output.extend_from_slice(b"\x1b[2J");
            self.shown = Buffer::empty(next.area);
        }
        let mut at = None;
        let mut style = Style::reset();
        for (x, y, cell) in self.shown.diff(&next) {
            if at != Some((x, y)) {
                write!(self.output, "\x1b[{};{}H", y + 1, x + 1)?;
            }
            if cell.style() != style {
                style = cell.style();
                set_style(&mut self.output, style)?;
            }
            self.output.extend_from_slice(cell.symbol().as_bytes());
            // Characters beyond ASCII may be wider than one column, so the position after them is set
            // explicitly.
            at = cell.symbol().is_ascii().then_some((x + 1, y));
        }
        self.output.extend_from_slice(b"\x1b[0m");
        self.shown = next;
        self.write_some()
    }

    /// Never blocks. Fails if the terminal is closed.
    pub fn write_some(&mut self) -> io::Result<()> {
        while !self.output.is_empty() {
            match self.tty.write(&self.output) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => drop(self.output.drain(..count)),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// The bytes that were typed since the last call. Fails if the terminal is closed.
    pub fn typed(&mut self) -> io::Result<Vec<u8>> {
        let mut bytes = [0; 256];
        match self.tty.read(&mut bytes) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => Ok(bytes[..count].to_vec()),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(Vec::new())
            }
            Err(e) => Err(e),
        }
    }
}

impl AsFd for Screen {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tty.as_fd()
    }
}

fn lock() -> std::sync::MutexGuard<'static, Option<(File, Termios)>> {
    BEFORE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Restores the screen and its modes as far as possible; errors are ignored.
pub fn leave() {
    let before = lock();
    let Some((tty, modes)) = &*before else { return };
    let mut rest = LEAVE;
    let wait = Timespec::try_from(LEAVE_WAIT).unwrap_or_default();
    while !rest.is_empty() {
        match (&mut &*tty).write(rest) {
            Ok(count) if count > 0 => rest = &rest[count..],
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                if poll(&mut [PollFd::new(tty, PollFlags::OUT)], Some(&wait)) == Ok(0) {
                    break;
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            _ => break,
        }
    }
    // The modes change only after the control sequences have been written.
    let _ = tcsetattr(tty, OptionalActions::Now, modes);
}

/// Sets `style`, whatever the style was before (ECMA-48, SGR).
fn set_style(output: &mut Vec<u8>, style: Style) -> io::Result<()> {
    output.extend_from_slice(b"\x1b[0");
    for (modifier, number) in [(Modifier::BOLD, 1), (Modifier::REVERSED, 7)] {
        if style.add_modifier.contains(modifier) {
            write!(output, ";{number}")?;
        }
    }
    for (colour, number) in [(style.fg, 38), (style.bg, 48)] {
        if let Some(Color::Indexed(colour)) = colour {
            write!(output, ";{number};5;{colour}")?;
        }
    }
    output.push(b'm');
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::{FromRawFd, OwnedFd};
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use super::*;

    const IS_CHILD: &str = "BLKQ_TEST_IN_A_TERMINAL";

    /// The side of the terminal emulator, and the side of programs.
    fn pair() -> (OwnedFd, OwnedFd) {
        let (mut shown, mut used) = (-1, -1);
        use std::ptr::{null, null_mut};
        // SAFETY: both pointers are valid for writing a descriptor. The other arguments may be null.
        assert_eq!(unsafe { libc::openpty(&mut shown, &mut used, null_mut(), null(), null()) }, 0);
        // SAFETY: the call has just opened both descriptors, and nothing else owns them.
        unsafe { (OwnedFd::from_raw_fd(shown), OwnedFd::from_raw_fd(used)) }
    }

    fn panic_on_another_thread() -> ! {
        let mut screen = Screen::open().unwrap();
        let before = tcgetattr(&screen).unwrap();
        screen.enter().unwrap();
        screen.write_some().unwrap();
        let raw = tcgetattr(&screen).unwrap();
        assert_ne!(raw.local_modes, before.local_modes);
        let _ = std::thread::spawn(|| panic!("a bug")).join();
        std::process::exit(0)
    }

    #[test]
    fn a_panic_of_any_thread_restores_the_terminal() {
        if std::env::var_os(IS_CHILD).is_some() {
            panic_on_another_thread();
        }
        let (shown, used) = pair();
        let before = tcgetattr(&used).unwrap();
        let stdio = || Stdio::from(used.try_clone().unwrap());
        let mut child = Command::new(std::env::current_exe().unwrap());
        let test = "commands::top::terminal::tests::a_panic_of_any_thread_restores_the_terminal";
        child.args(["--exact", test, "--nocapture"]).env(IS_CHILD, "1").env("TERM", "xterm");
        child.stdin(stdio()).stdout(stdio()).stderr(stdio());
        // SAFETY: the closure only makes two system calls, which are allowed between fork and exec.
        unsafe {
            child.pre_exec(|| match libc::setsid() != -1 && libc::ioctl(0, libc::TIOCSCTTY, 0) == 0 {
                true => Ok(()),
                false => Err(io::Error::last_os_error()),
            });
        }
        let status = child.status().unwrap();
        let mut output = Vec::new();
        let mut shown = File::from(shown);
        rustix::io::ioctl_fionbio(&shown, true).unwrap();
        let _ = shown.read_to_end(&mut output);
        let text = String::from_utf8_lossy(&output);
        let at =
            |what: &[u8]| text.find(std::str::from_utf8(what).unwrap()).unwrap_or_else(|| panic!("{text:?}"));
        assert!(at(ENTER) < at(LEAVE) && at(LEAVE) < at(b"a bug"), "{text:?}");
        assert_eq!(status.code(), Some(101), "{text:?}");
        let after = tcgetattr(&used).unwrap();
        let modes = |of: &Termios| (of.local_modes, of.input_modes, of.output_modes, of.control_modes);
        assert_eq!(modes(&after), modes(&before));
    }
}

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
use std::time::{Duration, Instant};

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

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Key {
    Char(char),
    Control(char),
    Enter,
    Escape,
    Backspace,
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
}

/// An incomplete sequence that is longer than this is discarded. No key has such a long one.
const SEQUENCE_BYTES_MAX: usize = 32;
/// The rest of a sequence must arrive within this time. After that, ESC counts as the key Escape.
pub const KEY_WAIT: Duration = Duration::from_millis(50);

/// Converts the bytes that a terminal sends to keys (ECMA-48, and xterm's control sequences). Bytes that are part of an
/// incomplete key are stored until the rest arrives.
#[derive(Debug, Default)]
pub struct Keys {
    pending: Vec<u8>,
    since: Option<Instant>,
}

impl Keys {
    /// Returns the keys that are complete. If `bytes` is empty and the rest of a sequence is overdue, ESC
    /// alone becomes the key Escape, and any other incomplete sequence is discarded.
    pub fn take(&mut self, bytes: &[u8], now: Instant) -> Vec<Key> {
        let mut keys = Vec::new();
        if !bytes.is_empty() {
            self.since = Some(now);
        } else if self.since.is_none_or(|since| now.saturating_duration_since(since) >= KEY_WAIT) {
            keys.extend((std::mem::take(&mut self.pending) == [0x1b]).then_some(Key::Escape));
        }
        self.pending.extend_from_slice(bytes);
        let mut at = 0;
        while let Some((length, key)) = first(&self.pending[at..]) {
            at += length;
            keys.extend(key);
        }
        self.pending.drain(..at);
        if self.pending.len() > SEQUENCE_BYTES_MAX {
            self.pending.clear();
        }
        keys
    }

    pub fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }
}

/// The length in bytes of the first key, and the key, if [`Key`] has it. `None` if it is incomplete.
fn first(bytes: &[u8]) -> Option<(usize, Option<Key>)> {
    let simple = |key| Some((1, Some(key)));
    match *bytes.first()? {
        0x1b => escape(bytes),
        b'\r' | b'\n' => simple(Key::Enter),
        0x08 | 0x7f => simple(Key::Backspace),
        byte @ 0x01..=0x1a => simple(Key::Control(char::from(byte + 0x60))),
        byte @ 0x20..=0x7e => simple(Key::Char(char::from(byte))),
        0x00..=0x1f => Some((1, None)),
        _ => character(bytes),
    }
}

fn character(bytes: &[u8]) -> Option<(usize, Option<Key>)> {
    match bytes.utf8_chunks().next()?.valid().chars().next() {
        Some(character) => Some((character.len_utf8(), Some(Key::Char(character)))),
        // The rest of the character has not arrived.
        None if std::str::from_utf8(bytes).is_err_and(|e| e.error_len().is_none()) => None,
        None => Some((1, None)),
    }
}

fn escape(bytes: &[u8]) -> Option<(usize, Option<Key>)> {
    match bytes.get(1)? {
        b'[' => {
            let last = bytes.iter().skip(2).position(|byte| (0x40..=0x7e).contains(byte))? + 2;
            Some((last + 1, sequence(&bytes[2..last], bytes[last])))
        }
        b'O' => Some((3, sequence(&[], *bytes.get(2)?))),
        // ESC is the key Escape, and the next byte begins another key.
        _ => Some((1, Some(Key::Escape))),
    }
}

fn sequence(parameters: &[u8], last: u8) -> Option<Key> {
    Some(match (parameters, last) {
        (_, b'A') => Key::Up,
        (_, b'B') => Key::Down,
        (_, b'C') => Key::Right,
        (_, b'D') => Key::Left,
        (_, b'H') | (b"1" | b"7", b'~') => Key::Home,
        (_, b'F') | (b"4" | b"8", b'~') => Key::End,
        (b"5", b'~') => Key::PageUp,
        (b"6", b'~') => Key::PageDown,
        (_, b'M') => Key::Enter,
        _ => return None,
    })
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

    fn keys(bytes: &[u8]) -> Vec<Key> {
        Keys::default().take(bytes, Instant::now())
    }

    #[test]
    fn sequences_split_at_any_byte_give_the_same_keys() {
        let text = "q\x1b[A\x1bOB\x1b[5~\x1b[1;5Cä\r\x7f\x03\x1b[200~x".as_bytes();
        let want = [
            Key::Char('q'),
            Key::Up,
            Key::Down,
            Key::PageUp,
            Key::Right,
            Key::Char('ä'),
            Key::Enter,
            Key::Backspace,
            Key::Control('c'),
            Key::Char('x'),
        ];
        assert_eq!(keys(text), want);
        for cut in 0..text.len() {
            let (mut parser, now) = (Keys::default(), Instant::now());
            let mut found = parser.take(&text[..cut], now);
            found.extend(parser.take(&text[cut..], now));
            assert_eq!(found, want, "cut at {cut}");
            assert!(!parser.is_pending());
        }
    }

    #[test]
    fn escape_is_a_key_if_nothing_follows_in_time() {
        let (mut parser, now) = (Keys::default(), Instant::now());
        assert_eq!(parser.take(b"\x1b", now), []);
        assert_eq!((parser.take(b"", now), parser.is_pending()), (vec![], true));
        assert_eq!(parser.take(b"", now + KEY_WAIT), [Key::Escape]);
        assert_eq!(parser.take(b"\x1b[", now), []);
        assert_eq!((parser.take(b"", now + KEY_WAIT), parser.is_pending()), (vec![], false));
        assert_eq!(keys(b"\x1bq"), [Key::Escape, Key::Char('q')]);
    }

    #[test]
    fn invalid_bytes_are_discarded() {
        assert_eq!(keys(&[0xff, 0xc3, b'a', 0x00, 0x1c]), [Key::Char('a')]);
        let (mut parser, now) = (Keys::default(), Instant::now());
        assert_eq!(parser.take(&[b"\x1b[".as_slice(), &[b'1'; 100]].concat(), now), []);
        assert_eq!(parser.take(b"q", now), [Key::Char('q')]);
    }
}

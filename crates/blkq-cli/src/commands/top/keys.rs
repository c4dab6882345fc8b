//! Keys, from the bytes that a terminal sends for them (xterm's control sequences, ECMA-48).

use std::time::{Duration, Instant};

/// A key that was pressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Key {
    /// A character.
    Char(char),
    /// Ctrl and a letter.
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

/// Longest sequence of which an unfinished part is kept.
const SEQUENCE_BYTES_MAX: usize = 32;
/// How long the rest of a sequence may take.
pub const KEY_WAIT: Duration = Duration::from_millis(50);

/// The bytes that arrived and are no whole key yet.
#[derive(Debug, Default)]
pub struct Keys {
    pending: Vec<u8>,
    /// When the last of them arrived.
    since: Option<Instant>,
}

impl Keys {
    /// The keys that `bytes`, which arrived at `now`, complete. If there are none, and the rest of a sequence is late,
    /// that was all: ESC alone is a key, and an unfinished sequence is none.
    pub fn take(&mut self, bytes: &[u8], now: Instant) -> Vec<Key> {
        let mut keys = Vec::new();
        if !bytes.is_empty() {
            self.since = Some(now);
        } else if self.since.is_none_or(|since| now.saturating_duration_since(since) >= KEY_WAIT) {
            let pending = std::mem::take(&mut self.pending);
            keys.extend((pending == [0x1b]).then_some(Key::Escape));
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

    /// Whether the rest of a key may come.
    pub fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }
}

/// The length of the first key in `bytes`, and the key if it is known; `None` if more has to come.
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
    let length = match bytes[0] {
        0xc2..=0xdf => 2,
        0xe0..=0xef => 3,
        0xf0..=0xf4 => 4,
        _ => return Some((1, None)),
    };
    let text = bytes.get(..length)?;
    match std::str::from_utf8(text).ok().and_then(|text| text.chars().next()) {
        Some(character) => Some((length, Some(Key::Char(character)))),
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
        // ESC, and another key begins.
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
    use super::*;

    fn keys(bytes: &[u8]) -> Vec<Key> {
        Keys::default().take(bytes, Instant::now())
    }

    #[test]
    fn sequences_are_keys_however_they_are_cut() {
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
    fn escape_alone_is_a_key_once_nothing_follows() {
        let (mut parser, now) = (Keys::default(), Instant::now());
        assert_eq!(parser.take(b"\x1b", now), []);
        assert_eq!((parser.take(b"", now), parser.is_pending()), (vec![], true));
        assert_eq!(parser.take(b"", now + KEY_WAIT), [Key::Escape]);
        assert_eq!(parser.take(b"\x1b[", now), []);
        assert_eq!((parser.take(b"", now + KEY_WAIT), parser.is_pending()), (vec![], false));
        assert_eq!(keys(b"\x1bq"), [Key::Escape, Key::Char('q')]);
    }

    #[test]
    fn garbage_is_no_key_and_is_not_kept() {
        assert_eq!(keys(&[0xff, 0xc3, b'a', 0x00, 0x1c]), [Key::Char('a')]);
        let (mut parser, now) = (Keys::default(), Instant::now());
        assert_eq!(parser.take(&[b"\x1b[".as_slice(), &[b'1'; 100]].concat(), now), []);
        assert_eq!(parser.take(b"q", now), [Key::Char('q')]);
    }
}

//! Converts the bytes that a terminal sends to keys (ECMA-48, and xterm's control sequences).

use std::time::{Duration, Instant};

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

/// Parses keys. Bytes that are part of an incomplete key are stored until the rest arrives.
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
    use super::*;

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

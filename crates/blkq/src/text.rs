//! Text for people: names and paths on a terminal, and in commands that are pasted into a shell.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// Replaces each byte of a control character by `\x` and two hexadecimal digits, so that a name with a
/// newline or an escape sequence stays on its line and cannot control the terminal.
pub fn escaped(text: &str) -> String {
    escape(text, is_control)
}

/// Replaces, as [`escaped`] does, all characters for which `is_special` holds.
pub fn escape(text: &str, is_special: impl Fn(char) -> bool) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if is_special(character) {
            push_bytes(&mut escaped, character.encode_utf8(&mut [0; 4]).as_bytes());
        } else {
            escaped.push(character);
        }
    }
    escaped
}

/// Whether a terminal acts on the character instead of showing it: control characters, line separators, and
/// characters that change the direction of text.
pub fn is_control(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Quotes a path or name as one word of a shell command, in a way that no program takes for an option. Every
/// hint that contains a path or name must use this, because another user may have chosen it.
pub fn shell_word(word: impl AsRef<OsStr>) -> String {
    let bytes = word.as_ref().as_bytes();
    let prefix = if bytes.starts_with(b"-") { "./" } else { "" };
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/._-+=:,@%".contains(byte);
    match str::from_utf8(bytes) {
        Ok(text) if !text.is_empty() && bytes.iter().all(is_plain) => format!("{prefix}{text}"),
        Ok(text) if !text.contains(is_control) => format!("'{prefix}{}'", text.replace('\'', r"'\''")),
        _ => format!("$'{prefix}{}'", ansi_c(bytes)),
    }
}

/// The text between `$'` and `'` that a shell reads as these bytes. It contains no `'`, so that the word ends at the
/// same place in a shell that does not know `$'`, as dash: that shell reads a wrong name.
fn ansi_c(bytes: &[u8]) -> String {
    let mut quoted = String::new();
    for chunk in bytes.utf8_chunks() {
        quoted.push_str(&escape(chunk.valid(), |c| is_control(c) || c == '\'' || c == '\\'));
        push_bytes(&mut quoted, chunk.invalid());
    }
    quoted
}

fn push_bytes(text: &mut String, bytes: &[u8]) {
    text.extend(bytes.iter().map(|byte| format!("\\x{byte:02x}")));
}

/// Decodes a path in which the kernel has written some bytes as a backslash and three octal digits, as it does in
/// /proc/self/mountinfo and /proc/swaps for white space, backslashes and `#`.
pub fn unescape_octal(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        let octal =
            after.get(..3).filter(|_| *byte == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        let escaped = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(escaped.unwrap_or(*byte));
        rest = if escaped.is_some() { &after[3..] } else { after };
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(escape("a b\\\n", |c| c.is_whitespace() || c == '\\'), "a\\x20b\\x5c\\x0a");
        assert_eq!(escaped("\u{85}ä\x1b[31m\u{202e}"), "\\xc2\\x85ä\\x1b[31m\\xe2\\x80\\xae");
    }

    #[test]
    fn a_shell_reads_a_word_as_it_is() {
        let directory = std::env::temp_dir().join(format!("blkq-words-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        for word in [
            &b"/srv/disk-1.img"[..],
            b"my disk.img",
            b"b;touch OWNED;.qcow2",
            b"$(touch OWNED)`touch OWNED`",
            b"it's \"one\" \\ word",
            b"two\nlines\x1b[31m'\\",
            b"\xff not text \xc3",
            b"b\x1b';touch OWNED; #\\",
            "ü \u{202e}gmi".as_bytes(),
            b"-rf",
            b"- a\n",
            b"",
            b"*?[a]~!#&|<>(){}",
        ] {
            let quoted = shell_word(OsStr::from_bytes(word));
            assert!(!quoted.contains(is_control), "{quoted}");
            let read_by = |shell: &str| {
                let script = format!("printf %s {quoted}");
                let output =
                    Command::new(shell).args(["-c", &script]).current_dir(&directory).output().unwrap();
                assert!(output.status.success(), "{shell}: {quoted}");
                output.stdout
            };
            // A shell that does not know `$'` may read another word, but must run no part of it.
            read_by("sh");
            assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0, "{quoted}");
            let read = read_by("bash");
            let read = if word.starts_with(b"-") { read.strip_prefix(b"./").unwrap() } else { &read };
            assert_eq!(read, word, "{quoted}");
        }
        assert_eq!(shell_word("/srv/disk-1.img"), "/srv/disk-1.img");
        std::fs::remove_dir(&directory).unwrap();
    }
}

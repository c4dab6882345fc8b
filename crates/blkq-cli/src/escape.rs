//! Escapes of bytes as two hexadecimal digits: `%2f` in URIs, `\x2f` in names of systemd units.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

/// Decodes the bytes that `text` escapes, each as `mark` and two digits.
pub fn unescape(text: &str, mark: &str) -> OsString {
    let mut parts = text.split(mark);
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let digits = part.get(..2).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => bytes.extend([&[byte], &part.as_bytes()[2..]].concat()),
            None => bytes.extend([mark.as_bytes(), part.as_bytes()].concat()),
        }
    }
    OsString::from_vec(bytes)
}

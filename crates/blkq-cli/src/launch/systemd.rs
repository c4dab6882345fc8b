//! Takes over what a service manager passes to this process at its start: sockets (sd_listen_fds(3)), and the name
//! of a device, escaped as the instance of a unit.

use std::ffi::OsString;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;

use blkq::text::escape;
use blkq_protocol::failure::{Failure, Outcome};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::launch::close_range;

/// The first descriptor that a service manager passes: `SD_LISTEN_FDS_START`.
const LISTEN_FDS_START: RawFd = 3;
/// Maximum number of sockets that are accepted; real units pass far fewer.
const LISTEN_FDS_MAX: RawFd = 64;

/// Whether listening sockets were passed to this process itself, and not to one of its ancestors.
pub fn is_activated() -> bool {
    let pid = std::env::var("LISTEN_PID").ok().and_then(|pid| pid.parse::<u32>().ok());
    pid == Some(std::process::id()) && std::env::var_os("LISTEN_FDS").is_some()
}

/// Takes the sockets that were passed to this process, and closes all other descriptors except the standard
/// ones, which nothing in this process uses. Must be called once, before any descriptor is opened or closed.
/// Fails if `LISTEN_FDS` is not a number, or if one of its descriptors is not open.
pub fn take_listeners() -> Outcome<Vec<OwnedFd>> {
    if !is_activated() {
        return Ok(Vec::new());
    }
    let failed = |why: String| Failure::new(why).during("socket activation");
    let refuse = |what: String| failed(format!("{what}; start blkq from a .socket unit"));
    let count = std::env::var("LISTEN_FDS").ok().and_then(|count| count.parse::<RawFd>().ok());
    let count = count
        .filter(|count| (0..=LISTEN_FDS_MAX).contains(count))
        .ok_or_else(|| refuse(format!("LISTEN_FDS is not a number from 0 to {LISTEN_FDS_MAX}")))?;
    let fds = LISTEN_FDS_START..LISTEN_FDS_START + count;
    // SAFETY: F_GETFD only reads the descriptor table.
    let is_closed = |fd: &RawFd| unsafe { libc::fcntl(*fd, libc::F_GETFD) < 0 };
    if let Some(fd) = fds.clone().find(is_closed) {
        return Err(refuse(format!("descriptor {fd} of LISTEN_FDS is not open")));
    }
    // SAFETY: this process has opened no descriptor yet, and those of the protocol precede the closed ones.
    unsafe { close_range(fds.end as u32, 0) }.map_err(|e| failed(e.to_string()))?;
    fds.map(|fd| {
        // SAFETY: the descriptor is open. According to LISTEN_PID it was opened for this process to own, and
        // this process has opened no descriptor yet.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        fcntl_setfd(&fd, FdFlags::CLOEXEC).map(|()| fd).map_err(|e| failed(e.to_string()))
    })
    .collect()
}

/// The instance of a template unit for the device `name`, escaped as systemctl does (systemd.unit(5)).
pub fn escape_instance(name: &str) -> String {
    escape(name, |c| !c.is_ascii_alphanumeric() && !":-_.@".contains(c))
}

/// The name of the device of an instance (`%i`). Names contain no backslash, so an instance that is not
/// escaped is returned unchanged.
pub fn unescape_instance(instance: &str) -> String {
    unescape(instance, "\\x").into_string().unwrap_or_else(|_| instance.to_owned())
}

/// Decodes the bytes that `text` escapes, each as `mark` and two hexadecimal digits: `\x2f` in the names of units, `%2f`
/// in URIs.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_escaped_as_systemctl_does() {
        for (name, instance) in [
            ("a+b", "a\\x2bb"),
            ("ü", "\\xc3\\xbc"),
            ("a-b", "a-b"),
            ("a@b.c_d", "a@b.c_d"),
            ("data", "data"),
        ] {
            assert_eq!(escape_instance(name), instance);
            assert_eq!(
                (unescape_instance(instance), unescape_instance(name)),
                (name.to_owned(), name.to_owned())
            );
        }
        for other in ["\\x", "\\xzz", "a\\x2", "\\xff"] {
            assert_eq!(unescape_instance(other), other);
        }
    }
}

use std::fmt;

use crate::enumeration::enumeration;

/// The result of an I/O. There are no short transfers: success means that all of it was done.
pub type IoResult = Result<(), Status>;

enumeration! {
    /// Why an I/O failed, in the vocabulary of the kernel's `blk_status_t` (block/blk-core.c). `ReadOnly` is
    /// added, because NBD and virtio distinguish it.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    #[repr(u8)]
    #[non_exhaustive]
    pub enum Status {
        /// The device does not support the operation (EOPNOTSUPP).
        NotSupported = 1 => (libc::EOPNOTSUPP, "not-supported", "operation not supported", 95),
        /// The device did not respond in time (ETIMEDOUT).
        Timeout => (libc::ETIMEDOUT, "timeout", "timed out", 5),
        /// The backing store is full (ENOSPC).
        NoSpace => (libc::ENOSPC, "no-space", "no space left on the backing store", 28),
        /// The connection to the device is broken (ENOLINK).
        Transport => (libc::ENOLINK, "transport", "connection to the device lost", 5),
        /// The device reported a failure of its own (EREMOTEIO).
        Target => (libc::EREMOTEIO, "target", "device failure", 5),
        /// A reservation of another host forbids the I/O (EBADE).
        ReservationConflict => (libc::EBADE, "reservation-conflict", "reservation conflict", 5),
        /// The medium has lost the data (ENODATA).
        Medium => (libc::ENODATA, "medium", "medium error", 5),
        /// Data and checksum do not match (EILSEQ).
        Protection => (libc::EILSEQ, "protection", "checksum mismatch", 5),
        /// Memory or another resource is exhausted (ENOMEM).
        Resource => (libc::ENOMEM, "resource", "out of resources", 12),
        /// The device is busy until one of its requests completes (EBUSY).
        DeviceResource => (libc::EBUSY, "device-resource", "device busy", 5),
        /// The I/O would have to wait, and the submitter does not want that (EAGAIN).
        Again => (libc::EAGAIN, "again", "the I/O would have to wait", 5),
        /// The device is offline (ENODEV).
        Offline => (libc::ENODEV, "offline", "device offline", 108),
        /// The I/O violates a rule of the device: alignment, range or flags (EINVAL).
        Invalid => (libc::EINVAL, "invalid", "invalid request", 22),
        /// The allowed duration has passed (ETIME).
        DurationLimit => (libc::ETIME, "duration-limit", "duration limit exceeded", 5),
        /// A write to a read-only device (EROFS).
        ReadOnly => (libc::EROFS, "read-only", "device is read-only", 1),
        /// Any error without a status of its own (EIO).
        Io => (libc::EIO, "io", "I/O error", 5),
    }

    /// The errno, the name, the description for people, and the NBD error.
    const fn row(self) -> (i32, &'static str, &'static str, u32);
}

impl Status {
    /// The positive Linux errno that a system call would return for this status.
    pub const fn errno(self) -> i32 {
        self.row().0
    }

    /// A short name for tables and counters. It is stable.
    pub const fn name(self) -> &'static str {
        self.row().1
    }

    /// The status for a positive errno. An errno without a status of its own becomes [`Status::Io`].
    pub fn from_errno(errno: i32) -> Status {
        match errno {
            libc::ENOSYS | libc::ENOTTY => Status::NotSupported,
            libc::EDQUOT | libc::EFBIG => Status::NoSpace,
            libc::ENXIO => Status::Offline,
            libc::EPERM => Status::ReadOnly,
            _ => Status::ALL.into_iter().find(|status| status.errno() == errno).unwrap_or(Status::Io),
        }
    }

    /// The NBD error for this status. The protocol's list is closed: `NBD_EPERM` 1, `NBD_EIO` 5, `NBD_ENOMEM`
    /// 12, `NBD_EINVAL` 22, `NBD_ENOSPC` 28, `NBD_EOVERFLOW` 75 (unused here), `NBD_ENOTSUP`
    /// 95, `NBD_ESHUTDOWN` 108.
    pub const fn nbd(self) -> u32 {
        self.row().3
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().2)
    }
}

impl std::error::Error for Status {}

impl From<Status> for std::io::Error {
    fn from(status: Status) -> std::io::Error {
        std::io::Error::from_raw_os_error(status.errno())
    }
}

/// The kind of an [`Error`]. Programs may match on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument violates a documented rule.
    Invalid,
    /// A file, device or setting does not exist.
    NotFound,
    /// The process lacks a permission.
    Denied,
    /// In use by another process.
    Busy,
    /// Requests are held after errors, and the operation would have to wait for them.
    Held,
    /// The kernel uses the image: its loop driver, a mount, or a device on top of it.
    Claimed,
    /// The image has a format that is not supported.
    Format,
    /// The image names a backing file that it must not use.
    BackingFile,
    /// Other users could reach the device.
    Exposed,
    /// Earlier writes were lost. The device fails all I/O until it is opened again.
    Lost,
    /// Two things that must be used together do not match.
    Mismatch,
    /// The kernel, the file system or the device does not support the operation.
    Unsupported,
    /// The device does not support the operation while faults are injected.
    FaultInjection,
    /// The file system or device of the image does not support direct I/O, or has requirements that no sector
    /// size and no offset can meet.
    NoDirectIo,
    /// Direct I/O on the image requires larger sectors.
    DirectIoSector {
        /// The smallest possible sector size, in bytes.
        needed_bytes: u32,
        /// The requested sector size, in bytes.
        sector_bytes: u32,
    },
    /// Direct I/O on the image requires an offset that is a multiple of its alignment.
    DirectIoOffset {
        /// The required alignment, in bytes.
        align_bytes: u32,
        /// The requested offset, in bytes.
        offset_bytes: u64,
    },
    /// A system call failed for another reason.
    System,
}

/// Why an operation of the control plane (open, attach, set, resize) failed: one line with what failed, why,
/// and a hint, and the system error that caused it.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<std::io::Error>,
    hint: String,
    /// See [`Error::or_read_only`].
    works_read_only: bool,
}

impl Error {
    /// An error whose `message` says what failed, why, and a hint, if there is one ([`Error::with_hint`]).
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), source: None, hint: String::new(), works_read_only: false }
    }

    /// The failure of a system call. `what` says what was attempted; the kind follows from the errno.
    pub fn system(what: impl Into<String>, source: impl Into<std::io::Error>) -> Error {
        let source = source.into();
        let kind = match source.kind() {
            std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            std::io::ErrorKind::PermissionDenied => ErrorKind::Denied,
            std::io::ErrorKind::AddrInUse => ErrorKind::Busy,
            _ => match source.raw_os_error() {
                Some(libc::EBUSY | libc::ETXTBSY) => ErrorKind::Busy,
                Some(libc::EOPNOTSUPP | libc::ENOSYS) => ErrorKind::Unsupported,
                _ => ErrorKind::System,
            },
        };
        Error { source: Some(source), ..Error::new(kind, what) }
    }

    /// Adds a hint, which is printed last. An empty hint adds nothing.
    ///
    /// A library gives hints about the system, such as a limit to raise, a permission or another path, which
    /// help in any program. It does not name operations and options of a program. The program adds such hints
    /// itself, depending on [`kind`](Error::kind).
    pub fn with_hint(self, hint: impl Into<String>) -> Error {
        Error { hint: hint.into(), ..self }
    }

    /// Adds the hint to open the image read-only: alone, or as an alternative to that of [`Error::with_hint`].
    pub fn or_read_only(self) -> Error {
        Error { works_read_only: true, ..self }
    }

    /// Removes the hint of [`Error::or_read_only`], for a device that must be writable.
    pub fn not_read_only(self) -> Error {
        Error { works_read_only: false, ..self }
    }

    /// Whether the error has a hint, so that a program need not add one.
    pub fn has_hint(&self) -> bool {
        !self.hint.is_empty() || self.works_read_only
    }

    /// The hint of [`Error::with_hint`], or an empty string.
    pub fn hint(&self) -> &str {
        &self.hint
    }

    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(source) = &self.source {
            write!(f, ": {source}")?;
        }
        match (self.hint.as_str(), self.works_read_only) {
            ("", false) => Ok(()),
            ("", true) => f.write_str("; open it read-only"),
            (hint, false) => write!(f, "; {hint}"),
            (hint, true) => write!(f, "; {hint}, or open it read-only"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_survives_conversion_to_errno_and_back() {
        for status in Status::ALL {
            assert_eq!(Status::from_errno(status.errno()), status);
        }
    }

    #[test]
    fn an_error_prints_what_failed_then_why_then_the_hint() {
        let error = Error::system("cannot open x", std::io::Error::from_raw_os_error(libc::EACCES));
        assert!(error.to_string().starts_with("cannot open x: Permission denied"), "{error}");
        let error = error.with_hint("");
        assert!(error.to_string().ends_with("(os error 13)"), "{error}");
        let error = error.or_read_only();
        assert!(error.has_hint() && error.to_string().ends_with("(os error 13); open it read-only"));
        let error = error.with_hint("become root");
        assert!(error.to_string().ends_with("(os error 13); become root, or open it read-only"));
        assert!(error.not_read_only().to_string().ends_with("(os error 13); become root"));
    }

    #[test]
    fn every_status_maps_to_an_error_of_the_nbd_list() {
        for status in Status::ALL {
            assert!([1, 5, 12, 22, 28, 75, 95, 108].contains(&status.nbd()), "{status:?}");
        }
    }
}

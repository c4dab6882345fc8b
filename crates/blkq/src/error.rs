//! Errors: [`Status`] is how one I/O completed, [`Error`] is why an operation of the
//! control plane (open, attach, set, resize) failed.

use std::fmt;

/// How an I/O completed: unit, or the reason that it did not do what was asked.
pub type IoResult = Result<(), Status>;

/// Why an I/O failed: the block layer's own vocabulary, the kernel's `blk_status_t`
/// (block/blk-core.c) with `ReadOnly` added, because NBD and virtio distinguish it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
#[non_exhaustive]
pub enum Status {
    /// The device does not do this operation (EOPNOTSUPP).
    NotSupported = 1,
    /// The device did not answer in time (ETIMEDOUT).
    Timeout,
    /// The backing store is full (ENOSPC).
    NoSpace,
    /// The way to the device is broken (ENOLINK).
    Transport,
    /// The device reported a failure of its own (EREMOTEIO).
    Target,
    /// A reservation of another user forbids it (EBADE).
    ReservationConflict,
    /// The medium lost the data (ENODATA).
    Medium,
    /// Data and its checksum disagree (EILSEQ).
    Protection,
    /// Memory or another resource ran out (ENOMEM).
    Resource,
    /// The device is busy; a completion will make room (EBUSY).
    DeviceResource,
    /// It would have to wait and the caller asked not to (EAGAIN).
    Again,
    /// The device is offline (ENODEV).
    Offline,
    /// The request breaks a rule of the device: alignment, range, flags (EINVAL).
    Invalid,
    /// The allowed duration passed (ETIME).
    DurationLimit,
    /// A write to a read-only device (EROFS).
    ReadOnly,
    /// Anything else (EIO).
    Io,
}

impl Status {
    /// Every status, in the order of its number.
    pub const ALL: [Status; 16] = [
        Status::NotSupported,
        Status::Timeout,
        Status::NoSpace,
        Status::Transport,
        Status::Target,
        Status::ReservationConflict,
        Status::Medium,
        Status::Protection,
        Status::Resource,
        Status::DeviceResource,
        Status::Again,
        Status::Offline,
        Status::Invalid,
        Status::DurationLimit,
        Status::ReadOnly,
        Status::Io,
    ];

    /// The positive Linux errno that a system call would give for this.
    pub const fn errno(self) -> i32 {
        match self {
            Status::NotSupported => libc::EOPNOTSUPP,
            Status::Timeout => libc::ETIMEDOUT,
            Status::NoSpace => libc::ENOSPC,
            Status::Transport => libc::ENOLINK,
            Status::Target => libc::EREMOTEIO,
            Status::ReservationConflict => libc::EBADE,
            Status::Medium => libc::ENODATA,
            Status::Protection => libc::EILSEQ,
            Status::Resource => libc::ENOMEM,
            Status::DeviceResource => libc::EBUSY,
            Status::Again => libc::EAGAIN,
            Status::Offline => libc::ENODEV,
            Status::Invalid => libc::EINVAL,
            Status::DurationLimit => libc::ETIME,
            Status::ReadOnly => libc::EROFS,
            Status::Io => libc::EIO,
        }
    }

    /// The status of a positive errno; what has no name of its own is [`Status::Io`].
    pub const fn from_errno(errno: i32) -> Status {
        match errno {
            libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY => Status::NotSupported,
            libc::ETIMEDOUT => Status::Timeout,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Status::NoSpace,
            libc::ENOLINK => Status::Transport,
            libc::EREMOTEIO => Status::Target,
            libc::EBADE => Status::ReservationConflict,
            libc::ENODATA => Status::Medium,
            libc::EILSEQ => Status::Protection,
            libc::ENOMEM => Status::Resource,
            libc::EBUSY => Status::DeviceResource,
            libc::EAGAIN => Status::Again,
            libc::ENODEV | libc::ENXIO => Status::Offline,
            libc::EINVAL => Status::Invalid,
            libc::ETIME => Status::DurationLimit,
            libc::EROFS | libc::EPERM => Status::ReadOnly,
            _ => Status::Io,
        }
    }

    /// The error number of the NBD protocol (its list is closed: `NBD_EPERM` 1,
    /// `NBD_EIO` 5, `NBD_ENOMEM` 12, `NBD_EINVAL` 22, `NBD_ENOSPC` 28,
    /// `NBD_ENOTSUP` 95, `NBD_ESHUTDOWN` 108).
    pub const fn nbd(self) -> u32 {
        match self {
            Status::ReadOnly => 1,
            Status::Resource => 12,
            Status::Invalid => 22,
            Status::NoSpace => 28,
            Status::NotSupported => 95,
            Status::Offline => 108,
            _ => 5,
        }
    }

    /// A short name for tables and counters.
    pub const fn name(self) -> &'static str {
        match self {
            Status::NotSupported => "not-supported",
            Status::Timeout => "timeout",
            Status::NoSpace => "no-space",
            Status::Transport => "transport",
            Status::Target => "target",
            Status::ReservationConflict => "reservation-conflict",
            Status::Medium => "medium",
            Status::Protection => "protection",
            Status::Resource => "resource",
            Status::DeviceResource => "device-resource",
            Status::Again => "again",
            Status::Offline => "offline",
            Status::Invalid => "invalid",
            Status::DurationLimit => "duration-limit",
            Status::ReadOnly => "read-only",
            Status::Io => "io",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Status::NotSupported => "operation not supported",
            Status::Timeout => "timed out",
            Status::NoSpace => "no space left on the backing store",
            Status::Transport => "transport broken",
            Status::Target => "device failure",
            Status::ReservationConflict => "reservation conflict",
            Status::Medium => "medium error",
            Status::Protection => "checksum mismatch",
            Status::Resource => "out of resources",
            Status::DeviceResource => "device busy",
            Status::Again => "would have to wait",
            Status::Offline => "device offline",
            Status::Invalid => "invalid request",
            Status::DurationLimit => "duration limit passed",
            Status::ReadOnly => "device is read-only",
            Status::Io => "I/O error",
        })
    }
}

impl std::error::Error for Status {}

impl From<Status> for std::io::Error {
    fn from(status: Status) -> std::io::Error {
        std::io::Error::from_raw_os_error(status.errno())
    }
}

/// The kind of an [`Error`]: few, stable, to be matched on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument breaks a documented rule.
    Invalid,
    /// No such file, device or setting.
    NotFound,
    /// Permission is missing.
    Denied,
    /// In use by another process.
    Busy,
    /// Requests are held after errors, and what is to be done waits for them.
    Held,
    /// The kernel itself uses the image: its loop driver, a mount, a device on top of it.
    Claimed,
    /// The image is in a format that is not served.
    Format,
    /// The image names a backing file that it may not have.
    BackingFile,
    /// Strangers could reach the device.
    Exposed,
    /// Earlier writes were lost: the device stays failed until it is opened anew.
    Lost,
    /// Two things that are to be used together do not fit to each other.
    Mismatch,
    /// The kernel, the file system or the device cannot do it.
    Unsupported,
    /// The image's file system or device has no direct I/O, or demands more of it than any sector size
    /// or offset meets.
    NoDirectIo,
    /// Direct I/O on the image demands longer sectors.
    DirectIoSector {
        /// The shortest sector that it can have, in bytes.
        needed_bytes: u32,
        /// The sector size that was asked for, in bytes.
        sector_bytes: u32,
    },
    /// Direct I/O on the image demands that the device begins at a multiple of its alignment.
    DirectIoOffset {
        /// That alignment, in bytes.
        align_bytes: u32,
        /// The offset that was asked for, in bytes.
        offset_bytes: u64,
    },
    /// A system call failed.
    System,
}

/// Why an operation of the control plane failed: one line of what, why
/// and the cure, with the cause behind it.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<std::io::Error>,
    /// The cure of the source, for a user.
    cure: String,
}

impl Error {
    /// An error whose `message` has what failed, why, and the cure, as far as a library
    /// knows that (see [`Error::with_cure`]).
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), source: None, cure: String::new() }
    }

    /// The failure of a system call while doing `what`; its kind follows from the errno.
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
        Error { kind, message: what.into(), source: Some(source), cure: String::new() }
    }

    /// The same error with the cure, if there is one, after why.
    ///
    /// A library names cures of the system, such as a limit to raise, a permission or another path, which
    /// help in any program. A program's own names of operations and options are not among them: the
    /// program adds those, by the error's [`kind`](Error::kind).
    pub fn with_cure(self, cure: impl Into<String>) -> Error {
        Error { cure: cure.into(), ..self }
    }

    /// Whether it has a cure, to which a program adds none of its own.
    pub fn has_cure(&self) -> bool {
        !self.cure.is_empty()
    }

    /// The cure; empty if it has none.
    pub fn cure(&self) -> &str {
        &self.cure
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
        match self.cure.as_str() {
            "" => Ok(()),
            cure => write!(f, "; {cure}"),
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
    fn every_status_survives_the_way_through_errno() {
        for status in Status::ALL {
            assert_eq!(Status::from_errno(status.errno()), status);
        }
    }

    #[test]
    fn an_error_says_what_then_why_then_the_cure() {
        let error = Error::system("cannot open x", std::io::Error::from_raw_os_error(libc::EACCES));
        assert!(error.to_string().starts_with("cannot open x: Permission denied"), "{error}");
        let error = error.with_cure("");
        assert!(error.to_string().ends_with("(os error 13)"), "{error}");
        assert!(error.with_cure("become root").to_string().ends_with("(os error 13); become root"));
    }

    #[test]
    fn nbd_errors_are_of_the_closed_list() {
        for status in Status::ALL {
            assert!([1, 5, 12, 22, 28, 75, 95, 108].contains(&status.nbd()), "{status:?}");
        }
    }
}

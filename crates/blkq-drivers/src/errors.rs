//! Errors of the kinds that most drivers return.

use blkq::{Error, ErrorKind};

/// The options or arguments are wrong, or contradict the image.
pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

/// The image is sound, but this driver or this use does not support it.
pub(crate) fn unsupported(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unsupported, message)
}

/// The image breaks its format, or has another format.
pub(crate) fn malformed(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Format, message)
}

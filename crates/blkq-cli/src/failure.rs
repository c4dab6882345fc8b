//! Why a command did not do what was asked: one line for the user, and an exit code.

use std::fmt;
use std::process::ExitCode;

use blkq::ErrorKind;
use blkq::text::escaped;

/// Exit code of a command that was refused or failed.
pub const EXIT_FAILED: u8 = 1;

/// Exit code of a daemon that left its device to the next one, for service managers.
pub const EXIT_LEFT: u8 = 3;

/// Exit code of a daemon that detached its device when the last flush had failed: another start fixes nothing.
pub const EXIT_UNFLUSHED: u8 = 4;

/// One line: what was tried, why it did not work, and the cure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    line: String,
    busy: bool,
}

/// The outcome of a command.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A failure in one line of the form `what: why; cure`. Control characters of names that came from outside are
    /// escaped, so that it stays one line.
    pub fn new(line: impl AsRef<str>) -> Failure {
        Failure { line: escaped(line.as_ref()), busy: false }
    }

    /// Whether the block layer or an attachment was busy, so that the same may succeed later.
    pub fn is_busy(&self) -> bool {
        self.busy
    }

    /// Why the block layer or an attachment refused something, with a `cure` that the command has for
    /// errors of this `kind` that name none: the libraries know none of its options and subcommands.
    pub fn of(error: blkq::Error, kind: ErrorKind, cure: &str) -> Failure {
        match error.kind() == kind && !error.has_cure() {
            true => Failure::new(format!("{error}; {cure}")),
            false => error.into(),
        }
    }

    /// A device does not stop, or change, while so many requests are held.
    pub fn held(requests: u64) -> Failure {
        let are = if requests == 1 { "request is" } else { "requests are" };
        Failure::new(format!("{requests} {are} held after I/O errors; {HELD_CURE}"))
    }

    /// The same failure, as part of doing `what`. An object that ends `what` and begins the failure is named once.
    pub fn during(self, what: impl fmt::Display) -> Failure {
        let what = escaped(&what.to_string());
        let repeated = self.line.split_once(": ").filter(|(object, _)| {
            what.strip_suffix(object).is_some_and(|before| before.is_empty() || before.ends_with(' '))
        });
        let why = repeated.map_or(self.line.as_str(), |(_, why)| why);
        Failure::new(format!("{what}: {why}"))
    }

    /// Why a device that is not to be in use could not be stopped or shrunk, with the cure.
    pub fn unless_forced(error: blkq::Error) -> Failure {
        match error.kind() {
            ErrorKind::Busy => Failure::new(format!("{error}, or use --force")),
            _ => error.into(),
        }
    }
}

/// The cure of [`ErrorKind::Held`].
const HELD_CURE: &str = "blkq resume reissues them, or fails them with --fail";

/// Does `what` with one after the other, whatever became of those before. Each failure is reported
/// on the way, and only the exit code remains.
///
/// # Errors
/// None.
pub fn for_each<T>(all: &[T], mut what: impl FnMut(&T) -> Outcome) -> Outcome<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for one in all {
        if let Err(failure) = what(one) {
            crate::complain(&failure);
            code = ExitCode::from(EXIT_FAILED);
        }
    }
    Ok(code)
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line)
    }
}

impl std::error::Error for Failure {}

impl From<blkq::Error> for Failure {
    fn from(error: blkq::Error) -> Failure {
        let failure = Failure::new(format!("{error}{}", cure_of(error.kind())));
        Failure { busy: matches!(error.kind(), ErrorKind::Busy | ErrorKind::Held), ..failure }
    }
}

/// The cure of held requests, and where direct I/O was asked for and cannot be: the same for an attach and a
/// live change.
fn cure_of(kind: ErrorKind) -> String {
    match kind {
        ErrorKind::Held => format!("; {HELD_CURE}"),
        ErrorKind::NoDirectIo => "; take direct-io off or auto".to_owned(),
        ErrorKind::DirectIoSector { needed_bytes, .. } => {
            format!("; attach with --sector-size {needed_bytes}, or take direct-io off")
        }
        ErrorKind::DirectIoOffset { align_bytes, .. } => {
            format!("; attach with an --offset that is a multiple of {align_bytes}, or take direct-io off")
        }
        ErrorKind::FaultInjection => "; detach it, and attach without --fault".to_owned(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cure_for_direct_io_has_its_facts() {
        let of = |kind| Failure::from(blkq::Error::new(kind, "no")).to_string();
        let sector = ErrorKind::DirectIoSector { needed_bytes: 4096, sector_bytes: 512 };
        assert_eq!(of(sector), "no; attach with --sector-size 4096, or take direct-io off");
        let offset = ErrorKind::DirectIoOffset { align_bytes: 4096, offset_bytes: 512 };
        assert!(of(offset).contains("--offset that is a multiple of 4096"));
        assert_eq!(of(ErrorKind::FaultInjection), "no; detach it, and attach without --fault");
        assert_eq!(of(ErrorKind::System), "no");
        let busy = |kind| Failure::from(blkq::Error::new(kind, "no")).is_busy();
        assert!(busy(ErrorKind::Busy) && !busy(ErrorKind::System));
    }

    #[test]
    fn an_error_with_a_cure_gets_no_other() {
        let error = || blkq::Error::new(ErrorKind::Unsupported, "no");
        let of = |error| Failure::of(error, ErrorKind::Unsupported, "detach").to_string();
        assert_eq!(of(error()), "no; detach");
        assert_eq!(of(error().with_cure("use qemu-img")), "no; use qemu-img");
    }

    #[test]
    fn an_object_is_named_once() {
        let of = |line: &str, what: &str| Failure::new(line).during(what).to_string();
        assert_eq!(of("nosuch: no such device", "commit nosuch"), "commit nosuch: no such device");
        assert_eq!(of("a b: no such device", "commit a b"), "commit a b: no such device");
        assert_eq!(of("data: no", "data"), "data: no");
        assert_eq!(of("b: no", "commit ab"), "commit ab: b: no");
        assert_eq!(of("--create: no", "attach a"), "attach a: --create: no");
    }

    #[test]
    fn a_failure_is_one_line_whatever_it_quotes() {
        let failure = Failure::new("open evil\nname\x1b[31m: no").during("attach");
        assert_eq!(failure.to_string(), "attach: open evil\\x0aname\\x1b[31m: no");
    }
}

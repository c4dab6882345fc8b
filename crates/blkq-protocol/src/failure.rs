//! Failures of commands: one line for the user, and an exit code. A known name is suggested for a mistyped one.

use std::fmt;
use std::io::Write;

use blkq::ErrorKind;
use blkq::text::escaped;
/// The optimal string alignment distance: the smallest number of letters to insert, remove, replace or exchange with
/// the next letter to turn one word into the other.
pub use strsim::osa_distance as distance;

pub const EXIT_FAILED: u8 = 1;

/// Exit code of a daemon that handed its device to the next one, for service managers.
pub const EXIT_LEFT: u8 = 3;

/// Exit code of a daemon that detached its device although the last flush had failed. Restarting it would not
/// help.
pub const EXIT_UNFLUSHED: u8 = 4;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    line: String,
    busy: bool,
}

pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// Creates a failure from a line of the form `what: why; hint`. Control characters, which names may
    /// contain, are escaped, so that it stays one line.
    pub fn new(line: impl AsRef<str>) -> Failure {
        Failure { line: escaped(line.as_ref()), busy: false }
    }

    /// Whether the block layer or an attachment was busy, so that trying again may succeed.
    pub fn is_busy(&self) -> bool {
        self.busy
    }

    /// Adds a `hint` to an error of the given `kind`, unless the error already has one. The libraries do not
    /// know the options and subcommands of this program.
    pub fn of(error: blkq::Error, kind: ErrorKind, hint: &str) -> Failure {
        match error.kind() == kind && !error.has_hint() {
            true => Failure::new(format!("{error}; {hint}")),
            false => error.into(),
        }
    }

    /// The refusal to stop or change a device while requests are held.
    pub fn held(requests: u64) -> Failure {
        let are = if requests == 1 { "request is" } else { "requests are" };
        Failure::new(format!("{requests} {are} held after I/O errors; {HELD_HINT}"))
    }

    /// Prefixes the failure with `what`. If `what` ends with the object with which the failure begins, the
    /// object is named only once.
    pub fn during(self, what: impl fmt::Display) -> Failure {
        let what = escaped(&what.to_string());
        let repeated = self.line.split_once(": ").filter(|(object, _)| {
            what.strip_suffix(object).is_some_and(|before| before.is_empty() || before.ends_with(' '))
        });
        let why = repeated.map_or(self.line.as_str(), |(_, why)| why);
        Failure::new(format!("{what}: {why}"))
    }

    /// The line without `object` in front of it, for a place that names the object itself.
    pub fn without_object(&self, object: &str) -> &str {
        let why = self.line.strip_prefix(object).and_then(|rest| rest.strip_prefix(": "));
        why.unwrap_or(&self.line)
    }

    /// The failure of a command with the option --force, if the device is in use.
    pub fn unless_forced(error: blkq::Error) -> Failure {
        match error.kind() {
            ErrorKind::Busy => Failure::new(format!("{error}, or use --force")),
            _ => error.into(),
        }
    }
}

const HELD_HINT: &str = "`blkq resume` reissues them, `blkq resume --fail` fails them";

/// Prints a failure on standard error, in one line.
pub fn print_error(failure: &Failure) {
    // `eprintln!` panics if standard error is closed.
    let _ = writeln!(std::io::stderr(), "blkq: {failure}");
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line)
    }
}

impl std::error::Error for Failure {}

impl From<blkq::Error> for Failure {
    fn from(error: blkq::Error) -> Failure {
        let failure = Failure::new(format!("{error}{}", hint_for(error.kind())));
        Failure { busy: matches!(error.kind(), ErrorKind::Busy | ErrorKind::Held), ..failure }
    }
}

/// The hint for errors that an attach and a live change have in common: held requests, and direct I/O that is
/// not possible.
fn hint_for(kind: ErrorKind) -> String {
    match kind {
        ErrorKind::Held => format!("; {HELD_HINT}"),
        ErrorKind::NoDirectIo => "; set direct-io to off or auto".to_owned(),
        ErrorKind::DirectIoSector { needed_bytes, .. } => {
            format!("; attach with --sector-size {needed_bytes}, or set direct-io to off")
        }
        ErrorKind::DirectIoOffset { align_bytes, .. } => {
            format!("; attach with an --offset that is a multiple of {align_bytes}, or set direct-io to off")
        }
        ErrorKind::FaultInjection => "; detach it, and attach without --fault".to_owned(),
        _ => String::new(),
    }
}

/// Returns the name in `names` that is closest to `word`, if they differ in at most a third of the letters. Case,
/// hyphens and underscores are ignored: `readonly` and `read_only` equal `read-only`.
pub fn closest<S: AsRef<str>>(word: &str, names: impl IntoIterator<Item = S>) -> Option<S> {
    let plain = |text: &str| text.to_lowercase().replace(['-', '_'], "");
    let word = plain(word);
    let difference = |name: &S| {
        let name = plain(name.as_ref());
        let most = word.chars().count().max(name.chars().count()) / 3;
        Some(distance(&word, &name)).filter(|letters| *letters <= most)
    };
    let similar = names.into_iter().filter_map(|name| Some((difference(&name)?, name)));
    similar.min_by_key(|(letters, _)| *letters).map(|(_, name)| name)
}

/// Returns the end of a message about an unknown `word`: `; did you mean NAME?`, or nothing if no name is similar.
pub fn did_you_mean<S: AsRef<str>>(word: &str, names: impl IntoIterator<Item = S>) -> String {
    closest(word, names).map(|name| format!("; did you mean {}?", name.as_ref())).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hint_for_direct_io_has_the_required_values() {
        let of = |kind| Failure::from(blkq::Error::new(kind, "no")).to_string();
        let sector = ErrorKind::DirectIoSector { needed_bytes: 4096, sector_bytes: 512 };
        assert_eq!(of(sector), "no; attach with --sector-size 4096, or set direct-io to off");
        let offset = ErrorKind::DirectIoOffset { align_bytes: 4096, offset_bytes: 512 };
        assert!(of(offset).contains("--offset that is a multiple of 4096"));
        assert_eq!(of(ErrorKind::FaultInjection), "no; detach it, and attach without --fault");
        assert_eq!(of(ErrorKind::System), "no");
        let busy = |kind| Failure::from(blkq::Error::new(kind, "no")).is_busy();
        assert!(busy(ErrorKind::Busy) && !busy(ErrorKind::System));
    }

    #[test]
    fn an_error_with_a_hint_gets_no_other() {
        let error = || blkq::Error::new(ErrorKind::Unsupported, "no");
        let of = |error| Failure::of(error, ErrorKind::Unsupported, "detach").to_string();
        assert_eq!(of(error()), "no; detach");
        assert_eq!(of(error().with_hint("use qemu-img")), "no; use qemu-img");
    }

    #[test]
    fn an_object_is_named_once() {
        let of = |line: &str, what: &str| Failure::new(line).during(what).to_string();
        assert_eq!(of("nosuch: no such device", "commit nosuch"), "commit nosuch: no such device");
        assert_eq!(of("a b: no such device", "commit a b"), "commit a b: no such device");
        assert_eq!(of("data: no", "data"), "data: no");
        assert_eq!(of("b: no", "commit ab"), "commit ab: b: no");
        assert_eq!(of("--create: no", "attach a"), "attach a: --create: no");
        let failure = Failure::new("a: the daemon does not answer");
        assert_eq!(failure.without_object("a"), "the daemon does not answer");
        assert_eq!(failure.without_object("b"), "a: the daemon does not answer");
    }

    #[test]
    fn a_failure_is_one_line_whatever_it_quotes() {
        let failure = Failure::new("open evil\nname\x1b[31m: no").during("attach");
        assert_eq!(failure.to_string(), "attach: open evil\\x0aname\\x1b[31m: no");
    }

    #[test]
    fn names_that_differ_in_few_letters_are_suggested() {
        let distances = [("kitten", "sitting", 3), ("", "ab", 2), ("ab", "ab", 0), ("glod", "gold", 1)];
        for (one, other, letters) in distances {
            assert_eq!(distance(one, other), letters, "{one}");
        }
        let names = ["read-only", "depth", "merge", "disk.img"];
        for (word, name) in [
            ("readonly", "read-only"),
            ("read_only", "read-only"),
            ("READ-ONLY", "read-only"),
            ("dept", "depth"),
            ("mrege", "merge"),
            ("disc.img", "disk.img"),
        ] {
            assert_eq!(closest(word, names), Some(name), "{word}");
        }
        for word in ["", "colour", "x"] {
            assert_eq!(did_you_mean(word, names), "", "{word}");
        }
        assert_eq!(did_you_mean("dept", names), "; did you mean depth?");
    }
}

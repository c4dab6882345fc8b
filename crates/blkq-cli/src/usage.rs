//! Reports wrong usage. For an option of losetup(8) or qemu-nbd(8) that `blkq attach` lacks, the error names
//! the option of blkq that does the same.

use std::fmt::Display;
use std::ops::RangeBounds;
use std::time::Duration;

use blkq_protocol::failure::distance;
use clap::Command;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Options of losetup(8) and qemu-nbd(8), separated by spaces, with the tip that replaces clap's suggestion.
const OTHERS: [(&str, &str); 20] = [
    ("-r --ro --readonly --read_only", "to refuse writes: --read-only"),
    ("-o", "to begin the device at an offset: --offset BYTES"),
    ("--sizelimit", "to limit the size of the device: --size-limit BYTES"),
    ("-b --sectorsize --block-size", "to set the logical block size: --sector-size BYTES"),
    ("-P", "to scan for partitions: --partscan"),
    ("-f --find", "attach always uses a free device; to set the format: --format raw"),
    ("-L", "to reuse the device of these bytes: --nooverlap"),
    ("-n --nocache --cache --direct", "to bypass the page cache: --direct-io on"),
    ("-k --socket", "to listen on a unix socket: --listen unix:PATH"),
    ("-p --port --bind", "to listen on a port: --listen tcp:HOST:PORT"),
    ("-c --connect", "to get a node in /dev: --export ublk"),
    ("-e --clients", "to limit the number of connections: --max-connections N"),
    (
        "-t --persistent",
        "a device stays until blkq detach; to detach it when its last client disconnects: --autoclear",
    ),
    ("--tls-creds", "to use TLS: --tls-certificates DIR"),
    ("--daemon --daemonize --fork", "attach returns when the device is ready, and a daemon serves it"),
    ("--show", "attach always prints the exports of the device"),
    ("-v --verbose", "to print more about the device: --json, or blkq show"),
    ("-d --detach --disconnect -D --detach-all", "to detach: blkq detach NAME, or --all"),
    ("-a -l --list", "to list devices: blkq list"),
    ("-j --associated", "to list the devices of a file: blkq list --backing FILE"),
];

/// A parser for a number of seconds in the range `allowed`. It fails with `rule`.
pub fn seconds<R>(allowed: R, rule: &'static str) -> impl Fn(&str) -> Result<Duration, &'static str> + Clone
where
    R: RangeBounds<f64> + Clone,
{
    move |text| {
        let seconds = text.parse::<f64>().ok().filter(|seconds| allowed.contains(seconds));
        seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).ok_or(rule)
    }
}

/// Prints a mistake in the usage of the subcommand with the arguments `A`, followed by the usage, and exits with 2.
/// The arguments must have a usage text of their own.
pub fn exit<A: clap::Args>(message: impl Display) -> ! {
    A::augment_args(Command::new("blkq")).error(ErrorKind::ValueValidation, message).exit()
}

/// The mistake that clap found, in one line.
pub fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}

/// Improves an error of clap: adds a tip to an option of losetup or qemu-nbd that was given to `attach`, and
/// to a negative number, which clap takes for an option. Removes clap's suggestion if there is a tip, or if
/// the suggested option is not similar to the given one; the usage line then no longer names the suggested
/// option.
pub fn explain(mut error: clap::Error, command: fn() -> Command, subcommand: Option<&str>) -> clap::Error {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else { return error };
    let tip = match OTHERS.iter().find(|(words, _)| words.split(' ').any(|other| other == word)) {
        _ if error.kind() != ErrorKind::UnknownArgument => None,
        _ if matches!(word.as_bytes(), [b'-', b'0'..=b'9', ..]) => Some("numbers must not be negative"),
        Some((_, tip)) if subcommand == Some("attach") => Some(*tip),
        _ => None,
    };
    if let Some(ContextValue::String(similar)) = error.get(ContextKind::SuggestedArg)
        && (tip.is_some() || !is_similar(word, similar))
    {
        error.remove(ContextKind::SuggestedArg);
        let mut command = command();
        command.build();
        if let Some(subcommand) = subcommand.and_then(|name| command.find_subcommand_mut(name)) {
            error.insert(ContextKind::Usage, ContextValue::StyledStr(subcommand.render_usage()));
        }
    }
    if let Some(tip) = tip {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
    }
    error
}

/// Whether one word is part of the other, or differs from it in at most a third of its letters. Clap itself
/// also suggests words that have less in common.
fn is_similar(word: &str, other: &str) -> bool {
    let (word, other) = (word.trim_start_matches('-'), other.trim_start_matches('-'));
    let other = other.split(' ').next().unwrap_or_default();
    let has_part = word.len() > 2 && (word.contains(other) || other.contains(word));
    has_part || distance(word, other) <= word.len().max(other.len()) / 3
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::commands::Cli;

    fn explained(words: &[&str]) -> String {
        let error = Cli::try_parse_from([&["blkq"], words].concat()).unwrap_err();
        explain(error, Cli::command, words.first().copied()).to_string()
    }

    #[test]
    fn options_of_losetup_and_qemu_nbd_get_a_tip() {
        for (word, tip) in [
            ("-r", "--read-only"),
            ("--ro", "to refuse writes: --read-only"),
            ("--daemon", "attach returns"),
            ("-o", "--offset BYTES"),
            ("-v", "blkq show"),
            ("-P", "--partscan"),
            ("-k", "--listen unix:PATH"),
            ("--offset=1 -1", ""),
        ] {
            let text = explained(&[&["attach", "x.img"], &word.split(' ').collect::<Vec<_>>()[..]].concat());
            assert!(text.contains(tip) && text.contains("tip: ") && !text.contains("as a value"), "{text}");
            assert_eq!(text.matches("tip: ").count(), 1, "{text}");
        }
        for words in [
            &["attach", "x.img", "--offset", "-1"][..],
            &["resize", "x", "-5"],
            &["attach", "x", "--depth", "-1"],
        ] {
            let text = explained(words);
            assert!(text.contains("tip: numbers must not be negative"), "{text}");
        }
        // Only `attach` gets tips: `show` has other options.
        assert!(explained(&["show", "-r"]).contains("as a value"));
    }

    #[test]
    fn only_similar_options_are_suggested() {
        for (word, similar) in [("--read-onyl", "--read-only"), ("--connections", "--max-connections")] {
            assert!(explained(&["attach", "x.img", word]).contains(similar), "{word}");
        }
        for word in ["--verify", "--daemonic", "--rx", "--ro"] {
            let text = explained(&["attach", "x.img", word]);
            assert!(!text.contains("similar") && !text.contains("--group"), "{text}");
        }
    }

    #[test]
    fn no_tip_hides_an_option_of_attach() {
        let command = Cli::command();
        let attach = command.find_subcommand("attach").unwrap();
        for word in OTHERS.iter().flat_map(|(words, _)| words.split(' ')) {
            let long = word.strip_prefix("--");
            let is_ours = attach.get_arguments().any(|argument| match long {
                Some(long) => argument.get_long() == Some(long),
                None => argument.get_short().is_some_and(|short| word.ends_with(short)),
            });
            assert!(!is_ours, "{word}");
        }
    }
}

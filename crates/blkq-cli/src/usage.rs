//! Wrong usage: the name of our option for those of losetup(8) and qemu-nbd(8).

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Options of others, and what does that here.
const OTHERS: [(&[&str], &str); 19] = [
    (&["-r", "--readonly", "--read_only"], "to refuse writes: --read-only"),
    (&["-o"], "where the device begins: --offset BYTES"),
    (&["--sizelimit"], "the device's size at most: --size-limit BYTES"),
    (&["-b", "--sectorsize", "--block-size"], "the logical block: --sector-size BYTES"),
    (&["-P"], "to have the kernel scan for partitions: --partscan"),
    (&["-f", "--find"], "a free device is found without an option; the format is --format raw"),
    (&["-L"], "to reuse the device of these bytes: --nooverlap"),
    (&["-n", "--nocache", "--cache", "--direct"], "to bypass the page cache: --direct-io on"),
    (&["-k", "--socket"], "to listen on a unix socket: --listen unix:PATH"),
    (&["-p", "--port", "--bind"], "to listen on a port: --listen tcp:HOST:PORT"),
    (&["-c", "--connect"], "to have a node in /dev: --export ublk"),
    (&["-e", "--clients"], "clients at a time: --max-connections N"),
    (&["-t", "--persistent"], "a device stays until blkq detach, or until its last client with --autoclear"),
    (&["--tls-creds"], "the directory of certificates: --tls-certificates DIR"),
    (&["--show"], "where the device is is always printed"),
    (&["-v", "--verbose"], "all about the device: --json, or blkq show"),
    (&["-d", "--detach", "--disconnect", "-D", "--detach-all"], "to detach: blkq detach NAME, or --all"),
    (&["-a", "-l", "--list"], "to list devices: blkq list"),
    (&["-j", "--associated"], "the devices of a file: blkq list --backing FILE"),
];

/// `error` with the option that does here what was asked for, if `attach` was called with one of
/// another program's; clap takes them for values.
pub fn explain(mut error: clap::Error, subcommand: Option<&str>) -> clap::Error {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else { return error };
    let tip = match OTHERS.iter().find(|(words, _)| words.contains(&word.as_str())) {
        _ if error.kind() != ErrorKind::UnknownArgument => None,
        _ if word
            .strip_prefix('-')
            .is_some_and(|number| number.starts_with(|c: char| c.is_ascii_digit())) =>
        {
            Some("numbers are 0 or more here")
        }
        Some((_, tip)) if subcommand == Some("attach") => Some(*tip),
        _ => None,
    };
    if let Some(tip) = tip {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
    }
    error
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::commands::Cli;

    fn of(words: &[&str]) -> String {
        let error = Cli::try_parse_from([&["blkq"], words].concat()).unwrap_err();
        explain(error, words.first().copied()).to_string()
    }

    #[test]
    fn options_of_others_are_answered_with_ours() {
        for (word, tip) in [
            ("-r", "--read-only"),
            ("-o", "--offset BYTES"),
            ("-v", "blkq show"),
            ("-P", "--partscan"),
            ("-k", "--listen unix:PATH"),
            ("--offset=1 -1", ""),
        ] {
            let text = of(&[&["attach", "x.img"], &word.split(' ').collect::<Vec<_>>()[..]].concat());
            assert!(text.contains(tip) && text.contains("tip: ") && !text.contains("as a value"), "{text}");
        }
        for words in [
            &["attach", "x.img", "--offset", "-1"][..],
            &["resize", "x", "-5"],
            &["attach", "x", "--depth", "-1"],
        ] {
            assert!(of(words).contains("tip: numbers are 0 or more here"), "{}", of(words));
        }
        // An option that means something else there is not touched.
        assert!(of(&["show", "-r"]).contains("as a value"));
    }

    #[test]
    fn no_tip_stands_for_an_option_that_there_is() {
        let command = Cli::command();
        let attach = command.find_subcommand("attach").unwrap();
        for word in OTHERS.iter().flat_map(|(words, _)| words.iter()) {
            let long = word.strip_prefix("--");
            let is_ours = attach.get_arguments().any(|argument| match long {
                Some(long) => argument.get_long() == Some(long),
                None => argument.get_short().is_some_and(|short| word.ends_with(short)),
            });
            assert!(!is_ours, "{word}");
        }
    }
}

//! Words of the command line (sizes, addresses, settings, devices, names) and whole lines. A word that is accepted must
//! have the same meaning after it was formatted again; any other word must be rejected with one line.
//!
//! Input: a byte for the kind, then the text. A line is either words separated by NUL, or choices from which a line is
//! generated in two spellings: both must be accepted with the same meaning, or both rejected.
// Contract: bounded-input

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use blkq::units::{format_bytes, parse_bytes};
use blkq_cli::commands::attach::Args;
use blkq_cli::commands::set::parse_setting;
use blkq_cli::commands::{Cli, Command};
use blkq_drivers::DriverSpec;
use blkq_protocol::failure::Failure;
use blkq_protocol::options::{Address, Record, image_text, parse_listen};
use clap::Parser;

use crate::lines;
use arbitrary::Unstructured;

fn one_line(error: &impl ToString) {
    // The caller quotes the value in its message.
    assert!(!Failure::new(error.to_string()).to_string().contains('\n'));
}

fn bytes(text: &str) {
    match parse_bytes(text) {
        Ok(bytes) => {
            assert!(bytes <= i64::MAX as u64);
            assert_eq!(parse_bytes(&format_bytes(bytes)).ok(), Some(bytes));
            // The digits without fraction and unit are the same number or a smaller one.
            let digits = text.find(|c: char| !c.is_ascii_digit()).map_or(text, |at| &text[..at]);
            assert!(digits.parse::<u64>().is_ok_and(|number| number <= bytes), "{text:?}");
        }
        Err(error) => one_line(&error),
    }
}

fn listen(text: &str) {
    match parse_listen(text) {
        Ok(address) => {
            let written = match &address {
                Address::Unix(path) => format!("unix:{}", path.display()),
                Address::Tcp(host, port) if host.contains(':') => format!("tcp:[{host}]:{port}"),
                Address::Tcp(host, port) => format!("tcp:{host}:{port}"),
            };
            assert_eq!(parse_listen(&written), Ok(address));
        }
        Err(error) => one_line(&error),
    }
}

fn image(text: &str) {
    match text.parse::<DriverSpec>() {
        Ok(spec) => assert_eq!(image_text(&spec).parse::<DriverSpec>().ok(), Some(spec)),
        Err(error) => one_line(&error),
    }
}

fn line(text: &[u8]) {
    let words = |name: &str| -> Vec<OsString> {
        let words = text.split(|byte| *byte == 0).take(24).map(|word| OsString::from_vec(word.to_vec()));
        std::iter::once(OsString::from(name)).chain(words).collect()
    };
    match Cli::try_parse_from(words("blkq")) {
        Ok(Cli { command: Command::Attach(args) }) => {
            let options = args.options();
            // State files of the previous format contain the same words.
            let after: Vec<OsString> = words("blkq").split_off(2);
            assert_eq!(Args::options_from_words(&after), options);
            match options {
                // The daemon must get the same options.
                Ok(options) => {
                    assert!(options.depth > 0 && options.queues > 0 && options.max_connections != Some(0));
                    let record = Record::new(&options).expect("options are JSON");
                    assert_eq!(record.read(), Ok(options));
                }
                Err(failure) => one_line(&failure),
            }
        }
        Ok(_) => {}
        Err(error) => drop(error.to_string()),
    }
    let mut losetup = words("blkq");
    losetup.insert(1, "losetup".into());
    if let Err(error) = Cli::try_parse_from(losetup) {
        drop(error.to_string());
    }
    if let Err(failure) = Args::options_from_words(&words("x").split_off(1)) {
        one_line(&failure);
    }
}

fn made_line(choices: &[u8]) {
    let mut u = Unstructured::new(choices);
    let Ok([joined, apart]) = lines::line(&mut u, None) else { return };
    let understood = lines::parse(&joined);
    assert_eq!(lines::parse(&apart), understood, "{joined:?} and {apart:?}");
    // Not for every input: parsing the words of a state file separately takes long here.
    if apart[0] == "attach" && u.arbitrary::<u8>().is_ok_and(|choice| choice % 8 == 7) {
        let words: Vec<OsString> = apart[1..].iter().map(OsString::from).collect();
        let options = Args::options_from_words(&words);
        match Cli::try_parse_from(std::iter::once("blkq").chain(apart.iter().map(String::as_str))) {
            Ok(Cli { command: Command::Attach(args) }) => assert_eq!(options, args.options(), "{apart:?}"),
            _ => one_line(&options.expect_err("no options")),
        }
    }
}

/// Checks one input.
pub fn check(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    match kind % 8 {
        6 => return line(rest),
        7 => return made_line(rest),
        _ => {}
    }
    let text = String::from_utf8_lossy(rest);
    match kind % 8 {
        0 | 1 => bytes(&text),
        2 => listen(&text),
        3 => image(&text),
        4 => match parse_setting(&text) {
            Ok((key, value)) => assert!(!key.is_empty() && format!("{key}={value}") == text),
            Err(error) => one_line(&error),
        },
        _ => assert_eq!(blkq_protocol::state::check_name(&text).is_ok(), {
            let name = |c: char| c.is_alphanumeric() || "._-+@".contains(c);
            text.starts_with(char::is_alphanumeric) && text.chars().all(name)
        }),
    }
}

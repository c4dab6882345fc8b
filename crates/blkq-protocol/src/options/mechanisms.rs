//! Mechanisms that can be switched off, to measure what each of them gains: `--without` and `set without=`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use clap::{Arg, ArgAction, ArgMatches, Command, ValueEnum};

use super::headings;

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Mechanism {
    EarlySubmission,
    HugePages,
    ReceiveBackoff,
    SplitReads,
}

impl Mechanism {
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The switches of earlier versions, accepted for one release: `--no-KEY`, `set KEY=off`, and `KEY` in records. The
/// switch of a mechanism that was removed is ignored.
pub(super) const EARLIER: [(&str, Option<Mechanism>); 4] = [
    ("no-early-submission", Some(Mechanism::EarlySubmission)),
    ("no-pacing", None),
    ("no-receive-backoff", Some(Mechanism::ReceiveBackoff)),
    ("no-split-reads", Some(Mechanism::SplitReads)),
];

/// Whether earlier versions had the option `--name`, which this version hides.
pub fn is_earlier_option(name: &str) -> bool {
    EARLIER.iter().any(|(option, _)| *option == name)
}

/// The name of the setting, and the key in records.
pub(super) const WITHOUT: &str = "without";
/// The text for no mechanism.
pub(super) const NONE: &str = "none";

/// The mechanisms that are switched off. The text is their names, separated by commas, or `none`.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Without(BTreeSet<Mechanism>);

impl Without {
    pub fn includes(&self, mechanism: Mechanism) -> bool {
        self.0.contains(&mechanism)
    }

    pub fn switch(&mut self, mechanism: Mechanism, on: bool) {
        if on {
            self.0.remove(&mechanism)
        } else {
            self.0.insert(mechanism)
        };
    }

    /// `settings` in terms of this version: switches of earlier versions become values of `without`, and those of
    /// removed mechanisms are left out. `self` is the value before the settings.
    pub fn translate(mut self, settings: &[(String, String)]) -> Vec<(String, String)> {
        let mut translated: Vec<(String, String)> = Vec::new();
        for (key, value) in settings {
            let earlier = EARLIER.iter().find(|(option, _)| option.strip_prefix("no-") == Some(key));
            match (earlier, value.as_str()) {
                (Some((_, None)), _) => {}
                (Some((_, Some(mechanism))), "on" | "off") => {
                    self.switch(*mechanism, value == "on");
                    translated.retain(|(other, _)| other != WITHOUT);
                    translated.push((WITHOUT.to_owned(), self.to_string()));
                }
                _ => {
                    if key == WITHOUT {
                        self = value.parse().unwrap_or(self);
                    }
                    translated.push((key.clone(), value.clone()));
                }
            }
        }
        translated
    }
}

impl fmt::Display for Without {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.0.iter().map(|mechanism| mechanism.name()).collect();
        f.write_str(if names.is_empty() { NONE.to_owned() } else { names.join(",") }.as_str())
    }
}

impl FromStr for Without {
    type Err = String;

    fn from_str(text: &str) -> Result<Without, String> {
        if text == NONE {
            return Ok(Without::default());
        }
        let mechanism = |name| {
            Mechanism::from_str(name, false).map_err(|_| {
                let names: Vec<String> = Mechanism::value_variants().iter().map(|one| one.name()).collect();
                format!("no mechanism is named {name:?}; choose from {}, or none", names.join(", "))
            })
        };
        text.split(',').map(mechanism).collect::<Result<_, _>>().map(Without)
    }
}

impl clap::FromArgMatches for Without {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Without, clap::Error> {
        let mut without = matches.get_one(WITHOUT).cloned().unwrap_or_else(Without::default);
        let given = EARLIER.iter().filter(|(option, _)| matches.get_flag(option));
        given.filter_map(|(_, mechanism)| *mechanism).for_each(|mechanism| without.switch(mechanism, false));
        Ok(without)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Without::from_arg_matches(matches)?;
        Ok(())
    }
}

impl clap::Args for Without {
    fn augment_args(command: Command) -> Command {
        let without = Arg::new(WITHOUT)
            .long(WITHOUT)
            .value_name("NAME,...")
            .value_parser(str::parse::<Without>)
            .default_value(NONE)
            .help_heading(headings::PERFORMANCE)
            .help("Turn off mechanisms, to measure what they gain (docs/bench.md)")
            .long_help(HELP);
        let hidden = |(option, _)| Arg::new(option).long(option).hide(true).action(ArgAction::SetTrue);
        command.arg(without).args(EARLIER.map(hidden))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Without::augment_args(command)
    }
}

const HELP: &str = "\
Turn off mechanisms, to measure what they gain (docs/bench.md)

  early-submission  submit the I/O of a batch to the kernel four at a time, not at its end
  huge-pages        use huge pages for the buffers of large I/O
  receive-backoff   let requests of an NBD client that is busy reading replies gather
  split-reads       serve large NBD reads in parts of 128 KiB";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_earlier_versions_are_translated() {
        let settings = |text: &str| -> Vec<(String, String)> {
            let pairs = text.split(' ').filter_map(|setting| setting.split_once('='));
            pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
        };
        for (now, before, after) in [
            ("none", "depth=4 pacing=off merge=off", "depth=4 merge=off"),
            (
                "none",
                "split-reads=off depth=4 receive-backoff=off",
                "depth=4 without=receive-backoff,split-reads",
            ),
            ("huge-pages", "split-reads=on", "without=huge-pages"),
            ("split-reads", "split-reads=on", "without=none"),
            ("split-reads", "without=huge-pages early-submission=off", "without=early-submission,huge-pages"),
            ("none", "split-reads=maybe", "split-reads=maybe"),
        ] {
            let now: Without = now.parse().unwrap();
            assert_eq!(now.translate(&settings(before)), settings(after), "{before}");
        }
    }
}

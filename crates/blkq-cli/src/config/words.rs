//! Converts the text of a configuration file to words of the command line.

use std::error::Error;
use std::path::Path;

use blkq_protocol::failure::{Failure, closest};
use blkq_protocol::options::{AttachOptions, is_earlier_option};
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgAction, Args, Command, FromArgMatches, Id};
use toml::de::{DeTable, DeValue};

use crate::usage::first_line;

/// The key of the image, which is the only argument that is not an option. This is also its ID in clap.
pub const IMAGE: &str = "image";
/// A valid image, to parse other options alone: the command line requires an image.
pub const ANY_IMAGE: &str = "null:1M";

/// A mistake in a configuration file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The line of the mistake, counted from 1. 0 if the mistake concerns the file as a whole.
    pub line: usize,
    pub text: String,
}

impl Fault {
    pub fn of_file(text: String) -> Fault {
        Fault { line: 0, text }
    }

    /// The message for the user, with the path of the file and the line in front.
    pub fn failure(&self, path: &Path) -> Failure {
        match self.line {
            0 => Failure::new(format!("{}: {}", path.display(), self.text)),
            line => Failure::new(format!("{}:{line}: {}", path.display(), self.text)),
        }
    }
}

/// A key of the file with its words of the command line.
#[derive(Debug)]
pub struct Words {
    pub key: String,
    /// The line of the key, counted from 1.
    pub line: usize,
    pub id: Id,
    /// The words of the command line; empty if the value is false.
    pub words: Vec<String>,
}

impl Words {
    /// The value of an option; `None` for a switch.
    pub fn value(&self) -> Option<String> {
        self.words.first()?.split_once('=').map(|(_, value)| value.to_owned())
    }
}

/// A command with the options of a device. The other options of `attach`, such as --run, are not keys.
pub fn command() -> Command {
    AttachOptions::augment_args(Command::new("attach").no_binary_name(true).disable_help_flag(true))
}

/// The argument with the name `key`. Hidden options are not keys, except options that earlier versions had.
fn argument<'a>(command: &'a Command, key: &str) -> Option<&'a Arg> {
    let mut arguments =
        command.get_arguments().filter(|argument| !argument.is_hide_set() || is_earlier_option(key));
    arguments.find(|argument| match argument.get_long() {
        Some(long) => long == key,
        None => argument.get_id() == key,
    })
}

/// The error is the first mistake, in one line.
pub fn options(words: impl Iterator<Item = String>) -> Result<AttachOptions, String> {
    parsed(words).map_err(|error| first_line(&error))
}

fn parsed(words: impl Iterator<Item = String>) -> Result<AttachOptions, clap::Error> {
    command().try_get_matches_from(words).and_then(|matches| AttachOptions::from_arg_matches(&matches))
}

/// Describes an invalid value of `key`. Clap's own text would name an option of the command line.
fn invalid_value(key: &str, error: &clap::Error) -> String {
    let Some(ContextValue::String(given)) = error.get(ContextKind::InvalidValue) else {
        return first_line(error);
    };
    if let Some(ContextValue::Strings(names)) = error.get(ContextKind::ValidValue)
        && let [names @ .., last] = &names[..]
    {
        return format!("{key} must be {} or {last}, not {given:?}", names.join(", "));
    }
    match error.source() {
        Some(why) => format!("{given:?} is not a valid value of {key}: {why}"),
        None => first_line(error),
    }
}

pub struct Parsed {
    /// The valid keys, in the order of their lines.
    pub keys: Vec<Words>,
    /// All mistakes that concern single lines, in the order of the lines.
    pub faults: Vec<Fault>,
    pub faulty: Vec<String>,
}

impl Parsed {
    pub fn all(self) -> Result<Vec<Words>, Vec<Fault>> {
        if self.faults.is_empty() { Ok(self.keys) } else { Err(self.faults) }
    }
}

pub fn parse(text: &str) -> Parsed {
    let line =
        |at: usize| 1 + text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count();
    let (table, errors) = DeTable::parse_recoverable(text);
    let mut faults: Vec<Fault> = errors
        .iter()
        .map(|error| Fault {
            line: error.span().map_or(0, |span| line(span.start)),
            text: error.message().replace('\n', ", "),
        })
        .collect();
    let command = command();
    let (mut keys, mut faulty) = (Vec::new(), Vec::new());
    // If the text is not valid TOML, the keys that the parser has recovered may not be what the user meant.
    for (key, value) in table.get_ref().iter().filter(|_| errors.is_empty()) {
        let at = line(key.span().start);
        match words_of(&command, key.get_ref(), value.get_ref()) {
            Ok((id, words)) => keys.push(Words { key: key.get_ref().to_string(), line: at, id, words }),
            Err(text) => {
                faults.push(Fault { line: at, text });
                faulty.push(key.get_ref().to_string());
            }
        }
    }
    faults.sort_by_key(|fault| fault.line);
    keys.sort_by_key(|key| key.line);
    Parsed { keys, faults, faulty }
}

fn words_of(command: &Command, key: &str, value: &DeValue) -> Result<(Id, Vec<String>), String> {
    let Some(argument) = argument(command, key) else { return Err(unknown(key)) };
    let words = match (argument.get_action(), value) {
        (ArgAction::SetTrue | ArgAction::SetFalse, value) => match value.as_bool() {
            Some(on) => on.then(|| format!("--{key}")).into_iter().collect(),
            None => return Err(format!("{key} must be true or false")),
        },
        (ArgAction::Append, DeValue::Array(values)) => {
            values.iter().map(|value| word(key, value.get_ref())).collect::<Result<_, _>>()?
        }
        (_, value) => vec![word(key, value)?],
    };
    let image = (key != IMAGE).then(|| ANY_IMAGE.to_owned());
    parsed(image.into_iter().chain(words.iter().cloned())).map_err(|error| invalid_value(key, &error))?;
    Ok((argument.get_id().clone(), words))
}

fn word(key: &str, value: &DeValue) -> Result<String, String> {
    let kind = value.type_str();
    let text = match value {
        DeValue::String(text) => text.to_string(),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_err(|_| format!("{key}: the number is too large"))?
            .to_string(),
        DeValue::Float(number) => number.as_str().to_owned(),
        _ => return Err(format!("{key} must be a string in quotes or a number, not a value of type {kind}")),
    };
    Ok(match key {
        // Without the prefix, clap would take the path for an option.
        IMAGE if text.starts_with('-') => format!("./{text}"),
        IMAGE => text,
        _ => format!("--{key}={text}"),
    })
}

fn unknown(key: &str) -> String {
    match similar_to(key) {
        Some(similar) => format!("unknown key {key:?}; a similar key is {similar}"),
        None => format!(
            "unknown key {key:?}; the keys are image and the long options of `blkq attach`, without the dashes"
        ),
    }
}

pub fn similar_to(key: &str) -> Option<String> {
    let command = command();
    if let Some(similar) = closest(key, command.get_arguments().filter_map(Arg::get_long).chain([IMAGE])) {
        return Some(similar.to_owned());
    }
    // Clap also suggests options that contain the word.
    match command.try_get_matches_from([format!("--{key}")]).err()?.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(option)) => Some(option.trim_start_matches('-').to_owned()),
        _ => None,
    }
}

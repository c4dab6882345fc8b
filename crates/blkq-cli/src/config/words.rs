//! The text of a configuration file as words of the command line.

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgAction, Args, Command, FromArgMatches, Id};
use toml::de::{DeTable, DeValue};

use super::fault::Fault;
use crate::options::{AttachOptions, REMOVED};

/// The key, and the option's name, of the argument that has no long name.
pub const IMAGE: &str = "image";
/// Stands for the image where only another option is looked at.
const ANY_IMAGE: &str = "null:1M";

/// A key of the file, and what it means.
#[derive(Debug)]
pub struct Words {
    pub key: String,
    /// Counted from 1.
    pub line: usize,
    /// The argument of the command line.
    pub id: Id,
    /// The words of the command line; none for a switch that is not set.
    pub words: Vec<String>,
}

impl Words {
    /// The value, if there is one.
    pub fn value(&self) -> Option<String> {
        self.words.first()?.split_once('=').map(|(_, value)| value.to_owned())
    }
}

/// The options of a device as clap has them, and no others.
pub fn command() -> Command {
    AttachOptions::augment_args(Command::new("attach").no_binary_name(true).disable_help_flag(true))
}

/// The argument that `key` is the name of.
fn argument<'a>(command: &'a Command, key: &str) -> Option<&'a Arg> {
    let mut arguments =
        command.get_arguments().filter(|argument| !argument.is_hide_set() || REMOVED.contains(&key));
    arguments.find(|argument| match argument.get_long() {
        Some(long) => long == key,
        None => argument.get_id() == key,
    })
}

/// The options that `words` make.
///
/// # Errors
/// The mistake, in one line.
pub fn options(words: impl Iterator<Item = String>) -> Result<AttachOptions, String> {
    let matches = command().try_get_matches_from(words);
    matches.and_then(|matches| AttachOptions::from_arg_matches(&matches)).map_err(|error| first_line(&error))
}

fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}

/// The keys of `text` in their order.
///
/// # Errors
/// All mistakes in single lines, in their order.
pub fn parse(text: &str) -> Result<Vec<Words>, Vec<Fault>> {
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
    // The keys of a broken text are a guess.
    if !faults.is_empty() {
        faults.sort_by_key(|fault| fault.line);
        return Err(faults);
    }
    let command = command();
    let mut keys = Vec::new();
    for (key, value) in table.get_ref() {
        let at = line(key.span().start);
        match words_of(&command, key.get_ref(), value.get_ref()) {
            Ok((id, words)) => keys.push(Words { key: key.get_ref().to_string(), line: at, id, words }),
            Err(text) => faults.push(Fault { line: at, text }),
        }
    }
    faults.sort_by_key(|fault| fault.line);
    keys.sort_by_key(|key| key.line);
    if faults.is_empty() { Ok(keys) } else { Err(faults) }
}

/// The argument that is meant, and its words.
fn words_of(command: &Command, key: &str, value: &DeValue) -> Result<(Id, Vec<String>), String> {
    let Some(argument) = argument(command, key) else { return Err(unknown(key)) };
    let words = match (argument.get_action(), value) {
        (ArgAction::SetTrue | ArgAction::SetFalse, value) => match value.as_bool() {
            Some(on) => on.then(|| format!("--{key}")).into_iter().collect(),
            None => return Err(format!("{key} is true or false")),
        },
        (ArgAction::Append, DeValue::Array(values)) => {
            values.iter().map(|value| word(key, value.get_ref())).collect::<Result<_, _>>()?
        }
        (_, value) => vec![word(key, value)?],
    };
    let image = (key != IMAGE).then(|| ANY_IMAGE.to_owned());
    options(image.into_iter().chain(words.iter().cloned()))?;
    Ok((argument.get_id().clone(), words))
}

/// The word of an option with a value.
fn word(key: &str, value: &DeValue) -> Result<String, String> {
    let text = match value {
        DeValue::String(text) => text.to_string(),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_err(|_| format!("{key}: the number is too large"))?
            .to_string(),
        DeValue::Float(number) => number.as_str().to_owned(),
        _ => {
            return Err(format!(
                "{key} is a text in quotes or a number, not a value of type {}",
                value.type_str()
            ));
        }
    };
    Ok(match key {
        // A word that begins with a dash is an option.
        IMAGE if text.starts_with('-') => format!("./{text}"),
        IMAGE => text,
        _ => format!("--{key}={text}"),
    })
}

fn unknown(key: &str) -> String {
    let similar = command().try_get_matches_from([format!("--{key}")]).err().and_then(|error| {
        match error.get(ContextKind::SuggestedArg) {
            Some(ContextValue::String(option)) => Some(option.trim_start_matches('-').to_owned()),
            _ => None,
        }
    });
    match similar {
        Some(similar) => format!("unknown key {key:?}; there is {similar}"),
        None => format!("unknown key {key:?}; the keys are image and the options of attach, without dashes"),
    }
}

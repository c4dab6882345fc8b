//! Generates command lines from clap's description of the commands, because random bytes seldom spell an option.

use std::sync::{LazyLock, Mutex, PoisonError};

use arbitrary::{Result, Unstructured};
use blkq_cli::commands::Cli;
use clap::{Arg, Command, CommandFactory, FromArgMatches};

/// Words that are a valid value for some option, and invalid for most.
const VALUES: [&str; 44] = [
    "",
    "0",
    "1",
    "-1",
    "128",
    "1024",
    "1025",
    "65536",
    "1.5",
    "1e3",
    "inf",
    "NaN",
    "+1",
    "4096",
    "512",
    "4K",
    "1M",
    "64MiB",
    "2GB",
    "9223372036854775807",
    "16E",
    "on",
    "off",
    "auto",
    "none",
    "ram:1M",
    "null:1T",
    "ram:0",
    "disk.img",
    "./null:1G",
    "/dev/ublkb0",
    "unix:/run/x",
    "unix:",
    "tcp:localhost:0",
    "tcp:[::1]:10809",
    "tcp:::1:1",
    "depth=64",
    "fault=none",
    "=",
    "a=b=c",
    "error=EIO,rate=1%",
    "delay=2ms,p99=20ms;seed=7",
    "NAME,SIZE",
    "+BACK-FILE,nonsense",
];
/// Maximum number of arguments of a line after the required ones.
const ARGUMENTS_MAX: usize = 10;

/// The commands of blkq. They are built once, because that takes much longer than parsing a line.
static COMMANDS: LazyLock<Mutex<Command>> = LazyLock::new(|| {
    let mut command = Cli::command();
    command.build();
    Mutex::new(command)
});

/// Parses `words` as `blkq` does, and formats the result; `None` if blkq rejects them or prints help.
pub fn parse(words: &[String]) -> Option<String> {
    let mut command = COMMANDS.lock().unwrap_or_else(PoisonError::into_inner);
    let line = std::iter::once("blkq").chain(words.iter().map(String::as_str));
    let matches = command.try_get_matches_from_mut(line).inspect_err(|error| drop(error.to_string())).ok()?;
    Cli::from_arg_matches(&matches).ok().map(|cli| format!("{cli:?}"))
}

/// Chooses a value for `argument`, usually one that its description in clap lists, if it lists any.
fn value(u: &mut Unstructured<'_>, argument: &Arg) -> Result<String> {
    let possible = argument.get_possible_values();
    Ok(match u.int_in_range(0..=7)? {
        0..=4 if !possible.is_empty() => u.choose(&possible)?.get_name().to_owned(),
        0..=4 => (*u.choose(&VALUES)?).to_owned(),
        5 => u.arbitrary::<u32>()?.to_string(),
        _ => u.arbitrary::<&str>()?.chars().filter(|c| *c != '\0').take(40).collect(),
    })
}

/// Turns `value` into a word that is neither an option nor `--`.
fn positional(value: &str) -> String {
    value.trim_start_matches('-').to_owned()
}

/// Formats `argument` in two ways with the same meaning. An argument with a value becomes one word (`--depth=4`) and two
/// words (`--depth 4`), and an argument without a value becomes its long and its short name.
fn spelled(u: &mut Unstructured<'_>, argument: &Arg) -> Result<[Vec<String>; 2]> {
    let (long, short) = (argument.get_long(), argument.get_short());
    if !argument.get_action().takes_values() {
        let mut names: Vec<String> = long.iter().map(|long| format!("--{long}")).collect();
        names.extend(short.map(|short| format!("-{short}")));
        let last = names.last().cloned().unwrap_or_default();
        return Ok([names.into_iter().take(1).collect(), vec![last]]);
    }
    let value = value(u, argument)?;
    let Some(long) = long else {
        let word = positional(&value);
        return Ok([vec![word.clone()], vec![word]]);
    };
    let joined = vec![format!("--{long}={value}")];
    // A value that is empty or looks like an option must be in the same word as its option.
    if argument.is_require_equals_set() || value.is_empty() || value.starts_with('-') {
        return Ok([joined.clone(), joined]);
    }
    let name = short.map_or(format!("--{long}"), |short| format!("-{short}"));
    Ok([joined, vec![name, value]])
}

/// Chooses the words of a line for the command `name`, or for any command, in two spellings with the same meaning.
pub fn line(u: &mut Unstructured<'_>, name: Option<&str>) -> Result<[Vec<String>; 2]> {
    let commands = COMMANDS.lock().unwrap_or_else(PoisonError::into_inner);
    let all: Vec<&Command> =
        commands.get_subcommands().filter(|command| command.get_name() != "help").collect();
    let command = match name.and_then(|name| all.iter().find(|command| command.get_name() == name)) {
        Some(command) => command,
        None => *u.choose(&all)?,
    };
    let arguments: Vec<&Arg> = command.get_arguments().collect();
    let mut lines = [vec![command.get_name().to_owned()], vec![command.get_name().to_owned()]];
    // Usually begins with the required arguments.
    for argument in arguments.iter().filter(|argument| argument.is_required_set()) {
        if u.ratio(15, 16)? {
            let value = positional(&value(u, argument)?);
            lines.iter_mut().for_each(|line| line.push(value.clone()));
        }
    }
    for _ in 0..u.int_in_range(0..=ARGUMENTS_MAX)? {
        let argument = *u.choose(&arguments)?;
        let ways = spelled(u, argument)?;
        lines.iter_mut().zip(ways).for_each(|(line, words)| line.extend(words));
    }
    Ok(lines)
}

//! `blkq set`: changes settings of a device in use.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::process::ExitCode;

use blkq_drivers::{DriverSpec, check_writable};
use blkq_protocol::control::{Dialogue, Request, ask};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::group::open_for_daemon;
use blkq_protocol::options::{Key, NO_GROUP, Row, parse_group_name};
use blkq_protocol::state::StateDir;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};

use crate::devices::{device_names, device_parser, named};
use crate::output::for_each;
use crate::usage::exit;

#[derive(clap::Args, Debug)]
#[command(
    override_usage = "blkq set <DEVICE> <KEY=VALUE>...\n       blkq set --all <KEY=VALUE>...",
    after_help = after_help()
)]
pub struct Args {
    /// The device, by its name, image, URI or node in /dev
    #[arg(value_parser = device_parser(), add = device_names(), value_name = "DEVICE")]
    name: String,
    /// The settings, which are changed in this order until one fails
    #[arg(required_unless_present = "all", value_name = "KEY=VALUE", add = setting_keys(), value_parser = parse_setting)]
    settings: Vec<(String, String)>,
    /// Change the settings of all devices
    ///
    /// Devices that do not have the setting are reported, and the other devices are changed.
    #[arg(long)]
    all: bool,
}

fn after_help() -> String {
    let line = |row: &Row| {
        let of = row.scope.text();
        let of = if of.is_empty() { String::new() } else { format!("  (only {of})") };
        format!("  {:<18}{}{of}\n", row.name, row.values.text())
    };
    let settings: String = Row::sorted_by_name().into_iter().map(line).collect();
    format!(
        "\
No request in flight is lost. New I/O waits while the image, its mode or the queues change.
`blkq show DEVICE` lists the settings. Each corresponds to the option of `blkq attach` with its
name; merge=off, for example, corresponds to --no-merge.

Settings and their values:
{settings}
Examples:
  blkq set disk.img direct-io=on
  blkq set disk.img scheduler=mq-deadline depth=64
  blkq set disk.img read-only=on
  blkq set disk.img on-error=hold-enospc
  blkq set disk.img limit=read-iops=500,bps=100M
  blkq set disk.img hang-warning=5      # seconds; 0 turns it off
  blkq set disk.img without=receive-backoff
  blkq set disk.img group=gold          # share the limits of a group; group=none leaves it
  blkq set --all hang-warning=10
  blkq set disk.img fault=none          # for a device attached with --fault"
    )
}

/// Completes the keys of settings, with the `=`.
fn setting_keys() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let current = current.to_string_lossy();
        let keys = Row::sorted_by_name().into_iter().map(|row| format!("{}=", row.name));
        keys.filter(|key| key.starts_with(&*current)).map(CompletionCandidate::new).collect()
    })
}

/// Parses `KEY=VALUE`. Neither part may be empty.
pub fn parse_setting(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() && !value.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("a setting must be KEY=VALUE, such as depth=64".to_owned()),
    }
}

/// The first change that is refused ends the command, or with `--all` the changes of that device; the
/// changes before it stay.
pub fn run(args: Args) -> Outcome<ExitCode> {
    let dir = StateDir::locate()?;
    let Args { name: word, mut settings, all } = args;
    if all {
        // With --all, the first word is a setting and not a device.
        settings.insert(0, parse_setting(&word).unwrap_or_else(|rule| exit::<Args>(rule)));
        return for_each(&dir.names()?, |name| set(&dir, name, &settings, name));
    }
    set(&dir, &named(&dir, &word)?, &settings, &word).map(|()| ExitCode::SUCCESS)
}

/// `word` is the name by which the user called the device.
fn set(dir: &StateDir, name: &str, settings: &[(String, String)], word: &str) -> Outcome {
    check_image_writable(dir, name, settings)
        .map_err(|e| e.during(format_args!("set {word}: read-only=off")))?;
    let is_group = |(key, value): &(String, String)| key == Key::Group.row().name && value != NO_GROUP;
    let changed =
        settings.chunk_by(|one, next| !is_group(one) && !is_group(next)).try_for_each(|some| match some {
            [join @ (_, group)] if is_group(join) => join_group(dir, name, group),
            _ => ask::<()>(dir, name, &Request::Set { settings: some.to_vec() }),
        });
    changed.map_err(|e| e.during(format_args!("set {word}")))
}

/// Checks that the image may be written to if `settings` make the device writable. The daemon is confined and cannot
/// see whether the kernel uses the image.
pub(super) fn check_image_writable(dir: &StateDir, name: &str, settings: &[(String, String)]) -> Outcome {
    if !settings.iter().any(|(key, value)| key == Key::ReadOnly.row().name && value == "off") {
        return Ok(());
    }
    let Some(record) = dir.read_state(name).and_then(|state| state.attach_options) else { return Ok(()) };
    let options = record.read()?;
    let DriverSpec::Image(path) = &options.image else { return Ok(()) };
    if options.shared {
        return Ok(());
    }
    let end = options.size_limit.map_or(u64::MAX, |bytes| options.offset.saturating_add(bytes));
    Ok(check_writable(path, &(options.offset..end))?)
}

/// Sends the file of the group, which a confined daemon must not open.
fn join_group(dir: &StateDir, name: &str, group: &str) -> Outcome {
    let during = |e: Failure| e.during(format_args!("group={group}"));
    let group = parse_group_name(group).map_err(|rule| during(Failure::new(rule)))?;
    let file = open_for_daemon(dir, &group).map_err(during)?;
    let dialogue = Dialogue::begin(dir, name, &Request::JoinGroup { group: group.clone() })?;
    dialogue.step(&[file.as_fd()])?.map_err(during)
}

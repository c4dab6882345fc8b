use std::path::PathBuf;

use blkq::units::parse_bytes;
use blkq_protocol::control::died;
use blkq_protocol::failure::{Outcome, print_error};
use blkq_protocol::info::{Backing, DeviceInfo, FileId, is_behind};
use blkq_protocol::state::{Dead, Fate, Found, StateDir};
use serde_json::{Map, Value};

use crate::devices::{Entry, all, not_attached};
use crate::output::columns::{self, Cell, Column};
use crate::output::{print, print_json, render};

#[derive(clap::Args, Debug)]
#[command(after_help = after_help())]
pub struct Args {
    /// Print these columns, separated by commas; with a + in front, in addition to the default ones
    #[arg(long, short, visible_short_alias = 'O', value_name = "COLUMNS")]
    output: Option<String>,
    /// Do not print the headings of the columns
    #[arg(long)]
    no_headings: bool,
    /// List only devices of this image
    ///
    /// The image is the same file on the same file system, whatever its name.
    #[arg(long, value_name = "FILE")]
    backing: Option<PathBuf>,
    /// List only devices that begin at this offset in the image of --backing
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, requires = "backing")]
    offset: Option<u64>,
    /// List also the devices of the configuration files in /etc/blkq that are not attached
    #[arg(long)]
    configured: bool,
    /// Remove the stale files of daemons that were killed or crashed, before the devices are listed
    ///
    /// Each removal is reported on standard error. Orphans stay.
    #[arg(long)]
    clean: bool,
    /// Print one JSON array of objects
    ///
    /// Each object is a device as `blkq show --json` prints it, or contains the columns of --output. If a
    /// daemon does not answer, the object contains only "name" and "error". For a dead device or an orphan,
    /// it also contains "state", "recoverable", "pid", "image", "exports", "log" and "log_lines". For a configured device,
    /// it contains "name", "state", "image" and "config".
    #[arg(long, conflicts_with = "no_headings")]
    json: bool,
}

fn after_help() -> String {
    format!(
        "\
A device whose daemon was killed or crashed has the mode `dead`: `blkq show` prints why, `blkq
recover` serves it again with its options, and the next `blkq attach` with this name, `blkq detach`
or --clean removes its stale files. A ublk device outlives its daemon and then has the mode
`orphan`: run `blkq recover` or `blkq detach`. The last line names the devices that can be
recovered. With --configured, a device that is not attached has the mode `configured`.

--output also accepts the columns of `blkq losetup`.

Columns:
{}
Examples:
  blkq list
  blkq list -o +PID,UPTIME
  blkq list --backing disk.img -o NAME --no-headings
  blkq list --json -o NAME,SIZE,PID
  blkq list --json | jq -r '.[].name'",
        columns::help(&columns::LIST)
    )
}

pub fn run(args: Args) -> Outcome {
    let output = args.output.as_deref();
    let columns = columns::choose(output, columns::LIST_DEFAULT, [&columns::LIST, &columns::LOSETUP])?;
    let dir = StateDir::locate()?;
    if args.clean {
        clean(&dir)?;
    }
    let mut entries = all(&dir)?;
    if args.configured {
        entries.extend(not_attached(&entries)?);
    }
    entries.retain(|entry| args.matches(entry));
    match (args.json, output) {
        (true, None) => return print_json(&entries),
        (true, Some(_)) => return print_json(&objects(&columns, &entries)),
        (false, _) => print(&table(&columns, &entries, !args.no_headings))?,
    }
    if output.is_none() && !args.no_headings { print(&recoverable(&entries)) } else { Ok(()) }
}

impl Args {
    /// An entry that may match, but whose image is unknown, is reported on standard error and omitted.
    fn matches(&self, entry: &Entry) -> bool {
        let Some(path) = &self.backing else { return true };
        entry.failure().iter().for_each(print_error);
        match entry {
            Entry::Device(info) => is_behind(path, info) && begins_at(info, self.offset),
            Entry::Configured(device) => {
                let file = FileId::of(path);
                file.is_some() && self.offset.is_none() && FileId::of(&device.image) == file
            }
            Entry::Silent { .. } | Entry::Remains(_) => false,
        }
    }
}

fn recoverable(entries: &[Entry]) -> String {
    let is_recoverable = |entry: &&Entry| matches!(entry, Entry::Remains(remains) if remains.recoverable);
    let names: Vec<&str> = entries.iter().filter(is_recoverable).map(Entry::name).collect();
    match &names[..] {
        [] => String::new(),
        [name] => format!("1 device can be recovered: run `blkq recover {name}`\n"),
        names => {
            let (count, names) = (names.len(), names.join(", "));
            format!("{count} devices can be recovered ({names}): run `blkq recover --all`\n")
        }
    }
}

/// Removes the stale files of dead daemons, except those of orphans.
fn clean(dir: &StateDir) -> Outcome {
    for name in dir.names()? {
        dir.wait_for_dying(&name);
        let is_orphan = matches!(dir.inspect(&name)?, Found::Remains(it) if it.state == Fate::Orphan);
        if !is_orphan && let Dead::Cleared(last_line) = dir.clear_dead(&name)? {
            print_error(&died(&name, &last_line));
        }
    }
    Ok(())
}

pub fn begins_at(info: &DeviceInfo, offset: Option<u64>) -> bool {
    offset.is_none() || Backing::of(info).map(|backing| backing.window.offset) == offset
}

/// `None` if the value is unknown, because no daemon describes the device.
fn cell(column: &Column, entry: &Entry) -> Option<Cell> {
    let text = match (entry, column.name) {
        (Entry::Device(info), _) => return Some((column.cell)(info)),
        (_, "NAME") => entry.name().to_owned(),
        (Entry::Remains(remains), "MODE") => remains.state.name().to_owned(),
        (Entry::Remains(remains), "IMAGE") => remains.image.clone(),
        (Entry::Remains(remains), "EXPORT") => remains.exports.join(" "),
        (Entry::Configured(device), "MODE") => device.state.to_owned(),
        (Entry::Configured(device), "IMAGE") => device.image.clone(),
        _ => return None,
    };
    Some(Cell::Text(text))
}

fn table(columns: &[&Column], entries: &[Entry], headings: bool) -> String {
    let row = |entry: &Entry| -> Vec<String> {
        let cell = |column: &&Column| match (entry, column.name) {
            (Entry::Silent { error, .. }, "EXPORT") => format!("({error})"),
            _ => cell(column, entry).map_or_else(|| "-".to_owned(), |cell| cell.text()),
        };
        columns.iter().map(cell).collect()
    };
    let heads = || columns.iter().map(|column| column.name.to_owned()).collect();
    let heads = (headings && !entries.is_empty()).then(heads);
    let rows: Vec<Vec<String>> = heads.into_iter().chain(entries.iter().map(row)).collect();
    render(columns.iter().map(|column| column.align).collect::<Vec<_>>(), &rows)
}

/// An entry without a running daemon also has the key `error`.
fn objects(columns: &[&Column], entries: &[Entry]) -> Vec<Map<String, Value>> {
    let object = |entry: &Entry| {
        let json = |column: &Column| cell(column, entry).map_or(Value::Null, |cell| cell.json());
        let cells = columns.iter().map(|column| (column.name.to_lowercase(), json(column)));
        let error = match entry {
            Entry::Device(_) | Entry::Configured(_) => None,
            Entry::Remains(remains) => Some(remains.error.as_str()),
            Entry::Silent { error, .. } => Some(error.as_str()),
        };
        cells.chain(error.map(|error| ("error".to_owned(), error.into()))).collect()
    };
    entries.iter().map(object).collect()
}

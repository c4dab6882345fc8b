//! `blkq losetup`: accepts the command line of losetup(8) of util-linux, and acts on blkq's devices.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use blkq::text::{escape, escaped, is_control};
use blkq::units::parse_bytes;
use blkq_drivers::DriverSpec;
use blkq_drivers::r#loop::DirectIo;
use blkq_protocol::control::{NewSize, Request, ask};
use blkq_protocol::failure::{Failure, Outcome, print_error};
use blkq_protocol::info::{Backing, DeviceInfo, is_behind, shown_path};
use blkq_protocol::options::{AttachOptions, SectorSize, Setting};
use blkq_protocol::state::StateDir;
use clap::Command;

use super::attach::{self, attach};
use super::list::begins_at;
use super::{detach, resize};

use crate::devices::{Entry, all, find, name_of, word_of};
use crate::output::columns::{self, Cell, Column, device_word};
use crate::output::{for_each, print, render_apart, warn};
use crate::usage;

/// The exit code of `blkq losetup DEVICE` if the device does not answer.
const EXIT_UNKNOWN: u8 = 2;

/// The options have the names that losetup(8) gives them.
#[derive(clap::Args, Debug)]
#[command(
    version,
    after_help = after_help(),
    override_usage = "\
blkq losetup [-l] [-a | DEVICE]
       blkq losetup -j FILE [-o OFFSET]
       blkq losetup [-o OFFSET] [--sizelimit SIZE] [-b SIZE] [--loop-ref NAME] [-LPr]
                    [--direct-io[=on|off]] [--show] -f | DEVICE FILE
       blkq losetup -c DEVICE
       blkq losetup --direct-io[=on|off] DEVICE
       blkq losetup -d DEVICE...
       blkq losetup -D"
)]
#[command(group = clap::ArgGroup::new("action").multiple(false))]
pub struct Args {
    /// List all devices, one per line
    #[arg(short, long, group = "action")]
    all: bool,
    /// Detach the devices; refuse a device in use, instead of detaching it later
    #[arg(short, long, value_name = "DEVICE...", group = "action")]
    detach: Option<OsString>,
    /// Detach all devices
    #[arg(short = 'D', long, group = "action")]
    detach_all: bool,
    /// Attach FILE as a new device, named after the file
    #[arg(short, long, group = "action")]
    find: bool,
    /// Set the size of the device to that of its file
    #[arg(short = 'c', long, value_name = "DEVICE", group = "action")]
    set_capacity: Option<OsString>,
    /// List the devices of FILE, also if another path to it was attached
    #[arg(short = 'j', long, value_name = "FILE", group = "action")]
    associated: Option<PathBuf>,
    /// Fail: a device is removed when it is detached
    #[arg(long, value_name = "DEVICE...", group = "action")]
    remove: Option<OsString>,
    /// Reuse the device that already serves these bytes of the file, if there is one
    #[arg(short = 'L', long, requires = "find")]
    nooverlap: bool,

    /// Begin the device at this offset in the file; with -j, list only devices that begin there
    #[arg(short, long, value_name = "OFFSET", value_parser = parse_bytes)]
    offset: Option<u64>,
    /// Serve only this many bytes of the file; 0 serves all
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    sizelimit: Option<u64>,
    /// Set the logical block size: 512, 1024, 2048 or 4096
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = parse_bytes)]
    sector_size: Option<u64>,
    /// Scan the block device for partitions; the kernel of an NBD client decides for itself
    #[arg(short = 'P', long)]
    partscan: bool,
    /// Open the file read-only and refuse writes
    #[arg(short, long)]
    read_only: bool,
    /// Bypass the page cache, for a new or an existing device [default: off]
    #[arg(long, value_name = "on|off", value_parser = ["on", "off"], num_args = 0..=1, require_equals = true, default_missing_value = "on")]
    direct_io: Option<String>,
    /// Name the device that -f attaches
    #[arg(long, value_name = "NAME")]
    loop_ref: Option<String>,
    /// Print the device that -f attached
    #[arg(long)]
    show: bool,
    /// Print on standard error what was attached or detached
    #[arg(short, long)]
    verbose: bool,

    /// Print a table of the devices (the default)
    #[arg(short, long)]
    list: bool,
    /// Print these columns, separated by commas; with a + in front, in addition to the default ones
    #[arg(short = 'O', long, value_name = "COLUMNS")]
    output: Option<String>,
    /// Print all columns
    #[arg(long, conflicts_with = "output")]
    output_all: bool,
    /// Do not print the headings of the columns
    #[arg(short, long)]
    noheadings: bool,
    /// Separate the columns by one space, and print spaces in them as \x20
    #[arg(long, conflicts_with = "json")]
    raw: bool,
    /// Print the table as JSON
    #[arg(short = 'J', long)]
    json: bool,

    /// A device, a file to attach with -f, or both; after -d DEVICE, more devices
    #[arg(value_name = "DEVICE|FILE")]
    words: Vec<OsString>,
}

fn after_help() -> String {
    format!(
        "\
DEVICE is the word that --show prints: the node in /dev, or the URI of a device without a node. The
name of the device (the column REF) and its image are accepted, too. Sizes are bytes, or have a
unit: K, M, G, T, P, E and KiB, MiB, ... are powers of 1024, KB, MB, ... are powers of 1000.

--output also accepts the columns of `blkq list`.

Columns:
{}
Exit status:
  0  success
  1  refused or failed; for `blkq losetup DEVICE`: there is no such device
  2  wrong usage; for `blkq losetup DEVICE`: the device does not answer

Examples:
  dev=$(blkq losetup -f --show disk.img)
  blkq losetup -l -O NAME,BACK-FILE,EXPORT
  blkq losetup -d \"$dev\"",
        columns::help(&columns::LOSETUP)
    )
}

enum Action<'a> {
    /// Lists all devices, or those of a file.
    List(Option<&'a Path>),
    Show(&'a OsStr),
    Attach {
        device: Option<&'a OsStr>,
        file: &'a OsStr,
    },
    FindUnused,
    Change(&'a OsStr),
    SetCapacity(&'a OsStr),
    Detach(Vec<&'a OsStr>),
    DetachAll,
    Remove,
}

pub fn run(args: Args) -> Outcome<ExitCode> {
    let action = args.action().and_then(|action| args.check_options(&action).map(|()| action));
    args.act(action.unwrap_or_else(|message| usage::exit::<Args>(message))).map_err(|e| failed(&e))
}

impl Args {
    fn action(&self) -> Result<Action<'_>, String> {
        let words: Vec<&OsStr> = self.words.iter().map(OsString::as_os_str).collect();
        if let Some(device) = &self.detach {
            return Ok(Action::Detach([&[device.as_os_str()], &words[..]].concat()));
        }
        if self.remove.is_some() {
            return Ok(Action::Remove);
        }
        let listed = self.associated.as_deref().map(|file| Action::List(Some(file)));
        let sized = self.set_capacity.as_deref().map(Action::SetCapacity);
        let all = self.all.then_some(Action::List(None));
        let detached = self.detach_all.then_some(Action::DetachAll);
        match (listed.or(sized).or(all).or(detached), &words[..]) {
            (Some(action), []) => Ok(action),
            (None, []) if self.find => Ok(Action::FindUnused),
            (None, [file]) if self.find => Ok(Action::Attach { device: None, file }),
            (None, []) => Ok(Action::List(None)),
            (None, [device]) if self.sector_size.is_some() || self.direct_io.is_some() => {
                Ok(Action::Change(device))
            }
            (None, [device]) => Ok(Action::Show(device)),
            (None, [device, file]) if !self.find => Ok(Action::Attach { device: Some(device), file }),
            (_, words) => Err(format!("unexpected argument {:?}", words[words.len() - 1])),
        }
    }

    fn check_options(&self, action: &Action) -> Result<(), String> {
        let attach = matches!(action, Action::Attach { .. } | Action::FindUnused);
        let change = matches!(action, Action::Change(_));
        for (given, option, fits) in [
            (self.offset.is_some(), "--offset", attach || matches!(action, Action::List(Some(_)))),
            (self.sizelimit.is_some(), "--sizelimit", attach),
            (self.sector_size.is_some(), "--sector-size", attach || change),
            (self.partscan, "--partscan", attach),
            (self.read_only, "--read-only", attach),
            (self.direct_io.is_some(), "--direct-io", attach || change),
            (self.loop_ref.is_some(), "--loop-ref", attach),
        ] {
            if given && !fits {
                return Err(format!("{option} is only for attaching a file; add -f FILE, or DEVICE FILE"));
            }
        }
        Ok(())
    }

    fn act(&self, action: Action) -> Outcome<ExitCode> {
        let dir = StateDir::locate()?;
        match action {
            Action::List(file) => self.list(&dir, file),
            Action::Show(device) => self.show(&dir, device),
            Action::Attach { device, file } => self.attach(device, file),
            Action::FindUnused => {
                Err(Failure::new("-f needs a file, because there are no unused devices; use -f --show FILE"))
            }
            Action::Change(device) => self.change(&dir, device),
            Action::SetCapacity(device) => {
                let name = existing(&dir, device)?.name;
                let resized = resize::resize(&dir, &name, NewSize::OfImage, false).map(|_| ExitCode::SUCCESS);
                resized.map_err(|e| {
                    // losetup lacks the option of `blkq resize`.
                    let command = format!("run `blkq resize --force {name}`");
                    let why = e.to_string().replace("use --force", &command);
                    Failure::new(why).during(format_args!("set capacity of {name}"))
                })
            }
            Action::Detach(devices) => self.detach(devices, |device| {
                let name = name_of(&dir, &word_of(device)?)?;
                detach::detach(&dir, &name.ok_or_else(|| no_such_device(device))?, false).map(drop)
            }),
            Action::DetachAll => {
                self.detach(dir.names()?, |name| detach::detach(&dir, name, false).map(drop))
            }
            Action::Remove => Err(Failure::new(
                "--remove has nothing to remove, because nothing remains of a detached device; use -d to detach",
            )),
        }
    }

    /// Prints the matching devices: as a table, or as lines of text if only -a or -j is given.
    fn list(&self, dir: &StateDir, file: Option<&Path>) -> Outcome<ExitCode> {
        let is_of_file =
            |info: &DeviceInfo| file.is_none_or(|file| is_behind(file, info) && begins_at(info, self.offset));
        let matching = |entry: Entry| {
            entry.failure().iter().for_each(print_error);
            if let Entry::Device(info) = entry { Some(*info).filter(is_of_file) } else { None }
        };
        let devices: Vec<_> = all(dir)?.into_iter().filter_map(matching).collect();
        let plain = self.all || self.associated.is_some();
        self.print(&devices, !plain).map(|()| ExitCode::SUCCESS)
    }

    fn show(&self, dir: &StateDir, device: &OsStr) -> Outcome<ExitCode> {
        match word_of(device).and_then(|word| find(dir, &word)) {
            Ok(Some(info)) => self.print(&[info], false).map(|()| ExitCode::SUCCESS),
            Ok(None) => Err(no_such_device(device)),
            Err(failure) => {
                print_error(&failure.during("losetup"));
                Ok(ExitCode::from(EXIT_UNKNOWN))
            }
        }
    }

    fn print(&self, devices: &[DeviceInfo], is_table: bool) -> Outcome {
        let asked = self.list || self.output.is_some() || self.output_all || self.noheadings;
        if !(is_table || asked || self.json || self.raw) {
            return print(&lines(devices));
        }
        let columns = match self.output.as_deref() {
            _ if self.output_all => columns::LOSETUP.iter().collect(),
            text => columns::choose(text, columns::LOSETUP_DEFAULT, [&columns::LOSETUP, &columns::LIST])?,
        };
        print(&match (self.json, self.raw) {
            (true, _) => json(&columns, devices),
            (_, true) => raw(&columns, devices, !self.noheadings),
            _ => table(&columns, devices, !self.noheadings),
        })
    }

    fn attach(&self, device: Option<&OsStr>, file: &OsStr) -> Outcome<ExitCode> {
        attach(&self.attach_options(device, file)?, self.nooverlap)?.report(|info| {
            let warnings = info.warnings.iter().map(|warning| translated(warning));
            warn(&info.name, &warnings.collect::<Vec<_>>());
            if self.verbose {
                note(format_args!("{}: {} as {}", device_word(info), info.image, info.exports.join(" ")));
            }
            if self.show && device.is_none() { print(&format!("{}\n", device_word(info))) } else { Ok(()) }
        })?;
        Ok(ExitCode::SUCCESS)
    }

    fn attach_options(&self, device: Option<&OsStr>, file: &OsStr) -> Outcome<AttachOptions> {
        let mut options = AttachOptions::new(DriverSpec::Image(file.into()));
        options.name = self.name(device)?;
        options.offset = self.offset.unwrap_or(0);
        options.size_limit = self.sizelimit.filter(|limit| *limit > 0);
        if let Some(size) = self.sector_size {
            options.sector_size = sector_size(size)?;
        }
        options.direct_io = self.direct_io().unwrap_or(DirectIo::Off);
        options.whole_sectors = true;
        options.read_only = self.read_only;
        options.partscan = Some(self.partscan).into();
        options.check().map(|()| options)
    }

    /// The name that the user has chosen for the device, as `DEVICE FILE` or with --loop-ref.
    fn name(&self, device: Option<&OsStr>) -> Outcome<Option<String>> {
        let Some(device) = device.map(OsStr::to_string_lossy) else { return Ok(self.loop_ref.clone()) };
        if device.contains('/') {
            let why = "cannot be chosen, because the kernel numbers the nodes in /dev";
            return Err(Failure::new(format!("{device} {why}; give a name without slashes, or use -f")));
        }
        if self.loop_ref.is_some() {
            let why = format!("--loop-ref and {device} both name the device; omit one of them");
            return Err(Failure::new(why));
        }
        Ok(Some(device.into_owned()))
    }

    fn direct_io(&self) -> Option<DirectIo> {
        self.direct_io.as_deref().map(|mode| if mode == "on" { DirectIo::On } else { DirectIo::Off })
    }

    fn change(&self, dir: &StateDir, device: &OsStr) -> Outcome<ExitCode> {
        let info = existing(dir, device)?;
        let failed = |e: Failure| e.during(&info.name);
        if let Some(size) = self.sector_size {
            sector_size(size).map_err(failed)?;
            if size != u64::from(info.sector_size) {
                return Err(failed(Failure::new(format!(
                    "the sector size of an attached device cannot change from {} to {size}; detach the device and attach \
                     the file with -b {size}",
                    info.sector_size
                ))));
            }
        }
        if let Some(mode) = self.direct_io() {
            let settings = vec![Setting::DirectIo(mode).to_text()];
            ask::<()>(dir, &info.name, &Request::Set { settings }).map_err(failed)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn detach<T: AsRef<OsStr>>(&self, devices: Vec<T>, detach: impl Fn(&T) -> Outcome) -> Outcome<ExitCode> {
        for_each(&devices, |device| {
            detach(device).map_err(|e| failed(&e))?;
            if self.verbose {
                note(format_args!("{}: detached", device.as_ref().display()));
            }
            Ok(())
        })
    }
}

fn failed(failure: &Failure) -> Failure {
    Failure::new(translated(&failure.to_string())).during("losetup")
}

fn note(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{}", escaped(&text.to_string()));
}

fn sector_size(bytes: u64) -> Outcome<SectorSize> {
    let wrong = || Failure::new(format!("the sector size must be 512, 1024, 2048 or 4096, not {bytes}"));
    SectorSize::of(bytes).ok_or_else(wrong)
}

fn existing(dir: &StateDir, device: &OsStr) -> Outcome<DeviceInfo> {
    find(dir, &word_of(device)?)?.ok_or_else(|| no_such_device(device))
}

fn no_such_device(device: &OsStr) -> Failure {
    let device = device.to_string_lossy();
    let hint = if device.starts_with("/dev/loop") {
        "devices of the kernel's loop driver need losetup(8)"
    } else {
        "`blkq losetup -l` lists the devices"
    };
    Failure::new(format!("{device}: no such device; {hint}"))
}

/// The older lines of text of losetup(8).
fn lines(devices: &[DeviceInfo]) -> String {
    devices.iter().map(line).collect()
}

fn line(info: &DeviceInfo) -> String {
    let (device, path) = (device_word(info), escaped(&shown_path(info)));
    let Some(Backing { file, window }) = Backing::of(info) else {
        return format!("{device}: []: ({path})\n");
    };
    let number = libc::makedev(file.device.0, file.device.1);
    let offset = if window.offset > 0 { format!(", offset {}", window.offset) } else { String::new() };
    let limit = window.size_limit.map_or(String::new(), |limit| format!(", sizelimit {limit}"));
    format!("{device}: [{number:04}]:{} ({path}){offset}{limit}\n", file.inode)
}

/// The headings and a row for each device; empty if there are no devices.
fn rows(columns: &[&Column], devices: &[DeviceInfo], text: impl Fn(Cell) -> String) -> Vec<Vec<String>> {
    let row = |info: &DeviceInfo| columns.iter().map(|column| text((column.cell)(info))).collect();
    let headings = columns.iter().map(|column| column.name.to_owned()).collect();
    let rows = std::iter::once(headings).chain(devices.iter().map(row));
    if devices.is_empty() { Vec::new() } else { rows.collect() }
}

/// A table as libsmartcols prints it.
fn table(columns: &[&Column], devices: &[DeviceInfo], headings: bool) -> String {
    let rows = rows(columns, devices, |cell| cell.text());
    let table = render_apart(1, columns.iter().map(|column| column.align).collect::<Vec<_>>(), &rows);
    // losetup(8) makes columns as wide as their headings even if it does not print the headings.
    table.split_inclusive('\n').skip(usize::from(!headings)).collect()
}

/// Columns separated by one space, with white space in cells escaped.
fn raw(columns: &[&Column], devices: &[DeviceInfo], headings: bool) -> String {
    let is_special = |c: char| c.is_whitespace() || is_control(c) || c == '\\';
    let rows = rows(columns, devices, |cell| escape(cell.text().trim(), is_special));
    rows.iter().skip(usize::from(!headings)).map(|row| row.join(" ") + "\n").collect()
}

/// JSON as libsmartcols prints it, white space included, so that the output can be compared with that of losetup(8) as
/// text.
fn json(columns: &[&Column], devices: &[DeviceInfo]) -> String {
    let rows = rows(columns, devices, |cell| cell.json().to_string());
    let objects = rows.iter().skip(1).map(|row| {
        let member =
            |(column, cell): (&&Column, _)| format!("         \"{}\": {cell}", column.name.to_lowercase());
        format!("      {{\n{}\n      }}", columns.iter().zip(row).map(member).collect::<Vec<_>>().join(",\n"))
    });
    format!("{{\n   \"loopdevices\": [\n{}\n   ]\n}}\n", objects.collect::<Vec<_>>().join(",\n"))
}

// Hints of other commands are translated into options that a user of `blkq losetup` can type.
const RENAMED: [(&str, &str); 2] = [("size-limit", "--sizelimit"), ("name", "--loop-ref")];

/// Replaces each option in `text` that losetup lacks: by its name in losetup, or by
/// `blkq attach OPTION` or `blkq detach OPTION`. Text in backquotes is a complete command and is copied unchanged.
fn translated(text: &str) -> String {
    let quoted = text.split('`').enumerate();
    let parts = quoted.map(|(at, part)| if at % 2 == 0 { options(part) } else { part.to_owned() });
    parts.collect::<Vec<_>>().join("`")
}

fn options(text: &str) -> String {
    let mut translated = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("--") {
        let (before, option) = rest.split_at(at);
        let end = option[2..].find(|c: char| !c.is_ascii_lowercase() && c != '-');
        let (option, after) = option.split_at(end.map_or(option.len(), |end| end + 2));
        translated.push_str(before);
        push(&mut translated, option);
        rest = after;
    }
    translated + rest
}

/// Appends `option` to `text`, translated. If `text` ends with `attach with ` or `detach with `, `blkq ` is
/// inserted before it instead.
fn push(text: &mut String, option: &str) {
    let name = &option[2..];
    if let Some((_, renamed)) = RENAMED.iter().find(|(renamed, _)| *renamed == name) {
        text.push_str(renamed);
        return;
    }
    let commands = [("attach", has::<attach::Args>(name)), ("detach", has::<detach::Args>(name))];
    if let Some((command, _)) = commands.into_iter().find(|(_, is_option)| *is_option && !has::<Args>(name)) {
        match text.strip_suffix(&format!("{command} with ")).map(str::len) {
            Some(before) => text.insert_str(before, "blkq "),
            None => text.push_str(&format!("blkq {command} ")),
        }
    }
    text.push_str(option);
}

fn has<A: clap::Args>(option: &str) -> bool {
    A::augment_args(Command::new("blkq")).get_arguments().any(|argument| argument.get_long() == Some(option))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::commands::Cli;

    #[test]
    fn every_option_of_a_hint_can_be_typed() {
        let blkq = Cli::command();
        let hint = translated;
        assert_eq!(hint("use --export nbd"), "use blkq attach --export nbd");
        assert_eq!(hint("use --offset and --size-limit"), "use --offset and --sizelimit");
        assert_eq!(hint("or use --force"), "or use blkq detach --force");
        assert_eq!(
            hint("no; attach with --shared on both sides"),
            "no; blkq attach with --shared on both sides"
        );
        assert_eq!(
            hint("`blkq attach x --create SIZE`; --shared"),
            "`blkq attach x --create SIZE`; blkq attach --shared"
        );
        assert_eq!(hint("omit --read-only, --partscan"), "omit --read-only, --partscan");
        assert_eq!(hint("a -- b"), "a -- b");
        let losetup = blkq.find_subcommand("losetup").unwrap();
        for option in
            blkq.find_subcommand("attach").unwrap().get_arguments().filter_map(|option| option.get_long())
        {
            let text = hint(&format!("--{option}"));
            let is_own = losetup.get_arguments().any(|own| own.get_long() == text.strip_prefix("--"));
            assert!(is_own || text == format!("blkq attach --{option}"), "{text}");
        }
    }
}

//! The columns of `blkq list`, and the columns of losetup(8) with the names that losetup gives them.

use std::os::unix::fs::{FileTypeExt, MetadataExt};

use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::{Backing, DeviceInfo, shown_path};
use serde_json::Value;

use crate::output::Align;
use blkq::units::format_bytes;

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cell {
    Text(String),
    Number(u64),
    /// Printed with a unit in a table, and as a plain number in JSON.
    Bytes(u64),
    /// Printed as `[[days-]hours:]minutes:seconds` in a table, and as a plain number in JSON.
    Seconds(u64),
    /// Printed as 1 or 0 in a table, and as a boolean in JSON.
    Switch(bool),
    /// The numbers of a device. A table aligns them at the colon, with this width of the major number, as losetup(8)
    /// does.
    Device((u32, u32), usize),
    /// The column does not apply to the device: empty in a table, null in JSON.
    Nothing,
}

impl Cell {
    pub fn text(&self) -> String {
        match self {
            Cell::Text(text) => text.clone(),
            Cell::Number(number) => number.to_string(),
            Cell::Bytes(bytes) => format_bytes(*bytes),
            Cell::Seconds(seconds) => elapsed(*seconds),
            Cell::Switch(on) => u8::from(*on).to_string(),
            Cell::Device((major, minor), width) => format!("{major:width$}:{minor:<3}"),
            Cell::Nothing => String::new(),
        }
    }

    pub fn json(&self) -> Value {
        match self {
            Cell::Text(text) => text.as_str().into(),
            Cell::Number(number) | Cell::Bytes(number) | Cell::Seconds(number) => (*number).into(),
            Cell::Switch(on) => (*on).into(),
            Cell::Device((major, minor), _) => format!("{major}:{minor}").into(),
            Cell::Nothing => Value::Null,
        }
    }
}

/// `[[days-]hours:]minutes:seconds`, the format of ps(1).
fn elapsed(seconds: u64) -> String {
    let (days, hours, minutes, seconds) =
        (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    match (days, hours) {
        (0, 0) => format!("{minutes:02}:{seconds:02}"),
        (0, _) => format!("{hours:02}:{minutes:02}:{seconds:02}"),
        _ => format!("{days}-{hours:02}:{minutes:02}:{seconds:02}"),
    }
}

pub struct Column {
    /// The heading, which is also the word for the column in `--output`.
    pub name: &'static str,
    pub about: &'static str,
    pub align: Align,
    pub cell: fn(&DeviceInfo) -> Cell,
}

type Table = &'static [Column];

macro_rules! columns {
    ($($align:ident $name:literal $about:literal $cell:expr;)*) => {
        [$(Column { name: $name, about: $about, align: Align::$align, cell: $cell }),*]
    };
}

/// The columns of `blkq list`.
pub static LIST: [Column; 9] = columns! {
    Left "NAME" "device name" |info| Cell::Text(info.name.clone());
    Right "SIZE" "size of the device" |info| Cell::Bytes(info.size);
    Left "MODE" "rw or ro; unsafe: flushes are ignored; held: requests wait for `blkq resume`" |info| Cell::Text(mode(info));
    Left "DIRECT" "whether direct I/O is on or off" |info| Cell::Text(info.direct_io.effective.clone());
    Right "CLIENTS" "number of connected clients" |info| Cell::Number(info.clients.len() as u64);
    Left "IMAGE" "image, as for `blkq attach`" |info| Cell::Text(shown_path(info));
    Left "EXPORT" "node in /dev, or URI" |info| Cell::Text(info.exports.join(" "));
    Right "PID" "process ID of the daemon" |info| Cell::Number(info.pid.into());
    Right "UPTIME" "time since the daemon began to serve the device" |info| Cell::Seconds(info.uptime_seconds);
};

/// The columns that `blkq list` prints by default.
pub const LIST_DEFAULT: &str = "NAME,SIZE,MODE,DIRECT,CLIENTS,IMAGE,EXPORT";

/// The columns of `blkq losetup`, with the names and descriptions of losetup(8).
pub static LOSETUP: [Column; 17] = columns! {
    Left "NAME" "device: its node in /dev if it has one, else its URI" |info| Cell::Text(device_word(info));
    Right "AUTOCLEAR" "autoclear flag set" |info| Cell::Switch(info.autoclear);
    Left "BACK-FILE" "device backing file" |info| Cell::Text(shown_path(info));
    Right "BACK-INO" "backing file inode number" |info| backing(info, |backing| Cell::Number(backing.file.inode));
    Left "BACK-MAJ:MIN" "backing file major:minor device number" |info| backing(info, |backing| Cell::Device(backing.file.device, 8));
    Right "BACK-MAJ" "backing file major device number" |info| backing(info, |backing| Cell::Number(backing.file.device.0.into()));
    Right "BACK-MIN" "backing file minor device number" |info| backing(info, |backing| Cell::Number(backing.file.device.1.into()));
    Left "MAJ:MIN" "device node major:minor number" |info| node(info, |number| Cell::Device(number, 3));
    Right "MAJ" "device node major number" |info| node(info, |number| Cell::Number(number.0.into()));
    Right "MIN" "device node minor number" |info| node(info, |number| Cell::Number(number.1.into()));
    Right "OFFSET" "offset from the beginning" |info| Cell::Number(Backing::of(info).map_or(0, |backing| backing.window.offset));
    Right "PARTSCAN" "partscan flag set" |info| Cell::Switch(info.partscan);
    Left "REF" "reference string: the device's name" |info| Cell::Text(info.name.clone());
    Right "RO" "read-only device" |info| Cell::Switch(info.read_only);
    Right "SIZELIMIT" "size limit of the file in bytes" |info| Cell::Number(Backing::of(info).and_then(|backing| backing.window.size_limit).unwrap_or(0));
    Right "DIO" "access backing file with direct-io" |info| Cell::Switch(info.direct_io.effective == "on");
    Right "LOG-SEC" "logical sector size in bytes" |info| Cell::Number(info.sector_size.into());
};

/// The columns that losetup(8) prints by default, in its order.
pub const LOSETUP_DEFAULT: &str = "NAME,SIZELIMIT,OFFSET,AUTOCLEAR,RO,BACK-FILE,DIO,LOG-SEC";

/// The columns that `text` names, separated by commas; without a text, those of `default`. Each name is searched in
/// the tables `from`, in order; it is an error if neither contains it. If `text` begins with `+`, the columns are added
/// after those of `default`.
pub fn choose(text: Option<&str>, default: &str, from: [Table; 2]) -> Outcome<Vec<&'static Column>> {
    let text = text.unwrap_or(default);
    let (default, names) = text.strip_prefix('+').map_or((None, text), |more| (Some(default), more));
    let column = |name: &str| {
        let known = || from.into_iter().flatten();
        known().find(|column| column.name.eq_ignore_ascii_case(name)).ok_or_else(|| {
            let mut names: Vec<_> = known().map(|column| column.name).collect();
            names.sort_unstable();
            names.dedup();
            Failure::new(format!("unknown column {name}; the columns are {}", names.join(", ")))
        })
    };
    default.into_iter().chain([names]).flat_map(|names| names.split(',')).map(str::trim).map(column).collect()
}

pub fn help(columns: &[Column]) -> String {
    columns.iter().map(|column| format!("  {:>12}  {}\n", column.name, column.about)).collect()
}

fn mode(info: &DeviceInfo) -> String {
    let mode = if info.read_only { "ro" } else { "rw" };
    let marks = [(info.unsafe_flush_ignore, ",unsafe"), (info.held > 0, ",held")];
    std::iter::once(mode).chain(marks.into_iter().filter(|(is, _)| *is).map(|(_, mark)| mark)).collect()
}

/// The word that losetup prints for a device: its node in /dev, or its URI if it has no node. The name of the
/// device would not do: mkfs(8) and mount(8) would take it for a file in the current directory.
pub fn device_word(info: &DeviceInfo) -> String {
    node_path(info).or(info.exports.first()).unwrap_or(&info.name).to_owned()
}

fn node_path(info: &DeviceInfo) -> Option<&String> {
    info.exports.iter().find(|export| export.starts_with("/dev/"))
}

fn backing(info: &DeviceInfo, cell: fn(Backing) -> Cell) -> Cell {
    Backing::of(info).map_or(Cell::Nothing, cell)
}

fn node(info: &DeviceInfo, cell: fn((u32, u32)) -> Cell) -> Cell {
    let metadata = node_path(info).and_then(|path| std::fs::metadata(path).ok());
    let number = metadata.filter(|metadata| metadata.file_type().is_block_device()).map(|it| it.rdev());
    number.map_or(Cell::Nothing, |number| cell((libc::major(number), libc::minor(number))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_chosen_by_name_or_added() {
        let names = |text: &str| {
            let chosen = choose(Some(text), LOSETUP_DEFAULT, [&LOSETUP, &LIST])?;
            Ok::<_, Failure>(chosen.iter().map(|column| column.name).collect::<Vec<_>>())
        };
        assert_eq!(names("name,Log-Sec, EXPORT").unwrap(), ["NAME", "LOG-SEC", "EXPORT"]);
        assert_eq!(names("+back-ino").unwrap().join(","), format!("{LOSETUP_DEFAULT},BACK-INO"));
        assert!(
            names("NAME,FOO").unwrap_err().to_string().contains("unknown column FOO; the columns are AUTO")
        );
        assert!(names("").is_err());
        assert_eq!(choose(None, LIST_DEFAULT, [&LIST, &LOSETUP]).unwrap().len(), 7);
        assert_eq!(choose(None, LOSETUP_DEFAULT, [&LOSETUP, &LIST]).unwrap().len(), 8);
    }

    #[test]
    fn elapsed_times_have_the_format_of_ps() {
        for (seconds, text) in [
            (0, "00:00"),
            (61, "01:01"),
            (3_661, "01:01:01"),
            (90_061, "1-01:01:01"),
            (864_000, "10-00:00:00"),
        ] {
            assert_eq!(Cell::Seconds(seconds).text(), text);
        }
        assert_eq!((Cell::Bytes(2048).text(), Cell::Bytes(2048).json()), ("2K".to_owned(), 2048.into()));
    }

    #[test]
    fn spaces_of_a_path_are_kept_and_those_of_a_number_are_not() {
        assert_eq!(Cell::Text(" a.img ".to_owned()).json(), " a.img ");
        let device = Cell::Device((7, 1), 3);
        assert_eq!((device.text().as_str(), device.json()), ("  7:1  ", "7:1".into()));
    }
}

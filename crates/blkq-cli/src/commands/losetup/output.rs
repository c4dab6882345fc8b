//! Formats of losetup(8): tables and JSON as libsmartcols prints them, and the older lines of text.

use blkq::text::{escape, escaped, is_control};
use blkq_protocol::info::{Backing, DeviceInfo, shown_path};

use crate::output::columns::{Cell, Column, device_word};
use crate::output::render_apart;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Style {
    Table,
    /// Columns separated by one space, with white space in cells escaped.
    Raw,
    Json,
}

pub fn lines(devices: &[DeviceInfo]) -> String {
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

pub fn table(columns: &[&Column], devices: &[DeviceInfo], style: Style, headings: bool) -> String {
    let cells = |info: &DeviceInfo| columns.iter().map(|column| (column.cell)(info)).collect::<Vec<_>>();
    let rows: Vec<Vec<Cell>> = devices.iter().map(cells).collect();
    if style == Style::Json {
        return json(columns, &rows);
    }
    if rows.is_empty() {
        return String::new();
    }
    let heading = columns.iter().map(|column| column.name.to_owned()).collect();
    let text = |cell: &Cell| match style {
        Style::Raw => escape(cell.text().trim(), |c| c.is_whitespace() || is_control(c) || c == '\\'),
        _ => cell.text(),
    };
    let mut lines: Vec<Vec<String>> = vec![heading];
    lines.extend(rows.iter().map(|row| row.iter().map(text).collect()));
    let table = match style {
        Style::Raw => lines.iter().map(|line| line.join(" ") + "\n").collect(),
        _ => render_apart(1, columns.iter().map(|column| column.align).collect::<Vec<_>>(), &lines),
    };
    // losetup(8) makes columns as wide as their headings even if it does not print the headings.
    let left_out = if headings { 0 } else { table.find('\n').map_or(0, |end| end + 1) };
    table[left_out..].to_owned()
}

/// White space is that of libsmartcols, so that the output can be compared with that of losetup(8) as text.
fn json(columns: &[&Column], rows: &[Vec<Cell>]) -> String {
    let member = |(column, cell): (&&Column, &Cell)| {
        format!("         \"{}\": {}", column.name.to_lowercase(), cell.json())
    };
    let object = |row: &Vec<Cell>| {
        let members: Vec<String> = columns.iter().zip(row).map(member).collect();
        format!("      {{\n{}\n      }}", members.join(",\n"))
    };
    let objects: Vec<String> = rows.iter().map(object).collect();
    format!("{{\n   \"loopdevices\": [\n{}\n   ]\n}}\n", objects.join(",\n"))
}

//! Formats of losetup(8): tables and JSON as libsmartcols prints them, and the older lines of text.

use blkq::text::{escape, escaped, is_control};
use blkq_protocol::info::{Backing, DeviceInfo, shown_path};

use crate::output::columns::{Cell, Column, device_word};
use crate::output::render_apart;

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

/// The headings and a row for each device; empty if there are no devices.
fn rows(columns: &[&Column], devices: &[DeviceInfo], text: impl Fn(Cell) -> String) -> Vec<Vec<String>> {
    let row = |info: &DeviceInfo| columns.iter().map(|column| text((column.cell)(info))).collect();
    let headings = columns.iter().map(|column| column.name.to_owned()).collect();
    let rows = std::iter::once(headings).chain(devices.iter().map(row));
    if devices.is_empty() { Vec::new() } else { rows.collect() }
}

pub fn table(columns: &[&Column], devices: &[DeviceInfo], headings: bool) -> String {
    let rows = rows(columns, devices, |cell| cell.text());
    let table = render_apart(1, columns.iter().map(|column| column.align).collect::<Vec<_>>(), &rows);
    // losetup(8) makes columns as wide as their headings even if it does not print the headings.
    table.split_inclusive('\n').skip(usize::from(!headings)).collect()
}

/// Columns separated by one space, with white space in cells escaped.
pub fn raw(columns: &[&Column], devices: &[DeviceInfo], headings: bool) -> String {
    let is_special = |c: char| c.is_whitespace() || is_control(c) || c == '\\';
    let rows = rows(columns, devices, |cell| escape(cell.text().trim(), is_special));
    rows.iter().skip(usize::from(!headings)).map(|row| row.join(" ") + "\n").collect()
}

/// White space is that of libsmartcols, so that the output can be compared with that of losetup(8) as text.
pub fn json(columns: &[&Column], devices: &[DeviceInfo]) -> String {
    let rows = rows(columns, devices, |cell| cell.json().to_string());
    let objects = rows.iter().skip(1).map(|row| {
        let members = columns.iter().zip(row);
        let member =
            |(column, cell): (&&Column, _)| format!("         \"{}\": {cell}", column.name.to_lowercase());
        format!("      {{\n{}\n      }}", members.map(member).collect::<Vec<_>>().join(",\n"))
    });
    format!("{{\n   \"loopdevices\": [\n{}\n   ]\n}}\n", objects.collect::<Vec<_>>().join(",\n"))
}

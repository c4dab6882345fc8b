//! Signals, locks, files, time and kernel features, as the operating system provides them.

pub mod kernel;
pub mod record_lock;
pub mod signals;
pub mod timestamp;

use std::fs::{self, File};
use std::io::{self, Read};

/// `None` if the file that was to be opened, read or removed does not exist.
pub fn if_exists<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        result => result.map(Some),
    }
}

/// Reads at most `most` bytes.
pub(crate) fn read_bounded(file: File, most: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    file.take(most).read_to_end(&mut text)?;
    Ok(text)
}

/// Lists the files in `directory` whose names end with `suffix`: sorted, without the suffix, and only the names that
/// `is_name` accepts. Returns an empty list if the directory does not exist.
pub(crate) fn file_names(
    directory: &std::path::Path,
    suffix: &str,
    is_name: impl Fn(&str) -> bool,
) -> io::Result<Vec<String>> {
    let entries = if_exists(fs::read_dir(directory))?.into_iter().flatten();
    let files = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let names = files.filter_map(|file| Some(file.strip_suffix(suffix)?.to_owned()));
    let mut names: Vec<String> = names.filter(|name| is_name(name)).collect();
    names.sort();
    Ok(names)
}

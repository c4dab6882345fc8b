//! Signals, locks, time and the sandbox, as the operating system has them.

pub mod kernel;
pub mod record_lock;
pub mod signals;
pub mod timestamp;

use std::{fs, io};

/// `None` if the file that was to be opened, read or removed does not exist.
pub fn if_exists<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        result => result.map(Some),
    }
}

/// The names of the files in a directory, without `suffix` and sorted, as far as they are names according to
/// `is_name`. A directory that does not exist has none.
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

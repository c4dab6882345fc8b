//! The report: one page that needs nothing else, and the raw figures beside it.

use std::fs::OpenOptions;
use std::path::Path;

use crate::Result;
use crate::result::Results;

mod bars;
mod csv;
mod html;
mod lines;
mod page;
mod plots;
mod scale;

pub use page::PAGE;
use page::{CSV, GENERATOR, JSON};

/// The results as the JSON document that `schema.json` describes.
///
/// # Errors
/// None that is known of.
pub fn json(results: &Results) -> Result<String> {
    Ok(serde_json::to_string_pretty(results)? + "\n")
}

/// Makes the directory if it is not there, and sees that the report can be written into
/// it without losing a page that is not a report.
///
/// # Errors
/// If it cannot.
pub fn check(directory: &Path) -> Result {
    std::fs::create_dir_all(directory).map_err(|e| format!("{}: {e}", directory.display()))?;
    let page = directory.join(PAGE);
    if std::fs::read_to_string(&page).is_ok_and(|text| !text.contains(GENERATOR)) {
        let message =
            format!("{} is no report of blkq bench; choose another directory with --report", page.display());
        return Err(message.into());
    }
    [PAGE, JSON, CSV].iter().try_for_each(|name| check_writable(&directory.join(name)))
}

/// Writes the page and the figures into `directory`.
///
/// # Errors
/// If they cannot be written.
pub fn write(results: &Results, directory: &Path) -> Result {
    check(directory)?;
    let (json, csv) = (json(results)?, csv::csv(results));
    let page = page::page(results, &json, &csv);
    for (name, text) in [(PAGE, page), (JSON, json), (CSV, csv)] {
        let path = directory.join(name);
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(())
}

/// Checks that a file can be written, and leaves everything as it was.
///
/// # Errors
/// If it cannot.
pub fn check_writable(path: &Path) -> Result {
    let new = !path.exists();
    OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)
        .and_then(|_| if new { std::fs::remove_file(path) } else { Ok(()) })
        .map_err(|e| format!("{}: {e}", path.display()).into())
}

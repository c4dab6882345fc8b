//! The report: one page that needs nothing else, and the raw figures beside it.

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

/// Name of the page in its directory.
pub const PAGE: &str = "index.html";
/// Name of the figures as JSON.
const JSON: &str = "results.json";
/// Name of the figures as CSV.
const CSV: &str = "results.csv";

/// The mark by which a page is known as one of ours, which may be replaced.
const GENERATOR: &str = "<meta name=\"generator\" content=\"blkq bench\">";

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
    [PAGE, JSON, CSV].iter().try_for_each(|name| crate::run::check_writable(&directory.join(name)))
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

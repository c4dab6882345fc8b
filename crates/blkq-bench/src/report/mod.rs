//! The report: a self-contained HTML page, and the figures as JSON and CSV next to it.

use std::io::Write;
use std::path::Path;

use blkq::output;

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

/// Formats the results as the JSON document that `schema.json` describes.
pub fn json(results: &Results) -> Result<String> {
    Ok(serde_json::to_string_pretty(results)? + "\n")
}

type Recogniser = fn(&[u8]) -> bool;

/// The files of a report, each with the function that recognises an earlier one by its first bytes.
const FILES: [(&str, Recogniser); 3] = [(PAGE, is_page), (JSON, is_json), (CSV, csv::is_csv)];

/// Creates the directory if it does not exist, and checks that the report can be written into it and replaces
/// nothing but an earlier report.
pub fn check(directory: &Path) -> Result {
    std::fs::create_dir_all(directory).map_err(|e| format!("cannot create {}: {e}", directory.display()))?;
    FILES.iter().try_for_each(|(name, is_earlier)| check_output(&directory.join(name), *is_earlier))
}

/// Writes the report into a directory that [`check`] has accepted.
pub fn write(results: &Results, directory: &Path) -> Result {
    let (json, csv) = (json(results)?, csv::csv(results));
    let texts = [&page::page(results, &json, &csv), &json, &csv];
    let mut files = FILES.iter().zip(texts);
    files.try_for_each(|((name, is_earlier), text)| write_output(&directory.join(name), *is_earlier, text))
}

fn is_page(head: &[u8]) -> bool {
    String::from_utf8_lossy(head).contains(GENERATOR)
}

/// Whether a file with the first bytes `head` contains results as JSON.
pub fn is_json(head: &[u8]) -> bool {
    head.starts_with(b"{\n  \"schema\": ")
}

/// Checks that [`write_output`] can write the file, without changing anything.
pub fn check_output(path: &Path, is_earlier: Recogniser) -> Result {
    output::check(path, is_earlier).map_err(|e| format!("cannot write {}: {e}", path.display()).into())
}

/// Writes `text` to a file. Fails if the file has content that `is_earlier` does not recognise by its first bytes.
pub fn write_output(path: &Path, is_earlier: Recogniser, text: &str) -> Result {
    let written = output::create(path, is_earlier).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|e| format!("cannot write {}: {e}", path.display()).into())
}

//! The file with defaults for all devices: `/etc/blkq/defaults`, which has one key, `export`.

use std::fs;
use std::io;
use std::path::PathBuf;

use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::options::{AttachOptions, Export};

use super::{directory, read_text, words};
use crate::launch::systemd;

/// The name of the file. The names of device files end with `.toml`.
const FILE: &str = "defaults";
/// The only key: the option of `attach` whose default it sets.
const KEY: &str = "export";

fn path() -> PathBuf {
    directory().join(FILE)
}

/// The default exports; none if there is no file.
fn exports() -> Outcome<Vec<Export>> {
    let path = path();
    // `exists()` would also be false for a file that cannot be accessed.
    if fs::symlink_metadata(&path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
        return Ok(Vec::new());
    }
    let failed = |text: String| Failure::new(format!("{}: {text}", path.display()));
    let text = read_text(&path).map_err(|e| failed(e.to_string()))?;
    let keys = words::parse(&text).all();
    let keys = keys.map_err(|faults| faults[0].failure(&path))?;
    if let Some(other) = keys.iter().find(|key| key.key != KEY) {
        return Err(failed(format!(
            "line {}: {}: the only key of this file is {KEY}",
            other.line, other.key
        )));
    }
    let image = [words::ANY_IMAGE.to_owned()];
    let given = keys.into_iter().flat_map(|key| key.words);
    words::options(image.into_iter().chain(given)).map(|options| options.exports).map_err(failed)
}

pub fn check_defaults() -> Outcome {
    exports().map(drop)
}

/// Adds the default exports to options that have no exports, unless systemd passes sockets or another option
/// excludes the default exports.
pub fn with_defaults(options: AttachOptions) -> Outcome<AttachOptions> {
    if !options.exports.is_empty() || systemd::is_activated() {
        return Ok(options);
    }
    let with = AttachOptions { exports: exports()?, ..options.clone() };
    Ok(if with.check().is_ok() { with } else { options })
}

//! The file with defaults for all devices: `/etc/blkq/defaults`, which has one key, `export`.

use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::options::{AttachOptions, Export};

use super::{directory, is_missing, read_text, words};
use crate::launch::systemd;

/// The name of the file. The names of device files end with `.toml`.
const FILE: &str = "defaults";
/// The only key: the option of `attach` whose default it sets.
const KEY: &str = "export";

/// The default exports; none if there is no file.
pub fn default_exports() -> Outcome<Vec<Export>> {
    let path = directory().join(FILE);
    if is_missing(&path) {
        return Ok(Vec::new());
    }
    let failed = |text: String| Failure::new(format!("{}: {text}", path.display()));
    let text = read_text(&path).map_err(|e| failed(e.to_string()))?;
    let keys = words::parse(&text).all().map_err(|faults| faults[0].failure(&path))?;
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

/// Adds the default exports to options that have no exports, unless systemd passes sockets or another option
/// excludes the default exports.
pub fn with_defaults(options: AttachOptions) -> Outcome<AttachOptions> {
    if !options.exports.is_empty() || systemd::is_activated() {
        return Ok(options);
    }
    let with = AttachOptions { exports: default_exports()?, ..options.clone() };
    Ok(if with.check().is_ok() { with } else { options })
}

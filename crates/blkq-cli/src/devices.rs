//! The devices that there are, as their daemons tell of them.

use std::path::Path;

use serde::Serialize;

use crate::complain;
use crate::control::{Called, Request, call, died};
use crate::failure::{Failure, Outcome};
use crate::info::{DeviceInfo, StateFile};
use crate::state::{Dead, StateDir, check_name};

/// One that there is.
#[derive(Serialize, Debug)]
#[serde(untagged)]
pub enum Entry {
    /// Its daemon told of it.
    Device(Box<DeviceInfo>),
    /// A kernel's block device whose daemon is gone.
    Orphan {
        /// Its name.
        name: String,
        /// The image behind it.
        image: String,
        /// Where clients find it.
        exports: Vec<String>,
        /// What can be done.
        error: String,
    },
    /// Its daemon does not tell.
    Silent {
        /// Its name.
        name: String,
        /// Why.
        error: String,
    },
}

/// All devices, by name. Those whose daemon was killed are cleared away, and named on stderr.
///
/// # Errors
/// If the state directory cannot be read.
pub fn all(dir: &StateDir) -> Outcome<Vec<Entry>> {
    let mut entries = Vec::new();
    for name in dir.names()? {
        match call(dir, &name, &Request::Show {}) {
            Ok(Called::Answered(info)) => entries.push(Entry::Device(info)),
            Ok(Called::Nobody) => match dir.clear_dead(&name) {
                Ok(Dead::Cleared(last_words)) => complain(&died(&name, &last_words)),
                Ok(Dead::Orphan(orphan)) => {
                    let error = orphan.refusal().to_string();
                    let StateFile { name, image, exports, .. } = orphan.state.clone();
                    entries.push(Entry::Orphan { name, image, exports, error });
                }
                // Either it has just gone, or its daemon is just starting or ending.
                Ok(Dead::No) if dir.file(&name, ".lock").exists() => {
                    let error = "starting or ending".to_owned();
                    entries.push(Entry::Silent { name, error });
                }
                Ok(Dead::No) => {}
                Err(failure) => complain(&failure),
            },
            Err(failure) => entries.push(Entry::Silent { name, error: failure.to_string() }),
        }
    }
    Ok(entries)
}

/// The device that `word` means: its name, or where it is found (`/dev/ublkb0`, `ublkb0`, a
/// link to that, or a URI). `None` if there is none.
///
/// # Errors
/// If its daemon does not answer, or died.
pub fn find(dir: &StateDir, word: &str) -> Outcome<Option<DeviceInfo>> {
    if check_name(word).is_ok() {
        match call(dir, word, &Request::Show {})? {
            Called::Answered(info) => return Ok(Some(info)),
            Called::Nobody => match dir.clear_dead(word)? {
                Dead::Cleared(last_words) => return Err(died(word, &last_words)),
                Dead::Orphan(orphan) => return Err(orphan.refusal()),
                Dead::No => {}
            },
        }
    }
    let node = Path::new("/dev").join(word);
    let node = node.canonicalize().unwrap_or(node);
    let is_meant =
        |exports: &[String]| exports.iter().any(|export| export == word || Path::new(export) == node);
    for entry in all(dir)? {
        match entry {
            Entry::Device(info) if is_meant(&info.exports) => return Ok(Some(*info)),
            Entry::Orphan { exports, error, .. } if is_meant(&exports) => return Err(Failure::new(error)),
            _ => {}
        }
    }
    Ok(None)
}

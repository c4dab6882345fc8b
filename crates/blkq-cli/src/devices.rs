//! The devices that there are, as their daemons tell of them.

use std::path::Path;

use serde::Serialize;

use crate::backing::{FileId, is_behind};
use crate::complain;
use crate::control::{Called, Request, call, died, no_such_device};
use crate::failure::{Failure, Outcome};
use crate::info::{DeviceInfo, StateFile};
use crate::state::{Dead, StateDir, check_name, read_state};

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

/// The name of the device that `word` means: its name, the path of its image by any name, or where
/// it is found (a URI, `/dev/ublkb0`, `ublkb0`, or a link to that). What could be a name and is one
/// means that device. `None` if there is none.
///
/// # Errors
/// If several devices have that image; if the state directory cannot be read.
pub fn name_of(dir: &StateDir, word: &str) -> Outcome<Option<String>> {
    if check_name(word).is_ok() && dir.file(word, ".lock").exists() {
        return Ok(Some(word.to_owned()));
    }
    let node = Path::new("/dev").join(word);
    let node = node.canonicalize().unwrap_or(node);
    let is_at = |exports: &[String]| exports.iter().any(|export| export == word || Path::new(export) == node);
    let path = Path::new(word);
    let file = FileId::of(path);
    let mut names = dir.names()?;
    names.retain(|name| match call::<DeviceInfo>(dir, name, &Request::Show {}) {
        Ok(Called::Answered(info)) => is_at(&info.exports) || is_behind(path, &info),
        // It is dead, or does not answer: then what it wrote counts.
        _ => read_state(&dir.file(name, ".json"))
            .is_some_and(|state| is_at(&state.exports) || file.is_some() && FileId::of(&state.image) == file),
    });
    match &names[..] {
        [] => Ok(None),
        [name] => Ok(Some(name.clone())),
        names => Err(Failure::new(format!("{word}: attached as {}; name one of them", names.join(", ")))),
    }
}

/// As [`name_of`], for a device that must be there.
///
/// # Errors
/// As there, and if there is none.
pub fn named(dir: &StateDir, word: &str) -> Outcome<String> {
    name_of(dir, word)?.ok_or_else(|| no_such_device(word))
}

/// The device that `word` means, as [`name_of`] has it. `None` if there is none.
///
/// # Errors
/// As there, and if its daemon does not answer, or died.
pub fn find(dir: &StateDir, word: &str) -> Outcome<Option<DeviceInfo>> {
    let Some(name) = name_of(dir, word)? else { return Ok(None) };
    match call(dir, &name, &Request::Show {})? {
        Called::Answered(info) => Ok(Some(info)),
        Called::Nobody => match dir.clear_dead(&name)? {
            Dead::Cleared(last_words) => Err(died(&name, &last_words)),
            Dead::Orphan(orphan) => Err(orphan.refusal()),
            Dead::No => Ok(None),
        },
    }
}

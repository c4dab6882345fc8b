//! Completions that are not in the definition of the command line: the devices that there
//! are, and the keys of `blkq set`. The scripts of `blkq generate completions` run this program for it.

use std::ffi::OsStr;

use clap_complete::engine::{ArgValueCandidates, ArgValueCompleter, CompletionCandidate};

use crate::settings::KEYS;
use crate::state::StateDir;

/// Set by the scripts to the name of their shell.
pub const VARIABLE: &str = "COMPLETE";
/// Names of devices, without asking their daemons.
pub fn devices() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let names = StateDir::locate().and_then(|dir| dir.names()).unwrap_or_default();
        names.into_iter().map(CompletionCandidate::new).collect()
    })
}

/// Keys of settings, up to the value.
pub fn settings() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let current = current.to_string_lossy();
        let keys = KEYS.iter().map(|key| format!("{}=", key.name));
        keys.filter(|key| key.starts_with(&*current)).map(CompletionCandidate::new).collect()
    })
}

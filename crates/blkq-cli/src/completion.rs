//! Shell completions that the definition of the command line does not contain: the names of devices, and the
//! keys of `blkq set`. The scripts of `blkq generate completions` run this program to get them.

use std::ffi::OsStr;

use blkq_protocol::options::Row;
use blkq_protocol::state::StateDir;
use clap_complete::engine::{ArgValueCandidates, ArgValueCompleter, CompletionCandidate};

/// The environment variable that the scripts set to the name of their shell.
pub const VARIABLE: &str = "COMPLETE";
/// The names of devices. Their daemons are not asked, because they may hang.
pub fn devices() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let names = StateDir::locate().and_then(|dir| dir.names()).unwrap_or_default();
        names.into_iter().map(CompletionCandidate::new).collect()
    })
}

/// The keys of settings, with the `=`.
pub fn settings() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let current = current.to_string_lossy();
        let keys = Row::sorted_by_name().into_iter().map(|row| format!("{}=", row.name));
        keys.filter(|key| key.starts_with(&*current)).map(CompletionCandidate::new).collect()
    })
}

//! State directories and options for the unit tests of the crates that use this one.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::fs;

use clap::Parser;

use crate::options::AttachOptions;
use crate::state::StateDir;

/// The options of `blkq attach` with these words.
pub fn options(words: &[&str]) -> AttachOptions {
    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: AttachOptions,
    }
    Line::parse_from([&["attach"], words].concat()).options
}

/// Creates an empty state directory. No two tests may have the same name.
pub fn scratch(test: &str) -> StateDir {
    let path = std::env::temp_dir().join(format!("blkq-state-{}-{test}", std::process::id()));
    let _ = fs::remove_dir_all(&path);
    let dir = StateDir(path);
    dir.create().unwrap();
    dir
}

/// The sorted names of the files in a state directory.
pub fn files(dir: &StateDir) -> Vec<String> {
    let mut files: Vec<String> =
        fs::read_dir(&dir.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    files.sort();
    files
}

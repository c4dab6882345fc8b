//! A state directory with arbitrary files: names are found, the dead are cleared, nothing else is
//! touched, and what a state file says of a block device is understood or refused in one line.
//!
//! Input: files, each `[kind, length, length, content]`: of a device `a` or `b`, or under a name of
//! the input's own, not so long that its socket would have no place.

#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use blkq_cli::commands::recover::attach_args;
use blkq_cli::devices::all;
use blkq_cli::state::{STATE_DIR_VARIABLE, StateDir, check_name, parse_state};
use libfuzzer_sys::fuzz_target;

const ENDINGS: [&str; 7] = [".lock", ".json", ".json.new", ".log", ".control", ".nbd", ".other"];

static DIRECTORY: LazyLock<PathBuf> = LazyLock::new(|| {
    let memory = PathBuf::from("/dev/shm");
    let base = if memory.is_dir() { memory } else { std::env::temp_dir() };
    let directory = base.join(format!("blkq-fuzz-state-{}", std::process::id()));
    // SAFETY: nothing else runs yet.
    unsafe { std::env::set_var(STATE_DIR_VARIABLE, &directory) };
    directory
});

fn state(text: &[u8]) {
    let Some(state) = parse_state(text) else { return };
    let again = serde_json::to_vec(&state).expect("a state");
    assert_eq!(parse_state(&again).as_ref(), Some(&state));
    match attach_args(&state) {
        Ok(args) => assert!(state.ublk.is_some() && args.depth > 0 && args.queues > 0),
        Err(failure) => assert!(!failure.to_string().contains('\n')),
    }
}

fuzz_target!(|data: &[u8]| {
    let directory = &*DIRECTORY;
    let _ = fs::remove_dir_all(directory);
    let dir = StateDir::locate().expect("a place");
    dir.create().expect("a directory");
    let mut kept = Vec::new();
    let mut rest = data;
    while let [kind, high, low, after @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(after.len());
        let (content, next) = after.split_at(length);
        rest = next;
        state(content);
        let ending = ENDINGS[usize::from(*kind) % ENDINGS.len()];
        let name = match kind >> 6 {
            0 | 1 => "a".to_owned(),
            2 => "b".to_owned(),
            _ => String::from_utf8_lossy(&content[..content.len().min(40)]).replace(['/', '\0'], "_"),
        };
        let file = dir.file(&name, ending);
        if fs::write(&file, content).is_ok() && (ending == ".other" || check_name(&name).is_err()) {
            kept.push(file);
        }
    }
    let names = dir.names().expect("a directory that can be read");
    assert!(names.iter().all(|name| check_name(name).is_ok()));
    // No daemon has a lock, and there is no kernel's device: all of them are dead.
    let left = all(&dir).expect("a directory that can be read");
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(dir.names().expect("as before"), <[String; 0]>::default());
    for name in names {
        for ending in &ENDINGS[..6] {
            assert!(!dir.file(&name, ending).exists(), "{name}{ending} is left");
        }
        // Its name is free, and leaves nothing.
        if let Ok(claim) = dir.claim(&name) {
            claim.write_state(&"x").expect("a file");
        }
    }
    for file in kept {
        assert!(file.exists(), "{} was not a device's", file.display());
    }
});

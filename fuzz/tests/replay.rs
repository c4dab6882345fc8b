//! Replays the corpus of each fuzz target. libFuzzer does the same with sanitizers: `fuzz/run`.

#![cfg(fuzz_interface)]
#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The name of the target that [`in_a_process_of_its_own`] runs, and the directory of its corpus.
const TARGET: &str = "BLKQ_FUZZ_TARGET";
const CORPUS: &str = "BLKQ_FUZZ_CORPUS";

macro_rules! replay_each {
    ($($target:ident)*) => {
        const TARGETS: &[(&str, fn(&[u8]))] = &[$((stringify!($target), blkq_fuzz::$target::check)),*];

        $(#[test]
        fn $target() {
            replay(stringify!($target));
        })*
    };
}

replay_each! {
    certificates
    command_line
    control_socket
    fault_spec
    metrics_http
    nbd_handshake
    nbd_session
    nbd_transmission
    qcow2
    qcow2_journal
    state_files
    tls_records
    ublk_words
    vhost_device
    vhost_messages
    vhost_ring
}

/// A directory that is removed when this is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("blkq-replay-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn directory() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Replays a corpus in another process, because targets change the environment of theirs, count its descriptors and
/// start daemons that only its exit stops.
fn replay(target: &str) {
    let scratch = Scratch::new(target);
    let (corpus, temporary) = (scratch.0.join("corpus"), scratch.0.join("tmp"));
    fs::create_dir(&corpus).unwrap();
    fs::create_dir(&temporary).unwrap();
    let archive = directory().join(format!("corpus/{target}.tar.xz"));
    let unpacked = Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(&corpus).status().unwrap();
    assert!(unpacked.success());
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "in_a_process_of_its_own", "--ignored", "--nocapture"]);
    child.env(TARGET, target).env(CORPUS, &corpus).env("TMPDIR", &temporary);
    assert!(child.status().unwrap().success());
}

/// Prints the name of an input, if the target panics.
struct Input<'a>(&'a Path);

impl Drop for Input<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("failed with input {}", self.0.file_name().unwrap_or_default().display());
        }
    }
}

#[test]
#[ignore = "run by the tests above, with a target"]
fn in_a_process_of_its_own() {
    let Ok(name) = std::env::var(TARGET) else { return };
    let (_, check) = TARGETS.iter().find(|(target, _)| *target == name).unwrap();
    let corpus = std::env::var_os(CORPUS).unwrap();
    let mut inputs: Vec<PathBuf> = fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    assert!(!inputs.is_empty());
    for path in &inputs {
        let _input = Input(path);
        check(&fs::read(path).unwrap());
    }
    println!("{} inputs", inputs.len());
}

#[test]
fn every_target_has_a_corpus_and_is_replayed() {
    let replayed: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let files = |of: &str, ending: &str| -> BTreeSet<String> {
        let names = fs::read_dir(directory().join(of)).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter_map(|name| Some(name.to_str()?.strip_suffix(ending)?.to_owned())).collect()
    };
    assert_eq!(replayed, files("corpus", ".tar.xz"));
    assert_eq!(replayed, files("fuzz_targets", ".rs"));
    let manifest = fs::read_to_string(directory().join("fuzz_targets/Cargo.toml")).unwrap();
    let programs = manifest.split("[[bin]]\nname = \"").skip(1).map(|part| part.split('"').next().unwrap());
    assert_eq!(replayed, programs.map(str::to_owned).collect());
}

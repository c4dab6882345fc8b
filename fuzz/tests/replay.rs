//! Replays the corpus of each fuzz target. libFuzzer does the same with sanitizers: `fuzz/run`.

#![cfg(fuzz_interface)]
#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use blkq::testing::wait_until;
use rustix::process::{Resource, Rlimit, setrlimit};

/// The name of the target that [`in_a_process_of_its_own`] runs, and the directory of its corpus.
const TARGET: &str = "BLKQ_FUZZ_TARGET";
const CORPUS: &str = "BLKQ_FUZZ_CORPUS";

/// The maximum address space of the process that replays qcow2 images. A debug build takes 220 MiB.
const QCOW2_MAX_BYTES: u64 = 512 << 20;

/// The number of inputs that the target has checked.
static FINISHED: AtomicUsize = AtomicUsize::new(0);

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
    let status = child.status().unwrap();
    let input = inputs(&corpus).into_iter().next();
    assert!(status.success() && input.is_none(), "{status}, with input {input:?}");
}

fn inputs(corpus: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

/// Aborts on every panic, as libFuzzer does, because the library catches those of some threads.
fn abort_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::abort();
    }));
}

/// Panics on another thread if an input takes longer than a test may wait.
fn limit_time(inputs: usize) {
    std::thread::spawn(move || {
        for finished in 1..=inputs {
            wait_until("the target has checked the input", || FINISHED.load(Ordering::Relaxed) >= finished);
        }
    });
}

#[test]
#[ignore = "run by the tests above, with a target"]
fn in_a_process_of_its_own() {
    let Ok(name) = std::env::var(TARGET) else { return };
    let (_, check) = TARGETS.iter().find(|(target, _)| *target == name).unwrap();
    let inputs = inputs(Path::new(&std::env::var_os(CORPUS).unwrap()));
    assert!(!inputs.is_empty());
    if name == "qcow2" {
        let limit = Some(QCOW2_MAX_BYTES);
        setrlimit(Resource::As, Rlimit { current: limit, maximum: limit }).unwrap();
    }
    abort_on_panic();
    limit_time(inputs.len());
    for path in &inputs {
        check(&fs::read(path).unwrap());
        // The first file that is left names the input of a failure.
        fs::remove_file(path).unwrap();
        FINISHED.fetch_add(1, Ordering::Relaxed);
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

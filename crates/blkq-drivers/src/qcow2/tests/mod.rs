//! The driver with images that qemu-img creates.

mod bitmaps;
mod block_commit;
mod chains;
mod control;
mod data;
mod kill;
mod leaked;
mod power;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use blkq::{BioFlags, ErrorKind, Operation};

use super::*;
use blkq::testing::harness::{Harness, pattern, run, unmount};

const MIB: u64 = 1 << 20;

struct Directory(PathBuf);

impl Directory {
    fn new() -> Directory {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("blkq-qcow2-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Directory(path.canonicalize().unwrap())
    }

    fn qemu_img(&self, arguments: &[&str]) -> String {
        let output = Command::new("qemu-img").args(arguments).current_dir(&self.0).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "qemu-img {arguments:?}: {text}{errors}");
        text
    }

    fn mount(&self, words: &[&str], point: &str) -> Mounted {
        let point = self.0.join(point);
        std::fs::create_dir(&point).unwrap();
        run("mount", &[words, &[point.to_str().unwrap()]].concat());
        Mounted(point)
    }

    fn qemu_io(&self, path: &Path, command: &str) {
        let mut qemu_io = Command::new("qemu-io");
        let output = qemu_io.args(["-f", "qcow2", "-c", command]).arg(path).output().unwrap();
        assert!(output.status.success(), "qemu-io {command}: {output:?}");
    }

    fn image(&self, name: &str, options: &str, size: u64) -> PathBuf {
        self.qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, name, &size.to_string()]);
        self.0.join(name)
    }

    fn check(&self, path: &Path) {
        self.qemu_img(&["check", "-q", "-f", "qcow2", path.to_str().unwrap()]);
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        unmount(&self.0);
    }
}

fn open(path: &Path) -> Qcow2 {
    Qcow2::open(&DriverOptions::new(path)).unwrap()
}

fn has_qemu() -> bool {
    let found = Command::new("qemu-img").arg("--version").output().is_ok();
    if !found {
        eprintln!("without qemu-img: skipped");
    }
    found
}

/// Calls `live` with each of `kinds` and a new seed, `rounds` times the factor in `BLKQ_MODEL_FACTOR`.
fn each_kind<K: Copy>(rounds: u64, kinds: &[K], live: impl Fn(K, u64)) {
    if !has_qemu() {
        return;
    }
    let factor = std::env::var("BLKQ_MODEL_FACTOR").ok().and_then(|factor| factor.parse().ok()).unwrap_or(1);
    for round in 0..rounds * factor {
        for (number, kind) in (0..).zip(kinds) {
            live(*kind, round * 10 + number);
        }
    }
}

//! QEMU's programs and nbdinfo, for tests of images and bitmaps.

use std::process::Command;

use super::Place;

/// Standard output of a program that must succeed.
pub fn run(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output().unwrap();
    assert!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Runs `commands` of qemu-io one after another; none may fail.
pub fn qemu_io(format: &str, image: &str, commands: &[&str]) {
    let words: Vec<&str> = commands.iter().flat_map(|command| ["-c", *command]).collect();
    let printed = run("qemu-io", &[&["-f", format], &words[..], &[image]].concat());
    assert!(!printed.contains("failed"), "{printed}");
}

/// The dirty ranges of a bitmap (offset, length), as nbdinfo reports them.
pub fn dirty(server: &[&str], bitmap: &str) -> Vec<(u64, u64)> {
    let map = format!("--map=qemu:dirty-bitmap:{bitmap}");
    let json: serde_json::Value =
        serde_json::from_str(&run("nbdinfo", &[&["--json", &map], server].concat())).unwrap();
    let extents = json.as_array().unwrap().iter().filter(|extent| extent["type"] == 1);
    extents.map(|extent| (extent["offset"].as_u64().unwrap(), extent["length"].as_u64().unwrap())).collect()
}

/// As [`dirty`], for a bitmap of an image that qemu-nbd exports.
pub fn in_qemu_nbd(image: &str, bitmap: &str) -> Vec<(u64, u64)> {
    dirty(&["--", "[", "qemu-nbd", "-r", "-f", "qcow2", "-B", bitmap, image, "]"], bitmap)
}

/// The state of a bitmap as `bitmap list` reports it, or `none`.
pub fn state(place: &Place, device: &str, bitmap: &str) -> String {
    let list = place.json(&["bitmap", "list", "--json", device]);
    let found = list.as_array().unwrap().iter().find(|one| one["name"] == bitmap);
    found.map_or("none".to_owned(), |found| found["state"].as_str().unwrap().to_owned())
}

pub const K: u64 = 1024;

//! Images as users have them: in another format, in use elsewhere, called by many names.
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod place;

use std::fs;
use std::os::unix::fs::FileExt;
use std::process::Command;

use place::*;

fn run(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output().unwrap();
    assert!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A loop device of the kernel's, gone with this.
struct KernelLoop(String);

impl Drop for KernelLoop {
    fn drop(&mut self) {
        run("losetup", &["-d", &self.0]);
    }
}

#[test]
fn an_image_in_another_format_is_refused_with_the_cure() {
    let place = Place::new("format");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    for (format, kind) in [("qcow2", "qcow2"), ("vmdk", "VMDK"), ("vhdx", "VHDX"), ("vdi", "VDI"), ("vpc", "VHD")] {
        let image = path(format);
        run("qemu-img", &["create", "-q", "-f", format, &image, "1M"]);
        let before = fs::read(&image).unwrap();
        for words in [&["attach"][..], &["attach", "--read-only"], &["attach", "--shared"], &["losetup", "-f"]] {
            let line = place.refused(&[words, &[&image]].concat());
            assert!(line.contains(&format!("is a {kind} image, not raw data; convert it")), "{line}");
            assert!(line.contains("attach with --format raw"), "{line}");
        }
        assert_eq!(fs::read(&image).unwrap(), before);
        place.done(&["attach", "--format", "raw", "--sector-size", "512", "--name", "raw", &image]);
        place.done(&["detach", "raw"]);
    }
    let luks = place.image("luks", 1 << 20);
    fs::File::options().write(true).open(&luks).unwrap().write_all_at(b"LUKS\xba\xbe\0\x02", 0).unwrap();
    assert!(place.refused(&["attach", &luks]).contains("is a LUKS image"));
    assert!(place.files().is_empty());
    assert_eq!(place.run(&["attach", "--format", "qcow2", &luks]).status.code(), Some(2));
}

#[test]
fn what_the_kernel_has_is_refused_unless_shared() {
    let place = Place::new("claimed");
    let image = place.image("disk.img", 16 << 20);
    run("mkfs.ext4", &["-q", "-F", &image]);
    let device = KernelLoop(run("losetup", &["-f", "--show", &image]));
    let line = place.refused(&["attach", &image]);
    let says = format!("is in use: {} of the kernel's loop driver has it; release it there first", device.0);
    assert!(line.contains(&says) && line.contains("--shared"), "{line}");
    assert!(place.refused(&["losetup", "-f", &image]).contains("loop driver has it"));
    place.done(&["attach", "--shared", &image]);
    place.done(&["detach", "disk.img"]);
    let point = place.dir.join("mnt");
    fs::create_dir(&point).unwrap();
    let point = point.to_str().unwrap();
    run("mount", &[&device.0, point]);
    let line = place.refused(&["attach", &device.0]);
    run("umount", &[point]);
    assert!(line.contains(&format!("{} is in use: it is mounted on {point}", device.0)), "{line}");
    assert!(place.files().is_empty());
    place.done(&["attach", "--name", "free", &device.0]);
    place.done(&["detach", "free"]);
}

#[test]
fn attached_elsewhere_says_where() {
    let place = Place::new("where");
    let image = place.image("disk.img", 4 << 20);
    let window = ["--size-limit", "1M", &image];
    place.done(&[&["attach", "--name", "low"][..], &window].concat());
    place.done(&["attach", "--name", "high", "--offset", "1M", &image]);
    let line = place.refused(&[&["attach"][..], &window].concat());
    assert!(line.contains("are attached elsewhere as low; detach it there first"), "{line}");
    assert!(place.refused(&["attach", &image]).contains("as high, low;"));
    // By a device of another directory, and by any other process.
    let other = Place::new("where-else");
    let line = other.refused(&[&["attach"][..], &window].concat());
    assert!(line.contains(&format!("elsewhere by process {} (", place.pid("low"))), "{line}");
    place.done(&["detach", "--all"]);
    let file = fs::File::options().read(true).write(true).open(&image).unwrap();
    rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let line = place.refused(&["attach", &image]);
    assert!(line.contains(&format!("elsewhere by process {} (", std::process::id())), "{line}");
    assert!(line.contains("--shared on both sides"), "{line}");
}

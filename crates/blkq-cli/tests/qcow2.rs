//! qcow2 images, attached and used over NBD by QEMU's programs, and checked by them afterwards.

use blkq::testing::wait_until;
use std::fs;
use std::net::TcpListener;
use std::process::Command;

use crate::place::qemu::*;
use crate::place::*;

#[test]
fn qemu_writes_over_nbd_what_it_then_finds_in_the_image() {
    let place = Place::new("qcow2");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (base, top, raw) = (path("base"), path("top.qcow2"), path("raw"));
    fs::write(&base, vec![1; 1 << 20]).unwrap();
    for kind in ["cluster_size=64k", "cluster_size=512", "compat=0.10,cluster_size=2M"] {
        let create = ["create", "-q", "-f", "qcow2", "-o", kind, "-b", &base, "-F", "raw", &top, "8M"];
        run("qemu-img", &create);
        let attach = ["attach", &top, "--format", "qcow2", "--export", "nbd", "--name", "q"];
        let attached = place.run(&attach);
        let warned = String::from_utf8(attached.stderr).unwrap();
        assert!(attached.status.success(), "{warned}");
        assert_eq!(warned.contains("is of version 2"), kind.contains("compat=0.10"), "{warned}");
        let uri = String::from_utf8(attached.stdout).unwrap().trim().to_owned();
        let commands = [
            "read -P 1 0 1M",
            "read -P 0 1M 7M",
            "write -P 2 4k 4k",
            "write -P 3 900k 1M",
            "write -z 128k 64k",
            "discard 3M 1M",
            "aio_write -P 4 5M 3M",
            "aio_flush",
            "flush",
            "read -P 1 0 4k",
            "read -P 2 4k 4k",
            "read -P 0 128k 64k",
            "read -P 3 900k 1M",
            "read -P 4 5M 3M",
        ];
        qemu_io("raw", &uri, &commands);
        // While it is served, with tables that only the daemon has.
        qemu_io("raw", &uri, &["write -P 5 2M 64k"]);
        run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, &raw]);
        place.done(&["detach", "q"]);
        run("qemu-img", &["check", "-f", "qcow2", &top]);
        run("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &raw, &top]);
        qemu_io("qcow2", &top, &["read -P 5 2M 64k", "read -P 2 4k 4k"]);
    }
    assert_eq!(fs::read(&base).unwrap(), vec![1; 1 << 20]);
}

// The thread that does this makes no ring, and a call that its filter kills for is the daemon's end.
#[test]
fn a_confined_daemon_writes_tables_without_a_queue() {
    let place = Place::new("qcow2-confined");
    let image = place.dir.join("d.qcow2").to_str().unwrap().to_owned();
    for last in ["write -P 1 0 1M", "discard 1M 1M"] {
        run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "8M"]);
        let uri = place.done(&["attach", &image, "--format", "qcow2", "--export", "nbd", "--name", "q"]);
        qemu_io("raw", uri.trim(), &["write -P 1 0 1M", "write -P 2 1M 1M"]);
        place.done(&["resize", "q", "16M"]);
        qemu_io("raw", uri.trim(), &["write -P 3 15M 1M", "discard 2M 64k"]);
        place.done(&["set", "q", "read-only=on"]);
        place.done(&["set", "q", "read-only=off"]);
        qemu_io("raw", uri.trim(), &[last]);
        place.done(&["detach", "q"]);
        run("qemu-img", &["check", "-f", "qcow2", &image]);
        qemu_io("qcow2", &image, &["read -P 1 0 1M", "read -P 3 15M 1M"]);
    }
}

#[test]
fn the_format_that_auto_finds_is_printed_and_kept() {
    let place = Place::new("qcow2-auto");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (image, raw) = (path("d.qcow2"), place.image("raw", 1 << 20));
    run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "8M"]);
    for (image, format) in [(&image, "qcow2"), (&raw, "raw")] {
        let attached = place.run(&["attach", image, "--format", "auto", "--export", "nbd", "--name", "a"]);
        assert!(attached.status.success());
        let printed = String::from_utf8(attached.stderr).unwrap();
        assert!(printed.contains(&format!("is served as {format}")), "{printed}");
        let shown = place.json(&["show", "--json", "a"]);
        assert_eq!(shown["attach_options"]["options"]["format"], format, "{shown}");
        place.done(&["detach", "a"]);
    }
}

#[test]
fn options_that_mean_nothing_for_an_image_are_rejected() {
    let place = Place::new("qcow2-options");
    let image = place.dir.join("d.qcow2").to_str().unwrap().to_owned();
    fs::write(place.dir.parent().unwrap().join("behind-qcow2"), [0; 512]).unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-u", "-b", "../behind-qcow2", "-F", "raw", &image, "1M"];
    run("qemu-img", &create);
    for (words, why) in [
        (&["--format", "qcow2"][..], "--backing-chain allow"),
        (&["--format", "qcow2", "--offset", "512"], "--offset is for raw images"),
        (&["--format", "qcow2", "--queues", "2"], "one queue and one thread"),
        (&["--backing-chain", "allow"], "--backing-chain is for qcow2"),
        (&["--format", "qcow2", "--backing-chain", "allow", "--shared"], "has one writer"),
    ] {
        let line = place.refused(&[&["attach", "--export", "nbd", &image], words].concat());
        assert!(line.contains(why), "{line}");
    }
    fs::remove_file(place.dir.parent().unwrap().join("behind-qcow2")).unwrap();
}

#[test]
fn an_overlay_is_a_clone_that_leaves_its_base_as_it_is() {
    let place = Place::new("qcow2-overlay");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (raw, layered) = (path("base.img"), path("base.qcow2"));
    fs::write(&raw, vec![1; (3 << 20) + 1000]).unwrap();
    run("qemu-img", &["convert", "-O", "qcow2", &raw, &layered]);
    for (base, format) in [(&raw, "raw"), (&layered, "qcow2")] {
        let (before, clone) = (fs::read(base).unwrap(), path(&format!("clone-of-{format}")));
        let attach = ["attach", base, "--format", format, "--overlay", &clone, "--name", "c"];
        let output = place.run(&attach);
        assert!(output.status.success(), "{output:?}");
        // Direct I/O cannot read the last bytes of the raw image.
        let warnings = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            warnings.contains(&format!("direct I/O is off for {base}: ")),
            format == "raw",
            "{warnings}"
        );
        let uri = String::from_utf8(output.stdout).unwrap().trim().to_owned();
        qemu_io("raw", &uri, &["read -P 1 0 3M", "write -P 2 1M 4k", "write -z 2M 64k", "flush"]);
        let expected = ["read -P 1 0 1M", "read -P 2 1M 4k", "read -P 0 2M 64k"];
        qemu_io("raw", &uri, &expected);
        let line = place.refused(&attach);
        assert!(line.contains("already exists") && line.contains("--format qcow2"), "{line}");
        place.done(&["detach", "c"]);
        assert!(fs::read(base).unwrap() == before, "the base is as it was");
        run("qemu-img", &["check", "-f", "qcow2", &clone]);
        let info: serde_json::Value =
            serde_json::from_str(&run("qemu-img", &["info", "--output=json", &clone])).unwrap();
        let name = std::path::Path::new(base).file_name().unwrap().to_str().unwrap();
        assert_eq!(
            (info["backing-filename"].as_str(), info["backing-filename-format"].as_str()),
            (Some(name), Some(format))
        );
        qemu_io("qcow2", &clone, &expected);
        let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(&clone).unwrap());
        assert_eq!(mode & 0o777, 0o600);
        // Another attach finds it by itself.
        assert!(place.run(&["attach", &clone, "--format", "qcow2", "--name", "c"]).status.success());
        place.done(&["detach", "c"]);
    }
}

#[test]
fn an_attach_that_fails_late_leaves_no_journal() {
    let place = Place::new("qcow2-late");
    let image = place.dir.join("q.qcow2").to_str().unwrap().to_owned();
    run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "1M"]);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = format!("tcp:{}", taken.local_addr().unwrap());
    let line = place.refused(&["attach", &image, "--format", "qcow2", "--listen", &listen]);
    assert!(line.contains("in use"), "{line}");
    let journals = fs::read_dir(place.state().join("journals")).unwrap();
    assert_eq!(journals.count(), 0);
    place.done(&["attach", &image, "--format", "qcow2", "--name", "q"]);
}

#[test]
fn an_overlay_that_cannot_be_attached_is_removed() {
    let place = Place::new("qcow2-no-overlay");
    let base = place.image("base.img", 1 << 20);
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (layered, elsewhere) = (path("base.qcow2"), path("e"));
    run("qemu-img", &["create", "-q", "-f", "qcow2", &layered, "1M"]);
    fs::create_dir(&elsewhere).unwrap();
    let (clone, other) = (path("clone"), path("e/clone"));
    for (words, why) in [
        (&[base.as_str(), "--overlay", other.as_str()][..], "--backing-chain allow"),
        (&[&base, "--overlay", &clone, "--offset", "512"], "an overlay covers a whole image"),
        (&[&base, "--overlay", &clone, "--queues", "2"], "one queue and one thread"),
        (&[&base, "--overlay", &clone, "--export-name", "e", "--listen", "unix:/n/o/n/e"], "/n/o/n/e"),
        (&[&layered, "--overlay", &clone], "add --format qcow2"),
        (&[&base, "--format", "qcow2", "--overlay", &clone], "cannot be served as qcow2"),
        (&["ram:1M", "--overlay", &clone], "needs an image file"),
        (&[&path("none"), "--overlay", &clone], "cannot find the image"),
        (&[&base, "--overlay", &path("n/o")], "No such file"),
    ] {
        let line = place.refused(&[&["attach"], words].concat());
        assert!(line.contains(why), "{line}");
        assert!(!fs::exists(&clone).unwrap() && !fs::exists(&other).unwrap(), "{words:?}");
    }
    let uri = place.done(&["attach", &base, "--name", "b"]);
    let line = place.refused(&["attach", &base, "--overlay", &clone]);
    assert!(line.contains("in use") && !fs::exists(&clone).unwrap(), "{line}");
    drop(uri);
    let wide = ["attach", &base, "--overlay", &other, "--backing-chain", "allow", "--name", "o"];
    place.done(&["detach", "b"]);
    place.done(&wide);
    // Another clone of the same base at the same time.
    place.done(&["attach", &base, "--overlay", &clone, "--name", "p"]);
}

/// Copies between files and devices without a flush.
fn copy(from: &str, to: &str) {
    run("nbdcopy", &[from, to]);
}

// Contract: durability
#[test]
fn a_daemon_that_is_killed_loses_no_completed_write() {
    let place = Place::new("qcow2-killed");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (image, top, data, back) = (path("d.qcow2"), path("top.qcow2"), path("data"), path("back"));
    let journals = place.state().join("journals");
    let content = |seed: u32| -> Vec<u8> {
        (0..1 << 20).flat_map(|at: u32| (at.wrapping_mul(seed) ^ at).to_ne_bytes()).collect()
    };
    run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "4M"]);
    let attach = |image: &str| {
        place
            .done(&["attach", image, "--format", "qcow2", "--export", "nbd", "--name", "k"])
            .trim()
            .to_owned()
    };
    let holds = |uri: &str, expected: &[u8]| {
        copy(uri, &back);
        assert!(fs::read(&back).unwrap() == expected);
    };
    let uri = attach(&image);
    fs::write(&data, content(3)).unwrap();
    copy(&data, &uri);
    kill(place.pid("k"));
    let convert = ["convert", "-U", "-f", "qcow2", "-O", "raw", &image, &back];
    // The kernel unlocks a ring's files only some time after the process has exited.
    wait_until("the image is read", || {
        Command::new("qemu-img").args(convert).output().unwrap().status.success()
    });
    assert!(fs::read(&back).unwrap() != content(3), "the image has it without the journal");
    let uri = attach(&image);
    holds(&uri, &content(3));
    // Of a snapshot, whose journal a confined daemon makes.
    place.done(&["snapshot", "k", "--to", &top]);
    fs::write(&data, content(5)).unwrap();
    copy(&data, &uri);
    assert_eq!(fs::read_dir(&journals).unwrap().count(), 1);
    kill(place.pid("k"));
    let uri = attach(&top);
    holds(&uri, &content(5));
    place.done(&["detach", "k"]);
    assert_eq!(fs::read_dir(&journals).unwrap().count(), 0);
    for (image, expected) in [(&image, content(3)), (&top, content(5))] {
        run("qemu-img", &["check", "-f", "qcow2", image]);
        run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", image, &back]);
        assert!(fs::read(&back).unwrap() == expected);
    }
}

#[test]
fn without_journals_raw_images_are_attached_with_a_warning() {
    let place = Place::new("qcow2-none");
    let (raw, image) = (place.image("raw.img", 1 << 20), place.dir.join("d.qcow2"));
    let image = image.to_str().unwrap();
    run("qemu-img", &["create", "-q", "-f", "qcow2", image, "1M"]);
    fs::create_dir(place.state()).unwrap();
    fs::write(place.state().join("journals"), "").unwrap();
    let attached = place.run(&["attach", &raw, "--format", "raw", "--name", "r"]);
    let warned = without_progress(attached.stderr);
    assert!(attached.status.success() && warned.contains("after a snapshot"), "{warned}");
    let line = place.refused(&["attach", image, "--format", "qcow2", "--name", "q"]);
    assert!(line.contains("journals"), "{line}");
}

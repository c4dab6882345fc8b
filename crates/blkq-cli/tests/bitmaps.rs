//! Allocation depth and dirty bitmaps over NBD, compared with QEMU's programs on the same images.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::{Command, Stdio};

use crate::place::client::{kept_image, kill_and_wait};
use crate::place::qemu::*;
use crate::place::*;

#[test]
fn allocation_depth_is_what_qemu_nbd_reports() {
    let place = Place::new("depth");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (raw, short, base, top) = (path("raw"), path("short.qcow2"), path("base.qcow2"), path("top.qcow2"));
    fs::write(&raw, vec![1; 1 << 20]).unwrap();
    run("qemu-img", &["create", "-q", "-f", "qcow2", &short, "3M"]);
    qemu_io("qcow2", &short, &["write -P 1 0 1M"]);
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &short, "-F", "qcow2", &base, "8M"]);
    qemu_io("qcow2", &base, &["write -P 2 512k 1M", "write -z 2M 64k", "write -P 2 4M 64k"]);
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2", &top, "8M"]);
    qemu_io(
        "qcow2",
        &top,
        &["write -P 3 1M 64k", "write -z 512k 64k", "write -c -P 4 5M 64k", "write 7M 1M"],
    );
    let over_raw = path("over.qcow2");
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &raw, "-F", "raw", &over_raw, "2M"]);
    for (image, format) in [(&raw, "raw"), (&short, "qcow2"), (&top, "qcow2"), (&over_raw, "qcow2")] {
        let map = |words: &[&str]| run("nbdinfo", &[&["--map=qemu:allocation-depth"], words].concat());
        let expected = map(&["--", "[", "qemu-nbd", "-r", "-A", "-f", format, image, "]"]);
        let uri = place.done(&["attach", image, "--format", format, "--export", "nbd", "--name", "d"]);
        assert_eq!(map(&[uri.trim()]), expected, "{image}");
        let listed = run("nbdinfo", &["--list", uri.trim()]);
        assert!(listed.contains("base:allocation") && listed.contains("qemu:allocation-depth"), "{listed}");
        place.done(&["detach", "d"]);
    }
}

// Contract: bitmaps
#[test]
fn a_bitmap_of_qemu_gets_the_writes_of_blkq() {
    let place = Place::new("bitmap-qemu");
    for (number, create) in ["cluster_size=64k", "cluster_size=512", "cluster_size=2M"].iter().enumerate() {
        let image = place.dir.join(format!("{number}.qcow2")).to_str().unwrap().to_owned();
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", create, &image, "64M"]);
        run("qemu-img", &["bitmap", "--add", "-g", "32k", &image, "b0"]);
        run("qemu-img", &["bitmap", "--add", "--disable", &image, "off"]);
        qemu_io("qcow2", &image, &["write -P 1 0 1k"]);
        let uri = place.done(&["attach", &image, "--format", "qcow2", "--export", "nbd", "--name", "q"]);
        let uri = uri.trim().to_owned();
        assert_eq!(dirty(&[&uri], "b0"), [(0, 32 * K)]);
        let commands = ["write -P 2 1M 4k", "discard 2M 64k", "write -z 33M 512k", "write -P 2 64511k 1k"];
        qemu_io("raw", &uri, &[&commands[..], &["read 40M 1M", "flush"]].concat());
        let expected =
            [(0, 32 * K), (K << 10, 32 * K), (2 << 20, 64 * K), (33 << 20, 512 * K), (64480 * K, 32 * K)];
        assert_eq!(dirty(&[&uri], "b0"), expected, "{create}");
        assert_eq!(dirty(&[&uri], "off"), []);
        place.done(&["detach", "q"]);
        run("qemu-img", &["check", "-f", "qcow2", &image]);
        assert_eq!(in_qemu_nbd(&image, "b0"), expected, "{create}");
        // QEMU updates the bitmap, and blkq continues with the result.
        qemu_io("qcow2", &image, &["write -P 3 48M 32k"]);
        let attach = ["attach", &image, "--format", "qcow2", "--export", "nbd", "--name", "q"];
        let uri = place.done(&attach).trim().to_owned();
        assert_eq!(dirty(&[&uri], "b0").len(), expected.len() + 1);
        assert_eq!(
            (state(&place, "q", "b0"), state(&place, "q", "off")),
            ("recording".into(), "disabled".into())
        );
        place.done(&["bitmap", "clear", "q", "b0"]);
        assert_eq!(dirty(&[&uri], "b0"), []);
        place.done(&["bitmap", "remove", "q", "off"]);
        place.done(&["detach", "q"]);
        run("qemu-img", &["check", "-f", "qcow2", &image]);
        let info = run("qemu-img", &["info", &image]);
        assert!(info.contains("name: b0") && !info.contains("name: off"), "{info}");
        assert!(!info.contains("in-use"), "{info}");
        assert_eq!(in_qemu_nbd(&image, "b0"), []);
    }
}

#[test]
fn a_bitmap_of_blkq_is_read_by_qemu() {
    let place = Place::new("bitmap-blkq");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (base, image) = (path("base"), path("d.qcow2"));
    fs::write(&base, vec![1; 1 << 20]).unwrap();
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &image, "1G"]);
    let attach = ["attach", &image, "--format", "qcow2", "--export", "nbd", "--name", "q"];
    let uri = place.done(&attach).trim().to_owned();
    qemu_io("raw", &uri, &["write -P 1 5M 64k"]);
    place.done(&["bitmap", "add", "q", "one two"]);
    place.done(&["bitmap", "add", "q", "fine", "--granularity", "512"]);
    for (words, why) in [
        (&["add", "q", "fine"][..], "already"),
        (&["add", "q", "x", "--granularity", "1000"], "power of two"),
        (&["add", "q", "a\nb"], "control characters"),
        (&["remove", "q", "none"], "no bitmap none"),
        (&["clear", "q", "none"], "no bitmap none"),
    ] {
        let line = place.refused(&[&["bitmap"], words].concat());
        assert!(line.contains(why), "{line}");
    }
    let listed = run("nbdinfo", &["--list", &uri]);
    assert!(listed.contains("qemu:dirty-bitmap:one two"), "{listed}");
    qemu_io("raw", &uri, &["write -P 2 10M 512", "write -P 2 100M 1M"]);
    place.done(&["resize", "q", "2G"]);
    let (grown, coarse) =
        ((1 << 30, 1 << 30), [(10 << 20, 64 * K), (100 << 20, K << 10), (1 << 30, 1 << 30)]);
    place.done(&["detach", "q"]);
    run("qemu-img", &["check", "-f", "qcow2", &image]);
    assert_eq!(in_qemu_nbd(&image, "one two"), coarse);
    assert_eq!(in_qemu_nbd(&image, "fine"), [(10 << 20, 512), (100 << 20, K << 10), grown]);
    // A read-only attach does not mark the bitmaps as in use.
    let mut read_only = attach.to_vec();
    read_only.push("--read-only");
    let before = fs::read(&image).unwrap();
    let uri = place.done(&read_only).trim().to_owned();
    assert_eq!(dirty(&[&uri], "one two"), coarse);
    for words in [["add", "q", "more"], ["clear", "q", "fine"], ["remove", "q", "fine"]] {
        assert!(place.refused(&[&["bitmap"], &words[..]].concat()).contains("read-only"));
    }
    place.done(&["detach", "q"]);
    assert!(fs::read(&image).unwrap() == before, "a read-only attach changed the image");
    place.done(&attach);
    place.done(&["bitmap", "remove", "q", "one two"]);
    place.done(&["bitmap", "remove", "q", "fine"]);
    place.done(&["detach", "q"]);
    run("qemu-img", &["check", "-f", "qcow2", &image]);
    assert!(!run("qemu-img", &["info", &image]).contains("bitmaps"));
    assert!(run("qemu-img", &["info", &image]).contains(&format!("backing file: {base}")));
}

#[test]
fn a_snapshot_keeps_bitmaps_in_both_images() {
    let place = Place::new("bitmap-snapshot");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (image, top) = (path("d.qcow2"), path("top.qcow2"));
    run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "8M"]);
    let attach = ["attach", &image, "--format", "qcow2", "--export", "nbd", "--name", "q"];
    let uri = place.done(&attach).trim().to_owned();
    place.done(&["bitmap", "add", "q", "b0"]);
    qemu_io("raw", &uri, &["write -P 1 1M 64k"]);
    place.done(&["snapshot", "q", "--to", &top]);
    qemu_io("raw", &uri, &["write -P 2 2M 64k"]);
    let (before, after) = ([(K << 10, 64 * K)], [(K << 10, 64 * K), (2 << 20, 64 * K)]);
    assert_eq!(dirty(&[&uri], "b0"), after);
    assert_eq!(in_qemu_nbd(&image, "b0"), before, "the snapshot must not change the bitmap of the old image");
    let read = ["attach", &image, "--format", "qcow2", "--export", "nbd", "--name", "copy", "--read-only"];
    assert_eq!(dirty(&[place.done(&read).trim()], "b0"), before);
    place.done(&["detach", "copy"]);
    place.done(&["detach", "q"]);
    for image in [&image, &top] {
        run("qemu-img", &["check", "-f", "qcow2", image]);
    }
    assert_eq!(in_qemu_nbd(&top, "b0"), after);
}

// Contract: bitmaps
#[test]
fn after_a_kill_a_bitmap_is_inconsistent() {
    let place = Place::new("bitmap-kill");
    let image = place.dir.join("d.qcow2").to_str().unwrap().to_owned();
    run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "8M"]);
    run("qemu-img", &["bitmap", "--add", &image, "b0"]);
    let attach = ["attach", &image, "--format", "qcow2", "--export", "nbd", "--name", "q"];
    place.done(&attach);
    kill(place.pid("q"));
    // -U: the kernel drops the lock of the image some time after the kill.
    assert!(run("qemu-img", &["info", "-U", &image]).contains("in-use"));
    let attached = place.run(&attach);
    let warned = String::from_utf8(attached.stderr).unwrap();
    assert!(attached.status.success() && warned.contains("inconsistent"), "{warned}");
    let uri = String::from_utf8(attached.stdout).unwrap().trim().to_owned();
    assert_eq!(state(&place, "q", "b0"), "inconsistent");
    assert!(!run("nbdinfo", &["--list", &uri]).contains("dirty-bitmap"));
    assert!(place.refused(&["bitmap", "clear", "q", "b0"]).contains("remove it and add it again"));
    place.done(&["detach", "q"]);
    assert!(run("qemu-img", &["info", &image]).contains("in-use"), "the bitmap must remain marked as in use");
    assert!(place.run(&attach).status.success());
    place.done(&["bitmap", "remove", "q", "b0"]);
    place.done(&["bitmap", "add", "q", "b0"]);
    place.done(&["detach", "q"]);
    run("qemu-img", &["check", "-f", "qcow2", &image]);
    assert_eq!(in_qemu_nbd(&image, "b0"), []);
}

#[test]
fn bitmaps_that_are_too_many_stay_in_the_image() {
    let place = Place::new("bitmap-many");
    let image = place.dir.join("d.qcow2").to_str().unwrap().to_owned();
    // With sectors of 4096 bytes the device does not include the last 512 bytes of the image.
    run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "1049088"]);
    let names: Vec<String> = (0..66).map(|number| format!("b{number:02}")).collect();
    let add: Vec<&str> = ["bitmap", "--add", "-g", "512", &image].into();
    names.iter().for_each(|name| drop(run("qemu-img", &[&add[..], &[name]].concat())));
    qemu_io("qcow2", &image, &["write 1M 512"]);
    let sector = ["--sector-size", "4096"];
    let attach = ["attach", &image, "--format", "qcow2", "--export", "nbd", "--name", "q"];
    let attached = place.run(&[&attach[..], &sector].concat());
    let warned = String::from_utf8(attached.stderr).unwrap();
    assert!(attached.status.success() && warned.contains("2 bitmaps in"), "{warned}");
    assert!(warned.contains("more than 64; one of them is b64"), "{warned}");
    place.done(&["bitmap", "remove", "q", "b63"]);
    place.done(&["detach", "q"]);
    run("qemu-img", &["check", "-f", "qcow2", &image]);
    let info = run("qemu-img", &["info", &image]);
    let is_there = |name: &String| info.contains(&format!("name: {name}"));
    let left: Vec<&String> = names.iter().filter(|name| !is_there(name)).collect();
    assert_eq!((left, info.matches("in-use").count()), (vec![&names[63]], 2));
    assert_eq!(in_qemu_nbd(&image, "b00"), [(K << 10, 512)]);
}

// Contract: bitmaps
#[test]
fn a_raw_image_has_its_bitmaps_in_a_file_beside_it() {
    let place = Place::new("bitmap-raw");
    let image = place.image("d.img", 8 << 20);
    let file = place.dir.join("d.img.bitmaps");
    let attach = ["attach", &image, "--export", "nbd", "--name", "r"];
    let attached = || {
        let output = place.run(&attach);
        assert!(output.status.success());
        (
            String::from_utf8(output.stdout).unwrap().trim().to_owned(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    attached();
    place.done(&["bitmap", "add", "r", "b0"]);
    place.done(&["bitmap", "remove", "r", "b0"]);
    place.done(&["detach", "r"]);
    assert_eq!(fs::metadata(&file).unwrap().len(), 0, "the file must be empty without bitmaps");
    // A daemon that was killed while it created the file leaves it empty.
    fs::write(&file, "").unwrap();
    let uri = attached().0;
    qemu_io("raw", &uri, &["write -P 1 0 64k"]);
    place.done(&["bitmap", "add", "r", "b0"]);
    place.done(&["bitmap", "add", "r", "b1", "--granularity", "4K"]);
    qemu_io("raw", &uri, &["write -P 2 1M 4k", "discard 2M 64k", "write -P 3 8191k 1k"]);
    let expected = [(K << 10, 64 * K), (2 << 20, 64 * K), (8128 * K, 64 * K)];
    assert_eq!(dirty(&[&uri], "b0"), expected);
    place.done(&["detach", "r"]);

    let (uri, warned) = attached();
    assert_eq!((dirty(&[&uri], "b0"), warned.as_str()), (expected.to_vec(), ""));
    assert_eq!(dirty(&[&uri], "b1"), [(K << 10, 4 * K), (2 << 20, 64 * K), (8188 * K, 4 * K)]);
    place.done(&["bitmap", "remove", "r", "b1"]);
    place.done(&["detach", "r"]);
    for (kill_it, why) in [(true, "was not closed"), (false, "another program has written to")] {
        attached();
        if kill_it {
            kill(place.pid("r"));
        } else {
            place.done(&["bitmap", "remove", "r", "b0"]);
            place.done(&["bitmap", "add", "r", "b0"]);
            place.done(&["detach", "r"]);
            fs::File::options().write(true).open(&image).unwrap().write_at(b"x", 0).unwrap();
        }
        let (uri, warned) = attached();
        assert!(warned.contains("b0") && warned.contains(why), "{warned}");
        assert_eq!(state(&place, "r", "b0"), "inconsistent");
        assert!(!run("nbdinfo", &["--list", &uri]).contains("dirty-bitmap"));
        place.done(&["detach", "r"]);
    }
    // A file that blkq did not write, or of an unknown version, is not changed.
    for (content, why) in [
        (&b"an image"[..], "is not a bitmap file"),
        (b"blkqbmap\x03\0\0\0", "is damaged"),
        (b"blkqbmap\xff\0\0\0", "version 255"),
    ] {
        fs::write(&file, content).unwrap();
        let warned = attached().1;
        assert!(warned.contains(why), "{warned}");
        let refused = place.refused(&["bitmap", "add", "r", "b0"]);
        assert!(refused.contains("remove it"), "{refused}");
        place.done(&["detach", "r"]);
        assert_eq!(fs::read(&file).unwrap(), content);
    }
    fs::remove_file(&file).unwrap();
    attached();
    place.done(&["bitmap", "add", "r", "lost"]);
    fs::remove_file(&file).unwrap();
    place.done(&["bitmap", "add", "r", "b0"]);
    place.done(&["detach", "r"]);
    let (uri, warned) = attached();
    assert_eq!((dirty(&[&uri], "b0"), warned.as_str()), (vec![], ""));
    place.done(&["bitmap", "remove", "r", "lost"]);
    fs::rename(&file, place.dir.join("moved")).unwrap();
    let refused = place.refused(&["bitmap", "add", "r", "b1"]);
    assert!(refused.contains("was moved"), "{refused}");
    fs::rename(place.dir.join("moved"), &file).unwrap();
    place.done(&["detach", "r"]);

    let part = ["attach", &image, "--offset", "4096", "--export", "nbd", "--name", "p"];
    place.done(&part);
    assert!(place.refused(&["bitmap", "add", "p", "b0"]).contains("only a part of it"));
    place.done(&["attach", "ram:1M", "--export", "nbd", "--name", "m"]);
    assert!(place.refused(&["bitmap", "add", "m", "b0"]).contains("no image in a file"));
    place.done(&["detach", "--all"]);
}

#[test]
fn an_image_that_is_called_as_bitmaps_is_left_alone() {
    let place = Place::new("bitmap-image");
    let (image, other) = (place.image("vm", 1 << 20), place.image("vm.bitmaps", 1 << 20));
    let content = [&b"blkqbmap"[..], &[7; 4096]].concat();
    fs::File::options().write(true).open(&other).unwrap().write_at(&content, 0).unwrap();
    for is_used in [true, false] {
        if is_used {
            place.done(&["attach", &other, "--export", "nbd", "--name", "other"]);
        }
        let attached = place.run(&["attach", &image, "--export", "nbd", "--name", "vm"]);
        let warned = String::from_utf8(attached.stderr).unwrap();
        assert!(attached.status.success() && warned.contains("bitmaps"), "{warned}");
        place.done(&["detach", "--all"]);
        assert!(fs::read(&other).unwrap().starts_with(&content));
        assert_eq!(fs::metadata(&other).unwrap().len(), 1 << 20);
    }
}

#[test]
fn a_snapshot_of_a_raw_image_leaves_its_bitmaps_beside_it() {
    let place = Place::new("bitmap-raw-snapshot");
    let (image, top) =
        (place.image("d.img", 8 << 20), place.dir.join("top.qcow2").to_str().unwrap().to_owned());
    let uri = place.done(&["attach", &image, "--export", "nbd", "--sector-size", "512", "--name", "r"]);
    place.done(&["bitmap", "add", "r", "b0"]);
    let made = fs::metadata(format!("{image}.bitmaps")).unwrap();
    assert_eq!(made.permissions().mode() & 0o777, 0o600);
    qemu_io("raw", uri.trim(), &["write -P 1 1M 64k"]);
    place.done(&["snapshot", "r", "--to", &top]);
    qemu_io("raw", uri.trim(), &["write -P 2 2M 64k"]);
    let copy = place.done(&["attach", &image, "--export", "nbd", "--name", "copy", "--read-only"]);
    assert_eq!(dirty(&[copy.trim()], "b0"), [(K << 10, 64 * K)]);
    assert_eq!(dirty(&[uri.trim()], "b0"), [(K << 10, 64 * K), (2 << 20, 64 * K)]);
    place.done(&["detach", "--all"]);
    assert_eq!(in_qemu_nbd(&top, "b0"), [(K << 10, 64 * K), (2 << 20, 64 * K)]);
}

/// Whether the bitmap file of a raw image is marked as in use, by the flags of the newer header slot.
fn is_in_use(file: &[u8]) -> bool {
    let slots = [0, 72 << 10].map(|at| file.get(at..at + 24).filter(|slot| slot.starts_with(b"blkqbmap")));
    let last =
        slots.into_iter().flatten().max_by_key(|slot| u64::from_le_bytes(slot[16..].try_into().unwrap()));
    last.is_none_or(|slot| slot[12] & 1 == 1)
}

/// Whether no bitmap of an image is consistent: there are none, or all are marked as in use.
fn has_none_consistent(format: &str, image: &str) -> bool {
    if format == "raw" {
        return fs::read(format!("{image}.bitmaps")).map_or(true, |file| is_in_use(&file));
    }
    let info = run("qemu-img", &["info", "-U", "-f", format, image]);
    info.matches("granularity:").count() == info.matches("in-use").count()
}

// Contract: bitmaps
#[test]
fn bitmaps_continue_in_the_backing_file_after_a_commit() {
    for format in ["raw", "qcow2"] {
        let place = Place::new(&format!("bitmap-commit-{format}"));
        let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
        let (base, top) = (path("base"), path("top"));
        run("qemu-img", &["create", "-q", "-f", format, &base, "8M"]);
        let attach =
            |image, format| ["attach", image, "--format", format, "--sector-size", "512", "--name", "q"];
        let uri = place.done(&attach(&base, format)).trim().to_owned();
        place.done(&["bitmap", "add", "q", "b0"]);
        place.done(&["bitmap", "add", "q", "old"]);
        let mut expected = Vec::new();
        for round in 0..3 {
            let at = |offset: u64| (round * 256 + offset) * K;
            let mut write = |offset: u64| {
                qemu_io("raw", &uri, &[&format!("write -P {} {} 64k", round + 1, at(offset)), "flush"]);
                expected.push((at(offset), 64 * K));
            };
            write(0);
            place.done(&["snapshot", "q", "--to", &top]);
            write(128);
            if round == 0 {
                // The backing file still contains the bitmap.
                place.done(&["bitmap", "remove", "q", "old"]);
                place.done(&["bitmap", "add", "q", "b1", "--granularity", "4K"]);
                qemu_io("raw", &uri, &["write -P 9 7M 4k", "flush"]);
                expected.push((7 << 20, 64 * K));
            }
            expected.sort_unstable();
            // After another attach the overlay contains the bitmaps; the commit must remove them from it.
            if round == 2 {
                place.done(&["detach", "q"]);
                assert_eq!(in_qemu_nbd(&top, "b0"), expected);
                place.done(&attach(&top, "qcow2"));
            }
            let before = [dirty(&[&uri], "b0"), dirty(&[&uri], "b1")];
            assert_eq!(before[0], expected);
            assert_eq!(place.done(&["commit", "q"]), format!("{base}\n"));
            assert_eq!([dirty(&[&uri], "b0"), dirty(&[&uri], "b1")], before, "a copy sets no bit");
            assert!(
                has_none_consistent(format, &base),
                "bitmaps of an attached device must be marked as in use"
            );
            assert!(!run("qemu-img", &["info", &top]).contains("bitmaps"));
            // Checked without the backing file, which is in use.
            let file = serde_json::json!({"driver": "file", "filename": top});
            let alone = serde_json::json!({"driver": "qcow2", "file": file, "backing": null});
            run("qemu-img", &["check", "-q", &format!("json:{alone}")]);
            fs::remove_file(&top).unwrap();
        }
        qemu_io("raw", &uri, &["write -P 4 6M 64k", "flush"]);
        expected.push((6 << 20, 64 * K));
        expected.sort_unstable();
        let fine = dirty(&[&uri], "b1");
        assert!(fine.contains(&(7 << 20, 4 * K)) && fine.contains(&(6 << 20, 64 * K)), "{fine:?}");
        place.done(&["detach", "q"]);
        if format == "qcow2" {
            run("qemu-img", &["check", "-q", "-f", format, &base]);
            assert_eq!(
                [in_qemu_nbd(&base, "b0"), in_qemu_nbd(&base, "b1")],
                [expected.clone(), fine.clone()]
            );
        }
        place.done(&attach(&base, format));
        assert_eq!([dirty(&[&uri], "b0"), dirty(&[&uri], "b1")], [expected, fine]);
        let states = ["b0", "b1", "old"].map(|bitmap| state(&place, "q", bitmap));
        assert_eq!(states, ["recording", "recording", "none"]);
    }
}

// Contract: bitmaps
#[test]
fn after_a_kill_in_a_commit_no_bitmap_is_trusted() {
    for format in ["raw", "qcow2"] {
        let place = Place::new(&format!("bitmap-commit-kill-{format}"));
        let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
        let (base, top) = (path("base"), path("top"));
        let mut finished = 0;
        for number in 0..8u64 {
            [&base, &top].iter().for_each(|image| drop(fs::remove_file(image)));
            drop(fs::remove_file(format!("{base}.bitmaps")));
            run("qemu-img", &["create", "-q", "-f", format, &base, "64M"]);
            let attach = ["attach", &base, "--format", format, "--sector-size", "512", "--name", "q"];
            let uri = place.done(&attach).trim().to_owned();
            for name in ["both", "old"] {
                place.done(&["bitmap", "add", "q", name]);
            }
            place.done(&["snapshot", "q", "--to", &top]);
            place.done(&["bitmap", "remove", "q", "old"]);
            place.done(&["bitmap", "add", "q", "new"]);
            qemu_io("raw", &uri, &["write -P 1 0 48M", "flush"]);
            let pid = place.pid("q");
            if number == 0 {
                // The commit of the first round cannot finish before the kill, even on a slow machine.
                signal(pid, rustix::process::Signal::STOP);
            }
            let mut command = place.command(&["commit", "q"]);
            let mut command = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            // The rounds kill the daemon before, during, at the end of, and after the copy.
            match number {
                7 => assert!(command.wait().unwrap().success()),
                _ => std::thread::sleep(std::time::Duration::from_millis(number * number * 8)),
            }
            kill_and_wait(pid, &[&base, &top]);
            let done = command.wait().unwrap().success();
            finished += u64::from(done);
            let is_behind = kept_image(&place, "q") == base;
            // The image to attach next has no consistent bitmap, nor has a backing file that was written.
            let (image, its_format) = if is_behind { (&base, format) } else { (&top, "qcow2") };
            assert!(has_none_consistent(its_format, image), "{number}: in {image}");
            let zeroes = ["-f", format, "-r", "-c", "read -P 0 0 64k", &base];
            let is_written = !Command::new("qemu-io").args(zeroes).output().unwrap().status.success();
            assert!(!is_written || has_none_consistent(format, &base), "{number}: {base}");
            assert!(!done || is_behind);
            let words = ["attach", image, "--format", its_format, "--sector-size", "512", "--name", "q"];
            assert!(place.run(&words).status.success());
            let states = ["both", "old", "new"].map(|bitmap| state(&place, "q", bitmap));
            assert!(states.iter().all(|state| state == "none" || state == "inconsistent"), "{states:?}");
            place.done(&["detach", "q"]);
        }
        assert!(finished > 0 && finished < 8, "{finished} were not killed in time");
    }
}

// Contract: bitmaps
#[test]
fn a_commit_that_stops_leaves_bitmaps_to_the_device() {
    let place = Place::new("bitmap-commit-stop");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (base, top, old) = (path("base"), path("top"), path("old"));
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "compat=0.10", &old, "8M"]);
    let uri = place.done(&["attach", &old, "--overlay", &top, "--format", "qcow2", "--name", "q"]);
    place.done(&["bitmap", "add", "q", "b0"]);
    qemu_io("raw", uri.trim(), &["write -P 1 1M 64k", "flush"]);
    let refused = place.refused(&["commit", "q"]);
    assert!(
        refused.contains("cannot store the dirty bitmap b0") && refused.contains("version 2"),
        "{refused}"
    );
    assert_eq!(dirty(&[uri.trim()], "b0"), [(K << 10, 64 * K)]);
    place.done(&["detach", "q"]);
    assert_eq!(in_qemu_nbd(&top, "b0"), [(K << 10, 64 * K)]);
    // Another file has the name of the backing file's bitmap file.
    fs::remove_file(&top).unwrap();
    place.image("base", 8 << 20);
    let uri = place.done(&["attach", &base, "--overlay", &top, "--name", "q"]);
    place.done(&["bitmap", "add", "q", "b0"]);
    let file = format!("{base}.bitmaps");
    fs::write(&file, "an image").unwrap();
    let refused = place.refused(&["commit", "q"]);
    assert!(refused.contains("is not a bitmap file"), "{refused}");
    assert_eq!(fs::read(&file).unwrap(), b"an image");
    fs::remove_file(&file).unwrap();
    qemu_io("raw", uri.trim(), &["write -P 1 1M 64k", "flush"]);
    fs::File::options().write(true).open(&base).unwrap().set_len(16 << 20).unwrap();
    assert!(place.refused(&["commit", "q"]).contains("blkq resize"));
    assert!(!fs::exists(&file).unwrap(), "the refused commit left its bitmap file");
    place.done(&["detach", "q"]);
    assert_eq!(in_qemu_nbd(&top, "b0"), [(K << 10, 64 * K)]);
    // A refused commit does not change the bitmaps of the backing file.
    let low = path("low");
    for (clusters, size, why) in
        [("cluster_size=64k", "8M", "blkq resize"), ("cluster_size=512", "32M", "its L1 table maps ")]
    {
        fs::remove_file(&top).unwrap();
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", clusters, &low, "16M"]);
        run("qemu-img", &["bitmap", "--add", &low, "b1"]);
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &low, "-F", "qcow2", &top, size]);
        place.done(&["attach", &top, "--format", "qcow2", "--name", "q"]);
        let refused = place.refused(&["commit", "q"]);
        assert!(refused.contains(why), "{refused}");
        place.done(&["detach", "q"]);
        assert_eq!(in_qemu_nbd(&low, "b1"), []);
    }
}

#[test]
fn a_device_that_became_writable_has_bitmaps() {
    let place = Place::new("bitmap-writable");
    let image = place.image("image", 1 << 20);
    place.done(&["attach", &image, "--name", "d", "--read-only", "--export", "vhost-user-blk"]);
    place.done(&["set", "d", "read-only=off"]);
    place.done(&["bitmap", "add", "d", "b"]);
    // The next daemon cannot make an image writable that it opened with bitmaps for reading.
    place.done(&["upgrade", "d"]);
    assert_eq!(state(&place, "d", "b"), "recording");
    kill_and_wait(place.pid("d"), &[&image]);
    // The command warns that the bitmap is inconsistent.
    assert!(place.run(&["recover", "d"]).status.success());
    assert_eq!(place.json(&["show", "d", "--json"])["read_only"], false);
    place.done(&["detach", "d"]);
}

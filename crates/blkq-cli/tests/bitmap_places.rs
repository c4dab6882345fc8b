//! The file or table of the bitmaps may be unusable: the image is attached nevertheless, and nothing is overwritten.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::place::qemu::*;
use crate::place::*;

const OTHER_UID: u32 = 65534;

/// Attaches `image` as device `q`. Returns the URI and the warnings.
fn attach(place: &Place, image: &str, options: &[&str]) -> (String, String) {
    let output = place.run(&[&["attach", image, "--export", "nbd", "--name", "q"], options].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (text(output.stdout).trim().to_owned(), text(output.stderr))
}

#[test]
fn anything_in_the_place_of_bitmaps_is_a_warning() {
    let place = Place::new("place-kinds");
    let image = place.image("d.img", 1 << 20);
    let file = place.dir.join("d.img.bitmaps");
    let make: [(&dyn Fn(), &str); 3] = [
        (&|| fs::create_dir(&file).unwrap(), "directory"),
        (&|| symlink("d.img", &file).unwrap(), "symbolic links"),
        (&|| drop(run("mkfifo", &[file.to_str().unwrap()])), "no regular file"),
    ];
    for (make, why) in make {
        make();
        for options in [&[][..], &["--read-only"]] {
            let (_, warned) = attach(&place, &image, options);
            assert!(warned.contains("bitmaps") && warned.contains("warning: "), "{why}: {warned}");
            let refused = place.refused(&["bitmap", "add", "q", "b"]);
            assert!(!options.is_empty() || refused.contains("d.img.bitmaps"), "{refused}");
            place.done(&["detach", "q"]);
        }
        let removed = if file.is_dir() { fs::remove_dir(&file) } else { fs::remove_file(&file) };
        removed.unwrap();
    }
    let long = place.image(&"n".repeat(250), 1 << 20);
    assert_eq!(attach(&place, &long, &[]).1, "");
    assert!(place.refused(&["bitmap", "add", "q", "b"]).contains("too long"));
    place.done(&["detach", "q"]);
}

/// A directory that an unprivileged user can write, and a function that runs the command as that user.
fn for_other_user(test: &str) -> (Place, impl Fn(&[&str]) -> (bool, String)) {
    let place = Place::new(test);
    chown(&place.dir, None, Some(OTHER_UID)).unwrap();
    fs::set_permissions(&place.dir, Permissions::from_mode(0o775)).unwrap();
    let (program, state) = (place.dir.join("blkq"), place.dir.join("other-state"));
    fs::copy(env!("CARGO_BIN_EXE_blkq"), &program).unwrap();
    let run = move |words: &[&str]| {
        let mut command = Command::new(&program);
        command.args(words).env("BLKQ_STATE_DIR", &state).uid(OTHER_UID).gid(OTHER_UID);
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        (output.status.success(), text + &String::from_utf8(output.stdout).unwrap())
    };
    (place, run)
}

#[test]
fn a_file_that_may_not_be_read_is_a_warning() {
    let (place, run_other) = for_other_user("place-denied");
    let image = place.image("d.img", 1 << 20);
    attach(&place, &image, &[]);
    place.done(&["bitmap", "add", "q", "b"]);
    place.done(&["detach", "q"]);
    let attached = run_other(&["attach", &image, "--read-only", "--export", "nbd", "--name", "q"]);
    assert!(attached.0 && attached.1.contains("no dirty bitmaps are loaded: cannot open"), "{}", attached.1);
    assert_eq!(run_other(&["detach", "q"]), (true, String::new()));
    assert_eq!(attach(&place, &image, &["--read-only"]).1, "");
    assert_eq!(state(&place, "q", "b"), "recording");
    place.done(&["detach", "q"]);
}

#[test]
fn a_writer_that_is_not_the_owner_adds_bitmaps() {
    let (place, run_other) = for_other_user("place-group");
    let image = place.image("d.img", 1 << 20);
    chown(&image, None, Some(OTHER_UID)).unwrap();
    fs::set_permissions(&image, Permissions::from_mode(0o660)).unwrap();
    let attached = run_other(&["attach", &image, "--export", "nbd", "--name", "q"]);
    assert!(attached.0, "{}", attached.1);
    assert_eq!(run_other(&["bitmap", "add", "q", "b"]), (true, String::new()));
    assert_eq!(run_other(&["detach", "q"]), (true, String::new()));
    let made = fs::metadata(format!("{image}.bitmaps")).unwrap();
    assert_eq!((made.uid(), made.mode() & 0o777), (OTHER_UID, 0o600));
}

#[test]
fn a_table_beyond_the_end_of_an_image_is_a_warning() {
    let place = Place::new("place-beyond");
    let image = place.dir.join("d.qcow2").to_str().unwrap().to_owned();
    run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "8M"]);
    for name in ["b0", "b1"] {
        run("qemu-img", &["bitmap", "--add", &image, name]);
    }
    let file = File::options().read(true).write(true).open(&image).unwrap();
    let mut header = vec![0; 65536];
    file.read_exact_at(&mut header, 0).unwrap();
    let extension = header.windows(4).position(|bytes| bytes == 0x2385_2875u32.to_be_bytes()).unwrap();
    let directory = u64::from_be_bytes(*header[extension + 24..].first_chunk().unwrap());
    file.write_all_at(&(1u64 << 40).to_be_bytes(), directory).unwrap();
    for options in [&["--read-only"][..], &[]] {
        let (_, warned) = attach(&place, &image, &[&["--format", "qcow2"], options].concat());
        assert!(warned.contains("beyond the end of the file"), "{warned}");
        assert_eq!((state(&place, "q", "b0"), state(&place, "q", "b1")), ("none".into(), "recording".into()));
        place.done(&["detach", "q"]);
    }
    assert!(run("qemu-img", &["info", &image]).contains("name: b1"));
}

// Contract: bitmaps
#[test]
fn bitmaps_of_a_read_only_device_stay_as_they_are() {
    let place = Place::new("place-read-only");
    for format in ["raw", "qcow2"] {
        let image = place.dir.join(format).to_str().unwrap().to_owned();
        run("qemu-img", &["create", "-q", "-f", format, &image, "8M"]);
        let (uri, _) = attach(&place, &image, &["--format", format]);
        place.done(&["bitmap", "add", "q", "b"]);
        qemu_io("raw", &uri, &["write -P 1 1M 64k"]);
        place.done(&["detach", "q"]);
        let (uri, warned) = attach(&place, &image, &["--format", format, "--read-only"]);
        assert_eq!(warned, "");
        for words in [["add", "q", "c"], ["remove", "q", "b"], ["clear", "q", "b"], ["disable", "q", "b"]] {
            assert!(place.refused(&[&["bitmap"], &words[..]].concat()).contains("read-only"), "{words:?}");
        }
        assert_eq!(dirty(&[&uri], "b"), [(K << 10, 64 * K)]);
        place.done(&["detach", "q"]);
    }
}

#[test]
fn bitmaps_are_kept_in_an_image_with_short_holes() {
    let place = Place::new("place-holes");
    let image = place.dir.join("d.qcow2").to_str().unwrap().to_owned();
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", &image, "256M"]);
    let (uri, _) = attach(&place, &image, &["--format", "qcow2"]);
    let discards: Vec<String> = (0..200).map(|number| format!("discard {}k 512", number)).collect();
    let discards: Vec<&str> = discards.iter().map(|discard| &discard[..]).collect();
    qemu_io("raw", &uri, &[&["write -P 1 0 200k", "flush"], &discards[..], &["flush"]].concat());
    // The bitmap table is 1 KiB long and needs two contiguous clusters.
    place.done(&["bitmap", "add", "q", "b", "--granularity", "512"]);
    qemu_io("raw", &uri, &["write -P 2 128M 512"]);
    place.done(&["detach", "q"]);
    run("qemu-img", &["check", "-f", "qcow2", &image]);
    assert_eq!(in_qemu_nbd(&image, "b"), [(128 << 20, 512)]);
}

#[test]
fn a_header_without_room_refuses_a_bitmap_at_once() {
    let place = Place::new("place-header");
    // The name of the backing file has 360 bytes, so that the header fills its cluster of 512 bytes.
    let folder = place.dir.join("f".repeat(200));
    fs::create_dir(&folder).unwrap();
    let rest = 360 - folder.to_str().unwrap().len() - 1;
    let base = place.image(folder.join("b".repeat(rest)).to_str().unwrap(), 1 << 20);
    let image = place.dir.join("d.qcow2").to_str().unwrap().to_owned();
    let options = ["-f", "qcow2", "-o", "cluster_size=512", "-b", &base, "-F", "raw", &image];
    run("qemu-img", &[&["create", "-q"], &options[..]].concat());
    attach(&place, &image, &["--format", "qcow2"]);
    let refused = place.refused(&["bitmap", "add", "q", "b"]);
    assert!(refused.contains("its header has no room for bitmaps"), "{refused}");
    assert_eq!(state(&place, "q", "b"), "none");
    place.done(&["detach", "q"]);
    run("qemu-img", &["check", "-f", "qcow2", &image]);
}

//! Options of losetup(8) that blkq rejects, and daemons that do not answer.

use super::stdout;
use crate::place::*;

#[test]
fn what_has_no_meaning_here_is_rejected_in_one_line() {
    let place = Place::new("l-refused");
    let image = place.image("disk.img", 1 << 20);
    for (words, reason) in [
        (&["-f"][..], "use -f --show FILE"),
        (&["--remove", "x"], "use -d"),
        (&["/dev/loop0", &image], "or use -f"),
        (&["/dev/ublkb0", &image], "or use -f"),
        (&["--loop-ref", "a", "b", &image], "omit one of them"),
        (&["--loop-ref", "a/b", "-f", &image], "a name consists of"),
        (&["/dev/loop0"], "kernel's loop driver"),
        (&["-d", "/dev/loop0"], "kernel's loop driver"),
        (&["nothing"], "no such device"),
        (&["-f", "null:1M"], "cannot find the image"),
        (&["-f", "/dev/null"], "a character device"),
        (&["-f", "-o", "100", &image], "multiple of the sector size"),
    ] {
        let line = place.losetup_refused(words);
        assert!(line.starts_with("blkq: losetup: ") && line.contains(reason), "{words:?}: {line}");
    }
    for words in [
        &["a", "b", "c"][..],
        &["-f", "a", "b"],
        &["-a", "-D"],
        &["-D", "x"],
        &["-o", "512"],
        &["-o", "512", "x"],
        &["-r", "-d", "x"],
        &["-L", "x"],
        &["-P"],
        &["-o", "1Q", "-f", &image],
        &["--direct-io=maybe", "-f", &image],
        &["-J", "--raw"],
    ] {
        assert_eq!(place.run(&[&["losetup"], words].concat()).status.code(), Some(2), "{words:?}");
    }
    assert!(place.files().is_empty());
    // An existing file with the name of a driver is attached as a file, and a given device name is used.
    let odd = place.image("null:1M", 1 << 20);
    let mut command = place.command(&["losetup", "-f", "--show", "null:1M"]);
    assert!(stdout(&command.current_dir(&place.dir).output().unwrap()).ends_with("/null_1M.nbd\n"));
    assert_eq!(place.column("null_1M", "BACK-FILE"), odd);
    assert_eq!(place.losetup(&["data", &image]), "");
    assert_eq!(place.column("data", "BACK-FILE"), image);
}

#[test]
fn partition_scan_is_kept_and_over_nbd_left_to_the_client() {
    let place = Place::new("l-part");
    let image = place.image("disk.img", 1 << 20);
    let output = place.run(&["losetup", "-P", "-f", "--show", &image]);
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(stdout(&output), format!("{}\n", place.uri("disk.img")));
    assert!(text.contains("whose client scans for partitions"), "{text}");
    // Hints use the names of losetup's options.
    assert!(text.contains("use --offset and --sizelimit") && !text.contains("--size-limit"), "{text}");
    let _client = client(&place.uri("disk.img"));
    let line = place.losetup_refused(&["-d", &place.uri("disk.img")]);
    assert!(line.contains("or use blkq detach --force"), "{line}");
    assert_eq!(place.column("disk.img", "PARTSCAN"), "1");
}

#[test]
fn a_silent_daemon_is_not_a_missing_device() {
    let place = Place::new("l-exit");
    place.done(&["attach", "ram:1M"]);
    assert_eq!(place.losetup(&["ram"]), format!("{}: []: (ram:1M)\n", place.uri("ram")));
    assert_eq!(place.run(&["losetup", "nothing"]).status.code(), Some(1));
    kill(place.pid("ram"));
    for _ in 0..2 {
        assert_eq!(place.run(&["losetup", "ram"]).status.code(), Some(2));
    }
    assert!(place.run(&["list", "--clean"]).stdout.is_empty());
    assert_eq!(place.run(&["losetup", "ram"]).status.code(), Some(1));
}

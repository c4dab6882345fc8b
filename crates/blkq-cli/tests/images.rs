//! Images as users attach them: in other formats, in use by other processes, under several paths.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use crate::place::*;

fn run(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output().unwrap();
    assert!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A loop device of the kernel, detached on drop.
struct KernelLoop(String);

impl Drop for KernelLoop {
    fn drop(&mut self) {
        // The read-only flag would stay for the next user of the loop device.
        run("blockdev", &["--setrw", &self.0]);
        run("losetup", &["-d", &self.0]);
    }
}

#[test]
fn an_image_in_another_format_is_rejected_with_a_hint() {
    let place = Place::new("format");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    for (format, kind) in
        [("qcow2", "qcow2"), ("vmdk", "VMDK"), ("vhdx", "VHDX"), ("vdi", "VDI"), ("vpc", "VHD")]
    {
        let image = path(format);
        run("qemu-img", &["create", "-q", "-f", format, &image, "1M"]);
        let before = fs::read(&image).unwrap();
        for words in
            [&["attach"][..], &["attach", "--read-only"], &["attach", "--shared"], &["losetup", "-f"]]
        {
            let line = place.refused(&[words, &[&image]].concat());
            let hint = match (kind, words[0]) {
                ("qcow2", "attach") => "attach with --format qcow2",
                // `blkq losetup` has no option --format.
                ("qcow2", _) => "blkq attach with --format qcow2",
                _ => "convert it",
            };
            assert!(line.contains(&format!("is a {kind} image, not raw data; {hint}")), "{line}");
            assert!(line.contains("attach with --format raw"), "{line}");
        }
        assert_eq!(fs::read(&image).unwrap(), before);
        // Not `done`: the command warns if the size is not a multiple of the sector size.
        assert!(place.run(&["attach", "--format", "raw", "--name", "raw", &image]).status.success());
        place.done(&["detach", "raw"]);
    }
    let luks = place.image("luks", 1 << 20);
    fs::File::options().write(true).open(&luks).unwrap().write_all_at(b"LUKS\xba\xbe\0\x02", 0).unwrap();
    assert!(place.refused(&["attach", &luks]).contains("is a LUKS image"));
    assert!(place.files().is_empty());
    assert!(place.refused(&["attach", "--format", "auto", &luks]).contains("is a LUKS image"));
    assert!(place.refused(&["attach", "--format", "qcow2", &luks]).contains("no qcow2 header"));
    assert_eq!(place.run(&["attach", "--format", "vmdk", &luks]).status.code(), Some(2));
}

#[test]
fn a_created_image_stays_only_with_its_device() {
    let place = Place::new("create");
    let path = place.dir.join("new.img");
    let image = path.to_str().unwrap();
    place.done(&["attach", image, "--create", "64M"]);
    assert_eq!(place.json(&["show", "new.img", "--json"])["size"], 64 << 20);
    fs::File::options().write(true).open(&path).unwrap().write_all_at(b"data", 0).unwrap();
    // --create fails while the image is in use, and also after its device was detached.
    let used = place.refused(&["attach", image, "--create", "1G", "--name", "other"]);
    assert!(used.contains("new.img: already exists and --create never overwrites"), "{used}");
    place.done(&["detach", "new.img"]);
    assert!(place.refused(&["attach", image, "--create", "1G"]).contains("already exists"));
    let content = fs::read(&path).unwrap();
    assert!(content.len() == 64 << 20 && content.starts_with(b"data"));

    let path = place.dir.join("failed.img");
    let image = path.to_str().unwrap();
    for words in [&["--offset", "2M"][..], &["--name", "no/name"], &["--foreground", "--offset", "2M"]] {
        place.refused(&[&["attach", image, "--create", "1M"], words].concat());
        assert!(!path.exists(), "{words:?}");
    }
    assert!(place.refused(&["attach", "ram:1M", "--create", "1M"]).contains("--create creates image files"));
    assert!(place.refused(&["attach", "/dev/null", "--create", "1M"]).contains("already exists"));
    // The image stays, because the device was attached before the command of --run failed.
    let run = place.run(&["attach", image, "--create", "1M", "--run", "exit 7"]);
    assert_eq!((run.status.code(), path.exists()), (Some(7), true));
}

#[test]
fn an_image_that_the_kernel_uses_is_refused_unless_shared() {
    let place = Place::new("claimed");
    let image = place.image("disk.img", 16 << 20);
    run("mkfs.ext4", &["-q", "-F", &image]);
    let device = KernelLoop(run("losetup", &["-f", "--show", &image]));
    let line = place.refused(&["attach", &image]);
    let reason = format!("is in use: the kernel's loop device {} uses it; release it there first", device.0);
    assert!(line.contains(&reason) && line.contains("--shared"), "{line}");
    assert!(place.refused(&["losetup", "-f", &image]).contains("the kernel's loop device "));
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

// Contract: exclusive
#[test]
fn a_reader_does_not_become_a_writer_of_an_image_in_use() {
    let place = Place::new("reader");
    let image = place.image("disk.img", 16 << 20);
    place.done(&["attach", &image]);
    place.done(&["set", "disk.img", "read-only=on"]);
    let device = KernelLoop(run("losetup", &["-f", "--show", &image]));
    let line = place.refused(&["set", "disk.img", "depth=8", "read-only=off"]);
    let reason = format!("the kernel's loop device {} uses it; release it there first", device.0);
    assert!(line.contains(&reason), "{line}");
    let file = place.dir.join("disk.toml");
    fs::write(&file, format!("image = {image:?}\nname = \"disk.img\"\nread-only = false\n")).unwrap();
    let line = place.refused(&["config", "apply", file.to_str().unwrap()]);
    assert!(line.contains("disk.img: read-only=off: ") && line.contains(&reason), "{line}");
    assert_eq!(place.json(&["show", "disk.img", "--json"])["read_only"], true);
    place.done(&["detach", "disk.img"]);
    place.done(&["attach", "--export", "vhost-user-blk", "--name", "node", &device.0]);
    place.done(&["set", "node", "read-only=on"]);
    run("blockdev", &["--setro", &device.0]);
    let line = place.refused(&["set", "node", "read-only=off"]);
    assert!(line.contains("the kernel has set this block device to read-only"), "{line}");
    // The next daemon could not write either, so the present one stays.
    run("blockdev", &["--setrw", &device.0]);
    place.done(&["set", "node", "read-only=off"]);
    run("blockdev", &["--setro", &device.0]);
    let line = place.refused(&["upgrade", "node"]);
    assert!(line.contains("the kernel has set this block device to read-only"), "{line}");
    place.done(&["show", "node"]);
    run("blockdev", &["--setrw", &device.0]);
    place.done(&["detach", "node"]);
}

// Contract: exclusive
#[test]
fn attached_elsewhere_says_where() {
    let place = Place::new("where");
    let image = place.image("disk.img", 4 << 20);
    let window = ["--size-limit", "1M", &image];
    place.done(&[&["attach", "--name", "low"][..], &window].concat());
    place.done(&["attach", "--name", "high", "--offset", "1M", &image]);
    let line = place.refused(&[&["attach"][..], &window].concat());
    assert!(line.contains("are locked by the device low; release it there first"), "{line}");
    assert!(place.refused(&["attach", &image]).contains("by the devices high, low;"));
    // The image is in use by a device of another state directory, then by another process.
    let other = Place::new("where-else");
    let line = other.refused(&[&["attach"][..], &window].concat());
    assert!(line.contains(&format!("are locked by process {} (", place.pid("low"))), "{line}");
    assert_eq!(place.run(&["detach", "--all"]).status.code(), Some(0));
    let file = fs::File::options().read(true).write(true).open(&image).unwrap();
    rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let line = place.refused(&["attach", &image]);
    assert!(line.contains(&format!("are locked by process {} (", std::process::id())), "{line}");
    assert!(line.contains("--shared on both sides"), "{line}");
}

#[test]
fn paths_reach_neither_the_terminal_nor_a_shell_as_they_are() {
    let place = Place::new("hostile");
    let image = place.image("x\nvm 1T rw on 0 \x1b[31mred\x1b]0;title\x07.img", 1 << 20);
    place.done(&["attach", &image, "--name", "a"]);
    for words in
        [&["list"][..], &["show", "a"], &["losetup", "-a"], &["losetup", "-l"], &["list", "-o", "image"]]
    {
        let text = place.done(words);
        assert!(
            !text.contains(['\x1b', '\x07']) && text.contains("x\\x0avm 1T rw on 0 \\x1b[31mred"),
            "{text}"
        );
    }
    assert_eq!(place.done(&["list"]).lines().count(), 2);
    assert_eq!(place.json(&["list", "--json"])[0]["image"], image.as_str());
    place.done(&["detach", "a"]);
    place.done(&["attach", &place.image("plain", 1 << 20), "--name", "a"]);
    let to = place.dir.join("new\n.qcow2");
    assert!(place.done(&["snapshot", "a", "--to", to.to_str().unwrap()]).ends_with("/new\\x0a.qcow2\n"));
    place.done(&["detach", "a"]);

    // A shell runs the command of the hint in the directory of the images.
    let follow = |line: &str| {
        let hint = line.split('`').nth(1).unwrap().replace("SIZE", "1M");
        let hint = hint.replace("blkq ", concat!(env!("CARGO_BIN_EXE_blkq"), " "));
        let mut shell = std::process::Command::new("bash");
        shell
            .args(["-c", &hint])
            .current_dir(&place.dir)
            .env("BLKQ_STATE_DIR", place.state())
            .output()
            .unwrap()
    };
    let missing = place.dir.join("my 'disk';touch OWNED.img");
    let line = place.refused(&["attach", missing.to_str().unwrap()]);
    assert!(line.contains("; create it with `blkq attach "), "{line}");
    assert!(follow(&line).status.success() && missing.exists());
    place.done(&["detach", "--all"]);
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (base, top) = (path("b;touch OWNED;.qcow2"), path("t.qcow2"));
    let qemu_img = |words: &[&str]| run("qemu-img", words);
    qemu_img(&["create", "-q", "-f", "qcow2", &base, "1M"]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2", &top]);
    // The header lacks the extension for the format of the backing file.
    let mut bytes = fs::read(&top).unwrap();
    let at = bytes.windows(4).position(|window| window == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
    bytes[at..at + 4].copy_from_slice(&[0x11, 0x22, 0x33, 0x44]);
    fs::write(&top, bytes).unwrap();
    let line = place.refused(&["attach", &top, "--format", "qcow2"]);
    assert!(line.contains("qemu-img rebase -u"), "{line}");
    assert!(follow(&line).status.success(), "{line}");
    place.done(&["attach", &top, "--format", "qcow2"]);
    assert!(!place.dir.join("OWNED").exists() && !place.dir.join("OWNED.img").exists());
}

#[test]
fn a_device_is_named_by_whatever_its_user_has_in_hand() {
    let place = Place::new("named");
    let image = place.image("disk.img", 4 << 20);
    let uri = place.done(&["attach", "--name", "data", &image]).trim().to_owned();
    let link = place.dir.join("link");
    std::os::unix::fs::symlink(&image, &link).unwrap();
    let words = ["data", &image, link.to_str().unwrap(), &uri];
    for word in words {
        assert_eq!(place.json(&["show", "--json", word])["name"], "data", "{word}");
        place.done(&["set", word, "depth=64"]);
        assert_eq!(place.done(&["resize", word]), "4M\n");
        assert_eq!(place.json(&["stat", "--json", word])["name"], "data", "{word}");
        assert!(place.refused(&["upgrade", word]).contains("detach the device"), "{word}");
        assert!(place.refused(&["recover", word]).contains("the daemon is running"), "{word}");
    }
    for relative in ["disk.img", "./disk.img", "../disk.img"] {
        fs::create_dir_all(place.dir.join("below")).unwrap();
        let at = if relative.starts_with("..") { place.dir.join("below") } else { place.dir.clone() };
        let output = place.command(&["show", relative]).current_dir(at).output().unwrap();
        assert!(output.status.success(), "{relative}: {output:?}");
    }
    // A renamed image is found by its new name; a new file with the old name is not the image of the device.
    let moved = place.dir.join("moved.img").to_str().unwrap().to_owned();
    fs::rename(&image, &moved).unwrap();
    place.done(&["show", &moved]);
    place.image("disk.img", 1 << 20);
    assert!(place.refused(&["show", &image]).contains("no such device"));
    // A word that is both the name of one device and the image of another is refused.
    place.done(&["attach", "ram:1M", "--name", "moved.img"]);
    let show =
        |word: &str| place.command(&["show", "--json", word]).current_dir(&place.dir).output().unwrap();
    assert_eq!(show("moved.img").status.code(), Some(1));
    assert!(String::from_utf8(show("./moved.img").stdout).unwrap().contains("\"data\""));
    assert!(place.done(&["show", "--json", "moved.img"]).contains("\"ram:1M\""));
    // Two devices have the same image, and the path does not select one.
    place.done(&["detach", "data"]);
    place.done(&["attach", "--name", "low", "--size-limit", "1M", &moved]);
    place.done(&["attach", "--name", "high", "--offset", "1M", &moved]);
    assert!(place.refused(&["detach", &moved]).contains("is attached as high, low; use one of these names"));
}

#[test]
fn several_devices_are_shown_and_detached_in_one_command() {
    let place = Place::new("several");
    for name in ["a", "b", "c"] {
        place.done(&["attach", "ram:1M", "--name", name]);
    }
    let shown = place.done(&["show", "b", "a"]);
    assert_eq!(shown.lines().filter(|line| line.starts_with("name")).count(), 2, "{shown}");
    assert!(shown.contains("\n\nname"), "{shown}");
    assert_eq!(place.done(&["show", "--json", "a", "b", "c"]).lines().count(), 3);
    let output = place.run(&["detach", "a", "nothing", "b"]);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), errors.lines().count()), (Some(1), 1), "{errors}");
    assert!(errors.contains("nothing: no such device"), "{errors}");
    assert!(place.files().iter().all(|file| file.starts_with("c.")));
}

#[test]
fn detaching_what_was_killed_succeeds_and_says_so() {
    let place = Place::new("remains");
    let image = place.image("disk.img", 1 << 20);
    for words in
        [&["detach", "disk.img"][..], &["detach", &image], &["detach", "--all"], &["losetup", "-d", &image]]
    {
        place.done(&["attach", &image]);
        kill(place.pid("disk.img"));
        let output = place.run(words);
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), line.lines().count()), (Some(0), 1), "{words:?}: {line}");
        assert!(
            line.contains("the daemon (pid ") && line.contains(") was killed; removed its sockets and state"),
            "{line}"
        );
        assert!(place.files().is_empty());
    }
}

#[test]
fn a_device_that_cannot_be_reported_is_detached_again() {
    let place = Place::new("silent");
    let image = place.image("disk.img", 1 << 20);
    let full = || Stdio::from(fs::File::options().write(true).open("/dev/full").unwrap());
    for words in [
        &["attach", &image][..],
        &["attach", &image, "--json"],
        &["attach", &image, "--foreground"],
        &["losetup", "-f", "--show", &image],
        &["losetup", "-L", "-f", "--show", &image],
    ] {
        let output = place.command(words).stdout(full()).stderr(Stdio::piped()).spawn().unwrap();
        let output = output.wait_with_output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}: {text}");
        assert!(
            text.contains("No space left on device (os error 28); the device was detached again"),
            "{text}"
        );
        assert!(place.files().is_empty(), "{words:?}");
    }
    // A device that existed before the command stays attached.
    place.done(&["attach", &image]);
    let output = place.command(&["attach", "--nooverlap", &image]).stdout(full()).status().unwrap();
    assert_eq!(output.code(), Some(1));
    place.done(&["show", "disk.img"]);
}

#[test]
fn a_fallback_to_nbd_is_said_with_its_cause() {
    let place = Place::new("fallback");
    let attach = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blkq"));
        let output = command.args(words).env("BLKQ_STATE_DIR", place.state()).output().unwrap();
        assert!(output.status.success() && output.stdout.starts_with(b"nbd"), "{output:?}");
        place.done(&["detach", "ram"]);
        String::from_utf8(output.stderr).unwrap()
    };
    let line = attach(&["attach", "ram:1M"]);
    assert!(
        line.starts_with("blkq: ram: warning: served over NBD, without a node in /dev: cannot open"),
        "{line}"
    );
    assert!(line.lines().count() == 1 && line.contains("--export nbd"), "{line}");
    assert_eq!(attach(&["attach", "ram:1M", "--export", "nbd"]), "");
    let listen = format!("unix:{}", place.dir.join("socket").display());
    assert_eq!(attach(&["attach", "ram:1M", "--listen", &listen]), "");
}

#[test]
fn a_warning_disappears_with_its_cause() {
    let place = Place::new("stale");
    let output = place.run(&["attach", "ram:1M", "--fault", "error=EIO"]);
    assert!(String::from_utf8(output.stderr).unwrap().contains("faults are injected"));
    assert!(place.done(&["show", "ram"]).contains("faults are injected"));
    place.done(&["set", "ram", "fault=none"]);
    assert!(!place.done(&["show", "ram"]).contains("faults are injected"));
}

#[test]
fn options_that_mean_nothing_are_rejected() {
    let place = Place::new("nothing");
    for (words, reason) in [
        (&["--export", "nbd", "--copy", "user"][..], "--copy is for ublk"),
        (&["--listen", "tcp:127.0.0.1:0", "--copy", "user"], "--copy is for ublk"),
        (&["--export", "nbd", "--threads-per-queue", "2"], "--threads-per-queue is for ublk"),
        (&["--export", "ublk", "--max-connections", "3"], "--max-connections is for NBD"),
        (&["--export", "ublk", "--handshake-timeout", "3"], "--handshake-timeout is for NBD"),
        (&["--export", "ublk", "--tls-certificates", "/"], "--tls-certificates is for NBD"),
        (&["--export", "ublk", "--insecure"], "--insecure is for NBD"),
        (&["--offset", "512"], "--offset is for image files, and ram:1M is not one"),
        (&["--size-limit", "512"], "--size-limit is for image files"),
        (&["--direct-io", "on"], "--direct-io on is for image files"),
        (&["--dispatch", "serial"], "--dispatch serial is for image files"),
        (&["--shared"], "--shared is for image files"),
        (&["--format", "raw"], "--format is for image files"),
        (&["--nooverlap"], "--nooverlap is for image files"),
    ] {
        let line = place.refused(&[&["attach", "ram:1M"], words].concat());
        assert!(line.contains(reason) && line.contains("omit it"), "{words:?}: {line}");
    }
    let usage = |words: &[&str]| {
        let output = place.run(&[&["attach", "ram:1M"], words].concat());
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(usage(&["--listen", "unix:@name"]).contains("an abstract socket"));
    assert!(usage(&["--listen", "tcp:127.0.0.1:99999"]).contains("to 65535, not \"99999\""));
    assert!(usage(&["--listen", "tcp:127.0.0.1"]).contains("has no port"));
    assert!(usage(&["--listen", "tcp:::1:10809"]).contains("in brackets"));
    assert!(usage(&["-r"]).contains("--read-only"));
    assert!(usage(&["--offset", "-1"]).contains("must not be negative"));
    assert!(usage(&["--size-limit", "1.3K"]).contains("not a whole number of bytes"));
    assert!(place.files().is_empty());
}

#[test]
fn a_setting_that_there_is_not_says_which_there_are() {
    let place = Place::new("settings");
    let image = place.image("disk.img", 1 << 20);
    place.done(&["attach", &image]);
    place.done(&["attach", "ram:1M"]);
    let line = place.refused(&["set", "disk.img", "foo=1"]);
    for setting in ["autoclear", "direct-io", "hang-warning", "merge", "read-only", "blkq resize"] {
        assert!(line.contains(setting), "{line}");
    }
    assert!(!place.refused(&["set", "ram", "foo=1"]).contains("direct-io"));
    assert!(place.refused(&["set", "ram", "direct-io=on"]).contains("for image files"));
    assert!(place.refused(&["set", "ram", "size=1M"]).contains("blkq resize"));
    assert!(place.refused(&["set", "ram", "queues=2"]).contains("attach it with --queues"));
    // The hints use the options of `blkq set`.
    let why = place.refused(&["set", "ram", "depth=9000"]);
    assert!(
        why.contains(
            "depth must be 1 to 256, not 9000; to use 9000, detach the device and attach it with --depth 9000"
        ),
        "{why}"
    );
    let why = place.refused(&["set", "ram", "depth=99999"]);
    assert!(why.contains("depth must be a number from 1 to 10240, not \"99999\""), "{why}");
    assert!(place.refused(&["set", "ram", "depth=x"]).contains("a number from 1 to 10240, not \"x\""));
    let why = place.refused(&["resize", "ram", "2M"]);
    assert!(
        why.ends_with("cannot be resized; detach the device and attach it with another size\n"),
        "{why:?}"
    );
    // Every setting that the message lists can be set to its current value.
    let shown = place.json(&["show", "disk.img", "--json"]);
    let listed = line.split("choose one of ").nth(1).unwrap().split(';').next().unwrap();
    for setting in listed.split(", ") {
        let value = match &shown["settings"][setting] {
            serde_json::Value::Bool(on) => if *on { "on" } else { "off" }.to_owned(),
            serde_json::Value::Null if setting == "group" => "none".to_owned(),
            serde_json::Value::Null => "off".to_owned(),
            serde_json::Value::String(text) => text.clone(),
            number => number.to_string(),
        };
        place.done(&["set", "disk.img", &format!("{setting}={value}")]);
    }
}

#[test]
fn errors_have_the_reason_and_the_hint_in_this_order() {
    let place = Place::new("words");
    let image = place.image("disk.img", 1 << 20);
    let tiny = place.image("tiny.img", 1);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp:{}", taken.local_addr().unwrap());
    for (words, reason) in [
        (
            &["attach", "/nowhere/x"][..],
            "cannot find the image /nowhere/x: No such file or directory (os error 2); create it with `blkq attach /nowhere/x --create SIZE`\n",
        ),
        (
            &["attach", &tiny, "--sector-size", "512"],
            "has only 1 byte from offset 0, less than a sector of 512; extend it\n",
        ),
        (&["attach", &image, "--size-limit", "0"], "the size limit must be more than 0"),
        (
            &["attach", &image, "--size-limit", "1000", "--sector-size", "512"],
            "choose a multiple, such as 512",
        ),
        (
            &["attach", "ram:1000"],
            "attach ram:1000: the size must be a multiple of the sector size 512 and more than 0, not 1000",
        ),
        (&["attach", "ram:1E"], "attach ram:1E: cannot reserve"),
        (
            &["attach", &image, "--listen", &taken],
            "Address already in use (os error 98); choose another port",
        ),
        (&["attach", &image, "--listen", "unix:/nowhere/x"], "(os error 2); create the directory"),
        (
            &["attach", &image, "--listen", "tcp:192.0.2.1:0", "--insecure"],
            "; use an address of this machine",
        ),
        (&["show", "x"], "blkq: x: no such device;"),
        (&["detach", "x"], "blkq: x: no such device;"),
        (&["set", "x", "depth=1"], "blkq: x: no such device;"),
        (&["resize", "x"], "blkq: x: no such device;"),
        (&["recover", "x"], "blkq: x: no such device;"),
    ] {
        let line = place.refused(words);
        assert!(line.contains(reason), "{words:?}: {line}");
    }
    assert!(place.files().is_empty());
}

/// Returns the standard output of a command that must succeed. `paths` may be invalid UTF-8.
fn done(place: &Place, words: &[&str], paths: &[&OsStr]) -> Vec<u8> {
    let output = place.command(words).args(paths).output().unwrap();
    let errors = without_progress(output.stderr);
    assert_eq!((output.status.code(), errors.as_str()), (Some(0), ""), "{words:?} {paths:?}");
    output.stdout
}

// Contract: data
#[test]
fn an_image_whose_path_is_not_text_is_known_to_every_command() {
    let place = Place::new("not-text");
    let directory = place.dir.join(OsStr::from_bytes(b"d\xe9p\xf4t"));
    fs::create_dir(&directory).unwrap();
    let path = |name: &str| directory.join(name).into_os_string();
    let [raw, new, clone] = ["i.img", "s.qcow2", "c.qcow2"].map(path);
    fs::write(&raw, vec![0; 1 << 20]).unwrap();
    let attach = ["attach", "--export", "nbd", "--export", "vhost-user-blk", "--name"];
    done(&place, &[&attach[..], &["a"]].concat(), &[&raw]);
    // The bitmap file is in the directory of the image.
    place.done(&["bitmap", "add", "a", "b"]);
    assert!(directory.join("i.img.bitmaps").exists());
    done(&place, &["set"], &[&raw, OsStr::new("merge=off")]);
    let listed = done(&place, &["losetup", "-j"], &[&raw]);
    assert!(!listed.is_empty());
    done(&place, &["snapshot", "a", "--to"], &[&new]);
    done(&place, &["resize"], &[&new, OsStr::new("2M")]);
    assert!(done(&place, &["show"], &[&new]).windows(7).any(|text| text == b"s.qcow2"));
    place.done(&["upgrade", "a"]);
    done(&place, &["commit"], &[&new]);
    done(&place, &["detach"], &[&raw]);
    assert_eq!(fs::metadata(&raw).unwrap().len(), 2 << 20);
    done(&place, &[&attach[..], &["c"], &["--overlay"]].concat(), &[&clone, &raw]);
    done(&place, &["commit", "c"], &[]);
    done(&place, &["detach"], &[&raw]);
    // As with other words, the command does not choose one of several devices.
    done(&place, &[&attach[..], &["a", "--read-only"]].concat(), &[&raw]);
    done(&place, &[&attach[..], &["b", "--read-only"]].concat(), &[&raw]);
    let refused = place.command(&["detach"]).arg(&raw).output().unwrap();
    let line = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && line.contains("is attached as a, b"), "{line}");
    place.done(&["detach", "a", "b"]);
    let unknown = place.command(&["show"]).arg(&raw).output().unwrap();
    assert_eq!(unknown.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("no such device"));
}

// Contract: data
#[test]
fn a_linked_image_keeps_the_backing_file_that_its_link_finds() {
    let place = Place::new("linked");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    fs::create_dir(path("d")).unwrap();
    for name in ["base", "d/base"] {
        place.image(name, 1 << 20);
    }
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", &path("d/top")]);
    std::os::unix::fs::symlink("d/top", path("link")).unwrap();
    for (image, base) in [("link", "base"), ("d/top", "d/base")] {
        let exports = ["--export", "nbd", "--export", "vhost-user-blk"];
        let attach = ["attach", &path(image), "--format", "qcow2", "--name", "a"];
        place.done(&[&attach[..], &exports].concat());
        place.done(&["upgrade", "a"]);
        let shown = place.json(&["show", "a", "--json"]);
        assert_eq!((&shown["image"], &shown["driver"]), (&path("d/top").into(), &"qcow2".into()));
        assert_eq!(place.done(&["commit", "a"]), format!("{}\n", path(base)));
        place.done(&["detach", "a"]);
    }
}

// Contract: exclusive
#[test]
fn an_attach_waits_for_a_killed_user_of_the_image_only() {
    let place = Place::new("running-user");
    let image = place.image("disk.img", 1 << 20);
    place.done(&["attach", &image, "--name", "a"]);
    let daemon = u32::try_from(place.pid("a")).unwrap();
    let whole = blkq_protocol::info::Window { offset: 0, size_limit: None };
    let has_user =
        |process| blkq_daemon::device::lock_holders::has_running_holder(vec![process], image.as_ref(), whole);
    assert!(has_user(daemon), "the attach must not wait for this daemon");
    assert!(!has_user(std::process::id()), "another program may release the image soon");
    assert!(place.refused(&["attach", &image, "--name", "b"]).contains("by the device a"));
    client::kill_and_wait(place.pid("a"), &[&image]);
    assert!(!has_user(daemon));
}

// Contract: exclusive
#[test]
fn the_backing_files_of_a_waiting_device_are_not_written() {
    let place = Place::new("waiting-chain");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let base = place.image("base.img", 1 << 20);
    let (top, other, third) = (path("top"), path("other"), path("third"));
    let export = ["--export", "vhost-user-blk", "--name", "a"];
    place.done(&[&["attach", &base, "--overlay", &top], &export[..]].concat());
    place.done(&["attach", &base, "--overlay", &other, "--name", "b"]);
    client::kill_and_wait(place.pid("a"), &[&top]);
    let refused = |words: &[&str]| {
        let line = place.refused(words);
        assert!(line.contains("run `blkq recover a`"), "{words:?}: {line}");
    };
    refused(&["commit", "b"]);
    let over_top = ["attach", &top, "--format", "qcow2", "--overlay", &third, "--name", "c"];
    refused(&over_top);
    place.done(&["detach", "b"]);
    refused(&["attach", &base, "--name", "c"]);
    let check_allowed = || {
        for option in ["--read-only", "--shared"] {
            place.done(&["attach", &base, option, "--name", "c"]);
            place.done(&["detach", "c"]);
        }
    };
    check_allowed();
    place.done(&["recover", "a"]);
    // The locks of a running device have the same effect.
    check_allowed();
    assert!(place.refused(&["attach", &base, "--name", "c"]).contains("base.img is in use"));
    place.done(&["detach", "a"]);
    place.done(&["attach", &base, "--name", "c"]);
}

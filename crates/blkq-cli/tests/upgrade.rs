//! `blkq upgrade` of a virtual machine's disk, also to a daemon that fails to start.

use blkq::testing::wait_until;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use crate::place::client::{keep_state, kept_image, kill_and_wait, run};
use crate::place::{self, Place, kill};
use serde_json::json;

const SET: [&str; 6] =
    ["set", "d", "read-only=on", "on-error=hold", "limit=read-iops=100000", "hang-warning=7"];

/// Attaches a disk for a virtual machine that has not connected yet, and changes its settings.
fn attach(place: &Place) {
    let image = place.image("image", 1 << 20);
    place.done(&["attach", "--name", "d", &image, "--export", "vhost-user-blk"]);
    place.done(&SET);
}

fn check_settings(place: &Place) {
    let info = place.json(&["show", "d", "--json"]);
    let settings = &info["settings"];
    assert_eq!((&info["read_only"], &settings["on-error"]), (&json!(true), &json!("hold")), "{info}");
    assert_eq!((&settings["limit"], &settings["hang-warning"]), (&json!("read-iops=100000"), &json!(7)));
    // The daemon began with them: no command has set them since.
    let log = fs::read_to_string(place.state().join("d.log")).unwrap();
    let served = log.rfind("Serving ").unwrap();
    assert!(!log[served..].contains("set "), "{log}");
}

#[test]
fn a_new_daemon_begins_with_the_settings_of_the_old_one() {
    let place = Place::new("upgrade");
    attach(&place);
    let old = place.pid("d");
    // The second upgrade passes the settings on, too.
    for _ in 0..2 {
        place.done(&["upgrade", "d"]);
        check_settings(&place);
    }
    assert_ne!(place.pid("d"), old);
    place.done(&["detach", "d"]);
}

#[test]
fn an_upgrade_ignores_the_format_that_a_guest_has_written() {
    let place = Place::new("upgrade-format");
    attach(&place);
    // For example, the guest has encrypted its disk.
    File::options()
        .write(true)
        .open(place.dir.join("image"))
        .unwrap()
        .write_all(b"LUKS\xba\xbe\0\x02")
        .unwrap();
    place.done(&["upgrade", "d"]);
    let image = place.dir.join("image").display().to_string();
    kill_and_wait(place.pid("d"), &[&image]);
    place.done(&["recover", "d"]);
    place.done(&["detach", "d"]);
    assert!(place.refused(&["attach", &image]).contains("is a LUKS image"));
}

#[test]
fn a_new_daemon_searches_the_ceiling_again() {
    let place = Place::new("upgrade-auto");
    attach(&place);
    place.done(&["set", "d", "limit=auto"]);
    place.done(&["upgrade", "d"]);
    let settings = &place.json(&["show", "d", "--json"])["settings"];
    assert_eq!((&settings["limit"], &settings["ceiling"]), (&json!("auto"), &json!("not found yet")));
    let threads = || fs::read_dir(format!("/proc/{}/task", place.pid("d"))).unwrap();
    let name = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
    wait_until("it has its thread", || threads().any(|thread| name(thread.unwrap()) == "blkq-limit\n"));
    place.done(&["detach", "d"]);
}

/// Runs `blkq upgrade` through the dynamic loader. The command then launches the loader as the new daemon,
/// which fails because it finds no program named `daemon`.
fn upgrade_that_cannot_launch(place: &Place) -> Output {
    let mut head = [0; 4096];
    File::open(env!("CARGO_BIN_EXE_blkq")).unwrap().read_exact(&mut head).unwrap();
    let text = String::from_utf8_lossy(&head);
    let loader = text.split('\0').find(|text| text.starts_with("/lib")).expect("PT_INTERP");
    let upgrade = [env!("CARGO_BIN_EXE_blkq"), "upgrade", "d"];
    Command::new(loader).args(upgrade).env("BLKQ_STATE_DIR", place.state()).output().unwrap()
}

#[test]
fn the_old_program_serves_again_if_the_new_one_does_not() {
    let place = Place::new("upgrade-back");
    attach(&place);
    let old = place.pid("d");
    let output = upgrade_that_cannot_launch(&place);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &b""[..]), "{errors}");
    let why =
        "the new daemon did not start, so the old program serves the device again: the daemon exited before";
    assert!(errors.contains(&format!("upgrade d: {why}")), "{errors}");
    assert_ne!(place.pid("d"), old);
    check_settings(&place);
    place.done(&["detach", "d"]);
}

#[test]
fn the_old_program_serves_again_if_the_service_does_not_start() {
    let place = Place::new("upgrade-service");
    attach(&place);
    let old = place.pid("d");
    let line = place.refused(&["upgrade", "--service", "--start-timeout", "1", "d"]);
    assert!(line.contains("upgrade d: the service did not start a new daemon within 1 s"), "{line}");
    assert!(line.contains("so the old program serves the device again, outside of the service"), "{line}");
    assert_ne!(place.pid("d"), old);
    check_settings(&place);
    // A service that would serve another disk is not waited for.
    let config = place.dir.join("c");
    fs::create_dir(&config).unwrap();
    let image = place.dir.join("image");
    let text = format!("image = {image:?}\nexport = \"vhost-user-blk\"\noffset = 4096\n");
    fs::write(config.join("d.toml"), text).unwrap();
    let mut command = place.command(&["upgrade", "--service", "d"]);
    let output = command.env("BLKQ_CONFIG_DIR", &config).output().unwrap();
    let line = place::without_progress(output.stderr);
    assert!(line.contains("d.toml describes another disk than the device serves"), "{line}");
    assert_eq!(place.json(&["show", "d", "--json"])["settings"]["hang-warning"], json!(7));
    // A service that can start a daemon takes over at the next upgrade.
    let mut upgrade = place.command(&["upgrade", "--service", "d"]);
    let upgrade = upgrade.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("it is left", || place.run(&["show", "d"]).status.code() == Some(1));
    let image = place.dir.join("image");
    place.done(&["attach", "--name", "d", image.to_str().unwrap(), "--export", "vhost-user-blk"]);
    let output = upgrade.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", place::without_progress(output.stderr));
    place.done(&["detach", "d"]);
}

/// Plays the old daemon in a separate process. When the command asks it to leave, it replaces the content of a file.
const OLD: &str = r#"
import os, socket, sys
control, shown, path, after = sys.argv[1:]
listener = socket.socket(socket.AF_UNIX)
listener.bind(control + ".new")
listener.listen()
os.rename(control + ".new", control)
left = False
while not left:
    client, _ = listener.accept()
    left = b'"leave"' in client.makefile("rb").readline()
    if left:
        with open(path, "r+b") as file:
            file.write(open(after, "rb").read())
            file.truncate()
        os.unlink(control)
    client.sendall(b'{"ok":null}\n' if left else shown.encode())
    client.close()
"#;

/// The reply of the daemon of `d` to `show`.
fn shown_by_daemon(place: &Place) -> String {
    let asked = UnixStream::connect(place.state().join("d.control")).unwrap();
    (&asked).write_all(b"{\"command\":\"show\"}\n").unwrap();
    let mut shown = String::new();
    BufReader::new(&asked).read_line(&mut shown).unwrap();
    shown
}

/// Starts [`OLD`] as the daemon of `d`, which overwrites `path` with the content of the file `after`.
fn play_old_daemon(place: &Place, shown: &str, path: &Path, after: &str) -> Child {
    let control = place.state().join("d.control");
    let words = [control.to_str().unwrap(), shown, path.to_str().unwrap(), after];
    let old = Command::new("python3").args(["-c", OLD]).args(words).spawn().unwrap();
    fs::write(place.state().join("d.lock"), format!("{}\n", old.id())).unwrap();
    wait_until("it listens", || control.exists());
    old
}

// Contract: live-changes
#[test]
fn a_snapshot_before_the_old_daemon_leaves_is_not_lost() {
    let place = Place::new("upgrade-snapshot");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (image, new) = (place.image("image", 1 << 20), path("new"));
    let state = place.state().join("d.json");
    place.done(&["attach", "--name", "d", &image, "--export", "vhost-user-blk"]);
    let shown = shown_by_daemon(&place);
    let before = fs::read(&state).unwrap();
    place.done(&["snapshot", "d", "--to", &new]);
    fs::copy(&state, path("after")).unwrap();
    let kept = keep_state(&place, "d");
    place.done(&["detach", "d"]);
    kept.restore();
    overwrite(&state, &before);
    let mut old = play_old_daemon(&place, &shown, &state, &path("after"));
    place.done(&["upgrade", "d"]);
    assert!(old.wait().unwrap().success());
    assert_eq!(place.json(&["show", "d", "--json"])["image"], new);
    place.done(&["detach", "d"]);
}

#[test]
fn a_daemon_that_leaves_does_not_choose_the_backing_file() {
    let place = Place::new("upgrade-leave");
    let [base, other] = ["base", "other"].map(|name| place.image(name, 1 << 20));
    let [top, after] = ["top", "after"].map(|name| place.dir.join(name).display().to_string());
    place.done(&["attach", &base, "--overlay", &top, "--name", "d", "--export", "vhost-user-blk"]);
    let shown = shown_by_daemon(&place);
    let kept = keep_state(&place, "d");
    place.done(&["detach", "d"]);
    kept.restore();
    fs::copy(&top, &after).unwrap();
    let rebase = |top: &str, base: &str| {
        run("qemu-img", &["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", base, top]);
    };
    rebase(&after, &other);
    let mut old = play_old_daemon(&place, &shown, Path::new(&top), &after);
    let line = place.refused(&["upgrade", "d"]);
    assert!(line.contains(&format!("{other} is not the file that was the backing file of {top}")), "{line}");
    assert!(line.contains("waits until `blkq recover d` serves it again"), "{line}");
    assert!(old.wait().unwrap().success());
    rebase(&top, &base);
    place.done(&["recover", "d"]);
    place.done(&["detach", "d"]);
}

#[test]
fn of_two_upgrades_at_once_none_leaves_the_disk_alone() {
    let place = Place::new("upgrade-twice");
    attach(&place);
    let mut done = 0;
    for _ in 0..8 {
        let both = [(); 2].map(|()| {
            let mut command = place.command(&["upgrade", "d"]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        });
        for output in both.map(|child| child.wait_with_output().unwrap()) {
            let errors = place::without_progress(output.stderr);
            done += usize::from(output.status.success());
            assert_eq!(errors.lines().count(), usize::from(!output.status.success()), "{errors}");
            let why = "upgrade d: another `blkq upgrade` or `blkq recover` of this device is running";
            assert!(output.status.success() || errors.contains(why), "{errors}");
        }
        check_settings(&place);
    }
    assert!(done >= 8, "{done}");
    place.done(&["detach", "d"]);
}

/// Writes a state file in place, as a daemon does: the inode and the mode stay the same.
fn overwrite(path: &Path, text: &[u8]) {
    let mode = fs::metadata(path).unwrap().permissions();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(path, text).unwrap();
    fs::set_permissions(path, mode).unwrap();
}

#[test]
fn a_daemon_that_was_taken_over_gives_the_next_one_no_rights() {
    let place = Place::new("upgrade-hostile");
    attach(&place);
    let secret = place.image("secret", 1 << 20);
    let state = place.state().join("d.json");
    let shown = || {
        let info = place.json(&["show", "d", "--json"]);
        (info["image"].clone(), info["attach_options"].clone(), info["exports"].clone())
    };
    let before = shown();
    let good: serde_json::Value = serde_json::from_slice(&fs::read(&state).unwrap()).unwrap();
    let mut options = before.1.clone();
    for (key, value) in [
        ("image", json!(secret)),
        ("exports", json!(["nbd", "vhost-user-blk"])),
        ("listen", json!(["tcp:127.0.0.1:0"])),
        ("sandbox", json!(false)),
        ("insecure", json!(true)),
    ] {
        options["options"][key] = value;
    }
    // As the program before would have obeyed it; with what this one reads; with another pid and bad settings.
    let mut all = good.clone();
    all["attach_options"] = options.clone();
    all["name"] = json!("e");
    all["ublk"] = json!({"id": 0, "cookie": 1});
    let old = json!({
        "name": "d", "pid": 1, "image": secret, "exports": [], "settings": {}, "attach_options": options,
    });
    let mut settings = all.clone();
    settings["pid"] = json!(1);
    settings["settings"]["sandbox"] = json!("off");
    settings["settings"]["depth"] = json!("-1");
    for hostile in [all, settings] {
        overwrite(&state, hostile.to_string().as_bytes());
        let output = place.run(&["upgrade", "d"]);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(shown(), before, "{hostile}");
        overwrite(&state, hostile.to_string().as_bytes());
        kill(place.pid("d"));
        let output = place.run(&["recover", "d"]);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(shown(), before, "{hostile}");
    }
    let mut beyond = good.clone();
    beyond["number"] = json!(1);
    for hostile in [old.to_string(), beyond.to_string(), "[".repeat(1000), String::new()] {
        overwrite(&state, hostile.as_bytes());
        // A new daemon would not know what to serve; the old one stays.
        place.refused(&["upgrade", "d"]);
        assert_eq!(shown(), before, "{hostile}");
    }
    overwrite(&state, old.to_string().as_bytes());
    kill(place.pid("d"));
    place.refused(&["recover", "d"]);
    overwrite(&state, good.to_string().as_bytes());
    place.done(&["recover", "d"]);
    assert_eq!(shown(), before);
    place.done(&["detach", "d"]);
}

#[test]
fn a_daemon_does_not_have_its_options_open() {
    let place = Place::new("upgrade-open");
    attach(&place);
    place.done(&["upgrade", "d"]);
    let open = fs::read_dir(format!("/proc/{}/fd", place.pid("d"))).unwrap();
    let paths: Vec<_> = open.filter_map(|file| fs::read_link(file.unwrap().path()).ok()).collect();
    assert!(paths.contains(&place.state().join("d.json")), "{paths:?}");
    assert!(!paths.iter().any(|path| path.to_str().unwrap().contains(".options")), "{paths:?}");
    place.done(&["detach", "d"]);
}

/// An older program wrote the state file, which also contains the options of the device.
#[test]
fn a_device_of_the_program_before_is_served_by_this_one() {
    let place = Place::new("upgrade-before");
    attach(&place);
    let image = kept_image(&place, "d");
    let state = place.state().join("d.json");
    let shown = place.json(&["show", "d", "--json"]);
    let mut old: serde_json::Value = serde_json::from_slice(&fs::read(&state).unwrap()).unwrap();
    let copy =
        [("name", json!("d")), ("image", json!(image)), ("attach_options", shown["attach_options"].clone())];
    for (key, value) in copy {
        assert_eq!(old[key], value, "an older program can take over");
    }
    old.as_object_mut().unwrap().remove("number");
    for command in ["upgrade", "recover"] {
        let _ = fs::remove_file(place.state().join("d.options"));
        fs::remove_file(&state).unwrap();
        fs::write(&state, old.to_string()).unwrap();
        if command == "recover" {
            kill(place.pid("d"));
        }
        place.done(&[command, "d"]);
        check_settings(&place);
        assert_eq!(kept_image(&place, "d"), image);
    }
    place.done(&["detach", "d"]);
    assert_eq!(place.files(), <[String; 0]>::default());
}

#[test]
fn no_daemon_continues_with_another_file() {
    let place = Place::new("upgrade-replaced");
    fs::create_dir(place.dir.join("images")).unwrap();
    let [first, second, third] = ["images/1", "images/2", "images/3"].map(|name| {
        let image = place.dir.join(name).to_str().unwrap().to_owned();
        run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "1M"]);
        image
    });
    let link = place.dir.join("link");
    let lead_to = |image: &str| {
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(image, &link).unwrap();
    };
    lead_to(&first);
    let attach = ["attach", link.to_str().unwrap(), "--format", "qcow2", "--export", "vhost-user-blk"];
    place.done(&[&attach[..], &["--name", "d"]].concat());
    let pid = place.pid("d");
    let refused = |command: &str| {
        let line = place.refused(&[command, "d"]);
        assert!(line.contains("another file is at ") && line.contains("`blkq detach d`"), "{line}");
    };
    lead_to(&second);
    refused("upgrade");
    lead_to(&first);
    let moved = place.dir.join("moved");
    fs::rename(&first, &moved).unwrap();
    fs::rename(&third, &first).unwrap();
    refused("upgrade");
    assert_eq!(place.pid("d"), pid, "the old daemon still serves the device");
    kill(pid);
    refused("recover");
    fs::rename(&moved, &first).unwrap();
    lead_to(&second);
    refused("recover");
    lead_to(&first);
    // The file system was mounted again, and has another number.
    let mut options = place::client::state(&place, "d.options");
    options["images"][0]["file"]["device"] = json!([4095, 7]);
    fs::write(place.state().join("d.options"), options.to_string()).unwrap();
    place.done(&["recover", "d"]);
    place.done(&["upgrade", "d"]);
    place.done(&["detach", "d"]);
}

#[test]
fn a_daemon_does_not_choose_what_the_next_one_reads() {
    let place = Place::new("upgrade-backing");
    let [base, other] = ["base", "other"].map(|name| place.image(name, 1 << 20));
    let top = place.dir.join("top").display().to_string();
    let rebase = |base: &str| {
        run("qemu-img", &["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", base, &top]);
    };
    let attach = ["attach", &base, "--overlay", &top, "--name", "d", "--export", "vhost-user-blk"];
    place.done(&attach);
    let pid = place.pid("d");
    kill_and_wait(pid, &[&top]);
    rebase(&other);
    let line = place.refused(&["recover", "d"]);
    assert!(line.contains(&format!("{other} is not the file that was the backing file of {top}")), "{line}");
    assert!(line.contains("run `blkq recover --allow-replaced d`"), "{line}");
    place.done(&["recover", "--allow-replaced", "d"]);
    // The accepted file is the recorded one from then on.
    place.done(&["upgrade", "d"]);
    kill_and_wait(place.pid("d"), &[&top]);
    rebase(&base);
    place.refused(&["recover", "d"]);
    place.done(&["recover", "--allow-replaced", "d"]);
    // The file system of the files was mounted again, and has another number; or only the backing file did.
    kill_and_wait(place.pid("d"), &[&top]);
    let mut options = place::client::state(&place, "d.options");
    let image = options["images"].as_array_mut().unwrap().last_mut().unwrap();
    let number = std::mem::replace(&mut image["backing"][0]["file"]["device"], json!([4095, 7]));
    fs::write(place.state().join("d.options"), options.to_string()).unwrap();
    place.refused(&["recover", "d"]);
    let image = options["images"].as_array_mut().unwrap().last_mut().unwrap();
    assert_eq!(std::mem::replace(&mut image["file"]["device"], json!([4095, 7])), number);
    fs::write(place.state().join("d.options"), options.to_string()).unwrap();
    place.done(&["recover", "d"]);
    place.done(&["upgrade", "d"]);
    // Another file replaces the backing file.
    let moved = place.dir.join("moved");
    fs::rename(&base, &moved).unwrap();
    fs::rename(&other, &base).unwrap();
    let line = place.refused(&["upgrade", "d"]);
    assert!(line.contains("is not the file that was the backing file"), "{line}");
    fs::rename(&moved, &base).unwrap();
    place.done(&["upgrade", "d"]);
    place.done(&["detach", "d"]);
}

#[test]
fn a_header_changes_neither_format_nor_a_deeper_backing_file() {
    let place = Place::new("upgrade-chain");
    let [base, other] = ["base", "other"].map(|name| place.image(name, 1 << 20));
    let [middle, top] = ["middle", "top"].map(|name| place.dir.join(name).display().to_string());
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &middle, "1M"]);
    let rebase = |image: &str, format: &str, base: &str| {
        run("qemu-img", &["rebase", "-u", "-f", "qcow2", "-F", format, "-b", base, image]);
    };
    let attach = ["attach", &middle, "--format", "qcow2", "--name", "d", "--export", "vhost-user-blk"];
    place.done(&attach);
    place.done(&["snapshot", "d", "--to", &top]);
    kill_and_wait(place.pid("d"), &[&top]);
    rebase(&middle, "raw", &other);
    let line = place.refused(&["recover", "d"]);
    assert!(
        line.contains(&format!("{other} is not the file that was the backing file of {middle};")),
        "{line}"
    );
    rebase(&middle, "raw", &base);
    rebase(&top, "raw", &middle);
    let undo = format!("run `qemu-img rebase -u -b {middle} -F qcow2 {top}`");
    let line = place.refused(&["recover", "d"]);
    assert!(line.contains("another format") && line.contains(&undo), "{line}");
    let line = place.refused(&["recover", "--allow-replaced", "d"]);
    assert!(line.contains("another format"), "{line}");
    // The advice would make a raw file that a client has written the base of the image.
    rebase(&top, "raw", &other);
    assert!(!place.refused(&["recover", "d"]).contains("rebase"));
    rebase(&top, "qcow2", &middle);
    place.done(&["recover", "d"]);
    // The commit keeps what is recorded of the files below.
    place.done(&["commit", "d"]);
    kill_and_wait(place.pid("d"), &[&middle]);
    rebase(&middle, "raw", &other);
    place.refused(&["recover", "d"]);
    rebase(&middle, "raw", &base);
    place.done(&["recover", "d"]);
    place.done(&["commit", "d"]);
    place.done(&["snapshot", "d", "--to", &place.dir.join("new").display().to_string()]);
    place.done(&["upgrade", "d"]);
    place.done(&["detach", "d"]);
    // A header gives no backing file to an image without one.
    let plain = place.dir.join("plain").display().to_string();
    run("qemu-img", &["create", "-q", "-f", "qcow2", &plain, "1M"]);
    place.done(&["attach", &plain, "--format", "qcow2", "--name", "d", "--export", "vhost-user-blk"]);
    kill_and_wait(place.pid("d"), &[&plain]);
    rebase(&plain, "raw", &other);
    place.refused(&["recover", "d"]);
    place.done(&["recover", "--allow-replaced", "d"]);
    place.done(&["upgrade", "d"]);
    // An older version recorded no backing files.
    kill_and_wait(place.pid("d"), &[&plain]);
    let mut options = place::client::state(&place, "d.options");
    options.as_object_mut().unwrap().remove("has_backing").unwrap();
    for image in options["images"].as_array_mut().unwrap() {
        image.as_object_mut().unwrap().remove("backing");
    }
    fs::write(place.state().join("d.options"), options.to_string()).unwrap();
    place.done(&["recover", "d"]);
    let options = place::client::state(&place, "d.options");
    assert_eq!(options["images"].as_array().unwrap().last().unwrap()["backing"][0]["qcow2"], json!(false));
    place.done(&["upgrade", "d"]);
    place.done(&["detach", "d"]);
}

// Contract: exclusive
#[test]
fn the_image_of_a_killed_guest_device_waits_for_its_next_daemon() {
    let place = Place::new("waiting-guest");
    let image = place.image("image", 1 << 20);
    place.done(&["attach", &image, "--name", "d", "--export", "vhost-user-blk", "--export", "nbd"]);
    kill_and_wait(place.pid("d"), &[&image]);
    let line = place.refused(&["attach", &image, "--name", "other", "--export", "nbd"]);
    assert!(line.contains("blkq recover d"), "{line}");
    place.done(&["recover", "d"]);
    place.done(&["detach", "d"]);
    place.done(&["attach", &image, "--name", "other", "--export", "nbd"]);
}

#[test]
fn no_client_waits_because_of_a_pid_file() {
    let place = Place::new("successor-pid-file");
    let [a, b] = ["a.img", "b.img"].map(|name| place.image(name, 1 << 20));
    let path = place.dir.join("p").to_str().unwrap().to_owned();
    let pid_file = ["--pid-file", &path];
    place.done(&[&["attach", &a, "--name", "a", "--export", "vhost-user-blk"], &pid_file[..]].concat());
    kill_and_wait(place.pid("a"), &[&a]);
    place.done(&[&["attach", &b, "--name", "b"], &pid_file[..]].concat());
    let warned = |words: &[&str], why: &str| {
        let output = place.run(words);
        let warnings = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && warnings.contains(why), "{words:?}: {warnings}");
        assert!(!warnings.contains("choose another path"), "{warnings}");
    };
    warned(&["recover", "a"], "belongs to another running device");
    let pid = format!("{}\n", place.pid("b"));
    assert_eq!(fs::read_to_string(&path).unwrap(), pid);
    place.done(&["detach", "b"]);
    fs::write(&path, "notes").unwrap();
    warned(&["upgrade", "a"], "something other than a process ID");
    assert_eq!(fs::read_to_string(&path).unwrap(), "notes");
    fs::remove_file(&path).unwrap();
    place.done(&["upgrade", "a"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), format!("{}\n", place.pid("a")));
}

// Contract: exclusive
#[test]
fn the_name_of_a_killed_guest_device_continues_its_disk() {
    let place = Place::new("continuing-guest");
    let image = place.image("disk.img", 1 << 20);
    let guest = ["attach", &image, "--export", "vhost-user-blk"];
    place.done(&[&guest[..], &["--depth", "9"]].concat());
    kill_and_wait(place.pid("disk.img"), &[&image]);
    let missing = place.dir.join("missing").to_str().unwrap().to_owned();
    for words in [&["attach", &image][..], &["attach", "ram:1M", "--name", "disk.img"]] {
        assert!(place.refused(words).contains("run `blkq recover disk.img`"));
    }
    place.refused(&["attach", &missing, "--name", "disk.img"]);
    let (socket, address) = (format!("{missing}/socket"), format!("unix:{missing}/socket"));
    assert!(
        place
            .refused(&[&guest[..], &["--vhost-socket", &socket]].concat())
            .contains("run `blkq recover disk.img`")
    );
    // This attach fails when it listens, after it has claimed the name.
    let listening = ["--export", "nbd", "--listen", &address];
    assert!(place.refused(&[&guest[..], &listening].concat()).contains("create the directory"));
    place.done(&["recover", "disk.img"]);
    assert_eq!(place.json(&["show", "disk.img", "--json"])["settings"]["depth"], 9);
    kill_and_wait(place.pid("disk.img"), &[&image]);
    place.done(&guest);
    place.done(&["detach", "disk.img"]);
    assert_eq!(place.files(), <[String; 0]>::default());
    place.done(&["attach", &image]);
}

#[test]
fn dead_devices_are_recovered_with_their_options() {
    let place = Place::new("recover-dead");
    let [a, b] = ["a.img", "b.img"].map(|name| place.image(name, 1 << 20));
    let socket = place.dir.join("v").display().to_string();
    place.done(&["group", "set", "g", "iops=1000"]);
    place.done(&["attach", &a, "--name", "a", "--limit", "iops=500", "--depth", "64"]);
    place.done(&["attach", &b, "--name", "b", "--export", "vhost-user-blk", "--vhost-socket", &socket]);
    place.done(&["attach", "ram:1M", "--name", "r"]);
    place.done(&["set", "a", "depth=9", "group=g", "weight=7"]);
    let shown = |name: &str| {
        let info = place.json(&["show", name, "--json"]);
        (info["attach_options"].clone(), info["settings"].clone(), info["exports"].clone())
    };
    let before = ["a", "b"].map(shown);
    assert_eq!(before[0].1["group"], "g");
    assert!(!place.done(&["list"]).contains("recovered"), "all devices are served");
    kill_and_wait(place.pid("a"), &[&a]);
    assert!(place.done(&["list"]).ends_with("\n1 device can be recovered: run `blkq recover a`\n"));
    assert!(place.refused(&["stat", "a"]).contains("run `blkq recover a` to serve it again"));
    kill_and_wait(place.pid("b"), &[&b]);
    kill(place.pid("r"));
    let list = place.done(&["list"]);
    assert!(list.ends_with("\n2 devices can be recovered (a, b): run `blkq recover --all`\n"), "{list}");
    let listed = place.json(&["list", "--json"]);
    let recoverable = listed.as_array().unwrap().iter().map(|entry| entry["recoverable"].clone());
    assert_eq!(recoverable.collect::<Vec<_>>(), [json!(true), json!(true), json!(false)]);
    assert_eq!(place.done(&["recover", "--all"]).lines().count(), 2);
    assert_eq!(["a", "b"].map(shown), before);
    assert!(place.refused(&["recover", "r"]).contains("attach the image again"));
    assert_eq!(place.done(&["recover", "--all"]), "", "nothing is left to recover");
    place.done(&["set", "a", "group=none"]);
    assert!(place.refused(&["set", "a", "weight=9"]).contains("group=NAME"));
    place.done(&["detach", "a", "b"]);
}

//! The `blkq` command as a user runs it: real processes, sockets and files.

use blkq::testing::{wait_for, wait_until};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;

use crate::place::*;
use rustix::process::Signal;
use serde_json::Value;

// Contract: detach
#[test]
fn a_device_lives_from_attach_to_detach() {
    let place = Place::new("life");
    let image = place.image("disk.img", 8 << 20);
    let uri = place.done(&["attach", &image]);
    let socket = place.state().join("disk.img.nbd");
    assert_eq!(uri, format!("nbd+unix:///?socket={}\n", socket.display()));
    drop(client(&uri));
    let shown = place.json(&["show", "disk.img", "--json"]);
    assert_eq!((&shown["name"], &shown["size"]), (&"disk.img".into(), &(8 << 20).into()));
    assert_eq!((&shown["driver"], &shown["image"]), (&"loop".into(), &image.clone().into()));
    assert_eq!(shown["direct_io"]["requested"], "auto");
    let listed = place.json(&["list", "--json"]);
    assert_eq!((listed.as_array().unwrap().len(), &listed[0]["name"]), (1, &"disk.img".into()));
    let table = place.done(&["list"]);
    assert!(table.lines().count() == 2 && table.contains(uri.trim()), "{table}");
    let pid = place.pid("disk.img");
    assert_eq!(place.done(&["detach", "disk.img"]), "");
    assert!(has_exited(pid));
    assert!(place.files().is_empty());
    assert_eq!(place.json(&["list", "--json"]), Value::Array(Vec::new()));
    // The name and the locks of the image are free for the next device.
    for _ in 0..5 {
        assert_eq!(place.done(&["attach", &image, "--name", "disk.img"]), uri);
        place.done(&["detach", "disk.img"]);
    }
}

#[test]
fn attach_prints_all_as_json() {
    let place = Place::new("json");
    let shown = place.json(&["attach", "ram:1M", "--json", "--queues", "2", "--depth", "32", "--no-merge"]);
    assert_eq!(
        (&shown["name"], &shown["size"], &shown["sector_size"]),
        (&"ram".into(), &(1 << 20).into(), &512.into())
    );
    assert_eq!(shown["exports"].as_array().unwrap().len(), 1);
    let settings = &shown["settings"];
    assert_eq!(
        (&settings["queues"], &settings["depth"], &settings["merge"]),
        (&2.into(), &32.into(), &false.into())
    );
    assert_eq!(
        (&shown["direct_io"]["requested"], &shown["direct_io"]["effective"]),
        (&"auto".into(), &"off".into())
    );
    assert_eq!(shown["clients"], Value::Array(Vec::new()));
}

#[test]
fn names_are_unique_checked_and_bounded() {
    let place = Place::new("names");
    place.done(&["attach", "ram:1M"]);
    let shown = place.json(&["attach", "ram:1M", "--json"]);
    assert_eq!(shown["name"], "ram-2");
    assert!(place.refused(&["attach", "ram:1M", "--name", "ram"]).contains("in use by another device"));
    for name in ["", ".", "..", "a/b", "../a", "a\nb", "-x", &"x".repeat(300)] {
        place.refused(&["attach", "ram:1M", &format!("--name={name}")]);
    }
    let image = place.image("a strange näme", 1 << 20);
    assert_eq!(place.json(&["attach", &image, "--json"])["name"], "a_strange_näme");
    assert_eq!(place.json(&["list", "--json"]).as_array().unwrap().len(), 3);
}

// Contract: detach
#[test]
fn a_name_that_is_the_image_of_another_device_is_refused() {
    let place = Place::new("name-or-path");
    for directory in ["a", "b", "c"] {
        fs::create_dir(place.dir.join(directory)).unwrap();
    }
    let (first, second) = (place.image("a/d.img", 1 << 20), place.image("b/d.img", 1 << 20));
    let unused = place.image("c/d.img", 1 << 20);
    place.done(&["attach", &first]);
    place.done(&["attach", &second]);
    let run = |directory: &str, words: &[&str]| {
        place.command(words).current_dir(place.dir.join(directory)).output().unwrap()
    };
    // In the directory of the other device's image.
    for words in [
        &["resize", "d.img", "2M"][..],
        &["set", "d.img", "depth=4"],
        &["snapshot", "d.img", "--to", "new"],
        &["commit", "d.img"],
        &["show", "d.img"],
        &["stat", "d.img"],
        &["detach", "d.img", "--force"],
        &["losetup", "-d", "d.img"],
    ] {
        let output = run("b", words);
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}: {line}");
        assert!(
            line.contains("d.img is the name of a device, and the image of the device d.img-2"),
            "{line}"
        );
    }
    assert_eq!(fs::metadata(&first).unwrap().len(), 1 << 20);
    assert!(run("b", &["resize", "./d.img", "2M"]).status.success());
    assert!(run("b", &["resize", "d.img-2", "2M"]).status.success());
    assert_eq!(
        (fs::metadata(&first).unwrap().len(), fs::metadata(&second).unwrap().len()),
        (1 << 20, 2 << 20)
    );
    // The word is the name of a device if the file is this device's image, no device's image, or missing.
    for directory in ["a", "c", "s"] {
        assert!(run(directory, &["resize", "d.img", "3M"]).status.success(), "{directory}");
    }
    assert_eq!(
        (fs::metadata(&first).unwrap().len(), fs::metadata(&unused).unwrap().len()),
        (3 << 20, 1 << 20)
    );
    // The image of a killed daemon makes the word ambiguous too.
    kill(place.pid("d.img-2"));
    assert!(!run("b", &["detach", "d.img"]).status.success());
    assert!(run("b", &["detach", "./d.img"]).status.success());
    assert!(run("b", &["detach", "d.img"]).status.success());
    assert!(place.files().is_empty());
}

#[test]
fn a_killed_daemon_stops_nothing() {
    let place = Place::new("killed");
    let image = place.image("disk.img", 1 << 20);
    let custom = place.dir.join("c.sock");
    let listen = format!("unix:{}", custom.display());
    place.done(&["attach", &image, "--listen", &listen]);
    place.done(&["attach", "ram:1M", "--name", "other"]);
    kill(place.pid("disk.img"));
    assert!(place.files().contains(&"disk.img.control".to_owned()));
    // An attach replaces the stale files of the killed daemon.
    place.done(&["attach", &image, "--name", "disk.img", "--listen", &listen]);
    drop(client(&format!("nbd+unix:///?socket={}", custom.display())));
    // `blkq list --clean` removes and reports them.
    kill(place.pid("disk.img"));
    let listed = place.run(&["list", "--json", "--clean"]);
    let errors = without_progress(listed.stderr);
    assert!(errors.starts_with("blkq: disk.img: the daemon was killed or crashed"), "{errors}");
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!((listed.as_array().unwrap().len(), &listed[0]["name"]), (1, &"other".into()));
    assert!(!place.files().iter().any(|file| file.starts_with("disk.img")));
    // A command for the dead device fails, and a detach removes its files.
    kill(place.pid("other"));
    assert!(place.refused(&["set", "other", "depth=1"]).contains("the daemon (pid "));
    let _ = place.run(&["detach", "other"]);
    assert!(place.files().is_empty());
    assert!(place.refused(&["show", "other"]).contains("no such device"));
}

/// Names, sizes and modification times of the files in the state directory.
fn state_of(place: &Place) -> Vec<(String, u64, std::time::SystemTime)> {
    let of = |file: String| {
        let metadata = std::fs::symlink_metadata(place.state().join(&file)).unwrap();
        (file, metadata.len(), metadata.modified().unwrap())
    };
    place.files().into_iter().map(of).collect()
}

// Contract: detach
#[test]
fn list_and_info_of_a_dead_device_change_nothing() {
    let place = Place::new("dead");
    let image = place.image("disk.img", 1 << 20);
    place.done(&["attach", &image, "--name", "d"]);
    place.done(&["set", "d", "depth=16"]);
    let pid = place.pid("d");
    kill(pid);
    let before = state_of(&place);
    for _ in 0..2 {
        let listed = place.done(&["list", "-o", "NAME,MODE,IMAGE", "--no-headings"]);
        assert_eq!(listed.split_whitespace().collect::<Vec<_>>(), ["d", "dead", image.as_str()]);
        let listed = &place.json(&["list", "--json"])[0];
        assert_eq!((&listed["state"], &listed["pid"]), (&"dead".into(), &pid.into()));
        let shown = place.run(&["show", "d"]);
        let (page, why) =
            (String::from_utf8(shown.stdout).unwrap(), String::from_utf8(shown.stderr).unwrap());
        assert_eq!(shown.status.code(), Some(1));
        assert!(
            page.contains(&format!("process {pid}, killed or crashed")) && page.contains("d.log"),
            "{page}"
        );
        assert!(page.contains("Z Serving ") && page.contains("Z set depth=16\n"), "{page}");
        assert!(why.starts_with("blkq: d: the daemon") && why.lines().count() == 1, "{why}");
        let shown = place.run(&["show", "d", "--json"]).stdout;
        let shown: Value = serde_json::from_slice(&shown).unwrap();
        assert!(shown["log_lines"][1].as_str().unwrap().ends_with("Z set depth=16"), "{shown}");
        place.refused(&["stat", "d"]);
        place.refused(&["upgrade", "d"]);
    }
    assert_eq!(state_of(&place), before);
    // A failed attach keeps the old log; a successful one renames it once.
    place.refused(&["attach", "/nowhere", "--name", "d"]);
    let old = || std::fs::read_to_string(place.state().join("d.log.1")).unwrap();
    assert!(old().contains("depth=16"));
    place.done(&["attach", &image, "--name", "d"]);
    assert!(old().contains("depth=16"));
    place.done(&["detach", "d"]);
    assert!(place.files().is_empty());
}

#[test]
fn a_daemon_that_is_killed_while_it_is_asked_has_died() {
    let place = Place::new("asked");
    // The daemon's own socket, and that of the connection which it does not accept.
    let control = place.state().join("a.control").display().to_string();
    let sockets = || std::fs::read_to_string("/proc/net/unix").unwrap().matches(&control).count();
    let line = wait_for("the daemon is killed before the command finds it stopped", || {
        place.done(&["attach", "ram:1M", "--name", "a"]);
        let pid = place.pid("a");
        signal(pid, rustix::process::Signal::STOP);
        let mut show = place.command(&["show", "a"]);
        let show = show.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("the command has connected", || sockets() == 2);
        kill(pid);
        let line = String::from_utf8(show.wait_with_output().unwrap().stderr).unwrap();
        (!line.contains("is stopped")).then_some(line)
    });
    assert!(
        line.contains("the daemon (pid ") && line.contains(" was killed or crashed (last log line: "),
        "{line}"
    );
}

// Contract: errors
#[test]
fn a_stopped_daemon_is_named_with_the_commands_that_help() {
    let place = Place::new("stopped");
    place.done(&["attach", "ram:1M", "--name", "a"]);
    let pid = place.pid("a");
    signal(pid, rustix::process::Signal::STOP);
    let stopped = format!(
        "the daemon (pid {pid}) is stopped; run `kill -CONT {pid}` to continue it, or `kill -9 {pid}` to end it\n"
    );
    place.done(&["group", "set", "g", "iops=100"]);
    for words in [
        &["show", "a"][..],
        &["set", "a", "depth=4"],
        &["set", "a", "group=g"],
        &["detach", "a"],
        &["detach", "a", "--force"],
    ] {
        let line = place.refused(words);
        assert!(line.ends_with(&stopped), "{words:?}: {line}");
    }
    assert!(place.done(&["list"]).contains("is stopped"));
    signal(pid, rustix::process::Signal::CONT);
    place.done(&["detach", "a"]);
}

#[test]
fn a_removed_or_replaced_image_is_reported() {
    let place = Place::new("removed");
    let image = place.image("disk.img", 1 << 20);
    place.done(&["attach", &image]);
    let other = place.image("other.img", 1 << 20);
    std::fs::rename(&other, &image).unwrap();
    for command in [&["list"][..], &["show", "disk.img"]] {
        assert!(place.done(command).contains("disk.img (deleted)"), "{command:?}");
    }
    // Another file has the name of the image now.
    place.done(&["attach", &image, "--name", "new"]);
}

// Contract: detach
#[test]
fn detach_spares_clients_unless_forced() {
    let place = Place::new("clients");
    let uri = place.done(&["attach", "ram:1M"]);
    let mut connected = client(&uri);
    wait_until("the client is counted", || {
        place.json(&["show", "ram", "--json"])["clients"].as_array().unwrap().len() == 1
    });
    assert!(place.refused(&["detach", "ram"]).contains("1 client is connected"));
    let refused = place.run(&["detach", "--all"]);
    assert_eq!(refused.status.code(), Some(1));
    // The refused detach has changed nothing.
    drop(client(&uri));
    place.done(&["show", "ram"]);
    place.done(&["detach", "ram", "--force"]);
    assert_eq!(connected.read(&mut [0]).unwrap_or(0), 0);
    assert!(place.files().is_empty());
}

#[test]
fn detach_all_reports_each() {
    let place = Place::new("all");
    assert_eq!(place.done(&["detach", "--all"]), "");
    for name in ["a", "b", "c"] {
        place.done(&["attach", "null:1M", "--name", name]);
    }
    assert_eq!(place.done(&["detach", "--all"]), "a: detached\nb: detached\nc: detached\n");
    assert!(place.files().is_empty());
}

#[test]
fn settings_and_size_change_while_it_is_attached() {
    let place = Place::new("set");
    let image = place.image("disk.img", 1 << 20);
    place.done(&["attach", &image, "--name", "d", "--scheduler", "kyber"]);
    assert_eq!(place.json(&["show", "d", "--json"])["settings"]["scheduler"], "kyber");
    place.done(&["set", "d", "depth=16", "scheduler=mq-deadline", "direct-io=off", "read-only=on"]);
    let shown = place.json(&["show", "d", "--json"]);
    assert_eq!(
        (&shown["settings"]["depth"], &shown["settings"]["scheduler"]),
        (&16.into(), &"mq-deadline".into())
    );
    assert_eq!((&shown["direct_io"]["effective"], &shown["read_only"]), (&"off".into(), &true.into()));
    let line = place.refused(&["set", "d", "depth=8", "bogus=1", "depth=4"]);
    assert!(line.contains("bogus=1") && line.contains("already set: depth"), "{line}");
    assert_eq!(place.json(&["show", "d", "--json"])["settings"]["depth"], 8);
    for scheduler in ["kyber", "none"] {
        place.done(&["set", "d", &format!("scheduler={scheduler}")]);
        assert_eq!(place.json(&["show", "d", "--json"])["settings"]["scheduler"], scheduler);
    }
    place.done(&["set", "d", "read-only=off"]);
    // A changed setting is saved for the next daemon.
    let state = fs::read(place.state().join("d.json")).unwrap();
    let state: Value = serde_json::from_slice(state.split(|byte| *byte == 0).next().unwrap()).unwrap();
    assert_eq!(state["settings"]["depth"], "8", "{state}");
    assert_eq!(place.done(&["resize", "d", "3M"]), "3M\n");
    assert_eq!(fs::metadata(&image).unwrap().len(), 3 << 20);
    fs::File::options().write(true).open(&image).unwrap().set_len(5 << 20).unwrap();
    assert_eq!(place.done(&["resize", "d"]), "5M\n");
    place.refused(&["resize", "d", "0"]);
    assert_eq!(place.json(&["show", "d", "--json"])["size"], 5 << 20);
    place.done(&["resize", "d", "1000003"]);
    assert_eq!(place.json(&["show", "d", "--json"])["size"], 1_000_003);
}

#[test]
fn mechanisms_are_switched_off_by_name() {
    let place = Place::new("switches");
    place.done(&["attach", "ram:1M", "--name", "d", "--no-pacing"]);
    let settings = || place.json(&["show", "d", "--json"])["settings"].clone();
    assert_eq!(settings()["without"], "none");
    place.done(&["set", "d", "without=huge-pages,early-submission"]);
    assert_eq!(settings()["without"], "early-submission,huge-pages");
    assert!(
        place.refused(&["set", "d", "without=pages"]).contains("choose from early-submission, huge-pages")
    );
    // Switches of earlier versions are still accepted.
    place.done(&["set", "d", "receive-backoff=off", "early-submission=on"]);
    assert_eq!(settings()["without"], "huge-pages,receive-backoff");
    assert_eq!(place.json(&["stat", "d", "--json"])["nbd"]["receive_backoffs"], 0);
    // A removed option is accepted, and is neither a setting nor a counter.
    place.done(&["set", "d", "pacing=off"]);
    assert_eq!(settings().get("pacing"), None);
    assert!(!place.done(&["stat", "d", "--json"]).contains("pac"));
    assert!(place.refused(&["set", "d", "colour=red"]).contains("merge, on-error, read-only"));
}

#[test]
fn every_device_can_be_made_read_only_and_writable_again() {
    let place = Place::new("read-only");
    let image = place.image("disk.img", 1 << 20);
    for (number, what) in [&image, "ram:1M", "null:1M"].iter().enumerate() {
        for begin in [&["attach", what, "--read-only"][..], &["attach", what]] {
            let name = format!("d{number}-{}", begin.len());
            place.done(&[begin, &["--name", &name]].concat());
            let read_only = || place.json(&["show", &name, "--json"])["read_only"].clone();
            assert_eq!(read_only(), begin.len() == 3, "{what}");
            for (value, on) in [("off", false), ("on", true), ("on", true), ("off", false)] {
                place.done(&["set", &name, &format!("read-only={value}")]);
                assert_eq!(read_only(), on, "{what}");
            }
            assert!(place.refused(&["set", &name, "read-only=maybe"]).contains("on or off"));
            place.done(&["detach", &name]);
        }
    }
}

#[test]
fn more_queues_than_a_driver_has_are_refused() {
    let place = Place::new("queues");
    let image = place.image("disk.img", 1 << 20);
    let line = place.refused(&["attach", &image, "--queues", "64"]);
    assert!(line.contains("at most 63 queues, not 64"), "{line}");
    assert!(place.files().is_empty());
}

// Contract: bounded-input
#[test]
fn other_machines_are_not_let_in_by_accident() {
    let place = Place::new("world");
    for address in ["tcp:0.0.0.0:0", "tcp:[::]:0"] {
        let line = place.refused(&["attach", "ram:1M", "--listen", address]);
        assert!(line.contains("--tls") && line.contains("--insecure"), "{line}");
        assert!(place.files().is_empty());
        place.done(&["attach", "ram:1M", "--listen", address, "--insecure"]);
        place.done(&["detach", "ram"]);
    }
    assert!(place.refused(&["attach", "ram:1M", "--tls", "require"]).contains("--tls-certificates"));
}

#[test]
fn one_device_may_have_several_addresses() {
    let place = Place::new("tcp");
    let unix = format!("unix:{}", place.dir.join("u").display());
    let words = ["attach", "ram:1M", "--listen", "tcp:127.0.0.1:0", "--listen", &unix, "--insecure"];
    let printed = place.done(&words);
    let uris: Vec<&str> = printed.lines().collect();
    assert_eq!(uris.len(), 2);
    let address = uris[0].strip_prefix("nbd://").unwrap();
    let mut greeting = [0; 8];
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"NBDMAGIC");
    drop(client(uris[1]));
    // An attach at an address in use fails and leaves no files.
    let before = place.files();
    place.refused(&["attach", "ram:1M", "--listen", &unix, "--name", "two"]);
    place.refused(&["attach", "ram:1M", "--listen", &format!("tcp:{address}"), "--name", "two"]);
    assert_eq!(place.files(), before);
}

#[test]
fn what_this_build_lacks_is_refused() {
    let place = Place::new("lacks");
    let socket = ["attach", "ram:1M", "--export", "nbd", "--vhost-socket", "/tmp/v"];
    assert!(place.refused(&socket).contains("add --export vhost-user-blk"));
    let listen = ["attach", "ram:1M", "--export", "vhost-user-blk", "--listen", "tcp:localhost:0"];
    assert!(place.refused(&listen).contains("--listen is for NBD"));
    let listen = ["--export", "ublk", "--listen", "tcp:localhost:0"];
    assert!(place.refused(&[&["attach", "ram:1M"][..], &listen].concat()).contains("--export nbd"));
    if !Path::new("/dev/ublk-control").exists() {
        // `blkq doctor` prints the same hint.
        let line = place.refused(&["attach", "ram:1M", "--export", "ublk"]);
        let doctor: serde_json::Value =
            serde_json::from_slice(&place.run(&["doctor", "--json"]).stdout).unwrap();
        let ublk = doctor["checks"].as_array().unwrap().iter().find(|check| check["name"] == "ublk").unwrap();
        let hint = ublk["cure"].as_str().unwrap().split(';').next().unwrap();
        assert!(line.contains(&format!("; {hint}, or use --export nbd")), "{line} {hint}");
    }
    let copy = ["attach", "ram:1M", "--export", "nbd", "--copy", "user"];
    assert!(place.refused(&copy).contains("omit it"));
    let threads = ["attach", "ram:1M", "--export", "ublk", "--queues", "33", "--threads-per-queue", "2"];
    assert!(place.refused(&threads).contains("--queues times --threads-per-queue must be 1 to 64, not 66"));
    place.refused(&["attach", "ram:1M", "--direct-io", "on"]);
    place.refused(&["attach", "/nonexistent/image"]);
    assert!(place.files().is_empty());
}

#[test]
fn a_device_in_memory_is_not_recovered_or_handed_over() {
    let place = Place::new("recover");
    assert!(place.refused(&["recover", "ram"]).contains("no such device"));
    assert!(place.refused(&["recover", "../ram"]).contains("no such device"));
    assert!(place.refused(&["upgrade", "ram"]).contains("no such device"));
    place.done(&["attach", "ram:1M"]);
    assert!(place.refused(&["recover", "ram"]).contains("the daemon is running"));
    assert!(place.refused(&["upgrade", "ram"]).contains("detach the device"));
    place.done(&["show", "ram"]);
    // A state file that names a block device unknown to the kernel does not prevent an attach.
    kill(place.pid("ram"));
    let options = place.state().join("ram.options");
    let mut left: Value = serde_json::from_slice(&fs::read(&options).unwrap()).unwrap();
    left["ublk"] = serde_json::json!(1);
    fs::write(&options, left.to_string()).unwrap();
    assert!(place.refused(&["recover", "ram"]).contains("the daemon (pid "));
    place.run(&["list", "--clean"]);
    assert!(place.files().is_empty());
}

#[test]
fn a_state_directory_that_cannot_be_used_is_named() {
    let place = Place::new("dir");
    let file = place.image("file", 0);
    let output =
        place.command(&["attach", "ram:1M"]).env("BLKQ_STATE_DIR", format!("{file}/s")).output().unwrap();
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), line.lines().count()), (Some(1), 1));
    assert!(line.contains("state directory") && line.contains(&file), "{line}");
}

#[test]
fn a_ceiling_is_searched_when_that_is_asked_for() {
    let place = Place::new("auto-limit");
    place.done(&["attach", "ram:1M", "--name", "a", "--export", "nbd", "--limit", "auto"]);
    let shown = |key: &str| place.json(&["show", "a", "--json"])["settings"][key].clone();
    assert_eq!((shown("limit"), shown("ceiling")), ("auto".into(), "not found yet".into()));
    assert!(place.done(&["stat", "a"]).contains("limits: auto"));
    place.done(&["set", "a", "limit=auto"]);
    place.done(&["set", "a", "limit=iops=70"]);
    assert_eq!((shown("limit"), shown("ceiling")), ("iops=70".into(), serde_json::Value::Null));
    place.done(&["set", "a", "limit=auto"]);
    assert_eq!(shown("limit"), "auto");
    place.done(&["set", "a", "limit=none"]);
    assert_eq!((shown("limit"), shown("ceiling")), ("none".into(), serde_json::Value::Null));

    place.done(&["group", "set", "g", "iops=100"]);
    place.done(&["attach", "ram:1M", "--name", "b", "--export", "nbd", "--group", "g"]);
    let line = place.refused(&["set", "b", "limit=auto"]);
    assert!(line.contains("not possible for a device in a group"), "{line}");
    place.refused(&["attach", "ram:1M", "--name", "c", "--export", "nbd", "--group", "g", "--limit", "auto"]);
}

#[test]
fn a_daemon_whose_sockets_were_removed_is_named() {
    let place = Place::new("no-socket");
    place.done(&["attach", "ram:1M", "--name", "r"]);
    let pid = place.pid("r");
    fs::remove_file(place.state().join("r.control")).unwrap();
    for words in [&["list"][..], &["detach", "r"]] {
        let output = place.run(words);
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert!(
            text.contains(&format!("control socket was removed, run `kill {pid}` to detach the device")),
            "{text}"
        );
    }
    signal(pid, Signal::TERM);
    wait_until("it is detached", || place.files().is_empty());
}

/// A daemon is stopped by a signal and receives the command only after SIGCONT.
#[test]
fn a_command_that_has_exited_changes_nothing() {
    let place = Place::new("exited");
    place.done(&["attach", "ram:1M", "--name", "r"]);
    let pid = place.pid("r");
    let depth = || place.json(&["show", "r", "--json"])["settings"]["depth"].clone();
    let before = depth();
    signal(pid, Signal::STOP);
    for line in [
        &b"{\"command\":\"set\",\"settings\":[[\"depth\",\"3\"]]}\n"[..],
        b"{\"command\":\"detach\",\"force\":true}\n",
    ] {
        let mut stream = UnixStream::connect(place.state().join("r.control")).unwrap();
        stream.write_all(line).unwrap();
    }
    signal(pid, Signal::CONT);
    let refused = "refused: the client had exited before its request was read";
    let log = || fs::read_to_string(place.state().join("r.log")).unwrap_or_default();
    wait_until("both are refused", || log().matches(refused).count() == 2);
    assert_eq!(depth(), before);
    place.done(&["detach", "r"]);
}

//! Snapshots of devices in use: the old image keeps its data, and clients see no error.

use blkq::testing::assert_stays;
use std::fs;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use crate::place::client::*;
use crate::place::*;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

#[test]
fn a_client_continues_in_each_new_overlay() {
    let place = Place::new("snapshot");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let base = place.image("base.img", 8 << 20);
    for confined in [true, false] {
        fs::write(&base, vec![0; 8 << 20]).unwrap();
        let attach = ["attach", &base, "--name", "d", "--no-sandbox"];
        let uri = place.done(&attach[..if confined { 4 } else { 5 }]);
        let mut client = Client::new(&uri, "d");
        client.write(1, 1);
        client.write(2, 1);
        let images = ["1", "2", "3"].map(&path);
        let mut below = vec![base.clone()];
        for (number, image) in images.iter().enumerate() {
            // Without the number in the header that names the journal, which the daemon clears.
            let kept = |path: &String| {
                let mut bytes = fs::read(path).unwrap();
                bytes[88..92].fill(0);
                bytes
            };
            let before = kept(below.last().unwrap());
            assert_eq!(place.done(&["snapshot", "d", "--to", image]), format!("{image}\n"));
            assert_eq!(kept_image(&place, "d"), *image);
            let byte = number as u8 + 2;
            client.write(2, byte);
            client.write(10 + number as u64, byte);
            client.flush();
            assert_eq!((client.read(1), client.read(2), client.read(3)), (1, byte, 0));
            let after = kept(below.last().unwrap());
            assert!(
                after.starts_with(&before[..after.len()]) || before == after,
                "what was kept has changed"
            );
            let shown = place.json(&["show", "d", "--json"]);
            assert_eq!((&shown["image"], &shown["driver"]), (&image.as_str().into(), &"qcow2".into()));
            below.push(image.clone());
        }
        drop(client);
        place.done(&["detach", "d"]);
        assert_eq!(fs::read(&base).unwrap()[2 * BLOCK], 1);
        for (image, behind) in images.iter().zip(&below) {
            run("qemu-img", &["check", "-U", "-q", "-f", "qcow2", image]);
            let info: serde_json::Value =
                serde_json::from_str(&run("qemu-img", &["info", "--output=json", image])).unwrap();
            assert_eq!(info["full-backing-filename"], behind.as_str(), "{info}");
        }
        // The next daemon reads the same data.
        let uri = place.done(&["attach", &images[2], "--format", "qcow2", "--name", "d"]);
        let mut client = Client::new(&uri, "d");
        assert_eq!([1, 2, 3, 10, 11, 12].map(|block| client.read(block)), [1, 4, 0, 2, 3, 4]);
        drop(client);
        place.done(&["detach", "d"]);
        images.iter().for_each(|image| fs::remove_file(image).unwrap());
    }
}

// Contract: live-changes
#[test]
fn writes_continue_during_snapshots_and_none_is_lost() {
    let place = Place::new("snapshot-load");
    let base = place.image("base.img", 16 << 20);
    let uri = place.done(&["attach", &base, "--name", "d"]);
    let writer = RandomWriter::start(&uri, "d", (16 << 20) / BLOCK as u64);
    let mut last = String::new();
    for number in 0..5 {
        writer.wait(50);
        last = place.dir.join(format!("{number}.qcow2")).to_str().unwrap().to_owned();
        place.done(&["snapshot", &format!("d={last}")]);
    }
    writer.wait(50);
    let expected = writer.finish();
    // Only flushed data must survive a killed daemon.
    kill_and_wait(place.pid("d"), &[&base, &last]);
    let raw = place.dir.join("raw").to_str().unwrap().to_owned();
    run("qemu-img", &["convert", "-U", "-f", "qcow2", "-O", "raw", &last, &raw]);
    assert_blocks(&fs::read(raw).unwrap(), &expected);
}

#[test]
fn several_devices_have_snapshots_together_or_none() {
    let place = Place::new("snapshot-group");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let images = ["a", "b"].map(|name| place.image(&format!("{name}.img"), 1 << 20));
    let uris = [0, 1].map(|at| place.done(&["attach", &images[at], "--name", ["a", "b"][at]]));
    let (a, b) = (format!("a={}", path("a.1")), format!("b={}", path("b.1")));
    let mut client = Client::new(&uris[0], "a");
    client.write(0, 1);
    place.done(&["set", "b", "read-only=on"]);
    let line = place.refused(&["snapshot", &a, &b]);
    assert!(line.contains("snapshot b") && line.contains("read-only"), "{line}");
    place.done(&["set", "b", "read-only=off"]);
    fs::write(path("b.1"), "x").unwrap();
    let line = place.refused(&["snapshot", &a, &b]);
    assert!(line.contains("b.1: already exists"), "{line}");
    assert_eq!(fs::read(path("b.1")).unwrap(), b"x");
    fs::remove_file(path("b.1")).unwrap();
    assert!(!fs::exists(path("a.1")).unwrap());
    assert_eq!(place.json(&["show", "a", "--json"])["image"], images[0].as_str());
    client.write(1, 2);
    client.flush();
    assert_eq!(fs::read(&images[0]).unwrap()[BLOCK], 2, "it continues unchanged");
    place.done(&["snapshot", &a, &b]);
    for name in ["a", "b"] {
        assert_eq!(kept_image(&place, name), path(&format!("{name}.1")));
    }
    assert_eq!([0, 1].map(|block| client.read(block)), [1, 2]);
}

/// Begins a snapshot of the device `name` to `path`, and leaves it frozen until the command continues or disconnects.
fn begin(place: &Place, name: &str, path: &str) -> UnixStream {
    let mut options = place.json(&["show", name, "--json"])["attach_options"].clone();
    options["options"]["image"] = path.into();
    options["options"]["format"] = "qcow2".into();
    let new = fs::File::options().read(true).write(true).create_new(true).open(path).unwrap();
    let mut stream = UnixStream::connect(place.state().join(format!("{name}.control"))).unwrap();
    let mut reply = [0; 64];
    let image = record_image(place, name, path, &options);
    let request = serde_json::json!({"command": "snapshot", "options": options, "image": image});
    writeln!(stream, "{request}").unwrap();
    let length = stream.read(&mut reply).unwrap();
    assert_eq!(&reply[..length], b"{\"ok\":null}\n");
    send_files(&stream, &[new.as_fd()]);
    let length = stream.read(&mut reply).unwrap();
    assert_eq!(&reply[..length], b"{\"ok\":null}\n");
    stream
}

fn send_files(stream: &UnixStream, files: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(files)));
    sendmsg(stream, &[IoSlice::new(b"\n")], &mut control, SendFlags::empty()).unwrap();
}

// Contract: live-changes
#[test]
fn a_commit_that_begins_in_a_snapshot_keeps_the_new_image() {
    let place = Place::new("snapshot-commit");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (base, top, new) = (place.image("base.img", 1 << 20), path("top"), path("new"));
    let uri = place.done(&["attach", &base, "--overlay", &top, "--name", "d"]);
    let mut client = Client::new(&uri, "d");
    client.write(1, 1);
    client.flush();
    let mut commit = UnixStream::connect(place.state().join("d.control")).unwrap();
    let mut reply = [0; 512];
    commit.write_all(b"{\"command\":\"commit\",\"image\":7}\n").unwrap();
    let length = commit.read(&mut reply).unwrap();
    assert!(reply[..length].starts_with(b"{\"ok\":"));
    let mut snapshot = begin(&place, "d", &new);
    let files = [fs::File::options().read(true).write(true).open(&base), fs::File::open(&base)];
    let files = files.map(Result::unwrap);
    send_files(&commit, &files.each_ref().map(AsFd::as_fd));
    // The commit has passed its first checks.
    commit.set_nonblocking(true).unwrap();
    assert_stays("the commit waits for the snapshot", || commit.read(&mut reply).is_err());
    commit.set_nonblocking(false).unwrap();
    snapshot.write_all(b"\n").unwrap();
    let length = snapshot.read(&mut reply).unwrap();
    assert_eq!(&reply[..length], b"{\"ok\":{\"warnings\":[]}}\n");
    client.write(2, 2);
    client.flush();
    let length = commit.read(&mut reply).unwrap();
    let text = String::from_utf8_lossy(&reply[..length]);
    assert!(text.contains("error"), "{text}");
    assert_eq!([1, 2].map(|block| client.read(block)), [1, 2]);
    assert_eq!(kept_image(&place, "d"), new);
}

#[test]
fn a_command_that_dies_leaves_the_device_as_it_was() {
    let place = Place::new("snapshot-left");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (base, new) = (place.image("base.img", 1 << 20), path("new"));
    let uri = place.done(&["attach", &base, "--name", "d"]);
    let mut client = Client::new(&uri, "d");
    client.write(1, 1);
    let command = begin(&place, "d", &new);
    // Reports do not wait for it.
    assert_eq!(place.json(&["show", "d", "--json"])["image"], base.as_str());
    // It waits as long as the device does.
    request(&mut client.stream, 1, 2, 2 * BLOCK as u64, BLOCK as u32);
    drop(command);
    assert_eq!(reply(&mut client.stream, 0), (0, 2));
    client.flush();
    assert_eq!(kept_image(&place, "d"), base);
    assert_eq!(fs::read(&base).unwrap()[..3 * BLOCK], [[0; BLOCK], [1; BLOCK], [7; BLOCK]].concat());
    fs::remove_file(&new).unwrap();
    place.done(&["snapshot", "d", "--to", &new]);
    assert_eq!([0, 1, 2].map(|block| client.read(block)), [0, 1, 7]);
}

#[test]
fn a_killed_daemon_leaves_an_image_with_all_that_was_written() {
    let place = Place::new("snapshot-killed");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let base = place.image("base.img", 1 << 20);
    let (first, second, third) = (path("1"), path("2"), path("3"));
    let check = |image: &str, format: &str, expected: [u8; 3]| {
        if format == "qcow2" {
            run("qemu-img", &["check", "-U", "-q", "-f", "qcow2", image]);
        }
        let uri = place.done(&["attach", image, "--format", format, "--name", "d"]);
        let mut client = Client::new(&uri, "d");
        assert_eq!([1, 2, 3].map(|block| client.read(block)), expected, "{image}");
        client
    };
    let mut client = check(&base, "raw", [0; 3]);
    client.write(1, 1);
    // The new image is durable, and the state file is not written yet: both images contain all data.
    drop(begin_and_kill(&place, &base, &first));
    assert_eq!(fs::read(&base).unwrap()[BLOCK], 1);
    drop(check(&first, "qcow2", [1, 0, 0]));
    place.done(&["detach", "d"]);
    let mut client = check(&base, "raw", [1, 0, 0]);
    // It has changed over: all flushed data exists.
    place.done(&["snapshot", "d", "--to", &second]);
    client.write(2, 2);
    client.flush();
    kill_and_wait(place.pid("d"), &[&base, &second]);
    let mut client = check(&second, "qcow2", [1, 2, 0]);
    // Also from qcow2, whose tables are in memory.
    client.write(3, 3);
    drop(begin_and_kill(&place, &second, &third));
    drop(check(&third, "qcow2", [1, 2, 3]));
    place.done(&["detach", "d"]);
    drop(check(&second, "qcow2", [1, 2, 3]));
}

fn begin_and_kill(place: &Place, below: &str, path: &str) -> UnixStream {
    let pid = place.pid("d");
    let command = begin(place, "d", path);
    kill_and_wait(pid, &[below, path]);
    command
}

#[test]
fn a_snapshot_that_cannot_be_leaves_nothing() {
    let place = Place::new("snapshot-refused");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let image = place.image("a.img", 1 << 20);
    fs::create_dir(path("e")).unwrap();
    let (new, elsewhere) = (path("new"), path("e/new"));
    for (words, more, why) in [
        (&[image.as_str()][..], &[][..], "already exists"),
        (&[&image, "--read-only"], &[], "read-only"),
        (&[&image, "--offset", "4096"], &[], "attach it without --offset"),
        (&[&image, "--size-limit", "4096"], &[], "attach it without --size-limit"),
        (&[&image, "--shared"], &[], "other processes may write to it"),
        (&[&image, "--queues", "2"], &[], "the device has 2 queues"),
        (&[&image, "--fault", "none"], &[], "fault"),
        (&["ram:1M"], &[], "only an image file can become a backing file"),
        (&[&image], &["--to", &elsewhere], "--backing-chain allow"),
        (&[&image], &["--to", &path("n/o")], "No such file"),
        (&[&image], &["--to", &new, "n"], "--to takes one device"),
        (&[&image], &["a"], "add --to FILE"),
    ] {
        place.done(&[&["attach"], words, &["--name", "n"]].concat());
        let to = if why == "already exists" { &image } else { &new };
        let more = if more.is_empty() { &["--to", to][..] } else { more };
        let line = place.refused(&[&["snapshot", "n"], more].concat());
        assert!(line.contains(why), "{line}");
        assert!(!fs::exists(&new).unwrap() && !fs::exists(&elsewhere).unwrap(), "{words:?}");
        place.done(&["detach", "n"]);
    }
    let line = place.refused(&["snapshot", "n", "--to", &new]);
    assert!(line.contains("no such device"), "{line}");
    place.done(&["attach", &image, "--name", "n"]);
    let line = place.refused(&["snapshot", &format!("n={new}"), &format!("{image}={new}.2")]);
    assert!(line.contains("given twice"), "{line}");
    // A client that sends no file.
    let reply = place.ask("n", b"{\"command\":\"snapshot\",\"options\":{\"version\":1,\"options\":{}}}\n");
    assert!(reply.contains("error"), "{reply}");
    // Moved: the new image would name another file.
    fs::rename(&image, path("moved")).unwrap();
    for _ in 0..2 {
        let line = place.refused(&["snapshot", "n", "--to", &new]);
        assert!(line.contains(&format!("was moved to {}", path("moved"))), "{line}");
        fs::copy(path("moved"), &image).unwrap();
    }
    fs::rename(path("moved"), &image).unwrap();
    place.done(&["snapshot", "n", "--to", &elsewhere, "--backing-chain", "allow"]);
    place.done(&["detach", "n"]);
    place.done(&["attach", &elsewhere, "--format", "qcow2", "--backing-chain", "allow", "--name", "n"]);
}

#[test]
fn a_read_only_qcow2_device_has_no_snapshot() {
    let place = Place::new("snapshot-read-only");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (image, new) = (path("a.qcow2"), path("new"));
    run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "1M"]);
    place.done(&["attach", &image, "--format", "qcow2", "--name", "d"]);
    place.done(&["set", "d", "read-only=on"]);
    let line = place.refused(&["snapshot", "d", "--to", &new]);
    assert!(line.contains("read-only") && !fs::exists(&new).unwrap(), "{line}");
    place.done(&["set", "d", "read-only=off"]);
    place.done(&["snapshot", "d", "--to", &new]);
}

#[test]
fn a_configuration_names_the_new_image_before_the_device_has_it() {
    let place = Place::new("snapshot-configured");
    let path = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    let (image, new) = (place.image("a.img", 1 << 20), path("new"));
    fs::create_dir(path("c")).unwrap();
    let configure = |text: String| fs::write(path("c/d.toml"), text).unwrap();
    let run = |words: &[&str]| place.command(words).env("BLKQ_CONFIG_DIR", path("c")).output().unwrap();
    configure(format!("image = {image:?}\n"));
    assert!(run(&["attach", "--config", &path("c/d.toml")]).status.success());
    let refused = run(&["snapshot", "d", "--to", &new]);
    let line = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{line}");
    assert!(line.contains(&format!("c/d.toml names {image}")), "{line}");
    assert!(line.contains(&format!("image = {new:?}")), "{line}");
    assert!(!fs::exists(&new).unwrap());
    // With a mistake the file protects the image as well: the service reads it once that is corrected.
    for (mistake, why) in [
        ("imag = 1\n", "d.toml:2: unknown key"),
        ("format = \"auto\"\n", "d.toml:2: format"),
        ("format = [\n", "d.toml:"),
    ] {
        configure(format!("image = {image:?}\n{mistake}"));
        let refused = run(&["snapshot", "d", "--to", &new]);
        let line = String::from_utf8(refused.stderr).unwrap();
        assert_eq!((refused.status.code(), line.contains(why)), (Some(1), true), "{line}");
        assert!(!fs::exists(&new).unwrap());
    }
    configure(format!("image = {new:?}\nformat = \"qcow2\"\n"));
    assert!(run(&["snapshot", "d", "--to", &new]).status.success());
    place.done(&["detach", "d"]);
    assert!(run(&["attach", "--config", &path("c/d.toml")]).status.success());
}

#[test]
fn a_snapshot_without_a_journal_warns() {
    let place = Place::new("snapshot-journal");
    let (base, new) = (place.image("base.img", 1 << 20), place.dir.join("new"));
    place.done(&["attach", &base, "--name", "d"]);
    // No place is left for a journal.
    fs::remove_dir(place.state().join("journals")).unwrap();
    let output = place.run(&["snapshot", "d", "--to", new.to_str().unwrap()]);
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{line}");
    assert!(line.contains("d: warning: ") && line.contains("killed"), "{line}");
    let shown = place.json(&["show", "d", "--json"])["warnings"][0].as_str().unwrap().to_owned();
    assert!(line.contains(&shown), "{line}");
    assert!(fs::read_to_string(place.state().join("d.log")).unwrap().contains(&format!("warning: {shown}")));
}

//! Block commits of devices in use: the backing file receives all data, and clients see no error.

use blkq::testing::wait_until;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::place;
use crate::place::client::*;
use crate::place::*;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, prlimit};

fn path(place: &Place, name: &str) -> String {
    place.dir.join(name).to_str().unwrap().to_owned()
}

/// The guest-visible bytes of a qcow2 image, as QEMU reads them.
fn content(place: &Place, image: &str) -> Vec<u8> {
    let raw = path(place, "content");
    let check = Command::new("qemu-img").args(["check", "-f", "qcow2", image]).output().unwrap();
    // Exit code 3: the image has leaked clusters, as after a kill.
    assert!(matches!(check.status.code(), Some(0 | 3)), "{check:?}");
    run("qemu-img", &["convert", "-U", "-f", "qcow2", "-O", "raw", image, &raw]);
    fs::read(raw).unwrap()
}

// Contract: data
#[test]
fn a_client_continues_in_the_backing_file_after_a_commit() {
    let place = Place::new("commit");
    let (base, mid, top) = (place.image("base.img", 8 << 20), path(&place, "mid"), path(&place, "top"));
    for sandbox in [true, false] {
        fs::write(&base, vec![0; 8 << 20]).unwrap();
        let attach = ["attach", &base, "--name", "d", "--no-sandbox"];
        let uri = place.done(&attach[..if sandbox { 4 } else { 5 }]);
        let mut client = Client::new(&uri, "d");
        client.write(1, 1);
        client.write(2, 1);
        place.done(&["snapshot", "d", "--to", &mid]);
        client.write(2, 2);
        place.done(&["snapshot", "d", "--to", &top]);
        client.write(3, 3);
        client.write(300, 4);
        // Each commit merges one overlay of the chain.
        for (image, emptied, format) in [(&mid, &top, "qcow2"), (&base, &mid, "loop")] {
            assert_eq!(place.done(&["commit", "d"]), format!("{image}\n"));
            assert_eq!(kept_image(&place, "d"), *image);
            let shown = place.json(&["show", "d", "--json"]);
            assert_eq!((&shown["image"], &shown["driver"]), (&image.as_str().into(), &format.into()));
            assert_eq!([1, 2, 3, 300, 4].map(|block| client.read(block)), [1, 2, 3, 4, 0]);
            let byte = client.read(5);
            client.write(5, byte + 1);
            client.flush();
            assert!(fs::metadata(emptied).unwrap().blocks() * 512 < 1 << 20, "its space is freed");
        }
        let line = place.refused(&["commit", "d"]);
        assert!(line.contains("has no backing file"), "{line}");
        let options = &place.json(&["show", "d", "--json"])["attach_options"]["options"];
        assert_eq!((&options["image"], &options["format"]), (&base.as_str().into(), &"raw".into()));
        drop(client);
        place.done(&["detach", "d"]);
        let expected = fs::read(&base).unwrap();
        assert_eq!([1, 2, 3, 300, 5].map(|block| expected[block * BLOCK]), [1, 2, 3, 4, 2]);
        // Overlays of the base show the same data, also data that is written later.
        run("qemu-img", &["check", "-q", "-f", "qcow2", &top]);
        assert!(content(&place, &top) == expected && content(&place, &mid) == expected);
        [mid.as_str(), &top].iter().for_each(|image| fs::remove_file(image).unwrap());
    }
}

// Contract: live-changes
#[test]
fn writes_continue_during_snapshots_and_commits() {
    let place = Place::new("commit-load");
    let (base, top) = (place.image("base.img", 16 << 20), path(&place, "top"));
    let uri = place.done(&["attach", &base, "--name", "d"]);
    let writer = RandomWriter::start(&uri, "d", (16 << 20) / BLOCK as u64);
    for _ in 0..5 {
        place.done(&["snapshot", "d", "--to", &top]);
        writer.wait(200);
        place.done(&["commit", "d"]);
        fs::remove_file(&top).unwrap();
    }
    writer.wait(200);
    let expected = writer.finish();
    // Only flushed data must survive a killed daemon.
    kill_and_wait(place.pid("d"), &[&base]);
    assert_blocks(&fs::read(base).unwrap(), &expected);
}

/// An overlay of `base` with `mib` MiB of compressed clusters, so that its commit takes long.
fn compressed(place: &Place, base: &str, name: &str, mib: usize) -> String {
    let (raw, image) = (path(place, "data"), path(place, name));
    let data: Vec<u8> = (0..mib << 20).map(|at| (at / BLOCK * 7) as u8 | 1).collect();
    fs::write(&raw, data).unwrap();
    let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-B", base, "-F", "raw", &raw, &image];
    run("qemu-img", &convert);
    image
}

fn commit(place: &Place) -> Child {
    place.command(&["commit", "d"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn is_under_way(place: &Place) -> bool {
    place.json(&["show", "d", "--json"])["commit"]["copied_bytes"].as_u64() > Some(0)
}

#[test]
fn a_commit_is_shown_and_stopped_and_keeps_others_away() {
    let place = Place::new("commit-stopped");
    let base = place.image("base.img", 96 << 20);
    let image = compressed(&place, &base, "top", 96);
    let uri = place.done(&["attach", &image, "--format", "qcow2", "--name", "d"]);
    let mut client = Client::new(&uri, "d");
    let before = client.read(20_000);
    for end in [Some(Signal::INT), Some(Signal::KILL), None] {
        let command = commit(&place);
        wait_until("the commit copies", || is_under_way(&place));
        let shown = place.json(&["show", "d", "--json"]);
        let by = format!("process {}", command.id());
        assert_eq!((&shown["commit"]["by"], &shown["commit"]["into"]), (&by.into(), &base.as_str().into()));
        let by = format!("by process {}", command.id());
        for refused in [
            &["commit", "d"][..],
            &["resize", "d", "1G"],
            &["set", "d", "read-only=on"],
            &["snapshot", "d", "--to", &path(&place, "other")],
        ] {
            let line = place.refused(refused);
            assert!(line.contains(&by), "{line}");
        }
        client.write(3, 7);
        if let Some(end) = end {
            signal(command.id().try_into().unwrap(), end);
            let output = command.wait_with_output().unwrap();
            if end == Signal::INT {
                let line = String::from_utf8(output.stderr).unwrap();
                assert_eq!(output.status.code(), Some(1), "{line}");
                assert!(line.contains(&format!("cancelled {by}")), "{line}");
            }
            wait_until("the commit has stopped", || place.json(&["show", "d", "--json"])["commit"].is_null());
            assert_eq!(kept_image(&place, "d"), image);
            client.flush();
            assert_eq!((client.read(3), client.read(20_000)), (7, before));
            // Other processes can read the backing file again.
            place.done(&["attach", &base, "--read-only", "--name", "r"]);
            place.done(&["detach", "r"]);
        } else {
            let line = place.refused(&["attach", &base, "--read-only", "--name", "r"]);
            assert!(line.contains("in use"), "{line}");
            let output = command.wait_with_output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{base}\n"));
        }
    }
    assert_eq!((client.read(3), client.read(20_000)), (7, before));
}

// Contract: durability
#[test]
fn a_daemon_killed_in_a_commit_keeps_what_was_flushed() {
    let place = Place::new("commit-killed");
    let base = place.image("base.img", 32 << 20);
    let image = compressed(&place, &base, "top", 32);
    let mut expected = fs::read(path(&place, "data")).unwrap();
    let mut served = image.clone();
    for number in 1..8u64 {
        let format = if served == image { "qcow2" } else { "raw" };
        let uri = place.done(&["attach", &served, "--format", format, "--name", "d"]);
        let mut client = Client::new(&uri, "d");
        for block in [number, 100 * number, 8_191] {
            client.write(block, number as u8);
            expected[block as usize * BLOCK..][..BLOCK].fill(number as u8);
        }
        client.flush();
        let pid = place.pid("d");
        if served == image {
            let mut command = commit(&place);
            std::thread::sleep(Duration::from_millis(number * 60 - 50));
            kill_and_wait(pid, &[&base, &image]);
            command.wait().unwrap();
            served = kept_image(&place, "d");
        } else {
            kill_and_wait(pid, &[&base]);
        }
        assert!(content(&place, &image) == expected, "{number}: the attached image lacks data");
        assert!(
            served == image || fs::read(&base).unwrap() == expected,
            "{number}: the backing file lacks data"
        );
    }
}

#[test]
fn a_commit_that_cannot_be_changes_nothing() {
    let place = Place::new("commit-refused");
    let base = place.image("base.img", 1 << 20);
    let (top, other) = (path(&place, "top"), path(&place, "other"));
    let refused = |why: &str| {
        let line = place.refused(&["commit", "d"]);
        assert!(line.contains(why), "{line}");
    };
    refused("no such device");
    place.done(&["attach", "ram:1M", "--name", "d"]);
    refused("no backing file");
    place.done(&["detach", "d"]);
    place.done(&["attach", &base, "--fault", "none", "--name", "d"]);
    refused("attach without --fault");
    place.done(&["detach", "d"]);
    place.done(&["attach", &base, "--overlay", &top, "--name", "d"]);
    let image = ["attach", &base, "--overlay", &other, "--name", "e"];
    place.done(&image);
    refused("is in use");
    place.done(&["detach", "e"]);
    place.done(&["set", "d", "read-only=on"]);
    refused("read-only");
    place.done(&["set", "d", "read-only=off"]);
    // The client sends no file descriptors.
    let mut stream = UnixStream::connect(place.state().join("d.control")).unwrap();
    let mut reply = [0; 512];
    stream.write_all(b"{\"command\":\"commit\",\"image\":7}\n").unwrap();
    let length = stream.read(&mut reply).unwrap();
    assert!(reply[..length].starts_with(b"{\"ok\":"));
    stream.write_all(b"\n").unwrap();
    let length = stream.read(&mut reply).unwrap();
    let text = String::from_utf8_lossy(&reply[..length]);
    assert!(text.contains("did not send the backing file"), "{text}");
    place.done(&["detach", "d"]);
    // A longer backing file would expose its data beyond the end of the overlay.
    fs::File::options().write(true).open(&base).unwrap().set_len(2 << 20).unwrap();
    place.done(&["attach", &top, "--format", "qcow2", "--name", "d"]);
    refused("blkq resize");
    place.done(&["resize", "d", "2M"]);
    place.done(&["resize", "d", "3M"]);
    assert_eq!(place.done(&["commit", "d"]), format!("{base}\n"));
    assert_eq!(
        fs::metadata(&base).unwrap().len(),
        3 << 20,
        "the backing file must have the size of the device"
    );
    place.done(&["detach", "d"]);
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &other]);
    run("qemu-img", &["snapshot", "-c", "s", &other]);
    place.done(&["attach", &other, "--format", "qcow2", "--name", "d"]);
    refused("internal snapshots");
}

/// Lowers the limit of descriptors until the descriptor of the backing file cannot be duplicated.
// Contract: exclusive
#[test]
fn a_commit_without_descriptors_keeps_the_backing_file_locked() {
    let place = Place::new("commit-descriptors");
    let base = place.image("base.img", 1 << 20);
    place.done(&["attach", &base, "--overlay", &path(&place, "top"), "--name", "d"]);
    let pid = rustix::process::Pid::from_raw(place.pid("d"));
    let number = |entry: fs::DirEntry| entry.file_name().to_str().unwrap().parse::<u64>().unwrap();
    let image = fs::File::options().read(true).write(true).open(&base).unwrap();
    for more in (0..32).rev() {
        let open = fs::read_dir(format!("/proc/{}/fd", place.pid("d"))).unwrap();
        let next = open.map(|entry| number(entry.unwrap())).max().unwrap() + 1;
        let few = Rlimit { current: Some(next + more), ..getrlimit(Resource::Nofile) };
        let limit = prlimit(pid, Resource::Nofile, few).unwrap();
        let committed = place.run(&["commit", "d"]);
        prlimit(pid, Resource::Nofile, limit).unwrap();
        if committed.status.success() {
            place.done(&["snapshot", "d", "--to", &path(&place, &format!("top{more}"))]);
            continue;
        }
        assert!(!is_free(&image), "another process can write to the backing file");
        if without_progress(committed.stderr).contains("cannot duplicate") {
            return;
        }
    }
    panic!("there were enough descriptors");
}

#[test]
fn a_configuration_with_the_emptied_image_is_reported() {
    let place = Place::new("commit-configured");
    let (base, top) = (place.image("base.img", 1 << 20), path(&place, "top"));
    fs::create_dir(path(&place, "c")).unwrap();
    let config = path(&place, "c/d.toml");
    let run =
        |words: &[&str]| place.command(words).env("BLKQ_CONFIG_DIR", path(&place, "c")).output().unwrap();
    place.done(&["attach", &base, "--overlay", &top, "--name", "d"]);
    place.done(&["detach", "d"]);
    fs::write(&config, format!("image = {top:?}\nformat = \"qcow2\"\n")).unwrap();
    assert!(run(&["attach", "--config", &config]).status.success());
    let done = run(&["commit", "d", "--json"]);
    let line = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.success() && line.contains(&format!("change it to image = {base:?}")), "{line}");
    let done: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    let images = (&done["image"], &done["emptied"]);
    assert_eq!(images, (&base.as_str().into(), &top.as_str().into()), "{done}");
    place.done(&["detach", "d"]);
    // The emptied overlay shows the data of its backing file.
    assert!(run(&["attach", "--config", &config]).status.success());
    // A configuration file with a mistake does not show which image it names.
    fs::write(&config, format!("image = {top:?}\nformat = \"auto\"\n")).unwrap();
    let done = run(&["commit", "d"]);
    let line = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.success() && line.contains("has a mistake; if it names"), "{line}");
}

/// Receives one byte and the file descriptors that come with it.
fn receive_files(stream: &UnixStream) -> Vec<fs::File> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(stream, &mut [IoSliceMut::new(&mut [0])], &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let files = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files.map(fs::File::from).collect()),
        _ => None,
    });
    files.unwrap_or_default()
}

fn send_file(stream: &UnixStream, bytes: &[u8], file: &fs::File) {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let (mut control, files) = (SendAncillaryBuffer::new(&mut space), [file.as_fd()]);
    control.push(SendAncillaryMessage::ScmRights(&files));
    sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
}

/// A daemon that names `victim` as the backing file to open, and answers `show` with `shown`. Returns the files that
/// each command sends to it.
fn liar(socket: &Path, victim: String, shown: String) -> Receiver<Vec<fs::File>> {
    let listener = UnixListener::bind(socket).unwrap();
    let (sender, brought) = channel();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map(Result::unwrap) {
            let (sender, victim) = (sender.clone(), fs::File::open(&victim).unwrap());
            let shown = shown.clone();
            std::thread::spawn(move || {
                let mut request = String::new();
                BufReader::new(&stream).read_line(&mut request).unwrap();
                match request.trim() {
                    commit if commit.starts_with(r#"{"command":"commit","image":"#) => {
                        send_file(&stream, b"{\"ok\":null}\n", &victim);
                        sender.send(receive_files(&stream)).unwrap();
                    }
                    r#"{"command":"bitmap-file"}"# => {
                        stream.write_all(b"{\"ok\":null}\n").unwrap();
                        sender.send(receive_files(&stream)).unwrap();
                        stream.write_all(b"{\"ok\":null}\n").unwrap();
                    }
                    r#"{"command":"show"}"# => stream.write_all(shown.as_bytes()).unwrap(),
                    r#"{"command":"bitmaps"}"# => stream.write_all(b"{\"ok\":[]}\n").unwrap(),
                    _ => stream.write_all(b"{\"ok\":null}\n").unwrap(),
                }
            });
        }
    });
    brought
}

#[test]
fn a_daemon_that_lies_gets_no_other_file_opened() {
    let place = Place::new("commit-liar");
    fs::create_dir(path(&place, "dir")).unwrap();
    let (base, top) = (place.image("dir/base", 1 << 20), path(&place, "dir/top"));
    let victim = place.image("victim", 1 << 20);
    place.done(&["attach", &base, "--overlay", &top, "--name", "d"]);
    let kept = place::client::keep_state(&place, "d");
    place.done(&["detach", "d"]);
    kept.restore();
    fs::write(place.state().join("d.lock"), "").unwrap();
    let brought = liar(&place.state().join("d.control"), victim.clone(), String::new());
    let inodes = |words: &[&str]| {
        let output = place.run(words);
        let files = brought.recv().unwrap();
        let inodes = files.iter().map(|file| file.metadata().unwrap().ino());
        (inodes.collect::<Vec<_>>(), String::from_utf8(output.stderr).unwrap())
    };
    let inode = |file: &str| fs::metadata(file).unwrap().ino();
    assert_eq!(
        inodes(&["commit", "d"]).0,
        [inode(&base); 2],
        "the command must open the backing file that the header names"
    );
    // The daemon can write its image, and makes the header name another file.
    run("qemu-img", &["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", &victim, &top]);
    let (none, why) = inodes(&["commit", "d"]);
    assert!(none.is_empty() && why.contains("not in its directory") && why.contains("allow"), "{why}");
    let (none, why) = inodes(&["commit", "d", "--backing-chain", "allow"]);
    assert!(none.is_empty() && why.contains("does not match the backing file"), "{why}");
    let sibling = place.image("dir/sibling", 1 << 20);
    run("qemu-img", &["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", &sibling, &top]);
    let (none, why) = inodes(&["commit", "d"]);
    assert!(none.is_empty() && why.contains("does not match the backing file"), "{why}");
    // An older version did not record the backing file. Then it must at least not be in use.
    let mut options = place::client::state(&place, "d.options");
    options.as_object_mut().unwrap().remove("has_backing").unwrap();
    fs::write(place.state().join("d.options"), options.to_string()).unwrap();
    place.done(&["attach", &sibling, "--name", "sibling"]);
    let (none, why) = inodes(&["commit", "d"]);
    assert!(none.is_empty() && why.contains("is in use: "), "{why}");
    assert!(
        why.contains("locked") && why.contains("; detach the device or stop the program that uses it"),
        "{why}"
    );
    place.done(&["detach", "sibling"]);
    assert_eq!(inodes(&["commit", "d"]).0, [inode(&sibling); 2]);
    run("qemu-img", &["rebase", "-u", "-f", "qcow2", "-b", "", &top]);
    let (none, why) = inodes(&["commit", "d"]);
    assert!(none.is_empty() && why.contains("has no backing file"), "{why}");
    // There is no device to detach.
    fs::remove_dir_all(place.state()).unwrap();
}

#[test]
fn a_daemon_that_lies_gets_no_bitmap_file_of_another_image() {
    let place = Place::new("bitmap-liar");
    let (image, victim) = (place.image("image", 1 << 20), place.image("victim", 1 << 20));
    place.done(&["attach", &image, "--name", "d"]);
    let shown = place.ask("d", b"{\"command\":\"show\"}\n").replace(&image, &victim);
    let kept = place::client::keep_state(&place, "d");
    place.done(&["detach", "d"]);
    kept.restore();
    fs::write(place.state().join("d.lock"), "").unwrap();
    let brought = liar(&place.state().join("d.control"), victim.clone(), shown);
    place.done(&["bitmap", "add", "d", "b"]);
    assert!(!fs::exists(format!("{victim}.bitmaps")).unwrap(), "the daemon chose which file is created");
    let own = format!("{image}.bitmaps");
    let inodes: Vec<u64> =
        brought.recv().unwrap().iter().map(|file| file.metadata().unwrap().ino()).collect();
    assert_eq!(inodes, [fs::metadata(&own).unwrap().ino()]);
    // A file with other content is not handed over.
    fs::write(&own, "an image").unwrap();
    let line = place.refused(&["bitmap", "add", "d", "b"]);
    assert!(line.contains("is not a bitmap file") && brought.try_recv().is_err(), "{line}");
    // There is no device to detach.
    fs::remove_dir_all(place.state()).unwrap();
}

#[test]
fn a_daemon_that_lies_does_not_choose_what_a_snapshot_keeps() {
    let place = Place::new("snapshot-liar");
    let (image, victim) = (place.dir.join(OsStr::from_bytes(b"i\xe9")), place.image("victim", 1 << 20));
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    assert!(place.command(&["attach", "--name", "d"]).arg(&image).status().unwrap().success());
    let shown = place.ask("d", b"{\"command\":\"show\"}\n");
    let mut shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    shown["ok"]["attach_options"]["options"]["image"] = victim.as_str().into();
    let kept = place::client::keep_state(&place, "d");
    place.done(&["detach", "d"]);
    kept.restore();
    fs::write(place.state().join("d.lock"), "").unwrap();
    let _brought = liar(&place.state().join("d.control"), victim, format!("{shown}\n"));
    // The command gets as far as asking the daemon, so it has checked the image that the state file names.
    let line = place.refused(&["snapshot", "d", "--to", &path(&place, "top")]);
    assert!(line.contains("sent no answer"), "{line}");
    // There is no device to detach.
    fs::remove_dir_all(place.state()).unwrap();
}

#[test]
fn a_daemon_that_lies_changes_no_other_device() {
    let place = Place::new("name-liar");
    let (image, other) = (place.image("image", 1 << 20), place.image("other", 1 << 20));
    place.done(&["attach", &other, "--name", "other"]);
    place.done(&["attach", &image, "--name", "d"]);
    let shown = place.ask("d", b"{\"command\":\"show\"}\n");
    let shown = shown.replace("\"name\":\"d\"", "\"name\":\"other\"");
    let kept = place::client::keep_state(&place, "d");
    place.done(&["detach", "d"]);
    kept.restore();
    fs::write(place.state().join("d.lock"), "").unwrap();
    let _brought = liar(&place.state().join("d.control"), image, shown);
    place.done(&["losetup", "--direct-io=off", "d"]);
    let log = fs::read_to_string(place.state().join("other.log")).unwrap();
    assert!(!log.contains("set direct-io"), "{log}");
    place.done(&["detach", "other"]);
    // There is no other device to detach.
    fs::remove_dir_all(place.state()).unwrap();
}

#[test]
fn a_daemon_commits_only_into_its_backing_file() {
    let place = Place::new("commit-changed");
    let (base, top) = (place.image("base", 1 << 20), path(&place, "top"));
    let moved = place.image("moved", 1 << 20);
    place.done(&["attach", &base, "--overlay", &top, "--name", "d"]);
    fs::rename(&base, path(&place, "elsewhere")).unwrap();
    fs::rename(&moved, &base).unwrap();
    let line = place.refused(&["commit", "d"]);
    assert!(line.contains("does not match the backing file of the device; move that file back"), "{line}");
    assert_eq!(kept_image(&place, "d"), top);
    fs::rename(path(&place, "elsewhere"), &base).unwrap();
    assert_eq!(place.done(&["commit", "d"]), format!("{base}\n"));
}

#[test]
fn a_commit_into_a_linked_image_keeps_its_backing_file() {
    let place = Place::new("commit-linked");
    let [base, other, middle, link, top] =
        ["base", "d/base", "d/middle", "link", "top"].map(|name| path(&place, name));
    fs::create_dir(path(&place, "d")).unwrap();
    fs::write(&base, vec![1; 1 << 20]).unwrap();
    fs::write(&other, vec![2; 1 << 20]).unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-F"];
    run("qemu-img", &[&create[..], &["raw", "-b", "base", &middle]].concat());
    std::os::unix::fs::symlink("d/middle", &link).unwrap();
    run("qemu-img", &[&create[..], &["qcow2", "-b", "link", &top]].concat());
    let uri = place.done(&["attach", &top, "--format", "qcow2", "--name", "d"]);
    let mut client = Client::new(&uri, "d");
    client.write(1, 3);
    assert_eq!(place.done(&["commit", "d"]), format!("{link}\n"));
    assert_eq!((client.read(100), client.read(1)), (1, 3));
    client.flush();
    kill_and_wait(place.pid("d"), &[&middle]);
    let mut client = Client::new(&place.done(&["recover", "d"]), "d");
    assert_eq!((client.read(100), client.read(1)), (1, 3), "the next daemon has another backing file");
}

#[test]
fn a_commit_into_version_2_warns_of_the_missing_journal() {
    let place = Place::new("commit-version-2");
    let (base, top) = (path(&place, "base"), path(&place, "top"));
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "compat=0.10", &base, "1M"]);
    place.done(&["attach", &base, "--overlay", &top, "--format", "qcow2", "--name", "d"]);
    let output = place.run(&["commit", "d"]);
    let (line, image) =
        (String::from_utf8(output.stderr).unwrap(), String::from_utf8(output.stdout).unwrap());
    assert_eq!((output.status.code(), image), (Some(0), format!("{base}\n")), "{line}");
    assert!(
        line.contains("d: warning: ")
            && line.contains("of version 2; to convert the image, run `qemu-img amend"),
        "{line}"
    );
}

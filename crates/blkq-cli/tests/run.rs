//! `blkq attach --run`, `--exit-with-parent`, `--pid-file` and `--export-name`.

use blkq::testing::wait_until;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::place::*;
use rustix::process::Signal;

/// Runs `script` with a device until it has printed a line.
fn start(place: &Place, script: &str) -> (Child, BufReader<ChildStdout>) {
    let mut command = place.command(&["attach", "ram:1M", "--run", script]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    (child, output)
}

/// Returns the exit code, the rest of standard output, and standard error.
fn finish(mut child: Child, mut output: BufReader<ChildStdout>) -> (Option<i32>, String, String) {
    drop(child.stdin.take());
    let (mut printed, mut errors) = (String::new(), String::new());
    output.read_to_string(&mut printed).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    (child.wait().unwrap().code(), printed, errors)
}

#[test]
fn run_puts_the_device_in_the_environment_and_exits_alike() {
    let place = Place::new("run");
    let socket = place.state().join("ram.nbd").display().to_string();
    let script =
        r#"test -S "$unixsocket" && echo "$uri|$unixsocket|$nbd|$name|${port-none}|${device-none}|$tls""#;
    let mut command = place.command(&["attach", "ram:1M", "--run", script]);
    let output = command.env("port", "of another").env("device", "of another").output().unwrap();
    let expected = format!("nbd+unix:///?socket={socket}|{socket}|nbd:unix:{socket}|ram|none|none|0\n");
    assert_eq!((output.status.code(), String::from_utf8(output.stdout).unwrap()), (Some(0), expected));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    assert!(place.files().is_empty());

    // Without --export the device is exported over NBD, and $uri is set.
    let mut plain = Command::new(env!("CARGO_BIN_EXE_blkq"));
    plain.args(["attach", "ram:1M", "--run", "echo $uri"]).env("BLKQ_STATE_DIR", place.state());
    assert!(String::from_utf8(plain.output().unwrap().stdout).unwrap().starts_with("nbd+unix:///"));

    let tcp = ["--listen", "tcp:127.0.0.1:0", "--insecure", "--export-name", "a disk"];
    let script = r#"echo "$uri|$port|$nbd|$exportname""#;
    let printed = place.done(&[&["attach", "ram:1M", "--run", script], &tcp[..]].concat());
    let port = printed.split('|').nth(1).unwrap();
    let expected =
        format!("nbd://127.0.0.1:{port}/a%20disk|{port}|nbd:127.0.0.1:{port}:exportname=a disk|a disk\n");
    assert_eq!(printed, expected);

    for (script, code) in [("exit 7", 7), ("true", 0), ("kill -9 $$", 137), ("no-such-command-at-all", 127)] {
        assert_eq!(place.run(&["attach", "ram:1M", "--run", script]).status.code(), Some(code), "{script}");
        assert!(place.files().is_empty());
    }
    for words in [&["--foreground"][..], &["--json"], &["--nooverlap"], &["--exit-with-parent"]] {
        let words = [&["attach", "ram:1M", "--run", "true"], words].concat();
        assert_eq!(place.run(&words).status.code(), Some(2), "{words:?}");
    }
    // A device that cannot be attached runs nothing.
    assert!(!place.refused(&["attach", "/nonexistent", "--run", "echo ran"]).contains("ran "));
}

#[test]
fn a_command_begins_with_the_signals_and_descriptors_of_a_shell() {
    let place = Place::new("run-clean");
    let script =
        r"grep -E '^Sig(Blk|Ign)' /proc/self/status; for fd in /proc/$$/fd/*; do echo ${fd##*/}; done";
    let of_a_shell = Command::new("/bin/sh").args(["-c", script]).stdin(Stdio::null()).output().unwrap();
    let printed = place.done(&["attach", "ram:1M", "--run", script]);
    assert!(printed.contains("SigBlk:\t0000000000000000\n"), "{printed}");
    assert_eq!(printed, String::from_utf8(of_a_shell.stdout).unwrap());
}

#[test]
fn a_signal_is_passed_on_and_the_device_detached_afterwards() {
    let place = Place::new("run-signal");
    for (stop, name) in
        [(Signal::TERM, "TERM"), (Signal::INT, "INT"), (Signal::HUP, "HUP"), (Signal::QUIT, "QUIT")]
    {
        let script =
            format!("trap 'echo got {name}; exit 3' {name}; echo ready; while :; do sleep 0.05; done");
        let (child, output) = start(&place, &script);
        signal(child.id().try_into().unwrap(), stop);
        assert_eq!(finish(child, output), (Some(3), format!("got {name}\n"), String::new()));
        assert!(place.files().is_empty());
    }
    // A signal that the command does not catch kills it.
    let (child, output) = start(&place, "echo ready; exec sleep 60");
    signal(child.id().try_into().unwrap(), Signal::TERM);
    assert_eq!(finish(child, output).0, Some(128 + 15));
    assert!(place.files().is_empty());
}

#[test]
fn a_device_detached_before_the_command_exits_is_reported() {
    let place = Place::new("run-died");
    for (code, expected) in [(0, 1), (5, 5)] {
        let (child, output) = start(&place, &format!("echo ready; read line; exit {code}"));
        kill(place.pid("ram"));
        let (exited, _, errors) = finish(child, output);
        assert_eq!(exited, Some(expected), "{errors}");
        assert!(errors.starts_with("blkq: ram: the daemon was killed or failed (signal: 9"), "{errors}");
        assert!(!place.files().iter().any(|file| file.ends_with(".control")), "{:?}", place.files());
    }
    // A detach on purpose, while the command runs, is reported too.
    let (child, output) = start(&place, "echo ready; read line");
    place.done(&["detach", "ram"]);
    // A new device with this name is not the device of --run.
    place.done(&["attach", "ram:2M", "--name", "ram"]);
    let (exited, _, errors) = finish(child, output);
    assert!(errors.contains("ram: the device was detached before"), "{errors}");
    assert_eq!(exited, Some(1), "read found the end of its input");
    place.done(&["show", "ram"]);
}

#[test]
fn a_device_of_the_same_name_is_left_alone_after_a_death() {
    let place = Place::new("run-again");
    let (child, output) = start(&place, "echo ready; read line; true");
    kill(place.pid("ram"));
    place.done(&["attach", "ram:2M", "--name", "ram"]);
    let (code, _, errors) = finish(child, output);
    assert!(errors.contains("the daemon was killed or failed"), "{errors}");
    assert_eq!(code, Some(1));
    assert_eq!(place.json(&["show", "ram", "--json"])["size"], 2 << 20);
}

#[test]
fn clients_that_outlive_the_command_are_disconnected() {
    let place = Place::new("run-client");
    let (child, output) = start(&place, "echo ready; read line; true");
    let uri = format!("nbd+unix:///?socket={}", place.state().join("ram.nbd").display());
    let mut connected = client(&uri);
    wait_until("the client is counted", || {
        place.json(&["show", "ram", "--json"])["clients"].as_array().unwrap().len() == 1
    });
    let (code, _, errors) = finish(child, output);
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("1 client is connected") && errors.lines().count() == 1, "{errors}");
    assert_eq!(connected.read(&mut [0]).unwrap_or(0), 0);
    assert!(place.files().is_empty());
}

#[test]
fn a_killed_command_line_leaves_no_device() {
    let place = Place::new("run-killed");
    let (mut child, _output) = start(&place, "echo ready; exec sleep 60");
    let pid = place.pid("ram");
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the daemon exits", || has_exited(pid) && place.files().is_empty());
}

fn shell(place: &Place, script: &str) -> Command {
    let mut shell = Command::new("setsid");
    shell.args(["--wait", "sh", "-c", script, env!("CARGO_BIN_EXE_blkq")]);
    shell.env("BLKQ_STATE_DIR", place.state()).stdin(Stdio::piped()).stdout(Stdio::piped());
    shell
}

#[test]
fn a_device_exits_with_the_process_that_started_it() {
    let place = Place::new("parent");
    let script = "\"$0\" attach ram:1M --export nbd --exit-with-parent & echo $$; read line";
    let mut child = shell(&place, script).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let parent: i32 = lines.next().unwrap().unwrap().parse().unwrap();
    assert!(lines.next().unwrap().unwrap().starts_with("nbd+unix:///"));
    let pid = place.pid("ram");
    signal(parent, Signal::KILL);
    wait_until("the device is detached", || has_exited(pid) && place.files().is_empty());
    drop(child.stdin.take());
    child.wait().unwrap();
}

/// The parent exits before blkq begins, while it attaches, or later.
#[test]
fn a_parent_that_exits_early_leaves_no_device() {
    let place = Place::new("orphan");
    for round in 0..30 {
        let pause = f64::from(round) * 0.001;
        let script = format!(
            "\"$0\" attach ram:1M --name d{round} --export nbd --exit-with-parent >/dev/null 2>&1 & echo $!; sleep {pause}"
        );
        let output = shell(&place, &script).output().unwrap();
        let pid: i32 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
        wait_until("the device is detached", || has_exited(pid));
    }
    assert!(place.files().is_empty());
}

/// The session leader is outside of the PID namespace, as when a process enters a container: getsid(2) returns 0.
#[test]
fn a_device_is_served_where_the_session_has_no_number() {
    let place = Place::new("session");
    let inside = |words: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]);
        command.args(words).env("BLKQ_STATE_DIR", place.state()).output().unwrap()
    };
    let able = inside(&["true"]);
    assert!(able.status.success(), "no user namespace: {}", String::from_utf8_lossy(&able.stderr));
    let blkq = env!("CARGO_BIN_EXE_blkq");
    let output = inside(&[blkq, "attach", "ram:1M", "--export", "nbd", "--run", "echo ran"]);
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    assert_eq!((output.status.code(), output.stdout), (Some(0), b"ran\n".to_vec()));
}

#[test]
fn a_pid_file_is_there_as_long_as_the_device() {
    let place = Place::new("pid-file");
    let file = place.dir.join("pid");
    let path = file.to_str().unwrap();
    let read = || fs::read_to_string(&file).unwrap().trim().parse::<i32>().unwrap();
    place.done(&["attach", "ram:1M", "--pid-file", path]);
    assert_eq!(read(), place.pid("ram"));
    signal(read(), Signal::TERM);
    wait_until("it is removed", || !file.exists());
    // A stale pid file is replaced, also in the foreground and with a path relative to the current directory.
    fs::write(&file, "1\n").unwrap();
    let mut front =
        place.command(&["attach", "ram:1M", "--foreground", "--pid-file", "pid", "--name", "front"]);
    let mut child = front.current_dir(&place.dir).stdout(Stdio::piped()).spawn().unwrap();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    assert_eq!(read(), i32::try_from(child.id()).unwrap());
    place.done(&["detach", "front"]);
    assert!(!file.exists());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    // The pid file of another device is refused, and so is a file that is not a pid file.
    let image = place.image("disk.img", 1 << 20);
    place.done(&["attach", "ram:1M", "--pid-file", path]);
    let line = place.refused(&["attach", &image, "--pid-file", path]);
    assert!(line.contains(&format!("--pid-file {path} belongs to another running device")), "{line}");
    assert_eq!(read(), place.pid("ram"));
    place.done(&["detach", "ram"]);
    let line = place.refused(&["attach", &image, "--pid-file", &image]);
    assert!(line.contains(&format!("--pid-file {image} is the image of the device")), "{line}");
    assert_eq!(fs::metadata(&image).unwrap().len(), 1 << 20);
    // The pid file of a killed daemon is replaced. If the path is a symbolic link, its target is the pid file, which
    // the confined daemon can remove.
    fs::create_dir(place.dir.join("run")).unwrap();
    std::os::unix::fs::symlink("run/pid", &file).unwrap();
    place.done(&["attach", "ram:1M", "--pid-file", path]);
    kill(read());
    place.done(&["attach", &image, "--pid-file", path]);
    assert_eq!(read(), place.pid("disk.img"));
    place.done(&["detach", "disk.img"]);
    assert!(!place.dir.join("run/pid").exists() && fs::read_link(&file).is_ok());
    place.run(&["detach", "--all"]);
    // A pid file that cannot be written fails, and nothing is left.
    let line = place.refused(&["attach", "ram:1M", "--pid-file", "/nonexistent/pid"]);
    assert!(line.contains("--pid-file /nonexistent/pid"), "{line}");
    assert!(place.files().is_empty());
}

#[test]
fn clients_choose_the_device_by_its_export_name() {
    let place = Place::new("export-name");
    let uri = place.done(&["attach", "ram:1M", "--export-name", "data/x y"]);
    assert!(uri.starts_with("nbd+unix:///data/x%20y?socket="), "{uri}");
    let plain = format!("nbd+unix:///?socket={}", place.state().join("ram.nbd").display());
    for name in ["data/x y", ""] {
        let mut client = session(&plain, name);
        request(&mut client, 0, 1, 0, 512);
        assert_eq!(reply(&mut client, 512), (0, 1), "{name:?}");
    }
    let mut stranger = client(&plain);
    stranger.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x03ram").unwrap();
    assert_eq!(stranger.read(&mut [0]).unwrap_or(0), 0, "no export of that name");
    drop(stranger);
    place.done(&["detach", "ram", "--force"]);
    let ublk = ["attach", "ram:1M", "--export", "ublk", "--export-name", "x"];
    assert!(place.refused(&ublk).contains("--export-name is for NBD"));
    assert_eq!(place.run(&["attach", "ram:1M", "--export-name", ""]).status.code(), Some(2));
}

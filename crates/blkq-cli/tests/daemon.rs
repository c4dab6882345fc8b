//! Daemons as processes: signals, the service manager, the control socket, descriptors and privileges.

use blkq::testing::wait_until;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::place::*;

// Contract: bounded-input
#[test]
fn a_low_limit_on_open_files_leaves_some_for_commands() {
    let place = Place::new("few");
    let limited = ["-c", "ulimit -n 160 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_blkq")];
    let attach = ["attach", "ram:1M", "--export", "nbd", "--max-connections", "1000"];
    let output =
        Command::new("sh").args(limited).args(attach).env("BLKQ_STATE_DIR", place.state()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let uri = String::from_utf8(output.stdout).unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("clients at a time"));
    // More clients than the daemon accepts.
    let address = uri.trim().strip_prefix("nbd+unix:///?socket=").unwrap();
    let crowd: Vec<UnixStream> = (0..180)
        .map(|_| {
            let mut stream = UnixStream::connect(address).unwrap();
            let _ = stream.read(&mut [0; 18]);
            stream
        })
        .collect();
    place.done(&["set", "ram", "depth=32"]);
    drop(crowd);
}

// Contract: detach
#[test]
fn signals_stop_a_daemon_in_order() {
    let place = Place::new("signals");
    for stop in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let uri = place.done(&["attach", "ram:1M"]);
        let mut connected = client(&uri);
        let pid = place.pid("ram");
        signal(pid, stop);
        wait_until("the daemon exits", || has_exited(pid));
        assert_eq!(connected.read(&mut [0]).unwrap_or(0), 0);
        assert!(place.files().is_empty());
    }
}

/// SIGTERM during a detach repeats the request to stop; it does not shorten the detach.
#[test]
fn a_signal_during_a_detach_loses_nothing() {
    let place = Place::new("both");
    let image = place.image("disk.img", 1 << 20);
    for _ in 0..5 {
        place.done(&["attach", &image, "--name", "d"]);
        let pid = place.pid("d");
        let mut detach = place.command(&["detach", "d"]).stderr(Stdio::null()).spawn().unwrap();
        signal(pid, rustix::process::Signal::TERM);
        detach.wait().unwrap();
        wait_until("the daemon exits", || has_exited(pid));
        assert!(place.files().is_empty());
    }
}

// Contract: detach
#[test]
fn a_command_during_a_detach_gets_an_answer() {
    let place = Place::new("answers");
    for _ in 0..5 {
        place.done(&["attach", "ram:1M", "--name", "d"]);
        let pid = place.pid("d");
        // All commands are sent before the daemon accepts the first, which stops it.
        signal(pid, rustix::process::Signal::STOP);
        let send = |command| {
            let mut stream = UnixStream::connect(place.state().join("d.control")).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            stream.write_all(format!("{command}\n").as_bytes()).unwrap();
            stream
        };
        let detach = r#"{"command":"detach","force":false}"#;
        let stat = r#"{"command":"stat"}"#;
        let set = r#"{"command":"set","settings":[["depth","9"]]}"#;
        let waiting = [detach, stat, set, stat, set, stat, stat].map(|command| (command, send(command)));
        signal(pid, rustix::process::Signal::CONT);
        for (command, mut stream) in waiting {
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.ends_with('\n'), "{command}: {answer:?}");
            // `blkq stat` ends without an error when the device is detached.
            assert!(command == set || answer.starts_with(r#"{"ok":"#), "{command}: {answer:?}");
        }
        wait_until("the daemon exits", || has_exited(pid));
    }
}

#[test]
fn commands_name_a_daemon_without_a_control_socket() {
    let place = Place::new("unheard");
    place.done(&["attach", "ram:1M", "--name", "d"]);
    let pid = place.pid("d");
    fs::remove_file(place.state().join("d.control")).unwrap();
    let commands = [&["set", "d", "depth=8"][..], &["resize", "d", "2M"], &["commit", "d"], &["stat", "d"]];
    let refused = commands.map(|words| String::from_utf8(place.run(words).stderr).unwrap());
    signal(pid, rustix::process::Signal::TERM);
    wait_until("the daemon exits", || has_exited(pid));
    let why = format!("d: the device is starting or stopping (pid {pid})");
    assert!(refused.iter().all(|line| line.contains(&why)), "{refused:?}");
}

fn foreground(place: &Place, words: &[&str], notify: &Path) -> (Child, UnixDatagram) {
    let socket = UnixDatagram::bind(notify).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let child = place
        .command(&[&["attach", "--foreground"], words].concat())
        .env("NOTIFY_SOCKET", notify)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    (child, socket)
}

fn word(socket: &UnixDatagram) -> String {
    let mut buffer = [0; 1024];
    let length = socket.recv(&mut buffer).unwrap();
    String::from_utf8(buffer[..length].to_vec()).unwrap()
}

#[test]
fn in_the_foreground_it_notifies_the_service_manager() {
    let place = Place::new("front");
    let (mut child, manager) = foreground(&place, &["ram:1M"], &place.dir.join("n"));
    assert!(word(&manager).starts_with("READY=1\nSTATUS=Serving ram:1M as nbd+unix"));
    place.done(&["show", "ram"]);
    signal(child.id().try_into().unwrap(), rustix::process::Signal::TERM);
    assert!(word(&manager).starts_with("STOPPING=1"));
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut printed = String::new();
    child.stdout.unwrap().read_to_string(&mut printed).unwrap();
    assert!(printed.starts_with("nbd+unix:///") && printed.lines().count() == 1);
    assert!(place.files().is_empty());
}

#[test]
fn sockets_of_the_service_manager_are_served_and_left_there() {
    let place = Place::new("activated");
    let path = place.dir.join("a.sock");
    let listener = UnixListener::bind(&path).unwrap();
    // The shell's process ID remains after exec, for LISTEN_PID; descriptor 3 is a copy of standard input.
    let mut command = place.command(&[]);
    let program = command.get_program().to_owned();
    command = Command::new("sh");
    command
        .args(["-c", "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" attach ram:1M"])
        .arg(program)
        .env("BLKQ_STATE_DIR", place.state())
        .stdin(std::os::fd::OwnedFd::from(listener.try_clone().unwrap()))
        .stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(client(&format!("nbd+unix:///?socket={}", path.display())));
    assert!(!place.files().contains(&"ram.nbd".to_owned()));
    assert_eq!(place.pid("ram"), i32::try_from(child.id()).unwrap());
    place.done(&["detach", "ram", "--force"]);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut printed = String::new();
    child.stdout.unwrap().read_to_string(&mut printed).unwrap();
    assert_eq!(printed, "", "standard output belongs to the program that passed the socket");
    assert!(path.exists());
}

// Contract: bounded-input
#[test]
fn the_control_socket_survives_garbage() {
    let place = Place::new("garbage");
    place.done(&["attach", "ram:1M"]);
    assert_eq!(place.ask("ram", b"{\"command\":\"ping\"}\n"), "{\"ok\":null}\n");
    let garbage: [&[u8]; 6] =
        [b"\n", b"\0\xff\xfe\n", b"{\n", b"{\"command\":\"ping\",\"x\":1}\n", &[b'['; 70 << 10], b"null\n"];
    for line in garbage {
        let answer = place.ask("ram", line);
        assert!(answer.starts_with("{\"error\":\"malformed request") || answer.is_empty(), "{answer}");
    }
    // Silent clients do not block other clients.
    let idle: Vec<UnixStream> =
        (0..8).map(|_| UnixStream::connect(place.state().join("ram.control")).unwrap()).collect();
    assert_eq!(place.ask("ram", b"{\"command\":\"ping\"}\n"), "{\"ok\":null}\n");
    drop(idle);
    place.done(&["show", "ram"]);
}

// Contract: bounded-input
#[test]
fn sockets_and_files_are_the_owners_alone() {
    let place = Place::new("modes");
    let custom = place.dir.join("c.sock");
    place.done(&["attach", "ram:1M", "--listen", &format!("unix:{}", custom.display())]);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&place.state()), 0o700);
    assert_eq!(mode(&custom), 0o600);
    for file in place.files() {
        // Only the descriptor that created the state file writes it.
        let expected = if file == "ram.json" { 0o400 } else { 0o600 };
        assert_eq!(mode(&place.state().join(&file)), expected, "{file}");
    }
    place.done(&["detach", "ram"]);
    assert!(!custom.exists());
}

// Contract: bounded-input
#[test]
fn a_daemon_drops_privileges_that_it_does_not_need() {
    let place = Place::new("sandbox");
    place.done(&["attach", "ram:1M", "--queues", "2"]);
    let fields = |name: &str| -> Vec<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", place.pid(name))).unwrap();
        let mut lines: Vec<String> = tasks
            .filter_map(|task| fs::read_to_string(task.unwrap().path().join("status")).ok())
            .flat_map(|status| status.lines().map(str::to_owned).collect::<Vec<_>>())
            .filter(|line| {
                ["CapPrm:", "CapEff:", "NoNewPrivs:", "Seccomp:"].iter().any(|name| line.starts_with(name))
            })
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        lines.sort();
        lines.dedup();
        lines
    };
    let zero = "0".repeat(16);
    let dropped =
        [format!("CapEff: {zero}"), format!("CapPrm: {zero}"), "NoNewPrivs: 1".into(), "Seccomp: 2".into()];
    assert_eq!(fields("ram"), dropped);
    let sandbox = &place.json(&["show", "ram", "--json"])["sandbox"];
    assert_eq!((&sandbox["capabilities"], &sandbox["seccomp"]), (&"none".into(), &true.into()));
    place.done(&["attach", "ram:1M", "--name", "open", "--no-sandbox"]);
    assert!(fields("open").contains(&"Seccomp: 0".to_owned()));
    assert!(place.done(&["show", "open"]).contains("off (--no-sandbox)"));
}

#[test]
fn an_idle_daemon_is_small() {
    let place = Place::new("small");
    let image = place.image("disk.img", 1 << 30);
    place.done(&["attach", &image]);
    let status = fs::read_to_string(format!("/proc/{}/status", place.pid("disk.img"))).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kib: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
    // Debug builds contain more code than release builds.
    let most = if cfg!(debug_assertions) { 24 << 10 } else { 8 << 10 };
    assert!(kib <= most, "{kib} KiB");
}

/// Long options make the description of the device long.
#[test]
fn a_device_with_long_options_attaches_reports_and_detaches() {
    let place = Place::new("long");
    let rules = format!("seed=7;{}", vec!["delay=1ns,op=discard"; 5000].join(";"));
    let attached = place.run(&["attach", "ram:1M", "--fault", &rules]);
    assert!(attached.stdout.starts_with(b"nbd+unix:///"));
    let shown = place.json(&["show", "ram", "--json"]);
    assert!(shown["attach_options"]["options"]["fault"] == rules.as_str());
    place.done(&["detach", "ram"]);
    assert!(place.files().is_empty());
}

#[test]
fn a_mistyped_name_gets_a_suggestion() {
    let place = Place::new("similar");
    place.done(&["attach", "ram:1M", "--name", "disk.img"]);
    place.done(&["group", "set", "gold", "iops=100"]);
    for (words, hint) in [
        (&["show", "dsk.img"][..], "dsk.img: no such device; did you mean disk.img?"),
        (&["set", "disk.img", "read_only=on"], "no such setting; did you mean read-only?"),
        (&["set", "disk.img", "readonly=on"], "no such setting; did you mean read-only?"),
        (&["set", "disk.img", "group=glod"], "there is no group glod; did you mean gold?"),
        (&["attach", "ram:1M", "--group", "golt"], "there is no group golt; did you mean gold?"),
    ] {
        let line = place.refused(words);
        assert!(line.contains(hint), "{words:?}: {line}");
    }
    assert!(!place.refused(&["show", "other"]).contains("did you mean"));
}

// Contract: live-changes
#[test]
fn the_settings_of_all_devices_are_changed_together() {
    let place = Place::new("set-all");
    let image = place.image("a", 1 << 20);
    place.done(&["attach", &image]);
    place.done(&["attach", "ram:1M"]);
    let setting = |name: &str, key: &str| place.json(&["show", name, "--json"])["settings"][key].clone();
    place.done(&["set", "--all", "depth=4", "hang-warning=7"]);
    for name in ["a", "ram"] {
        assert_eq!((setting(name, "depth"), setting(name, "hang-warning")), (4.into(), 7.into()));
    }
    // A device without an image does not prevent the change of the other device.
    let line = place.refused(&["set", "--all", "dispatch=serial"]);
    assert!(line.starts_with("blkq: set ram: dispatch=serial: no such setting"), "{line}");
    assert_eq!(setting("a", "dispatch"), "serial");
    assert_eq!(place.run(&["set", "--all", "depth"]).status.code(), Some(2));
    assert_eq!(place.run(&["set", "a"]).status.code(), Some(2));
    let help = place.done(&["set", "--help"]);
    for line in
        ["  depth             1 to the --depth", "  weight            1 to 10000  (only devices in a group)"]
    {
        assert!(help.contains(line), "{help}");
    }
}

// Contract: live-changes
#[test]
fn a_device_joins_and_leaves_groups_while_it_is_served() {
    let place = Place::new("set-group");
    let image = place.image("a", 1 << 20);
    place.done(&["attach", &image]);
    place.done(&["group", "set", "one", "iops=100"]);
    place.done(&["group", "set", "two", "iops=200"]);
    let group = || place.json(&["show", "a", "--json"])["settings"]["group"].clone();
    let members = |name: &str| {
        place.done(&["group", "list"]).lines().any(|line| line.starts_with(name) && line.contains(" a"))
    };
    assert!(place.refused(&["set", "a", "weight=3"]).contains("join a group first, with group=NAME"));
    place.done(&["set", "a", "group=one", "weight=3"]);
    assert_eq!(group(), "one");
    assert!(members("one"));
    assert!(place.refused(&["group", "remove", "one"]).contains("has members"));
    place.done(&["set", "a", "group=two"]);
    assert_eq!((group(), members("one"), members("two")), ("two".into(), false, true));
    place.done(&["group", "remove", "one"]);
    // The next daemon joins the same group.
    kill(place.pid("a"));
    place.done(&["recover", "a"]);
    assert_eq!(
        (group(), place.json(&["show", "a", "--json"])["settings"]["weight"].clone()),
        ("two".into(), 3.into())
    );
    assert!(place.refused(&["set", "a", "limit=auto"]).contains("group"));
    place.done(&["set", "a", "group=none"]);
    assert!(group().is_null());
    place.done(&["group", "remove", "two"]);
    place.done(&["set", "a", "limit=auto"]);
    place.done(&["group", "set", "three", "iops=1"]);
    assert!(place.refused(&["set", "a", "group=three"]).contains("limit=auto cannot be in a group"));
}

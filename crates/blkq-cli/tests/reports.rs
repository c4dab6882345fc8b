//! The reports of `blkq list`, `show` and `stat`, for people and for programs.

use std::io::{BufRead, BufReader, Lines};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::place::*;
use serde_json::Value;

fn start(place: &Place, words: &[&str]) -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut child = place.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

#[test]
fn stat_of_one_device_reports_once_or_in_intervals() {
    let place = Place::new("stat");
    place.done(&["attach", "ram:1M"]);
    let once = place.json(&["stat", "ram", "--json"]);
    assert_eq!(once["fields"].as_array().unwrap().len(), 17);
    assert_eq!((&once["in_flight"], &once["read"]["iops"]), (&0.into(), &0.0.into()));
    assert!(place.done(&["stat", "ram"]).contains("in-flight  0 now"));
    for words in [&["stat", "ram", "--interval", "0.02", "--json"][..], &["stat", "--json", "ram", "0.02"]] {
        let (mut child, mut reports) = start(&place, words);
        for _ in 0..3 {
            let report: Value = serde_json::from_str(&reports.next().unwrap().unwrap()).unwrap();
            assert!((0.015..5.0).contains(&report["seconds"].as_f64().unwrap()));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let counted = place.done(&["stat", "ram", "0.02", "3", "--json"]);
    assert_eq!(counted.lines().count(), 3);
}

#[test]
fn stat_exits_well_when_its_device_is_detached() {
    let place = Place::new("stat-end");
    for words in [&["stat", "a", "0.02"][..], &["stat", "a", "b", "0.02"], &["stat", "a", "0.02", "--json"]] {
        for round in 0..5 {
            place.done(&["attach", "ram:1M", "--name", "a"]);
            place.done(&["attach", "ram:1M", "--name", "b"]);
            let (mut child, mut reports) = start(&place, words);
            reports.next().unwrap().unwrap();
            place.done(&["detach", "--all"]);
            reports.for_each(|line| drop(line.unwrap()));
            let mut errors = String::new();
            std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut errors).unwrap();
            assert_eq!((child.wait().unwrap().code(), &*errors), (Some(0), ""), "{words:?} {round}");
        }
    }
    // One that was killed is another matter, and so is one that never was.
    place.done(&["attach", "ram:1M", "--name", "a"]);
    let (child, mut reports) = start(&place, &["stat", "a", "0.02"]);
    reports.next().unwrap().unwrap();
    kill(place.pid("a"));
    reports.for_each(|line| drop(line.unwrap()));
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(String::from_utf8(output.stderr).unwrap().contains("was killed or crashed"));
    assert!(place.refused(&["stat", "never"]).contains("no such device"));
}

#[test]
fn stat_without_names_has_a_line_per_device() {
    let place = Place::new("stat-all");
    assert_eq!(place.done(&["stat"]), "");
    let uri = place.done(&["attach", "ram:1M", "--name", "busy"]);
    place.done(&["attach", "ram:1M", "--name", "idle"]);
    let mut client = session(&uri, "busy");
    request(&mut client, 1, 1, 0, 65536);
    assert_eq!(reply(&mut client, 0), (0, 1));
    for words in [&["stat"][..], &["stat", "--all"], &["stat", "busy", "idle"]] {
        let text = place.done(words);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        let names: Vec<&str> = lines.iter().map(|line| line[0]).collect();
        assert_eq!(names, ["DEVICE", "busy", "idle"], "{text}");
        let total = lines[0].iter().position(|head| *head == "wMB").unwrap();
        assert_eq!((lines[1][total], lines[2][total]), ("0.1", "0.0"), "{text}");
    }
    let json = place.done(&["stat", "--json"]);
    let names: Vec<Value> =
        json.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["name"].clone()).collect();
    assert_eq!(names, ["busy", "idle"]);
    // Nothing happens in these intervals; each has its time.
    let text = place.done(&["stat", "0.02", "2", "-t"]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 6, "{text}");
    assert!(lines[0].ends_with('Z') && lines[0].len() == 24, "{text}");
    assert_eq!((lines[1], lines[2], lines[4]), ("2 devices were idle", "", "2 devices were idle"), "{text}");
    assert_eq!(place.done(&["stat", "0.02", "1", "--verbose"]).lines().count(), 4);
    // A missing device does not hide the reports of the others.
    let output = place.run(&["stat", "busy", "never"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().contains("\nbusy "));
    assert!(String::from_utf8(output.stderr).unwrap().contains("never: no such device"));
    for words in [&["stat", "busy", "0"][..], &["stat", "busy", "1", "0"], &["stat", "busy", "--count", "1"]]
    {
        assert_eq!(place.run(words).status.code(), Some(2), "{words:?}");
    }
}

#[test]
fn columns_are_chosen_for_tables_and_for_json() {
    let place = Place::new("columns");
    place.done(&["attach", "ram:1M", "--name", "a", "--read-only"]);
    let pid = place.pid("a");
    let text = place.done(&["list", "-o", "NAME,PID,UPTIME", "--no-headings"]);
    let cells: Vec<&str> = text.split_whitespace().collect();
    assert_eq!(cells[..2], ["a".to_owned(), pid.to_string()], "{text}");
    assert!(cells[2].starts_with("00:") && cells.len() == 3, "{text}");
    assert_eq!(place.done(&["list", "-O", "NAME", "--no-headings"]), "a\n");
    let listed = place.json(&["list", "--json", "-o", "name,size,pid,uptime,ro,dio,offset,mode"]);
    let uptime = listed[0]["uptime"].as_u64().unwrap();
    let expected = serde_json::json!([{"name": "a", "size": 1 << 20, "pid": pid, "uptime": uptime, "ro": true,
        "dio": false, "offset": 0, "mode": "ro"}]);
    assert_eq!(listed, expected);
    assert!(place.refused(&["list", "--json", "-o", "NAME,FOO"]).contains("unknown column"));
}

#[test]
fn a_device_shows_where_its_files_are_in_typed_json() {
    let place = Place::new("shown");
    place.done(&["attach", "ram:1M", "--name", "a", "--depth", "32", "--no-merge"]);
    let log = place.state().join("a.log").to_str().unwrap().to_owned();
    let shown = place.json(&["show", "a", "--json"]);
    assert_eq!(
        (&shown["log"], &shown["state_directory"]),
        (&log.clone().into(), &place.state().to_str().unwrap().into())
    );
    assert!(shown["uptime_seconds"].is_u64());
    let settings = &shown["settings"];
    assert_eq!(
        (&settings["depth"], &settings["merge"], &settings["iostats"], &settings["scheduler"]),
        (&32.into(), &false.into(), &true.into(), &"none".into())
    );
    // For people they are the words that `blkq set` takes.
    let page = place.done(&["show", "a"]);
    assert!(page.contains("  merge ") && page.lines().any(|line| line.ends_with("  off")), "{page}");
    assert!(page.contains(&log), "{page}");
}

/// Makes the command run without io_uring, as in a container that forbids it.
fn without_io_uring(command: &mut Command) {
    let step = |code: u32, k: u32, jf: u8| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    let mut filter = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_io_uring_setup as u32, 1),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let forbid = move || {
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the kernel reads a program of four steps, which lives as long as the call.
        let done = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1_u64, 0_u64, 0_u64, 0_u64) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, u64::from(libc::SECCOMP_MODE_FILTER), &raw const program)
                    == 0
        };
        if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: two system calls between fork and exec, which allocate nothing.
    unsafe { command.pre_exec(forbid) };
}

#[test]
fn doctor_fails_where_nothing_can_be_served() {
    let place = Place::new("doctor");
    let page = place.run(&["doctor"]);
    let text = String::from_utf8(page.stdout).unwrap();
    assert_eq!(page.status.code(), Some(0), "{text}");
    assert!(
        text.contains("served over NBD") || text.contains("supports everything that blkq uses"),
        "{text}"
    );

    let mut command = place.command(&["doctor", "--json"]);
    without_io_uring(&mut command);
    let output = command.output().unwrap();
    let page: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &page["works"]), (Some(1), &Value::Bool(false)), "{page}");
    let checks = page["checks"].as_array().unwrap();
    let ring = checks.iter().find(|check| check["name"] == "io_uring").unwrap();
    assert_eq!((&ring["state"], &ring["needed"]), (&Value::from("missing"), &Value::Bool(true)));
    assert!(ring["cure"].as_str().unwrap().contains("seccomp profile"), "{ring}");

    // Certificates that --tls-certificates names must be usable.
    let page = place.run(&["doctor", "--tls-certificates", "/nowhere"]);
    assert_eq!(page.status.code(), Some(1));
    assert!(!place.state().exists(), "nothing is made");
}

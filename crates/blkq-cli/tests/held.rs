//! `--on-error`: failed requests are held until `blkq resume`, and other commands and events meanwhile.

use blkq::testing::wait_until;
use std::io::Read;
use std::time::Duration;

use crate::place::{self, Place, has_exited, kill, reply, request, session};

const FAULT: &str = "error=ENOSPC,op=write";

/// A device on which writes fail for lack of space, and its URI.
fn attach(place: &Place, more: &[&str]) -> String {
    let image = place.image("a.img", 1 << 20);
    let mut words = vec!["attach", &image, "--name", "a", "--fault", FAULT];
    words.extend(more);
    let output = place.run(&words);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn wait_for_held(place: &Place, count: u64) {
    let held = || place.json(&["show", "a", "--json"])["held"].as_u64().unwrap();
    wait_until("requests are held", || held() == count);
}

// Contract: errors
#[test]
fn clients_wait_for_room_and_see_no_error() {
    let place = Place::new("room");
    let uri = attach(&place, &["--on-error", "hold-enospc", "--hang-warning", "0.2"]);
    let mut client = session(&uri, "a");
    request(&mut client, 1, 7, 0, 4096);
    wait_for_held(&place, 1);
    request(&mut client, 3, 8, 0, 0);
    // Reads continue, and the flush waits for the write.
    request(&mut client, 0, 9, 65536, 512);
    assert_eq!(reply(&mut client, 512), (0, 9));

    let hint = "`blkq resume` reissues them, `blkq resume --fail` fails them";
    for words in [
        &["detach", "a"][..],
        &["set", "a", "merge=off"],
        &["set", "a", "without=early-submission"],
        &["set", "a", "read-only=on"],
        &["resize", "a", "2M"],
    ] {
        let line = place.refused(words);
        assert!(line.contains("1 request is held after I/O errors") && line.contains(hint), "{line}");
    }
    // These mechanisms can be switched while I/O is in flight.
    place.done(&["set", "a", "without=huge-pages,receive-backoff,split-reads"]);
    let list = place.done(&["list", "--no-headings", "-o", "NAME,MODE"]);
    assert_eq!(list.split_whitespace().collect::<Vec<_>>(), ["a", "rw,held"]);
    assert!(place.done(&["show", "a"]).contains("1 request, after I/O errors; run `blkq resume a`"));
    let stat = place.json(&["stat", "a", "--json"]);
    assert_eq!((&stat["held"]["now"], &stat["held"]["requests"]), (&1.into(), &1.into()));
    assert!(place.done(&["stat", "a"]).contains("held       1 now, 1 in total"));
    let log = || std::fs::read_to_string(place.state().join("a.log")).unwrap();
    wait_until("the log has it", || {
        let hang = log().lines().any(|line| {
            line.contains("hang: ") && line.contains("held: no space") && line.contains("blkq resume a")
        });
        hang && log().contains("held: 1 request has failed and is held")
    });

    // The device still reports a lack of space.
    assert_eq!(place.done(&["resume", "a"]), "1 held request reissued\n");
    wait_until("it is held again", || place.json(&["stat", "a", "--json"])["held"]["requests"] == 2);
    place.done(&["set", "a", "fault=none"]);
    assert_eq!(place.done(&["resume", "a"]), "1 held request reissued\n");
    let mut answers = [reply(&mut client, 0), reply(&mut client, 0)];
    answers.sort_unstable();
    assert_eq!(answers, [(0, 7), (0, 8)]);
    let image = std::fs::read(place.dir.join("a.img")).unwrap();
    assert!(image[..4096].iter().all(|byte| *byte == 7));
    assert_eq!(place.done(&["resume", "a"]), "0 held requests reissued\n");
    place.done(&["set", "a", "merge=off"]);
    drop(client);
    place.done(&["detach", "a"]);
}

// Contract: errors
#[test]
fn held_requests_can_fail_and_the_policy_be_changed() {
    let place = Place::new("failheld");
    let uri = attach(&place, &[]);
    let mut client = session(&uri, "a");
    request(&mut client, 1, 1, 0, 512);
    assert_eq!(reply(&mut client, 0), (28, 1), "errors are reported by default");
    place.done(&["set", "a", "on-error=hold"]);
    request(&mut client, 1, 2, 0, 512);
    request(&mut client, 1, 3, 8192, 512);
    wait_for_held(&place, 2);
    // Two requests are held together.
    let both = [place.command(&["resume", "a", "--fail"]), place.command(&["resume", "a"])];
    let both = both.map(|mut command| command.stdout(std::process::Stdio::null()).spawn().unwrap());
    for mut command in both {
        assert!(command.wait().unwrap().success());
    }
    place.done(&["resume", "a", "--fail"]);
    let mut answers = [reply(&mut client, 0), reply(&mut client, 0)];
    answers.sort_unstable();
    assert_eq!(answers, [(28, 2), (28, 3)]);
    assert!(place.refused(&["set", "a", "on-error=stop"]).contains("report, hold, hold-enospc"));
    assert!(place.refused(&["resume", "b"]).contains("no such device"));
    drop(client);
    place.done(&["detach", "a"]);
}

/// A flush that a command sends waits for a reissued write, which fails and is held again.
// Contract: errors
#[test]
fn a_flush_of_a_command_gives_up_on_held_requests() {
    let place = Place::new("heldagain");
    let uri = attach(&place, &["--on-error", "hold"]);
    let mut client = session(&uri, "a");
    request(&mut client, 1, 1, 0, 512);
    wait_for_held(&place, 1);
    place.done(&["set", "a", "fault=stuck=2s,op=write"]);
    place.done(&["resume", "a"]);
    // The write is held before the command's flush completes.
    let line = place.refused(&["upgrade", "a"]);
    assert!(line.contains("1 request is held after I/O errors"), "{line}");
    place.done(&["set", "a", "fault=none"]);
    place.done(&["resume", "a"]);
    assert_eq!(reply(&mut client, 0), (0, 1));
    drop(client);
    wait_until("it has no client", || {
        place.json(&["show", "a", "--json"])["clients"].as_array().unwrap().is_empty()
    });
    place.done(&["detach", "a"]);
}

// Contract: detach
#[test]
fn clients_that_vanish_and_forced_stops_leave_nothing_held() {
    let place = Place::new("vanish");
    let uri = attach(&place, &["--on-error", "hold"]);
    let mut client = session(&uri, "a");
    request(&mut client, 1, 1, 0, 512);
    wait_for_held(&place, 1);
    // A write that is resumed later could overwrite newer data of the same client from another connection.
    drop(client);
    wait_for_held(&place, 0);
    wait_until("it has no client", || {
        place.json(&["show", "a", "--json"])["clients"].as_array().unwrap().is_empty()
    });

    let mut client = session(&uri, "a");
    request(&mut client, 1, 2, 0, 512);
    wait_for_held(&place, 1);
    let pid = place.pid("a");
    place.done(&["detach", "a", "--force"]);
    assert!(has_exited(pid) && place.files().iter().all(|name| !name.starts_with("a.")));
    let mut rest = Vec::new();
    client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    client.read_to_end(&mut rest).unwrap();

    // A signal fails held requests too, and held requests do not survive a killed daemon.
    for stop in [rustix::process::Signal::TERM, rustix::process::Signal::KILL] {
        let uri = attach(&place, &["--on-error", "hold"]);
        let mut client = session(&uri, "a");
        request(&mut client, 1, 3, 0, 512);
        wait_for_held(&place, 1);
        let pid = place.pid("a");
        if stop == rustix::process::Signal::KILL {
            kill(pid);
        } else {
            place::signal(pid, stop);
            wait_until("it stops", || has_exited(pid));
        }
    }
    attach(&place, &[]);
}

// Contract: durability
#[test]
fn ignored_flushes_cannot_be_overlooked() {
    let place = Place::new("unsafe");
    let image = place.image("a.img", 1 << 20);
    let output = place.run(&["attach", &image, "--name", "a", "--unsafe-flush-ignore"]);
    let warning = "warning: flushes are ignored: a crash of this machine";
    assert!(String::from_utf8_lossy(&output.stderr).contains(warning), "{output:?}");
    let log = std::fs::read_to_string(place.state().join("a.log")).unwrap();
    assert!(log.contains(warning), "{log}");
    let list = place.done(&["list", "--no-headings", "-o", "MODE"]);
    assert_eq!(list.trim(), "rw,unsafe");
    let page = place.done(&["show", "a"]);
    assert!(page.contains("unsafe-flush-ignore") && page.contains("flushes are ignored"), "{page}");
    let uri = String::from_utf8(output.stdout).unwrap();
    let mut client = session(&uri, "a");
    request(&mut client, 1, 1, 0, 512);
    assert_eq!(reply(&mut client, 0), (0, 1));
    request(&mut client, 3, 2, 0, 0);
    assert_eq!(reply(&mut client, 0), (0, 2));
    let facts = &place.json(&["show", "a", "--json"])["driver_facts"];
    assert_eq!(facts["fdatasyncs"], 0, "{facts}");
    let line = place.refused(&["set", "a", "unsafe-flush-ignore=off"]);
    assert!(line.contains("attach it with --unsafe-flush-ignore"), "{line}");
}

//! Usage errors, and what is generated from the command line: manual pages and completions.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod place;

use std::fs;
use std::path::Path;
use std::process::Command;

use place::Place;
use serde_json::Value;

#[test]
fn wrong_usage_and_refusals_have_exit_codes_of_their_own() {
    let place = Place::new("usage");
    for words in [
        &["attach"][..],
        &["attach", "ram:1Q"],
        &["attach", "ram:0"],
        &["attach", "ram:1M", "--depth", "0"],
        &["attach", "ram:1M", "--listen", "banana"],
        &["attach", "ram:1M", "--copy", "me"],
        &["detach"],
        &["detach", "a", "--all"],
        &["set", "a"],
        &["set", "a", "="],
        &["stat", "a", "--interval", "0"],
        &["bogus"],
    ] {
        assert_eq!(place.run(words).status.code(), Some(2), "{words:?}");
    }
    for words in
        [&["show", "a"][..], &["detach", "a"], &["stat", "../a"], &["resize", ""], &["set", "a", "b=c"]]
    {
        assert!(place.refused(words).contains("no such device"), "{words:?}");
    }
    // A device is named once.
    for words in [&["commit", "nosuch"][..], &["snapshot", "nosuch", "--to", "new"]] {
        assert_eq!(place.refused(words).matches("nosuch").count(), 1, "{words:?}");
    }
    let unwritable = place.refused(&["attach", "/proc/new.img", "--create", "1M"]);
    assert_eq!(unwritable.matches("/proc/new.img").count(), 1, "{unwritable}");
    // The usage is that of the command.
    for (words, usage) in [
        (&["stat", "a", "0"][..], "Usage: blkq stat "),
        (&["stat", "--histogram"], "Usage: blkq stat "),
        (&["losetup", "-o", "1", "a"], "Usage: blkq losetup "),
    ] {
        let error = String::from_utf8(place.run(words).stderr).unwrap();
        assert!(error.contains(usage), "{words:?}: {error}");
    }
    let doctor = place.run(&["doctor", "--tls-certificates", "nosuch"]);
    let page = String::from_utf8(doctor.stdout).unwrap();
    assert!(page.ends_with("Images can be served over NBD, but not with these certificates.\n"), "{page}");
    assert_eq!(doctor.status.code(), Some(1));
}

#[test]
fn manuals_and_completions_come_from_the_command_line() {
    let place = Place::new("generate");
    let dir = place.dir.to_str().unwrap();
    place.done(&["generate", "man", dir]);
    place.done(&["generate", "completions", dir]);
    for (file, holds) in [
        ("blkq.1", "blkq\\-attach"),
        ("blkq-attach.1", "direct\\-io"),
        ("blkq-attach.1", "[\\-\\-name <NAME>]"),
        ("blkq-generate.1", ".SH SYNOPSIS"),
        ("blkq.bash", "complete"),
        ("_blkq", "compdef"),
        ("blkq.fish", "complete"),
    ] {
        let text = fs::read_to_string(place.dir.join(file)).unwrap();
        assert!(text.contains(holds), "{file}: {holds}");
    }
    let page = fs::read_to_string(place.dir.join("blkq-detach.1")).unwrap();
    assert!(page.contains(".SH DESCRIPTION\nFlush devices and detach them.\n.PP\nReturns when"), "{page}");
    // Only files of an earlier command are replaced.
    place.done(&["generate", "man", dir]);
    fs::write(place.dir.join("blkq.1"), "notes").unwrap();
    assert!(place.refused(&["generate", "man", dir]).contains("blkq.1: contains something else"));
    fs::remove_file(place.dir.join("blkq.1")).unwrap();
    let page = fs::read_to_string(place.dir.join("blkq-stat.1")).unwrap();
    for section in ["SYNOPSIS", "OPTIONS", "EXAMPLES", "ENVIRONMENT", "FILES", "EXIT STATUS", "SEE ALSO"] {
        assert_eq!(
            page.lines().filter(|line| line.replace('"', "") == format!(".SH {section}")).count(),
            1,
            "{section}"
        );
    }
    assert!(place.done(&["--help"]).contains("BLKQ_STATE_DIR"));
    place.done(&["attach", "ram:1M", "--name", "first"]);
    place.done(&["attach", "ram:1M", "--name", "second"]);
    let program = Path::new(env!("CARGO_BIN_EXE_blkq"));
    let completed = |words: &str| {
        let script = format!(
            r#"source {dir}/blkq.bash; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_TYPE=9
            _clap_complete_blkq blkq "${{COMP_WORDS[COMP_CWORD]}}" ""; printf '%s\n' "${{COMPREPLY[@]}}""#
        );
        let path = format!("{}:/usr/bin:/bin", program.parent().unwrap().display());
        let mut bash = Command::new("bash");
        bash.args(["-c", &script]).env("PATH", path).env("BLKQ_STATE_DIR", place.state());
        let output = bash.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect::<Vec<_>>()
    };
    assert_eq!(completed("blkq detach fi"), ["first"]);
    assert_eq!(completed("blkq show s"), ["second"]);
    assert_eq!(completed("blkq set first dep"), ["depth="]);
    assert_eq!(completed("blkq set first di"), ["direct-io=", "dispatch="]);
    let image = place.image("disk.img", 1 << 20);
    place.done(&["attach", &image, "--fault", "none"]);
    let line = place.refused(&["set", "disk.img", "nonsense=on"]);
    let (_, listed) = line.split_once("there are ").unwrap();
    let listed = listed.split(';').next().unwrap().split(", ").map(|key| format!("{key}="));
    let mut keys = completed("blkq set disk.img ''");
    // The weight is for devices of a group.
    keys.retain(|key| key != "--help" && key != "weight=");
    keys.sort();
    assert_eq!(keys, listed.collect::<Vec<_>>());
    let info = place.json(&["show", "disk.img", "--json"]);
    for key in keys {
        let value = match (key.as_str(), &info["settings"][key.trim_end_matches('=')]) {
            ("direct-io=", _) => "auto".to_owned(),
            ("fault=", _) => "none".to_owned(),
            (_, Value::Bool(true)) => "on".to_owned(),
            (_, Value::String(value)) => value.clone(),
            (_, Value::Number(value)) => value.to_string(),
            _ => "off".to_owned(),
        };
        place.done(&["set", "disk.img", &format!("{key}{value}")]);
    }
    assert!(completed("blkq gen").contains(&"generate".to_owned()));
    assert!(!completed("blkq ''").iter().any(|word| ["ublk-owner", "daemon"].contains(&word.as_str())));
    place.refused(&["generate", "man", "/nonexistent"]);
    assert!(place.done(&["features"]).contains("io_uring"));
    let features = place.json(&["features", "--json"]);
    let listed = features["features"].as_array().unwrap();
    let of = |name: &str| listed.iter().find(|feature| feature["name"] == name).unwrap();
    assert!(features["kernel"].is_string() && of("ublk")["available"].is_boolean());
    for name in ["io_uring", "IORING_OP_RECVMSG"] {
        assert_eq!((&of(name)["available"], of(name)["purpose"].is_string()), (&true.into(), true));
    }
}

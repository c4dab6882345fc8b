//! The manual pages and completions of `blkq generate`, and what they say about other commands.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::place::*;
use serde_json::Value;

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
    // Only files that an earlier `blkq generate` wrote are replaced.
    place.done(&["generate", "man", dir]);
    fs::write(place.dir.join("blkq.1"), "notes").unwrap();
    assert!(place.refused(&["generate", "man", dir]).contains("blkq.1: the file contains other data"));
    fs::remove_file(place.dir.join("blkq.1")).unwrap();
    let page = fs::read_to_string(place.dir.join("blkq-stat.1")).unwrap();
    for section in ["SYNOPSIS", "OPTIONS", "EXAMPLES", "ENVIRONMENT", "FILES", "EXIT STATUS", "SEE ALSO"] {
        assert_eq!(
            page.lines().filter(|line| line.replace('"', "") == format!(".SH {section}")).count(),
            1,
            "{section}"
        );
    }
    let page = fs::read_to_string(place.dir.join("blkq-attach.1")).unwrap();
    assert_eq!(page.matches(".SH OPTIONS").count(), 1, "{page}");
    for heading in ["Image", "Exports", "Access", "Performance", "Limits", "Ceph", "Service"] {
        assert!(page.contains(&format!(".SS {heading}\n")), "{heading}");
    }
    // The description of an exit code continues on a second line.
    assert!(
        page.contains(".TP\n4\na daemon in the foreground") && page.contains("\nor the dirty bitmaps"),
        "{page}"
    );
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
    let (_, listed) = line.split_once("choose one of ").unwrap();
    let listed = listed.split(';').next().unwrap().split(", ").map(|key| format!("{key}="));
    let mut keys = completed("blkq set disk.img ''");
    // The weight is for devices of a group.
    keys.retain(|key| !key.starts_with("--") && key != "weight=");
    keys.sort();
    assert_eq!(keys, listed.collect::<Vec<_>>());
    let info = place.json(&["show", "disk.img", "--json"]);
    for key in keys {
        let value = match (key.as_str(), &info["settings"][key.trim_end_matches('=')]) {
            ("direct-io=", _) => "auto".to_owned(),
            ("fault=" | "group=", _) => "none".to_owned(),
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

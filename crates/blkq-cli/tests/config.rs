//! `blkq attach --config`, `blkq config` and `blkq list --configured`.

use blkq::testing::wait_until;
use std::fs;
use std::process::{Child, Command, Output, Stdio};

use crate::place::*;
use serde_json::{Value, json};

/// A place with configuration files, given as name and text.
fn configured(test: &str, files: &[(&str, &str)]) -> Place {
    let place = Place::new(test);
    fs::create_dir(place.dir.join("c")).unwrap();
    for (name, text) in files {
        fs::write(place.dir.join("c").join(name), text).unwrap();
    }
    place
}

fn run(place: &Place, words: &[&str]) -> Output {
    let mut command: Command = place.command(words);
    command.env("BLKQ_CONFIG_DIR", place.dir.join("c")).output().unwrap()
}

fn printed(output: Output) -> String {
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap().as_str()), (Some(0), ""));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_device_is_attached_as_its_file_says() {
    let text = "image = \"ram:1M\"\nexport = [\"nbd\"]\nread-only = true\ndepth = 4\n";
    let place = configured("config", &[("data.toml", text), ("notes.txt", "not TOML")]);
    let file = place.dir.join("c/data.toml").display().to_string();
    let list = || printed(run(&place, &["list", "--configured", "--no-headings", "-o", "NAME,MODE,IMAGE"]));
    assert_eq!(list(), "data  configured  ram:1M\n");
    let object = json!([{ "name": "data", "state": "configured", "image": "ram:1M", "config": file }]);
    let listed = printed(run(&place, &["list", "--configured", "--json"]));
    assert_eq!(serde_json::from_str::<Value>(&listed).unwrap(), object);
    assert_eq!(printed(run(&place, &["list", "--json"])), "[]\n");

    printed(run(&place, &["attach", "--config", &file, "--depth", "8"]));
    let info = place.json(&["show", "data", "--json"]);
    assert_eq!((&info["attach_options"]["options"]["depth"], &info["read_only"]), (&json!(8), &json!(true)));
    assert_eq!(list(), "data  ro  ram:1M\n");
    // The device has the name of the file, without a suffix that would make it unique.
    assert!(place.refused(&["attach", "--config", &file]).contains("data"));
    assert_eq!(place.done(&["attach", "--config", &file, "--name", "e"]).lines().count(), 1);
    place.done(&["detach", "data"]);
    place.done(&["detach", "e"]);
    assert_eq!(list(), "data  configured  ram:1M\n");
}

#[test]
fn services_come_after_the_mounts_of_their_files() {
    let data = "image = \"/srv/a b.img\"\nexport = \"nbd\"\nlisten = \"tcp:127.0.0.1:0\"\ntls-certificates = \"/net/tls\"\n";
    let escaped = "image = \"/srv/ü.img\"\n";
    let files = [
        ("data.toml", data),
        ("ram.toml", "image = \"ram:1M\"\n"),
        ("bad.toml", "image = 1\n"),
        ("a+ü.toml", escaped),
    ];
    let place = configured("generator", &files);
    let units = place.dir.join("units");
    let words = ["systemd-generator", units.to_str().unwrap(), "/none", "/none"];
    let output = run(&place, &words);
    // A mistake in the file of one device does not affect the mounts of the others.
    assert_eq!(output.status.code(), Some(0));
    assert!(String::from_utf8(output.stderr).unwrap().contains("bad.toml:1"));
    let text = fs::read_to_string(units.join("blkq@data.service.d/50-blkq-mounts.conf")).unwrap();
    assert!(text.ends_with("RequiresMountsFor=\"/srv/a b.img\" \"/net/tls\"\n"), "{text}");
    // The instance name is escaped as systemctl does.
    let escaped = r"blkq@a\x2b\xc3\xbc.service.d/50-blkq-mounts.conf";
    assert!(fs::read_to_string(units.join(escaped)).unwrap().contains("/srv/ü.img"));
    assert_eq!(fs::read_dir(&units).unwrap().count(), 2);
}

#[test]
fn a_service_finds_its_device_by_the_escaped_instance() {
    let place = configured("escaped", &[("a+ü.toml", "image = \"ram:1M\"\nexport = \"nbd\"\n")]);
    let mut command = place.command(&["service", r"a\x2b\xc3\xbc"]);
    let mut child = command.env("BLKQ_CONFIG_DIR", place.dir.join("c")).spawn().unwrap();
    wait_until("it is served", || place.run(&["show", "a+ü"]).status.success());
    let file = place.dir.join(r"c/a\x2b\xc3\xbc.toml");
    fs::write(place.dir.join("c/a+ü.toml"), "image = \"ram:1M\"\nexport = \"nbd\"\ndepth = 4\n").unwrap();
    printed(run(&place, &["config", "apply", file.to_str().unwrap()]));
    assert_eq!(place.json(&["show", "a+ü", "--json"])["settings"]["depth"], 4);
    place.done(&["detach", "a+ü"]);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    // The message names the file without an image and shows no usage.
    fs::write(place.dir.join("c/empty.toml"), "depth = 4\n").unwrap();
    let line = place.refused(&["attach", "--config", place.dir.join("c/empty.toml").to_str().unwrap()]);
    assert!(line.contains("empty.toml: the key image is missing; add a line"), "{line}");
}

#[test]
fn every_mistake_of_the_files_is_a_line() {
    let place = configured(
        "config-check",
        &[
            ("a.toml", "image = \"null:1M\"\n"),
            ("b.toml", "image = \"null:1M\"\ndepht = 1\n\nqueues = 0\n"),
            ("c.toml", "image = \"null:1M\"\nname = \"a\"\n"),
        ],
    );
    let output = run(&place, &["config", "check"]);
    let errors = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<&str> = errors.lines().collect();
    assert_eq!((output.status.code(), lines.len()), (Some(1), 3), "{errors}");
    for (line, (file, text)) in lines.iter().zip([
        ("c/b.toml:2: ", "a similar key is depth"),
        ("c/b.toml:4: ", "queues"),
        ("c/c.toml:2: ", "rename the file"),
    ]) {
        assert!(line.starts_with("blkq: ") && line.contains(file) && line.contains(text), "{line}");
    }
    let a = place.dir.join("c/a.toml").display().to_string();
    assert_eq!(printed(run(&place, &["config", "check", &a])), "");
    let b = place.dir.join("c/b.toml").display().to_string();
    let line = place.refused(&["attach", "--config", &b]);
    assert!(line.contains("b.toml:2: unknown key") && line.contains("` reports all "), "{line}");
    // The list reports the file with the mistake.
    let list = printed(run(&place, &["list", "--configured", "-o", "NAME,EXPORT", "--no-headings"]));
    assert!(list.contains("b.toml:2: unknown key"), "{list}");
}

/// `blkq service data`, as a service manager starts it.
fn service(place: &Place) -> Child {
    let mut command = place.command(&["service", "data"]);
    command.env("BLKQ_CONFIG_DIR", place.dir.join("c")).spawn().unwrap()
}

fn wait_for_device(place: &Place, child: &mut Child) {
    let pid = child.id();
    let of_child = |output: &Output| {
        let info: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        info["pid"] == pid
    };
    wait_until("the service has its device", || {
        assert_eq!(child.try_wait().unwrap(), None, "the service has exited");
        of_child(&place.run(&["show", "data", "--json"]))
    });
}

#[test]
fn a_service_checks_an_image_that_changed_meanwhile() {
    let place = configured("service-format", &[]);
    let image = place.image("disk.img", 1 << 20);
    fs::write(place.dir.join("c/data.toml"), format!("image = \"{image}\"\nexport = \"nbd\"\n")).unwrap();
    let mut child = service(&place);
    wait_for_device(&place, &mut child);
    child.kill().unwrap();
    child.wait().unwrap();
    // No client of NBD continues, so the image may be another one.
    fs::write(&image, b"QFI\xfb\0\0\0\x03").unwrap();
    let output = run(&place, &["service", "data"]);
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{line}");
    assert!(line.contains("qcow2"), "{line}");
}

#[test]
fn a_service_is_upgraded_by_its_manager() {
    let place = configured("service", &[]);
    let image = place.image("disk.img", 1 << 20);
    let text = format!("image = \"{image}\"\nexport = [\"vhost-user-blk\"]\n");
    fs::write(place.dir.join("c/data.toml"), &text).unwrap();
    let mut child = service(&place);
    wait_for_device(&place, &mut child);

    fs::write(place.dir.join("c/data.toml"), format!("{text}depth = 9\nno-merge = true\nqueues = 2\n"))
        .unwrap();
    printed(run(&place, &["config", "apply"]));
    let settings = || place.json(&["show", "data", "--json"])["settings"].clone();
    assert_eq!((&settings()["depth"], &settings()["merge"]), (&json!(9), &json!(false)));
    let before = settings();
    let more = format!("{text}scheduler = \"kyber\"\nlimit = \"iops=9\"\ndepth = 4096\n");
    fs::write(place.dir.join("c/data.toml"), more).unwrap();
    let refused = run(&place, &["config", "apply"]);
    let line = String::from_utf8(refused.stderr).unwrap();
    assert!(line.starts_with("blkq: data: depth=4096: ") && line.lines().count() == 1, "{line}");
    assert_eq!((refused.status.code(), settings()), (Some(1), before));
    place.done(&["set", "data", "on-error=hold"]);

    let mut upgrade =
        place.command(&["upgrade", "data", "--service"]).stdout(Stdio::piped()).spawn().unwrap();
    wait_until("the old daemon exits", || {
        assert!(upgrade.try_wait().unwrap().is_none_or(|status| status.success()), "the upgrade failed");
        child.try_wait().unwrap().is_some()
    });
    assert_eq!(child.wait().unwrap().code(), Some(3));
    let mut next = service(&place);
    let output = upgrade.wait_with_output().unwrap();
    assert!(output.status.success());
    assert!(String::from_utf8(output.stdout).unwrap().starts_with("vhost-user:"));
    wait_for_device(&place, &mut next);
    assert_eq!((&settings()["depth"], &settings()["on-error"]), (&json!(9), &json!("hold")));

    // A virtual machine would get another disk.
    next.kill().unwrap();
    next.wait().unwrap();
    for line in ["read-only = true", "size-limit = \"512K\"", "offset = 512"] {
        fs::write(place.dir.join("c/data.toml"), format!("{text}{line}\n")).unwrap();
        let output = run(&place, &["service", "data"]);
        let why = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && why.contains("run `blkq recover data`"), "{line}: {why}");
    }
    fs::write(place.dir.join("c/data.toml"), &text).unwrap();
    let mut next = service(&place);
    wait_for_device(&place, &mut next);
    assert_eq!(settings()["depth"], 9);
    place.done(&["detach", "data"]);
    assert_eq!(next.wait().unwrap().code(), Some(0));
    assert!(place.files().is_empty());
}

/// The service exports NBD, so that no daemon takes over the device. A failed start in between keeps the settings.
#[test]
fn settings_outlive_a_killed_service_until_it_is_stopped() {
    let place = configured("service-killed", &[]);
    let image = place.image("disk.img", 1 << 20);
    let text = format!("image = \"{image}\"\nexport = \"nbd\"\ndepth = 16\n");
    fs::write(place.dir.join("c/data.toml"), &text).unwrap();
    let depth_and_mode = || {
        let info = place.json(&["show", "data", "--json"]);
        (info["settings"]["depth"].clone(), info["read_only"].clone())
    };
    let mut child = service(&place);
    wait_for_device(&place, &mut child);
    place.done(&["set", "data", "depth=9", "read-only=on"]);
    child.kill().unwrap();
    child.wait().unwrap();

    let away = place.dir.join("away").display().to_string();
    fs::rename(&image, &away).unwrap();
    for _ in 0..2 {
        assert_eq!(run(&place, &["service", "data"]).status.code(), Some(1));
    }
    fs::rename(&away, &image).unwrap();
    let mut child = service(&place);
    wait_for_device(&place, &mut child);
    assert_eq!(depth_and_mode(), (json!(9), json!(true)));
    place.done(&["detach", "data"]);
    assert_eq!(child.wait().unwrap().code(), Some(0));

    let mut child = service(&place);
    wait_for_device(&place, &mut child);
    assert_eq!(depth_and_mode(), (json!(16), json!(false)));
    // A device attached without the service does not have these settings either.
    place.done(&["set", "data", "depth=9"]);
    child.kill().unwrap();
    child.wait().unwrap();
    let file = place.dir.join("c/data.toml").display().to_string();
    place.done(&["attach", "--config", &file]);
    assert_eq!(depth_and_mode(), (json!(16), json!(false)));
    place.done(&["detach", "data"]);
}

#[test]
fn a_file_that_is_attached_is_applied() {
    let place = configured("apply", &[]);
    let image = place.image("disk.img", 1 << 20);
    // Every option of attach can be applied, any number of times, to the device that was attached with it.
    for text in [
        "image = \"ram:1M\"\nexport = \"nbd\"\ndirect-io = \"auto\"\ndispatch = \"concurrent\"\n".to_owned(),
        format!(
            "image = \"{image}\"\nexport = \"vhost-user-blk\"\ndirect-io = \"off\"\nno-pacing = true\nno-split-reads = true\n\
             fault = \"delay=1ms\"\nlimit = \"auto\"\nhang-warning = 0.3\nread-only = true\ndepth = 10240\n"
        ),
    ] {
        let file = place.dir.join("c/data.toml");
        fs::write(&file, text).unwrap();
        printed(run(&place, &["config", "check"]));
        // Not `done`: the command warns of the injected faults.
        assert!(run(&place, &["attach", "--config", &file.display().to_string()]).status.success());
        for _ in 0..2 {
            assert_eq!(printed(run(&place, &["config", "apply"])), "");
        }
        place.done(&["detach", "data"]);
    }
}

#[test]
fn a_service_that_cannot_start_reports_why() {
    let place =
        configured("service-bad", &[("data.toml", "image = \"/none.img\"\n"), ("bad.toml", "queues = 0\n")]);
    for (name, why) in [
        ("data", "No such file"),
        ("bad", "bad.toml:1: "),
        ("none", "No such file"),
        ("../x", "is not a valid device name"),
    ] {
        let output = run(&place, &["service", name]);
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(line.starts_with(&format!("blkq: service {name}: ")) && line.contains(why), "{line}");
    }
}

/// Runs `config check`, which must fail, and returns the printed lines without the directory of the files.
fn mistakes(place: &Place) -> Vec<String> {
    let output = run(place, &["config", "check"]);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    let prefix = format!("blkq: {}/", place.dir.join("c").display());
    errors.lines().map(|line| line.strip_prefix(&prefix).unwrap().to_owned()).collect()
}

#[test]
fn check_reports_all_that_attach_would_refuse() {
    let place = configured("config-attach", &[]);
    let write = |name: &str, text: &str| fs::write(place.dir.join("c").join(name), text).unwrap();
    let qcow2 = place.dir.join("a.qcow2").display().to_string();
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", &qcow2, "1M"]).status().unwrap();
    assert!(made.success());
    write(
        "a.toml",
        "image = \"/none/disk.img\"\nexport = \"nbd\"\nlisten = [\"tcp:0.0.0.0:10809\", \"unix:/none/s\"]\n\
         group = \"none-such\"\nregister-memory = true\ndepht = 3\n",
    );
    write("b.toml", &format!("image = \"{qcow2}\"\nexport = \"nbd\"\ntls-certificates = \"/none/tls\"\n"));
    write("c.toml", "depth = \"many\"\nweight = 3\nlisten = \"tcp:0.0.0.0:10809\"\ntsl = \"require\"\n");
    write("defaults", "depth = 3\n");
    let lines = mistakes(&place);
    let expected = [
        "defaults: line 1: depth: the only key of this file is export",
        "a.toml:1: image: ",
        "a.toml:3: listen: other machines can connect to 0.0.0.0:10809",
        "a.toml:3: listen: the directory /none does not exist",
        "a.toml:4: group: there is no group none-such",
        "a.toml:5: --register-memory is for vhost-user-blk",
        "a.toml:6: unknown key \"depht\"; a similar key is depth",
        "b.toml:1: image: ",
        "b.toml:3: tls-certificates: ",
        "c.toml:0: the key image is missing",
        "c.toml:1: ",
        "c.toml:4: unknown key \"tsl\"; a similar key is tls",
    ];
    let expected = expected.map(|text| text.replace("c.toml:0: ", "c.toml: "));
    assert_eq!(lines.len(), expected.len(), "{lines:#?}");
    for (line, text) in lines.iter().zip(&expected) {
        assert!(line.starts_with(text), "{line}, not {text}");
    }
    assert!(lines[7].contains("--format qcow2"), "{}", lines[7]);
    // A device in use causes no complaint.
    fs::remove_file(place.dir.join("c/defaults")).unwrap();
    for name in ["a.toml", "b.toml", "c.toml"] {
        fs::remove_file(place.dir.join("c").join(name)).unwrap();
    }
    write("d.toml", &format!("image = \"{qcow2}\"\nformat = \"qcow2\"\nexport = \"nbd\"\n"));
    let file = place.dir.join("c/d.toml").display().to_string();
    assert_eq!(printed(run(&place, &["config", "check"])), "");
    printed(run(&place, &["attach", "--config", &file]));
    assert_eq!(printed(run(&place, &["config", "check"])), "");
    place.done(&["detach", "d"]);
}

#[test]
fn a_default_export_is_used_where_none_is_asked_for() {
    let place = configured("config-default", &[("defaults", "export = [\"vhost-user-blk\"]\n")]);
    let image = place.image("disk.img", 1 << 20);
    // The place would add exports.
    let attach = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blkq"));
        command.args([&["attach", &image, "--name", "d"], words].concat());
        command.env("BLKQ_STATE_DIR", place.state()).env("BLKQ_CONFIG_DIR", place.dir.join("c"));
        let exports = printed(command.output().unwrap());
        place.done(&["detach", "d"]);
        exports
    };
    assert!(attach(&[]).starts_with("vhost-user:"));
    assert!(attach(&["--export", "nbd"]).starts_with("nbd+unix:"));
    let listen = format!("unix:{}", place.dir.join("n").display());
    assert!(attach(&["--listen", &listen]).starts_with("nbd+unix:"), "the default excludes the address");
    fs::write(place.dir.join("c/defaults"), "export = \"disk\"\n").unwrap();
    let line = run(&place, &["attach", &image, "--name", "d", "--listen", &listen]);
    let line = String::from_utf8(line.stderr).unwrap();
    assert!(line.contains("c/defaults:1: ") && line.contains("disk"), "{line}");
}

//! Access to the sockets of a device, and the words that name them.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use crate::place::*;

/// The number of a group that this process may assign to a file.
fn group() -> u32 {
    if rustix::process::geteuid().is_root() { 65_534 } else { rustix::process::getegid().as_raw() }
}

#[test]
fn a_socket_has_the_mode_and_the_group_that_were_asked_for() {
    let place = Place::new("access");
    fs::set_permissions(&place.dir, fs::Permissions::from_mode(0o755)).unwrap();
    let path = place.dir.join("c.sock");
    let (listen, group) = (format!("unix:{}", path.display()), group().to_string());
    let cases: [(&[&str], u32); 4] = [
        (&["--socket-mode", "660"], 0o660),
        (&["--socket-group", &group], 0o660),
        (&["--socket-group", &group, "--socket-mode", "0620"], 0o620),
        (&["--socket-group", &group, "--socket-mode", "600"], 0o600),
    ];
    for (options, mode) in cases {
        let uri = place.done(&[&["attach", "ram:1M", "--listen", &listen], options].concat());
        let found = fs::metadata(&path).unwrap();
        assert_eq!(found.mode() & 0o7777, mode, "{options:?}");
        if options[0] == "--socket-group" {
            assert_eq!(found.gid().to_string(), group, "{options:?}");
        }
        // The state directory is accessible only to its owner.
        assert_eq!(fs::metadata(place.state()).unwrap().mode() & 0o777, 0o700);
        drop(client(&uri));
        place.done(&["detach", "ram"]);
        assert!(!path.exists());
    }
}

#[test]
fn an_open_socket_and_a_closed_directory_are_warned_of() {
    let place = Place::new("open");
    let closed = place.dir.join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&place.dir, fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
    let warnings = |directory: &Path, options: &[&str]| {
        let listen = format!("unix:{}", directory.join("c.sock").display());
        let output = place.run(&[&["attach", "ram:1M", "--listen", &listen], options].concat());
        assert!(output.status.success(), "{output:?}");
        place.done(&["detach", "ram"]);
        String::from_utf8(output.stderr).unwrap()
    };
    let line = warnings(&place.dir, &["--socket-mode", "666"]);
    assert!(line.contains("any local user can connect") && line.lines().count() == 1, "{line}");
    let line = warnings(&closed, &["--socket-mode", "660"]);
    let reason = "/closed; change the mode of the directory";
    assert!(line.contains(reason) && line.lines().count() == 1, "{line}");
    assert_eq!(warnings(&closed, &["--socket-mode", "600"]), "");

    for options in [&["--socket-mode", "660"][..], &["--socket-group", "root", "--export", "nbd"]] {
        let line = place.refused(&[&["attach", "ram:1M"], options].concat());
        assert!(line.contains("--listen unix:PATH"), "{line}");
    }
    let listen = format!("unix:{}", place.dir.join("c.sock").display());
    let line = place.refused(&["attach", "ram:1M", "--listen", &listen, "--socket-group", "no-such-group"]);
    assert!(line.contains("there is no such group"), "{line}");
    assert!(place.files().is_empty() && !place.dir.join("c.sock").exists());
    let usage = place.run(&["attach", "ram:1M", "--listen", &listen, "--socket-mode", "rw"]);
    assert_eq!(usage.status.code(), Some(2));
}

/// Changes the state file of a device as its daemon could.
fn claim_exports(place: &Place, name: &str, exports: &[String]) {
    let path = place.state().join(format!("{name}.json"));
    let mut state: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    state["exports"] = exports.into();
    let set_mode = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    set_mode(0o600);
    fs::write(&path, state.to_string()).unwrap();
    set_mode(0o400);
}

#[test]
fn a_daemon_cannot_claim_the_address_of_another_device() {
    let place = Place::new("claimed");
    let guest = ["--export", "nbd", "--export", "vhost-user-blk"];
    let mut claimed = Vec::new();
    for name in ["good", "evil"] {
        let printed = place.done(&[&["attach", "null:1M", "--name", name], &guest[..]].concat());
        claimed.extend(printed.lines().map(str::to_owned));
    }
    let tcp =
        place.done(&["attach", "null:1M", "--name", "tcp", "--listen", "tcp:127.0.0.1:0", "--insecure"]);
    let tcp = tcp.lines().next().unwrap();
    claimed.push(tcp.to_owned());
    assert_eq!(place.json(&["show", "--json", tcp])["name"], "tcp");
    kill(place.pid("evil"));
    claim_exports(&place, "evil", &claimed);
    place.done(&["detach", "good", "tcp"]);
    for (number, address) in claimed.iter().enumerate() {
        let line = place.refused(&["set", address, "depth=9"]);
        let is_own = [2, 3].contains(&number);
        assert_eq!(line.contains("no such device"), !is_own, "{address}: {line}");
    }
}

#[test]
fn a_free_port_is_not_the_recorded_port_of_another_device() {
    let place = Place::new("ports");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let attach = |name, listen: &str| {
        place.done(&["attach", "null:1M", "--name", name, "--listen", listen, "--insecure"]);
    };
    attach("good", &format!("tcp:127.0.0.1:{port}"));
    attach("free", "tcp:127.0.0.1:0");
    attach("other-host", &format!("tcp:127.0.0.2:{port}"));
    let shown = place.json(&["show", "good", "--json"]);
    let address = shown["exports"][0].as_str().unwrap();
    for name in ["free", "other-host"] {
        kill(place.pid(name));
        claim_exports(&place, name, &[address.to_owned()]);
    }
    assert_eq!(place.json(&["show", "--json", address])["name"], "good");
    // Another device with this port could have had the address before.
    place.done(&["detach", "good"]);
    let line = place.refused(&["set", address, "depth=9"]);
    assert!(!line.contains("no such device") && line.contains("free"), "{line}");
}

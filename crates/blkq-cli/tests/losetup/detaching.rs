use blkq::testing::wait_until;
use std::fs;
use std::os::unix::fs::FileExt;
use std::process::Command;

use super::io;
use crate::place::*;

// Contract: detach
#[test]
fn autoclear_detaches_a_device_with_its_last_client() {
    let place = Place::new("l-clear");
    let image = place.image("disk.img", 1 << 20);
    let uri = place.done(&["attach", &image, "--autoclear"]).trim().to_owned();
    let pid = place.pid("disk.img");
    // A command that lists devices is not a client.
    drop(client(&uri));
    wait_until("it is disconnected", || {
        place.json(&["show", "disk.img", "--json"])["clients"].as_array().unwrap().is_empty()
    });
    assert_eq!(place.column("disk.img", "AUTOCLEAR"), "1");
    assert!(io(&uri, "write -P 3 0 64k"));
    wait_until("the device detaches", || has_exited(pid) && place.files().is_empty());
    let mut written = [0; 512];
    fs::File::open(&image).unwrap().read_exact_at(&mut written, 0).unwrap();
    assert_eq!(written, [3; 512]);
    // Switched on while a client is connected, autoclear waits for its exit; switched off again, the device remains.
    let uri = place.done(&["attach", &image]).trim().to_owned();
    let pid = place.pid("disk.img");
    let hold = format!(
        "import nbd, sys; h = nbd.NBD(); h.connect_uri({uri:?}); print(1, flush=True); sys.stdin.read()"
    );
    let mut client = Command::new("/usr/bin/python3")
        .args(["-c", &hold])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Read::read_exact(client.stdout.as_mut().unwrap(), &mut [0; 2]).unwrap();
    assert!(io(&uri, "read 0 4k"));
    place.done(&["set", "disk.img", "autoclear=on"]);
    assert!(place.losetup_refused(&["-d", "disk.img"]).contains("1 client is connected"));
    place.done(&["set", "disk.img", "autoclear=off"]);
    place.done(&["set", "disk.img", "autoclear=on"]);
    assert!(place.refused(&["set", "disk.img", "autoclear=maybe"]).contains("on or off"));
    drop(client.stdin.take());
    client.wait().unwrap();
    wait_until("the device detaches", || has_exited(pid) && place.files().is_empty());
    // Without autoclear a device outlives its clients.
    let uri = place.done(&["attach", &image]).trim().to_owned();
    assert!(io(&uri, "read -P 3 0 64k"));
    place.done(&["show", "disk.img"]);
}

// Contract: detach
#[test]
fn detach_is_not_lazy_and_continues_after_a_refusal() {
    let place = Place::new("l-detach");
    let names: Vec<String> =
        ["a", "b", "c"].iter().map(|name| place.set_up(&[&place.image(name, 1 << 20)])).collect();
    let connected = client(&place.uri("b"));
    wait_until("the client is counted", || {
        !place.json(&["show", "b", "--json"])["clients"].as_array().unwrap().is_empty()
    });
    let output = place.run(&["losetup", "-v", "-d", "a", "b", "nothing", "c"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), text.lines().count()), (Some(1), 4), "{text}");
    assert!(text.starts_with("a: detached\nblkq: losetup: detach b: 1 client is connected"), "{text}");
    assert!(text.ends_with("c: detached\n"), "{text}");
    assert_eq!(place.losetup(&["-n", "-O", "REF"]), "b\n");
    assert_eq!(place.run(&["losetup", "-D"]).status.code(), Some(1));
    drop(connected);
    wait_until("the client has disconnected", || place.run(&["losetup", "-D"]).status.success());
    assert!(place.files().is_empty());
    assert_eq!(names.len(), 3);
}

//! Kills commands at each of their steps. A daemon must serve the device afterwards, or a new daemon must be able to.

use crate::place::client::Client;
use crate::place::killing::{Victim, kill_at};
use crate::place::{Place, kill};
use blkq::testing::wait_until;
use serde_json::json;

/// Attaches a disk of a virtual machine and changes its settings.
fn attach(place: &Place) {
    let image = place.image("image", 1 << 20);
    place.done(&["attach", "--name", "d", &image, "--export", "vhost-user-blk"]);
    place.done(&["set", "d", "hang-warning=7"]);
}

/// Waits until a daemon serves the device, which `recover` starts if no daemon is running.
fn check_served(place: &Place, at: usize) {
    let settles = [
        "another process has locked the device",
        "of this device is running",
        "no such device",
        "does not answer",
    ];
    wait_until(&format!("it is served after the kill at step {at}"), || {
        let output = place.run(&["recover", "d"]);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let done = output.status.success() || errors.contains("the daemon is running");
        assert!(done || settles.iter().any(|why| errors.contains(why)), "step {at}: {errors}");
        done
    });
    let info = place.json(&["show", "d", "--json"]);
    assert_eq!(info["settings"]["hang-warning"], json!(7), "step {at}: {info}");
}

// Contract: live-changes
#[test]
fn an_upgrade_is_killed_at_any_step() {
    let place = Place::new("kill-upgrade");
    attach(&place);
    for victim in [Victim::Command, Victim::Owner, Victim::Terminal] {
        let mut at = 0;
        while kill_at(place.command(&["upgrade", "d"]), victim, at) {
            if victim == Victim::Terminal {
                wait_until("the owner of the hand-over ends it", || {
                    place.run(&["show", "d"]).status.success()
                });
            }
            check_served(&place, at);
            at += 1;
        }
        check_served(&place, at);
        assert!(at > 3, "{victim:?}: {at} steps");
    }
    place.done(&["detach", "d"]);
    assert_eq!(place.files(), <[String; 0]>::default());
}

#[test]
fn a_recovery_is_killed_at_any_step() {
    let place = Place::new("kill-recover");
    attach(&place);
    for at in 0.. {
        kill(place.pid("d"));
        let killed = kill_at(place.command(&["recover", "d"]), Victim::Command, at);
        check_served(&place, at);
        if !killed {
            assert!(at > 3, "{at} steps");
            break;
        }
    }
    place.done(&["detach", "d"]);
    assert_eq!(place.files(), <[String; 0]>::default());
}

#[test]
fn an_attach_is_killed_at_any_step() {
    let place = Place::new("kill-attach");
    let image = place.image("image", 1 << 20);
    for at in 0.. {
        let attach = place.command(&["attach", "--name", "d", &image, "--export", "vhost-user-blk"]);
        let killed = kill_at(attach, Victim::Command, at);
        // No state may refer to the device.
        wait_until("it is served, or nothing is left", || {
            place.files().is_empty() || place.run(&["show", "d"]).status.success()
        });
        if !place.files().is_empty() {
            wait_until("it is detached", || {
                place.run(&["detach", "d"]);
                place.files().is_empty()
            });
        }
        if !killed {
            assert!(at > 3, "{at} steps");
            break;
        }
    }
}

fn connect(place: &Place) -> Client {
    let info = place.json(&["show", "d", "--json"]);
    let mut exports = info["exports"].as_array().unwrap().iter().filter_map(|export| export.as_str());
    Client::new(exports.find(|export| export.starts_with("nbd")).unwrap(), "d")
}

/// Writes a block and flushes.
fn write(place: &Place, block: u64, byte: u8) {
    let mut client = connect(place);
    client.write(block, byte);
    client.flush();
}

/// Kills the daemon, starts a new one, and checks that the new daemon serves the same image.
fn check_next(place: &Place, at: usize, byte: u8) {
    // The daemon may continue with the operation that the command began.
    wait_until("no commit is under way", || place.json(&["show", "d", "--json"])["commit"].is_null());
    write(place, 2, byte);
    kill(place.pid("d"));
    place.done(&["recover", "d"]);
    let mut client = connect(place);
    assert_eq!([0, 1, 2].map(|block| client.read(block)), [1, 2, byte], "step {at}");
}

fn attach_with_data(place: &Place) -> String {
    let image = place.image("image", 1 << 20);
    place.done(&["attach", "--name", "d", &image, "--export", "vhost-user-blk", "--export", "nbd"]);
    write(place, 0, 1);
    write(place, 1, 2);
    image
}

// Contract: live-changes
#[test]
fn a_snapshot_is_killed_at_any_step() {
    let place = Place::new("kill-snapshot");
    attach_with_data(&place);
    for at in 0.. {
        let new = place.dir.join(format!("{at}.qcow2"));
        let snapshot = place.command(&["snapshot", "d", "--to", new.to_str().unwrap()]);
        let killed = kill_at(snapshot, Victim::Command, at);
        check_next(&place, at, at as u8);
        if !killed {
            assert!(at > 3, "{at} steps");
            break;
        }
        // Commits keep the chain short.
        while place.run(&["commit", "d"]).status.success() {}
    }
    place.done(&["detach", "d"]);
}

// Contract: live-changes
#[test]
fn a_commit_is_killed_at_any_step() {
    let place = Place::new("kill-commit");
    let image = attach_with_data(&place);
    for at in 0.. {
        if place.json(&["show", "d", "--json"])["image"] == image.as_str() {
            let new = place.dir.join(format!("{at}.qcow2"));
            place.done(&["snapshot", "d", "--to", new.to_str().unwrap()]);
        }
        write(&place, 1, 2);
        let killed = kill_at(place.command(&["commit", "d"]), Victim::Command, at);
        check_next(&place, at, at as u8);
        if !killed {
            assert!(at > 3, "{at} steps");
            break;
        }
    }
    place.done(&["detach", "d"]);
}

//! A device in use shrinks only with --force.

use blkq::testing::wait_until;
use std::fs;

use crate::place::*;

// Contract: live-changes
#[test]
fn shrinking_spares_clients_unless_forced() {
    let place = Place::new("shrink");
    let image = place.image("image", 8 << 20);
    let uri = place.done(&["attach", "--name", "d", &image]);
    let shown = |field: &str| place.json(&["show", "d", "--json"])[field].clone();
    let wait_for_clients = |count: usize| {
        wait_until("the clients are counted", || shown("clients").as_array().unwrap().len() == count);
    };
    let connected = client(&uri);
    wait_for_clients(1);
    let line = place.refused(&["resize", "d", "4M"]);
    for part in ["resize d: shrink from 8M to 4M: 1 client is connected", "or use --force"] {
        assert!(line.contains(part), "{line}");
    }
    // The refused resize has changed nothing.
    assert_eq!((shown("size"), fs::metadata(&image).unwrap().len()), ((8 << 20).into(), 8 << 20));
    drop(client(&uri));
    assert_eq!(place.done(&["resize", "d", "8M"]), "8M\n");
    assert_eq!(place.done(&["resize", "d", "16M"]), "16M\n");
    // Also with the size of the image.
    fs::File::options().write(true).open(&image).unwrap().set_len(2 << 20).unwrap();
    wait_for_clients(1);
    assert!(place.refused(&["resize", "d"]).contains("shrink from 16M to 2M: 1 client is connected"));
    assert!(place.refused(&["losetup", "-c", "d"]).contains("1 client is connected"));
    assert_eq!(shown("size"), 16 << 20);
    assert_eq!(place.done(&["resize", "d", "--force"]), "2M\n");
    assert_eq!(place.done(&["resize", "d", "1M", "--force"]), "1M\n");
    assert_eq!(place.done(&["resize", "d", "+3M"]), "4M\n");
    assert_eq!(place.done(&["resize", "d", "+0"]), "4M\n");
    assert!(place.refused(&["resize", "d", "+7E"]).contains("resize d: "));
    assert_eq!(place.done(&["resize", "d", "1M", "--force"]), "1M\n");
    // Without clients, shrinking needs no --force, and clients can connect afterwards.
    drop(connected);
    wait_for_clients(0);
    assert_eq!(place.done(&["resize", "d", "512K"]), "512K\n");
    let mut client = session(&uri, "");
    request(&mut client, 0, 1, (512 << 10) - 512, 512);
    assert_eq!(reply(&mut client, 512), (0, 1));
    drop(client);
    place.done(&["detach", "d", "--force"]);
}

//! I/O limits of attached devices.

use crate::place::{Place, reply, request, session};
use blkq::testing::wait_until;

#[test]
fn requests_that_wait_for_a_limit_are_logged_as_no_hangs() {
    let place = Place::new("limit-hang");
    // Some requests wait for the limit, and others for a tag.
    let words = [
        "ram:1M",
        "--name",
        "a",
        "--export",
        "nbd",
        "--depth",
        "4",
        "--hang-warning",
        "0.2",
        "--fault",
        "none",
    ];
    let uri = place.done(&[&["attach"], &words[..], &["--limit", "iops=2"]].concat());
    let mut client = session(&uri, "a");
    (0..12).for_each(|block| request(&mut client, 0, block, block * 8192, 512));
    // Four requests at two per second take 1.5 s, longer than the hang warning.
    (0..4).for_each(|_| assert_eq!(reply(&mut client, 512).0, 0));
    let log = || std::fs::read_to_string(place.state().join("a.log")).unwrap_or_default();
    assert!(place.json(&["stat", "a", "--json"])["throttle"]["now"].as_u64() > Some(0));
    assert!(!log().contains("hang: "), "{}", log());
    place.done(&["set", "a", "limit=none"]);
    (0..8).for_each(|_| assert_eq!(reply(&mut client, 512).0, 0));

    // A request that the driver has received is logged as a hang, also while others wait for the limit.
    place.done(&["set", "a", "limit=iops=2", "fault=delay=1s"]);
    (0..3).for_each(|block| request(&mut client, 0, block, block * 8192, 512));
    wait_until("the log has it", || log().contains("hang: "));
    place.done(&["set", "a", "limit=none", "fault=none"]);
    (0..3).for_each(|_| assert_eq!(reply(&mut client, 512).0, 0));
    drop(client);
    place.done(&["detach", "a"]);
}

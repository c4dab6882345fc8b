//! Usage errors and refusals: exit codes and messages.

use crate::place::Place;

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
    // A refusal names the device once.
    for words in [&["commit", "nosuch"][..], &["snapshot", "nosuch", "--to", "new"]] {
        assert_eq!(place.refused(words).matches("nosuch").count(), 1, "{words:?}");
    }
    let unwritable = place.refused(&["attach", "/proc/new.img", "--create", "1M"]);
    assert_eq!(unwritable.matches("/proc/new.img").count(), 1, "{unwritable}");
    // A usage error shows the usage of the subcommand.
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

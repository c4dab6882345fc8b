//! Adding a dirty bitmap stores its name and allocates its space in the image immediately.
// Contract: bitmaps

use std::fs;

use crate::place::qemu::*;
use crate::place::*;

/// Attaches `image` as device `q`. Returns the URI and the warnings.
fn attach(place: &Place, image: &str, format: &str) -> (String, String) {
    let output = place.run(&["attach", image, "--format", format, "--export", "nbd", "--name", "q"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (text(output.stdout).trim().to_owned(), text(output.stderr))
}

/// Creates an image of `size`; a qcow2 image has a bitmap that QEMU added.
fn image(place: &Place, format: &str, size: &str) -> String {
    let image = place.dir.join(format!("d.{format}")).to_str().unwrap().to_owned();
    run("qemu-img", &["create", "-q", "-f", format, &image, size]);
    if format == "qcow2" {
        run("qemu-img", &["bitmap", "--add", &image, "b0"]);
    }
    image
}

fn states(place: &Place) -> Vec<(String, String)> {
    let list = place.json(&["bitmap", "list", "--json", "q"]);
    let field = |one: &serde_json::Value, name: &str| one[name].as_str().unwrap().to_owned();
    list.as_array().unwrap().iter().map(|one| (field(one, "name"), field(one, "state"))).collect()
}

/// Kills the daemon after `commands`. The image must then contain the bitmaps `expected`, all inconsistent.
fn kill_after(format: &str, commands: &[&[&str]], expected: &[&str]) {
    let place = Place::new(&format!("kept-kill-{format}"));
    let image = image(&place, format, "8M");
    let (uri, warned) = attach(&place, &image, format);
    assert_eq!(warned, "");
    for command in commands {
        place.done(command);
        qemu_io("raw", &uri, &["write -P 1 1M 64k", "flush"]);
    }
    kill(place.pid("q"));
    let (_, warned) = attach(&place, &image, format);
    let found = states(&place);
    assert_eq!(found.iter().map(|(name, _)| &name[..]).collect::<Vec<_>>(), expected, "{commands:?}");
    for (name, state) in &found {
        assert!(state == "inconsistent" && warned.contains(&format!("bitmap {name} ")), "{warned}");
    }
    for name in expected {
        place.done(&["bitmap", "remove", "q", name]);
    }
    place.done(&["bitmap", "add", "q", "after"]);
    place.done(&["detach", "q"]);
    if format == "qcow2" {
        // Removing the bitmaps has freed their space.
        run("qemu-img", &["check", "-f", "qcow2", &image]);
        assert_eq!(in_qemu_nbd(&image, "after"), []);
    }
}

#[test]
fn a_kill_leaves_each_bitmap_inconsistent() {
    let add: &[&str] = &["bitmap", "add", "q", "b1"];
    let again: &[&str] = &["bitmap", "add", "q", "b0", "--granularity", "4K"];
    let (clear, remove) = (&["bitmap", "clear", "q", "b1"][..], &["bitmap", "remove", "q", "b1"][..]);
    let resize: &[&str] = &["resize", "q", "64M"];
    kill_after("raw", &[add], &["b1"]);
    kill_after("raw", &[again, add, clear, resize], &["b0", "b1"]);
    kill_after("raw", &[add, again, remove], &["b0"]);
    kill_after("qcow2", &[], &["b0"]);
    kill_after("qcow2", &[add, clear, resize], &["b0", "b1"]);
    kill_after("qcow2", &[&["bitmap", "remove", "q", "b0"], again, add, remove], &["b0"]);
    kill_after("qcow2", &[&["bitmap", "remove", "q", "b0"]], &[]);
}

#[test]
fn a_kill_after_a_snapshot_leaves_names_in_both_images() {
    for format in ["raw", "qcow2"] {
        let place = Place::new(&format!("kept-snapshot-{format}"));
        let (image, top) = (image(&place, format, "8M"), place.dir.join("top").to_str().unwrap().to_owned());
        let (uri, _) = attach(&place, &image, format);
        place.done(&["bitmap", "add", "q", "b1"]);
        qemu_io("raw", &uri, &["write -P 1 1M 64k"]);
        place.done(&["snapshot", "q", "--to", &top]);
        kill(place.pid("q"));
        attach(&place, &top, "qcow2");
        assert_eq!(state(&place, "q", "b1"), "inconsistent");
        place.done(&["detach", "q"]);
        attach(&place, &image, format);
        assert_eq!(state(&place, "q", "b1"), "recording");
        place.done(&["detach", "q"]);
    }
}

#[test]
fn bitmaps_are_merged_and_disabled_as_qemu_does() {
    for format in ["raw", "qcow2"] {
        let place = Place::new(&format!("kept-merge-{format}"));
        let image = image(&place, format, "64M");
        let (uri, _) = attach(&place, &image, format);
        place.done(&["bitmap", "add", "q", "all"]);
        place.done(&["bitmap", "add", "q", "fine", "--granularity", "4K"]);
        place.done(&["bitmap", "add", "q", "more"]);
        place.done(&["bitmap", "disable", "q", "all"]);
        qemu_io("raw", &uri, &["write -P 1 1M 4k"]);
        assert_eq!((dirty(&[&uri], "all"), state(&place, "q", "all")), (vec![], "disabled".to_owned()));
        place.done(&["bitmap", "disable", "q", "fine"]);
        qemu_io("raw", &uri, &["write -P 1 2M 4k"]);
        assert_eq!(dirty(&[&uri], "fine"), [(K << 10, 4 * K)]);
        place.done(&["bitmap", "merge", "q", "fine", "more", "all"]);
        let merged = [(K << 10, 64 * K), (2 << 20, 64 * K)];
        assert_eq!(dirty(&[&uri], "all"), merged);
        place.done(&["bitmap", "enable", "q", "fine"]);
        place.done(&["bitmap", "clear", "q", "all"]);
        place.done(&["bitmap", "merge", "q", "more", "all"]);
        qemu_io("raw", &uri, &["write -P 1 3M 4k"]);
        for (words, why) in [
            (&["merge", "q", "fine", "none", "all"][..], "no bitmap none"),
            (&["merge", "q", "all", "none"], "no bitmap none"),
            (&["enable", "q", "none"], "no bitmap none"),
        ] {
            let refused = place.refused(&[&["bitmap"], words].concat());
            assert!(refused.contains(why), "{refused}");
        }
        place.done(&["detach", "q"]);
        let (uri, _) = attach(&place, &image, format);
        assert_eq!(state(&place, "q", "all"), "disabled");
        assert_eq!(
            (dirty(&[&uri], "all"), state(&place, "q", "fine")),
            (merged.to_vec(), "recording".into())
        );
        assert_eq!(dirty(&[&uri], "fine"), [(K << 10, 4 * K), (3 << 20, 4 * K)]);
        if format == "qcow2" {
            place.done(&["bitmap", "merge", "q", "fine", "b0"]);
            let expected = dirty(&[&uri], "b0");
            place.done(&["detach", "q"]);
            run("qemu-img", &["check", "-f", "qcow2", &image]);
            run("qemu-img", &["bitmap", "--merge", "fine", &image, "all"]);
            assert_eq!(in_qemu_nbd(&image, "all"), [&merged[..], &[(3 << 20, 64 * K)]].concat());
            assert_eq!(in_qemu_nbd(&image, "b0"), expected);
            let info = run("qemu-img", &["info", "--output=json", &image]);
            let info: serde_json::Value = serde_json::from_str(&info).unwrap();
            let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().unwrap().clone();
            let flags = |name: &str| bitmaps.iter().find(|one| one["name"] == name).unwrap()["flags"].clone();
            assert_eq!((flags("all"), flags("fine")), (serde_json::json!([]), serde_json::json!(["auto"])));
        } else {
            kill(place.pid("q"));
            attach(&place, &image, format);
            for words in [&["enable", "q", "fine"][..], &["merge", "q", "fine", "all"]] {
                let refused = place.refused(&[&["bitmap"], words].concat());
                assert!(refused.contains("is inconsistent; remove it"), "{refused}");
            }
            place.done(&["detach", "q"]);
        }
    }
}

/// Mounts a file system of `bytes`, which only this test uses.
struct Small(Place);

impl Small {
    fn new(name: &str, bytes: u64) -> Small {
        let place = Place::new(name);
        let options = format!("size={bytes}");
        run("mount", &["-t", "tmpfs", "-o", &options, "blkq-test", place.dir.to_str().unwrap()]);
        Small(place)
    }

    fn fill(&self) {
        let file = fs::File::create(self.0.dir.join("rest")).unwrap();
        while std::io::Write::write(&mut &file, &[1; 4096]).is_ok() {}
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = self.0.run(&["detach", "--all", "--force"]);
        run("umount", &["-l", self.0.dir.to_str().unwrap()]);
    }
}

#[test]
fn a_full_file_system_refuses_a_bitmap_and_keeps_the_rest() {
    for format in ["raw", "qcow2"] {
        let small = Small::new(&format!("kept-full-{format}"), 32 << 20);
        let place = &small.0;
        let image = image(place, format, "32G");
        let (uri, _) = attach(place, &image, format);
        qemu_io("raw", &uri, &["write -P 1 0 4M"]);
        // The bitmap needs 8 MiB.
        place.done(&["bitmap", "add", "q", "room", "--granularity", "512"]);
        small.fill();
        for words in [&["bitmap", "add", "q", "more", "--granularity", "512"][..], &["resize", "q", "64G"]] {
            if words[0] == "resize" && format == "raw" {
                fs::File::options().write(true).open(&image).unwrap().set_len(64 << 30).unwrap();
            }
            let refused = place.refused(words);
            assert!(refused.contains("No space left"), "{refused}");
        }
        assert_eq!(place.json(&["show", "--json", "q"])["size"].as_u64(), Some(32 << 30));
        if format == "raw" {
            fs::File::options().write(true).open(&image).unwrap().set_len(32 << 30).unwrap();
        }
        qemu_io("raw", &uri, &["write -P 2 1M 4k"]);
        assert_eq!(states(place).last(), Some(&("room".to_owned(), "recording".to_owned())));
        place.done(&["detach", "q"]);
        if format == "qcow2" {
            run("qemu-img", &["check", "-f", "qcow2", &image]);
        }
        let (uri, warned) = attach(place, &image, format);
        assert!(!warned.contains("bitmap"), "{warned}");
        assert_eq!(dirty(&[&uri], "room"), [(K << 10, 4 * K)]);
        place.done(&["detach", "q"]);
    }
}

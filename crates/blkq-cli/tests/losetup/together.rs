//! Simultaneous attaches, and overlapping devices.

use blkq::testing::wait_until;
use std::fs;

use super::stdout;
use crate::place::*;

// Contract: exclusive
#[test]
fn attaching_at_the_same_moment_never_collides() {
    let place = Place::new("l-race");
    let images: Vec<String> =
        (0..20).map(|n| place.image(&format!("{n}/disk.img").replace('/', "-"), 1 << 20)).collect();
    // Twenty images with the same file name in twenty directories.
    let same_named: Vec<String> = (0..20)
        .map(|n| {
            fs::create_dir(place.dir.join(n.to_string())).unwrap();
            place.image(&format!("{n}/same.img"), 1 << 20)
        })
        .collect();
    for paths in [&images, &same_named] {
        let lines: Vec<Vec<&str>> = paths.iter().map(|path| vec!["losetup", "-f", "--show", path]).collect();
        let outputs = place.at_once(&lines);
        let mut names: Vec<String> = outputs.iter().map(stdout).collect();
        for output in &outputs {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 20);
        for (path, output) in paths.iter().zip(&outputs) {
            assert_eq!(
                place.column(stdout(output).trim(), "BACK-FILE"),
                *path,
                "each device must have its own image"
            );
        }
        place.losetup(&["-D"]);
        assert!(place.files().is_empty());
    }
    // One image: one attach succeeds, the others are refused.
    let image = &images[0];
    let outputs = place.at_once(&vec![vec!["losetup", "-f", "--show", image]; 20]);
    let (done, refused): (Vec<_>, Vec<_>) = outputs.iter().partition(|output| output.status.success());
    assert_eq!((done.len(), refused.len()), (1, 19));
    for output in refused {
        assert!(String::from_utf8_lossy(&output.stderr).contains("is in use"));
    }
    place.losetup(&["-D"]);
    // One image and --nooverlap: all commands return the same device. That includes read-only attaches, which
    // no lock excludes, and attaches by others without --nooverlap.
    for access in ["--direct-io=off", "-r"] {
        let outputs = place.at_once(&vec![vec!["losetup", "-L", access, "-f", "--show", image]; 20]);
        assert!(
            outputs
                .iter()
                .all(|output| output.status.success() && stdout(output).ends_with("/0-disk.img.nbd\n")),
            "{outputs:?}"
        );
        assert_eq!(place.losetup(&["-a"]).lines().count(), 1);
        place.losetup(&["-D"]);
    }
    let mixed = [vec!["losetup", "-f", "--show", image], vec!["losetup", "-L", "-f", "--show", image]];
    let lines: Vec<Vec<&str>> = (0..20).map(|n| mixed[n % 2].clone()).collect();
    let outputs = place.at_once(&lines);
    let device = place.losetup(&["-n", "-O", "NAME"]);
    for (line, output) in lines.iter().zip(&outputs) {
        let refused = !line.contains(&"-L") && output.status.code() == Some(1);
        assert!(refused || stdout(output) == device, "{device}: {output:?}");
    }
    place.losetup(&["-D"]);
    // With --shared each attach gets a device with its own name.
    let outputs = place.at_once(&vec![vec!["attach", image, "--shared"]; 20]);
    assert!(outputs.iter().all(|output| output.status.success()));
    assert_eq!(place.losetup(&["-a"]).lines().count(), 20);
}

/// blktests loop/006: devices are attached and detached on the same file without spurious failures.
#[test]
fn nooverlap_holds_while_the_device_is_detached_repeatedly() {
    let place = Place::new("l-storm");
    let image = place.image("disk.img", 1 << 20);
    for access in ["--direct-io=off", "-r"] {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..8 {
                        let device = place.set_up(&["-L", access, &image]);
                        // Another process may have detached the device.
                        let output = place.run(&["losetup", "-d", &device]);
                        let text = String::from_utf8_lossy(&output.stderr).into_owned();
                        let detached = ["no such device", "stopping", "sent no answer"];
                        assert!(
                            output.status.success() || detached.iter().any(|why| text.contains(why)),
                            "{text}"
                        );
                    }
                });
            }
        });
    }
    wait_until("all are detached", || place.files().is_empty());
}

// Contract: exclusive
#[test]
fn nooverlap_reuses_what_is_the_same_and_refuses_what_overlaps() {
    let place = Place::new("l-overlap");
    let image = place.image("disk.img", 4 << 20);
    let device = place.set_up(&["-L", "-o", "1M", "--sizelimit", "1M", &image]);
    assert_eq!(device, place.uri("disk.img"));
    assert_eq!(place.set_up(&["-L", "-o", "1M", "--sizelimit", "1M", &image]), device);
    for words in [&[][..], &["-o", "1M"], &["-o", "1536K", "--sizelimit", "1M"]] {
        let line = place.losetup_refused(&[&["-L", "-f"], words, &[&image]].concat());
        assert!(line.contains("disk.img already serves these bytes in part (offset 1048576"), "{line}");
    }
    let beside = place.set_up(&["-L", "-o", "2M", &image]);
    assert_ne!(beside, device);
    place.losetup(&["-D"]);
    // As in losetup(8), a writer does not get a read-only device.
    let device = place.set_up(&["-L", "-r", &image]);
    assert!(place.losetup_refused(&["-L", "-f", &image]).contains("these bytes read-only"));
    assert_eq!(place.set_up(&["-L", "-r", &image]), device);
    assert!(place.losetup_refused(&["-L", "-r", "-b", "4096", "-f", &image]).contains("sectors of 512"));
    // It stays for the users that use it.
    place.done(&["set", &device, "autoclear=on"]);
    assert_eq!(place.column(&device, "AUTOCLEAR"), "1");
    assert_eq!(place.done(&["attach", "--nooverlap", "--read-only", &image]), format!("{device}\n"));
    assert_eq!(place.column(&device, "AUTOCLEAR"), "0");
    assert!(place.refused(&["attach", "--nooverlap", "ram:1M"]).contains("is for image files"));
    assert!(place.refused(&["attach", "--nooverlap", "/nonexistent"]).contains("cannot find the image"));
}

// Contract: exclusive
#[test]
fn nooverlap_returns_no_device_with_other_content() {
    let place = Place::new("l-same");
    let image = place.image("disk.img", 1 << 20);
    let qcow2 = place.dir.join("t.qcow2").to_str().unwrap().to_owned();
    qemu::run("qemu-img", &["create", "-q", "-f", "qcow2", &qcow2, "1M"]);
    let refused = |image: &str, options: &[&str], why: &str| {
        let line = place.refused(&[&["attach", "--nooverlap", image], options].concat());
        assert!(line.contains("already serves these bytes") && line.contains(why), "{options:?}: {line}");
    };
    let reused = |image: &str, options: &[&str]| {
        assert!(place.run(&[&["attach", "--nooverlap", image], options].concat()).status.success());
        assert_eq!(place.json(&["list", "--json"]).as_array().unwrap().len(), 1);
    };
    let attach = |image: &str, options: &[&str]| {
        assert!(place.run(&[&["attach", image], options].concat()).status.success());
    };
    let detach = || drop(place.done(&["detach", "--all"]));

    attach(&image, &["--format", "raw"]);
    refused(&image, &["--format", "qcow2"], "use --format raw");
    refused(&image, &["--fault", "delay=1ms"], "faults");
    reused(&image, &[]);
    reused(&image, &["--format", "raw"]);
    detach();
    attach(&qcow2, &["--format", "qcow2"]);
    refused(&qcow2, &["--format", "raw"], "use --format qcow2");
    refused(&qcow2, &[], "use --format qcow2");
    reused(&qcow2, &["--format", "qcow2"]);
    detach();
    attach(&image, &["--unsafe-flush-ignore"]);
    refused(&image, &[], "flush");
    detach();
    attach(&image, &["--fault", "none"]);
    reused(&image, &[]);
    place.done(&["set", "disk.img", "fault=delay=1ms"]);
    refused(&image, &[], "delay=1ms");
    refused(&image, &["--format", "qcow2"], "in the format raw");
    reused(&image, &["--fault", "delay=1ms"]);
    detach();
    attach(&image, &["--shared"]);
    refused(&image, &[], "--shared");
}
